"""What the demonstration does with one example on one target: compile it, run it, check it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import time

import jax

import pallasite
from examples.catalog import Example, all_examples
from pallasite import plugins
from pallasite.target_selection import find_target


@dataclasses.dataclass(frozen=True)
class Task:
    """An example and a target, by name, so that another process can do it.

    Attributes:
      example: name of an example in the catalog.
      target: name of a target.
      assemble: whether to make machine code, which says how many registers it takes.
      execute: whether to run the kernel for this target and to check the result.
    """

    example: str
    target: str
    assemble: bool
    execute: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a task.

    Attributes:
      figures: bytes of shared memory, registers per thread, bytes of spills, lines of PTX; None for
        what is not known.
      compile_seconds: from the call to machine code, or to PTX where nothing assembles it.
      run_seconds: from the call to the result, with what compiling for the device takes.
      error: largest error of the result, relative to its largest magnitude.
      needs: what the target lacks, or "".
      problem: what went wrong, or "".
      printed: what the kernel printed.
    """

    figures: tuple[int | None, ...] = ()
    compile_seconds: float | None = None
    run_seconds: float | None = None
    error: float | None = None
    needs: str = ""
    problem: str = ""
    printed: str = ""


def perform(task: Task) -> Outcome:
    """Compiles an example, and runs and checks it if the task says so."""
    return run(task, compile_only(task))


@functools.cache
def example_named(name: str) -> Example:
    """An example of the catalog."""
    return next(one for one in all_examples() if one.name == name)


def compile_only(task: Task) -> Outcome:
    """Compiles the task's example, which is not looked up on disk."""
    example, target = example_named(task.example), find_target(task.target)
    lacking = example.needs - target.features
    if lacking:
        return Outcome(needs=f"needs {', '.join(sorted(lacking))}")
    inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
    plugins.registry()  # Loads the compiler, which is not the kernel's time.
    begin = time.perf_counter()
    try:
        # What examples print while they are compiled would tear the table apart.
        with contextlib.redirect_stdout(io.StringIO()), pallasite.config.scoped(cache=False):
            kernel = pallasite.compile(
                example.function, *inputs, target=target, assemble=task.assemble
            )
    except (pallasite.UnsupportedError, pallasite.MissingNameError) as error:
        return Outcome(needs=missing(error))
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    resources = kernel.resources
    figures = (
        resources.shared_memory_bytes,
        resources.registers,
        resources.spill_store_bytes,
        kernel.ptx.count("\n"),
    )
    return Outcome(figures, compile_seconds=seconds)


def missing(error: pallasite.PallasiteError) -> str:
    """``needs ...``: the features that the error says the target lacks, or else its message."""
    features = re.search(r"on targets with ([\w, ]+) \(plugin", error.expected or "")
    return f"needs {features[1]}" if features else f"needs more: {error.message}"


def run(task: Task, compiled: Outcome) -> Outcome:
    """The outcome completed by running the example, unless the task says not to or it failed.

    It runs on JAX's default device. On the simulator, the sanitizer checks what the kernel does.
    """
    if not task.execute or compiled.needs or compiled.problem:
        return compiled
    example = example_named(task.example)
    inputs = example.make_inputs(jax.random.key(0))
    printed = io.StringIO()
    begin = time.perf_counter()
    try:
        with (
            contextlib.redirect_stdout(printed),
            pallasite.target(task.target),
            pallasite.config.scoped(sanitize=True),
            pallasite.kernel_errors(),
        ):
            # A function of its own: traces for other targets are not looked up.
            function = jax.jit(lambda *arrays: example.function(*arrays))
            output = jax.block_until_ready(function(*inputs))
        seconds = time.perf_counter() - begin
        error = example.check(inputs, output)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"
        return dataclasses.replace(compiled, problem=text, printed=printed.getvalue())
    return dataclasses.replace(
        compiled, run_seconds=seconds, error=error, printed=printed.getvalue()
    )
