"""What is found behind branches on data and in long loops, and what is not known there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checked import F32, array, findings, only
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

TILE = plgpu.SMEM((64, 64), F32)
X = array(64, 64)
FLAGS = array(4, dtype=jnp.int32)


def rows(i):
    return pl.ds(i * 64, 64)


# Branches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_behind_a_branch_on_data(waits):
    """A branch of plain accesses, and one whose sides do the same with barriers."""

    def body(x, flags, out, tile, other, loaded):
        pl.when(flags[0] > 0)(lambda: other.__setitem__(..., x[...]))
        lax.cond(
            flags[1] > 0,
            lambda: plgpu.copy_gmem_to_smem(x, tile, loaded),
            lambda: plgpu.copy_gmem_to_smem(x, tile, loaded),
        )
        if waits:
            plgpu.barrier_wait(loaded)
        out[...] = tile[...]  # here

    def check(body):
        scratch = [TILE, TILE, plgpu.Barrier()]
        return findings(body, [X, FLAGS], X, scratch_types=scratch)

    if waits:
        assert not check(body)
    else:
        only(check(body), "shared memory is read while a copy from global memory may still write")


@pytest.mark.parametrize("waits", [True, False])
def test_behind_something_unknown(waits):
    """Copies to global memory are the thread's own matter, whatever happened to a barrier."""

    def body(x, flags, out, tile, loaded):
        plgpu.copy_gmem_to_smem(x, tile, loaded)
        pl.when(flags[0] > 0)(lambda: plgpu.barrier_wait(loaded))
        value = tile[...]
        tile[...] = value * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out)  # here
        if waits:
            plgpu.wait_smem_to_gmem(0)

    found = findings(body, [X, FLAGS], X, scratch_types=[TILE, plgpu.Barrier()])
    if waits:
        assert not found
    else:
        only(found, "nothing waits for this copy to global memory")


@pytest.mark.parametrize("slot", ["data", "loop"])
def test_barriers_and_loops_that_are_not_known(slot):
    """Nothing is said of them, but of what comes behind them."""

    def body(x, flags, out, tile, staging, loaded):
        if slot == "data":
            at = flags[0]
            plgpu.copy_gmem_to_smem(x, tile.at[at], loaded.at[at])
            plgpu.barrier_wait(loaded.at[at])
        else:

            @pl.loop(0, flags[1])
            def _(i):
                plgpu.copy_gmem_to_smem(x, tile.at[0], loaded.at[0])
                plgpu.barrier_wait(loaded.at[0])

        staging[...] = tile[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, out)  # here

    scratch = [plgpu.SMEM((4, 64, 64), F32), TILE, plgpu.Barrier(num_barriers=4)]
    only(findings(body, [X, FLAGS], X, scratch_types=scratch), "nothing waits for this copy")


# Long loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [11, 64, 1001])
@pytest.mark.parametrize("defect", [None, "end", "late", "once", "drain"])
def test_long_ring(defect, steps):
    """Of a producer and a consumer; in the loop, behind it, and in one iteration of it alone."""
    slots = 3

    def body(x, out, tiles, staging, full, empty):
        thread = lax.axis_index("wg")

        @pl.when(thread == 1)
        def _():
            stage = jnp.int32(0)

            def fill(i, stage):
                if defect != "once":
                    pl.when(i >= slots)(lambda: plgpu.barrier_wait(empty.at[stage]))
                else:
                    wait = (i >= slots) & (i != steps - 4)
                    pl.when(wait)(lambda: plgpu.barrier_wait(empty.at[stage]))
                plgpu.copy_gmem_to_smem(x.at[rows(0)], tiles.at[stage], full.at[stage])
                return lax.select(stage + 1 == slots, jnp.int32(0), stage + 1)

            lax.fori_loop(0, steps, fill, stage)

        @pl.when(thread == 0)
        def _():
            def use(i, total):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(full.at[slot])
                total += tiles[slot]
                plgpu.barrier_arrive(empty.at[slot])
                return total

            zeros = plgpu.layout_cast(
                jnp.zeros((64, 64), F32), plgpu.Layout.WG_STRIDED((64, 64), 2)
            )
            total = lax.fori_loop(0, steps - (defect == "drain"), use, zeros)
            if defect == "late":
                plgpu.barrier_wait(full.at[steps % slots])
            staging[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out)
            if defect != "end":
                plgpu.wait_smem_to_gmem(0)

    scratch = [
        *(plgpu.SMEM((slots, 64, 64), F32), TILE),
        *(plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_barriers=slots)),
    ]
    found = findings(
        body, [X], X, scratch_types=scratch, num_threads=2, thread_name="wg"
    )  # fmt: skip
    texts = [one.text for one in found]
    if defect is None:
        assert not texts
    elif defect == "end":
        assert len(texts) == 1 and "nothing waits for this copy to global memory" in texts[0]
    elif defect == "late":
        assert "this wait never ends" in texts[0]
    elif defect == "drain":
        assert len(texts) == 1 and "nothing waits for this copy" in texts[0]
    else:  # In an iteration that is none of the first and of the last.
        assert all("may still read" in text or "never" in text for text in texts)


@pytest.mark.parametrize("steps", [4, 10, 11, 12, 17, 40])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipelines_of_any_length(steps, stages):
    """Right ones: blocks of one row, warp-specialized."""

    def body(x, out):
        def step(_, one, result):
            result[...] = one[...] + 1.0

        spec = pl.BlockSpec((1, 64), lambda i: (i, 0))
        plgpu.emit_pipeline_warp_specialized(
            step,
            in_specs=[spec],
            out_specs=[spec],
            grid=(steps,),
            max_concurrent_steps=stages,
            num_compute_wgs=1,
            memory_registers=40,
            wg_axis="wg",
        )(x, out)

    rows = jax.ShapeDtypeStruct((steps, 64), F32)
    assert not findings(body, [rows], rows, num_threads=2, thread_name="wg")


def test_threads_whose_loops_differ():
    """A loop of 40 iterations fills two slots in each, another takes one in each of its 80."""

    def body(x, out, tiles, full, empty):
        thread = lax.axis_index("wg")

        @pl.when(thread == 1)
        def _():
            @pl.loop(0, 40)
            def _(i):
                for slot in range(2):
                    pl.when(i > 0)(lambda s=slot: plgpu.barrier_wait(empty.at[s]))
                    plgpu.copy_gmem_to_smem(x, tiles.at[slot], full.at[slot])

        @pl.when(thread == 0)
        def _():
            @pl.loop(0, 80)
            def _(i):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                out[rows(i)] = tiles[slot]
                plgpu.barrier_arrive(empty.at[slot])

    scratch = [
        *(plgpu.SMEM((2, 64, 64), F32), plgpu.Barrier(num_barriers=2)),
        plgpu.Barrier(num_barriers=2),
    ]
    options = {"scratch_types": scratch, "num_threads": 2, "thread_name": "wg"}
    assert not findings(body, [X], array(80 * 64, 64), **options)


def test_iterations_that_are_not_like_the_others():
    """A wait that one iteration in the middle lacks, or has: nothing certain is known then."""

    def body(x, out, tile, loaded):
        @pl.loop(0, 100)
        def _(i):
            plgpu.copy_gmem_to_smem(x, tile, loaded)
            pl.when(i != 57)(lambda: plgpu.barrier_wait(loaded))
            pl.when(i == 57)(lambda: plgpu.barrier_wait(loaded))
            out[rows(i)] = tile[...]

    scratch = [TILE, plgpu.Barrier()]
    assert not findings(body, [X], array(6400, 64), scratch_types=scratch)
