"""Minima and maxima of negated integers: older assemblers lose a negation among them."""

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
from pallasite_std.passes.negation import exact_negations

NEGATIONS: dict[str, Callable[[Any], Any]] = {
    "negation": lambda values: -values,
    "difference": lambda values: 0 - values,
    "product": lambda values: values * -1,
    "complement": lambda values: ~values + 1,
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("negation", NEGATIONS)
@pytest.mark.parametrize("reduction", ["max", "min", "argmin"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.sampled
def test_no_negation_is_left_to_the_assembler(
    bits: int, reduction: str, negation: str, target: str
) -> None:
    limit = 2 ** (bits - 1)
    values = np.random.default_rng(3).integers(-limit + 1, limit, (24, 61)).astype(f"int{bits}")

    def compute(module: Any, array: Any) -> Any:
        return getattr(module, reduction)(NEGATIONS[negation](array), axis=0)

    expected = compute(np, values)

    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = compute(jnp, in_ref[...]).astype(out_ref.dtype)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((61,), jnp.int32))
    made = pallasite.compile(kernel, values, target=target)
    assert f"neg.s{bits}" not in made.ptx
    spelling = "mul.lo.s16" if bits == 16 else "not.b32"
    assert made.ptx.count(spelling) >= values.size // 128  # For each of a thread's elements.
    np.testing.assert_array_equal(simulate(made, values).outputs[0], expected)


def test_kernels_without_minima_are_unchanged() -> None:
    def body(in_ref: Any, out_ref: Any) -> None:
        out_ref[...] = -in_ref[...]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((61,), jnp.int16))
    made = pallasite.compile(kernel, jax.ShapeDtypeStruct((61,), jnp.int16), target="sm_90a")
    assert "neg.s16" in made.ptx


@pytest.mark.parametrize("bits", [16, 32])
def test_guards_and_differences(bits: int) -> None:
    extremes = f"max.s{bits} %a, %b, %c;\nmin.s{bits} %d, %e, %a;\n"
    text = extremes + f"@!%p1 neg.s{bits} %x, %y;\nsub.s{bits} %u, 0, %v;\nsub.s{bits} %s, 1, %t;\n"
    changed = exact_negations(text, None)
    assert changed.startswith(extremes)
    assert changed.endswith(f"sub.s{bits} %s, 1, %t;\n")
    lines = [line.replace("\t", "") for line in changed.splitlines()[2:-1]]
    if bits == 16:
        assert lines == ["@!%p1 mul.lo.s16 %x, %y, -1;", "mul.lo.s16 %u, %v, -1;"]
    else:
        assert lines == [
            "@!%p1 not.b32 %x, %y;",
            "@!%p1 add.s32 %x, %x, 1;",
            "not.b32 %u, %v;",
            "add.s32 %u, %u, 1;",
        ]
    assert exact_negations(text.replace("min", "add"), None) == text.replace("min", "add")
