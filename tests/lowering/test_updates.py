"""Accesses that read what they write, accesses under masks of other shapes, and both of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, MissingRuleError

RNG = np.random.default_rng()
SHAPE = (8, 16, 17)
X = RNG.integers(-1000, 1000, SHAPE).astype(np.int32)
PART = (slice(2, 6), slice(3, 12), slice(5, 14))
FIRST = (slice(0, 4), slice(0, 9), slice(0, 9))
SMALL = (slice(3, 4), slice(5, 7), slice(5, 9))
SMALL_FIRST = (slice(0, 1), slice(0, 2), slice(0, 4))
MASK = np.arange(4 * 9 * 9).reshape(4, 9, 9) % 3 != 0

BOTH = pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))


def _mask() -> Any:
    return lax.iota(jnp.int32, MASK.size).reshape(MASK.shape) % 3 != 0


def _run(body: Callable[..., None], semantics: Any, *operands: Any) -> np.ndarray:
    """A kernel of X under the sanitizer, the result poisoned before."""
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, X.dtype),
        compiler_params=plgpu.CompilerParams(target="sm_90a", lowering_semantics=semantics),
    )
    with pallasite.config.scoped(sanitize=True):
        return np.asarray(kernel(X, *operands))


@BOTH
@pytest.mark.parametrize("part, first", [(PART, FIRST), (SMALL, SMALL_FIRST)])
def test_what_a_swap_returns_was_stored_before(semantics, part, first):
    """Also by other lanes, in memory that nothing else reads."""

    def body(x, out):
        out[...] = x[...]
        old = jax.ref.swap(out, part, x[first] * 3)
        out[first] = old + 1

    want = X.copy()
    want[part], want[first] = X[first] * 3, X[part] + 1
    np.testing.assert_array_equal(_run(body, semantics), want)


@BOTH
@pytest.mark.parametrize("part, first", [(PART, FIRST), (SMALL, SMALL_FIRST)])
def test_what_is_added_to_was_stored_before(semantics, part, first):
    def body(x, out):
        out[...] = x[...]
        pl.when(x[0, 0, 0] > -2000)(lambda: jax.ref.addupdate(out, part, x[first] * 2))

    want = X.copy()
    want[part] += X[first] * 2
    np.testing.assert_array_equal(_run(body, semantics), want)


@BOTH
def test_updates_of_shared_memory(semantics):
    def body(x, out):
        def within(ref):
            ref[...] = x[...]
            plgpu.atomic_add(ref.at[PART], x[FIRST] * 3)
            old = jax.ref.swap(ref, PART, x[FIRST])
            triton.store(ref.at[PART], old * 2, mask=_mask())
            jax.ref.addupdate(ref, FIRST, old)
            out[...] = ref[...]

        pl.run_scoped(within, plgpu.SMEM(SHAPE, jnp.int32))

    want = X.copy()
    old = X[PART] + X[FIRST] * 3
    want[PART] = np.where(MASK, old * 2, X[FIRST])
    want[FIRST] += old
    np.testing.assert_array_equal(_run(body, semantics), want)


@BOTH
def test_swap_of_what_a_loop_has_stored(semantics):
    """The value of the last iteration is exchanged, which other lanes have stored."""

    def body(x, out):
        out[...] = x[...]

        def step(i, total):
            old = jax.ref.swap(out, PART, total)
            out[FIRST] = old * 2
            return total + old

        lax.fori_loop(0, 3, step, x[FIRST])

    want, total = X.copy(), X[FIRST].copy()
    for _ in range(3):
        old = want[PART].copy()
        want[PART] = total
        want[FIRST] = old * 2
        total = total + old
    np.testing.assert_array_equal(_run(body, semantics), want)


@BOTH
def test_masked_and_atomic_parts_of_arrays_in_one_row(semantics):
    """Registers of arrays of odd shapes lie in one row, which parts of memory do not."""

    def body(x, out):
        v = x[...] * 2
        out[...] = v
        triton.store(out.at[PART], v[FIRST] + 1, mask=_mask())
        plgpu.atomic_add(out.at[PART], v[PART])
        loaded = triton.load(x.at[PART], mask=_mask(), other=v[FIRST])
        out[FIRST] = loaded * 2 + x[FIRST]

    want = 2 * X
    want[PART] = np.where(MASK, 2 * X[FIRST] + 1, 2 * X[PART])
    want[PART] += 2 * X[PART]
    want[FIRST] = np.where(MASK, X[PART], 2 * X[FIRST]) * 2 + X[FIRST]
    np.testing.assert_array_equal(_run(body, semantics), want)


@BOTH
@pytest.mark.parametrize(
    "other, value",
    [(7, 7), (True, 1), (np.int8(-3), -3), (lambda: lax.iota(jnp.int16, 17), np.arange(17))],
)
def test_masks_and_other_values_are_broadcast_and_converted(semantics, other, value):
    def body(x, out):
        columns = lax.broadcasted_iota(jnp.int32, (1, 16, 17), 2) % 2 == 0
        given = other() if callable(other) else other
        out[...] = triton.load(x, mask=columns, other=given)
        triton.store(out, x[...] + 1, mask=lax.iota(jnp.int32, 17) > 12)

    want = np.where(np.arange(17) % 2 == 0, X, value)
    want[..., 13:] = X[..., 13:] + 1
    np.testing.assert_array_equal(_run(body, semantics), want)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "bfloat16", "float8_e4m3fn", "bool"])
def test_numbers_become_what_is_loaded(dtype):
    x = X.astype(dtype)

    def body(x, out):
        out[...] = triton.load(x, mask=lax.iota(jnp.int32, 17) > 3, other=1)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(SHAPE, x.dtype))
    want = np.where(np.arange(17) > 3, x, np.ones((), x.dtype))
    np.testing.assert_array_equal(np.asarray(kernel(x)).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    "mask, other, error, text",
    [
        (lambda: lax.iota(jnp.int32, 17) > 2, 1.5, InvalidTypeError, r"got: float32"),
        (
            lambda: lax.iota(jnp.int32, 17) > 2,
            lambda: jnp.zeros(17, "float8_e5m2"),
            InvalidTypeError,
            "8",
        ),
        (lambda: lax.iota(jnp.int32, 17), 0, InvalidTypeError, r"mask != 0"),
        (
            lambda: lax.iota(jnp.int32, 17) > 2,
            lambda: jnp.zeros((16,), jnp.int32),
            None,
            r"shape \[16\]",
        ),
        (lambda: jnp.full((1, *SHAPE), True), 0, None, r"\[1, 8, 16, 17\]"),
    ],
)
def test_masks_and_values_that_do_not_fit(mask, other, error, text):
    def body(x, out):
        given = other() if callable(other) else other
        out[...] = triton.load(x, mask=mask(), other=given)

    with pytest.raises(error or InvalidValueError, match=text) as found:
        _run(body, plgpu.LoweringSemantics.Lane)
    assert "test_updates.py" in str(found.value)


def test_atomics_of_triton_have_another_name():
    def body(x, out):
        triton.atomic_add(out, (slice(None), slice(None), slice(None)), x[...])

    with pytest.raises(MissingRuleError, match=r"plgpu\.atomic_add"):
        _run(body, plgpu.LoweringSemantics.Lane)
