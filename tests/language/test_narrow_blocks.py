"""Blocks of pipelines whose sizes are no multiples of what the copy engine's memory begins at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu

Semantics = plgpu.LoweringSemantics


def doubled(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((7, 48), (None, 24)),
        ((7, 24), (1, 24)),
        ((9, 4, 24), (3, 2, 24)),
        ((6, 10), (2, 5)),
        ((3, 7, 24), (1, 7, 24)),
        ((9, 14, 24), (3, 7, 24)),
    ],
)
def test_stages_begin_where_copies_can_write(shape: Any, block: Any, semantics: Semantics) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    steps = [extent // (size or 1) for extent, size in zip(shape, block, strict=True)]

    def place(inner: Any, outer: Any) -> Any:
        return (outer, inner, *[0] * (len(shape) - 2))

    spec = pl.BlockSpec(block, place)
    kernel = pl.pallas_call(
        doubled,
        out_shape=x,
        grid=(steps[1], steps[0]),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=["parallel", "sequential"],
            max_concurrent_steps=3,
            lowering_semantics=semantics,
        ),
    )
    np.testing.assert_array_equal(kernel(x), x * 2)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("name", ["float64", "int64", "float8_e4m3fnuz", "float8_e5m2", "bool"])
def test_tiles_of_dtypes(name: str, semantics: Semantics) -> None:
    """Tiles by tensor maps, whose element types are of as many bits."""
    values = np.random.default_rng(0).integers(-3, 4, (64, 96))
    x = values.astype(getattr(ml_dtypes, name, name))

    def copy(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    with jax.enable_x64(True):
        kernel = pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4, 3),
            in_specs=[pl.BlockSpec((16, 32), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((16, 32), lambda i, j: (3 - i, 2 - j)),
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        )
        moved = x.reshape(4, 16, 3, 32)[::-1, :, ::-1].reshape(x.shape)
        np.testing.assert_array_equal(kernel(x), moved)


@pytest.mark.runs_kernels
def test_pipelines_in_kernels() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 40)), jnp.float16)

    def body(x_ref: Any, out_ref: Any) -> None:
        spec = plgpu.BlockSpec((1, 40), lambda i: (i, 0))
        plgpu.emit_pipeline(
            lambda _, *blocks: doubled(*blocks),
            grid=(8,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2,
        )(x_ref, out_ref)  # fmt: skip

    kernel = plgpu.kernel(body, out_type=x)
    np.testing.assert_array_equal(kernel(x), x * 2)


def test_long_rows_have_no_padding() -> None:
    x = jnp.ones((8, 10_008), jnp.float16)

    def body(x_ref: Any, out_ref: Any) -> None:
        mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        spec = plgpu.BlockSpec((1, 10_008), lambda i: (i, 0), oob_fill_mode=mode)
        plgpu.emit_pipeline(
            lambda _, block: block[0, 0], grid=(8,), in_specs=[spec], max_concurrent_steps=3
        )(x_ref)
        out_ref[...] = jnp.zeros(4)

    kernel = plgpu.kernel(body, out_type=jnp.zeros(4))
    assert pallasite.compile(kernel, x).resources.shared_memory_bytes < 62 * 1024
