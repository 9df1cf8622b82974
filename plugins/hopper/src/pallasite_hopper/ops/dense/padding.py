"""Copies of operands whose rows the copy engine cannot read to longer ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax

from pallasite import gpu as plgpu
from pallasite_hopper.matrix.aligned_rows import VectorWindow
from pallasite_hopper.matrix.padded_rows import copy_to_longer_rows
from pallasite_std.api import aligned as by_xla
from pallasite_std.api import padded_columns

_ELEMENTS = 1024
"""Of 16 bits, that a warpgroup copies at once, by vectors of eight."""

_LEAST_BYTES = 4 << 20
"""Of what is copied by lanes: with less, XLA's kernel takes as long, or less time (measured on an
H200, with operands of 0.1 to 11 megabytes)."""

_COUNT = 4
"""So many times before it stores them."""


def aligned(array: jax.Array) -> jax.Array:
    """An array whose rows the copy engine can read: with longer ones if they are not aligned."""
    small = array.size * array.dtype.itemsize < _LEAST_BYTES
    if array.ndim != 2 or array.dtype.itemsize != 2 or array.shape[1] % 8 == 0 or small:
        return by_xla(array)
    return with_longer_rows(array)


def with_longer_rows(array: jax.Array) -> jax.Array:
    """A matrix of 16-bit elements with zeros at the ends of its rows, to multiples of 16 bytes."""
    return _kernel(array.shape[0], array.shape[1], array.dtype.name)(array)


@functools.lru_cache(maxsize=256)
def _kernel(rows: int, columns: int, dtype: str) -> Callable[..., jax.Array]:
    padded = padded_columns(columns, 2)
    # Parts of rows that leave least over, and begin within the fewest sectors of 16 elements.
    width = min((1024, 512, 256, 128, 64), key=lambda one: -(-padded // one) * (one + 16))
    height = _ELEMENTS // width
    window = VectorWindow(rows, columns, (height, width), 2)
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
