"""What kernels gave on the simulator, by content, for later sessions.

A test of the compiler runs its kernels to see what they compute. While neither the text of a
kernel nor its inputs nor any file of Pallasite and its plugins has changed since a session on this
machine ran it, what it computes has not either, so it is not run again: the results are those of
then, and the test compares them as ever. Sessions without a cache (``--cache-clear``, a new
checkout) run everything, and so does each session what it has not found when it began. Tests of the
simulator itself, and of plugins that change what it does, always run what they say.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jaxlib
import ml_dtypes
import numpy as np
import pytest
from tests import session_folders

from pallasite.plugin import config
from pallasite.plugin import plugins as plugin_manager
from pallasite_simulator import executor

ROOT = pathlib.Path(__file__).parent.parent

SOURCES = ("framework", "plugins/*/src")
"""Whatever a kernel and its run may depend on."""

FOLDERS = (
    *("blackwell", "examples", "hopper", "kernels", "language", "layouts", "lowering", "math"),
    *("ops", "upstream/test_matmul.py", "upstream/test_published.py"),
)
"""Tests of what is compiled, which change nothing in the simulator."""

MOST_BYTES = 1 << 29
"""What is kept from one session to the next."""

LARGEST_BYTES = 1 << 20
"""Larger results are not kept."""

SHORTEST_NS = 4_000_000
"""Nor are those that take no longer than reading them does."""

_BEGINNING = "TESTS_BEGAN_AT_NS"
"""The variable that tells processes of a session when it began."""

type Run = tuple[list[np.ndarray], str]


class SimulatedResults:
    """Runs the kernels for which no earlier session has results.

    Args:
      folder: of the results; those of other sources next to it are removed.
      began: when the session began (``time.time_ns``): what is younger is not used.

    Attributes:
      of_session: the one of all tests of this process, if any.
      used: whether the test that runs now may use what there is.
    """

    of_session: ClassVar[SimulatedResults | None] = None
    used = False

    def __init__(self, folder: pathlib.Path, began: int):
        self._began = began
        self._folder = folder / _content_of_sources()
        for other in folder.iterdir():
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        session_folders.forget_the_oldest(self._folder, MOST_BYTES)

    def outputs(
        self, compiled: Any, inputs: Sequence[np.ndarray], run: Callable[[], Run]
    ) -> list[np.ndarray]:
        """As ``pallasite_simulator.executor.Recall`` says."""
        key = self._key(compiled, inputs) if self.used else None
        if key is None:
            return run()[0]
        file = self._folder / key
        known = self._read(file)
        if known is not None:
            return known
        start = time.thread_time_ns()
        outputs, printed = run()
        took = time.thread_time_ns() - start
        size = sum(one.nbytes for one in outputs)
        if took > SHORTEST_NS and size <= LARGEST_BYTES and not printed:
            _write(file, outputs)
        return outputs

    def _read(self, file: pathlib.Path) -> list[np.ndarray] | None:
        try:
            if file.stat().st_mtime_ns >= self._began:
                return None
            outputs: list[np.ndarray] = pickle.loads(file.read_bytes())
            return outputs
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    @staticmethod
    def _key(compiled: Any, inputs: Sequence[np.ndarray]) -> str | None:
        """What the results follow from; None where more than the text and the inputs decides."""
        launch = compiled.launch
        if launch.hidden_operands or launch.hidden_results or launch.before_first_launch:
            return None
        if not _only_own_instructions() or config.get("simulator_progress"):
            return None
        how = (
            *(compiled.name, launch, compiled.target.name, compiled.target.multiprocessors),
            *(compiled.plugin_options, sorted(executor.parse_groups(config.get("sanitize")))),
            config.get("simulator_processes"),
        )
        digest = hashlib.blake2b(repr(how).encode(), digest_size=24)
        digest.update(compiled.ptx.encode())
        for one in inputs:
            array = np.asarray(one)
            digest.update(f"\0{array.dtype.name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def use(cache: pytest.Cache | None) -> None:
    """Makes what kernels give in this process known to later sessions, and the reverse."""
    began = int(os.environ.setdefault(_BEGINNING, str(time.time_ns())))
    if cache is None:
        return
    results = SimulatedResults(cache.mkdir("simulated"), began)
    SimulatedResults.of_session = executor.recall = results


def chosen_for(path: pathlib.Path) -> None:
    """Decides about the tests of a module, which begin now."""
    if SimulatedResults.of_session is not None:
        within = (path.is_relative_to(ROOT / "tests" / one) for one in FOLDERS)
        SimulatedResults.of_session.used = any(within)


def _content_of_sources() -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name in (sys.version, platform.machine(), platform.processor(), *_versions()):
        digest.update(f"{name}\0".encode())
    for file in _files():
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _versions() -> Iterator[str]:
    for module in (np, ml_dtypes, jaxlib):
        yield module.__version__


def _files() -> list[pathlib.Path]:
    folders = [folder for pattern in SOURCES for folder in ROOT.glob(pattern)]
    found = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sorted(one for one in [*found, pathlib.Path(__file__)] if one.suffix != ".pyc")


def _only_own_instructions() -> bool:
    """Whether no plugin of a test has changed what instructions do."""
    rules = plugin_manager.manager().instructions()
    return _all_own(frozenset(rule.bind.__module__ for rule in rules.values()))


@functools.cache
def _all_own(modules: frozenset[str]) -> bool:
    return all(one.startswith("pallasite_") for one in modules)


def _write(file: pathlib.Path, outputs: list[np.ndarray]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)  # Another session may have tidied up meanwhile.
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix="new-", delete=False) as written:
        pickle.dump(outputs, written)  # Most are random numbers, which cannot be compressed.
    os.replace(written.name, file)
