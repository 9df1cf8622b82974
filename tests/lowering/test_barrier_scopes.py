"""Barriers that are allocated in scopes: which of them are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu


def two_threads(body, out_shape):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        num_threads=2,
        thread_name="wg",
    )


def message(out, round, writer):
    """One thread writes to shared memory, the other waits and reads."""
    wg = lax.axis_index("wg")

    def scope(memory, written):
        @pl.when(wg == writer)
        def _():
            memory[...] = jnp.full((128,), 10.0 * writer) + round.astype(jnp.float32)
            plgpu.barrier_arrive(written)

        @pl.when(wg != writer)
        def _():
            plgpu.barrier_wait(written)
            out[writer, round] = memory[...]

    pl.run_scoped(scope, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(), collective_axes="wg")


@pytest.mark.runs_kernels
def test_scopes_in_which_other_threads_wait():
    def body(out):
        @pl.loop(0, 3)
        def _(round):
            message(out, round, 0)
            message(out, round, 1)

    out = two_threads(body, (2, 3, 128))()
    expected = np.array([[0, 1, 2], [10, 11, 12]], np.float32)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[..., None], (2, 3, 128)))


def test_a_scope_that_is_lowered_again_keeps_its_barriers():
    """An unrolled loop, and the trial that finds the layout of a carry, take no more of them."""

    def body(out):
        def step(round, total):
            message(out, round, 0)
            return total + lax.broadcasted_iota(jnp.float32, (128,), 0)

        out[1, 0] = lax.fori_loop(0, 4, step, jnp.zeros(128), unroll=2)

    compiled = pallasite.compile(two_threads(body, (2, 4, 128)), target="sm_90a")
    assert compiled.resources.barriers == 1
    assert compiled.ptx.count("mbarrier.init") == 1
