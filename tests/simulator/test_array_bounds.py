"""Indices from memory that lead from one array of a kernel into the next one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
import pallasite_simulator
from pallasite import gpu as plgpu

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]
ROWS = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def findings(body: Any, number: int, semantics: Any, **options: Any) -> list[str]:
    """What the sanitizer says of a kernel with two arrays of 32 rows."""
    kernel = plgpu.kernel(
        body,
        out_type=ROWS,
        scratch_types=[plgpu.SMEM((32, 64), jnp.float32)] * 2,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    operands = x, np.array([number], np.int32)
    compiled = pallasite.compile(kernel, *operands, target="sm_90a")
    found = pallasite_simulator.simulate(compiled, *operands, sanitize=True).findings
    return [str(one) for one in found]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("what", ["read", "write", "row"])
def test_from_one_array_into_the_next(what: str, semantics: Any) -> None:
    def body(x: Any, at: Any, out: Any, first: Any, second: Any) -> None:
        first[...] = x[...]
        second[...] = x[...] * 2
        rows = pl.ds(at[0] * 8, 8)
        if what == "write":
            first[rows] = x[:8]
            out[...] = second[:8] + first[:8]
        elif what == "row":
            out[...] = jnp.broadcast_to(first[at[0] * 8], (8, 64))
        else:
            out[...] = first[rows] + second[:8]

    assert not findings(body, 3, semantics)
    for number in (4, 7):
        found = findings(body, number, semantics)
        assert any("access of shared memory out of bounds" in one for one in found), found


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_constants_that_lie_before_an_array(semantics: Any) -> None:
    """Compilers add up what does not change, which alone may lie in another array."""

    def body(x: Any, at: Any, out: Any, first: Any, second: Any) -> None:
        def row(reference: Any, number: Any) -> Any:
            return reference[number - 16]

        first[...] = x[...]
        second[...] = x[...]

        def add(number: Any, total: Any) -> Any:
            return total + row(second, number + at[0]) + second[number - 12] + row(first, number)

        total = jax.lax.fori_loop(16, 24, add, jnp.zeros((64,), jnp.float32))
        out[...] = jnp.broadcast_to(total, (8, 64))

    assert not findings(body, 3, semantics)
