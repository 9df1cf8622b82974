"""The columns of a matrix in several matrices: every second, fourth or eighth in one.

XLA has a slow kernel for that, which reads elements far from each other; here lanes load elements
beside each other, and store such too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallasite import gpu as plgpu
from pallasite.plugin import jax_internals as _jax
from pallasite_std.api import padded_columns

_ELEMENTS = 2048
"""That a block moves."""


def split_columns(array: jax.Array, count: int) -> jax.Array:
    """The matrices of every ``count``-th column of one, beginning with each of the first ones.

    Element (j, i, c) is (i, c * count + j). Columns beyond the last multiple of ``count`` are left
    out, and rows of the result end with zeros, to multiples of 16 bytes.

    Args:
      array: a matrix of elements of 16 bits.
      count: a power of two, at most 16.
    """
    return _kernel(*array.shape, count, array.dtype.name)(array)


@functools.lru_cache(maxsize=256)
def _kernel(rows: int, columns: int, count: int, dtype: str) -> Callable[..., jax.Array]:
    each = columns // count
    width, step = padded_columns(each, 2), _ELEMENTS // count
    across = -(-width // step)

    def body(array: jax.Array, out: jax.Array) -> None:
        block = lax.axis_index("block")
        row, first = lax.div(block, across), lax.rem(block, across) * step
        begin = first * count
        place = begin + lax.broadcasted_iota(jnp.int32, (_ELEMENTS,), 0)
        zero = jnp.zeros((), array.dtype)
        window = pl.ds(begin, _ELEMENTS)
        values = triton.load(array.at[row, window], mask=place < each * count, other=zero)
        # A lane has one element of each matrix, and the lanes beside it have the next ones.
        layout = plgpu.Layout.WG_STRIDED((_ELEMENTS,), vec_size=count)
        values = plgpu.layout_cast(values, layout).reshape(step, count).T
        column = first + lax.broadcasted_iota(jnp.int32, (count, step), 1)
        target = (slice(None), row, pl.ds(first, step))
        _jax.masked_store(out, target, values, mask=column < width)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, rows, width), dtype),
        grid=(rows * across,),
        grid_names=("block",),
        kernel_name="split_columns",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    return kernel
