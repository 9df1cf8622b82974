"""Sizes of the code of kernels on arrays of random shapes, against the next powers of two.

    python -m tests.fuzz sizes --seed 0 --count 200

compiles so many kernels, each for a random shape and for the shape whose extents are the next
powers of two, and prints the kernels by how many times more PTX instructions the first one has.
Nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite
from pallasite import PallasiteError
from pallasite import gpu as plgpu

LIMIT = 2.0
"""Instructions, at most, by those for powers of two ..."""

ALLOWANCE = 100
"""... and so many more: masks and the indices that they compare."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
NUMBERS = ("int8", "uint8", "int16", "int32", "int64", *FLOATS)


@dataclasses.dataclass(frozen=True)
class Body:
    """What a kernel does with an array.

    Attributes:
      function: of the array.
      dtypes: which it is tried with.
      ranks: of arrays.
      most: elements, at most.
    """

    function: Callable[[Any], Any]
    dtypes: tuple[str, ...] = NUMBERS
    ranks: tuple[int, ...] = (1, 2, 2, 2, 3)
    most: int = 65536


BODIES = {
    "copy": Body(lambda x: x),
    "twice": Body(lambda x: x * 2),
    "exp": Body(jnp.exp, ("float32", "bfloat16", "float16")),
    "cast": Body(lambda x: x.astype(jnp.float32), ("int8", "bfloat16", "int16")),
    "narrow": Body(lambda x: x.astype(jnp.bfloat16), ("float32", "int32")),
    "softmax": Body(lambda x: jax.nn.softmax(x, axis=-1), ("float32", "bfloat16"), (2,)),
    "sum of rows": Body(lambda x: jnp.sum(x, axis=-1, dtype=x.dtype), ranks=(2, 2, 3)),
    "max of rows": Body(lambda x: jnp.max(x, axis=-1), ranks=(2, 2, 3)),
    "max of columns": Body(lambda x: jnp.max(x, axis=0), ranks=(2, 2, 3)),
    "sum of all": Body(lambda x: jnp.sum(x, dtype=x.dtype)),
    "centred": Body(
        lambda x: x - jnp.mean(x, axis=0, keepdims=True), ("float32", "bfloat16"), (2, 3)
    ),
    "outer": Body(lambda x: x + jnp.max(x, 0, keepdims=True) * jnp.min(x, 1, keepdims=True)),
    "argmin of rows": Body(lambda x: jnp.argmin(x, axis=-1), ranks=(2, 2, 3)),
    "argmax of columns": Body(lambda x: jnp.argmax(x, axis=0), ranks=(2, 2, 3)),
    "cumsum of rows": Body(lambda x: lax.cumsum(x, x.ndim - 1), ("float32", "int32")),
    "cummax of columns": Body(lambda x: lax.cummax(x, 0), ("float32", "int16"), (2,)),
    "transposed": Body(lambda x: x.T, ranks=(2, 2, 3)),
    "sorted": Body(lambda x: jnp.sort(x, axis=-1), ("float32", "int32", "int16"), most=16384),
    "reversed": Body(lambda x: jnp.flip(x, axis=0)),
    "padded": Body(lambda x: jnp.pad(x, [(1, 0)] * x.ndim)),
    "part": Body(lambda x: x[tuple(slice(n // 3, n) for n in x.shape)]),
}
BODIES["outer"] = dataclasses.replace(BODIES["outer"], ranks=(2, 2, 3))


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel: an array in global memory, a function of it, another array in global memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    semantics: Any

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} {self.semantics.name}"


def make_program(seed: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    name = choose.choice(sorted(BODIES))
    body = BODIES[name]
    rank = choose.choice(body.ranks)
    largest = {1: 65536, 2: 256, 3: 64}[rank]
    while True:
        shape = tuple(choose.randint(1, largest) for _ in range(rank))
        if powers_size(shape) <= body.most:
            break
    semantics = choose.choice(list(plgpu.LoweringSemantics))
    return Program(name, shape, choose.choice(body.dtypes), semantics)


def powers(shape: Sequence[int]) -> tuple[int, ...]:
    """The next powers of two."""
    return tuple(1 << (n - 1).bit_length() for n in shape)


def powers_size(shape: Sequence[int]) -> int:
    size = 1
    for n in powers(shape):
        size *= n
    return size


_INSTRUCTION = re.compile(r"^[ \t]+[@a-z].*;", re.MULTILINE)


def instructions(program: Program) -> int:
    """PTX instructions of a kernel, those of inline assembly included."""
    function = BODIES[program.name].function
    operand = jax.ShapeDtypeStruct(program.shape, program.dtype)

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = function(x_ref[...])

    called = plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(function, operand),
        compiler_params=plgpu.CompilerParams(lowering_semantics=program.semantics),
    )
    with pallasite.config.scoped(cache=False):
        return len(_INSTRUCTION.findall(pallasite.compile(called, operand, target="sm_90a").ptx))


def compared(program: Program) -> tuple[int, int]:
    """Instructions for the shape, and for the next powers of two."""
    even = dataclasses.replace(program, shape=powers(program.shape))
    return instructions(program), instructions(even)


def is_large(own: int, even: int) -> bool:
    """Whether a shape costs too much."""
    return own > LIMIT * even + ALLOWANCE


def main(arguments: Sequence[str]) -> int:
    """Prints the worst of random programs; returns 1 if one is too large."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz sizes", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--shown", type=int, default=30, help="how many are printed")
    parser.add_argument("--only", choices=sorted(BODIES), help="programs that do this")
    given = parser.parse_args(arguments)
    found: list[tuple[float, int, int, int, Program]] = []
    failed = 0
    begin = time.monotonic()
    with jax.enable_x64(True):
        for seed in range(given.seed, given.seed + given.count):
            program = make_program(seed)
            if given.only not in (None, program.name):
                continue
            try:
                own, even = compared(program)
            except PallasiteError as error:
                failed += 1
                print(f"seed {seed}: {program}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            found.append((own / even, own, even, seed, program))
    found.sort(key=lambda one: one[:4], reverse=True)
    for ratio, own, even, seed, program in found[: given.shown]:
        print(f"{ratio:6.2f}  {own:6d} {even:6d}  seed {seed:6d}  {program}")
    large = sum(is_large(own, even) for _, own, even, _, _ in found)
    above = sum(ratio > LIMIT for ratio, *_ in found)
    spent = (time.monotonic() - begin) / max(1, len(found))
    print(
        f"{len(found)} programs, {above} above {LIMIT} times, of which {large} by more than "
        f"{ALLOWANCE} instructions; {failed} not compiled; {spent * 1e3:.0f} ms each"
    )
    return int(large + failed > 0)
