"""Views of memory whose layout is still open: what a reference's transforms make of a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite import _jax, plugins
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.ir import types
from pallasite.language import transforms as tr
from pallasite.layouts.memory import MemoryLayout, row_major
from pallasite.lowering.inference.values import ANY, MemoryValue, ScalarValue
from pallasite.lowering.kernel_function import GLOBAL_ALIGNMENT, SHARED_MEMORY_ALIGNMENT
from pallasite.lowering.memory_access import memory_access
from pallasite.registry import Registry


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
        shared = root.space.is_shared
        self.alignment = SHARED_MEMORY_ALIGNMENT if shared else GLOBAL_ALIGNMENT
        self.window: list[Any] | None = None
        self.certain = True
        self.divisors: list[int] = []
        self._registry: Registry | None = None
        if not shared:
            self.window = memory_access().whole_window(root.shape)
            self.divisors = [0] * len(root.shape)

    def memory(self) -> Any:
        """As a reference without a pointer, for the functions that plan accesses."""
        return memory_access().without_pointer(
            self.layout, self.dtype, self.root.space, self.alignment
        )

    def move(self, elements: int) -> None:
        """The view begins so many elements further on, or a multiple of them."""
        if elements:
            step = max(1, elements * self.layout.element_bits // 8)
            self.alignment = math.gcd(self.alignment, step)

    def change(self, layout: MemoryLayout) -> None:
        """The view shows its elements in another way; it is no plain window any more."""
        self.layout = layout
        self.window = None

    def apply(self, transform: Any) -> None:
        """One transform of the reference, as its memory space has it."""
        self.root.space.infer_view(self, transform)

    def by_table(self, transform: Any) -> None:
        """One transform of the reference, as the table of views has it."""
        if self._registry is None:
            self._registry = plugins.registry()
        rule = self._registry.view_rule(type(transform))
        if rule is None or rule.infer is None:
            raise InvalidValueError(f"an unknown view {type(transform).__name__}")
        rule.infer(self, transform)


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


def split_member(
    registry: Registry, root: MemoryValue, transforms: Sequence[Any]
) -> tuple[MemoryValue, list[Any]]:
    """The allocation that is viewed (a member, if it is a union) and the views of that."""
    rest = list(transforms)
    for number, transform in enumerate(rest):
        rule = registry.view_rule(type(transform))
        if rule is not None and rule.member is not None:
            return rule.member(root, transform), rest[number + 1 :]
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
