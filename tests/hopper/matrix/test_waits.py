"""Waits for products that are missing, as far as they can be seen without running the kernel.

In lane semantics they are errors; warpgroup semantics adds them.
"""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from products_support import BF16, transforms
from refusals import array, build, make, refused

from pallasite import config
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError
from pallasite_hopper.matrix.waits import UnusedAccumulatorWarning

pytestmark = pytest.mark.usefixtures("lane_semantics")

TILES = transforms(128, BF16)
SLOTS = 3


def smem(*shape):
    return plgpu.SMEM(shape, BF16, transforms=TILES)


def product(function, *further, stages: int | None = None, read=True, **options) -> None:
    """Compiles a kernel whose scope is ``function(acc, a, b, x, barrier)``: two matrices in shared
    memory (or ``stages`` of each), an array in global memory."""
    lead = () if stages is None else (stages,)
    scratch = [smem(*lead, 64, 64), smem(*lead, 64, 64), plgpu.Barrier()]
    options = {"num_threads": None, **options}

    @make((64, 64), scratch_types=scratch, **options)
    def kernel(x_ref, count_ref, o_ref, a, b, barrier):
        def scope(acc):
            function(acc, a, b, x_ref, barrier, *([count_ref] if further else []))
            return acc[...] if read else jnp.zeros((64, 64))

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))

    build(kernel, array(64, 64, dtype=BF16), array(1, dtype=jnp.int32))


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_operand_is_stored():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)  # here 1
        a[...] = x[...]  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_operand_is_copied():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma(acc, a, b)  # here 1
        plgpu.wgmma_wait(1)
        plgpu.copy_gmem_to_smem(x, b, barrier)  # here
        plgpu.barrier_wait(barrier)

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_part_of_an_operand_is_stored():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0)))  # here 1
        b[32:40] = x[0:8]  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_operand_is_added_to():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)  # here 1
        a[0, 0] += x[0, 0]  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_slot_is_filled_in_the_next_iteration():
    """The only slot: the product of one iteration reads what the next one fills."""

    def body(acc, a, b, x, barrier):
        @pl.loop(0, 4)
        def _(_):
            plgpu.copy_gmem_to_smem(x, a, barrier)  # here
            plgpu.barrier_wait(barrier)
            plgpu.wgmma(acc, a, b)  # here 1

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(1) in between, or a smaller number
    """,
)
def test_slot_comes_back_too_early():
    """Three slots, of which the products in flight use two when the second is filled again."""

    def body(acc, a, b, x, barrier):
        @pl.loop(0, 20)
        def _(step):
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(barrier)
            plgpu.wgmma(acc, a.at[slot], b.at[slot])  # here 1
            plgpu.wgmma_wait(2)
            plgpu.copy_gmem_to_smem(x, a.at[lax.rem(step + SLOTS - 1, SLOTS)], barrier)  # here

    product(body, stages=SLOTS)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_slot_of_a_number_that_is_not_known():
    def body(acc, a, b, x, barrier, count):
        slot = count[0]
        plgpu.wgmma(acc, a.at[lax.rem(slot, 3)], b.at[0])  # here 1

        @pl.when(slot > 4)
        def _():
            plgpu.copy_gmem_to_smem(x, a.at[lax.rem(slot, 3)], barrier)  # here
            plgpu.barrier_wait(barrier)

    product(body, True, stages=SLOTS)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_loop_of_unknown_length():
    def body(acc, a, b, x, barrier, count):
        @pl.loop(0, count[0])
        def _(step):
            plgpu.copy_gmem_to_smem(x, a, barrier)  # here
            plgpu.barrier_wait(barrier)
            plgpu.wgmma(acc, a, b)  # here 1

    product(body, True)


@refused(
    InvalidValueError,
    r"""
    HERE: a wgmma reads shared memory that was stored without plgpu.commit_smem()
      got: the store at HERE1
      expected: plgpu.commit_smem() between the store and the wgmma
    """,
)
def test_store_without_commit():
    def body(acc, a, b, x, barrier):
        a[...] = x[...]  # here 1
        plgpu.wgmma(acc, a, b)  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: a wgmma reads shared memory that was stored without plgpu.commit_smem()
      got: the store at HERE1
      expected: plgpu.commit_smem() between the store and the wgmma
    """,
)
def test_store_without_commit_in_a_loop():
    def body(acc, a, b, x, barrier):
        plgpu.commit_smem()

        @pl.loop(0, 3)
        def _(_):
            plgpu.wgmma(acc, a, b)  # here
            plgpu.wgmma_wait(0)
            b[...] = x[...]  # here 1

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is read while a wgmma into it is in flight
      got: wait_n=None after the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) before it, or wait_n=0
    """,
)
def test_load_without_a_wait():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)  # here 1
        plgpu.wgmma_accumulator_load(acc, wait_n=None)  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is read while a wgmma into it is in flight
      got: wait_n=1 after the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) before it, or wait_n=0
    """,
)
def test_load_waits_for_too_few():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma(acc, a, b)  # here 1
        plgpu.wgmma_accumulator_load(acc, wait_n=1)  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is read while a wgmma into it is in flight
      got: wait_n=1 after the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) before it, or wait_n=0
    """,
)
def test_load_of_the_second_accumulator():
    def body(acc, a, b, x, barrier):
        def scope(other):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(other, a, b)  # here 1
            plgpu.wgmma_accumulator_load(acc, wait_n=1)
            plgpu.wgmma_accumulator_load(other, wait_n=1)  # here

        pl.run_scoped(scope, plgpu.ACC((64, 64)))

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is written while a wgmma into it is in flight
      got: acc[...] = value after the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) before it
    """,
)
def test_contents_are_written_in_flight():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)  # here 1
        acc[...] = jnp.zeros((64, 64))  # here

    product(body)


