"""Warp-specialised pipelines that follow one another and share their memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import BLOCK, on_threads, pipeline, random

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

State = plgpu.PipelinePipeline


def state_of(index, count):
    """The state of pipeline ``index`` of ``count``; numbers or scalars."""
    if isinstance(count, int) and isinstance(index, int):
        if count == 1:
            return State.SINGLE
        return {0: State.START, count - 1: State.STOP}.get(index, State.STEADY)
    single = jnp.where(index == count - 1, int(State.SINGLE), int(State.START))
    later = jnp.where(index == count - 1, int(State.STOP), int(State.STEADY))
    return jnp.where(index == 0, single, later)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.sampled
def test_sums_of_rows(count, steps, delay, traced):
    """Numbers of steps that are a multiple of the number of slots, and others."""
    depth = 2 if steps < 4 else 4

    def body(x, y, o):
        wg = lax.axis_index("wg")

        def one(row, allocations, state):
            def context(run):
                total = run(jnp.zeros(BLOCK))
                o[row, wg] = total

            make(row, context, state)(x, y, allocations=allocations)

        def make(row, context, state):
            def step(_, x_block, y_block, total):
                return total + x_block[...] * y_block[...] * (wg + 1).astype(jnp.float32)

            spec = plgpu.BlockSpec(BLOCK, lambda i: (row, i), delay_release=delay)
            constant = plgpu.BlockSpec(BLOCK, lambda i: (row, 0))
            return pipeline(
                step,
                2,
                grid=(steps,),
                in_specs=[spec, constant],
                max_concurrent_steps=depth,
                compute_context=context,
                pipeline_state=state,
            )

        def rows(allocations):
            if traced:
                pl.loop(0, count)(
                    lambda row: one(row, allocations, state_of(row, jnp.int32(count)))
                )
            else:
                for row in range(count):
                    one(row, allocations, state_of(row, count))

        allocations = make(0, lambda run: None, None).get_allocations(x, y)
        pl.run_scoped(rows, allocations, collective_axes="wg")

    x, y = random(count * 16, steps * 32), random(count * 16, 32, seed=1)
    out = on_threads(2, (count, 2, *BLOCK), body)(x, y)
    blocks = x.astype(np.float64).reshape(count, 16, steps, 32).sum(2)
    expected = blocks * y.reshape(count, *BLOCK)
    for wg in range(2):
        np.testing.assert_allclose(out[:, wg], expected * (wg + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kinds", [("held",), ("every", "held", "once")])
@pytest.mark.parametrize("steps", [(4,), (2, 3)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sampled
def test_outputs_in_a_sequence(kinds, steps, dynamic):
    count, inner = 3, steps[-1]
    total = int(np.prod(steps))
    rows = {"every": total, "held": total // inner, "once": 1}

    def linear(indices, row, kind):
        number = 0
        for index, size in zip(indices, steps, strict=True):
            number = number * size + index
        if kind == "held":
            number = indices[0] if len(steps) == 2 else 0
        return (row * rows[kind] + (0 if kind == "once" else number), 0)

    def body(sizes, x, *outs):
        def make(row, state):
            def step(indices, x_block, *blocks):
                for kind, block in zip(kinds, blocks, strict=True):
                    if kind == "held":

                        @pl.when(indices[-1] == 0)
                        def _(block=block):
                            block[...] = jnp.zeros(BLOCK)

                        block[...] = block[...] + x_block[...]
                    else:
                        block[...] = x_block[...]

            return pipeline(
                step,
                grid=tuple(sizes[i] for i in range(len(steps))) if dynamic else steps,
                in_specs=[plgpu.BlockSpec(BLOCK, lambda *indices: linear(indices, row, "every"))],
                out_specs=[
                    plgpu.BlockSpec(BLOCK, lambda *indices, kind=kind: linear(indices, row, kind))
                    for kind in kinds
                ],
                max_concurrent_steps=2,
                pipeline_state=state,
            )

        def run(allocations):
            lax.fori_loop(
                0,
                count,
                lambda row, _: make(row, state_of(row, jnp.int32(count)))(
                    x, *outs, allocations=allocations
                ),
                None,
            )

        pl.run_scoped(run, make(0, None).get_allocations(x, *outs), collective_axes="wg")

    x = random(count * total * 16, 32)
    kernel = on_threads(1, [(count * rows[kind] * 16, 32) for kind in kinds], body)
    outs = jax.jit(kernel)(np.array(steps, np.int32), x)
    blocks = x.reshape(count, total, *BLOCK)
    expected = {
        "every": blocks,
        "held": blocks.reshape(count, -1, inner, *BLOCK).sum(2),
        "once": blocks[:, -1:],
    }
    for kind, out in zip(kinds, outs, strict=True):
        np.testing.assert_allclose(
            out, expected[kind].reshape(-1, 32), rtol=1e-5, atol=1e-5, err_msg=kind
        )


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_sequence_with_manual_barriers(consumed, delay):
    """Slots that are only passed on need no arrivals of the body."""
    count, steps = 3, 4

    def body(x, y, o):
        def make(row, context, state):
            def step(indices, x_block, y_block, x_here, y_here, *rest):
                *used, total = rest
                plgpu.barrier_wait(y_here)
                plgpu.barrier_wait(x_here)
                total = total + x_block[...] * y_block[...]
                if used:
                    plgpu.barrier_arrive(used[0], predicate=indices[0] >= delay)
                    plgpu.barrier_arrive(used[1])
                return total

            return pipeline(
                step,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(BLOCK, lambda i: (row, i), delay_release=delay),
                    plgpu.BlockSpec(BLOCK, lambda i: (row, i)),
                ],
                max_concurrent_steps=3,
                compute_context=context,
                pipeline_state=state,
                manual_produced_barriers=True,
                manual_consumed_barriers=consumed,
            )

        def rows(allocations):
            for row in range(count):

                def context(run, row=row):
                    o[row] = run(jnp.zeros(BLOCK))

                make(row, context, state_of(row, count))(x, y, allocations=allocations)

        allocations = make(0, lambda run: None, None).get_allocations(x, y)
        pl.run_scoped(rows, allocations, collective_axes="wg")

    x, y = (random(count * 16, steps * 32, seed=seed) for seed in range(2))
    out = on_threads(1, (count, *BLOCK), body)(x, y)
    expected = (x.astype(np.float64) * y).reshape(count, 16, steps, 32).sum(2)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("with_state", [False, True])
def test_persistent_kernel(blocks, with_state):
    """A skeleton of a matrix product: each block takes its share of the tiles."""
    tiles, steps, depth = (4, 3), 4, 2
    rows, columns = BLOCK

    def body(x, y, o):
        def make(m, n, context, state=None):
            def step(_, x_block, y_block, total):
                return total + x_block[...] * y_block[...]

            return pipeline(
                step,
                2,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(BLOCK, lambda k: (m, k)),
                    plgpu.BlockSpec(BLOCK, lambda k: (n, k)),
                ],
                max_concurrent_steps=depth,
                compute_context=context,
                pipeline_state=state,
            )

        def run(allocations):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="sm")
            def _(info):
                m, n = plgpu.planar_snake(info.index[0], tiles, 1, 2)

                def context(run_steps):
                    total = run_steps(jnp.zeros(BLOCK))
                    o[m, n, wg] = total * (wg + 1).astype(jnp.float32)

                state = None
                if with_state:
                    state = state_of(info.local_index, info.num_local_steps)
                make(m, n, context, state)(x, y, allocations=allocations)

        allocations = make(0, 0, lambda _: None).get_allocations(x, y)
        pl.run_scoped(run, allocations, collective_axes="wg")

    x = random(tiles[0] * rows, steps * columns)
    y = random(tiles[1] * rows, steps * columns, seed=1)
    kernel = on_threads(2, (*tiles, 2, *BLOCK), body, grid=(blocks,), grid_names=("sm",))
    out = kernel(x, y)
    x_blocks = x.reshape(tiles[0], 1, rows, steps, columns).astype(np.float64)
    y_blocks = y.reshape(1, tiles[1], rows, steps, columns)
    expected = (x_blocks * y_blocks).sum(3)
    for wg in range(2):
        np.testing.assert_allclose(out[:, :, wg], expected * (wg + 1), rtol=1e-4, atol=1e-4)


def test_pipelines_with_allocations_of_their_own():
    """In a loop, one after the other, with other numbers of blocks and threads that wait."""

    def body(x, o, p):
        @pl.loop(0, 3)
        def _(row):
            def first(_, x_block, o_block):
                o_block[...] = x_block[...] + 1

            spec = plgpu.BlockSpec(BLOCK, lambda i: (row, i))
            pipeline(first, grid=(3,), in_specs=[spec], out_specs=[spec])(x, o)

            def second(_, whole, x_block, p_block):
                p_block[...] = x_block[...] * whole[0, 0]

            everything = plgpu.BlockSpec(memory_space=plgpu.GMEM)
            pipeline(
                second,
                grid=(3,),
                in_specs=[everything, spec],
                out_specs=[spec],
                max_concurrent_steps=3,
            )(x, x, p)

    x = random(48, 96)
    out, product = on_threads(1, [x.shape, x.shape], body)(x)
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(product, x * x[0, 0])
