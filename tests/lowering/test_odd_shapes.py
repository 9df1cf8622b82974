"""Arrays whose extents are no powers of two: results, and how much code they take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts.construct import padded

Semantics = plgpu.LoweringSemantics

BODIES: dict[str, Callable[[Any], Any]] = {
    "twice": lambda x: x * 2,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "largest": lambda x: jnp.max(x - 9, axis=0),
    "centred": lambda x: x - jnp.mean(x, axis=0, keepdims=True),
    "product": lambda x: x * jnp.prod(1 + x / 256),
    "place": lambda x: jnp.argmin(x + 5, axis=-1),
}

SPREAD: dict[str, Callable[[Any], Any]] = {
    "largest of rows": lambda x: jnp.max(x, axis=-1),
    "place": lambda x: jnp.argmin(x, axis=-1),
    "outer": lambda x: x + jnp.max(x, 0, keepdims=True) * jnp.min(x, 1, keepdims=True),
    "outer alone": lambda x: jnp.max(x, 0, keepdims=True) * jnp.min(x, 1, keepdims=True),
}


def kernel_of(body: Callable[[Any], Any], x: Any, semantics: Any) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    return plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, x),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )


def lines(
    body: Callable[[Any], Any], shape: tuple[int, ...], semantics: Any, dtype: Any = jnp.float32
) -> int:
    x = jax.ShapeDtypeStruct(shape, dtype)
    return len(pallasite.compile(kernel_of(body, x, semantics), x).ptx.splitlines())


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@pytest.mark.parametrize("seed", range(8))
def test_odd_shapes(seed: int) -> None:
    choose = random.Random(seed)
    rank = 1 + seed % 3
    most = {1: 256, 2: 72, 3: 18}[rank]
    shape = tuple(choose.randint(1, most) for _ in range(rank))
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(jnp.float32))
    name, body = choose.choice(sorted(BODIES.items()))
    semantics = choose.choice([Semantics.Lane, Semantics.Warpgroup])
    got = np.asarray(kernel_of(body, x, semantics)(x))
    np.testing.assert_allclose(got, body(x), rtol=2e-5, atol=2e-6, err_msg=f"{name} of {shape}")


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((9, 62), (1,)), ((2, 11, 62), (2,)), ((33, 7), (0,)), ((16, 8), (1,)), ((130,), (0,))],
)
@pytest.mark.parametrize("every", [False, True])
def test_lanes_vote(shape: Any, axes: Any, every: bool, semantics: Any) -> None:
    x = np.random.default_rng(3).integers(0, 40, shape).astype(np.int32)
    x[0] = every

    def body(x: Any) -> Any:
        return jnp.all(x != 0, axis=axes) if every else jnp.any(x == 39, axis=axes)

    want = np.all(x != 0, axis=axes) if every else np.any(x == 39, axis=axes)
    kernel = kernel_of(body, jnp.asarray(x), semantics)
    np.testing.assert_array_equal(kernel(jnp.asarray(x)), want)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize("shape", [(4, 60, 12), (62, 13, 63)])
def test_the_first_row_is_repeated(shape: Any, semantics: Any) -> None:
    x = np.random.default_rng(4).integers(-99, 99, shape).astype(np.int16)
    kernel = kernel_of(lambda x: x + x[:1], jnp.asarray(x), semantics)
    np.testing.assert_array_equal(kernel(jnp.asarray(x)), x + x[:1])


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@settings(max_examples=8, deadline=None)
@example(21, 1, False, 0)
@given(st.integers(1, 300), st.integers(1, 3), st.booleans(), st.integers(0, 2**32 - 1))
def test_associative_scans(
    semantics: Any, length: int, rows: int, reverse: bool, seed: int
) -> None:
    """Their parts are every other element of odd shapes, and some of these are powers of two."""

    def body(x: Any) -> Any:
        return jax.lax.associative_scan(jnp.add, x, reverse=reverse, axis=x.ndim - 1)

    shape = (length,) if rows == 1 else (rows, length)
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    exact = x[..., ::-1].astype(np.float64) if reverse else x.astype(np.float64)
    expected = np.cumsum(exact, axis=-1)
    got = np.asarray(kernel_of(body, jnp.asarray(x), semantics)(x))
    np.testing.assert_allclose(
        got, expected[..., ::-1] if reverse else expected, rtol=1e-5, atol=3e-4
    )


@pytest.mark.parametrize(
    ("shape", "semantics"),
    [
        ((127, 129), Semantics.Lane),
        ((97, 61), Semantics.Warpgroup),
        ((16383,), Semantics.Lane),
        ((9, 127, 5), Semantics.Warpgroup),
    ],
)
@pytest.mark.parametrize("name", ["twice", "softmax"])
def test_code_is_that_of_the_next_powers_of_two(
    shape: tuple[int, ...], semantics: Any, name: str
) -> None:
    even = tuple(map(power_of_two, shape))
    assert lines(BODIES[name], shape, semantics) < 2 * lines(BODIES[name], even, semantics) + 100


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [
        ((53, 31), jnp.int8, "largest of rows"),
        ((96, 11), jnp.bfloat16, "largest of rows"),
        ((5, 100), jnp.int8, "place"),
        ((5, 100), jnp.float32, "place"),
        ((31, 129), jnp.int8, "outer"),
        ((89, 98), jnp.bfloat16, "outer"),
        ((100, 61), jnp.float32, "outer alone"),
    ],
)
def test_what_lanes_exchange_is_little(
    shape: tuple[int, ...], dtype: Any, name: str, semantics: Any
) -> None:
    """Rows of odd numbers of bytes are accessed one element at a time; the rest is as for even."""
    even, accesses = tuple(map(power_of_two, shape)), 2 * np.prod(shape) / 128
    body = SPREAD[name]
    limit = 2 * lines(body, even, semantics, dtype) + 4 * accesses + 100
    assert lines(body, shape, semantics, dtype) < limit


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(5, 100), (53, 31), (7, 25), (217, 64)])
@pytest.mark.parametrize("name", sorted(SPREAD))
@pytest.mark.sampled
def test_narrow_elements_are_exchanged_right(shape: tuple[int, ...], dtype: Any, name: str) -> None:
    values = np.random.default_rng(len(name)).normal(size=shape) * 40 + 60 * (dtype == jnp.uint8)
    x = jnp.asarray(np.clip(values, 0 if dtype == jnp.uint8 else -128, 127).astype(dtype))
    body = SPREAD[name]
    for reduce in (body, lambda x: jnp.sum(body(x), dtype=body(x).dtype, axis=0)):
        got = np.asarray(kernel_of(reduce, x, Semantics.Lane)(x)).astype(np.float64)
        np.testing.assert_allclose(got, np.asarray(reduce(x)).astype(np.float64), rtol=0.02)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 256), min_size=1, max_size=3))
def test_no_more_registers_than_for_powers_of_two(extents: list[int]) -> None:
    shape = tuple(extents)
    most = max(1, np.prod([power_of_two(n) for n in shape]) // 128)
    assert padded(shape).registers <= 2 * most


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((13, 229), jnp.uint8),
        ((9, 27, 55), jnp.bfloat16),
        ((41, 25), jnp.float32),
        ((2048 + 5,), jnp.int16),
    ],
)
def test_rows_of_vectors_with_a_tail(shape: tuple[int, ...], dtype: Any, semantics: Any) -> None:
    """Element by element, then in ways that need other layouts."""
    x = jnp.asarray(np.random.default_rng(3).integers(0, 60, shape).astype(dtype))
    bodies: list[Callable[[Any], Any]] = [
        lambda x: (x + 1).astype(jnp.float32),
        lambda x: x + jnp.max(x, 0, keepdims=True),
        lambda x: jnp.flip(x, -1) + x,
        lambda x: (x + 1).reshape(-1)[::3],
        lambda x: jnp.concatenate([x, x + 1], axis=0).T,
    ]
    for number, body in enumerate(bodies):
        got = np.asarray(kernel_of(body, x, semantics)(x)).astype(np.float64)
        want = np.asarray(body(x)).astype(np.float64)
        np.testing.assert_array_equal(got, want, err_msg=str(number))


def test_strided_part_of_swizzled_memory_is_read_where_there_are_elements() -> None:
    """Branches of different threads share addresses."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        def body(ref: Any) -> None:
            ref[...] = x_ref[...].astype(jnp.float32)
            out_ref[...] = ref[0:64:3, 0:24:2]

        pl.run_scoped(body, plgpu.SMEM((64, 32), jnp.float32))

    x = jnp.asarray(np.random.default_rng(4).integers(0, 200, (64, 32)).astype(np.uint8))
    out = jax.ShapeDtypeStruct((22, 12), jnp.float32)
    params = plgpu.CompilerParams(lowering_semantics=Semantics.Warpgroup)
    got = plgpu.kernel(kernel, out_type=out, compiler_params=params)(x)
    np.testing.assert_array_equal(got, np.asarray(x)[::3, :24:2])


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_two_narrow_arrays_meet_in_a_row_of_vectors(semantics: Any) -> None:
    x = jnp.asarray(np.random.default_rng(8).standard_normal((31, 31)), jnp.bfloat16)

    def body(x: Any) -> Any:
        column = x[:, :1]
        return jnp.any(x[:1].T + column > x[:1] + column.T, keepdims=True) & jnp.any(
            column > column.T, axis=(0, 1), keepdims=True
        )

    found = jax.jit(kernel_of(body, x, semantics))(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(x)))


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_single_element_through_shared_memory_meets_one_that_all_have(semantics: Any) -> None:
    x = jnp.asarray([[-3.5]], jnp.float16)

    def kernel(x_ref: Any, out_ref: Any, between_ref: Any) -> None:
        mean = jnp.mean(x_ref[...], axis=0)
        between_ref[...] = mean
        out_ref[...] = jnp.maximum(mean, between_ref[...])

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1,), x.dtype),
        scratch_types=[plgpu.SMEM((1,), x.dtype)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    assert jax.jit(call)(x)[0] == -3.5


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
@given(
    shape=st.tuples(*[st.sampled_from([1, 2, 3, 8, 11, 16])] * 3),
    narrow=st.tuples(*[st.tuples(st.booleans(), st.booleans())] * 3),
)
@example((8, 11, 16), ((False, True), (False, False), (True, False)))
@settings(max_examples=3, deadline=None)
def test_arrays_that_run_across_dimensions_stretch_to_one_another(
    semantics: Any, shape: tuple[int, ...], narrow: tuple[tuple[bool, bool], ...]
) -> None:
    """Both operands come from shared memory, in rows of vectors that know no dimensions."""
    shapes = [
        tuple(1 if short[place] else n for n, short in zip(shape, narrow, strict=True))
        for place in (0, 1)
    ]
    values = np.random.default_rng(len(shape)).integers(-99, 99, (2, 8, 11, 16)).astype(np.int32)

    def body(x: Any) -> Any:
        a, b = (x[p][tuple(slice(n) for n in s)] for p, s in enumerate(shapes))
        return jnp.flip(a, 0) * jnp.flip(b, 1)

    want = body(values)
    found = jax.jit(kernel_of(body, jnp.asarray(values), semantics))(jnp.asarray(values))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_four_elements_that_all_lanes_hold_meet_others(semantics: Any) -> None:
    """Row numbers of copies that gather have the layout of the first ones."""
    x = jnp.asarray([[[-1, 2, 3, -4], [5, 6, 7, 8]]], jnp.int8)

    def body(x: Any) -> Any:
        pair = jnp.max(x, axis=2).astype(jnp.bfloat16)
        four = jnp.concatenate([pair, pair], axis=0).reshape(1, 1, 4)
        return jnp.where(x[:, :1] > 0, four, 0)

    found = jax.jit(kernel_of(body, x, semantics))(x)
    np.testing.assert_array_equal(found.astype(np.float32), [[[0, 8, 3, 0]]])


@pytest.mark.parametrize("shape", [(3, 7, 2), (7, 2, 4), (11, 5, 3)])
def test_turned_views_of_shared_memory(shape: tuple[int, ...]) -> None:
    """Elements in one row of what lies there are no layout of the view."""
    x = np.random.default_rng().normal(size=shape).astype(np.float32)
    turned = x.transpose(1, 2, 0)

    def body(x_ref: Any, out_ref: Any) -> None:
        def within(ref: Any) -> None:
            ref[...] = x_ref[...]
            out_ref[...] = plgpu.transpose_ref(ref, (1, 2, 0))[...]

        pl.run_scoped(within, plgpu.SMEM(shape, jnp.float32))

    called = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(turned.shape, jnp.float32))
    np.testing.assert_array_equal(called(x), turned)


