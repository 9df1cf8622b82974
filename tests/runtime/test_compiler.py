"""Compilation through the caches, and ``pallasite.compile``."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from fake_kernels import SM_90A, add_kernel
from sample_kernels import CASES, by_pallas_call, scaled, shape, specs
from tests import python_processes

import pallasite
from pallasite import Target, config, garbage, plugins
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError
from pallasite.launch import DeviceMesh
from pallasite.runtime import (
    CacheInfo,
    CacheWarning,
    cache_info,
    clear_memory,
    compile_kernel,
    compiler,
)
from pallasite_std.caching import environment


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    clear_memory()
    # Plugins that the test session registered itself would keep kernels off the disk.
    names = [plugin.name for plugin in plugins.plugins() if plugin.distribution == "in process"]
    options = {"cache": True, "cache_dir": tmp_path / "cache", "target": "sm_90"}
    with config.scoped(disabled_plugins=names, **options):
        yield
    clear_memory()


@pytest.fixture
def fake(monkeypatch):
    """Replaces compilation; the list of requests that were compiled."""
    requests = []

    def compile_(request):
        requests.append(request)
        compiler._count("compiles")
        return dataclasses.replace(add_kernel(), name=request.spec.name)

    monkeypatch.setattr(compiler, "_compile", compile_)
    return requests


def spec_of(*args, **kwargs):
    (spec,) = specs(scaled(*args, **kwargs), shape(128))
    return spec


def entries(tmp_path):
    return sorted((tmp_path / "cache").glob("??/*"))


def test_by_identity_by_content_and_from_disk(fake, tmp_path):
    spec = spec_of()
    first = compile_kernel(spec)
    assert compile_kernel(spec) is first
    assert cache_info() == CacheInfo(memory_hits=1, compiles=1)
    assert compile_kernel(spec_of()) is first
    assert cache_info() == CacheInfo(memory_hits=2, compiles=1)
    assert len(entries(tmp_path)) == 1
    clear_memory()
    assert compile_kernel(spec_of()) == first
    assert cache_info() == CacheInfo(disk_hits=1)
    assert len(fake) == 1


def test_what_is_compiled_separately(fake):
    spec = spec_of()
    compile_kernel(spec)
    compile_kernel(spec_of(3.0))
    compile_kernel(spec, assemble=True)
    compile_kernel(spec, disassemble=True)
    compile_kernel(spec, SM_90A)
    compile_kernel(spec, device_mesh=DeviceMesh((("x", 2),), ("x",)))
    with config.scoped(disabled_passes=("mlir-hoist",)):
        compile_kernel(spec)
    assert len(fake) == 7
    assert cache_info().memory_hits == 0


def test_what_is_checked_when_a_kernel_runs_does_not_change_its_code(fake):
    compile_kernel(spec_of())
    with config.scoped(sanitize=True):
        compile_kernel(spec_of())
    assert len(fake) == 1


def test_texts_need_not_be_kept_but_may_be(fake):
    spec = spec_of()
    kernel = compile_kernel(spec, keep=True)
    assert compile_kernel(spec, keep=False) is kernel
    other = spec_of(3.0)
    assert compile_kernel(other, keep=False) is not compile_kernel(other, keep=True)
    assert len(fake) == 3


def test_a_kernel_that_is_traced_again_needs_no_texts_but_may_have_them(fake, tmp_path):
    kernel = compile_kernel(spec_of(), keep=True)
    assert compile_kernel(spec_of(), keep=False) is kernel
    assert cache_info() == CacheInfo(memory_hits=1, compiles=1)
    clear_memory()
    compile_kernel(spec_of(), keep=False)
    assert cache_info() == CacheInfo(disk_hits=1)
    compile_kernel(spec_of(), keep=True)
    assert cache_info() == CacheInfo(disk_hits=2)
    clear_memory()
    compile_kernel(spec_of(), assemble=True, keep=False)
    assert cache_info() == CacheInfo(compiles=1)
    assert len(entries(tmp_path)) == 2


def test_target_of_the_kernel_and_of_the_call(fake):
    compile_kernel(spec_of(params=plgpu.CompilerParams(target="sm_100")))
    compile_kernel(spec_of(params=plgpu.CompilerParams(target="sm_100")), target="sm_90")
    compile_kernel(spec_of())
    assert [request.target.name for request in fake] == ["sm_100", "sm_90", "sm_90"]


def test_cache_off(fake, tmp_path):
    with config.scoped(cache=False):
        compile_kernel(spec_of())
        clear_memory()
        compile_kernel(spec_of())
    assert len(fake) == 2
    assert not entries(tmp_path)


def test_dump_compiles_again(fake, tmp_path):
    compile_kernel(spec_of())
    with config.scoped(dump=tmp_path / "dump"):
        compile_kernel(spec_of())
    assert len(fake) == 2


def test_damaged_entries_are_compiled_again(fake, tmp_path):
    compile_kernel(spec_of())
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    clear_memory()
    with pytest.warns(CacheWarning, match="damaged"):
        compile_kernel(spec_of())
    assert len(fake) == 2
    clear_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernel(spec_of())
    assert cache_info() == CacheInfo(disk_hits=1)


def test_entries_of_another_format_are_compiled_again(fake, tmp_path):
    compile_kernel(spec_of())
    (path,) = entries(tmp_path)
    compiler._store().put(path.stem, b"well-formed file, but no kernel")
    clear_memory()
    with pytest.warns(CacheWarning, match="damaged"):
        compile_kernel(spec_of())
    assert len(fake) == 2


def test_other_code_compiles_again(fake, monkeypatch):
    compile_kernel(spec_of())
    clear_memory()
    monkeypatch.setattr(environment, "_hashes", lambda: {"jaxlib": "99"})
    compile_kernel(spec_of())
    assert len(fake) == 2


def test_environment_has_code_plugins_and_options(monkeypatch):
    about = json.loads(environment.environment_text(assemble=False))
    assert {"pallasite", "jax", "jaxlib", "llvmlite", "numpy", "ml-dtypes"} <= set(about["code"])
    assert set(about["options"]) == {"disabled_plugins"} - (
        set() if config.get("disabled_plugins") else {"disabled_plugins"}
    )
    assert set(about["plugins"].values()) <= {"in use"}
    assert about["assembler"] is None
    assert json.loads(environment.environment_text(assemble=True))["assembler"]
    with config.scoped(disabled_passes="mlir-hoist", sanitize=True):
        about = json.loads(environment.environment_text(assemble=False))
    assert about["options"]["disabled_passes"] == "('mlir-hoist',)"
    assert "sanitize" not in about["options"]
    # What a module that was not imported yet may declare.
    monkeypatch.setenv("PALLASITE_OF_THE_FUTURE", "yes")
    about = json.loads(environment.environment_text(assemble=False))
    assert about["options"]["PALLASITE_OF_THE_FUTURE"] == "yes"


class _Plugin:
    @pallasite.hookimpl
    def pallasite_targets(self):
        return [Target(name="sm_test", ptx_version=80, compute_capability=(8, 0))]


def test_plugins_of_this_process_keep_kernels_off_the_disk(fake, tmp_path):
    spec = spec_of()
    compile_kernel(spec)
    name = plugins.register(_Plugin(), "of_this_test")
    try:
        compile_kernel(spec)
        assert compile_kernel(spec) is not None
        assert cache_info() == CacheInfo(memory_hits=1, compiles=2, unkeyable=1)
    finally:
        plugins.unregister(name)
    assert len(entries(tmp_path)) == 1
    compile_kernel(spec)
    assert len(fake) == 2 and cache_info().disk_hits == 1


def test_memory_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(compiler, "_MEMORY_ENTRIES", 2)
    for factor in (1.0, 2.0, 3.0):
        compile_kernel(spec_of(factor))
    assert len(compiler._by_content._entries) == 2


def test_compile_finds_kernels_inside_functions(fake):
    kernel = scaled()

    def program(x):
        def step(carry, _):
            return kernel(carry) + 1, None

        y, _ = jax.lax.scan(step, x, length=3)
        return jax.lax.cond(y[0] > 0, kernel, lambda v: v, y)

    assert pallasite.compile(program, shape(128)).name == "scaled"
    assert pallasite.compile(jax.jit(program), jnp.ones(128)).name == "scaled"
    assert len(fake) == 1


def test_compile_of_a_pallas_call(fake):
    assert pallasite.compile(by_pallas_call(), shape(256, 256)).name == "body"


def test_compile_with_keyword_arguments(fake):
    assert pallasite.compile(lambda *, x: scaled()(x), x=shape(128)).name == "scaled"


def test_compile_all_and_its_errors(fake):
    def program(x):
        return scaled(2.0, name="first")(scaled(3.0, name="second")(x))

    kernels = pallasite.compile_all(program, shape(128))
    assert [kernel.name for kernel in kernels] == ["second", "first"]
    with pytest.raises(InvalidValueError, match="program calls 2 different kernels") as error:
        pallasite.compile(program, shape(128))
    assert "second, first" in str(error.value)
    with pytest.raises(InvalidValueError, match="calls no kernel"):
        pallasite.compile(jnp.sin, shape(128))


def test_debug_prints_the_stages(fake, capsys):
    spec = spec_of().replace(debug=True)
    compile_kernel(spec)
    assert ".visible .entry add" in capsys.readouterr().out


SCRIPT = """
import sys
from sample_kernels import CASES, specs
import pallasite
from pallasite.runtime import cache_info
for name in sys.argv[1:]:
    make, args = CASES[name]
    assert pallasite.compile(make(), *args, target="sm_90").ptx
