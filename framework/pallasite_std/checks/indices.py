"""The check of indices: a block, in an iteration, that reaches beyond an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pallasite.plugin import InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, memory_space_of
from pallasite_std.barriers.base import is_barrier
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import Span, Use
from pallasite_std.checks.scalars import Places
from pallasite_std.primitives import arrays
from pallasite_std.primitives.copy_options import OOBFillMode

_ELEMENTWISE = frozenset(
    {_jax.get_p, _jax.swap_p, _jax.addupdate_p, arrays.load_p, arrays.atomic_p}
)
"""Accesses of global memory without a mask."""


def check_indices(uses: Iterable[Use], places: Places) -> None:
    """Raises if an index certainly leaves an array for some block.

    Raises:
      InvalidValueError: at the line of the access.
    """
    for use in uses:
        if not use.certain:
            continue
        # What tensor maps read outside of an array are zeros; what they write is dropped.
        elementwise = use.equation.primitive in _ELEMENTWISE
        promised = use.equation.params.get("oob_mode") is OOBFillMode.PROMISE_IN_BOUNDS
        if memory_space_of(use.memory.aval) is GMEM and not (elementwise or promised):
            continue
        for spans in use.indexers:
            for dimension, span in enumerate(spans):
                _check(use, dimension, span, places)


def _check(use: Use, dimension: int, span: Span, places: Places) -> None:
    start = span.start
    if type(start) is int:
        low = high = start
    else:
        if start is None or any(one in places.splits.parts for one in use.narrowed):
            return
        ends = bounds_where(start, use)
        if ends is None:
            return
        low, high = ends
    reach = (span.size - 1) * span.stride
    if span.size == 0 or (low >= 0 and high + reach < span.extent):
        return
    elsewhere = isinstance(start, v.Range) and (use.narrowed or not start.reached)
    if elsewhere and low < span.extent and high >= 0:
        return
    above = high + reach >= span.extent
    first = high if above else low
    last = first + (span.size - 1) * span.stride
    taken = f"index {first}" if last == first else f"indices {first} to {last}"
    where = _position(start, use, highest=above)
    if is_barrier(use.memory.aval):
        raise InvalidValueError(
            f"barrier {first} of {span.extent}{where}",
            expected=f"an index from 0 to {span.extent - span.size}",
            location=use.location,
        )
    array = tuple(one.extent for one in next(s for s in use.indexers if span in s))
    hint = "fewer blocks or iterations, pl.when around the access, or a mask"
    if isinstance(start, int) and -span.extent <= start < 0 and span.size == 1:
        hint = f"{span.extent + start}: negative indices do not count from the end"
    raise InvalidValueError(
        f"this access leaves the array: dimension {dimension} has {span.extent}"
        f" {'element' if span.extent == 1 else 'elements'}",
        got=f"{taken}{where} of an array of shape {array}",
        expected=f"indices from 0 to {span.extent - 1}",
        hint=hint,
        location=use.location,
    )


def bounds_where(value: Any, use: Use) -> tuple[int, int] | None:
    """The least and the greatest value where a use takes place."""
    if not isinstance(value, v.Form) or not use.narrowed:
        return v.bounds(value)
    low = high = value.constant
    for symbol, c in value.terms:
        least, most = use.narrowed.get(symbol, (0, symbol.extent - 1))
        low += min(c * least, c * most)
        high += max(c * least, c * most)
    return low, high


def _position(value: Any, use: Use, *, highest: bool) -> str:
    """Where a form has its greatest or least value, for messages."""
    if not isinstance(value, v.Form):
        return ""
    parts = []
    for symbol, c in value.terms:
        least, most = use.narrowed.get(symbol, (0, symbol.extent - 1))
        parts.append(f"{symbol.name} = {most if (c > 0) == highest else least}")
    return " where " + ", ".join(parts)
