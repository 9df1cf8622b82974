"""Stores of loops to arrays in global memory that the kernel does not read: the last one wins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

Semantics = plgpu.LoweringSemantics
BOTH = pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
N = 1024
NUMBERS = np.array([3, 5, 7, 2], np.int32)


def _compiled(body: Callable[..., None], semantics: Any, shape: Sequence[int] = (N,)) -> Any:
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(target="sm_90a", lowering_semantics=semantics),
    )
    zeros = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pallasite.compile(kernel, jax.ShapeDtypeStruct(NUMBERS.shape, NUMBERS.dtype), zeros)


def _result(compiled: Any, shape: Sequence[int] = (N,)) -> np.ndarray:
    """What the simulator makes of zeros, without findings of its sanitizer."""
    simulation = simulate(compiled, NUMBERS, np.zeros(shape, np.float32), sanitize=True)
    assert not simulation.findings
    return np.asarray(simulation.outputs[0])


def _values(size: int, factor: Any) -> Any:
    return lax.iota(jnp.int32, size).astype(jnp.float32) + 1000 * factor


# Bodies take ``loop(start, stop, step)``, ``numbers(index)``, ``store(start, size, factor, when)``.


def _near(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 6, lambda i: store(i * 64, 128, i))


def _replicated(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 6, lambda i: store(i * 3, 7, i))


def _inner_window(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 3, lambda i: loop(0, 4, lambda j: store(i * 200 + j * 64, 64, 4 * i + j)))


def _loaded(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 4, lambda i: store(numbers(i) * 20, 128, i))


def _remainders(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 9, lambda i: store(lax.rem(i * 37, 11), 128, i))


def _clamped(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 9, lambda i: store(jnp.minimum(i * 128, N - 128 - 5), 128, i))


def _computed_bounds(loop: Any, numbers: Any, store: Any) -> None:
    loop(numbers(3), numbers(2), lambda i: store(i * 50, 128, i))


def _two_places(loop: Any, numbers: Any, store: Any) -> None:
    store(numbers(0) * 10, 128, 1)
    store(numbers(1) * 10, 128, 2)


def _after_each_other(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 4, lambda i: store(i * 128, 128, i))
    loop(0, 4, lambda i: store(i * 100, 128, i + 9))


def _next_window(loop: Any, numbers: Any, store: Any) -> None:
    """What the first store writes, if it does, the second one overwrites in the next iteration."""

    def step(i: Any) -> None:
        store(i * 128 + 128, 128, i, numbers(i) < 4)
        store(i * 128, 64, 9)

    loop(0, 3, step)


OVERLAPPING = [
    _next_window,
    _near,
    _replicated,
    _inner_window,
    _loaded,
    _remainders,
    _clamped,
    _computed_bounds,
    _two_places,
    _after_each_other,
]


def _aligned(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 3, lambda i: loop(0, 3, lambda j: store(i * 256 + 128 * j + 1, 128, i)))


def _apart(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 4, lambda i: loop(0, 3, lambda j: store(i * 240 + 77 * j + 5, 77, i)))


def _replicated_apart(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 6, lambda i: store(i * 8 + 3, 7, i))


def _aligned_places(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 4, lambda i: store(numbers(i) * 128, 128, i))


def _stated(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 4, lambda i: store(pl.multiple_of(numbers(i) * numbers(0), 128), 128, i))


def _tiles(loop: Any, numbers: Any, store: Any) -> None:
    loop(0, 6, lambda i: store(lax.rem(i, 3) * 256 + lax.div(i, 3) * 128, 128, i))


def _one_place(loop: Any, numbers: Any, store: Any) -> None:
    place = numbers(0)
    loop(0, 6, lambda i: store(place * 9 + 1, 128, i))


NOT_OVERLAPPING = [
    _aligned,
    _apart,
    _replicated_apart,
    _aligned_places,
    _stated,
    _tiles,
    _one_place,
]


def _as_kernel(body: Callable[..., None]) -> Callable[..., None]:
    def kernel(numbers_ref: Any, zeros_ref: Any, out_ref: Any) -> None:
        def store(start: Any, size: int, factor: Any, when: Any = True) -> None:
            @pl.when(when)
            def _() -> None:
                out_ref[pl.ds(start, size)] = _values(size, factor)

        def loop(start: Any, stop: Any, run: Callable[[Any], None]) -> None:
            pl.loop(start, stop)(run)

        body(loop, lambda number: numbers_ref[number], store)

    return kernel


def _expected(body: Callable[..., None]) -> np.ndarray:
    out = np.zeros(N, np.float32)

    def store(start: Any, size: int, factor: Any, when: Any = True) -> None:
        if when:
            out[int(start) : int(start) + size] = np.arange(size) + 1000 * int(factor)

    def loop(start: Any, stop: Any, run: Callable[[Any], None]) -> None:
        for number in range(start, stop):
            run(jnp.int32(number))

    body(loop, lambda number: NUMBERS[number], store)
    return out


def _check(body: Callable[..., None], semantics: Any) -> None:
    result = _result(_compiled(_as_kernel(body), semantics))
    np.testing.assert_array_equal(result, _expected(body))


def _barriers(compiled: Any) -> int:
    return len(re.findall(r"\bbar\.sync|\bbarrier\.sync", compiled.ptx))


@BOTH
@pytest.mark.parametrize("body", OVERLAPPING)
def test_the_last_store_wins(body: Any, semantics: Any) -> None:
    _check(body, semantics)


@BOTH
@pytest.mark.parametrize("body", NOT_OVERLAPPING)
def test_no_barriers_where_windows_are_equal_or_disjoint(body: Any, semantics: Any) -> None:
    if body is not _stated:
        _check(body, semantics)
    assert _barriers(_compiled(_as_kernel(body), semantics)) == 0


def test_pointers_and_while_loops() -> None:
    """Starts that loops carry."""

    def body(numbers_ref: Any, zeros_ref: Any, out_ref: Any) -> None:
        def step(_: Any, pointer: Any) -> Any:
            out_ref[pl.ds(pointer, 128)] = _values(128, pointer)
            return pointer + 128

        def slide(state: Any) -> Any:
            out_ref[pl.ds(state, 128)] = _values(128, state)
            return state + 50

        last = lax.fori_loop(0, 3, step, numbers_ref[0])
        lax.while_loop(lambda state: state < 900, slide, last)

    out = np.zeros(N, np.float32)
    starts = [3 + 128 * number for number in range(3)]
    starts += list(range(3 + 384, 900, 50))
    for start in starts:
        out[start : start + 128] = np.arange(128) + 1000 * start
    np.testing.assert_array_equal(_result(_compiled(body, Semantics.Lane)), out)


def test_no_barrier_for_a_pointer() -> None:
    def body(numbers_ref: Any, zeros_ref: Any, out_ref: Any) -> None:
        def step(_: Any, pointer: Any) -> Any:
            out_ref[pl.ds(pointer, 100)] = _values(100, pointer)
            return pointer + 100

        lax.fori_loop(0, 3, step, numbers_ref[0])

    assert _barriers(_compiled(body, Semantics.Lane)) == 0


def test_tiles_of_a_matrix() -> None:
    """Tiles in the order of a persistent kernel have no barriers, overlapping columns have some."""

    def tiles(numbers_ref: Any, zeros_ref: Any, out_ref: Any) -> None:
        @pl.loop(0, 8)
        def _(tile: Any) -> None:
            row, column = lax.div(tile, 2), lax.rem(tile, 2)
            block = jnp.full((16, 64), tile.astype(jnp.float32))
            out_ref[pl.ds(row * 16, 16), pl.ds(column * 64, 64)] = block

    def columns(numbers_ref: Any, zeros_ref: Any, out_ref: Any) -> None:
        @pl.loop(0, 8)
        def _(tile: Any) -> None:
            out_ref[:, pl.ds(tile * 9, 64)] = jnp.full((64, 64), tile.astype(jnp.float32))

    assert _barriers(_compiled(tiles, Semantics.Warpgroup, (64, 128))) == 0
    result = _result(_compiled(columns, Semantics.Warpgroup, (64, 128)), (64, 128))
    expected = np.where(np.arange(128) < 127, np.minimum(np.arange(128) // 9, 7), 0)
    np.testing.assert_array_equal(result, np.tile(expected, (64, 1)))


_PLACES = st.tuples(*(st.integers(0, 40) for _ in range(3)), st.integers(0, 60))
_STORES = st.lists(
    st.tuples(_PLACES, st.sampled_from((5, 64, 65, 128, 200))), min_size=1, max_size=3
)


@settings(max_examples=25, deadline=None)
@given(
    stores=_STORES,
    extents=st.tuples(*(st.integers(1, 3) for _ in range(3))),
    depths=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    semantics=st.sampled_from([Semantics.Lane, Semantics.Warpgroup]),
    form=st.sampled_from(("sum", "remainder", "quotient")),
)
def test_any_nest(stores: Any, extents: Any, depths: Any, semantics: Any, form: Any) -> None:
    def body(loop: Any, numbers: Any, store: Any) -> None:
        def stores_at(depth: int, *indices: Any) -> None:
            for (place, size), level in zip(stores, depths, strict=False):
                if level != depth:
                    continue
                start = place[3] + sum(f * i for f, i in zip(place, indices, strict=False))
                if form != "sum":
                    start = (lax.rem if form == "remainder" else lax.div)(jnp.int32(start), 7) * 16
                store(start, size, 9 * place[0] + indices[0] * 4 + indices[-1])

        def first(i: Any) -> None:
            stores_at(1, i)
            loop(0, extents[1], lambda j: second(i, j))

        def second(i: Any, j: Any) -> None:
            stores_at(2, i, j)
            loop(0, extents[2], lambda k: stores_at(3, i, j, k))

        loop(0, extents[0], first)

    _check(body, semantics)
