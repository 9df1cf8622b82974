"""Minima and maxima of negated 16-bit integers: older assemblers lose a ``neg.s16`` among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

NEGATIONS: dict[str, Callable[[Any], Any]] = {
    "negation": lambda values: -values,
    "difference": lambda values: 0 - values,
    "product": lambda values: values * -1,
    "complement": lambda values: ~values + 1,
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("negation", NEGATIONS)
@pytest.mark.parametrize("reduction", ["max", "min", "argmin"])
def test_no_negation_is_left_to_the_assembler(reduction: str, negation: str, target: str) -> None:
    values = np.random.default_rng(3).integers(-(2**15) + 1, 2**15, (24, 61)).astype(np.int16)

    def compute(module: Any, array: Any) -> Any:
        return getattr(module, reduction)(NEGATIONS[negation](array), axis=0)

    expected = compute(np, values)

    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = compute(jnp, in_ref[...]).astype(out_ref.dtype)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((61,), jnp.int32))
    made = pallasite.compile(kernel, values, target=target)
    assert "neg.s16" not in made.ptx
    assert made.ptx.count("mul.lo.s16") >= values.size // 128  # For each of a thread's elements.
    np.testing.assert_array_equal(simulate(made, values).outputs[0], expected)


def test_kernels_without_minima_are_unchanged() -> None:
    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = -in_ref[...]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((61,), jnp.int16))
    made = pallasite.compile(kernel, jax.ShapeDtypeStruct((61,), jnp.int16), target="sm_90a")
    assert "neg.s16" in made.ptx
