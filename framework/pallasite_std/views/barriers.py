"""Views of arrays of barriers: integers and slices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.reference_types import BarrierReference
from pallasite_std.memory.references import constant_integer


def view_barriers(ctx: RuleContext, barrier: BarrierReference, transform: Any) -> BarrierReference:
    """A view of barriers.

    Raises:
      UnsupportedError: it is not made by indices.
    """
    if not isinstance(transform, _jax.NDIndexer):
        raise UnsupportedError(
            "a view of barriers other than an index", got=type(transform).__name__
        )
    return index_barrier(ctx, barrier, transform.indices)


def index_barrier(ctx: RuleContext, barrier: BarrierReference, indices: Any) -> BarrierReference:
    """The barriers that integers and slices select, one index per dimension."""
    offset = barrier.index
    kept: list[int] = []
    stride = int(np.prod(barrier.shape))
    for index, extent in zip(indices, barrier.shape, strict=True):
        stride //= extent
        size = 1
        if isinstance(index, _jax.Slice):
            size = index.size
            # The selected barriers lie one after the other, so only the first dimension is cut.
            if index.stride != 1 or (size != extent and math.prod(kept) != 1):
                raise InvalidValueError(
                    "barriers that do not lie one after the other are selected by a slice",
                    expected="a slice of the first dimension, without steps",
                )
            kept.append(size)
            index = index.start
        value: Any = index if isinstance(index, int) else ctx.scalar(index, ops.i32())
        known = value if isinstance(value, int) else constant_integer(value)
        if known is not None:
            value = known
            if not 0 <= value <= extent - size:
                raise InvalidValueError(
                    f"barrier {value} of {extent}",
                    expected=f"an index from 0 to {extent - size}",
                )
            value = value * stride
        else:
            value = ops.multiply(value, stride)
        if isinstance(offset, int) and isinstance(value, int):
            offset = offset + value
        elif isinstance(offset, int):
            offset = ops.add(value, offset)
        else:
            offset = ops.add(offset, value)
    return dataclasses.replace(barrier, index=offset, shape=tuple(kept))
