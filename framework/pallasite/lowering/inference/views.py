"""Views of memory whose layout is still open: what a reference's transforms make of a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite import _jax
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.ir import types
from pallasite.ir.divisibility import ANY
from pallasite.language import transforms as tr
from pallasite.language.memory import MemorySpace
from pallasite.layouts.memory import Extent, MemoryLayout, row_major
from pallasite.lowering.inference.values import MemoryValue, ScalarValue
from pallasite.lowering.launch import SHARED_MEMORY_ALIGNMENT
from pallasite.lowering.references import (
    GLOBAL_ALIGNMENT,
    MemoryReference,
    WindowStart,
)


def start_of(index: Any) -> ScalarValue:
    """What is known of an index, or of the start of a slice."""
    if isinstance(index, _jax.Slice):
        index = index.start
    if isinstance(index, ScalarValue):
        return index
    if isinstance(index, int | np.integer) or (hasattr(index, "item") and np.ndim(index) == 0):
        number = int(index)
        return ScalarValue(abs(number) or ANY, number)
    raise UnsupportedError("a reference is indexed by an array")


class View:
    """A view of memory that has a certain layout, without any code.

    Attributes:
      layout: of the viewed elements.
      alignment: bytes that the address of the first element is a multiple of.
      dtype: of the elements.
      window: for global memory, the part of each dimension of the root array.
      certain: whether the view lies like this wherever a computed start is; if not, the start has
        to be a multiple of something that it is not known to be.
    """

    def __init__(self, root: MemoryValue, layout: MemoryLayout):
        self.root = root
        self.layout = layout
        self.dtype = root.dtype
        shared = root.space is MemorySpace.SMEM
        self.alignment = SHARED_MEMORY_ALIGNMENT if shared else GLOBAL_ALIGNMENT
        self.window: list[WindowStart] | None = None
        self.certain = True
        self.divisors: list[int] = []
        if not shared:
            self.window = [WindowStart(0, (), size) for size in root.shape]
            self.divisors = [0] * len(root.shape)

    def memory(self) -> MemoryReference:
        """As a reference without a pointer, for the functions that plan accesses."""
        return MemoryReference(
            pointer=None,
            layout=self.layout,
            dtype=self.dtype,
            space=self.root.space,
            alignment=self.alignment,
        )

    def _moved(self, elements: int) -> None:
        if elements:
            step = max(1, elements * self.layout.element_bits // 8)
            self.alignment = math.gcd(self.alignment, step)

    def index(self, indices: Sequence[Any]) -> None:
        """Narrows the view to integers and slices."""
        dim = 0
        free = [i for i, w in enumerate(self.window or ()) if not w.squeezed]
        for position, index in enumerate(indices):
            is_slice = isinstance(index, _jax.Slice)
            start = start_of(index)
            size = index.size if is_slice else 1
            stride = 1 if not is_slice or index.stride is None else int(index.stride)
            if is_slice and stride == 1 and start.known == 0 and size == self.layout.shape[dim]:
                dim += 1
                continue
            if stride != 1:
                self._strided(dim, start, size, stride)
                dim += 1
                continue
            if self.window is not None:
                self._narrow_window(free[position], dim, start, size, keep=is_slice)
            else:
                self._narrow(dim, start, size, keep=is_slice)
            if is_slice:
                dim += 1

    def _strided(self, dim: int, start: ScalarValue, size: int, stride: int) -> None:
        extents = self.layout.dims[dim]
        if len(extents) > 1 or start.known is None:
            raise UnsupportedError("a slice with a stride across tiles")
        step = extents[0].stride if extents else 1
        dims = [*self.layout.dims]
        dims[dim] = (Extent(size, step * stride),)
        self.layout = self.layout.with_dims(dims)
        self._moved(start.known * step)
        self.window = None

    def _narrow(self, dim: int, start: ScalarValue, size: int, *, keep: bool) -> None:
        part = (
            self.layout.slice(dim, start.known, size)
            if keep
            else self.layout.index(dim, start.known)
        )
        # Of a whole dimension there is but one slice.
        if start.known is None and size < self.layout.shape[dim]:
            self.certain = self.certain and start.divisor % part.alignment == 0
        self.layout = part.layout
        self._moved(part.offset)
        for term in part.terms:
            whole = start.divisor
            places = whole // term.divisor if whole % term.divisor == 0 else 1
            if term.modulus is not None:
                places = math.gcd(places, term.modulus)
            self._moved(places * term.stride)

    def _narrow_window(
        self, axis: int, dim: int, start: ScalarValue, size: int, *, keep: bool
    ) -> None:
        assert self.window is not None
        step = math.prod(self.root.shape[axis + 1 :])
        dims = [*self.layout.dims]
        dims[dim] = (Extent(size, step),)
        if not keep:
            del dims[dim]
        self.layout = self.layout.with_dims(dims)
        self._moved(start.divisor * step)
        old = self.window[axis]
        self.window[axis] = WindowStart(old.static + (start.known or 0), (), size, not keep)
        if start.known is None:
            self.divisors[axis] = math.gcd(self.divisors[axis], start.divisor)

    def apply(self, transform: Any) -> None:
        """One transform of the reference."""
        match transform:
            case _jax.NDIndexer():
                self.index(transform.indices)
            case _jax.TransposeTransform():
                self._change(self.layout.transpose(transform.permutation))
            case _jax.ReshapeTransform():
                self._change(self.layout.reshape(transform.shape))
            case tr.UntilingTransform():
                self._change(self.layout.untile(transform.tiling))
            case tr.TilingTransform():
                self._change(self.layout.tile(transform.tiling))
            case tr.UnswizzleTransform():
                self._change(self.layout.with_swizzle(transform.swizzle))
            case tr.SwizzleTransform():
                self._change(self.layout.with_swizzle(16))
            case _jax.BitcastTransform():
                self.dtype = np.dtype(transform.dtype)
                if types.bit_width(self.dtype) != self.layout.element_bits:
                    raise UnsupportedError("a reference seen as elements of another width")
            case tr.ClusterRefTransform() | tr.PeerMemRef() | tr.MulticastRef():
                pass
            case _:
                raise InvalidValueError(f"an unknown view {type(transform).__name__}")

    def _change(self, layout: MemoryLayout) -> None:
        self.layout = layout
        self.window = None


def begins_at_any_row(root: MemoryValue, transforms: Sequence[Any]) -> bool:
    """Whether a view is a part of the rows of an allocation of which it is not known that it begins
    with a whole tile of 8."""
    if not transforms or not isinstance(transforms[0], _jax.NDIndexer) or len(root.shape) < 2:
        return False
    row = transforms[0].indices[len(root.shape) - 2]
    if not isinstance(row, _jax.Slice) or row.size == root.shape[-2]:
        return False
    start = start_of(row)
    return start.known is None and start.divisor % 8 != 0


def split_member(root: MemoryValue, transforms: Sequence[Any]) -> tuple[MemoryValue, list[Any]]:
    """The allocation that is viewed (a member, if it is a union) and the views of that."""
    rest = list(transforms)
    for number, transform in enumerate(rest):
        if isinstance(transform, tr.ExtractAliasedRef):
            dtype = np.dtype(transform.dtype)
            key = (transform.offset, str(dtype), tuple(transform.shape))
            choice = (root.members or {}).get(key)
            member = MemoryValue(root.space, tuple(transform.shape), dtype, choice, name=root.name)
            return member, rest[number + 1 :]
    return root, rest


def view_of(root: MemoryValue, layout: MemoryLayout | None, transforms: Sequence[Any]) -> View:
    """The view of an allocation that has a certain layout, row-major if that is None.

    Raises:
      InvalidValueError, UnsupportedError: the layout has no such view.
    """
    if layout is None:
        layout = row_major(root.shape, types.bit_width(root.dtype))
    view = View(root, layout)
    for transform in transforms:
        view.apply(transform)
    return view


def transformed_layout(shape: Sequence[int], bits: int, transforms: Sequence[Any]) -> MemoryLayout:
    """The layout, of the logical shape, of an allocation with transforms.

    Raises:
      InvalidValueError: a transform does not fit the shape, or is neither tiling nor swizzle.
    """
    layout = row_major(shape, bits)
    for transform in transforms:
        match transform:
            case tr.TilingTransform():
                tiled = layout.tile(transform.tiling).shape
                layout = row_major(tiled, bits).untile(transform.tiling)
            case tr.SwizzleTransform():
                layout = layout.with_swizzle(transform.swizzle)
            case _:
                raise InvalidValueError(f"an unknown transform {type(transform).__name__}")
    return layout
