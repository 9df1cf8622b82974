"""A process that loads a test file and runs the tests that it is told to run, one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import time
import tomllib
import traceback
import unittest
import unittest.mock
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

_GROUP = "pallasite.plugins"
_ROOT = pathlib.Path(__file__).parents[2]
_LOCATION = re.compile(r"^\S+\.py:\d+( \([^)]*\))?: ")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a worker needs to know.

    Attributes:
      path: of the test file.
      backend: "ours", "jax", or "simulated": JAX's own compiler, and our simulator.
      semantics: "lane", "warpgroup" or "all".
      target: what kernels are compiled for, if JAX has no GPU.
      sanitize: whether the simulator's sanitizer is on.
      programs: a folder where XLA's programs for the CPU are kept, for other workers; empty for
        none.
      replacements: what is replaced by what in the text of the file.
    """

    path: str
    backend: str
    semantics: str
    target: str
    sanitize: bool
    programs: str = ""
    replacements: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one test ended: ``outcome`` is "pass", "fail", "skip", or "own" for failures and findings
    that are JAX's own."""

    test: str
    outcome: str
    reason: str
    seconds: float
    text: str = ""


def work(setup: Setup, pipe: Connection) -> None:
    """Sends the names of the tests, then an :class:`Outcome` for each name that comes in."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # What tests print is theirs.
        os.dup2(nothing.fileno(), 2)
    try:
        cases = _cases(setup)
    except BaseException:
        pipe.send(traceback.format_exc())
        return
    pipe.send(list(cases))
    with contextlib.suppress(EOFError):
        while (name := pipe.recv()) is not None:
            pipe.send(_run(name, cases[name], setup))


def _cases(setup: Setup) -> dict[str, unittest.TestCase]:
    import jax
    import stand_ins

    sys.argv = [setup.path]  # JAX and absl read their flags from it.
    ours = setup.backend == "ours"
    if ours:
        _register_plugins()
        _print_code()
    if jax.default_backend() != "gpu":
        if ours:
            from pallasite import config

            config.update("target", setup.target)
        stand_ins.pretend_gpu(setup.target)
        _prepare_host(setup.programs)
        if setup.backend == "simulated":
            _simulate(setup)
    module = stand_ins.load(pathlib.Path(setup.path), ours=ours, replacements=setup.replacements)
    _parse_flags()
    if (
        setup.backend != "jax"
        and jax.default_backend() != "gpu"
        and hasattr(module, "mosaic_gpu_lib")
    ):
        module.mosaic_gpu_lib = _NoLibrary()
    found: dict[str, unittest.TestCase] = {}
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for case in suite if isinstance(suite, unittest.TestSuite) else [suite]:
            semantics = getattr(type(case), "LOWERING_SEMANTICS", None)
            name = getattr(semantics, "name", setup.semantics).lower()
            if setup.semantics in ("all", name):
                found[f"{type(case).__name__}.{case._testMethodName}"] = case
    return found


def _prepare_host(programs: str) -> None:
    """What tests compute on the host takes more time to be compiled than to run: it is optimized
    little, and compiled once for all workers."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    if programs:
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.block_until_ready(jax.jit(lambda: 1)())  # Tests fail if they are what begins to use it.


def _simulate(setup: Setup) -> None:
    """Has JAX's kernels compiled by JAX, for the target, and run by the simulator."""
    import jax
    import jax_on_simulator

    from pallasite_simulator.sanitizer import GROUPS

    # JAX declares one byte of its dynamic shared memory.
    groups = frozenset(GROUPS) - {"bounds"} if setup.sanitize else frozenset()
    _register_plugins()
    jax_on_simulator.install(setup.target, sanitize=groups)
    count = property(lambda self: jax_on_simulator.MULTIPROCESSORS)
    type(jax.devices()[0]).core_count = count


class _NoLibrary:
    """Where there is no CUDA library to wait for the device with, there is nothing to wait for."""

    @property
    def _mosaic_gpu_ext(self) -> _NoLibrary:
        return self

    def _sync_all_devices(self) -> None:
        return None


def _register_plugins() -> None:
    """The checkout's plugins, where they are on the path only, not installed."""
    from pallasite import plugins

    installed = {point.name for point in importlib.metadata.entry_points(group=_GROUP)}
    for project in sorted(_ROOT.glob("plugins/*/pyproject.toml")):
        points = tomllib.loads(project.read_text())["project"]["entry-points"][_GROUP]
        for name, module in points.items():
            found = importlib.util.find_spec(module.partition(".")[0])
            if name not in installed and found is not None:
                plugins.register(importlib.import_module(module), name=name)


