"""Arithmetic of float8_e8m0fnu; its conversions are tested with the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from math_support import HOST, run

import pallasite
from pallasite import gpu as plgpu
from pallasite_std.math.table import BINARY

SCALE = np.dtype(ml_dtypes.float8_e8m0fnu)
ALL = np.arange(256, dtype=np.uint8).view(SCALE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["div", "mul", "add"])
def test_operations_on_all_pairs(name):
    x, y = (part.ravel() for part in np.meshgrid(ALL, ALL))
    single = {"div": np.divide, "mul": np.multiply, "add": np.add}[name]
    expected = single(x.astype(np.float32), y.astype(np.float32)).astype(SCALE)
    result = run(lambda a, b: BINARY[name](a, b, SCALE, hardware=HOST), [x, y], SCALE, 4)
    np.testing.assert_array_equal(result.view(np.uint8), expected.view(np.uint8))


@pytest.mark.runs_kernels
def test_reciprocals_are_differences():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((256,), SCALE))
    def kernel(x_ref, o_ref):
        o_ref[...] = 1 / x_ref[...]

    bits = np.asarray(kernel(jnp.asarray(ALL))).view(np.uint8)
    np.testing.assert_array_equal(bits, np.where(np.arange(256) == 255, 255, 254 - np.arange(256)))
    ptx = pallasite.compile(kernel, jax.ShapeDtypeStruct((256,), SCALE), target="sm_90a").ptx
    assert "div." not in ptx and "rcp." not in ptx
