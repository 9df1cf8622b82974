"""What all tests share: the checkout's plugins, a clean configuration, tests that need a GPU."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest
from tests import (  # session_end first: see there
    collection_order,
    room_for_calls,
    sampled_parameters,
    session_end,
    session_folders,
    simulated_results,
    worker_reports,
    xla_programs,
)
from tests.accepted_ptx import AcceptedPtx
from tests.checkout_plugins import install_plugins
from tests.tool_results import ToolResults

from pallasite import config
from pallasite.codegen import assembler
from pallasite.codegen import compile as code_generation
from pallasite.codegen.tools import find_tool
from pallasite.language.params import CompilerParams, LoweringSemantics
from pallasite.runtime import registration as registration  # so that traced kernels can run
from pallasite_std.caching.loaded_code import LOADED

pytest_plugins = ["pallasite_simulator.pytest_plugin"]

ROOT = pathlib.Path(__file__).parent.parent
HAS_GPU = pathlib.Path("/proc/driver/nvidia/version").exists()

# What XLA compiles on the CPU, inputs and references of small tests, runs for less time than its
# optimization takes. XLA has not read it yet; processes that tests start inherit it.
if not HAS_GPU:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # Threads of BLAS wait in loops, which takes time from other processes of the session.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    xla_programs.be_quick()

# What Triton makes for tests is shared by all processes of a session.
session_folders.shared("triton")

# How long an example takes to be made or to run says nothing: other programs run as well.
hypothesis.settings.register_profile(
    "pallasite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pallasite")

install_plugins()
room_for_calls.have()


@pytest.fixture(autouse=True)
def _clean_configuration(monkeypatch: pytest.MonkeyPatch):
    """Each test starts with no option set, and leaves none set."""
    for variable in [name for name in os.environ if name.startswith("PALLASITE_")]:
        monkeypatch.delenv(variable)
    config.reset()
    yield
    config.reset()


@pytest.fixture(autouse=True, scope="module")
def _code_as_it_is_now():
    """Modules that were first seen while another test patched them are not taken for patched."""
    LOADED.forget()


@pytest.fixture(autouse=True, scope="module")
def _results_of_earlier_sessions(request: pytest.FixtureRequest):
    """Kernels that an earlier session ran as they are now are not run again."""
    simulated_results.chosen_for(request.path)


@pytest.fixture
def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> float:
    """The clock that measures durations goes on by so many seconds whenever it is read."""
    tick, ticks = 2.0**-10, itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * tick)
    return tick


@pytest.fixture
def lane_semantics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do not say which semantics they want have lane semantics, not the default."""
    defaults = CompilerParams.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lowering_semantics", LoweringSemantics.Lane)


@pytest.fixture(params=list(LoweringSemantics), ids=lambda semantics: semantics.name)
def semantics(request: pytest.FixtureRequest) -> LoweringSemantics:
    """Runs a test once for each semantics of kernels that do not say which they want."""
    if request.param is LoweringSemantics.Lane:
        request.getfixturevalue("lane_semantics")
    assert CompilerParams().lowering_semantics is request.param
    return request.param


@pytest.fixture(scope="session")
def _accepted_ptx(request: pytest.FixtureRequest) -> Generator[AcceptedPtx | None]:
    """What ptxas has accepted, in pytest's cache, as is what it and the disassemblers have made;
    None where there is no ptxas."""
    program = find_tool("ptxas").path
    if program is None:
        yield None
        return
    cache = getattr(request.config, "cache", None)
    accepted = AcceptedPtx(program, None if cache is None else cache.mkdir("ptx"))
    AcceptedPtx.of_session = accepted
    ToolResults.of_session = None if cache is None else ToolResults(cache.mkdir("tools"))
    yield accepted
    accepted.check_noted()


@pytest.fixture(autouse=True)
def _every_ptx_assembles(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    _accepted_ptx: AcceptedPtx | None,
):
    """Whatever a test compiles is assembled for its target, by the test or some time after it."""
    if _accepted_ptx is None:
        yield
        return
    accepted, emitted = _accepted_ptx, list[tuple[str, str]]()
    run_stage, run_program = code_generation.run_stage, assembler._run

    def run_and_note(stage: str, program: Any, context: Any) -> Any:
        result = run_stage(stage, program, context)
        if stage == "ptx":
            emitted.append((result, context.target.architecture or context.target.name))
        return result

    def run_program_and_note(command: list[str]) -> Any:
        results = ToolResults.of_session
        done = run_program(command) if results is None else results.run(command, run_program)
        if done.returncode == 0 and command[0] == str(accepted.program):
            target = next(one.removeprefix("-arch=") for one in command if "-arch=" in one)
            accepted.add(pathlib.Path(command[-1]).read_text(), target)
        return done

    monkeypatch.setattr(code_generation, "run_stage", run_and_note)
    monkeypatch.setattr(assembler, "_run", run_program_and_note)
    yield
    for ptx, target in dict.fromkeys(emitted):
        accepted.check_later(ptx, target, request.node.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each processor, but just one where there is a GPU, which is not shared."""
    return 1 if HAS_GPU else os.cpu_count() or 1


def pytest_configure(config: pytest.Config) -> None:
    """What XLA compiles on the CPU is kept. Processes of pytest-xdist take less time to begin, and
    do not take long to end."""
    for marker in sampled_parameters.MARKERS:
        config.addinivalue_line("markers", marker)
    if not HAS_GPU:
        xla_programs.share(getattr(config, "cache", None))
        simulated_results.use(getattr(config, "cache", None))
    if hasattr(config, "workerinput"):
        collection_order.share_work(config)
        session_end.be_quick()
        worker_reports.be_brief(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """While modules of tests are imported, there is hardly any garbage. What is compiled of them is
    kept, even where Python is told to keep nothing: each process takes 12 s for it."""
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode = writes_none


def pytest_collection_finish() -> None:
    """What is there now stays to the end, as does most of what tests make for caches, so Python
    looks for garbage only where memory becomes scarce, or may be that of a GPU."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SELDOM) if HAS_GPU else gc.set_threshold(_NEVER)


def pytest_unconfigure() -> None:
    """Nor does pytest look for garbage at the end: what there is ends with the process."""
    gc.freeze()


_NEVER, _SELDOM = 1 << 30, (100_000, 30, 10)
_ENOUGH_KIB = 4 << 20
"""What is enough for the modules of some processes, on machines that have much more."""


@pytest.fixture(autouse=True, scope="module")
def _enough_memory():
    """Modules that follow get by with less once there is little."""
    if gc.get_threshold()[0] == _NEVER and _memory_is_scarce():
        gc.set_threshold(*_SELDOM)


def _memory_is_scarce() -> bool:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    kib_of = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    return kib_of["MemAvailable"] < min(kib_of["MemTotal"] // 3, _ENOUGH_KIB)


_OWN_KERNELS = ("ops", "hopper/ops", "examples/test_examples.py", "benchmarks/test_layouts.py")
"""Tests of kernels that nobody should be warned of."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the hardware itself need it; those that run kernels take what there is. Warnings of
    the checks of kernels are errors in tests of our own kernels. Of some tests, a part runs."""
    sampled_parameters.deselect(config, items)
    own = tuple(ROOT / "tests" / name for name in _OWN_KERNELS)
    warning = "pallasite_std.checks.passes.KernelCheckWarning"
    ours = {path for path in {item.path for item in items} if any(map(path.is_relative_to, own))}
    for item in items:
        if item.path in ours:
            item.add_marker(pytest.mark.filterwarnings(f"error::{warning}"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="JAX has no CUDA GPU here"))
