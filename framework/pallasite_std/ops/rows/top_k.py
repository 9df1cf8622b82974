"""``top_k``: the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.plugin import InvalidValueError
from pallasite_std.ops.arguments import matched, zeros
from pallasite_std.ops.rows.arguments import float_array
from pallasite_std.ops.rows.kernel import Chunk, Rows, row_kernel
from pallasite_std.ops.rows.tiling import Registers, row_tiling, size_of


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The largest elements of each row and where they are, in one kernel.

    Each of them takes a pass over the row, in registers if it has at most about 32,000 elements:
    this is for the routing of a mixture of experts and for sampling from a few candidates.

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
    values, indices = _of_rows(int(k), lax.stop_gradient(rows))
    values = _differentiable(rows, values, indices)
    return values.reshape(shape), indices.reshape(shape)


def _of_rows(k: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, indices = _kernel(k, *rows.shape, np.dtype(rows.dtype))(rows)
    return values, indices


def _values(rows: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """The elements of rows at indices, which are known."""
    return values


def _derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _differentiable(*primals), jnp.take_along_axis(tangents[0], primals[2], axis=1)


# Not of the indices, too: their derivatives would have to say over which axes of a mesh they vary.
_differentiable: Any = jax.custom_jvp(_values)
_differentiable.defjvp(_derivative)


@functools.lru_cache(maxsize=512)
def _kernel(k: int, rows: int, columns: int, dtype: np.dtype[Any]) -> Callable[..., Any]:
    tiling = row_tiling(rows, columns, size_of(dtype), Registers())

    def body(block: Rows, x: Any, values: Any, indices: Any) -> None:
        if tiling.resident:
            block.resident.load(x)  # Once, for all passes.
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
