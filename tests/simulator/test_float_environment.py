"""Kernels compute with subnormal numbers, whatever mode the thread is in that runs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from simulator_support import run_elementwise

from pallasite import gpu as plgpu


def test_subnormal_numbers_in_a_callback_of_jax():
    # XLA's threads flush subnormal numbers to zero.
    x = np.float32(2.0) ** np.arange(-149, -21).astype(np.float32)
    kernel = plgpu.kernel(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 0.25),
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(kernel)(x)), x * np.float32(0.25))


def test_subnormal_constants():
    x = np.ones(128, np.float32).view(np.uint32)
    result = run_elementwise("mul.f32 {d}, {a}, 0f00000001;", [x], np.uint32)
    assert (result == 1).all()
