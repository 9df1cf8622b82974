"""``gated_activation`` with activations that capture values which JAX traces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasite import ops

RANDOM = np.random.default_rng(0)
GATE, UP = RANDOM.normal(size=(2, 5, 33)).astype(np.float32)
SCALES = np.array([0.7, -2, 1.5], np.float32)


def fused(gate, up, scale):
    return ops.gated_activation(gate, up, lambda x: jnp.tanh(x * scale))


def composed(gate, up, scale):
    return jnp.tanh(gate * scale) * up


def total(function):
    return lambda *given: (function(*given) ** 2).sum()


TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(GATE, UP, SCALES[0]),
    "vmap": lambda f: jax.vmap(f, (None, None, 0))(GATE, UP, SCALES),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f), (None, None, 0))(GATE, UP, SCALES),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f, (None, None, 0)))(GATE, UP, SCALES),
    "grad": lambda f: jax.grad(total(f), (0, 1, 2))(GATE, UP, SCALES[0]),
    "grad of jit": lambda f: jax.grad(total(jax.jit(f)), (0, 1, 2))(GATE, UP, SCALES[0]),
    "by other operands": lambda f: jax.jit(jax.grad(total(f)))(GATE, UP, SCALES[0]),
    "checkpoint": lambda f: jax.grad(total(jax.checkpoint(f)), 2)(GATE, UP, SCALES[0]),
    "scan": lambda f: lax.scan(lambda c, s: (c, f(GATE, UP, s)), 0, SCALES)[1],
    "forward": lambda f: jax.jvp(f, (GATE, UP, SCALES[0]), (UP, GATE, SCALES[1]))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_captured_values(name):
    found, expected = (jax.tree.leaves(TRANSFORMS[name](one)) for one in (fused, composed))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
