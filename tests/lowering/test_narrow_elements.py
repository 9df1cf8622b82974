"""Arrays of elements of less than a byte: what moves them one by one, reduces or stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import InvalidValueError
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
@pytest.mark.sampled(alone=("name", "semantics"))
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


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("shape", [(14, 3), (8, 8), (6, 7)])
def test_repeated_rows(shape: tuple[int, ...], semantics: Semantics) -> None:
    """Where lanes hold no whole bytes, elements are moved as bytes."""
    x = np.random.default_rng().integers(-8, 8, shape).astype(jnp.int4)

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.repeat(x_ref[...], 3, 0)

    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((3 * shape[0], shape[1]), jnp.int4),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    np.testing.assert_array_equal(np.asarray(called(x)), np.repeat(x, 3, 0))


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_floats_of_four_bits(semantics: Semantics) -> None:
    """A product with weights of 4 bits, of which 32 share a scale; their order, and rounding."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (64, 24)).astype(np.uint8)
    weights = codes.view(jnp.float4_e2m1fn)
    scales = (2.0 ** generator.integers(-2, 3, (2, 24))).astype(jnp.float8_e8m0fnu)
    x = generator.normal(size=(16, 64)).astype(jnp.bfloat16)

    def kernel(x_ref: Any, w_ref: Any, s_ref: Any, out: Any, order: Any, narrow: Any) -> None:
        wide = w_ref[...].astype(jnp.bfloat16).reshape(2, 32, 24)
        wide = (wide * s_ref[...].astype(jnp.bfloat16)[:, None]).reshape(64, 24)
        out[...] = jnp.matmul(x_ref[...], wide, preferred_element_type=jnp.float32)
        order[...] = jnp.sort(w_ref[...], axis=0)
        narrow[...] = -x_ref[...].astype(narrow.dtype)

    outputs = [((16, 24), jnp.float32), (codes.shape, weights.dtype), (x.shape, weights.dtype)]
    called = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*one) for one in outputs),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    product, order, narrow = called(x, weights, scales)
    exact = weights.astype(np.float64)
    wide = exact * np.repeat(scales.astype(np.float64), 32, 0)
    np.testing.assert_allclose(product, x.astype(np.float64) @ wide, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(order, np.float64), np.sort(exact, 0))
    want = -x.astype(np.float32).astype(weights.dtype).astype(np.float64)
    np.testing.assert_array_equal(np.asarray(narrow).astype(np.float64), want)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("shape", [(17, 13), (5, 7), (31,)])
def test_half_bytes_at_the_end_of_an_array(shape: tuple[int, ...], semantics: Semantics) -> None:
    """The message says what to do."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...].astype(jnp.float32)

    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with pytest.raises(InvalidValueError, match="convert to int8"):
        pallasite.compile(called, jax.ShapeDtypeStruct(shape, jnp.int4))
