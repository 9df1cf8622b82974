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
MOVED = (*NUMBERS, "bool", "uint16", "float8_e4m3fn", "float8_e5m2")
TRAINED = ("float32", "bfloat16", "float16")


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


def _layer_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def _rms_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _places(x: Any, axis: int) -> Any:
    """Indices along an axis, in an order without a pattern."""
    n = x.shape[axis]
    return (lax.iota(jnp.int32, n) * 7 + 3) % n


def _quantized(x: Any) -> Any:
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + 1e-6
    return jnp.round(x / scale).astype(jnp.int8)


def _triangle(x: Any) -> Any:
    rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - n) for n in (2, 1))
    return jnp.where(columns <= rows, x, jnp.zeros_like(x))


ROWS = (2, 2, 3)
BODIES |= {
    "layer norm": Body(_layer_norm, TRAINED, ROWS),
    "rms norm": Body(_rms_norm, TRAINED, ROWS),
    "log softmax": Body(lambda x: jax.nn.log_softmax(x, axis=-1), TRAINED, ROWS),
    "softmax of columns": Body(lambda x: jax.nn.softmax(x, axis=0), TRAINED, ROWS),
    "logsumexp of rows": Body(lambda x: jax.nn.logsumexp(x, axis=-1), TRAINED, ROWS),
    "mean of columns": Body(lambda x: jnp.mean(x, axis=0), TRAINED, ROWS),
    "variance of rows": Body(lambda x: jnp.var(x, axis=-1), TRAINED, ROWS),
    "quantized": Body(_quantized, TRAINED, ROWS),
    "gelu": Body(jax.nn.gelu, TRAINED),
    "gated": Body(lambda x: jax.nn.silu(x) * x, TRAINED),
    "compared": Body(lambda x: x > jnp.zeros_like(x)),
    "any of rows": Body(lambda x: jnp.any(x != jnp.zeros_like(x), axis=-1), ranks=ROWS),
    "product of rows": Body(
        lambda x: jnp.prod(x, axis=-1, dtype=x.dtype), ("float32", "int32"), ROWS
    ),
    "min of columns": Body(lambda x: jnp.min(x, axis=0), ranks=ROWS),
    "argmax of rows": Body(lambda x: jnp.argmax(x, axis=-1), ranks=ROWS),
    "argsort of rows": Body(lambda x: jnp.argsort(x, -1), ("float32", "int16"), (2,), 16384),
    "top of rows": Body(lambda x: lax.top_k(x, 1)[0], ("float32", "bfloat16"), (2,), 16384),
    "cumsum of columns": Body(lambda x: lax.cumsum(x, 0), ("float32", "int32"), ROWS),
    "cumprod of rows": Body(lambda x: lax.cumprod(x, x.ndim - 1), ("float32",), (2,)),
    "masked": Body(_triangle, MOVED, ROWS),
    "joined along rows": Body(lambda x: jnp.concatenate([x, x], -1), MOVED, ROWS, 32768),
    "joined along columns": Body(lambda x: jnp.concatenate([x, x], 0), MOVED, ROWS, 32768),
    "stacked": Body(lambda x: jnp.stack([x, -x]), TRAINED, ROWS, 32768),
    "flat": Body(lambda x: x.reshape(-1), MOVED, ROWS),
    "one axis more": Body(lambda x: x[:, None] * 2, NUMBERS),
    "repeated rows": Body(
        lambda x: jnp.broadcast_to(x[None], (3, *x.shape)), MOVED, (1, 2, 2), 16384
    ),
    "first row": Body(lambda x: jnp.broadcast_to(x[:1], x.shape), MOVED, ROWS),
    "bias": Body(lambda x: x + x[:1], NUMBERS, ROWS),
    "scaled rows": Body(lambda x: x * x[..., :1], NUMBERS, ROWS),
    "first column": Body(lambda x: x - x[..., :1], NUMBERS, ROWS),
    "differences": Body(lambda x: x[1:] - x[:-1] if x.shape[0] > 1 else x, NUMBERS, ROWS),
    "every second row": Body(lambda x: x[::2], MOVED, ROWS),
    "every second column": Body(lambda x: x[..., ::2], MOVED, ROWS),
    "rolled": Body(lambda x: jnp.roll(x, 1, axis=-1), MOVED, ROWS),
    "tiled": Body(lambda x: jnp.tile(x, (1,) * (x.ndim - 1) + (2,)), MOVED, ROWS, 32768),
    "taken rows": Body(lambda x: jnp.take(x, _places(x, 0), axis=0), NUMBERS, ROWS),
    "taken columns": Body(lambda x: jnp.take(x, _places(x, -1), axis=-1), NUMBERS, ROWS),
    "padded below": Body(lambda x: jnp.pad(x, [(0, 3)] * x.ndim), MOVED, ROWS, 32768),
    "product with itself": Body(
        lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.float32), TRAINED, (2,)
    ),
    "exchanged axes": Body(lambda x: jnp.swapaxes(x, -1, -2), MOVED, (3,)),
    "halves": Body(
        lambda x: jnp.multiply(x[..., : x.shape[-1] // 2], x[..., -(x.shape[-1] // 2) :]),
        TRAINED,
        ROWS,
    ),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel: an array in global memory, a function of it, another array in global memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    semantics: Any

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} {self.semantics.name}"


WORST = (3, 5, 7, 9, 31, 63, 127, 129, 251, 255)
"""Extents of which rows begin everywhere between words, or that are next to powers of two."""


def make_program(seed: int, worst: bool = False) -> Program:
    """The program of a seed; of the worst extents, with small ones beside them, or any."""
    choose = random.Random(seed)
    name = choose.choice(sorted(BODIES))
    body = BODIES[name]
    rank = choose.choice(body.ranks)
    largest = {1: 65536, 2: 256, 3: 64}[rank]
    while True:
        shape = tuple((_bad_extent if worst else _extent)(choose, largest) for _ in range(rank))
        if powers_size(shape) <= body.most:
            break
    semantics = choose.choice(list(plgpu.LoweringSemantics))
    return Program(name, shape, choose.choice(body.dtypes), semantics)


def _extent(choose: random.Random, largest: int) -> int:
    """A random extent; one of eight is at a limit, or next to one."""
    if choose.random() < 0.125:
        return choose.choice([1, 2, 3, largest - 3, largest - 1, largest])
    return choose.randint(1, largest)


def _bad_extent(choose: random.Random, largest: int) -> int:
    """One of the worst extents, or a small one."""
    if choose.random() < 0.6:
        return choose.choice([extent for extent in WORST if extent <= largest])
    return choose.randint(1, 24)


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
    parser.add_argument("--worst", action="store_true", help="extents that are worst, and small")
    given = parser.parse_args(arguments)
    found: list[tuple[float, int, int, int, Program]] = []
    failed = 0
    begin = time.monotonic()
    with jax.enable_x64(True):
        for seed in range(given.seed, given.seed + given.count):
            program = make_program(seed, given.worst)
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
