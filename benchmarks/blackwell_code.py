"""Machine code of published kernels for Blackwell, by Pallasite and by JAX's own compiler.

No GPU is needed: both compile for a target that is named. The source is the same: the kernels of
JAX's tutorial are read from the file of its tests that has them, the GEMM from the installed JAX;
for Pallasite only the import of the GPU module is replaced. One assembler makes the machine code of
both. Needs absl-py, and JAX's compiler as tests/upstream/jax_compiler.py says.

    python benchmarks/blackwell_code.py --tutorial JAX/tests/pallas/mgpu_examples_test.py \\
        --json blackwell_code.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import platform
import re
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import jax
import jax.numpy as jnp
import jax_compiler
import jax_on_simulator
import published
import stand_ins

import pallasite
from pallasite import config
from pallasite.codegen import assembler
from pallasite.target_selection import find_target

OURS, JAX = "ours", "upstream"

M, N, K = 4096, 8192, 4096
"""Of the published configurations."""

BLOCKS = {"tile_m": 128, "tile_n": 128, "tile_k": 64}

_MATRIX = re.compile(r"^UTC[A-Z]*MMA\b")
_UNIFORM = re.compile(r"^(UTC[A-Z]*MMA|UTCBAR|UTMALDG|UTMASTG|UBLKCP|UTCCP)\b")
_LOCAL = re.compile(r"^(LDL|STL)\b")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\.(L\w+):")
_BRANCH = re.compile(r"`\(\.(L\w+)\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A machine instruction: its guard without which it always runs, its name, its operands."""

    guard: str | None
    name: str
    operands: str


@dataclasses.dataclass(frozen=True)
class Code:
    """What a compiler made of a kernel.

    Attributes:
      registers: of a thread.
      spills: bytes of spills and of the stack.
      local: instructions that access local memory.
      instructions: of the kernel.
      loop: instructions of the loop that issues matrix instructions, without those that wait for
        barriers again.
      products: matrix instructions in that loop.
      divergent: copies, products and commits under predicates of single lanes.
      seconds: of processors, from the call to machine code.
    """

    registers: int
    spills: int
    local: int
    instructions: int
    loop: int
    products: int
    divergent: int
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Machine instructions for each matrix instruction."""
        return self.loop / self.products if self.products else math.nan


def read_code(ptx: str, name: str) -> Code:
    """Assembles PTX, and counts."""
    assembly = assembler.assemble(ptx, name)
    instructions, labels = parsed(assembler.disassemble(assembly.cubin))
    first, last = issuing_loop(instructions, labels)
    loop = instructions[first : last + 1]
    return Code(
        registers=assembly.registers,
        spills=assembly.spill_store_bytes + assembly.spill_load_bytes + assembly.stack_bytes,
        local=sum(_LOCAL.match(one.name) is not None for one in instructions),
        instructions=len(instructions),
        loop=len(loop),
        products=sum(_MATRIX.match(one.name) is not None for one in loop),
        divergent=sum(
            _UNIFORM.match(one.name) is not None and bool(one.guard) and "UP" not in str(one.guard)
            for one in instructions
        ),
    )


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a disassembled kernel, and at which of them its labels are."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(instructions)
        elif (found := _LINE.match(line)) is not None:
            instructions.append(Instruction(found[1], found[2], found[3]))
    return instructions, labels


def issuing_loop(instructions: Sequence[Instruction], labels: dict[str, int]) -> tuple[int, int]:
    """First and last instruction of the shortest loop that has a matrix instruction.

    Raises:
      ValueError: there is none.
    """
    products = [n for n, one in enumerate(instructions) if _MATRIX.match(one.name)]
    loops = []
    for last, one in enumerate(instructions):
        target = _BRANCH.search(one.operands) if one.name.startswith("BRA") else None
        first = labels.get(target[1], last) if target is not None else last
        if any(first <= product <= last for product in products) and first < last:
            loops.append((last - first, first, last))
    if not loops:
        raise ValueError("no loop issues matrix instructions")
    _, first, last = min(loops)
    return first, last


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of two matrices of float16.

    Attributes:
      modules: that of each compiler.
      call: makes the function, given a module.
    """

    name: str
    modules: dict[str, Any]
    call: Callable[[Any], Callable[..., Any]]


