"""Few long rows, whose segments different blocks reduce, against formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_references
from ops_support import exact, random

from pallasite import ops
from pallasite_std.ops.rows import segments

pytestmark = pytest.mark.runs_kernels

SHAPE = (2, 8 * segments.WIDTH + 513)


def difference(got, expected):
    """The relative error in the 2-norm."""
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(exact(got) - expected) / np.linalg.norm(expected)


@pytest.fixture(autouse=True)
def in_segments(monkeypatch):
    monkeypatch.setattr(segments, "LEAST_COLUMNS", 8 * segments.WIDTH)
    assert segments.in_segments(SHAPE, 132, 4)


def test_gradients_of_layer_norm():
    """With a residual, a mean that is large against the deviation, and one row unlike the other."""
    x = (random(1, SHAPE, "float32") + 30).at[1].mul(1e-3)
    residual = jnp.round(random(2, SHAPE, "float32") * 8) / 8
    weight, bias = random(3, SHAPE[1:], "float32"), random(4, SHAPE[1:], "float32")
    d_out, d_sum = random(5, SHAPE, "float32"), random(6, SHAPE, "float32")
    results, back = jax.vjp(
        lambda *a: ops.layer_norm(*a[:3], residual=a[3]), x, weight, bias, residual
    )
    found = back((d_out, d_sum))
    total = exact(x + residual)
    with jax.enable_x64(True):
        given = [jnp.asarray(one) for one in (total, exact(weight), exact(bias))]
        wanted, pull = jax.vjp(
            lambda *a: row_references.norm(*a, centered=True, epsilon=1e-5), *given
        )
        d_x, d_weight, d_bias = pull(jnp.asarray(exact(d_out)))
        d_x = d_x + exact(d_sum)
    assert difference(results[0], wanted) < 2e-6 and difference(results[1], total) < 1e-6
    for one, other in zip(found, (d_x, d_weight, d_bias, d_x), strict=True):
        assert difference(one, other) < 4e-6


@pytest.mark.parametrize("plain", [True, False])
def test_cross_entropy(plain):
    """Labels that are no classes, logits of minus infinity."""
    options = {} if plain else dict(label_smoothing=0.1, z_loss=1e-2, ignored_label=-1)
    x = random(9, SHAPE, "float32") * 4
    x = x.at[0, 5000:9000].set(-jnp.inf) if plain else x
    labels = jnp.asarray([SHAPE[1] + 7, 3] if plain else [40, -1])
    got, back = jax.vjp(lambda x: ops.softmax_cross_entropy(x, labels, **options), x)
    with jax.enable_x64(True):
        wanted, pull = jax.vjp(
            lambda x: row_references.cross_entropy(x, labels, **options), jnp.asarray(exact(x))
        )
        (gradient,) = pull(jnp.asarray([1.0, -2.0]))
    np.testing.assert_allclose(got, wanted, rtol=2e-6)
    assert difference(back(jnp.asarray([1.0, -2.0], jnp.float32))[0], gradient) < 2e-6


@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm", "quantize"])
def test_quantization(operation):
    x, weight = random(7, SHAPE, "bfloat16").at[0].mul(1e-3), random(8, SHAPE[1:], "bfloat16")
    if operation == "quantize":
        values, scales = ops.quantize(x, "float8_e4m3fn")
        wanted = exact(x)
    else:
        centered = operation == "layer_norm"
        more = (weight,) if centered else ()
        values, scales = getattr(ops, operation)(x, weight, *more, quantize="float8_e4m3fn")
        wide = [exact(one) for one in (x, weight, *more)]
        epsilon = 1e-5 if centered else 1e-6
        with jax.enable_x64(True):
            reference = row_references.norm(
                *map(jnp.asarray, wide), centered=centered, epsilon=epsilon
            )
        wanted = np.asarray(reference)
    np.testing.assert_allclose(scales, np.abs(wanted).max(-1) / 448, rtol=1e-6)
    for value, scale, row in zip(exact(values), exact(scales), wanted, strict=True):
        assert difference(value * scale, row) < 0.03
