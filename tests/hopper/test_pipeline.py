"""The warp-specialised pipeline: inputs, carries, several consumer warpgroups, delays, memory."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import BLOCK, on_threads, pipeline, random

import pallasite
from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize("num_compute_wgs", [1, 2, 3])
@pytest.mark.parametrize(("num_steps", "depth"), [(1, 2), (2, 4), (4, 4), (7, 1), (7, 3)])
def test_carry(num_compute_wgs, num_steps, depth):
    def body(x, y, o):
        wg = lax.axis_index("wg")

        def context(pipeline):
            o[wg] = pipeline(jnp.full(BLOCK, 1.0))

        def step(_, x_block, y_block, total):
            return total + x_block[...] * y_block[...] * (wg + 1).astype(jnp.float32)

        pipeline(
            step,
            num_compute_wgs,
            grid=(num_steps,),
            memory_registers=24,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))] * 2,
            max_concurrent_steps=depth,
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

        pipeline(
            step,
            grid=grid,
            in_specs=[plgpu.BlockSpec(BLOCK, lambda *indices: (number(*indices), 0))],
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

        pipeline(
            step,
            grid=(num_steps,),
            in_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0), delay_release=delay) for delay in delays
            ],
            max_concurrent_steps=depth,
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

        pipeline(
            step,
            grid=(num_steps,),
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0))] * 2,
            manual_consumed_barriers=True,
            compute_context=context,
        )(x, y)

    x, y = random(num_steps * 16, 32), random(num_steps * 16, 32, seed=1)
    out = on_threads(1, BLOCK, body)(x, y)
    expected = (x.astype(np.float64) * y).reshape(num_steps, *BLOCK).sum(0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["manual_produced_barriers", "manual_ready_barriers"])
def test_manual_produced_barriers(option):
    """The body waits for each input itself; with two consumer warpgroups, each on its own."""
    num_steps = 5

    def body(x, y, o):
        wg = lax.axis_index("wg")

        def context(run):
            o[wg] = run(jnp.zeros(BLOCK))

        def step(_, x_block, y_block, x_here, y_here, total):
            plgpu.barrier_wait(y_here)
            total = total + y_block[...]
            plgpu.barrier_wait(x_here)
            return total * x_block[...]

        pipeline(
            step,
            2,
            grid=(num_steps,),
            in_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0)),
                plgpu.BlockSpec(BLOCK, lambda i: (0, 0)),
            ],
            max_concurrent_steps=3,
            compute_context=context,
            **{option: True},
        )(x, y)

    x, y = random(num_steps * 16, 32), random(16, 32, seed=1)
    out = on_threads(2, (2, *BLOCK), body)(x, y)
    expected = np.zeros(BLOCK)
    for block in x.reshape(num_steps, *BLOCK):
        expected = (expected + y) * block
    np.testing.assert_allclose(out, np.stack([expected] * 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3])
def test_inputs_that_do_not_change(depth):
    """They are fetched once; one in global memory is passed on as it is."""

    def body(x, constant, other, scale, o):
        def step(indices, x_block, constant_block, other_block, scale_ref):
            factor = scale_ref[indices[0]]
            o[indices[0]] = (x_block[...] + constant_block[...] - other_block[...]) * factor

        pipeline(
            step,
            grid=(5,),
            in_specs=[
                plgpu.BlockSpec(BLOCK, lambda i: (i, 0)),
                plgpu.BlockSpec(BLOCK, lambda i: (1, 0)),
                plgpu.BlockSpec(),
                plgpu.BlockSpec(memory_space=plgpu.GMEM),
            ],
            max_concurrent_steps=depth,
        )(x, constant, other, scale)

    x, constant, other = random(80, 32), random(32, 32, seed=1), random(16, 32, seed=2)
    scale = random(5, seed=3)
    kernel = on_threads(1, (5, *BLOCK), body)
    out = kernel(x, constant, other, scale)
    expected = (x.reshape(5, *BLOCK) + constant[16:] - other) * scale[:, None, None]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    ptx = pallasite.compile(kernel, x, constant, other, scale, target="sm_90a").ptx
    assert ptx.count("cp.async.bulk.tensor") == 3


def test_trees_of_operands():
    def body(x, y, z, o, p):
        def step(_, tree, z_block, outs):
            outs["o"][...] = tree["x"][...] + tree["y"][0][...]
            outs["p"][...] = z_block[...] * 2

        spec = plgpu.BlockSpec(BLOCK, lambda i: (i, 0))
        pipeline(
            step,
            grid=(3,),
            in_specs=[{"x": spec, "y": [spec]}, spec],
            out_specs={"o": spec, "p": spec},
        )({"x": x, "y": [y]}, z, {"o": o, "p": p})

    x, y, z = (random(48, 32, seed=seed) for seed in range(3))
    out, product = on_threads(1, [x.shape, x.shape], body)(x, y, z)
    np.testing.assert_array_equal(out, x + y)
    np.testing.assert_array_equal(product, z * 2)


def test_squeezed_and_element_dimensions_and_views():
    """Blocks that leave the array are filled with zeros; operands may be views."""

    def body(x, o):
        def step(indices, x_block):
            o[indices[0]] = x_block[...]

        spec = plgpu.BlockSpec((None, pl.Element(16), 32), lambda i: (i % 2, i * 8, 0))
        pipeline(step, grid=(4,), in_specs=spec)(x.at[1])

    x = random(2, 2, 32, 32)
    out = on_threads(1, (4, *BLOCK), body)(x)
    padded = np.pad(x[1], ((0, 0), (0, 16), (0, 0)))
    expected = np.stack([padded[i % 2, i * 8 : i * 8 + 16] for i in range(4)])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("delay", [0, 2])
def test_grid_of_unknown_size(num_steps, delay):
    def body(count, x, o):
        def context(run):
            o[...] = run(jnp.ones(BLOCK))

        def step(indices, x_block, total):
            return total * 2 + x_block[...] + (indices[0] * 10 + indices[1]).astype(jnp.float32)

        pipeline(
            step,
            grid=(count[0], 2),
            in_specs=[plgpu.BlockSpec(BLOCK, lambda i, j: (i, j), delay_release=delay)],
            max_concurrent_steps=3,
            compute_context=context,
        )(x)

    x = random(5 * 16, 64)
    out = on_threads(1, BLOCK, body)(jnp.array([num_steps], jnp.int32), x)
    expected = np.ones(BLOCK)
    for i, j in np.ndindex(num_steps, 2):
        block = x[i * 16 : i * 16 + 16, j * 32 : j * 32 + 32]
        expected = expected * 2 + block + (i * 10 + j)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
