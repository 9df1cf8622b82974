"""What copies and reductions cost, and that arrays and memory change together."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts import named, strided
from pallasite_std.inference.costs import SYNCHRONIZATION, conversion_cost, reduction_cost

X = jax.ShapeDtypeStruct((520, 128), jnp.bfloat16)
Y = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
STARTS = jax.ShapeDtypeStruct((8,), jnp.int32)
RESULT = jax.ShapeDtypeStruct((512, 64), jnp.float32)
SUMS = jax.ShapeDtypeStruct((512,), jnp.float32)
ROWS = {"memory": plgpu.SMEM((64, 128), jnp.bfloat16), "full": plgpu.Barrier()}
PRODUCT = {
    "a": plgpu.SMEM((64, 128), jnp.bfloat16),
    "b": plgpu.SMEM((128, 64), jnp.bfloat16),
    "result": plgpu.SMEM((64, 64), jnp.float32),
    "full": plgpu.Barrier(num_arrivals=2),
}

WARPGROUP = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
)


def report_of(body, out, scratch, *inputs):
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=(8,),
        grid_names=("block",),
        compiler_params=WARPGROUP,
    )
    return pallasite.compile(kernel, *inputs, target="sm_90a")


def shared(compiled):
    """The layouts of allocations, by name."""
    return {one.name: one.layout for one in compiled.layouts.shared}


def test_a_reduction_of_rows_costs_less_where_few_lanes_share_a_row():
    shape = (64, 128)
    wgmma = named.resolve("WGMMA", (), {}, shape, 32)
    by_rows = strided(shape, 8)
    # Two rows of a lane and 4 lanes, against 8 rows and 16 lanes.
    assert reduction_cost(wgmma, wgmma, (1,), 32) == 4 * 2 * 2
    assert reduction_cost(by_rows, by_rows, (1,), 32) == 4 * 8 * 4
    assert reduction_cost(wgmma, wgmma, (0,), 32) > 4 * 32 * 3  # and across warps


def test_a_conversion_to_copies_costs_what_loading_them_does():
    few, column = strided((128,), 1), named.resolve("WGMMA_COL", (), {}, (128,), 32)
    # Each lane of each warp gets 32 numbers, 4 at a time at best, and stored one.
    difference = conversion_cost(few, column, 32) - 2 * SYNCHRONIZATION
    assert difference == 2 * 4 * (1 + 32 // 4)


@pytest.mark.parametrize("columns", [56, 104, 120])
def test_lanes_access_whole_sectors(columns):
    """Rows of an odd number of vectors, of which it takes fewer exchanges to reduce pairs."""
    types = jax.ShapeDtypeStruct((512, columns), jnp.bfloat16)

    def body(x, weight, out):
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        value = x[rows].astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(value * value, axis=1))
        weights = weight[...].astype(jnp.float32)
        out[rows] = (value * scale[:, None] * weights[None, :]).astype(jnp.bfloat16)

    weight = jax.ShapeDtypeStruct((columns,), jnp.bfloat16)
    compiled = report_of(body, types, (), types, weight)
    widths = re.findall(r"(?:ld|st)\.global\.v(\d)\.b32", compiled.ptx)
    assert widths and set(widths) == {"4"}
    assert not re.search(r"(?:ld|st)\.global\S*\.b16", compiled.ptx)


def test_arrays_and_memory_change_together():
    """Row-major memory suits a load by rows, tiles one in which rows are cheap to add up."""

    def body(x, out, *, memory, full):
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        plgpu.copy_gmem_to_smem(x.at[rows], memory, full)
        plgpu.barrier_wait(full)
        out[rows] = jnp.sum(memory[...].astype(jnp.float32), axis=1)

    compiled = report_of(body, SUMS, ROWS, X)
    assert shared(compiled)["memory"] == "TilingTransform((8, 64)), SwizzleTransform(128)"
    loads = {one.layout for one in compiled.layouts.arrays if one.primitive == "get"}
    assert loads == {"WGMMA"}


def product(x, y, starts, out, *, a, b, result, full, whole):
    """Products of 64 rows of x, from any or from a whole tile on, with y."""
    block = lax.axis_index("block")
    start = block * 64 if whole else starts[block]
    plgpu.copy_gmem_to_smem(x.at[pl.ds(start, 64)], a, full)
    plgpu.copy_gmem_to_smem(y, b, full)
    plgpu.barrier_wait(full)

    def scope(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    result[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, out.at[pl.ds(block * 64, 64)])
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize(("whole", "height"), [(True, 8), (False, 64)])
def test_tiles_are_as_high_as_a_copy_that_begins_at_any_row(whole, height):
    """One instruction copies from any row on then; of lower tiles, each would need its own."""
    body = functools.partial(product, whole=whole)
    compiled = report_of(body, RESULT, PRODUCT, X, Y, STARTS)
    layouts = shared(compiled)
    assert layouts["a"] == f"TilingTransform(({height}, 64)), SwizzleTransform(128)"
    # Narrower tiles would be stored to without conflicts, but be copied in short rows.
    assert layouts["result"] == "TilingTransform((8, 32)), SwizzleTransform(128)"
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", compiled.ptx)) == 2


@pytest.mark.parametrize(("step", "height"), [(64, 8), (4, 64)])
def test_starts_that_loops_carry_are_known(step, height):
    """A start that grows by whole tiles is one of whole tiles in every step."""

    def body(x, out, *, memory, full):
        mine = lax.axis_index("block") * 64

        def one(_, row):
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, 64)], memory, full)
            plgpu.barrier_wait(full)
            out[pl.ds(mine, 64)] = jnp.sum(memory[...].astype(jnp.float32), axis=1)
            return row + step

        lax.fori_loop(0, 4, one, mine)

    compiled = report_of(body, SUMS, ROWS, X)
    assert shared(compiled)["memory"].startswith(f"TilingTransform(({height}, 64))")


def test_the_results_are_right():
    """Of the kernel whose copies begin at any row."""
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(one.shape, np.float32).astype(one.dtype) for one in (X, Y))
    starts = rng.integers(0, 457, 8).astype(np.int32)
    kernel = plgpu.kernel(
        functools.partial(product, whole=False),
        out_type=RESULT,
        scratch_types=PRODUCT,
        grid=(8,),
        grid_names=("block",),
        compiler_params=WARPGROUP,
    )
    rows = np.concatenate([np.arange(start, start + 64) for start in starts])
    expected = x.astype(np.float32)[rows] @ y.astype(np.float32)
    np.testing.assert_allclose(jax.jit(kernel)(x, y, starts), expected, rtol=1e-5, atol=1e-4)


def test_a_row_that_a_product_needs_is_loaded_as_it_needs_it():
    """What is loaded once for each lane costs its loads; nothing is computed in several lanes."""

    def body(x, row, out, *, memory):
        memory[...] = row[...]
        layout = plgpu.Layout.WGMMA
        values = plgpu.load(memory, layout=layout.reduce(0))
        wide = lax.broadcast_in_dim(values, (64, 128), [1])
        out[...] = plgpu.layout_cast(x[...], layout) - wide

    types = (jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((128,), "float32"))
    scratch = {"memory": plgpu.SMEM((128,), jnp.float32)}
    compiled = report_of(body, types[0], scratch, *types)
    assert not compiled.layouts.conversions