print(cache_info())
"""


@pytest.mark.parametrize("name", ["scaled", "softmax", "copy"])
def test_a_second_process_compiles_nothing(tmp_path, name):
    assert name in CASES
    environment_ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PALLASITE_CACHE_DIR": str(tmp_path / "shared"),
        "JAX_PLATFORMS": "cpu",
    }

    def run():
        done = python_processes.run(["-c", SCRIPT, name], env=environment_, check=True)
        return done.stdout.splitlines()[-1]

    assert run() == str(CacheInfo(compiles=1))
    assert run() == str(CacheInfo(disk_hits=1))


class _Tripling:
    """A plugin whose pass makes of a product by 2.5 one by 3."""

    @pallasite.hookimpl
    def pallasite_passes(self):
        def run(text, context):
            assert "0f40200000" in text
            return text.replace("0f40200000", "0f40400000")

        return [pallasite.Pass(name="tripling", stage="ptx", run=run)]


def test_programs_are_compiled_again_where_plugins_or_options_change():
    x = jnp.arange(128, dtype=jnp.float32)
    kernel = jax.jit(scaled(2.5))

    def factor():
        return float(kernel(x)[5] / x[5])

    assert factor() == 2.5
    name = plugins.register(_Tripling(), "tripling")
    try:
        assert factor() == 3
        with config.scoped(disabled_passes="tripling"):
            assert factor() == 2.5
        assert factor() == 3
        config.update("disabled_passes", ["tripling"])
        assert factor() == 2.5
        config.reset()
        assert factor() == 3
    finally:
        plugins.unregister(name)
    assert factor() == 2.5


def test_patched_code_of_plugins_is_kept_apart(fake, tmp_path, monkeypatch):
    from pallasite_std import divisors

    first = compile_kernel(spec_of())
    with monkeypatch.context() as patch:
        patch.setattr(divisors, "divisor_of_result", lambda *args: 1)
        second = compile_kernel(spec_of())
        assert second is not first
        spec = spec_of()
        assert compile_kernel(spec) is not second  # Who knows what it does.
        assert cache_info().unkeyable == 2
        plugins.refresh()
        compile_kernel(spec)
    assert len(fake) == 4 and len(entries(tmp_path)) == 1
    assert compile_kernel(spec_of()) == first
    assert (len(fake), cache_info().disk_hits) == (4, 1)


def test_kernels_are_not_kept_if_files_were_edited_meanwhile(fake, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(environment, "files_unchanged", lambda: False)
        compile_kernel(spec_of())
    assert entries(tmp_path) == []


def test_kernels_are_not_kept_if_a_plugin_fails_meanwhile(fake, tmp_path, monkeypatch):
    """They lack its passes; and with its passes they are not those of a process where it fails."""
    states = [("hopper", "found")]
    information = plugins.PluginInfo

    def listed(self):
        return tuple(information(name, "x 1.0", state) for name, state in states)

    def compile_and_fail(request):
        states[:] = [("hopper", "failed")]
        generations.append("failed")
        return compiled(request)

    compiled = compiler._compile
    generations = []
    monkeypatch.setattr(plugins.PluginManager, "generation", lambda self: tuple(generations))
    monkeypatch.setattr(plugins.PluginManager, "plugins", listed)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", compile_and_fail)
        compile_kernel(spec_of())
    assert entries(tmp_path) == []
    compile_kernel(spec_of(3.0))
    states[:] = [("hopper", "loaded")]
    clear_memory()
    compile_kernel(spec_of(3.0))
    assert len(fake) == 3 and len(entries(tmp_path)) == 2


FIND = """
import hashlib, sys
from sample_kernels import CASES
import pallasite
from pallasite.runtime import cache_info
make, args = CASES["scaled"]
digest, read = hashlib.file_digest, []
hashlib.file_digest = lambda file, name: read.append(file.name) or digest(file, name)
opened = []
sys.addaudithook(lambda event, what: opened.append(str(what[0])) if event == "open" else None)
pallasite.compile(make(), *args, target="sm_90")
packages = [name for name in sys.modules if name.startswith("pallasite")]
data = [path for path in opened if not path.endswith((".py", ".pyc", ".zip"))]
print(cache_info().disk_hits, len(read), len(packages), len(data))
"""


def test_a_hit_reads_no_code_and_imports_little(tmp_path):
    """What was hashed before is not read again, and nothing is imported that only compiles."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PALLASITE_")},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PALLASITE_CACHE_DIR": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", FIND]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append([int(word) for word in done.stdout.split()])
    (first_hits, first_read, *_), (hits, read, packages, data) = found
    assert (first_hits, hits) == (0, 1)
    assert first_read > 100 and read == 0
    assert packages < 120 and data < 120, found


def test_compiling_does_not_collect_garbage():
    """But for one that the program asks for; afterwards it is as it was, also after an error."""
    collected = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    thresholds = gc.get_threshold()
    gc.freeze()  # What other tests have left is not looked at.
    gc.set_threshold(700)
    gc.callbacks.append(note)
    try:
        with garbage.uncollected(), garbage.uncollected():
            kept = [[] for _ in range(7_000)]
            assert not collected
        assert gc.isenabled()
        with pytest.raises(KeyError), garbage.uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() and len(kept) > 1000
        gc.disable()
        with garbage.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
