"""Outputs of the warp-specialised pipeline that go through shared memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import BLOCK, on_threads, pipeline, random

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def rows_of(block, wg, num_compute_wgs):
    """The part of a block that is this thread's to write."""
    count = block.shape[0] // num_compute_wgs
    return block.at[pl.ds(wg * count, count)]


@pytest.mark.parametrize("num_compute_wgs", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 3, 16])
@pytest.mark.parametrize("transforms", [(), TILED])
@pytest.mark.sampled(alone=("depth",))
def test_every_step(num_compute_wgs, depth, transforms):
    def body(x, o):
        wg = lax.axis_index("wg")

        def step(_, x_block, o_block):
            mine = [rows_of(block, wg, num_compute_wgs) for block in (x_block, o_block)]
            mine[1][...] = mine[0][...] * 2

        spec = plgpu.BlockSpec(BLOCK, lambda i, j: (i, j), transforms=transforms)
        pipeline(
            step,
            num_compute_wgs,
            grid=(3, 2),
            in_specs=[spec],
            out_specs=[spec],
            max_concurrent_steps=depth,
        )(x, o)

    x = random(48, 64)
    np.testing.assert_array_equal(on_threads(num_compute_wgs, x.shape, body)(x), 2 * x)


@pytest.mark.parametrize("num_compute_wgs", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("order", ["ij", "ji"])
@pytest.mark.sampled(alone=("depth",))
def test_held_while_the_block_stays(num_compute_wgs, depth, order):
    """Reducing over the inner axis accumulates in the slot."""

    def body(x, o):
        wg = lax.axis_index("wg")

        def step(indices, x_block, o_block):
            x_part, o_part = (rows_of(block, wg, num_compute_wgs) for block in (x_block, o_block))

            @pl.when(indices[1] == 0)
            def _():
                o_part[...] = jnp.zeros(o_part.shape)

            o_part[...] = o_part[...] + x_part[...]

        index = (lambda i, j: (i, j)) if order == "ij" else (lambda i, j: (j, i))
        pipeline(
            step,
            num_compute_wgs,
            grid=(3, 4),
            in_specs=[plgpu.BlockSpec(BLOCK, index)],
            out_specs=[plgpu.BlockSpec(BLOCK, lambda i, j: (i, 0))],
            max_concurrent_steps=depth,
        )(x, o)

    x = random(48, 128) if order == "ij" else random(64, 96)
    blocks = x.reshape(x.shape[0] // 16, 16, x.shape[1] // 32, 32)
    expected = blocks.sum(2) if order == "ij" else blocks.sum(0).transpose(1, 0, 2)
    out = on_threads(num_compute_wgs, (48, 32), body)(x)
    np.testing.assert_allclose(out, expected.reshape(48, 32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5])
def test_once_and_with_a_carry(steps):
    """An output whose block never changes is stored at the end; all kinds at once."""

    def body(x, o, last, total):
        def context(run):
            total[...] = run(jnp.zeros(BLOCK))

        def step(_, x_block, o_block, last_block, carry):
            value = x_block[...]
            o_block[...] = value + 1
            last_block[...] = value
            return carry + value

        pipeline(
            step,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))],
            out_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0)),
                plgpu.BlockSpec(BLOCK, lambda i: (0, 0)),
            ],
            compute_context=context,
        )(x, o, last)

    x = random(steps * 16, 32)
    out, last, total = on_threads(1, [x.shape, BLOCK, BLOCK], body)(x)
    blocks = x.reshape(steps, *BLOCK)
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(last, blocks[-1])
    np.testing.assert_allclose(total, blocks.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_grid_of_unknown_size(steps):
    """With no steps at all, nothing is written."""

    def body(count, x, o, last):
        def step(_, x_block, o_block, last_block):
            o_block[...] = x_block[...] * 3
            last_block[...] = x_block[...]

        pipeline(
            step,
            grid=(count[0],),
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))],
            out_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0)),
                plgpu.BlockSpec(BLOCK, lambda i: (0, 0)),
            ],
            max_concurrent_steps=3,
        )(x, o, last)

    x = random(8 * 16, 32)
    before = random(9 * 16, 32, seed=1)

    def run(count, x, out, last):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (out, last)]
        kernel = plgpu.kernel(
            lambda count, x, _, __, o, last: body(count, x, o, last),
            out_type=shapes,
            num_threads=2,
            thread_name="wg",
            input_output_aliases={2: 0, 3: 1},
        )
        return kernel(count, x, out, last)

    out, last = jax.jit(run)(jnp.array([steps], jnp.int32), x, before[:128], before[128:])
    np.testing.assert_array_equal(out[: steps * 16], 3 * x[: steps * 16])
    np.testing.assert_array_equal(out[steps * 16 :], before[steps * 16 : 128])
    expected = x[(steps - 1) * 16 : steps * 16] if steps else before[128:]
    np.testing.assert_array_equal(last, expected)


@settings(max_examples=12, deadline=None)
@given(
    grid=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    depth=st.integers(1, 5),
    num_compute_wgs=st.integers(1, 2),
    data=st.data(),
)
def test_any_index_maps(grid, depth, num_compute_wgs, data):
    """Blocks chosen by any of the indices, in any order of them."""
    axes = st.lists(st.sampled_from(range(len(grid))), max_size=2, unique=True)
    in_axes, out_axes = data.draw(axes), sorted(data.draw(axes))
    # Where an output comes back to a block, its first contents are lost: keep leading axes.
    out_axes = list(range(len(out_axes)))
    dynamic = data.draw(st.booleans())

    def number(indices, axes):
        result = 0
        for axis in axes:
            result = result * grid[axis] + indices[axis]
        return result

    def count(axes):
        return int(np.prod([grid[axis] for axis in axes], dtype=int))

    def body(sizes, x, o):
        wg = lax.axis_index("wg")

        def step(indices, x_block, o_block):
            x_part, o_part = (rows_of(block, wg, num_compute_wgs) for block in (x_block, o_block))
            inner = [index for axis, index in enumerate(indices) if axis not in out_axes]
            first = sum(inner) == 0 if inner else jnp.bool_(True)

            @pl.when(first)
            def _():
                o_part[...] = jnp.zeros(o_part.shape)

            weight = number(indices, range(len(grid))) + 1
            o_part[...] = o_part[...] + x_part[...] * jnp.asarray(weight, jnp.float32)

        pipeline(
            step,
            num_compute_wgs,
            grid=tuple(sizes[i] for i in range(len(grid))) if dynamic else grid,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda *indices: (number(indices, in_axes), 0))],
            out_specs=[plgpu.BlockSpec(BLOCK, lambda *indices: (number(indices, out_axes), 0))],
            max_concurrent_steps=depth,
        )(x, o)

    x = random(count(in_axes) * 16, 32)
    expected = np.zeros((count(out_axes), *BLOCK))
    for weight, indices in enumerate(np.ndindex(*grid), start=1):
        block = x.reshape(-1, *BLOCK)[number(indices, in_axes)]
        expected[number(indices, out_axes)] += weight * block
    kernel = on_threads(num_compute_wgs, (count(out_axes) * 16, 32), body)
    out = jax.jit(kernel)(np.array(grid, np.int32), x)
    np.testing.assert_allclose(out, expected.reshape(-1, 32), rtol=1e-4, atol=1e-4)
