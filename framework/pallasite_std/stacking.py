"""Layouts of arrays that several arrays of one layout make up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pallasite.plugin import UnsupportedError
from pallasite.plugin.layouts import Digit, Owner, RegisterLayout, describe


def stacked(layout: RegisterLayout, dimension: int, shape: Sequence[int]) -> RegisterLayout:
    """``layout`` with more registers along one dimension, so that it covers ``shape``.

    Raises:
      UnsupportedError: the extent of ``shape`` is no multiple of the layout's, or the layout is
        one of a flattened array, or has padding along the dimension.
    """
    held = math.prod(digit.size for digit in layout.dims[dimension]) if not layout.flat else 0
    if held != layout.shape[dimension] or shape[dimension] % held:
        raise UnsupportedError(
            "a concatenation of arrays whose layout does not extend to the result",
            got=f"{describe(layout)} to shape {list(shape)}",
            hint="cast the result with plgpu.layout_cast",
        )
    times = shape[dimension] // layout.shape[dimension]
    dims = list(layout.dims)
    dims[dimension] = (Digit(times, Owner.REGISTER, layout.registers), *dims[dimension])
    return RegisterLayout(tuple(shape), tuple(dims), layout.vector_length)
