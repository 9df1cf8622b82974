"""Machine code of published kernels for Blackwell, by Pallasite and by JAX's own compiler.

No GPU is needed: both compile for a target that is named, and one assembler makes the machine code
of both; see ``blackwell_cases.py`` for the kernels. JAX's compiler is needed as
tests/upstream/jax_compiler.py says.

    python benchmarks/blackwell_code.py --tutorial JAX/tests/pallas/mgpu_examples_test.py \\
        --json blackwell_code.json

With ``--blocks``, the simulator also runs blocks of ours at the published sizes, and compares what
they write.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blackwell_blocks
import blackwell_cases
import harness
import jax
import jax_compiler
import jax_on_simulator
from blackwell_cases import JAX, OURS, Case
from machine_code import Code, read_code

import pallasite
from pallasite import config
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import find_target


class Compilers:
    """Both compilers, each of which times itself."""

    def __init__(self, target: str):
        """Prepares JAX's compiler for a target.

        Raises:
          RuntimeError: it cannot be used here.
        """
        self._target = target
        self._made: list[str] = []
        capability = jax_on_simulator.capability_of(target)

        def keep(code: bytes) -> Any:
            with _quiet():
                self._made.append(jax_compiler.Compiled(code, capability).ptx)

        jax_on_simulator.replace_lowering(capability, keep)

    def compile(self, case: Case, who: str, depth: int) -> tuple[str, float]:
        """PTX, and seconds of processors from the call to machine code."""
        function = case.function(who)
        arguments = case.shapes((*case.sizes[:2], depth))
        start = _processor_time()
        if who == OURS:
            with config.scoped(cache=False):
                made = pallasite.compile(function, *arguments, target=self._target, assemble=True)
                assert made.cubin is not None
            return made.ptx, _processor_time() - start
        self._made.clear()
        jax.jit(function).trace(*arguments).lower()
        return self._made[0], _processor_time() - start


def _processor_time() -> float:
    """Seconds that this process and those that it started have used processors: other programs on
    the machine do not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what is written to standard output: JAX's compiler prints the PTX, too."""
    sys.stdout.flush()
    own, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nothing)


def measure(compilers: Compilers, case: Case, repeats: int) -> dict[str, Code]:
    """What both make of a kernel; each repetition, but for the first, is another depth and counts
    for the time."""
    codes: dict[str, Code] = {}
    seconds: dict[str, list[float]] = {OURS: [], JAX: []}
    for repetition in range(repeats + 1):
        depth = case.sizes[2] + repetition * blackwell_cases.BLOCKS["tile_k"]
        for who in (OURS, JAX) if repetition % 2 else (JAX, OURS):
            ptx, taken = compilers.compile(case, who, depth)
            if repetition:
                seconds[who].append(taken)
            else:
                codes[who] = read_code(ptx, case.name)
    return {
        who: dataclasses.replace(codes[who], seconds=statistics.median(seconds[who] or [math.nan]))
        for who in (OURS, JAX)
    }


COLUMNS: dict[str, Callable[[Code], str]] = {
    "per product": lambda code: f"{code.ratio:.2f}",
    "registers": lambda code: str(code.registers),
    "spills": lambda code: str(code.spills),
    "local": lambda code: str(code.local),
    "by lanes": lambda code: str(code.guarded + code.branched),
    "instructions": lambda code: str(code.instructions),
    "cpu ms": lambda code: f"{1e3 * code.seconds:.0f}",
}
"""What is printed of each compiler's code."""


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Prints all numbers, ours before upstream's; ratios of three of them."""
    lines = []
    for name, row in rows.items():
        ours, theirs = row[OURS], row[JAX]
        line = [" / ".join(show(one) for one in (ours, theirs)) for show in COLUMNS.values()]
        for what in ("ratio", "registers", "seconds"):
            line.append(f"{getattr(ours, what) / getattr(theirs, what):.2f}")
        begun, count = row.get("in_flight", (0, 0))
        line.append(f"{begun} of {count}" if count else "")
        right = row.get("blocks")
        line.append(f"{right.tiles}: {right.error:.1e}" if right else "")
        lines.append((name, *line))
    heads = (*COLUMNS, "ratio: per product", "registers", "ms", "in flight", "tiles: error")
    harness.print_table(("kernel, ours / upstream", *heads), lines)


def recorded(rows: dict[str, dict[str, Any]], target: str) -> dict[str, Any]:
    """All numbers, and what they were measured with, for JSON."""
    ptxas = find_tool("ptxas").path
    version = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = {}
    for name, row in rows.items():
        ours, theirs = row[OURS], row[JAX]
        found[name] = {
            who: dataclasses.asdict(row[who]) | {"per_product": row[who].ratio}
            for who in (OURS, JAX)
        }
        found[name]["ratios"] = {
            "per_product": ours.ratio / theirs.ratio,
            "registers": ours.registers / theirs.registers,
            "seconds": ours.seconds / theirs.seconds,
        }
        if "in_flight" in row:
            found[name]["in_flight"] = dict(zip(("begun", "tiles"), row["in_flight"], strict=True))
        if "blocks" in row:
            found[name]["blocks"] = dataclasses.asdict(row["blocks"])
    return {
        "target": target,
        "jax": jax.__version__,
        "ptxas": version.stdout.partition("release ")[2].partition(",")[0],
        "machine": platform.processor() or platform.machine(),
        "rows": found,
    }


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tutorial", type=pathlib.Path, help="JAX's mgpu_examples_test.py")
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--repeats", type=int, default=5, help="for the times")
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--blocks", action="store_true", help="runs blocks of published sizes")
    parser.add_argument("--ptxas", help="the assembler of both")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    if options.ptxas is not None:
        config.update("ptxas", options.ptxas)
    compilers = Compilers(options.target)
    rows: dict[str, dict[str, Any]] = {}
    for case in blackwell_cases.cases(options.tutorial):
        if options.only not in case.name:
            continue
        with blackwell_cases.multiprocessors(find_target(options.target).multiprocessors):
            row: dict[str, Any] = dict(measure(compilers, case, options.repeats))
            if options.blocks:
                row["blocks"] = blackwell_blocks.chosen_blocks(case, options.target)
        if case.slots > 1:
            row["in_flight"] = blackwell_blocks.in_flight(case, options.target)
        rows[case.name] = row
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(recorded(rows, options.target), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
