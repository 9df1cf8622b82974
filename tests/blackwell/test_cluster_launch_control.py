"""Clusters take over the work of clusters that wait for room on the chip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tcgen05_support import LANE, WARPGROUP

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

TARGET = "sm_110a"
"""The chip with the fewest multiprocessors: 20."""

LARGE = plgpu.SMEM((216 * 1024,), jnp.int8)
"""So much that a multiprocessor has one block."""

BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


def run(body, out, semantics, **options):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, jnp.int32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )
    made = pallasite.compile(kernel, target=TARGET)
    return made, simulate(made).outputs[0]


@BOTH
@pytest.mark.parametrize(("threads", "cluster"), [(1, 1), (2, 2)])
def test_every_piece_of_work_is_done_once(threads, cluster, semantics):
    grid = (3, 9)

    def body(o, large):
        del large
        own = lax.axis_index("i") * grid[1] + lax.axis_index("j")
        thread = lax.axis_index("wg") if threads > 1 else 0
        member = lax.axis_index("c") if cluster > 1 else 0

        def work(info):
            i, j = info.index
            o[i, j, member, thread] = jnp.full((128,), own * 100 + info.local_index)

        plgpu.dynamic_scheduling_loop(
            ("i", "j"),
            thread_axis="wg" if threads > 1 else None,
            # They may be left out.
            cluster_axes=("c",) if cluster > 1 and semantics is LANE else (),
        )(work)

    options = dict(num_threads=threads, thread_name="wg") if threads > 1 else {}
    if cluster > 1:
        options |= dict(cluster=(cluster,), cluster_names=("c",))
    made, out = run(
        body, (*grid, cluster, threads, 128), semantics, grid=grid, grid_names=("i", "j"),
        scratch_types=[LARGE], **options,
    )  # fmt: skip
    assert made.ptx.count("clusterlaunchcontrol.try_cancel") == 1
    assert (".multicast::cluster::all" in made.ptx) == (cluster > 1)
    out = out.reshape(grid[0] * grid[1], -1)
    assert (out == out[:, :1]).all()  # All blocks and threads of a cluster do the same work.
    who, step = np.divmod(out[:, 0], 100)
    resident = 20 // cluster
    assert set(who) == set(range(resident)) and step.max() >= 1
    taken = who != np.arange(len(who))
    np.testing.assert_array_equal(taken, step > 0)
    np.testing.assert_array_equal(taken, np.arange(len(who)) >= resident)


@BOTH
@pytest.mark.parametrize("axes", ["wg", ()], ids=["named", "seen"])
def test_by_hand(semantics, axes):
    """The last of 21 blocks is taken over by another and writes nothing; its threads ask once."""

    def body(o, large, result, answered):
        del large
        plgpu.try_cluster_cancel(result, answered, collective_axes=axes)
        plgpu.barrier_wait(answered)
        (i,), found = plgpu.query_cluster_cancel(result, ("i",))
        value = jnp.where(found, i, -1)
        o[lax.axis_index("i"), lax.axis_index("wg")] = jnp.full((128,), value)

    _, out = run(
        body, (20, 2, 128), semantics, grid=(21,), grid_names=("i",), num_threads=2,
        thread_name="wg",
        scratch_types=[LARGE, plgpu.TryClusterCancelResult(), plgpu.Barrier(num_arrivals=2)],
    )  # fmt: skip
    assert sorted(out[:, 0, 0]) == [-1] * 19 + [20]
    np.testing.assert_array_equal(out[:, 0], out[:, 1])


@BOTH
@pytest.mark.parametrize("who", ["second", "each"])
def test_threads_that_ask_for_themselves(semantics, who):
    """A thread that asks alone gets an answer; threads with results of their own take over two."""

    def body(o, large, result, answered):
        del large
        thread = lax.axis_index("wg")

        @pl.when((thread == 1) | (who == "each"))
        def _():
            plgpu.try_cluster_cancel(result.at[thread], answered.at[thread])
            plgpu.barrier_wait(answered.at[thread])
            (i,), found = plgpu.query_cluster_cancel(result.at[thread], ("i",))
            value = jnp.where(found, i, -1)
            o[lax.axis_index("i"), thread] = jnp.full((128,), value)

    _, out = run(
        body, (22, 2, 128), semantics, grid=(22,), grid_names=("i",), num_threads=2,
        thread_name="wg",
        scratch_types=[LARGE, plgpu.TryClusterCancelResult(2), plgpu.Barrier(num_barriers=2)],
    )  # fmt: skip
    answers = out[:20, 0 if who == "each" else 1 :, 0]
    assert sorted(answers[answers != -1]) == [20, 21]
