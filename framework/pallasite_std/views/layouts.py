"""Views that show the same elements in another shape: transposed, reshaped, tiled, swizzled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallasite.plugin import InvalidValueError, ViewRule
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import View
from pallasite.plugin.language import transforms as tr
from pallasite.plugin.layouts import MemoryLayout
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.regions import RegionBuilder

NO_SWIZZLE = 16
"""Bytes of the chunks that swizzles permute."""


def _of_layout(
    transform: type, view_of: Callable[[MemoryLayout, Any], MemoryLayout], **options: Any
) -> ViewRule:
    """A rule for a view that is a function of the memory layout."""

    def lower(ctx: RuleContext, reference: MemoryReference, one: Any) -> MemoryReference:
        del ctx
        return reference.with_layout(view_of(reference.layout, one))

    def infer(view: View, one: Any) -> None:
        view.change(view_of(view.layout, one))

    return ViewRule(transform=transform, **({"lower": lower, "infer": infer} | options))


def _transposed(layout: MemoryLayout, transform: Any) -> MemoryLayout:
    return layout.transpose(transform.permutation)


def _reshaped(layout: MemoryLayout, transform: Any) -> MemoryLayout:
    return layout.reshape(transform.shape)


def _tiled(layout: MemoryLayout, transform: Any) -> MemoryLayout:
    return layout.tile(transform.tiling)


def _untiled(layout: MemoryLayout, transform: Any) -> MemoryLayout:
    return layout.untile(transform.tiling)


def _transposed_region(builder: RegionBuilder, transform: Any) -> None:
    builder.transpose(transform, transform.permutation)


def _swizzled(
    transform: type, swizzle_of: Callable[[Any], int], *, physical: bool = False
) -> ViewRule:
    def view_of(layout: MemoryLayout, one: Any) -> MemoryLayout:
        return layout.with_swizzle(swizzle_of(one))

    def lower(ctx: RuleContext, reference: MemoryReference, one: Any) -> MemoryReference:
        del ctx
        if not reference.space.is_shared:
            raise InvalidValueError("only shared memory can be swizzled", got=str(reference.space))
        return reference.with_layout(view_of(reference.layout, one))

    return _of_layout(transform, view_of, lower=lower, physical=physical)


RULES = (
    _of_layout(_jax.TransposeTransform, _transposed, region=_transposed_region),
    _of_layout(_jax.ReshapeTransform, _reshaped),
    _of_layout(tr.TilingTransform, _tiled),
    _of_layout(tr.UntilingTransform, _untiled, physical=True),
    _swizzled(tr.SwizzleTransform, lambda transform: NO_SWIZZLE),
    _swizzled(tr.UnswizzleTransform, lambda transform: int(transform.swizzle), physical=True),
)
