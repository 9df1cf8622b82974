"""Arrays whose rows are odd numbers of bytes or words: results against NumPy, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu

LANE, WARPGROUP = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup


def result_of(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: str, semantics: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A random array, and what a kernel makes of it, checked by the sanitizer."""
    x = np.random.default_rng(sum(shape)).integers(-100, 100, shape)
    x = x.astype(np.int8).astype(jnp.dtype(dtype))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    called = plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, jax.ShapeDtypeStruct(shape, dtype)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with pallasite.config.scoped(sanitize=True):
        return x, np.asarray(called(jnp.asarray(x)))


@pytest.mark.parametrize("size", [515, 1031, 1033, 2051, 2057, 2687])
def test_ends_of_bytes(size: int) -> None:
    """What follows the last whole vector is moved as bytes, halves and words."""
    x, got = result_of(lambda x: x, (size,), "uint8", LANE if size % 4 == 1 else WARPGROUP)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("size", [603, 1325, 1327])
def test_ends_of_halves(size: int) -> None:
    x, got = result_of(lambda x: x * 2, (1, size), "bfloat16", LANE)
    np.testing.assert_array_equal(got, x * 2)


COLUMNS = [
    ((113, 99), "bfloat16", LANE, 0),
    ((249, 47), "int16", WARPGROUP, 0),
    ((96, 129), "float16", LANE, 0),
    ((170, 66), "uint8", WARPGROUP, 0),
    ((40, 9, 57), "float16", LANE, 0),
    ((9, 40, 57), "int16", WARPGROUP, (0, 1)),
    ((67, 161), "int8", LANE, 0),
]


@pytest.mark.parametrize(("shape", "dtype", "semantics", "axis"), COLUMNS, ids=str)
def test_largest_of_columns(shape: Any, dtype: str, semantics: Any, axis: Any) -> None:
    """Several rows are one, of whole vectors; the rest of the rows is reduced apart."""
    x, got = result_of(lambda x: jnp.max(x, axis), shape, dtype, semantics)
    np.testing.assert_array_equal(got, x.max(axis))


@pytest.mark.parametrize("dtype", ["int16", "uint8"])
def test_sums_of_columns(dtype: str) -> None:
    x, got = result_of(lambda x: jnp.sum(x, 0, dtype=x.dtype), (131, 93), dtype, LANE)
    np.testing.assert_array_equal(got, x.sum(0, dtype=x.dtype))


def test_floats_are_rounded_once() -> None:
    """Sums of narrow floats are not rounded for each of several rows."""
    x, got = result_of(lambda x: jnp.sum(x, 0, dtype=x.dtype), (131, 93), "bfloat16", LANE)
    exact = x.astype(np.float64).sum(0)
    np.testing.assert_array_equal(got, exact.astype(x.dtype))


@pytest.mark.parametrize("semantics", [LANE, WARPGROUP])
@pytest.mark.parametrize("shape", [(5, 40, 14), (13, 12, 37)], ids=str)
def test_dimensions_that_stay_together(shape: Any, semantics: Any) -> None:
    for axis in (0, 2):
        x, got = result_of(lambda x, axis=axis: jnp.argmax(x, axis), shape, "int16", semantics)
        np.testing.assert_array_equal(got, x.argmax(axis))


@pytest.mark.parametrize("semantics", [LANE, WARPGROUP])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((63, 21), "bfloat16"), ((195, 12), "uint8"), ((7, 5, 31), "int8")],
    ids=str,
)
def test_moved_rows(shape: Any, dtype: str, semantics: Any) -> None:
    x, got = result_of(lambda x: x[::-1], shape, dtype, semantics)
    np.testing.assert_array_equal(got, x[::-1])
    x, got = result_of(lambda x: x.T, shape, dtype, semantics)
    np.testing.assert_array_equal(got, x.T)


def test_moved_in_parts() -> None:
    """Beside the array there is no room for all of it in its new order."""
    x, got = result_of(lambda x: x[::-1], (255, 255), "bfloat16", LANE)
    np.testing.assert_array_equal(got, x[::-1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(22, 20, 2), (41, 3), (9, 5, 7)], ids=str)
def test_short_scans(shape: Any, reverse: bool) -> None:
    """Lines that lanes hold whole are scanned in registers."""
    axis = len(shape) - 1
    for body in (jax.lax.cumsum, jax.lax.cummax):
        x, got = result_of(lambda x, b=body: b(x, axis, reverse), shape, "int32", WARPGROUP)
        expected = np.asarray(body(jnp.asarray(x), axis, reverse))
        np.testing.assert_array_equal(got, expected)


def test_bytes_keep_their_signs() -> None:
    for dtype in ("int8", "uint8"):
        x, got = result_of(lambda x: jnp.min(x, 1), (32, 64), dtype, LANE)
        np.testing.assert_array_equal(got, x.min(1))


@pytest.mark.parametrize("semantics", [LANE, WARPGROUP])
def test_single_elements_along_an_axis(semantics: Any) -> None:
    def body(x: Any) -> Any:
        x = jnp.sort(jax.lax.cumsum(x, 2)[..., ::-1], axis=2)
        return x - jnp.max(x, axis=2, keepdims=True) + jnp.sum(x, axis=0, keepdims=True)

    x, got = result_of(body, (1, 45, 1), "int32", semantics)
    np.testing.assert_array_equal(got, x)


MOVES = {
    "joined": lambda x: jnp.concatenate([x, x[:3], x], 0),
    "beside": lambda x: jnp.concatenate([x, x[:, 1:4], x[:, :1]], 1),
    "tiled": lambda x: jnp.tile(x, (2, 3)),
    "flat": lambda x: x.reshape(-1),
    "rolled": lambda x: jnp.roll(x, 2, axis=1),
    "repeated": lambda x: jnp.broadcast_to(x[None], (3, *x.shape)),
    "first": lambda x: jnp.broadcast_to(x[:1], x.shape),
    "second": lambda x: x[1:, ::2],
    "triangle": jnp.tril,
}


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "int32"])
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.sampled(alone=("dtype",))
def test_moved_elements(name: str, dtype: str) -> None:
    """Rows of vectors are brought into order by a loop."""
    semantics = (LANE, WARPGROUP)[(len(name) + len(dtype)) % 2]
    x, got = result_of(MOVES[name], (31, 23), dtype, semantics)
    np.testing.assert_array_equal(got, np.asarray(MOVES[name](jnp.asarray(x))))


@pytest.mark.parametrize("semantics", [LANE, WARPGROUP])
def test_scans_of_lines_side_by_side(semantics: Any) -> None:
    x, got = result_of(lambda x: jax.lax.cumsum(x, 0), (11, 9, 17), "int32", semantics)
    np.testing.assert_array_equal(got, x.cumsum(0))


@pytest.mark.parametrize("semantics", [LANE, WARPGROUP])
def test_pairs_of_bytes(semantics: Any) -> None:
    for dtype in ("int8", "uint8"):
        x, got = result_of(lambda x: jnp.max(x, 1), (47, 30), dtype, semantics)
        np.testing.assert_array_equal(got, x.max(1))
