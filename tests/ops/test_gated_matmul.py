"""``pallasite.ops.gated_matmul`` agrees with float64 on every target, and so do gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import error, exact, on, random

import pallasite
import pallasite.ops
from pallasite.errors import InvalidTypeError, InvalidValueError

pytestmark = pytest.mark.runs_kernels


def silu(x):
    return x / (1 + np.exp(-x))


def operands(m, n, k, dtype="bfloat16"):
    a, gate, up = random(1, (m, k), dtype), random(2, (k, n), dtype), random(3, (k, n), dtype)
    return a, (gate * 0.1).astype(dtype), up


@pytest.mark.parametrize(
    ("target", "shape", "dtype"),
    [
        ("sm_90a", (300, 200, 70), "bfloat16"),
        ("sm_90a", (140, 77, 130), "float16"),  # Rows that are not aligned.
        ("sm_90a", (8, 40, 64), "bfloat16"),
        ("sm_100a", (40, 50, 70), "float16"),
        ("sm_90a", (20, 30, 40), "float32"),
    ],
)
def test_shapes(target, shape, dtype):
    a, gate, up = operands(*shape, dtype)
    with on(target):
        result = pallasite.ops.gated_matmul(a, gate, up)
    expected = silu(exact(a) @ exact(gate)) * (exact(a) @ exact(up))
    assert result.dtype == a.dtype
    assert error(result, expected) < (1e-2 if dtype == "bfloat16" else 2e-3)


def test_one_kernel_on_hopper():
    """Neither product is in memory; an activation of one's own."""
    args = operands(512, 384, 256)
    with on("sm_90a"):
        found = pallasite.compile_all(
            lambda *x: pallasite.ops.gated_matmul(*x, activation=jnp.tanh), *args, target="sm_90a"
        )
    assert [one.name for one in found] == ["gated_matmul"]


def test_gradients():
    args = operands(70, 90, 80, "float16")
    d_out = random(4, (70, 90), "float16")
    with on("sm_90a"):
        _, pull_back = jax.vjp(pallasite.ops.gated_matmul, *args)
        found = pull_back(d_out)
    a, gate, up, cotangent = (exact(one) for one in (*args, d_out))
    x, y = a @ gate, a @ up
    share = 1 / (1 + np.exp(-x))
    d_x = cotangent * y * share * (1 + x * (1 - share))
    d_y = cotangent * silu(x)
    expected = (d_x @ gate.T + d_y @ up.T, a.T @ d_x, a.T @ d_y)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 5e-3


def test_nothing_and_errors():
    a, gate, up = operands(3, 4, 5)
    with on("sm_90a"):
        empty = pallasite.ops.gated_matmul(a[:, :0], gate[:0], up[:0])
        np.testing.assert_array_equal(empty, np.zeros((3, 4)))
        assert pallasite.ops.gated_matmul(a[:0], gate, up).shape == (0, 4)
        with pytest.raises(InvalidValueError, match="a, gate and up do not fit together"):
            pallasite.ops.gated_matmul(a, gate, up[:, :3])
        with pytest.raises(InvalidTypeError, match="do not have one dtype"):
            pallasite.ops.gated_matmul(a, gate, up.astype(jnp.float16))
        with pytest.raises(InvalidTypeError, match="up does not fit"):
            pallasite.ops.gated_matmul(a, gate, up[0])
