"""Programs with operations and kernels on a device mesh, each compared with one of ``jax.numpy``.

A process of its own runs them, since the number of devices is fixed when JAX starts::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python sharded_programs.py --seed 0

It writes a line for each program: its name, and what went wrong, if anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite
from pallasite import gpu as plgpu
from pallasite import ops

MESHES = {"x": (2,), "xy": (2, 2)}
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, the same in ``jax.numpy``, and its operands.

    Attributes:
      shapes: of the operands on one device.
      dtypes: of the operands.
      differentiable: how many of the first operands have derivatives.
      draw: random values of a whole operand by its number, or None for normally distributed ones.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    differentiable: int
    draw: Callable[[np.random.Generator, int, tuple[int, ...]], np.ndarray] | None = None


# Operations and their references ------------------------------------------------------------------


def _wide(*arrays: Any) -> list[Any]:
    return [one.astype(jnp.float32) for one in arrays]


def _matmul(a: Any, b: Any, bias: Any, scale: Any) -> Any:
    return ops.matmul(a, b, bias=bias, row_scale=scale, activation=jnp.tanh)


def _matmul_reference(a: Any, b: Any, bias: Any, scale: Any) -> Any:
    a, b = _wide(a, b)
    sums = jnp.dot(a, b, precision="highest")
    return jnp.tanh(sums * scale[:, None] + bias).astype(BF16)


def _plain_reference(a: Any, b: Any) -> Any:
    return jnp.dot(*_wide(a, b), precision="highest").astype(BF16)


def _scores(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    """Attention of (batch, tokens, heads, dim), where ``hidden`` is for (batch, keys)."""
    q, k, v = _wide(q, k, v)
    k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], axis=2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[3] ** -0.5
    scores = jnp.where(hidden[:, None, None, :], -1e30, scores)
    weights = jnp.where(hidden[:, None, None, :], 0.0, jax.nn.softmax(scores, axis=-1))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest").astype(BF16)


def _attention(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return ops.attention(q, k, v, kv_lengths=lengths)


def _attention_reference(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return _scores(q, k, v, jnp.arange(k.shape[1]) >= lengths[:, None])


def _forward_only(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return ops.attention_forward(q, k, v, kv_lengths=lengths)[0]


def _decode(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return ops.decode_attention(q, k, v, kv_lengths=lengths)


def _decode_reference(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return _attention_reference(q[:, None], k, v, lengths)[:, 0]


def _paged(q: Any, k: Any, v: Any, lengths: Any, pages: Any) -> Any:
    return ops.paged_attention(q, k, v, lengths, pages)


def _paged_reference(q: Any, k: Any, v: Any, lengths: Any, pages: Any) -> Any:
    k, v = (one[:, pages].transpose(1, 2, 3, 0, 4) for one in (k, v))
    k, v = (one.reshape(one.shape[0], -1, *one.shape[3:]) for one in (k, v))
    return _decode_reference(q, k, v, lengths)


def _groups(sizes: Any, rows: int) -> Any:
    """(rows, groups): one where a row is of a group."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows)[:, None]
    return ((row < ends) & (row >= ends - sizes)).astype(jnp.float32)


def _ragged_reference(a: Any, b: Any, sizes: Any) -> Any:
    a, b = _wide(a, b)
    groups = _groups(sizes, a.shape[0])
    return jnp.einsum("mg,mk,gkn->mn", groups, a, b, precision="highest").astype(BF16)


def _transposed_reference(a: Any, b: Any, sizes: Any) -> Any:
    a, b = _wide(a, b)
    groups = _groups(sizes, a.shape[0])
    return jnp.einsum("mg,mk,mn->gkn", groups, a, b, precision="highest").astype(BF16)


def _mixed(a: Any, scales: Any, b: Any) -> Any:
    return ops.mixed_matmul(a, b, scales=scales)


def _mixed_reference(a: Any, scales: Any, b: Any) -> Any:
    a, b = _wide(a, b)
    return (jnp.dot(a, b, precision="highest") * scales).astype(BF16)


def _kernel_body(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] * w[...]


def _own_derivative() -> Callable[..., Any]:
    kernel = plgpu.kernel(_kernel_body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    function = jax.custom_vjp(lambda x, w: kernel(x, w))
    function.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda saved, d: (kernel(d, saved[1]), kernel(d, saved[0])),
    )

    def call(x: Any, w: Any) -> Any:
        axes = tuple(jax.typeof(x).mat.varying | jax.typeof(w).mat.varying)
        x, w = (
            lax.pcast(
                one, tuple(a for a in axes if a not in jax.typeof(one).mat.varying), to="varying"
            )
            for one in (x, w)
        )
        return function(x, w)

    return call


