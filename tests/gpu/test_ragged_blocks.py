"""``pallas_call`` with blocks that do not divide the array: nothing beyond its edges is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((100, 128), (64, 64)), ((128, 104), (64, 64)), ((65, 1000), (32, 128)), ((7, 8), (8, 32))],
)
def test_blocks_over_the_edge(shape, block, dtype):
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = plgpu.BlockSpec(block, lambda i, j: (i, j))
    call = pl.pallas_call(
        double,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(pl.cdiv(shape[0], block[0]), pl.cdiv(shape[1], block[1])),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(),
    )
    values = np.random.default_rng(0).integers(-100, 100, shape)
    x = jnp.asarray(values, dtype)
    # A row that is written past its end shows in the next one.
    result = jax.jit(call)(x)
    np.testing.assert_array_equal(np.asarray(result, np.float64), 2.0 * values)
