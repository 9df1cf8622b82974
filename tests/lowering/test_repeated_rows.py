"""Arrays of odd shapes that are combined with what is repeated, and masks of their indices."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir

import pallasite
from pallasite import gpu as plgpu
from pallasite_std.memory.bounds import Indices, bounds_of, holds
from pallasite_std.memory.rows import repeated, whole_rows

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


def called(body: Callable[[Any], Any], x: Any, semantics: Any) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    return plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, jax.ShapeDtypeStruct(x.shape, x.dtype)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 7, shape).astype(dtype)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("body", "shape", "dtype"),
    [
        (lambda x: x + x[:1], (251, 13), np.float16),
        (lambda x: x + x[:1], (201, 9), ml_dtypes.bfloat16),
        (lambda x: x + x[:1], (200, 9), np.float32),
        (lambda x: x + x[:1], (64, 61), np.int8),
        (lambda x: x + x[:1], (14, 5, 24), np.uint8),
        (lambda x: x * x[:, :1], (51, 1, 59), np.float16),
        (lambda x: x - x[:, :1], (2, 48), ml_dtypes.bfloat16),
        (lambda x: x * x[..., :1], (7, 30, 11), np.int16),
        (lambda x: x + x[:1] * x[:, :1], (65, 27), np.float32),
        (lambda x: x + jnp.max(x, 0, keepdims=True), (143, 15), np.int32),
    ],
)
def test_what_is_repeated(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, semantics: Any
) -> None:
    x = numbers(shape, dtype, 1)
    with pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("shape", [(207, 9), (9, 207), (3, 33, 17)])
@pytest.mark.sampled
def test_masks_of_indices(shape: tuple[int, ...], name: str, semantics: Any) -> None:
    x = numbers(shape, np.int32, 2) + 1

    def body(x: Any) -> Any:
        rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - n) for n in (2, 1))
        compare = getattr(lax, name)
        return jnp.where(compare(columns, rows), x, 0)

    with pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_indices_of_a_type_that_does_not_hold_them(semantics: Any) -> None:
    """Those of 200 rows wrap around in bytes."""
    x = numbers((200, 9), np.int8, 3) + np.int8(1)

    def body(x: Any) -> Any:
        rows, columns = (lax.broadcasted_iota(jnp.int8, x.shape, d) for d in (0, 1))
        return jnp.where(columns <= rows, x, jnp.zeros_like(x))

    found = called(body, x, semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))


def test_masks_that_are_known_are_no_code() -> None:
    """Below the first rows, no column is right of the diagonal."""

    def body(x: Any) -> Any:
        rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (0, 1))
        return jnp.where(columns <= rows, x, jnp.zeros_like(x))

    for semantics in SEMANTICS:
        x = jax.ShapeDtypeStruct((207, 9), np.float32)
        text = pallasite.compile(called(body, x, semantics), x, target="sm_90a").ptx
        assert text.count("selp.b32") <= 4


@pytest.mark.parametrize("seed", range(200))
def test_known_results_of_comparisons(seed: int) -> None:
    choose = random.Random(seed)
    starts = [[choose.randint(0, 9) for _ in range(2)] for _ in range(2)]
    reaches = [choose.randint(0, 6) for _ in range(2)]
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            kind = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
            one, other = (ir.Operation.create("test.value", [kind]).result for _ in range(2))
            indices = Indices()
            for value, firsts, reach in zip((one, other), starts, reaches, strict=True):
                indices.known[value] = bounds_of(firsts, reach)
            for name in ("lt", "le", "gt", "ge", "eq", "ne"):
                compare = getattr(operator, name)
                results = [
                    {
                        compare(a + i, b + j)
                        for i in range(reaches[0] + 1)
                        for j in range(reaches[1] + 1)
                    }
                    for a, b in zip(*starts, strict=True)
                ]
                known = all(len(result) == 1 for result in results)
                found = indices.compared(name, one, other)
                assert (found is not None) <= known
                if name != "eq" and name != "ne":
                    assert (found is not None) == known
        assert indices.compared("add", one, other) is None


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_indices_of_code_that_is_thrown_away(
    semantics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop is lowered on trial; loaded values may be where its indices were in memory."""
    x = numbers((40, 17), np.int32, 6) * 7 - 5
    compared = Indices.compared

    def checked(self: Indices, name: str, one: ir.Value, other: ir.Value) -> ir.Value | None:
        assert all(register.owner.operation.parent is not None for register in self.known)
        return compared(self, name, one, other)

    monkeypatch.setattr(Indices, "compared", checked)

    def repeated(load: Callable[[], Any]) -> Any:
        def body(step: Any, total: Any) -> Any:
            for number in range(4):
                index = lax.broadcasted_iota(jnp.int32, x.shape, number % 2)
                value = load() + step
                total = total + jnp.where(value < index, 1, 0) * (number + 1)
                total = total + jnp.where(index + 1 >= value, total, 3)
            return total

        return lax.fori_loop(0, 3, body, jnp.zeros(x.shape, jnp.int32))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = repeated(lambda: x_ref[...])

    found = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(repeated(lambda: jnp.asarray(x))))


def test_numbers_that_types_hold() -> None:
    assert holds(np.dtype(np.int8), ((0, 127),))
    assert not holds(np.dtype(np.int8), ((0, 1), (0, 128)))
    assert not holds(np.dtype(np.float32), ((0, 1),))


@pytest.mark.parametrize("seed", range(40))
def test_rows_hold_each_element_once(seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randint(2, 40) for _ in range(choose.randint(2, 3)))
    layout = whole_rows(shape, choose.choice([1, 4, 16]))
    if layout is None:
        assert not any(n & (n - 1) for n in shape)
        return
    assert not layout.flat
    places: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for warp in range(4):
        for lane in range(32):
            for register in range(layout.registers):
                for place in range(layout.vector_length):
                    index = layout.element_at(warp, lane, register, place)
                    places.setdefault(index, set()).add((warp, lane))
    inside = {one for one in places if all(n < m for n, m in zip(one, shape, strict=True))}
    assert len(inside) == math.prod(shape)


def test_layouts_beside_what_is_repeated() -> None:
    row, _ = repeated((251, 13), 16, 8)
    assert row is not None and row.vector_length == 8
    assert repeated((251, 13), 8, 16)[0] is None  # Bytes are combined one by one.
    row, rows = repeated((200, 9), 32, 4)
    assert row is None and rows is not None and rows.registers == 17


def test_an_array_whose_wider_elements_do_not_fit_shared_memory() -> None:
    """In bfloat16 it does, but what is repeated is combined with it in float32."""

    def body(x: Any) -> Any:
        return (x.astype(jnp.float32) + x[:1].astype(jnp.float32)).astype(x.dtype)

    x = numbers((251, 241), ml_dtypes.bfloat16, 4)
    for semantics in SEMANTICS:
        found = called(body, x, semantics)(x)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("dtype", [np.int16, ml_dtypes.bfloat16, np.int8, np.float16])
@pytest.mark.parametrize("shape", [(27, 129), (13, 255), (251, 141), (3, 255, 5)])
@pytest.mark.sampled(alone=("semantics",))
def test_padding_of_which_registers_have_a_part(
    shape: tuple[int, ...], dtype: Any, semantics: Any
) -> None:
    """Two rows share registers, of which the last one has no partner."""
    x = (numbers(shape, np.int32, 5) - 3).astype(dtype)

    def body(x: Any) -> Any:
        last = x.ndim - 1
        low, high = jnp.min(x, last, keepdims=True), jnp.max(x, last - 1, keepdims=True)
        return x + low * high

    with pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))
