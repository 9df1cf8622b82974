"""Which arrivals tell another thread something, and how they are emitted."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError
from pallasite.lowering.inference.releases import BarrierEvent, releases
from pallasite.plugin import BarrierRole

FREE, TURNS = object(), object()
FIRST, SECOND, OTHER = (("c",), 0), (("c",), 1), (("d",), 0)


def use(kind, number, *branches, barrier=FREE):
    return BarrierEvent(BarrierRole(kind), ((), number), branches, barrier)


def found(*uses):
    return [number for _, number in releases(uses)]


def test_arrivals_for_other_branches():
    assert found(use("arrive", 1, FIRST), use("wait", 2, SECOND)) == [1]
    assert found(use("arrive", 1, FIRST), use("wait", 2, OTHER)) == [1]
    # The same thread waits as well, perhaps further inside.
    assert found(use("arrive", 1, FIRST), use("wait", 2, FIRST)) == []
    assert found(use("arrive", 1, FIRST), use("wait", 2, FIRST, OTHER)) == []
    assert found(use("arrive", 1, FIRST, OTHER), use("wait", 2, SECOND)) == [1]
    both = use("wait", 2, SECOND), use("wait", 3, FIRST)
    assert found(use("arrive", 1, FIRST), *both) == []


def test_arrivals_that_nobody_or_everybody_waits_for():
    assert found(use("arrive", 1, FIRST)) == []
    assert found(use("arrive", 1), use("wait", 2)) == []
    assert found(use("arrive", 1), use("wait", 2, FIRST)) == []
    assert found(use("arrive", 1, FIRST), use("wait", 2, SECOND, barrier=TURNS)) == []


@pytest.mark.runs_kernels
@pytest.mark.parametrize("by", [None, "lanes", "warps"])
def test_how_they_are_emitted(by):
    """Two threads take turns; a third one fills what they have read."""
    x = np.random.default_rng(3).standard_normal((6, 128)).astype(np.float32)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 128), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 128), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        num_threads=3,
        thread_name="t",
    )
    def kernel(x_ref, o_ref, tiles, full, free, turns):
        thread = lax.axis_index("t")

        @pl.when(thread < 2)
        def _():
            def step(i, total):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                total += tiles[slot]
                plgpu.barrier_arrive(free.at[slot], by=by)
                plgpu.barrier_arrive(turns)
                plgpu.barrier_wait(turns)
                return total

            o_ref[thread] = lax.fori_loop(0, 6, step, jnp.zeros((128,), jnp.float32))

        @pl.when(thread == 2)
        def _():
            def step(i, _):
                slot = lax.rem(i, 2)
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(x_ref.at[i], tiles.at[slot], full.at[slot])

            lax.fori_loop(0, 6, step, None)

    np.testing.assert_allclose(kernel(x), np.stack([x.sum(0)] * 2), rtol=1e-5)
    ptx = pallasite.compile(kernel, x, target="sm_90").ptx
    arrivals = re.findall(r"(@%p\d+ )?mbarrier\.arrive\.\S+ _, \[%r\d+\](.*);", ptx)
    # Every lane says that a slot is free; for the turns one lane does for its warp.
    assert (("", "") in arrivals) == (by != "warps") and any(n == ", 32" for _, n in arrivals)
    assert len(arrivals) == 3


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])
def test_lanes_arrive_under_a_condition(semantics):
    """Every lane of the first thread arrives if the kernel's operand says so."""

    def kernel(count_ref, o_ref, met):
        thread = lax.axis_index("t")

        @pl.when(thread == 0)
        def _():
            for _ in range(2):
                plgpu.barrier_arrive(met, by="lanes", predicate=count_ref[0] > 0)
            plgpu.barrier_arrive(met, by="lanes", predicate=count_ref[0] < 0)

        @pl.when(thread == 1)
        def _():
            plgpu.barrier_wait(met)
            o_ref[...] = jnp.full((128,), count_ref[0])

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=[plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="t",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics[semantics]),
    )
    np.testing.assert_array_equal(run(np.array([7], np.int32)), np.full(128, 7))


def test_message_of_an_unknown_way():
    with pytest.raises(InvalidValueError) as caught:

        def kernel(o_ref, barrier):
            plgpu.barrier_arrive(barrier, by="threads")

        plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
            scratch_types=[plgpu.Barrier()],
        )()
    text = str(caught.value)
    assert "test_releases.py" in text and "by is unknown" in text
    assert "'threads'" in text and "'lanes' or 'warps'" in text