def _integers(
    generator: np.random.Generator, number: int, shape: tuple[int, ...], most: dict[int, int]
) -> np.ndarray:
    if number in most:
        return generator.integers(0, most[number] + 1, shape)
    return generator.standard_normal(shape)


def _at_most(**most: int) -> Callable[..., np.ndarray]:
    return functools.partial(_integers, most={int(key[1:]): value for key, value in most.items()})


F32, I32 = jnp.float32, jnp.int32
_HEADS = ((1, 16, 2, 64), (1, 24, 1, 64), (1, 24, 1, 64))
CASES = {
    "kernel": Case(_own_derivative(), lambda x, w: x * w, ((128,), (128,)), (F32, F32), 2),
    "matmul": Case(
        _matmul,
        _matmul_reference,
        ((16, 24), (24, 40), (40,), (16,)),
        (BF16, BF16, F32, F32),
        4,
    ),
    "plain matmul": Case(ops.matmul, _plain_reference, ((16, 24), (24, 40)), (BF16, BF16), 2),
    "attention": Case(
        _attention, _attention_reference, (*_HEADS, (1,)), (*[BF16] * 3, I32), 3, _at_most(_3=24)
    ),
    "attention_forward": Case(
        _forward_only, _attention_reference, (*_HEADS, (1,)), (*[BF16] * 3, I32), 0, _at_most(_3=24)
    ),
    "decode_attention": Case(
        _decode,
        _decode_reference,
        ((2, 2, 64), (2, 24, 1, 64), (2, 24, 1, 64), (2,)),
        (*[BF16] * 3, I32),
        0,
        _at_most(_3=24),
    ),
    "paged_attention": Case(
        _paged,
        _paged_reference,
        ((2, 2, 64), (1, 4, 8, 64), (1, 4, 8, 64), (2,), (2, 2)),
        (*[BF16] * 3, I32, I32),
        0,
        _at_most(_3=16, _4=3),
    ),
    "ragged_matmul": Case(
        ops.ragged_matmul,
        _ragged_reference,
        ((24, 16), (3, 16, 32), (3,)),
        (BF16, BF16, I32),
        2,
        _at_most(_2=8),
    ),
    "transposed_ragged_matmul": Case(
        ops.transposed_ragged_matmul,
        _transposed_reference,
        ((24, 16), (24, 32), (3,)),
        (BF16, BF16, I32),
        2,
        _at_most(_2=8),
    ),
    "mixed_matmul": Case(
        _mixed,
        _mixed_reference,
        ((16, 64), (32,), (64, 32)),
        (BF16, F32, jnp.int8),
        0,
        _at_most(_2=5),
    ),
}


# Transformations ----------------------------------------------------------------------------------


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of two calls, of which the second is in a loop."""

    def call(*operands: Any) -> Any:
        def step(carry: Any, factor: Any) -> tuple[Any, None]:
            return carry + function(*operands).astype(jnp.float32) * factor, None

        first = function(*operands).astype(jnp.float32)
        return lax.scan(step, first, jnp.arange(2.0))[0]

    return call


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Two calls at once; every other operand is the same in both."""

    def call(*operands: Any) -> Any:
        axes = tuple(0 if number % 2 == 0 else None for number in range(len(operands)))
        stacked = [
            one if axis is None else jnp.stack([one, one])
            for one, axis in zip(operands, axes, strict=True)
        ]
        return jax.vmap(function, in_axes=axes)(*stacked)

    return call


TRANSFORMS = {"plain": _plain, "remat": jax.checkpoint, "scan": _scanned, "vmap": _mapped}


def _gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def loss(*operands: Any) -> Any:
        result = function(*operands).astype(jnp.float32)
        return jnp.sum(jnp.sin(result + jnp.arange(result.size).reshape(result.shape)))

    return jax.grad(loss, argnums=tuple(range(count)))


# Programs -----------------------------------------------------------------------------------------


def _operands(
    case: Case, generator: np.random.Generator, varying: Sequence[tuple[str, ...]], sizes: Any
) -> list[jax.Array]:
    """Each with an axis in front for every axis of the mesh over which it varies."""
    found = []
    for number, (shape, dtype, axes) in enumerate(
        zip(case.shapes, case.dtypes, varying, strict=True)
    ):
        whole = (*(sizes[axis] for axis in axes), *shape)
        draw = case.draw or _at_most()
        found.append(jnp.asarray(draw(generator, number, whole)).astype(dtype))
    return found


