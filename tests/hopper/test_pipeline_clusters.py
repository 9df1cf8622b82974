"""Warp-specialised pipelines whose inputs the blocks of a cluster share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import BLOCK, on_threads, pipeline, random

import pallasite
from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize("num_compute_wgs", [1, 2])
@pytest.mark.parametrize(("num_steps", "depth", "delay"), [(1, 2, 0), (5, 2, 0), (5, 3, 1)])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.sampled(alone=("num_steps", "depth", "delay"))
def test_one_input_is_shared(num_compute_wgs, num_steps, depth, delay, manual):
    def body(x, y, o):
        block, wg = lax.axis_index("cluster"), lax.axis_index("wg")

        def context(run):
            o[block, wg] = run(jnp.zeros(BLOCK))

        def step(indices, x_block, y_block, *rest):
            *used, total = rest
            total = total + x_block[...] * y_block[...]
            for barrier in used:
                plgpu.barrier_arrive(barrier, predicate=indices[0] >= delay)
            return total

        pipeline(
            step,
            num_compute_wgs,
            grid=(num_steps,),
            in_specs=[
                plgpu.BlockSpec(
                    BLOCK, lambda i: (i, 0), collective_axes=("cluster",), delay_release=delay
                ),
                plgpu.BlockSpec(BLOCK, lambda i: (i, block), delay_release=delay),
            ],
            max_concurrent_steps=depth,
            compute_context=context,
            manual_consumed_barriers=manual,
        )(x, y)

    x, y = random(num_steps * 16, 32), random(num_steps * 16, 64, seed=1)
    kernel = on_threads(
        num_compute_wgs,
        (2, num_compute_wgs, *BLOCK),
        body,
        cluster=(2,),
        cluster_names=("cluster",),
    )
    out = kernel(x, y)
    for block in range(2):
        mine = y[:, block * 32 : block * 32 + 32].astype(np.float64)
        expected = (x * mine).reshape(num_steps, *BLOCK).sum(0)
        for wg in range(num_compute_wgs):
            np.testing.assert_allclose(out[block, wg], expected, rtol=1e-5, atol=1e-5)
    assert ".multicast::cluster" in pallasite.compile(kernel, x, y, target="sm_90a").ptx


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("num_steps", "depth", "delays"), [(1, 2, (0, 0)), (5, 1, (0, 0)), (7, 3, (0, 1))]
)
def test_a_pipeline_without_roles(num_steps, depth, delays, target):
    """Four blocks: rows share one input, columns another, all a third, which stays the same."""

    def body(x, y, z, o):
        i, j = lax.axis_index("i"), lax.axis_index("j")

        def step(indices, x_block, y_block, z_block, out_block, total):
            @pl.when((i == 1) & (j == 0))
            def _():  # One block lags.
                for _ in range(20):
                    plgpu.commit_smem()

            total = total + x_block[...] * y_block[...]
            out_block[...] = total + z_block[...]
            return total

        def spec(column, axes, delay):
            return plgpu.BlockSpec(
                BLOCK, lambda k: (k, column), collective_axes=axes, delay_release=delay
            )

        plgpu.emit_pipeline(
            step,
            grid=(num_steps,),
            in_specs=[
                spec(i, ("j",), delays[0]),
                spec(j, ("i",), delays[1]),
                plgpu.BlockSpec(BLOCK, lambda k: (0, 0), collective_axes=("i", "j")),
            ],
            out_specs=[plgpu.BlockSpec((None, None, *BLOCK), lambda k: (2 * i + j, k, 0, 0))],
            max_concurrent_steps=depth,
            init_carry=jnp.zeros(BLOCK),
        )(x, y, z, o)

    x, y, z = (random(num_steps * 16, 64, seed=seed) for seed in range(3))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4, num_steps, *BLOCK), jnp.float32),
        cluster=(2, 2),
        cluster_names=("i", "j"),
        compiler_params=plgpu.CompilerParams(target=target),
    )
    out = kernel(x, y, z)
    for i in range(2):
        for j in range(2):
            mine = x[:, i * 32 : i * 32 + 32] * y[:, j * 32 : j * 32 + 32].astype(np.float64)
            expected = np.cumsum(mine.reshape(num_steps, *BLOCK), 0) + z[:16, :32]
            np.testing.assert_allclose(out[2 * i + j], expected, rtol=1e-5, atol=1e-5)
    assert ".multicast::cluster" in pallasite.compile(kernel, x, y, z).ptx


@pytest.mark.parametrize("automatic", [False, True])
def test_rows_and_columns(automatic):
    """Four blocks: one input is shared along each axis, a third by all, and one block lags."""
    tiles, steps = 3, 3

    def body(x, y, z, o):
        i, j = lax.axis_index("i"), lax.axis_index("j")

        def tile(number, allocations):
            def context(run):
                total = run(jnp.zeros(BLOCK))

                @pl.when((i == 1) & (j == 0))
                def _():
                    # This block is late for the next tile.
                    lax.fori_loop(0, 50, lambda _, __: plgpu.commit_smem(), None)

                o[number, i, j] = total

            def step(indices, x_block, y_block, z_block, total):
                return total + x_block[...] * y_block[...] + z_block[...]

            pipe = pipeline(
                step,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(BLOCK, lambda k: (number, k * 2 + i), collective_axes=("j",)),
                    plgpu.BlockSpec(BLOCK, lambda k: (number, k * 2 + j), collective_axes=("i",)),
                    plgpu.BlockSpec(BLOCK, lambda k: (number, 0), collective_axes=("i", "j")),
                ],
                compute_context=context,
            )
            pipe(x, y, z, allocations=allocations)
            return pipe

        def all_tiles(allocations):
            pl.loop(0, tiles)(lambda number: tile(number, allocations) and None)

        if automatic:
            all_tiles(None)
        else:
            spec = plgpu.BlockSpec(BLOCK, lambda k: (0, k), collective_axes=("j",))
            other = plgpu.BlockSpec(BLOCK, lambda k: (0, k), collective_axes=("i",))
            both = plgpu.BlockSpec(BLOCK, lambda k: (0, 0), collective_axes=("i", "j"))
            shape = pipeline(
                None, grid=(steps,), in_specs=[spec, other, both], compute_context=lambda _: None
            )
            pl.run_scoped(all_tiles, shape.get_allocations(x, y, z), collective_axes="wg")

    x, y = (random(tiles * 16, 2 * steps * 32, seed=seed) for seed in range(2))
    z = random(tiles * 16, 32, seed=2)
    kernel = on_threads(1, (tiles, 2, 2, *BLOCK), body, cluster=(2, 2), cluster_names=("i", "j"))
    out = kernel(x, y, z)
    x_blocks = x.reshape(tiles, 16, steps, 2, 32).astype(np.float64)
    y_blocks = y.reshape(tiles, 16, steps, 2, 32)
    expected = np.einsum("trkic,trkjc->tijrc", x_blocks, y_blocks)
    expected += steps * z.reshape(tiles, 1, 1, *BLOCK)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_peers_wait_until_the_memory_is_free():
    """Without allocations of its own, a pipeline gets memory that was in other use before."""

    def body(x, o, p):
        block, wg = lax.axis_index("cluster"), lax.axis_index("wg")

        @pl.loop(0, 2)
        def _(round):
            def step(indices, x_block):
                o[round, block, indices[0]] = x_block[...]

            pipeline(
                step,
                grid=(2,),
                in_specs=[plgpu.BlockSpec(BLOCK, lambda i: (i, 0), collective_axes=("cluster",))],
            )(x)

            def other_use(memory):
                @pl.when(wg == 0)
                def _():
                    memory[...] = jnp.full(memory.shape, 7.0)

                    @pl.when(block == 1)
                    def _():
                        lax.fori_loop(0, 100, lambda _, __: plgpu.commit_smem(), None)

                    p[round, block] = memory[...]

            pl.run_scoped(other_use, plgpu.SMEM((2, *BLOCK), jnp.float32), collective_axes="wg")

    x = random(32, 32)
    shapes = [(2, 2, 2, *BLOCK), (2, 2, 2, *BLOCK)]
    out, other = on_threads(1, shapes, body, cluster=(2,), cluster_names=("cluster",))(x)
    np.testing.assert_array_equal(out, np.broadcast_to(x.reshape(2, *BLOCK), out.shape))
    np.testing.assert_array_equal(other, np.full(other.shape, 7.0))
