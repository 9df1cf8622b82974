"""A view: every other row of an array, in memory of any space that has rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallasite import gpu as plgpu
from pallasite.plugin import UnsupportedError, ViewRule, jax_internals
from pallasite.plugin.language import as_transformed
from pallasite.plugin.layouts import Extent


@dataclasses.dataclass(frozen=True)
class EveryOtherRow(plgpu.Transform):
    """Every other row, from row ``first`` on; 0 or 1."""

    first: int

    def transform_type(self, x: Any) -> Any:
        """Half as many rows."""
        if isinstance(x, jax.core.ShapedArray):
            return x.update(shape=(x.shape[0] // 2, *x.shape[1:]))
        return x.update(inner_aval=self.transform_type(x.inner_aval))


jax.tree_util.register_dataclass(EveryOtherRow, data_fields=(), meta_fields=("first",))


def every_other_row(ref: Any, first: int = 0) -> Any:
    """A view of every other row of a reference, the rows of which are even in number."""
    base = as_transformed(ref)
    return jax_internals.TransformedRef(base.ref, (*base.transforms, EveryOtherRow(first)))


def _halved(layout, first):
    if len(layout.dims[0]) != 1:
        raise UnsupportedError("every other row of tiled memory", got=layout)
    ((rows,), *others) = layout.dims
    halved = layout.with_dims([(Extent(rows.size // 2, 2 * rows.stride),), *others])
    return halved, first * rows.stride


def _lower(ctx, reference, transform):
    layout, offset = _halved(reference.layout, transform.first)
    return dataclasses.replace(reference, offset=reference.offset + offset).with_layout(layout)


def _infer(view, transform):
    layout, offset = _halved(view.layout, transform.first)
    view.change(layout)
    view.move(offset)


EVERY_OTHER_ROW = ViewRule(transform=EveryOtherRow, lower=_lower, infer=_infer)
