"""Forms of rows by a seed; both functions of each compute the same."""

import random

import jax
import numpy as np
import pytest
import row_forms
import rows
from row_forms import Form

pytestmark = pytest.mark.runs_kernels

SMALL = (
    Form("norm", (8, 40), ("rms", "weight"), "rows", "float32", True),
    Form("norm", (8, 33), ("layer", "bias", "residual"), "transposed", "float32", False),
    Form("norm", (8, 24), ("layer", "int8"), "batch", "float32", False),
    Form("cross-entropy", (8, 50), ("smooth",), "vmap", "float32", True),
    Form("rotary", (8, 2, 16), ("dim=8", "neighbours"), "batch", "float32", True),
    Form("rotary", (8, 3, 16), ("heads first",), "rows", "float32", False),
    Form("quantize", (8, 64), ("fp8", "group=32"), "vmap", "float32", False),
    Form("dequantize", (8, 64), ("int8", "group=32"), "rows", "float32", False),
    Form("swiglu", (8, 24), (), "transposed", "float32", True),
    Form("top-k", (8, 40), ("k=4",), "rows", "float32", False),
)


def test_a_seed_says_which_forms():
    def drawn(seed: int) -> list[Form]:
        dice = random.Random(seed)
        return [row_forms.form_of(dice) for _ in range(60)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert {form.kind for form in drawn(3)} == set(row_forms.KINDS)
    assert {form.place for form in drawn(3)} == set(row_forms.PLACES)


@pytest.mark.parametrize("form", SMALL, ids=lambda form: f"{form.kind}-{form.place}")
def test_both_functions_compute_the_same(form: Form):
    ours, xla, draw, count = row_forms.placed(form)
    operands = draw()
    if form.backward:
        cotangent = jax.eval_shape(xla, *operands)
        operands = [np.ones(cotangent.shape, cotangent.dtype), *operands]
        ours, xla = (rows.with_gradients(one, count) for one in (ours, xla))
    found, expected = (jax.tree.leaves(jax.jit(one)(*operands)) for one in (ours, xla))
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        exact = np.asarray(other, np.float64)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=1e-4, atol=1e-5)
