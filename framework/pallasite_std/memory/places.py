"""Where memory layouts put their elements, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite.plugin.layouts import MemoryLayout


def places_of(layout: MemoryLayout) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The place of each element, counted in elements from the first; without swizzling."""
    result = np.zeros((1,) * len(layout.dims), np.int64)
    for axis, extents in enumerate(layout.dims):
        offsets = np.zeros(1, np.int64)
        for extent in extents:
            steps = np.arange(extent.size, dtype=np.int64) * extent.stride
            offsets = (offsets[:, None] + steps).reshape(-1)
        result = result + offsets.reshape([-1 if i == axis else 1 for i in range(result.ndim)])
    return result
