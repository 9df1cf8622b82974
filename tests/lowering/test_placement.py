"""Operations that move elements between lanes, in any layout: against JAX, in both semantics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallasite import config
from pallasite import gpu as plgpu

Semantics = plgpu.LoweringSemantics
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(32, 48)), jnp.float32)
Y = jnp.asarray(RANDOM.normal(size=(13, 17)), jnp.float32)
I = jnp.asarray(RANDOM.integers(-5, 13, size=(9,)), jnp.int32)  # noqa: E741

type Body = Callable[[Any, Any, Any], Any]

CASES: dict[str, Body] = {
    "reshape": lambda x, y, i: y.reshape(17, 13) + y[:, :13].T.reshape(13, 13)[:1, :1],
    "flatten a transposed": lambda x, y, i: x.T.reshape(-1) * 2,
    "unaligned slice": lambda x, y, i: x[3:20, 5:40] * 2,
    "strided slice": lambda x, y, i: x[::2, 1::3] + 1,
    "row and column": lambda x, y, i: y[5][None, :] * y[:, 3][:, None],
    "concatenation": lambda x, y, i: jnp.concatenate([x[:13, :17], y, y * 2], 1),
    "roll": lambda x, y, i: jnp.roll(x, 5, 1) + x,
    "reversal": lambda x, y, i: x[::-1, ::-1] + x,
    "pad": lambda x, y, i: lax.pad(x, 1.5, ((-1, 3, 1), (2, -5, 0))) * 2,
    "dynamic slice": lambda x, y, i: lax.dynamic_slice(x, (jnp.argmax(x[:, 0]), 40), (7, 20)),
    "dynamic update": lambda x, y, i: lax.dynamic_update_slice(x, y, (4, jnp.argmin(y[0]))) + 1,
    "tile": lambda x, y, i: jnp.tile(y, (2, 3)),
    "cumulative sum": lambda x, y, i: jnp.cumsum(x, 1) + x,
    "cumulative sum from the end": lambda x, y, i: lax.cumsum(y, 0, reverse=True),
    "cumulative product": lambda x, y, i: jnp.cumprod(1 + y / 9, 1),
    "cumulative maximum": lambda x, y, i: lax.cummax((y * 100).astype(jnp.int32), 0),
    "cumulative logsumexp": lambda x, y, i: lax.cumlogsumexp(y, 1),
    "take": lambda x, y, i: jnp.take(y, i, axis=1, mode="clip"),
    "index": lambda x, y, i: y[i, i + 1] * 2,
    "index outside": lambda x, y, i: y.at[i * 3].get(mode="fill", fill_value=7),
    "take along an axis": lambda x, y, i: jnp.take_along_axis(y, jnp.argsort(y, axis=1), 1),
    "set": lambda x, y, i: y.at[:, 3].set(y[:, 4]),
    "scatter": lambda x, y, i: y.at[i].add(y[:9]),
    "scatter without atomics": lambda x, y, i: y.at[i, 2].multiply(y[:9, 0]),
    "count": lambda x, y, i: jnp.zeros(16, jnp.int32).at[i].add(1),
    "sort": lambda x, y, i: jnp.sort(x, axis=0),
    "top_k": lambda x, y, i: lax.top_k(y, 4)[1],
    "median": lambda x, y, i: jnp.median(y, axis=1),
    "median of all": lambda x, y, i: jnp.median(y).reshape(1),
    "one index outside": lambda x, y, i: y.at[i[0], 40].get(mode="fill", fill_value=7).reshape(1),
    "smallest of one": lambda x, y, i: jnp.argmin(y[:, :1], axis=1),
    "log2": lambda x, y, i: jnp.log2(jnp.abs(y)),
    "derivative of tanh": lambda x, y, i: jax.grad(lambda y: jnp.tanh(y).sum())(y),
    "pad by vectors": lambda x, y, i: lax.pad(x[:31], 1.5, ((1, 2, 0), (4, 3, 0))) * 2,
    "pad between": lambda x, y, i: lax.pad(y[:, :16] + 1, -1.0, ((0, 1, 1), (1, -1, 1))),
    "update by a constant": lambda x, y, i: lax.dynamic_update_slice(
        x, jnp.full((3, 48), 2.5), (jnp.argmin(y[0]), 0)
    ),
}


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_placement(number: int) -> None:
    body = list(CASES.values())[number]
    semantics = [Semantics.Lane, Semantics.Warpgroup][number % 2]

    def kernel(x: Any, y: Any, i: Any, out: Any) -> None:
        out[...] = body(x[...], y[...], i[...])

    function = plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, X, Y, I),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    np.testing.assert_allclose(function(X, Y, I), body(X, Y, I), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_references_indexed_by_arrays(semantics: Any) -> None:
    columns = jnp.asarray([[1], [5], [2]], jnp.int32)

    def kernel(y: Any, i: Any, columns: Any, out: Any, sums: Any, shared: Any) -> None:
        shared[...] = y[...]
        out[...] = jnp.zeros(out.shape, out.dtype)
        out[:, jnp.arange(3) * 2] = shared[:, columns[...][:, 0]]
        sums[...] = shared[i[...] + 5, 3] + y[3, i[...] + 5]

    function = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((13, 6), jnp.float32),
            jax.ShapeDtypeStruct((9,), jnp.float32),
        ],
        scratch_types=[plgpu.SMEM((13, 17), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    picked = abs(I) % 8
    out, sums = function(Y, picked, columns)
    want = np.zeros((13, 6), np.float32)
    want[:, [0, 2, 4]] = Y[:, np.asarray(columns)[:, 0]]
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(sums, Y[picked + 5, 3] + Y[3, picked + 5], rtol=1e-6)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_indices_of_all_widths(dtype: str, semantics: Any) -> None:
    """Neither the array's size nor the index need fit into the other's number of bits."""
    x = jnp.arange(300, dtype=jnp.float32)
    limits = np.iinfo(dtype)
    extremes = [3, limits.max, limits.min, min(2**32 + 2, limits.max), max(3 - 2**32, limits.min)]

    def body(x: Any, i: Any) -> tuple[Any, ...]:
        return (
            jnp.take(x, i, mode="clip"),
            x.at[i.astype(jnp.int64)].get(mode="fill", fill_value=-1),
            x.at[i.astype(jnp.uint64)].add(1, mode="drop"),
            *(lax.dynamic_slice(x, (i[n],), (3,)) for n in range(5)),
            lax.dynamic_update_slice(x, x[:2], (i[1],)),
        )

    def kernel(x: Any, i: Any, *outs: Any) -> None:
        for out, value in zip(outs, body(x[...], i[...]), strict=True):
            out[...] = value

    with jax.enable_x64(True):
        indices = jnp.asarray(np.array(extremes, dtype))
        wanted = jax.jit(body)(x, indices)
        function = plgpu.kernel(
            kernel,
            out_type=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in wanted],
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        )
        for one, want in zip(function(x, indices), wanted, strict=True):
            np.testing.assert_array_equal(one, want)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_atomics_at_indices_of_arrays(semantics: Any) -> None:
    """Blocks count into one histogram; equal indices of one array count as often."""
    bins = jnp.asarray(np.random.default_rng(0).integers(0, 13, (4, 301)), jnp.int32)
    rows = jnp.asarray([5, 0, 3, 3], jnp.int32)

    def kernel(bins: Any, rows: Any, x: Any, _: Any, counts: Any, sums: Any, shared: Any) -> None:
        block = lax.axis_index("i")
        plgpu.atomic_add(counts.at[bins[block]], jnp.ones(301, jnp.int32))
        shared[...] = jnp.zeros((6, 17))
        plgpu.atomic_add(shared.at[rows[...], pl.ds(2, 9)], x[:4, :9])
        plgpu.atomic_max(shared.at[rows[...], 11], x[:4, 0])
        sums[block] = shared[...]

    function = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((13,), jnp.int32),
            jax.ShapeDtypeStruct((4, 6, 17), jnp.float32),
        ],
        grid=(4,),
        grid_names=("i",),
        input_output_aliases={3: 0},
        scratch_types=[plgpu.SMEM((6, 17), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with config.scoped(sanitize=True):
        counts, sums = function(bins, rows, Y, jnp.zeros(13, jnp.int32))
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(bins).ravel(), minlength=13))
    want = jnp.zeros((6, 17)).at[rows, 2:11].add(Y[:4, :9]).at[rows, 11].max(Y[:4, 0])
    np.testing.assert_allclose(sums, np.broadcast_to(want, (4, 6, 17)), rtol=1e-5, atol=1e-6)