def cases(tutorial: pathlib.Path | None) -> list[Case]:
    """All kernels; those of the tutorial only if its file is there."""

    def step(number: int) -> Callable[[Any], Callable[..., Any]]:
        grid = {"grid_minor_dim": 0, "grid_tile_width": 6} if number == 6 else {}

        def call(module: Any) -> Callable[..., Any]:
            chosen = module.TuningConfig(**BLOCKS, max_concurrent_steps=4, **grid)
            return functools.partial(getattr(module, f"matmul{number}"), config=chosen)

        return call

    def published_matmul(collective: bool) -> Callable[[Any], Callable[..., Any]]:
        def call(module: Any) -> Callable[..., Any]:
            chosen = module.TuningConfig(
                **BLOCKS,
                max_concurrent_steps=6,
                collective=collective,
                epilogue_tile_n=32,
                grid_minor_dim=module.MatmulDimension.N,
                grid_tile_width=8,
            )
            return functools.partial(module.matmul_kernel, config=chosen)

        return call

    name = "blackwell_matmul_mgpu"
    modules = {
        OURS: published.load(name, lane_semantics=False),
        JAX: importlib.import_module(f"{published.PACKAGE}.{name}"),
    }
    found = [
        Case(f"{name}{', pairs' if pairs else ''}", modules, published_matmul(pairs))
        for pairs in (True, False)
    ]
    if tutorial is not None:
        modules = {
            OURS: stand_ins.load(tutorial, ours=True),
            JAX: stand_ins.load(tutorial, ours=False),
        }
        found += [Case(f"tutorial, step {number}", modules, step(number)) for number in range(7)]
    return found


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
        function = case.call(case.modules[who])
        shapes = ((M, depth), (depth, N))
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
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
        for who in (OURS, JAX) if repetition % 2 else (JAX, OURS):
            ptx, taken = compilers.compile(case, who, K + repetition * BLOCKS["tile_k"])
            if repetition:
                seconds[who].append(taken)
            else:
                codes[who] = read_code(ptx, case.name)
    return {
        who: dataclasses.replace(codes[who], seconds=statistics.median(seconds[who]))
        for who in (OURS, JAX)
    }


def print_table(rows: dict[str, dict[str, Code]]) -> None:
    """Prints all numbers, ours before upstream's."""
    lines = []
    for name, codes in rows.items():
        ours, theirs = codes[OURS], codes[JAX]
        pairs = [
            [f"{one.ratio:.2f}" for one in (ours, theirs)],
            *([str(getattr(one, what)) for one in (ours, theirs)] for what in COUNTS),
            [f"{1e3 * one.seconds:.0f}" for one in (ours, theirs)],
        ]
        ratio = ours.seconds / theirs.seconds
        lines.append((name, *[" / ".join(pair) for pair in pairs], f"{ratio:.2f}"))
    heads = ("per product", *COUNTS, "cpu ms", "ratio of ms")
    harness.print_table(("kernel, ours / upstream", *heads), lines)


COUNTS = ("registers", "spills", "local", "divergent", "instructions")


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tutorial", type=pathlib.Path, help="JAX's mgpu_examples_test.py")
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--repeats", type=int, default=5, help="for the times")
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    count = find_target(options.target).multiprocessors
    type(jax.devices()[0]).core_count = property(lambda device: count)
    compilers = Compilers(options.target)
    rows = {
        case.name: measure(compilers, case, options.repeats)
        for case in cases(options.tutorial)
        if options.only in case.name
    }
    print_table(rows)
    if options.json is not None:
        record = {
            "target": options.target,
            "jax": jax.__version__,
            "machine": platform.processor() or platform.machine(),
            "shape": [M, N, K],
            "rows": {
                name: {
                    who: dataclasses.asdict(code) | {"per_product": code.ratio}
                    for who, code in codes.items()
                }
                for name, codes in rows.items()
            },
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
