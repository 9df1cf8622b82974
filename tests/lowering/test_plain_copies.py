"""Copies of arrays whose rows, or windows' rows, are not multiples of 16 bytes, or too long."""

from __future__ import annotations

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
X = jnp.asarray(np.random.default_rng(0).normal(size=(37, 33)).astype(jnp.float32))


def test_blocks_of_odd_rows() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((8, 33), lambda i: (i, 0))
    function = pl.pallas_call(
        kernel,
        grid=(5,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
        compiler_params=plgpu.CompilerParams(),
    )
    np.testing.assert_array_equal(function(X), X * 2)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize(
    ("shape", "block"), [((12, 64), (4, 5)), ((8, 32), (8, None)), ((5, 3, 32), (None, 2, 7))]
)
@pytest.mark.parametrize("order", ["parallel", "sequential"])
@pytest.mark.sampled
def test_odd_blocks_of_even_rows(shape: Any, block: Any, order: Any, semantics: Any) -> None:
    """The rows of blocks are no multiples of 16 bytes, those of the arrays are."""

    def kernel(x_ref: Any, out_ref: Any, sums_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2
        sums_ref[...] = jnp.full((3,), jnp.sum(x_ref[...]))

    grid = tuple(-(-n // (m or 1)) for n, m in zip(shape, block, strict=True))
    steps = np.prod(grid)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(jnp.float32))

    def number(*indices: Any) -> Any:
        return sum(i * int(np.prod(grid[d + 1 :])) for d, i in enumerate(indices))

    spec = pl.BlockSpec(block, lambda *indices: indices)
    function = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec],
        out_specs=[spec, pl.BlockSpec((3,), lambda *indices: (number(*indices),))],
        out_shape=[
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct((int(steps) * 3,), x.dtype),
        ],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=(order,) * len(grid), lowering_semantics=semantics
        ),
    )
    with config.scoped(sanitize=True):
        out, sums = function(x)
    np.testing.assert_array_equal(out, x * 2)
    np.testing.assert_allclose(sums.sum() / 3, x.sum(), rtol=1e-4)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_pipeline_of_odd_rows(semantics: Any) -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        def body(_: Any, x: Any, out: Any) -> None:
            out[...] = x[...] + 1

        spec = plgpu.BlockSpec((8, 11), lambda i, j: (i, j))
        plgpu.emit_pipeline(
            body, grid=(5, 3), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2
        )(x_ref, out_ref)

    function = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with config.scoped(sanitize=True):
        np.testing.assert_array_equal(function(X), X + 1)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_odd_blocks_of_specialised_threads(semantics: Any) -> None:
    """One thread copies, another computes: what the lanes stored is ordered by the barrier."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        def body(_: Any, x: Any, out: Any) -> None:
            out[...] = x[...] + 1

        spec = plgpu.BlockSpec((8, 11), lambda i, j: (i, j))
        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(5, 3),
            in_specs=[spec],
            out_specs=[spec],
            max_concurrent_steps=2,
            num_compute_wgs=1,
            memory_registers=40,
            wg_axis="wg",
        )(x_ref, out_ref)

    function = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with config.scoped(sanitize=True):
        np.testing.assert_array_equal(function(X), X + 1)


def test_copies_by_a_warp_and_under_a_predicate() -> None:
    def kernel(x_ref: Any, out_ref: Any, tile: Any, barrier: Any) -> None:
        row = lax.axis_index("row")

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _() -> None:
            @pl.when(lax.axis_index("warp") == 0)
            def _() -> None:
                window = x_ref.at[pl.ds(row * 16, 16)]
                plgpu.copy_gmem_to_smem(window, tile, barrier)

        plgpu.barrier_wait(barrier)
        tile[...] = tile[...] * 3
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(row * 16, 16)], predicate=row < 2)
        plgpu.wait_smem_to_gmem(0)

    function = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((32, 33), jnp.float32),
        scratch_types=[plgpu.SMEM((16, 33), jnp.float32), plgpu.Barrier()],
        grid=(2,),
        grid_names=("row",),
    )
    with config.scoped(sanitize=True):
        np.testing.assert_array_equal(function(X), X[:32] * 3)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("columns", [308, 284])
def test_rows_that_no_boxes_divide(columns: int, semantics: Any) -> None:
    """Of 308 elements are 77 x 4, of 284 71 x 4: parts that do not begin at 128 bytes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 992)).astype(jnp.float32))

    def kernel(x_ref: Any, out_ref: Any, tile: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(4, columns)], tile, barrier)
        plgpu.barrier_wait(barrier)
        tile[...] = tile[...] * 3
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[:, :columns])
        plgpu.wait_smem_to_gmem(0)

    function = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, 992), jnp.float32),
        scratch_types=[plgpu.SMEM((2, columns), jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=semantics, plugin_options={"standard": {"partial_outputs": True}}
        ),
    )
    with config.scoped(sanitize=True):
        found = function(x)
    np.testing.assert_array_equal(found[:, :columns], x[:, 4 : 4 + columns] * 3)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("columns", "tile"), [(83, 64), (150, 64), (83, 32), (67, 48), (150, 128), (131, 128)]
)
def test_rows_that_begin_anywhere_are_stored_by_vectors(
    dtype: str, columns: int, tile: int
) -> None:
    """Tiles, swizzled ones too, whose rows begin between vectors and end beyond the array."""
    x = np.random.default_rng(1).integers(0, 99, (2, 40, 384)).astype(dtype)
    height = 32

    def kernel(x_ref: Any, out_ref: Any, memory: Any, barrier: Any) -> None:
        rows = pl.ds(lax.axis_index("row") * height, height)
        columns = pl.ds(lax.axis_index("x") * tile, tile)
        window = lax.axis_index("matrix"), rows, columns
        plgpu.copy_gmem_to_smem(x_ref.at[window], memory, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(memory, out_ref.at[window])
        plgpu.wait_smem_to_gmem(0)

    swizzle = tile * x.dtype.itemsize
    transforms = (plgpu.SwizzleTransform(swizzle),) if swizzle in (32, 64, 128) else ()
    function = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, 37, columns), x.dtype),
        scratch_types=[
            plgpu.SMEM((height, tile), x.dtype, transforms=transforms),
            plgpu.Barrier(),
        ],
        grid=(2, 2, 3),
        grid_names=("matrix", "row", "x"),
    )
    with config.scoped(sanitize=True):
        np.testing.assert_array_equal(function(jnp.asarray(x)), x[:, :37, :columns])
