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
from jax.experimental import pallas as pl
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


def _biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return ops.attention(q, k, v, bias=bias, window=(9, None))


def _biased_reference(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = _wide(q, k, v)
    k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], axis=2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[3] ** -0.5
    positions = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    scores = jnp.where(jnp.arange(k.shape[1]) >= positions - 9, scores + bias, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest").astype(BF16)


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


def _norm(x: Any, w: Any, residual: Any) -> Any:
    return ops.rms_norm(x, w, residual=residual)[0]


def _norm_reference(x: Any, w: Any, residual: Any) -> Any:
    total = x + residual
    return total * lax.rsqrt(jnp.mean(total * total, -1, keepdims=True) + 1e-6) * w


def _loss_reference(x: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(x, labels[:, None], 1)[:, 0]
    return jax.nn.logsumexp(x, axis=-1) - chosen


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
        own = [jax.typeof(one).mat.varying for one in (x, w)]
        others = (tuple(own[1] - own[0]), tuple(own[0] - own[1]))
        pairs = zip((x, w), others, strict=True)
        return function(*(lax.pcast(one, axes, to="varying") for one, axes in pairs))

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
    "attention with bias": Case(
        _biased, _biased_reference, (*_HEADS, (1, 2, 16, 24)), (*[BF16] * 3, F32), 4
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
    "rms_norm": Case(_norm, _norm_reference, ((6, 40), (40,), (6, 40)), (F32, F32, F32), 3),
    "softmax_cross_entropy": Case(
        ops.softmax_cross_entropy, _loss_reference, ((6, 40), (6,)), (F32, I32), 1, _at_most(_1=39)
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
        found.append(jnp.asarray(draw(generator, number, whole).astype(dtype)))
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


def _mesh_of_two(axes: str = "x") -> Any:
    devices = jax.devices()[: 2 ** len(axes)]
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh((2,) * len(axes), tuple(axes), axis_types=kinds, devices=devices)


def references() -> None:
    """A kernel that writes a reference, which has to vary as its operands do."""

    def body(x: Any, ref: Any, out: Any) -> None:
        out[...] = x[...] * 2
        ref[...] = ref[...] + x[...]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))

    def on_device(x: Any, start: Any) -> Any:
        ref = jax.new_ref(start)
        return kernel(x, ref) + ref[...]

    def program(spec: Any) -> Callable[..., Any]:
        specs = (P("x"), spec)
        return jax.jit(
            jax.shard_map(on_device, mesh=_mesh_of_two(), in_specs=specs, out_specs=P("x"))
        )

    x = jnp.arange(256.0)
    np.testing.assert_array_equal(program(P("x"))(x, x), 4 * x)
    _refused(lambda: program(P())(x, x[:128]), "does not vary over the mesh")


def own_types() -> None:
    """Outputs vary as their types say, where these say it."""
    x = jnp.tile(jnp.arange(128.0), 2)
    for axes in ((), ("x",)):
        kind = jax.sharding.ManualAxisType(varying=frozenset(axes))
        out_type = jax.ShapeDtypeStruct((128,), jnp.float32, manual_axis_type=kind)
        kernel = plgpu.kernel(_copy_body, out_type=out_type)
        mapped = jax.shard_map(kernel, mesh=_mesh_of_two(), in_specs=P("x"), out_specs=P(*axes))
        np.testing.assert_array_equal(jax.jit(mapped)(x), x if axes else x[:128])


def front_ends() -> None:
    """``pl.pallas_call`` wants the type of its outputs."""

    def on_device(x: Any) -> Any:
        kind = jax.typeof(x).mat
        out_type = jax.ShapeDtypeStruct((128,), jnp.float32, manual_axis_type=kind)
        params = plgpu.CompilerParams()
        return pl.pallas_call(_copy_body, out_shape=out_type, compiler_params=params)(x)

    x = jnp.arange(256.0)
    mapped = jax.shard_map(on_device, mesh=_mesh_of_two(), in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(mapped)(x), x)


def some_axes() -> None:
    """On the CPU, a kernel needs all axes of the mesh to be those of ``jax.shard_map``."""
    kernel = plgpu.kernel(_copy_body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    mapped = jax.shard_map(
        kernel, mesh=_mesh_of_two("xy"), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    _refused(lambda: jax.jit(mapped)(jnp.arange(256.0)), "over some axes only")


def _copy_body(x: Any, out: Any) -> None:
    out[...] = x[...]


def _refused(function: Callable[[], Any], text: str) -> None:
    try:
        function()
    except pallasite.PallasiteError as error:
        assert error.location is not None and text in str(error), str(error)
    else:
        raise AssertionError(f"nothing is refused: {text}")


KERNELS = (references, own_types, front_ends, some_axes)


def main(argv: Sequence[str]) -> None:
    """Runs the programs of a seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--only", default="", help="a part of the titles")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args(argv)
    generator = np.random.default_rng(options.seed)
    for check in KERNELS:
        if options.only in (title := f"kernels, {check.__name__}"):
            _report(title, check)
    for name in options.cases.split(","):
        case = CASES[name]
        for kind in (in_shard_map, with_shardings):
            axes = str(generator.choice(list(MESHES)))
            transform = str(generator.choice(list(TRANSFORMS)))
            title = f"{name}, {kind.__name__}, {axes}, {transform}"
            if options.only not in title:
                continue
            with pallasite.target(options.target):
                _report(title, functools.partial(kind, case, transform, generator, axes))


def _report(title: str, run: Callable[[], None]) -> None:
    problem = "ok"
    try:
        run()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({last.name})".replace("\n", " ")
    print(f"{title}: {problem}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
