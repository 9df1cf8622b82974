"""Arrays that are stored where no vector begins: neighbours that fill a word are stored at once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

JOINED = {
    "stacked": lambda x: jnp.stack([x, -x]),
    "beside": lambda x: jnp.concatenate([x + x, x]),
    "behind three": lambda x: jnp.concatenate([x.reshape(-1)[:3], -x.reshape(-1)]),
}


def compiled(function, x):
    out = jax.eval_shape(function, x)

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    kernel = plgpu.kernel(body, out_type=out, compiler_params=params)
    return pallasite.compile(kernel, x, target="sm_90a")


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8, jnp.int16], ids=str)
@pytest.mark.parametrize("shape", [(251, 7), (67, 31), (9, 13)], ids=str)
@pytest.mark.sampled
def test_results(joined, dtype, shape):
    x = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 97 - 48, dtype)
    (got,) = simulate(compiled(JOINED[joined], x), np.asarray(x)).outputs
    np.testing.assert_array_equal(got, np.asarray(JOINED[joined](x)))


def test_neighbours_are_stored_together():
    """Eight elements behind an odd one: one, two, four, one."""
    ptx = compiled(JOINED["stacked"], jnp.zeros((251, 7), jnp.bfloat16)).ptx
    widths = re.findall(r"st\.global(\.v[24])?\.b(16|32|64)\b", ptx)
    assert len(widths) <= 15, widths