def _same(got: Any, expected: Any, tolerance: float) -> None:
    for one, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == wanted.dtype, f"{one.dtype} instead of {wanted.dtype}"
        one, wanted = (np.asarray(x).astype(np.float64) for x in (one, wanted))
        assert one.shape == wanted.shape, f"{one.shape} instead of {wanted.shape}"
        difference = np.linalg.norm(one - wanted) / max(1e-3, np.linalg.norm(wanted))
        assert difference < tolerance, f"relative error {difference}"


def in_shard_map(case: Case, transform: str, generator: np.random.Generator, axes: str) -> None:
    """An operation on operands of which each varies over some axes of the mesh."""
    sizes = dict(zip(axes, MESHES[axes], strict=True))
    devices = jax.devices()[: int(np.prod(MESHES[axes]))]
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(MESHES[axes], tuple(axes), axis_types=kinds, devices=devices)
    varying = [tuple(a for a in axes if generator.random() < 0.5) for _ in case.shapes]
    if not any(varying):
        varying[0] = tuple(axes)
    everywhere = tuple(a for a in axes if any(a in some for some in varying))
    operands = _operands(case, generator, varying, sizes)
    in_specs = tuple(P(*some) for some in varying)
    count = case.differentiable

    def program(function: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*operands: Any) -> Any:
            parts = [one.reshape(shape) for one, shape in zip(operands, case.shapes, strict=True)]
            changed = TRANSFORMS[transform](function)
            results = [changed(*parts)]
            if count:
                results += _gradient(changed, count)(*parts)
            found = [tuple(jax.typeof(one).mat.varying) for one in results]
            wanted = [everywhere, *varying[:count]]
            for have, want in zip(found, wanted, strict=True):
                assert set(have) == set(want), f"varies over {have} instead of {want}"
            return [
                one.reshape(*(1 for _ in some), *one.shape)
                for one, some in zip(results, wanted, strict=True)
            ]

        out_specs = [P(*some) for some in (everywhere, *varying[:count])]
        return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    got, expected = (program(one)(*operands) for one in (case.function, case.reference))
    _same(got, expected, 3e-2)
    # A result that varies is not taken for one that is the same everywhere.
    shaped = jax.shard_map(
        lambda *parts: case.function(
            *(one.reshape(shape) for one, shape in zip(parts, case.shapes, strict=True))
        ),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P(),
    )
    try:
        jax.eval_shape(shaped, *operands)
    except ValueError as error:
        assert "out_specs" in str(error), str(error)
    else:
        raise AssertionError("a result that varies is accepted with out_specs=P()")


def with_shardings(case: Case, transform: str, generator: np.random.Generator, axes: str) -> None:
    """An operation on operands that are sharded for ``jax.jit``, without ``jax.shard_map``."""
    devices = jax.devices()[: int(np.prod(MESHES[axes]))]
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(MESHES[axes], tuple(axes), axis_types=kinds, devices=devices)
    operands = _operands(case, generator, [()] * len(case.shapes), {})
    placed = []
    for one in operands:
        spec = [None] * one.ndim
        if one.ndim and generator.random() < 0.5:
            spec[-1] = axes[-1] if one.shape[-1] % 2 == 0 else None
        placed.append(jax.device_put(one, NamedSharding(mesh, P(*spec))))

    def program(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(TRANSFORMS[transform](function))

    _same(program(case.function)(*placed), program(case.reference)(*operands), 3e-2)


def main(argv: Sequence[str]) -> None:
    """Runs the programs of a seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--only", default="")
    options = parser.parse_args(argv)
    generator = np.random.default_rng(options.seed)
    for name, case in CASES.items():
        for kind in (in_shard_map, with_shardings):
            axes = str(generator.choice(list(MESHES)))
            transform = str(generator.choice(list(TRANSFORMS)))
            title = f"{name}, {kind.__name__}, {axes}, {transform}"
            if options.only not in title:
                continue
            problem = ""
            try:
                with pallasite.target(options.target):
                    kind(case, transform, generator, axes)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                problem = f"{type(error).__name__}: {error} ({last.name})".replace("\n", " ")
            print(f"{title}: {problem or 'ok'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
