"""Arrays of elements of less than a byte: what moves them one by one, reduces or stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasite import gpu as plgpu

Semantics = plgpu.LoweringSemantics


def places(x: Any) -> Any:
    return jnp.abs(x[:, 0].astype(jnp.int32)) % 3


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.T,
    "flip": lambda x: jnp.flip(x, 1),
    "part": lambda x: x[1:, 2:6:3],
    "pad and tile": lambda x: jnp.tile(jnp.pad(x, ((1, 1), (2, 0))), (1, 2)),
    "concatenate": lambda x: jnp.concatenate([x, x[:, :3]], 1),
    "stretch": lambda x: x[:, :1] + x[:1],
    "largest": lambda x: x.max(1),
    "sum": lambda x: jnp.sum(x, 0, dtype=x.dtype),
    "place of the least": lambda x: jnp.argmin(x, 0),
    "any": lambda x: (x > 2).any(1),
    "running maximum": lambda x: lax.cummax(x, 1),
    "sort": lambda x: jnp.sort(x, 1),
    "take": lambda x: jnp.take(x, places(x), axis=1, mode="clip"),
    "scatter": lambda x: x.at[places(x)[:2]].set(x[4:]),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2], (places(x)[0], 0)),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, carry: carry + jnp.roll(x, 1, 0), x),
}


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, semantics: Semantics) -> None:
    function = FUNCTIONS[name]
    dtype = "int4" if len(name) % 2 else "uint4"
    least = -8 if dtype == "int4" else 0
    numbers = np.random.default_rng(0).integers(least, least + 16, (6, 7))
    x = jnp.asarray(numbers, dtype)
    want = function(x)
    # An odd number of them would end within a byte.
    out = want.astype(jnp.int32) if want.size % 2 else want

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = function(x_ref[...]).astype(out.dtype)

    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out.shape, out.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    found = np.asarray(called(x)).astype(np.int64)
    np.testing.assert_array_equal(found, np.asarray(out).astype(np.int64))
