"""Copies of operands whose rows the copy engine cannot read to longer ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallasite import gpu as plgpu
from pallasite_hopper.matrix.aligned_rows import VectorWindow
from pallasite_hopper.matrix.padded_rows import copy_to_longer_rows
from pallasite_std.api import aligned as by_xla
from pallasite_std.api import padded_columns

_BYTES = 2048
"""That a warpgroup copies at once, by vectors of 16."""

_SECTOR = 32
"""Bytes that memory moves at least."""

_LEAST_BYTES = {2: 4 << 20, 1: 1 << 20}
"""Of what is copied by lanes, by the bytes of an element: with less, XLA's kernel takes as long, or
less time (elements of 16 bits measured on an H200, with operands of 0.1 to 11 megabytes)."""

_COUNT = 4
"""So many times before it stores them."""


def aligned(array: jax.Array) -> jax.Array:
    """An array whose rows the copy engine can read: with longer ones if they are not aligned."""
    size = array.dtype.itemsize
    longer = array.ndim == 2 and padded_columns(array.shape[1], size) != array.shape[1]
    if not longer or array.size * size < _LEAST_BYTES.get(size, math.inf):
        return by_xla(array)
    return with_longer_rows(array)


def with_longer_rows(array: jax.Array) -> jax.Array:
    """A matrix of 8- or 16-bit elements with zeros at the ends of its rows, to multiples of 16
    bytes."""
    return _kernel(array.shape[0], array.shape[1], array.dtype.name)(array)


@functools.lru_cache(maxsize=256)
def _kernel(rows: int, columns: int, dtype: str) -> Callable[..., jax.Array]:
    size = jnp.dtype(dtype).itemsize
    padded, whole = padded_columns(columns, size), _BYTES // size
    # Parts of rows that leave least over, and begin within the fewest sectors.
    widths = (whole // height for height in (1, 2, 4, 8, 16))
    width = min(widths, key=lambda one: -(-padded // one) * (one + _SECTOR // size))
    height = whole // width
    window = VectorWindow(rows, columns, (height, width), size)
    across, below = -(-padded // width), -(-rows // (height * _COUNT))

    def body(ref: jax.Array, out: jax.Array) -> None:
        block = lax.axis_index("block")
        row, column = lax.div(block, across) * (height * _COUNT), lax.rem(block, across) * width
        copy_to_longer_rows(ref, out, window, row, column, _COUNT)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, padded), dtype),
        grid=(across * below,),
        grid_names=("block",),
        kernel_name="longer_rows",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    return kernel
