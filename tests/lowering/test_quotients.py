"""Indices of movements in loops: quotients of bounded numbers, and copies over all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import gpu as plgpu
from pallasite_std.memory.ordering import _is_long

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


def called(body: Callable[[Any], Any], x: np.ndarray, semantics: Any) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    return plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, jax.ShapeDtypeStruct(x.shape, x.dtype)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )


def bytes_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_divisors_with_factors_of_33_bits() -> None:
    """Those for which no factor of 32 bits is exact for all numbers, as the largest ones tell."""

    def exact(divisor: int, factor: int, shift: int) -> bool:
        # A quotient that is too large is so before the next multiple, at the end of all numbers.
        last = (1 << 32) // divisor * divisor - 1
        return all(
            number * factor >> shift == number // divisor for number in (last, last - divisor)
        )

    for divisor in range(3, 200, 2):
        found = [
            shift
            for shift in range(32, 40)
            if (factor := -(-(1 << shift) // divisor)) < 1 << 32 and exact(divisor, factor, shift)
        ]
        assert _is_long(divisor) == (not found)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("width", [7, 19, 21, 27, 31, 63, 127])
@pytest.mark.parametrize("rows", [176, 33])
@pytest.mark.parametrize("passes", ["", "move-directly"])
@pytest.mark.sampled
def test_rows_side_by_side(rows: int, width: int, semantics: Any, passes: str) -> None:
    x = bytes_of(rows, width)
    with pallasite.config.scoped(sanitize=True, disabled_passes=passes):
        found = called(lambda x: jnp.concatenate([x, x], -1), x, semantics)(x)
    np.testing.assert_array_equal(found, np.concatenate([x, x], -1))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_movement_of_what_a_loop_carries(semantics: Any) -> None:
    x = bytes_of(176, 7)

    def body(x: Any) -> Any:
        def step(n: Any, carry: Any) -> Any:
            wide = jnp.concatenate([carry, carry + n.astype(jnp.uint8)], -1)
            return wide[:, 3:10] + jnp.roll(carry, 2, axis=-1)

        return lax.fori_loop(0, 3, step, x)

    with pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics)(x)
    want = x
    for n in range(3):
        wide = np.concatenate([want, want + np.uint8(n)], -1)
        want = wide[:, 3:10] + np.roll(want, 2, axis=-1)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((32, 30, 2), np.uint16),
        ((47, 5), np.uint8),
        ((63, 31), np.int32),
        ((2, 129), np.uint8),
        ((60, 7), np.float64),
    ],
)
def test_copies_of_a_row(shape: tuple[int, ...], dtype: Any, semantics: Any) -> None:
    """Threads share the copies, as far as that is less code."""
    x = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    with jax.enable_x64(True), pallasite.config.scoped(sanitize=True):
        found = called(lambda x: jnp.broadcast_to(x[:1], x.shape), x, semantics)(x)
        np.testing.assert_array_equal(found, np.broadcast_to(x[:1], shape))


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("shape", [(19, 49, 2), (8, 31, 2), (5, 63, 4), (3, 129, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_neighbours_are_exchanged(shape: tuple[int, ...], dtype: Any, semantics: Any) -> None:
    x = np.random.default_rng(2).integers(0, 200, shape).astype(dtype)
    with pallasite.config.scoped(sanitize=True):
        found = called(lambda x: jnp.swapaxes(x, -1, -2), x, semantics)(x)
    np.testing.assert_array_equal(found, np.swapaxes(x, -1, -2))
