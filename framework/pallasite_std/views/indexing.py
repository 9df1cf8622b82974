"""Integers and slices: ``ref.at[i, 0:8]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import InvalidTypeError, UnsupportedError, ViewRule
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import ScalarValue, View, start_of
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import Extent
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.memory.reference_types import MemoryReference, WindowStart
from pallasite_std.memory.references import index_reference
from pallasite_std.memory.regions import RegionBuilder


def _lower(ctx: RuleContext, reference: MemoryReference, transform: Any) -> MemoryReference:
    if transform.int_indexer_shape:
        raise UnsupportedError(
            f"primitive {ctx.primitive} cannot index a reference by an array",
            got=f"indices of shape {list(transform.int_indexer_shape)}",
            expected="scalars and slices",
        )
    for index in transform.indices:
        start = index.start if isinstance(index, _jax.Slice) else index
        if isinstance(start, RegisterArray) and not types.is_integer(start.dtype):
            raise InvalidTypeError(
                f"primitive {ctx.primitive} indexes a reference by a {start.dtype}",
                expected="an integer, or a slice that starts at one",
            )
    return index_reference(reference, transform.indices)


# Layout inference ---------------------------------------------------------------------------------


def narrow(view: View, indices: Sequence[Any]) -> None:
    """Narrows a view to integers and slices."""
    dim = 0
    free = [i for i, w in enumerate(view.window or ()) if not w.squeezed]
    for position, index in enumerate(indices):
        is_slice = isinstance(index, _jax.Slice)
        start = start_of(index)
        size = index.size if is_slice else 1
        stride = 1 if not is_slice or index.stride is None else int(index.stride)
        if is_slice and stride == 1 and start.known == 0 and size == view.layout.shape[dim]:
            dim += 1
            continue
        if stride != 1:
            _strided(view, dim, start, size, stride)
            dim += 1
            continue
        if view.window is not None:
            _narrow_window(view, free[position], dim, start, size, keep=is_slice)
        else:
            _narrow(view, dim, start, size, keep=is_slice)
        if is_slice:
            dim += 1


def _strided(view: View, dim: int, start: ScalarValue, size: int, stride: int) -> None:
    extents = view.layout.dims[dim]
    if len(extents) > 1 or start.known is None:
        raise UnsupportedError("a slice with a stride across tiles")
    step = extents[0].stride if extents else 1
    dims = [*view.layout.dims]
    dims[dim] = (Extent(size, step * stride),)
    view.layout = view.layout.with_dims(dims)
    view.move(start.known * step)
    view.window = None


def _narrow(view: View, dim: int, start: ScalarValue, size: int, *, keep: bool) -> None:
    part = (
        view.layout.slice(dim, start.known, size) if keep else view.layout.index(dim, start.known)
    )
    # Of a whole dimension there is but one slice.
    if start.known is None and size < view.layout.shape[dim]:
        view.certain = view.certain and start.divisor % part.alignment == 0
    view.layout = part.layout
    view.move(part.offset)
    for term in part.terms:
        whole = start.divisor
        places = whole // term.divisor if whole % term.divisor == 0 else 1
        if term.modulus is not None:
            places = math.gcd(places, term.modulus)
        view.move(places * term.stride)


def _narrow_window(
    view: View, axis: int, dim: int, start: ScalarValue, size: int, *, keep: bool
) -> None:
    assert view.window is not None
    step = math.prod(view.root.shape[axis + 1 :])
    dims = [*view.layout.dims]
    dims[dim] = (Extent(size, step),)
    if not keep:
        del dims[dim]
    view.layout = view.layout.with_dims(dims)
    view.move(start.divisor * step)
    old = view.window[axis]
    view.window[axis] = WindowStart(old.static + (start.known or 0), (), size, not keep)
    if start.known is None:
        view.divisors[axis] = math.gcd(view.divisors[axis], start.divisor)


def _infer(view: View, transform: Any) -> None:
    narrow(view, transform.indices)


def _region(builder: RegionBuilder, transform: Any) -> None:
    builder.index(transform.shape, transform.indices)


RULES = (ViewRule(transform=_jax.NDIndexer, lower=_lower, infer=_infer, region=_region),)
