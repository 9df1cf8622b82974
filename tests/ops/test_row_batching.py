"""``jax.vmap`` of operations on rows is one kernel of more rows, and computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import on, random

import pallasite
from pallasite import ops

pytestmark = pytest.mark.runs_kernels

X, OTHER = random(1, (3, 4, 40), "float32"), random(2, (3, 4, 40), "float32")
WEIGHT, WEIGHTS = random(3, (40,), "float32"), random(4, (3, 40), "float32")
LABELS = jnp.asarray(np.random.default_rng(5).integers(0, 40, (3, 4)), jnp.int32)
HEADS = random(6, (3, 2, 6, 2, 16), "float32")


def summed(function):
    """The gradient of a sum of squares by the first operand."""
    return jax.grad(lambda *operands: jnp.sum(jnp.square(function(*operands))))


CASES = {
    "norm": (ops.rms_norm, (0, None), (X, WEIGHT)),
    "weights": (ops.rms_norm, (0, 0), (X, WEIGHTS)),
    "weights alone": (ops.rms_norm, (None, 0), (X[0], WEIGHTS)),
    "residual": (lambda x, r: ops.layer_norm(x, residual=r), (0, None), (X, OTHER[0])),
    "quantised": (lambda x, w: ops.rms_norm(x, w, quantize=jnp.int8), (0, None), (X, WEIGHT)),
    "gradient": (summed(ops.layer_norm), (0,), (X,)),
    "weighted gradient": (summed(ops.rms_norm), (0, None), (X, WEIGHT)),
    "loss": (ops.softmax_cross_entropy, (0, None), (X, LABELS[0])),
    "loss's gradient": (summed(ops.softmax_cross_entropy), (0, 0), (X, LABELS)),
    "quotients": (lambda x: ops.quantize(x, jnp.int8, group=20), (0,), (X,)),
    "products": (
        ops.dequantize,
        (0, None),
        (jnp.round(9 * X).astype(jnp.int8), jnp.float32([1, 2, 3, 4])),
    ),
    "gated": (ops.swiglu, (0, None), (X, OTHER[0])),
    "gated gradient": (summed(ops.swiglu), (None, 0), (X[0], OTHER)),
    "top": (lambda x: ops.top_k(x, 3), (0,), (X,)),
    "rotary": (ops.rotary_embedding, (0, None), (HEADS, jnp.arange(6))),
    "positions": (ops.rotary_embedding, (0, 0), (HEADS, jnp.arange(18).reshape(3, 6))),
}


@pytest.mark.parametrize("name", CASES)
def test_mapped(name):
    function, axes, operands = CASES[name]
    found = jax.jit(jax.vmap(function, axes))(*operands)
    each = [
        function(
            *(one if axis is None else one[i] for one, axis in zip(operands, axes, strict=True))
        )
        for i in range(3)
    ]
    for one, *parts in zip(jax.tree.leaves(found), *map(jax.tree.leaves, each), strict=True):
        exact = np.stack([np.asarray(part, np.float64) for part in parts])
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["norm", "residual", "gradient", "loss", "gated", "top", "rotary"])
def test_kernels_have_all_rows(name):
    """Not a further grid dimension."""
    function, axes, operands = CASES[name]
    with on("sm_90"):
        for kernel in pallasite.compile_all(jax.vmap(function, axes), *operands):
            assert kernel.launch.grid[1:] == (1, 1)


def test_maps_of_maps():
    def inner(x, w):
        return jax.vmap(lambda row: ops.rms_norm(row, w))(x)

    found = jax.vmap(inner, (0, None))(X, WEIGHT)
    np.testing.assert_array_equal(found, ops.rms_norm(X, WEIGHT))
