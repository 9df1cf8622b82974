"""Misuse of barriers that can be seen while a kernel is traced or compiled."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from refusals import build, make, refused

from pallasite import config
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError

TILE = plgpu.SMEM((64, 64), jnp.float32)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is not a barrier
      got: Ref<smem>{float32[64,64]}
      expected: a reference to a Barrier or ClusterBarrier
    """,
)
def test_arrival_on_data():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.barrier_arrive(tile)  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is not a barrier
      got: Ref<smem>{float32[64,64]}
      expected: a reference to a Barrier or ClusterBarrier
    """,
)
def test_wait_on_data():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.barrier_wait(tile)  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is not a reference
      got: ShapedArray(int32[], weak_type=True)
      expected: a Ref of the kernel, or a view of one such as ref.at[...]
      try: pass the reference itself; ref[...] reads it
    """,
)
def test_wait_on_a_number():
    @make()
    def kernel(x_ref, o_ref):
        plgpu.barrier_wait(3)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: barrier is a group of 2 barriers, of shape (2,)
      expected: one barrier
      try: choose one of the group: barrier.at[i]
    """,
)
def test_group_without_index():
    @make(scratch_types=[plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, barriers):
        plgpu.barrier_wait(barriers)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: barrier 2 of 2
      expected: an index from 0 to 1
    """,
)
def test_index_out_of_range():
    @make(scratch_types=[plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, barriers):
        plgpu.barrier_arrive(barriers.at[2])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: barrier -3 of 2
      expected: an index from 0 to 1
    """,
)
def test_negative_index():
    @make(scratch_types=[plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, barriers):
        plgpu.barrier_arrive(barriers.at[-3])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the array that is stored does not have the shape of the reference
      got: ()
      expected: (128, 64)
      try: jnp.full_like(ref, x) of a number, jnp.broadcast_to(x, ref.shape) of a row
    """,
)
def test_reading_a_barrier():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        o_ref[...] = barrier[...]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is a ClusterBarrier, which cannot count the bytes of a copy
      got: Ref<barriers>{cluster_barrier[]}
      expected: a Barrier
      try: give the copy a Barrier; then arrive on the ClusterBarrier once it completed
    """,
)
def test_copy_on_a_cluster_barrier():
    @make(
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=[TILE, plgpu.ClusterBarrier(collective_axes=("pair",))],
    )
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is not a barrier
      got: Ref<smem>{float32[64,64]}
      expected: a reference to a Barrier
    """,
)
def test_copy_on_data():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, tile)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: 'pair' is not a cluster axis
      expected: a kernel with cluster= and cluster_names=
    """,
)
def test_cluster_barrier_over_an_unknown_axis():
    @make(scratch_types=[plgpu.ClusterBarrier(collective_axes=("pair",))])  # here
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: num_arrivals is too small
      got: 0
      expected: an integer >= 1
    """,
)
def test_no_arrivals():
    plgpu.Barrier(num_arrivals=0)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: num_barriers[0] is not positive
      got: (0,)
      expected: integers >= 1
    """,
)
def test_no_barriers():
    plgpu.Barrier(num_barriers=0)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: num_arrivals must be known while tracing
      got: 1.5 of type float
      expected: a Python integer >= 1
    """,
)
def test_arrivals_that_are_not_a_number():
    plgpu.Barrier(num_arrivals=1.5)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: collective_axes is empty
      expected: None, an axis name or a tuple of names
    """,
)
def test_cluster_barrier_without_axes():
    plgpu.ClusterBarrier(collective_axes=())  # here


@refused(
    InvalidValueError,
    r"""
    HERE: an array of 40 barriers
      expected: at most 32 in one array
    """,
)
def test_more_barriers_than_phase_bits():
    @make(scratch_types=[plgpu.Barrier(num_barriers=40)])  # here
    def kernel(x_ref, o_ref, barriers):
        plgpu.barrier_arrive(barriers.at[0])

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a barrier cannot count 1048576 arrivals
      expected: num_arrivals of at most 8191
    """,
)
def test_too_many_arrivals():
    @make(scratch_types=[plgpu.Barrier(num_arrivals=1 << 20)])  # here
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: barrier is not a barrier
      got: Ref<gmem>{float32[128,64]}
      expected: a reference to a Barrier or ClusterBarrier
    """,
)
def test_barrier_as_an_operand():
    @make()
    def kernel(x_ref, o_ref):
        plgpu.barrier_arrive(x_ref)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: nothing in the kernel arrives on the barrier
      got: plgpu.Barrier(num_arrivals=1)
      expected: a barrier that a copy_gmem_to_smem is given, or that some thread arrives on
    """,
)
def test_wait_that_nothing_ends():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        tile[...] = x_ref[:64]
        plgpu.barrier_wait(barrier)  # here
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: nothing in the kernel arrives on the barrier
      got: plgpu.Barrier(num_arrivals=1)
      expected: a barrier that a copy_gmem_to_smem is given, or that some thread arrives on
    """,
)
def test_wait_on_another_barrier_than_the_copy():
    @make(scratch_types=[TILE, plgpu.Barrier(), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, loaded, consumed):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, loaded)
        plgpu.barrier_wait(consumed)  # here
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: nothing in the kernel arrives on the barrier
      got: plgpu.Barrier(num_arrivals=1, num_barriers=(2,))
      expected: a barrier that a copy_gmem_to_smem is given, or that some thread arrives on
    """,
)
def test_wait_in_a_loop_that_nothing_ends():
    @make(scratch_types=[plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, barriers):
        @pl.loop(0, 4)
        def _(step):
            plgpu.barrier_wait(barriers.at[step % 2])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the second phase of the barrier completes with arrival 2, but \
        only 1 can come before
      got: plgpu.Barrier(num_arrivals=1)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_two_waits_for_one_copy():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_wait(barrier)  # here
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: 2 arrivals on the barrier complete two phases without a wait in between
      got: plgpu.Barrier(num_arrivals=1)
      expected: a wait after each phase
      try: num_arrivals=2, if one wait is for all of them, or one barrier for each
    """,
)
def test_more_copies_than_arrivals():
    @make(scratch_types=[TILE, TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, other, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
        plgpu.copy_gmem_to_smem(x_ref.at[64:], other, barrier)  # here
        plgpu.barrier_wait(barrier)
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the first phase of the barrier completes with arrival 2, but only \
        1 can come before
      got: plgpu.Barrier(num_arrivals=2)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_fewer_copies_than_arrivals():
    @make(scratch_types=[TILE, plgpu.Barrier(num_arrivals=2)])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
        plgpu.barrier_wait(barrier)  # here
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the first phase of the barrier completes with arrival 1, but only \
        0 can come before
      got: plgpu.Barrier(num_arrivals=1)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_wait_before_the_copy():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.barrier_wait(barrier)  # here
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
        o_ref[:64] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the first phase of barrier [1] of the group completes with \
        arrival 1, but only 0 can come before
      got: plgpu.Barrier(num_arrivals=1, num_barriers=(2,))
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_second_wait_on_one_of_several():
    @make(scratch_types=[TILE, plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, tile, barriers):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barriers.at[0])
        plgpu.barrier_wait(barriers.at[0])
        plgpu.barrier_wait(barriers.at[1])  # here
        o_ref[:64] = tile[...]

    build(kernel)


_threads = make(
    num_threads=2,
    thread_name="thread",
    scratch_types=[TILE, TILE, plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)],
)


@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the first phase of the barrier completes with arrival 1, but only \
        0 can come before
      got: plgpu.Barrier(num_arrivals=1)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_threads_that_wait_for_each_other_for_ever():
    @_threads
    def kernel(x_ref, o_ref, tile, other, single, double):
        @pl.when(lax.axis_index("thread") == 0)
        def _():
            plgpu.barrier_wait(single)  # here
            plgpu.barrier_arrive(double)

        @pl.when(lax.axis_index("thread") == 1)
        def _():
            plgpu.barrier_arrive(double)
            plgpu.barrier_wait(double)
            plgpu.barrier_arrive(single)

    build(kernel)


# Barriers that nothing is wrong with, as far as one can see.


def test_threads_wait_for_each_other():
    @_threads
    def kernel(x_ref, o_ref, tile, other, single, double):
        @pl.when(lax.axis_index("thread") == 0)
        def _():
            plgpu.barrier_wait(single)
            plgpu.barrier_wait(double)

        @pl.when(lax.axis_index("thread") == 1)
        def _():
            plgpu.barrier_arrive(single)
            plgpu.barrier_arrive(double)

        @pl.when(lax.axis_index("thread") == 1)
        def _():
            plgpu.barrier_arrive(double)

    build(kernel)


def test_every_thread_arrives_once():
    @_threads
    def kernel(x_ref, o_ref, tile, other, single, double):
        plgpu.barrier_arrive(double)
        plgpu.barrier_wait(double)

    build(kernel)


def test_copies_in_a_loop():
    @make(scratch_types=[TILE, TILE, plgpu.Barrier(num_arrivals=2)])
    def kernel(x_ref, o_ref, tile, other, barrier):
        @pl.loop(0, 2)
        def _(step):
            plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)
            plgpu.copy_gmem_to_smem(x_ref.at[64:], other, barrier)
            plgpu.barrier_wait(barrier)

    build(kernel)


def test_copy_before_a_loop_that_waits():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)

        @pl.loop(0, 4)
        def _(step):
            plgpu.barrier_wait(barrier)

            @pl.when(step < 3)
            def _():
                plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier)

    build(kernel)


def test_predicated_copy():
    @make(scratch_types=[TILE, TILE, plgpu.Barrier(num_arrivals=2)])
    def kernel(x_ref, o_ref, tile, other, barrier):
        first = x_ref[0, 0] > 0
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier, predicate=first)
        plgpu.copy_gmem_to_smem(x_ref.at[64:], tile, barrier, predicate=jnp.logical_not(first))
        plgpu.barrier_wait(barrier)

    build(kernel)


def test_two_phases_one_after_the_other():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        for half in range(2):
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(64 * half, 64)], tile, barrier)
            plgpu.barrier_wait(barrier)

    build(kernel)


def test_prefetch_beyond_the_wait():
    @make(scratch_types=[TILE, TILE, plgpu.Barrier(num_barriers=2)])
    def kernel(x_ref, o_ref, tile, other, barriers):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barriers.at[0])
        plgpu.copy_gmem_to_smem(x_ref.at[64:], other, barriers.at[1])
        plgpu.barrier_wait(barriers.at[0])
        plgpu.barrier_wait(barriers.at[1])

    build(kernel)


def test_last_arrival_that_nobody_waits_for():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)

    build(kernel)


def test_warps_that_arrive_for_the_thread():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        @plgpu.warp_map
        def _(warp):
            plgpu.barrier_arrive(barrier)

        plgpu.barrier_wait(barrier)

    build(kernel)


def test_check_switched_off():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_wait(barrier)

    config.update("disabled_passes", ("check-barriers", "check-arrivals"))
    build(kernel)
