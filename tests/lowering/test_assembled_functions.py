"""Functions that are one piece of assembly where chips have no instructions for pairs of f32."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu

SIZE = 4096
FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
}


def edges() -> np.ndarray:
    """Numbers of all magnitudes, those where results over- and underflow, and special ones."""
    rng = np.random.default_rng(11)
    scales = 2.0 ** rng.uniform(-30, 7, SIZE)
    x = np.asarray(rng.choice([-1, 1], SIZE) * scales, np.float32)
    turns = np.linspace(-104.5, -86.5, 512), np.linspace(88.0, 89.0, 512)
    x[:1024] = np.concatenate(turns)
    x[1024:1031] = [0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38]
    return x


def applied(function, target):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        compiler_params=plgpu.CompilerParams(target=target),
    )
    def kernel(x, o):
        o[...] = function(x[...])

    return kernel


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_both_forms_give_the_same_bits(name):
    function, reference = FUNCTIONS[name]
    x = edges()
    forms = {target: applied(function, target) for target in ("sm_90a", "sm_100a")}
    texts = {target: pallasite.compile(one, x).ptx for target, one in forms.items()}
    # Only chips without pairs have the registers of the assembly.
    assert [len(re.findall(r"\.reg \.f32 r, s;", text)) > 0 for text in texts.values()] == [1, 0]
    assert "f32x2" in texts["sm_100a"] and "f32x2" not in texts["sm_90a"]
    one, other = (np.asarray(kernel(x)) for kernel in forms.values())
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = reference(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(one), np.isnan(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(one[~finite & ~np.isnan(wanted)], np.inf)
    ulps = np.abs(one[finite].view(np.int32).astype(np.int64) - wanted[finite].view(np.int32))
    assert ulps.max() <= 4