def _print_code() -> None:
    """Prints PTX and SASS where the environment asks for it, as the reference backend does.

    Tests set these variables and read what appears on standard output.
    """
    from pallasite import config
    from pallasite.codegen import compile as code_generation

    config.update("cache", False)  # What is found in a cache is not printed.
    run_stage = code_generation.run_stage

    def run_and_print(stage: str, program: Any, context: Any) -> Any:
        result = run_stage(stage, program, context)
        if stage == "ptx" and os.environ.get("MOSAIC_GPU_DUMP_PTX"):
            _print(result)
        if stage == "ptx" and os.environ.get("MOSAIC_GPU_DUMP_SASS"):
            from pallasite.codegen import assembler

            _print(assembler.disassemble(assembler.assemble(result, context.kernel).cubin))
        return result

    code_generation.run_stage = run_and_print


def _print(text: str) -> None:
    with os.fdopen(os.dup(1), "w") as standard_output:
        standard_output.write(text)


def _parse_flags() -> None:
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])


def _run(name: str, case: unittest.TestCase, setup: Setup) -> Outcome:
    start = time.monotonic()
    result, found = _result_of(case, setup, setup.sanitize)
    outcome = _judged(name, result, found, setup)
    if outcome.outcome == "own" and found and setup.backend == "ours":
        # What the sanitizer found has hidden the results.
        with _nothing_sanitized():
            result, _ = _result_of(case, setup, False)
        if result.problem is not None:
            outcome = _judged(name, result, [], setup)
    return dataclasses.replace(outcome, seconds=time.monotonic() - start)


@contextlib.contextmanager
def _nothing_sanitized() -> Iterator[None]:
    """Tests that ask for the sanitizer themselves (``detect_races``) do not get it."""
    from pallasite import config

    scoped = config.scoped

    def without(**options: Any) -> Any:
        return scoped(**{**options, "sanitize": False})

    with unittest.mock.patch.object(config, "scoped", without):
        yield


def _result_of(case: unittest.TestCase, setup: Setup, sanitize: bool) -> tuple[_Result, list[str]]:
    """Runs a test; returns also what the sanitizer found."""
    result = _Result()
    with contextlib.ExitStack() as stack:
        if setup.backend == "ours":
            from pallasite import config
            from pallasite.runtime import compiler

            compiler.clear_memory()
            stack.enter_context(config.scoped(sanitize=sanitize))
        case.run(result)
        _wait_for_device()
    found: list[str] = []
    if setup.backend == "simulated":
        import jax_on_simulator

        found = list(jax_on_simulator.findings)
        jax_on_simulator.findings.clear()
    elif setup.backend == "ours":
        import own_failures

        found = own_failures.findings(str(result.problem))
    return result, found


def _judged(name: str, result: _Result, findings: list[str], setup: Setup) -> Outcome:
    """The outcome; tells failures and findings that are JAX's own from others."""
    import own_failures

    ours = setup.backend == "ours"
    if result.problem is not None and not (ours and findings):
        reason = reason_of(result.problem)
        text = f"{reason}\n{result.text}"
        why = None if setup.backend == "jax" else own_failures.failure(name, text, ours=ours)
        outcome, reason = ("fail", reason) if why is None else ("own", why)
        return Outcome(name, outcome, reason, 0.0, result.text[-4000:])
    if findings:
        reasons = {own_failures.finding(name, one, ours=ours): one for one in findings}
        text = "\n".join(findings)[-4000:]
        if None not in reasons:
            return Outcome(name, "own", "; ".join(sorted(map(str, reasons))), 0.0, text)
        kind = reasons[None].splitlines()[0].rstrip(":")
        return Outcome(name, "fail", f"SanitizerError: {kind}", 0.0, reasons[None][-4000:])
    if result.skipped:
        return Outcome(name, "skip", result.skipped[0][1].splitlines()[0], 0.0)
    if result.unexpectedSuccesses:
        return Outcome(name, "fail", "unexpected success", 0.0)
    return Outcome(name, "pass", "", 0.0)


def _wait_for_device() -> None:
    """Waits for kernels that the test did not wait for: one that hangs costs its own test."""
    import jax
    from jax._src import dispatch

    with contextlib.suppress(Exception):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()  # What orders calls failed with them: the next test's do not.
    if jax.default_backend() == "gpu":
        with contextlib.suppress(Exception):  # A device that a test broke is the next one's matter.
            jax.block_until_ready(jax.numpy.zeros(()) + 1)


class _Result(unittest.TestResult):
    """Keeps the first exception itself, not only its text."""

    problem: BaseException | None = None
    text = ""

    def _keep(self, problem: Any) -> None:
        if self.problem is None and problem is not None:
            self.problem = problem[1]
            self.text = "".join(traceback.format_exception(problem[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        self._keep(err)


def reason_of(error: BaseException) -> str:
    """The type of an error and the first line of its message, without the place in the file."""
    from pallasite.errors import PallasiteError

    text = error.message if isinstance(error, PallasiteError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = _LOCATION.sub("", lines[0]) if lines else ""
    if isinstance(error, AssertionError) and "does not match" in text:
        line = " ".join(lines)[:300]
    return f"{type(error).__name__}: {line}"[:300]
