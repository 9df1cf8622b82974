"""Warps that ask for more registers than others release wait for ever; the simulator says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasite import gpu as plgpu
from pallasite_simulator.errors import DeadlockError

pytestmark = pytest.mark.runs_kernels

THREADS = 3


def kernel(first: tuple[int, str], others: tuple[int, str]):
    """Three warpgroups, of which the last changes its registers in one way, the others in
    another."""

    def body(out, scratch):
        thread = lax.axis_index("thread")

        def change(count, action):
            return lambda: plgpu.set_max_registers(count, action=action)

        lax.cond(thread == THREADS - 1, change(*first), change(*others))
        out[thread] = thread * 7

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
        num_threads=THREADS,
        thread_name="thread",
        scratch_types=[plgpu.SMEM((8,), jnp.int32)],
    )


@pytest.mark.parametrize(("released", "requested"), [(24, 240), (40, 232), (104, 200)])
def test_exchange(released, requested):
    """168 registers of each of 384 lanes, reallocated."""
    result = kernel((released, "decrease"), (requested, "increase"))()
    np.testing.assert_array_equal(result, [0, 7, 14])


@pytest.mark.parametrize(("released", "requested"), [(32, 240), (48, 232), (112, 200)])
def test_request_that_is_never_met(released, requested):
    """8 registers more for each lane than there are."""
    if jax.default_backend() == "gpu":
        pytest.skip("it would never end")
    with pytest.raises(DeadlockError, match=f"setmaxnreg.inc to {requested}") as error:
        kernel((released, "decrease"), (requested, "increase"))()
    assert "a lane starts with 168" in str(error.value)
