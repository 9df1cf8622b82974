"""Compiles every example for every target, then runs them and checks the results.

Usage: ``python examples/demo.py [part of a name ...]``. It needs no GPU: without one, the kernels
run on the simulator, whose sanitizer checks what they do. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import pallasite
from examples.catalog import Example, all_examples
from pallasite import plugins
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import select_target

COLUMNS = ("example", "SMEM", "barriers", "registers", "spills", "PTX", "ms", "other targets")
WIDTHS = (28, 6, 8, 9, 6, 4, 4, 0)


def main(names: list[str]) -> int:
    """Runs the demonstration; returns the exit status."""
    start = time.perf_counter()
    examples = [e for e in all_examples() if not names or any(n in e.name for n in names)]
    if not examples:
        print(f"no example has {' or '.join(names)} in its name; there are")
        print("\n".join(f"  {example.name}" for example in all_examples()))
        return 1
    failures = compile_all(examples) + run_all(examples)
    print(f"\n{time.perf_counter() - start:.0f} seconds, {len(failures)} failures")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def compile_all(examples: list[Example]) -> list[str]:
    """Compiles each example for each target and prints a table; returns what failed."""
    main_target = select_target()
    others = [t for t in plugins.registry().targets.values() if t.name != main_target.name]
    others.sort(key=lambda target: target.name)
    assembler = find_tool("ptxas")
    if assembler.path is None:
        print(f"No assembler, so no registers and spills: {assembler.reason}; {assembler.install}")
    print(
        f"Figures for {main_target.name}: bytes of shared memory, barriers, registers per thread,"
    )
    print("bytes of spills, lines of PTX, milliseconds from call to machine code. Other targets:")
    print(", ".join(target.name for target in others) + ".\n")
    print_row(COLUMNS)
    failures = []
    for example in examples:
        outcomes = {
            target.name: attempt(example, target, assembler.path is not None)
            for target in (main_target, *others)
        }
        failures += [
            f"{example.name} on {name}: {one.problem}"
            for name, one in outcomes.items()
            if one.problem
        ]
        first = outcomes.pop(main_target.name)
        print_row((example.name, *first.figures(), summary(outcomes)))
    return failures


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one compilation: a kernel, or what the target lacks, or a problem."""

    kernel: pallasite.CompiledKernel | None = None
    milliseconds: float = 0.0
    needs: str = ""
    problem: str = ""

    def figures(self) -> tuple[str, ...]:
        """The cells of the table."""
        if self.kernel is None:
            return (self.needs or "FAILED",)
        resources = self.kernel.resources
        figures = (
            resources.shared_memory_bytes,
            resources.barriers,
            resources.registers,
            resources.spill_store_bytes,
            self.kernel.ptx.count("\n"),
            round(self.milliseconds),
        )
        return tuple("-" if figure is None else str(figure) for figure in figures)


def attempt(example: Example, target: pallasite.Target, assemble: bool) -> Outcome:
    """Compiles one example for one target, without the cache."""
    lacking = example.needs - target.features
    if lacking:
        return Outcome(needs=f"needs {', '.join(sorted(lacking))}")
    begin = time.perf_counter()
    try:
        inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
        # What examples print while they are compiled would tear the table apart.
        with contextlib.redirect_stdout(io.StringIO()), pallasite.config.scoped(cache=False):
            kernel = pallasite.compile(example.function, *inputs, target=target, assemble=assemble)
    except (pallasite.UnsupportedError, pallasite.MissingNameError) as error:
        return Outcome(needs=missing(error))
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {error}")
    return Outcome(kernel, 1e3 * (time.perf_counter() - begin))


def missing(error: pallasite.PallasiteError) -> str:
    """``needs ...``: the features that the error says the target lacks, or else its message."""
    features = re.search(r"on targets with ([\w, ]+) \(plugin", error.expected or "")
    return f"needs {features[1]}" if features else f"needs more: {error.message}"


def summary(outcomes: dict[str, Outcome]) -> str:
    """One cell about all other targets."""
    compiled = [name for name, one in outcomes.items() if one.kernel is not None]
    parts = ["all" if len(compiled) == len(outcomes) else " ".join(compiled)]
    for text in sorted({one.needs for one in outcomes.values() if one.needs}):
        parts.append(" ".join(n for n, one in outcomes.items() if one.needs == text) + " " + text)
    failed = [name for name, one in outcomes.items() if one.problem]
    if failed:
        parts.append("FAILED " + " ".join(failed))
    return "; ".join(part for part in parts if part)


def run_all(examples: list[Example]) -> list[str]:
    """Runs each example on the default device and checks the result; returns what failed."""
    platform = jax.default_backend()
    executor = plugins.registry().executor_for(platform)
    print()
    if platform == "gpu":
        print(f"Running them on {jax.devices()[0].device_kind}:")
    elif executor is not None:
        print(f"Running them on {platform!r} by the executor {executor.name!r}, with its checks:")
    else:
        print(f"Not run: JAX is on {platform!r}, and no plugin has an executor for it. To run the")
        print(
            "kernels, pip install 'pallasite[simulator]', or use a machine with an NVIDIA GPU and"
        )
        print("pip install 'pallasite[cuda]'.")
        return []
    failures = []
    for number, example in enumerate(examples):
        inputs = example.make_inputs(jax.random.key(number))
        begin = time.perf_counter()
        try:
            with pallasite.config.scoped(sanitize=True), pallasite.kernel_errors():
                output = jax.block_until_ready(jax.jit(example.function)(*inputs))
            seconds = time.perf_counter() - begin
            error = example.check(inputs, output)
        except Exception as problem:
            failures.append(f"{example.name}: {type(problem).__name__}: {problem}")
            print(f"  {example.name:<28}  FAILED", flush=True)
        else:
            text = f"correct, relative error {error:.1e}, {seconds:4.1f} s"
            print(f"  {example.name:<28}  {text}", flush=True)
    return failures


def print_row(cells: tuple[str, ...]) -> None:
    """One line of the table; a short row is one in which the target lacks something."""
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=False)]
    print("  ".join(padded).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