@pytest.mark.parametrize("semantics", list(Semantics))
@pytest.mark.parametrize(
    ("body", "shape", "dtype", "most"),
    [
        # The beginning of a row is registers of it, and the rest is brought into order by a loop.
        (lambda x: x[1:] - x[:-1], (20, 149), np.float32, 115),
        (lambda x: x[1:] - x[:-1], (211, 75), jnp.bfloat16, 190),
        (lambda x: x[:-3] * x[3:], (1501,), np.int16, 100),
        (lambda x: x[:, :2] + x[:, 1:], (1, 3, 701), jnp.bfloat16, 95),
        # Threads have whole rows.
        (lambda x: x - x[:, :1], (102, 7), np.float32, 80),
        (lambda x: x * x[:, 3:4], (125, 8), np.int32, 55),
        (lambda x: x + x[..., :1], (40, 5, 6), np.int32, 140),
        (lambda x: x * x[..., :1], (25, 21, 2), np.uint8, 115),
        (lambda x: x - x[:, :1], (250, 5), jnp.bfloat16, 70),
        (lambda x: lax.cumsum(x, 0), (2, 61, 16), np.int32, 60),
        (lambda x: jnp.swapaxes(x, 1, 2) * 2, (52, 37, 1), np.int32, 60),
        (lambda x: jnp.prod(x - 4, -1), (4, 27, 41), np.int32, 350),
        (lambda x: jnp.min(x, 0), (5, 1), jnp.float16, 40),
        # All of an array is no movement, and warps have rows of their own.
        (lambda x: jnp.roll(x, 1, -1), (63, 22, 1), np.uint8, 30),
        (lambda x: jnp.max(x, -1), (3, 256), jnp.bfloat16, 50),
        (lambda x: x + jnp.max(x, 0, keepdims=True), (53, 19, 8), jnp.bfloat16, 260),
    ],
)
def test_parts_of_arrays_are_registers_of_them(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, most: int, semantics: Any
) -> None:
    x = np.random.default_rng(7).integers(0, 9, shape).astype(dtype)
    with pallasite.config.scoped(sanitize=True):
        found = kernel_of(body, x, semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(body(x)))
    ptx = pallasite.compile(kernel_of(body, x, semantics), x, target="sm_90a").ptx
    assert ptx.count(";\n") <= most
