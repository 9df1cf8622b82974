"""Products of arrays in registers: by tensor cores where the dtypes allow, else by outer products.

The hardware plugins' own instructions are not used: their operands lie in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Literal, primitives

from pallasite.plugin.language import MemorySpace
from pallasite_std.definitions.record import Definition
from pallasite_std.memory.thread_arrays import EACH_THREAD
from pallasite_std.primitives.layouts import Layout, layout_cast
from pallasite_std.primitives.matrix import MMA_ACCUMULATORS, can_multiply, mma, warps_along_rows

_BY_TENSOR_CORES = frozenset(MMA_ACCUMULATORS) - {"float32"}


def _dot_general(
    a: Any, b: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
) -> list[Any]:
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    a_free = [d for d in range(len(a.shape)) if d not in (*a_sum, *a_batch)]
    b_free = [d for d in range(len(b.shape)) if d not in (*b_sum, *b_batch)]
    batch = tuple(a.shape[d] for d in a_batch)
    rows, columns = (tuple(x.shape[d] for d in free) for x, free in ((a, a_free), (b, b_free)))
    dtypes = (a.dtype, b.dtype)
    out = jnp.result_type(*dtypes) if preferred_element_type is None else preferred_element_type
    depth = math.prod(a.shape[d] for d in a_sum)
    if depth == 0:
        return [jnp.zeros((*batch, *rows, *columns), out)]
    a_order, b_order = (*a_batch, *a_free, *a_sum), (*b_batch, *b_sum, *b_free)
    names = [np.dtype(x.dtype).name for x in (a, b)]
    m, n = math.prod(rows), math.prod(columns)
    if math.prod(batch) == 1 and names[0] in _BY_TENSOR_CORES and can_multiply(*names):
        product = _by_tensor_cores(a, a_order, b, b_order, (m, depth, n))
    else:
        a = _shaped(a, a_order, (math.prod(batch), m, depth))
        b = _shaped(b, b_order, (math.prod(batch), depth, n))
        product = _by_outer_products(a, b, np.dtype(out))
    return [_shaped(product.astype(out), None, (*batch, *rows, *columns))]


def _shaped(x: Any, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> Any:
    if order is not None and order != tuple(range(x.ndim)):
        x = lax.transpose(x, order)
    return x if x.shape == shape else lax.reshape(x, shape)


def _by_tensor_cores(
    a: Any, a_order: tuple[int, ...], b: Any, b_order: tuple[int, ...], sizes: tuple[int, int, int]
) -> Any:
    """The product of matrices (m, k) and (k, n), which are arrays with their dimensions in some
    order, padded to whole tiles; the sum is as wide as tensor cores make it."""
    m, k, n = sizes
    step = 32 // np.dtype(a.dtype).itemsize
    tiles = [(16 * warps, 8 * (4 // warps)) for warps in (4, 2, 1)]
    whole = [(_up(m, rows), _up(n, columns)) for rows, columns in tiles]
    rows, columns = min(whole, key=math.prod)
    depth = _up(k, step)
    warps = warps_along_rows((rows, columns))
    name = np.dtype(a.dtype).name
    acc = jnp.zeros((rows, columns), MMA_ACCUMULATORS[name])
    dtype = a.dtype
    left = _matrix(a, a_order, (m, k), (rows, depth))
    turned = (b_order[::-1], (n, k), (columns, depth))
    if a is b and len(b_order) == 2 and turned == (a_order, (m, k), (rows, depth)):
        right = lax.transpose(left, (1, 0))  # Zeros come behind it once.
    else:
        right = _matrix(b, b_order, (k, n), (depth, columns))
    left = layout_cast(left, Layout.MMA_LHS(dtype, m_warps=warps))
    right = layout_cast(right, Layout.MMA_RHS(dtype, m_warps=warps))
    acc = layout_cast(acc, Layout.MMA_ACC(dtype, m_warps=warps))
    product = mma(acc, left, right)
    return product if (rows, columns) == (m, n) else lax.slice(product, (0, 0), (m, n))


def _matrix(x: Any, order: tuple[int, ...], shape: tuple[int, int], whole: tuple[int, int]) -> Any:
    """An array as a matrix, with zeros behind its rows and columns."""
    if order == (1, 0):
        # Zeros come first: a matrix of whole tiles is transposed with less code.
        return lax.transpose(_matrix(x, (0, 1), shape[::-1], whole[::-1]), order)
    x = _shaped(x, order, shape)
    if shape == whole:
        return x
    behind = [(0, new - old, 0) for old, new in zip(shape, whole, strict=True)]
    return lax.pad(x, np.zeros((), x.dtype), behind)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _by_outer_products(a: Any, b: Any, out: np.dtype[Any]) -> Any:
    """``sum_k a[:, :, k] b[:, k, :]``, in a loop over k that reads both from shared memory."""
    wide = out
    if jnp.issubdtype(out, jnp.floating) and out.itemsize < 4:
        wide = np.dtype(np.float32)
    batch, m, depth = a.shape
    n = b.shape[2]
    a, b = lax.transpose(a.astype(wide), (2, 0, 1)), lax.transpose(b.astype(wide), (1, 0, 2))

    def scoped(a_ref: Any, b_ref: Any) -> Any:
        a_ref[...] = a
        b_ref[...] = b

        def body(k: Any, total: Any) -> Any:
            left = lax.broadcast_in_dim(a_ref[k], (batch, m, n), (0, 1))
            right = lax.broadcast_in_dim(b_ref[k], (batch, m, n), (0, 2))
            return total + left * right

        return lax.fori_loop(0, depth, body, jnp.zeros((batch, m, n), wide))

    space = MemorySpace.SMEM
    shapes = space(a.shape, wide), space(b.shape, wide)
    return pl.run_scoped(scoped, *shapes, collective_axes=EACH_THREAD)


def _of_untransposed(equation: Any, producers: Mapping[Any, Any]) -> Any:
    """The product of what its operands are transpositions of."""
    sums, batches = equation.params["dimension_numbers"]
    operands, new_sums, new_batches = [], [], []
    for atom, summed, batch in zip(equation.invars, sums, batches, strict=True):
        made = None if isinstance(atom, Literal) else producers.get(atom)
        one_free = len(atom.aval.shape) - len(summed) - len(batch) <= 1  # It has no other order.
        if made is not None and made.primitive is primitives.transpose_p and one_free:
            order = made.params["permutation"]
            atom = made.invars[0]
            summed, batch = (tuple(order[d] for d in dims) for dims in (summed, batch))
        operands.append(atom)
        new_sums.append(summed)
        new_batches.append(batch)
    if operands == list(equation.invars):
        return equation
    numbers = (tuple(new_sums), tuple(new_batches))
    return equation.replace(
        invars=operands, params={**equation.params, "dimension_numbers": numbers}
    )


DEFINITIONS = {primitives.dot_general_p: Definition(_dot_general, operands=_of_untransposed)}
