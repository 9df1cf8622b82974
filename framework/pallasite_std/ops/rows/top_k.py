"""``top_k``: the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallasite import gpu as plgpu
from pallasite.plugin import InvalidValueError
from pallasite_std.ops.arguments import in_32_bits, matched, zeros
from pallasite_std.ops.rows.arguments import as_rows, float_array
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.kernel import Chunk, Exchange, Rows, row_kernel, threads_of
from pallasite_std.ops.rows.queues import Element, parts_of, queues_of
from pallasite_std.ops.rows.tiling import (
    LANES,
    VECTOR_BYTES,
    Registers,
    row_tiling,
    size_of,
)

_SEGMENT = 64 * LANES
"""Columns of a row that registers do not hold are divided into segments of so many, at most."""
_MOST_CANDIDATES = 32 * LANES
"""The largest elements of all segments together, if there are segments."""
_TAKEN = -(2**31)
"""The key of an element that has been found, or does not exist."""
_PLACES = 15
"""Bits for the column of an element of 16 bits in its key: registers hold fewer columns."""
_PLACE = (1 << _PLACES) - 1
_LEAST_QUEUED = {2: 16, 4: 8}
"""Elements that are searched from which on rows have queues, by bytes of an element. On an H200,
searching 8 without them took 0.86 to 0.95 of the time with 16 bits, and 1.33 with 4 rows of 32000
of 32 bits; searching 1 to 4 took 0.5 to 1.1."""
_ABOVE = 1 << 30
"""More than any such key."""
_BELOW = -(1 << 30) - 1
"""Less than any such key."""


@in_32_bits
def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The largest elements of each row and where they are, in one kernel, or in two for long rows.

    Each of them takes a pass over the row, in registers, to which longer rows are distributed by
    segments if k is small: this is for the routing of a mixture of experts and for sampling from a
    few candidates.

    Args:
      x: (..., columns), bfloat16, float16 or float32; at most 2**24 columns.
      k: how many, from 0 to the number of columns.

    Returns:
      The elements, (..., k) of the dtype of x, from the largest to the smallest, and their columns,
      int32. Of equal ones, that of the lowest column comes first, as in ``jax.lax.top_k``; NaN
      counts as infinity. The elements have derivatives of any order with respect to x.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    x = float_array(x, "x")
    columns = x.shape[-1]
    if not isinstance(k, int | np.integer) or not 0 <= k <= columns or columns > 2**24:
        raise InvalidValueError(
            "k does not fit the rows",
            got=f"k {k!r}, {columns} columns",
            expected="an integer from 0 to the number of columns, these at most 2**24",
        )
    (x,) = matched(x)
    shape = (*x.shape[:-1], int(k))
    if 0 in (*shape, *x.shape):
        return zeros(shape, x.dtype, x), zeros(shape, np.dtype(np.int32), x)
    rows = x.reshape(-1, columns)
    run = over_leading_axes(functools.partial(_run, int(k)), 1)
    values, indices = run(lax.stop_gradient(rows))
    values = _differentiable(rows, values, indices)
    return values.reshape(shape), indices.reshape(shape)


def _run(k: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (*x.shape[:-1], k)
    values, indices = _of_rows(k, as_rows(x))
    return values.reshape(shape), indices.reshape(shape)


def _of_rows(k: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    count, columns = rows.shape
    dtype = np.dtype(rows.dtype)
    if row_tiling(count, columns, size_of(dtype), Registers()).resident:
        values, indices = _kernel(k, count, columns, dtype)(rows)
        return values, indices
    unit = LANES * VECTOR_BYTES // dtype.itemsize
    width = -(-columns // -(-columns // _SEGMENT) // unit) * unit
    segments = -(-columns // width)
    if segments * k > _MOST_CANDIDATES or k > width:
        values, indices = _by_passes(k, count, columns, dtype)(rows)
        return values, indices
    # Of equal elements those of lower columns are candidates before the others.
    values, indices = _kernel(k, count, columns, dtype, width)(rows)
    values, places = _of_rows(k, values)
    return values, jnp.take_along_axis(indices, places, axis=1)


def _values(rows: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """The elements of rows at indices, which are known."""
    return values


def _derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _differentiable(*primals), jnp.take_along_axis(tangents[0], primals[2], axis=1)


# Not of the indices, too: their derivatives would have to say over which axes of a mesh they vary.
_differentiable: Any = jax.custom_jvp(_values)
_differentiable.defjvp(in_32_bits(_derivative))


@functools.lru_cache(maxsize=512)
def _kernel(
    k: int, rows: int, columns: int, dtype: np.dtype[Any], width: int | None = None
) -> Callable[..., Any]:
    """The kernel for rows, or segments of ``width`` columns, that registers hold.

    Returns:
      a function of the matrix: values and columns, (rows, k) each; of segments those of all of
      them, where the last one begins early enough to be whole, and has infinitely small values for
      what belongs to the one before it.
    """
    segments = 1 if width is None else -(-columns // width)
    width = columns if width is None else width
    tiling = row_tiling(rows * segments, width, size_of(dtype), Registers())
    packed = dtype.itemsize == 2
    # Of queues, and one by one; and whether queues lack something.
    each, vector = 1 if packed else 2, VECTOR_BYTES // dtype.itemsize
    exchanges = 2 * each * k + 1

    def search(block: Rows, x: Any, first: Any, values: Any, indices: Any, exists: Any) -> None:
        """Of columns from ``first`` on, those before ``exists`` left out."""
        resident, none = block.resident, _BELOW if packed else _TAKEN

        def put(number: Any, best: Any, place: Any) -> None:
            value = block.elements(x, place)
            if exists is not None:
                value = jnp.where(best == none, -jnp.inf, value)
            block.store(values.at[:, number], value)
            block.store(indices.at[:, number], place + first)

        def keys_of(elements: Any, places: Any, there: Any = None) -> Any:
            keys = _keys(elements)
            if packed:  # Of equal elements that of the lowest column is the largest.
                keys = lax.shift_left(keys, _like(keys, _PLACES)) | (_like(keys, _PLACE) - places)
            if exists is not None:
                before = places >= exists
                there = before if there is None else there & before
            return keys if there is None else jnp.where(there, keys, none)

        def held() -> tuple[Any, Any]:
            places = resident.columns()
            return keys_of(x[block.place, pl.ds(resident.first, resident.width)], places), places

        def one_by_one(slot: int) -> None:
            keys, places = held()
            if packed:
                shape = () if block.tiling.height == 1 else (block.tiling.height,)
                step = functools.partial(next_smaller, slot, keys)
                lax.fori_loop(0, k, step, jnp.full(shape, _ABOVE, jnp.int32))
            else:
                lax.fori_loop(0, k, functools.partial(take, slot, places), keys)

        def next_smaller(slot: int, keys: Any, number: Any, best: Any) -> Any:
            """The largest key below one: as unsigned numbers, negative differences to that are
            larger than the others, and no difference overflows."""
            block.use_slots(slot + number)
            # With the sign turned, unsigned numbers are in the order of others.
            apart = keys - block.spread(best ^ _TAKEN, resident)
            (nearest,) = block.reduce(lambda chunk: (apart,), "max")
            nearest = nearest ^ _TAKEN
            best = best + lax.min(nearest, jnp.zeros_like(nearest))
            put(number, best, _PLACE - (best & _PLACE))
            return best

        def take(slot: int, places: Any, number: Any, keys: Any) -> Any:
            block.use_slots(slot + 2 * number)
            (best,) = block.reduce(lambda chunk: (keys,), "max")
            same = keys == block.spread(best, resident)
            (place,) = block.reduce(lambda chunk: (jnp.where(same, -places, _TAKEN),), "max")
            place = -lax.max(place, jnp.full_like(place, 1 - width))
            put(number, best, place)
            return jnp.where(places == block.spread(place, resident), _TAKEN, keys)

        def from_queues(elements: Element, parts: int, vector: int) -> Any:
            """Whether a queue may have lacked something."""

            def step(number: Any, carry: Any) -> Any:
                *queue, taken = carry
                block.use_slots(each * number)
                keys, *columns = queue[0]
                (best,) = block.reduce(lambda chunk: (keys,), "max")
                won = keys == best
                if packed:
                    place = _PLACE - (best & _PLACE)
                else:
                    lower = jnp.where(won, -columns[0], _TAKEN)
                    (place,) = block.reduce(lambda chunk: (lower,), "max")
                    place = -lax.max(place, jnp.full_like(place, 1 - width))
                    won = won & (columns[0] == place)
                put(number, best, place)
                behind = [*queue[1:], tuple(jnp.full_like(one, none) for one in queue[0])]
                moved = [
                    tuple(jnp.where(won, two, one) for one, two in zip(*both, strict=True))
                    for both in zip(queue, behind, strict=True)
                ]
                return *moved, taken + won.astype(jnp.int32)

            queue = queues_of(elements, parts, vector)
            *_, taken = lax.fori_loop(0, k, step, (*queue, jnp.zeros((parts,), jnp.int32)))
            block.use_slots(each * k)
            (most,) = block.reduce(lambda chunk: (taken,), "max")
            return most >= len(queue)

        queued = block.tiling.height == 1 and k >= _LEAST_QUEUED[dtype.itemsize]
        parts = parts_of(resident.width, k, LANES) if queued else None
        run = vector if columns % vector == 0 else 1
        size = 1 if parts is None else parts * run
        padded = -(-resident.width // size) * size
        along = padded > resident.width  # Rows are read with what follows them in memory.
        if parts is None or (along and (segments > 1 or padded > rows * columns)):
            one_by_one(0)
            return
        if not along:
            keys, places = held()
        else:
            begin = block.first * columns + resident.first
            begin = pl.multiple_of(begin, vector) if run > 1 else begin
            window = x.reshape(rows * columns).at[pl.ds(begin, padded)]
            within = lax.broadcasted_iota(jnp.int32, (padded,), 0)
            there, places = within < resident.width, within + resident.first
            keys = keys_of(pltriton.load(window, mask=there, other=0), places, there)
        failed = from_queues((keys,) if packed else (keys, places), parts, run)
        pl.when(failed)(lambda: one_by_one(each * k + 1))

    def over_segments(x: Any, values: Any, indices: Any, **scratch: Any) -> None:
        row, segment = lax.axis_index("row"), lax.axis_index("segment")
        thread = lax.axis_index("part") if tiling.threads > 1 else 0
        exchange = Exchange(tiling.threads, **scratch) if scratch else None
        block = Rows(tiling, row, thread, exchange)
        first = lax.min(segment * width, columns - width)
        exists = segment * width - first if columns % width else None
        if columns % vector == 0:
            first = pl.multiple_of(first, vector)
        mine = pl.ds(segment * k, k)
        window = x.at[:, pl.ds(first, width)]
        search(block, window, first, values.at[:, mine], indices.at[:, mine], exists)

    out_types = [
        jax.ShapeDtypeStruct((rows, segments * k), dtype),
        jax.ShapeDtypeStruct((rows, segments * k), jnp.int32),
    ]
    if segments == 1:

        def body(block: Rows, x: Any, values: Any, indices: Any) -> None:
            search(block, x, 0, values, indices, None)

        return row_kernel(body, rows, tiling, out_types, "top_k", exchanges, exchanged=jnp.int32)
    kernel: Callable[..., Any] = plgpu.kernel(
        over_segments,
        out_type=tuple(out_types),
        grid=(rows, segments),
        grid_names=("row", "segment"),
        kernel_name="top_k",
        **threads_of(tiling, exchanges, jnp.int32),
    )
    return kernel


def _keys(elements: Any) -> Any:
    """Integers in the order of floats: of 16 bits, or of 32, as int32. None is :data:`_TAKEN`."""
    narrow = np.dtype(elements.dtype).itemsize == 2
    bits = lax.bitcast_convert_type(elements, jnp.int16 if narrow else jnp.int32)
    bits = bits.astype(jnp.int32)
    magnitude = _like(bits, 0x7FFF if narrow else 0x7FFFFFFF)
    keys = bits ^ (lax.shift_right_arithmetic(bits, _like(bits, 31)) & magnitude)
    infinity = np.asarray(np.inf, elements.dtype)
    largest = int(infinity.view(np.int16 if narrow else np.int32))
    wide = elements.astype(jnp.float32)
    keys = jnp.where(jnp.isnan(wide), largest, keys)
    return jnp.where(wide == 0.0, 0, keys)


def _like(array: Any, number: int) -> Any:
    return jnp.full(array.shape, number, array.dtype)


@functools.lru_cache(maxsize=512)
def _by_passes(k: int, rows: int, columns: int, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """The kernel for rows of any length, which are read twice for each element of the result."""
    tiling = row_tiling(rows, columns, size_of(dtype), Registers())

    def body(block: Rows, x: Any, values: Any, indices: Any) -> None:
        shape = () if block.tiling.height == 1 else (block.tiling.height,)

        def one(number: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
            """The element that follows one, given with its column, in the order of the result."""
            block.use_slots(2 * number)

            def following(chunk: Chunk) -> tuple[Any, Any]:
                elements = chunk.load(x)
                elements = jnp.where(jnp.isnan(elements), jnp.inf, elements)
                value, place = (block.spread(part, chunk) for part in before)
                later = (elements == value) & (chunk.columns() > place)
                return elements, (elements < value) | later

            def largest(chunk: Chunk) -> tuple[Any, ...]:
                elements, after = following(chunk)
                return (jnp.where(after, elements, -jnp.inf),)

            (value,) = block.reduce(largest, "max")

            def first(chunk: Chunk) -> tuple[Any, ...]:
                elements, after = following(chunk)
                chosen = after & (elements == block.spread(value, chunk))
                # Columns are exact in float32.
                return (jnp.where(chosen, -chunk.columns().astype(jnp.float32), -jnp.inf),)

            (negative,) = block.reduce(first, "max")
            place = (-negative).astype(jnp.int32)
            block.store(values.at[:, number], block.elements(x, place))
            block.store(indices.at[:, number], place)
            return value, place

        start = (jnp.full(shape, jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))
        lax.fori_loop(0, k, one, start)

    out_types = [
        jax.ShapeDtypeStruct((rows, k), dtype),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
    ]
    return row_kernel(body, rows, tiling, out_types, "top_k", 2 * k)