@refused(
    InvalidValueError,
    r"""
    HERE: this wgmma is never waited for: the scope of its accumulator ends while it is in flight
      expected: acc[...], which waits and reads it, or plgpu.wgmma_wait(0), in the scope
    """,
)
def test_nobody_waits():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        plgpu.wgmma(acc, a, b)  # here

    product(body, read=False)


@refused(
    InvalidValueError,
    r"""
    HERE: this wgmma is never waited for: the scope of its accumulator ends while it is in flight
      expected: acc[...], which waits and reads it, or plgpu.wgmma_wait(0), in the scope
    """,
)
def test_nobody_waits_for_a_loop():
    def body(acc, a, b, x, barrier):
        @pl.loop(0, 100)
        def _(_):
            plgpu.wgmma(acc, a, b)  # here
            plgpu.wgmma_wait(1)

    product(body, read=False)


@refused(
    InvalidValueError,
    r"""
    HERE: shared memory is overwritten while a wgmma that reads it is in flight
      got: the wgmma at HERE1
      expected: plgpu.wgmma_wait(0) in between
    """,
)
def test_one_of_two_threads():
    def body(acc, a, b, x, barrier):
        @pl.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.wgmma(acc, a, b)  # here 1
            a[...] = x[...]  # here

    product(body, num_threads=2, thread_name="wg")


def test_accumulator_that_nothing_reads(monkeypatch):
    # A kernel that was compiled before, by an earlier run, says nothing again.
    monkeypatch.setenv("PALLASITE_CACHE", "off")

    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    with pytest.warns(UnusedAccumulatorWarning, match=r"test_waits.py:\d+ .*is never read"):
        product(body, read=False)


def accepted(body, **options) -> None:
    """A correct kernel: no error, no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product(body, **options)


def test_other_slot():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a.at[0], b.at[0])
        plgpu.copy_gmem_to_smem(x, a.at[1], barrier)
        plgpu.barrier_wait(barrier)

    accepted(body, stages=SLOTS)


def test_other_rows():
    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a.at[:, 0:32], b.at[0:32])
        plgpu.copy_gmem_to_smem(x.at[0:32], b.at[32:64], barrier)
        plgpu.barrier_wait(barrier)

    accepted(body)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_ring(left):
    """Slots are filled when the wait has covered their products."""

    def body(acc, a, b, x, barrier):
        @pl.loop(0, 20)
        def _(step):
            slot = lax.rem(step, SLOTS)
            pl.when(step > left)(lambda: plgpu.barrier_wait(barrier))
            plgpu.wgmma(acc, a.at[slot], b.at[slot])
            plgpu.wgmma_wait(left)

            @pl.when(step >= left)
            def _():
                plgpu.copy_gmem_to_smem(x, a.at[lax.rem(step + SLOTS - left, SLOTS)], barrier)

        plgpu.barrier_wait(barrier)

    accepted(body, stages=SLOTS)


def test_wait_on_condition():
    """It may be that who stores has waited."""

    def body(acc, a, b, x, barrier, count):
        plgpu.wgmma(acc, a, b)

        @pl.when(count[0] > 0)
        def _():
            plgpu.wgmma_wait(0)

        @pl.when(count[0] > 0)
        def _():
            a[...] = x[...]
            plgpu.commit_smem()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product(body, True)


def test_store_that_a_copy_replaces():
    def body(acc, a, b, x, barrier):
        a[...] = x[...]
        plgpu.copy_gmem_to_smem(x, a, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.wgmma(acc, a, b)

    accepted(body)


def test_first_and_last_iterations_differ():
    def body(acc, a, b, x, barrier):
        @pl.loop(0, 30)
        def _(step):
            @pl.when(step > 0)
            def _():
                plgpu.wgmma_wait(0)
                plgpu.copy_gmem_to_smem(x, a, barrier)
                plgpu.barrier_wait(barrier)

            plgpu.wgmma(acc, a, b)

    accepted(body)


def test_read_in_a_late_iteration():
    """Beyond the iterations that are followed with numbers."""

    def body(acc, a, b, x, barrier, count):
        @pl.loop(0, count[0])
        def _(step):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)

            @pl.when(step == 50)
            def _():
                x[...] = acc[...].astype(BF16)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product(body, True, read=False)


def test_switched_off():
    """As any pass, by name."""
    config.update("disabled_passes", ("check-matrix-waits",))

    def body(acc, a, b, x, barrier):
        plgpu.wgmma(acc, a, b)
        a[...] = x[...]

    product(body)


def test_many_equations():
    """What would take too long is not checked."""

    def body(acc, a, b, x, barrier):
        def nest(depth):
            if depth == 0:
                plgpu.wgmma(acc, a, b)
            else:
                pl.loop(0, 9)(lambda _: nest(depth - 1))

        nest(6)

    accepted(body)
