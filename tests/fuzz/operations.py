"""Random calls of ``pallasite.ops``, compared with NumPy in float64.

    python -m tests.fuzz operations --seed 0 --count 200

runs so many programs for the targets of all installed plugins, on the simulator where there is no
GPU, and prints those that are wrong, each with the options that run it alone. A program is an
operation, its operands and options: extents that are 0, 1, odd or prime, lengths that are 0 or 1,
fewer keys than queries, all dtypes, gradients, ``jax.vmap``, ``jax.shard_map``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from tests.fuzz import _attention_operations as attentions
from tests.fuzz import _executors
from tests.fuzz import _product_terms as product_terms
from tests.fuzz import _references as references
from tests.fuzz import _row_operations as rows
from tests.fuzz._executors import Executor
from tests.fuzz._programs import (
    BF16,
    F16,
    F32,
    FLOAT8,
    INT4,
    INT8,
    ROUNDING,
    TOLERANCES,
    Draw,
    Program,
    lengths,
    steepness,
    typical,
)

import pallasite
from pallasite import ops

COPIES = 2
"""Of a program that is mapped."""

TARGETS = ("sm_90a", "sm_100a", "sm_90", "sm_120a")


# Programs -----------------------------------------------------------------------------------------


def relu(x: Any) -> Any:
    """An activation; one object for all calls."""
    return jnp.maximum(x, 0)


def squared_relu(x: Any) -> Any:
    """An activation with a continuous derivative."""
    return jnp.square(jnp.maximum(x, 0))


def _differentiable(options: dict[str, Any], gradients: tuple[str, ...]) -> None:
    """Replaces what has a step in its derivative: rounding moves numbers across it, so that a
    gradient has no tolerance."""
    if gradients and options.get("activation") is relu:
        options["activation"] = squared_relu


def matmul(draw: Draw) -> Program:
    """A product with an epilogue."""
    pairs = [(one, one) for one in (BF16, F16, F32, *INT8, *FLOAT8)]
    left, right = draw.one(*pairs, (BF16, F32), (F16, BF16), FLOAT8, INT8)
    m, n, k = (draw.extent(3, 8, 17, 40, 64, 101, 130) for _ in range(3))
    integers = left.kind in "iu"
    transpose_a, transpose_b = draw.chance(0.5), draw.chance(0.5)
    wide = left if left == right else F32
    default = np.dtype(np.int32) if integers else BF16 if left.itemsize == 1 else wide
    out = default if integers else draw.one(default, default, F32, BF16)
    arrays = {
        "a": draw.array((k, m) if transpose_a else (m, k), left),
        "b": draw.array((n, k) if transpose_b else (k, n), right),
        "row_scale": draw.maybe(0.2, lambda: draw.array(draw.one((m,), ()), F32)),
        "column_scale": draw.maybe(0.2, lambda: draw.array(draw.one((n,), ()), F32)),
        "bias": draw.maybe(0.3, lambda: draw.array((n,), draw.one(F32, BF16))),
        "residual": draw.maybe(0.2, lambda: draw.array((m, n), out)),
    }
    if integers:
        arrays.update(row_scale=None, column_scale=None, bias=None, residual=None)
    options: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if out != default:
        options["out_dtype"] = out
    if not integers and draw.chance(0.2):
        options["activation"] = relu
    gradients = ()
    if not integers and draw.chance(0.3):
        gradients = tuple(name for name, array in arrays.items() if array is not None)
    _differentiable(options, gradients)
    tolerance = 3e-2 if left.itemsize == 1 else max(TOLERANCES[left], TOLERANCES[right])
    tolerance = 0.0 if integers else max(tolerance, TOLERANCES[out])
    return Program(
        "matmul",
        arrays,
        options,
        lambda **given: ops.matmul(given.pop("a"), given.pop("b"), **given, **options),
        lambda **given: references.matmul(**given, **options),
        gradients,
        tolerance,
        terms=functools.partial(product_terms.matmul, **options, by=gradients),
        unit=tolerance,
    )


def decode(draw: Draw) -> Program:
    """Attention of few queries against a cache, with or without pages."""
    dtype = draw.one(BF16, BF16, F16, F32)
    cache = draw.one(dtype, dtype, FLOAT8[0], INT8[0])
    batch, kv_heads, tokens = draw.extent(1, 3), draw.extent(1, 2), draw.one(0, 1, 2, 8, 19, 70)
    heads, dim = kv_heads * draw.one(1, 2, 5), draw.one(16, 40, 64, 64, 128)
    outer = (batch,) if tokens == 0 else (batch, tokens)
    arrays = {"q": draw.array((*outer, heads, dim), dtype)}
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        options["scale"] = draw.one(0.07, 0.5, 1.7)
    if draw.chance(0.2):
        options["soft_cap"] = draw.one(2.0, 30.0)
    scale = 1.0
    if cache.itemsize == 1:
        scale = 0.02 if cache in INT8 else 0.7
        options.update(k_scale=scale, v_scale=scale)
    name = "paged_attention" if draw.chance(0.5) else "decode_attention"
    if name == "paged_attention":
        size, each, pages = draw.one(8, 24, 64), draw.extent(1, 3), draw.one(4, 7)
        first = draw.chance(0.5)
        shape = (kv_heads, pages, size, dim) if first else (pages, size, kv_heads, dim)
        options["page_layout"] = "heads_first" if first else "tokens_first"
        arrays["k_pages"], arrays["v_pages"] = (draw.array(shape, cache) for _ in range(2))
        arrays["kv_lengths"] = lengths(draw, batch, each * size)
        arrays["page_indices"] = draw.random.integers(0, pages, (batch, each)).astype(np.int32)
    else:
        rows = draw.extent(1, 9, 72, 130, 257)
        arrays["k"], arrays["v"] = (draw.array((batch, rows, kv_heads, dim), cache) for _ in "kv")
        arrays["kv_lengths"] = draw.maybe(0.6, lambda: lengths(draw, batch, rows))

    def function(**given: Any) -> Any:
        return getattr(ops, name)(**given, **options)

    keys = arrays["k_pages" if name == "paged_attention" else "k"]
    steep = steepness(dtype, arrays["q"], keys, scale * options.get("scale", dim**-0.5))
    return Program(
        name,
        arrays,
        options,
        function,
        lambda **given: references.decode(**given, **options),
        (),
        max(steep * TOLERANCES[dtype], 0.0 if cache == dtype else 3e-2),
    )


def ragged(draw: Draw) -> Program:
    """Products of groups of rows."""
    dtype = draw.one(BF16, BF16, F16, F32)
    groups, m = draw.extent(1, 2, 5), draw.extent(7, 64, 70, 129)
    n, k = (draw.extent(3, 8, 31, 64, 72) for _ in range(2))
    parts = draw.random.multinomial(m, np.ones(groups + 1) / (groups + 1))[:groups]
    sizes = np.where(draw.random.random(groups) < 0.2, 0, parts).astype(np.int32)
    name = draw.one("ragged_matmul", "transposed_ragged_matmul")
    options: dict[str, Any] = {}
    if name == "ragged_matmul":
        options["transpose_b"] = draw.chance(0.5)
        right = (groups, n, k) if options["transpose_b"] else (groups, k, n)
    else:
        right = (m, n)
    out = draw.one(dtype, dtype, F32)
    if out != dtype:
        options["out_dtype"] = out
    arrays = {"a": draw.array((m, k), dtype), "b": draw.array(right, dtype), "group_sizes": sizes}
    reference = functools.partial(getattr(references, name), **options)
    gradients = ("a", "b") if draw.chance(0.3) else ()
    return Program(
        name,
        arrays,
        options,
        lambda **given: getattr(ops, name)(**given, **options),
        lambda **given: reference(**given),
        gradients,
        TOLERANCES[dtype],
        terms=product_terms.of_linear(reference, gradients),
        unit=TOLERANCES[dtype],
    )


def mixed(draw: Draw) -> Program:
    """Products with narrow weights."""
    dtype, weights = draw.one(BF16, F16), draw.one(*INT8, *INT4, *FLOAT8)
    m, n = draw.extent(1, 5, 33, 130), draw.extent(3, 16, 72, 136)
    group = draw.one(0, 8, 16, 24, 32, 64, 128)
    k = group * draw.one(1, 2, 3) if group else draw.extent(3, 64, 101, 256)
    transpose_b = draw.chance(0.5)
    scales = None
    if group or draw.chance(0.5):
        shape = (k // group, n) if group else (n,)
        scales = draw.random.uniform(0.5, 2, shape).astype(F32)
    arrays = {
        "a": draw.array((m, k), dtype, 0.1),
        "b": draw.array((n, k) if transpose_b else (k, n), weights),
        "scales": scales,
    }
    options: dict[str, Any] = {"transpose_b": transpose_b}
    if draw.chance(0.3):
        options["out_dtype"] = F32
    return Program(
        "mixed_matmul",
        arrays,
        options,
        lambda **given: ops.mixed_matmul(given.pop("a"), given.pop("b"), **given, **options),
        lambda **given: references.mixed_matmul(**given, **options),
        (),
        TOLERANCES[BF16],
        least=max(1e-2, typical(k, *arrays.values())),
    )


def gated(draw: Draw) -> Program:
    """Two products, of which one is activated."""
    dtype = draw.one(BF16, BF16, F16, F32)
    m, n, k = (draw.extent(3, 8, 17, 40, 64, 101, 130) for _ in range(3))
    arrays = {
        "a": draw.array((m, k), dtype),
        "gate": draw.array((k, n), dtype, 0.3),
        "up": draw.array((k, n), dtype),
    }
    options: dict[str, Any] = {"activation": draw.one(jax.nn.silu, jnp.tanh, relu)}
    gradients = ("a", "gate", "up") if draw.chance(0.4) else ()
    _differentiable(options, gradients)
    return Program(
        "gated_matmul",
        arrays,
        options,
        lambda **given: ops.gated_matmul(**given, **options),
        lambda **given: references.gated_matmul(**given, **options),
        gradients,
        TOLERANCES[dtype],
        terms=functools.partial(product_terms.gated_matmul, **options, by=gradients),
        unit=TOLERANCES[dtype],
    )


KINDS = (matmul, *attentions.KINDS, decode, decode, ragged, mixed, gated, *rows.KINDS)


def program(seed: int, number: int) -> tuple[str, Program]:
    """Target and program of a seed and a number."""
    draw = Draw(zlib.crc32(f"{seed}/{number}".encode()))
    target, kind = draw.one(*TARGETS), draw.one(*KINDS)
    made = kind(draw)
    mapping = draw.one("vmap", "shard_map") if made.mappable and draw.chance(0.2) else ""
    if made.gradients and any(one is not None and not one.size for one in made.arrays.values()):
        # XLA cannot partition gradients by empty arrays, of jax.numpy's product either ("expected
        # at least one operand ... to be produced by a GlobalToLocalShape", jaxlib 0.11.2).
        mapping = mapping and "vmap"
    names = [name for name, array in made.arrays.items() if array is not None]
    over = tuple(name for name in names if draw.chance(0.7)) or tuple(names[:1])
    return target, dataclasses.replace(made, mapping=mapping, over=over if mapping else ())


def programs(seed: int, count: int) -> Iterator[tuple[int, str, Program]]:
    """Numbers, targets and programs of a seed; each depends on the seed and its number alone."""
    for number in range(count):
        yield number, *program(seed, number)


# Checks -------------------------------------------------------------------------------------------


def check(program: Program, target: str, executors: Sequence[Executor] | None = None) -> str | None:
    """Runs a program, and compares its results and gradients with the reference.

    Args:
      program: the program.
      target: what it is compiled for; on a GPU, its own portable target instead of other chips'.
      executors: what runs its kernels; by default what serves JAX's first device.

    Returns:
      Whether the bits of two executors are equal, or why they need not be.

    Raises:
      AssertionError: results differ.
      PallasiteError: the program is refused.
    """
    executors = _executors.executors() if executors is None else executors
    with _executors.on_cpu():
        wide = {k: None if a is None else _wide(k, a) for k, a in program.arrays.items()}
        expected = references.with_gradients(program.reference, wide, program.gradients)
        terms = references.with_gradients(program.terms, wide, ()) if program.terms else []
    # Of the last results, which gradients are.
    rounding = [0.0] * (len(expected) - len(terms))
    rounding += [program.unit * float(one.max(initial=0)) for one in terms]
    results = []
    with pallasite.target(_executors.target_on(executors, target)), _executors.recorded() as ptx:
        for executor in executors:
            with jax.default_device(executor.device):
                given = _given(program)
                found = jax.jit(_call(program, executor.device))(given)
                results.append(_last(program, [np.asarray(one) for one in found]))
            wrong = _wrong(program, results[-1], expected, rounding)
            assert wrong is None, f"on the {executor.name}: {wrong}"
        if len(results) == 1:
            return None

        def reasons() -> list[str]:
            traced = jax.make_jaxpr(_call(program, executors[0].device))(_given(program))
            outside = _executors.computes_outside(traced.jaxpr)
            return _executors.inexact(ptx, outside=outside)

        return _executors.compared(results[0], results[1], reasons)


def problem(
    program: Program, target: str, executors: Sequence[Executor] | None = None
) -> str | None:
    """What is wrong with the results of a program, or None."""
    try:
        check(program, target, executors)
    except AssertionError as error:
        return str(error)
    return None


def _given(program: Program) -> dict[str, Any]:
    """Operands, twice those that the program is mapped over. Not by XLA, which also does
    arithmetic with elements of 4 bits."""
    given = {k: a for k, a in program.arrays.items() if a is not None}
    return {
        k: jnp.asarray(np.stack([a] * COPIES) if k in program.over else a) for k, a in given.items()
    }


def _wide(name: str, array: np.ndarray) -> np.ndarray:
    is_length = "lengths" in name and not np.issubdtype(array.dtype, np.inexact)
    return array.astype(np.int64 if is_length else np.float64)


def _call(program: Program, device: Any) -> Callable[[dict[str, Any]], list[Any]]:
    """A function of the operands that returns results, and gradients of the sum of the first."""
    missing = dict.fromkeys(name for name, array in program.arrays.items() if array is None)

    def results(given: dict[str, Any]) -> list[Any]:
        return jax.tree.leaves(program.function(**given, **missing))

    mapped = _mapped(program, results, device)

    def call(given: dict[str, Any]) -> list[Any]:
        if not program.gradients:
            found, slopes = mapped(given), []
        else:
            by = {name: given[name] for name in program.gradients}
            found, pull = jax.vjp(lambda by: mapped({**given, **by}), by)
            ones = [jnp.ones_like(found[0]), *(_no_cotangent(one) for one in found[1:])]
            slopes = [pull(ones)[0][name] for name in program.gradients]
        return [*found, *slopes]

    return call


def _last(program: Program, found: list[np.ndarray]) -> list[np.ndarray]:
    """Of results and gradients of a program that is mapped, those of one call.

    Not by JAX: XLA adds zeros to an element that it takes from another device.
    """
    if not program.mapping:
        return found
    count = len(found) - len(program.gradients)
    slopes = [
        # Every call adds to the gradient of an operand that all have in common.
        slope[-1] if name in program.over else (slope / COPIES).astype(slope.dtype)
        for name, slope in zip(program.gradients, found[count:], strict=True)
    ]
    return [*(one[-1] for one in found[:count]), *slopes]


def _mapped(
    program: Program, results: Callable[[dict[str, Any]], list[Any]], device: Any
) -> Callable[[dict[str, Any]], list[Any]]:
    """A function of operands of which some have one more axis; so have the results."""
    if not program.mapping:
        return results
    names = [name for name, array in program.arrays.items() if array is not None]
    in_axes = {name: 0 if name in program.over else None for name in names}
    several = jax.vmap(results, (in_axes,))
    if program.mapping == "vmap":
        return several
    devices = jax.local_devices(backend=device.platform)[:COPIES]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    specs = {name: P("x") if name in program.over else P() for name in names}

    def on_one(given: dict[str, Any]) -> list[Any]:
        if len(devices) < COPIES:
            return several(given)
        own = {name: a[0] if name in program.over else a for name, a in given.items()}
        return [one[None] for one in results(own)]

    return jax.shard_map(on_one, mesh=mesh, in_specs=(specs,), out_specs=P("x"))


def _no_cotangent(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _wrong(
    program: Program, found: list[Any], expected: list[np.ndarray], rounding: list[float]
) -> str | None:
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for place, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        tolerance = max(program.tolerance, ROUNDING.get(one.dtype, 0.0))
        numbers = one.astype(np.float64)
        if numbers.shape == wanted.shape and jnp.issubdtype(one.dtype, jnp.inexact):
            # Gradients by what all mapped calls have in common are sums over them, which formats
            # of 8 bits may lack; what is then NaN or infinite is as JAX's conversion has it.
            copies = COPIES if program.mapping else 1
            holds = np.abs(wanted) * copies <= 0.9 * float(jnp.finfo(one.dtype).max)
            holds |= ~np.isfinite(wanted)
            numbers, wanted = numbers[holds], wanted[holds]
        wrong = _difference(numbers, wanted, tolerance, program.least, rounding[place])
        if wrong:
            return f"result {place}: {wrong}"
    for name, slope in zip(
        program.gradients, found[len(found) - len(program.gradients) :], strict=True
    ):
        dtype = np.asarray(program.arrays[name]).dtype
        if slope.dtype != dtype:
            return f"the gradient by {name} has dtype {slope.dtype}"
    return None


def _difference(
    found: np.ndarray, expected: np.ndarray, tolerance: float, least: float, rounding: float
) -> str | None:
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    if not found.size:
        return None
    special = ~np.isfinite(expected)
    if not np.array_equal(found[special], expected[special], equal_nan=True):
        return f"{np.sum(found[special] != expected[special])} special numbers differ"
    found, expected = found[~special], expected[~special]
    if not found.size:
        return None
    if not np.isfinite(found).all():
        return f"{np.sum(~np.isfinite(found))} of {found.size} are not finite"
    largest = max(float(np.abs(expected).max()), least)
    worst = float(np.abs(found - expected).max())
    if worst > tolerance * largest + rounding:
        return f"off by {worst:.3g}, where the largest is {largest:.3g}"
    return None


def main(argv: Sequence[str]) -> int:
    """Runs the programs of a seed; returns how many are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int, default=None, help="the number of one program")
    parser.add_argument("--executor", choices=_executors.NAMES, default="auto")
    options = parser.parse_args(argv)
    executors = _executors.executors(options.executor)
    count = options.count if options.only is None else options.only + 1
    wrong = 0
    for number, target, program in programs(options.seed, count):
        if options.only not in (None, number):
            continue
        if number % 200 == 199:
            # What JAX keeps of each program is never used again.
            jax.clear_caches()
            print(f"{number + 1} programs, {wrong} wrong so far", file=sys.stderr, flush=True)
        try:
            found = problem(program, target, executors)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong += 1
            print(
                f"--seed {options.seed} --only {number}: {target} {program}\n  {found}", flush=True
            )
    print(f"{wrong} of {count} programs are wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
