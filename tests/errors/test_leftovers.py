"""Kernels that fail leave no file behind, neither in the cache nor among the dumps."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import pytest
from refusals import array, make
from tests import python_processes

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import CompilationError, InvalidValueError
from pallasite.extensions import Pass
from pallasite.hookspecs import hookimpl
from pallasite.runtime import compiler
from pallasite.runtime.store import CacheWarning, SealedStore
from pallasite.stores import KERNELS


@pytest.fixture(autouse=True)
def cache(tmp_path):
    """A cache of its own, in which one kernel is already."""
    folder = tmp_path / "cache"
    config.update("cache_dir", folder)
    # Plugins that the test session registered itself would keep kernels off the disk.
    names = [plugin.name for plugin in plugins.plugins() if plugin.distribution == "in process"]
    config.update("disabled_plugins", names)
    compiler.clear_memory()

    @make()
    def good(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    pallasite.compile(good, array(128, 64), target="sm_90")
    assert len(files(folder)) == 1
    return folder


def files(folder: pathlib.Path) -> dict[str, bytes]:
    """All files below a folder, with their content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".hash"  # Those of code are no kernels.
    }


def bad_kernel():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref[...], plgpu.Layout.WG_STRIDED((128, 64), 3))

    return kernel


class Failing:
    """A plugin with a pass that fails."""

    def __init__(self, stage):
        self.stage = stage

    def fail(self, value, context):
        raise RuntimeError("no")

    @hookimpl
    def pallasite_passes(self):
        return [Pass(name="fails", stage=self.stage, run=self.fail, description="fails")]


def test_error_in_lowering(cache):
    before = files(cache)
    with pytest.raises(InvalidValueError):
        pallasite.compile(bad_kernel(), array(128, 64), target="sm_90")
    assert files(cache) == before


@pytest.mark.parametrize("stage", ["jaxpr", "mlir", "llvm", "ptx"])
def test_error_in_a_pass(cache, stage):
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    before = files(cache)
    plugins.register(Failing(stage), name="failing")
    try:
        with pytest.raises(CompilationError) as caught:
            pallasite.compile(kernel, array(128, 64), target="sm_90")
        assert str(caught.value) == (
            f"{kernel.location}: {stage} pass 'fails' of plugin 'failing' (in process) failed:"
            " RuntimeError: no\n"
            "  try: PALLASITE_DISABLE_PASSES=fails or PALLASITE_DISABLE_PLUGINS=failing compiles"
            " without it"
        )
    finally:
        plugins.unregister("failing")
    assert files(cache) == before


def test_cache_that_cannot_be_written(cache, monkeypatch):
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 2

    def full(*arguments):
        raise OSError("no space left")

    before = files(cache)
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="no space left"):
        pallasite.compile(kernel, array(128, 64), target="sm_90")
    assert files(cache) == before


def test_interrupted_dump(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    config.update("dump", tmp_path / "dump")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pallasite.compile(bad_kernel(), array(128, 64), target="sm_90")
    assert files(tmp_path / "dump") == {}


def test_dumps_of_a_kernel_that_fails_are_whole(tmp_path):
    config.update("dump", tmp_path / "dump")
    with pytest.raises(InvalidValueError):
        pallasite.compile(bad_kernel(), array(128, 64), target="sm_90")
    dumped = files(tmp_path / "dump")
    assert sorted(dumped) == ["kernel.00.jaxpr.txt"]
    assert all(content.strip().endswith(b"}") for content in dumped.values())


KILLED = """
import os, signal, sys, pathlib
from pallasite.runtime.store import SealedStore
from pallasite.stores import KERNELS

os.replace = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
SealedStore(pathlib.Path(sys.argv[1]), KERNELS).put(sys.argv[2], b"content")
"""


def test_killed_process(cache):
    key = "ab" * 32
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = python_processes.run(["-c", KILLED, cache, key], env=environment)
    assert killed.returncode == -signal.SIGKILL
    store = SealedStore(cache, KERNELS)
    assert store.get(key) is None
    assert len(store.files()) == 1
    # What the process had begun to write goes once it is certain that nobody writes it any more.
    (started,) = cache.rglob(".tmp-*")
    os.utime(started, (time.time() - 7200,) * 2)
    store.put(key, b"content")
    assert store.get(key) == b"content"
    assert not list(cache.rglob(".tmp-*"))
