"""The warp-specialised pipeline: inputs, carries, several compute threads, delays, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

BLOCK = (16, 32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_threads(num_compute_wgs, out_shape, body, **kwargs):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        num_threads=num_compute_wgs + 1,
        thread_name="wg",
        **kwargs,
    )


@pytest.mark.parametrize("num_compute_wgs", [1, 2, 3])
@pytest.mark.parametrize(("num_steps", "depth"), [(1, 2), (2, 4), (4, 4), (7, 1), (7, 3)])
def test_carry(num_compute_wgs, num_steps, depth):
    def body(x, y, o):
        wg = lax.axis_index("wg")

        def context(pipeline):
            o[wg] = pipeline(jnp.full(BLOCK, 1.0))

        def step(_, x_block, y_block, total):
            return total + x_block[...] * y_block[...] * (wg + 1).astype(jnp.float32)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(num_steps,),
            memory_registers=24,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))] * 2,
            max_concurrent_steps=depth,
            wg_axis="wg",
            num_compute_wgs=num_compute_wgs,
            compute_context=context,
        )(x, y)

    x, y = random(num_steps * 16, 32), random(num_steps * 16, 32, seed=1)
    out = on_threads(num_compute_wgs, (num_compute_wgs, *BLOCK), body)(x, y)
    total = (x.astype(np.float64) * y).reshape(num_steps, *BLOCK).sum(0)
    for wg in range(num_compute_wgs):
        np.testing.assert_allclose(out[wg], 1 + total * (wg + 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [(6,), (2, 3), (3, 1, 2), (1, 1)])
def test_grids_and_stores_by_the_body(grid):
    steps = int(np.prod(grid))

    def number(*indices):
        result = 0
        for index, size in zip(indices, grid, strict=True):
            result = result * size + index
        return result

    def body(x, o):
        def step(indices, x_block):
            o[number(*indices)] = x_block[...] * 2

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=grid,
            memory_registers=40,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda *indices: (number(*indices), 0))],
            wg_axis="wg",
            num_compute_wgs=1,
        )(x)

    x = random(steps * 16, 32)
    out = on_threads(1, (steps, *BLOCK), body)(x)
    np.testing.assert_array_equal(out, 2 * x.reshape(steps, *BLOCK))


@pytest.mark.parametrize("delays", [(1, 1), (0, 1), (2, 0), (2, 1)])
def test_delayed_release(delays):
    """A block is still there as many steps later as its delay says."""
    num_steps, depth = 7, 3

    def body(x, y, o):
        def step(indices, *blocks):
            (i,) = indices
            for number, (block, delay) in enumerate(zip(blocks, delays, strict=True)):
                earlier = lax.rem(i + (depth - delay), jnp.int32(depth))

                @pl.when(i >= delay)
                def _(block=block, number=number, earlier=earlier):
                    o[number, i] = block.ref[earlier]

                @pl.when(i < delay)
                def _(number=number):
                    o[number, i] = jnp.zeros(BLOCK)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(num_steps,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0), delay_release=delay) for delay in delays
            ],
            max_concurrent_steps=depth,
            wg_axis="wg",
            num_compute_wgs=1,
        )(x, y)

    x, y = random(num_steps * 16, 32), random(num_steps * 16, 32, seed=1)
    out = on_threads(1, (2, num_steps, *BLOCK), body)(x, y)
    for result, operand, delay in zip(out, (x, y), delays, strict=True):
        blocks = operand.reshape(num_steps, *BLOCK)
        expected = np.concatenate([np.zeros((delay, *BLOCK)), blocks[: num_steps - delay]])
        np.testing.assert_array_equal(result, expected)


def test_manual_consumed_barriers():
    """The body releases each input itself, the second before the first."""
    num_steps = 5

    def body(x, y, o):
        def context(pipeline):
            o[...] = pipeline(jnp.zeros(BLOCK))

        def step(_, x_block, y_block, x_used, y_used, total):
            y_value = y_block[...]
            plgpu.barrier_arrive(y_used)
            total = total + x_block[...] * y_value
            plgpu.barrier_arrive(x_used)
            return total

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(num_steps,),
            memory_registers=40,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))] * 2,
            wg_axis="wg",
            num_compute_wgs=1,
            manual_consumed_barriers=True,
            compute_context=context,
        )(x, y)

    x, y = random(num_steps * 16, 32), random(num_steps * 16, 32, seed=1)
    out = on_threads(1, BLOCK, body)(x, y)
    expected = (x.astype(np.float64) * y).reshape(num_steps, *BLOCK).sum(0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
