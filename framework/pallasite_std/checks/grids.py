"""The check of the grid: outputs that it covers in part, or twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import Span, Use
from pallasite_std.checks.scalars import Places
from pallasite_std.primitives import copies

_MOST_STARTS = 1 << 16
_MOST_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Window:
    """What one equation writes of an output.

    Attributes:
      use: the equation.
      spans: of indices, one for each dimension of the array.
      exact: whether it is written for certain, by a plain store or copy.
    """

    use: Use
    spans: tuple[Span, ...]
    exact: bool


def windows_of(
    uses: Sequence[Use], opaque: set[Any], outputs: Mapping[int, Any]
) -> dict[int, list[Window]]:
    """What is written of each output, by number; without outputs of which that is not known."""
    found: dict[int, list[Window]] = {
        number: [] for number, variable in outputs.items() if variable not in opaque
    }
    for use in uses:
        number = use.memory.number
        if number is None or number not in found or use.equation.primitive is _jax.get_p:
            continue
        window = _window(use)
        if window is None:
            del found[number]
        else:
            found[number].append(window)
    return found


def _window(use: Use) -> Window | None:
    primitive, params = use.equation.primitive, use.equation.params
    if primitive is copies.copy_smem_to_gmem_p:
        arguments = params["args_tree"].unflatten(use.equation.invars)
        exact = params["reduction_op"] is None and arguments[2] is None
    elif primitive is _jax.swap_p:
        exact = True
    else:
        return None
    spans = _composed(use)
    return None if spans is None else Window(use, spans, exact and use.certain)


def _composed(use: Use) -> tuple[Span, ...] | None:
    """The spans of an array that several indices, one after the other, select."""
    shape = use.memory.aval.shape
    spans = [Span(0, extent, 1, extent, kept=True) for extent in shape]
    if not use.plain:
        return None
    for indexer in use.indexers:
        kept = [position for position, span in enumerate(spans) if span.kept]
        if len(kept) != len(indexer):
            return None
        for position, inner in zip(kept, indexer, strict=True):
            outer = spans[position]
            start = v.add(outer.start, v.multiply(inner.start, outer.stride))
            stride = outer.stride * inner.stride
            spans[position] = Span(start, inner.size, stride, outer.extent, inner.kept)
    return tuple(spans)


# In part ------------------------------------------------------------------------------------------


def uncovered(windows: Sequence[Window], shape: Sequence[int], places: Places) -> Any:
    """A dimension, and the first of its indices that no block writes; None if there is none, or if
    that is not known."""
    if not windows:
        return None
    for dimension, extent in enumerate(shape):
        index = _first_uncovered([w.spans[dimension] for w in windows], windows, extent, places)
        if index is not None:
            return dimension, index
    return None


def _first_uncovered(
    spans: Sequence[Span], windows: Sequence[Window], extent: int, places: Places
) -> int | None:
    if extent > _MOST_ELEMENTS:
        return None
    parts = []
    for span, window in zip(spans, windows, strict=True):
        start = places.splits.expand(span.start)
        ends = v.bounds(start)
        if ends is None:
            return None
        narrowed = window.use.narrowed
        if isinstance(start, v.Form):
            if any(one in places.splits.parts for one in narrowed):
                narrowed = {}
            tiled = _tiling(start, span, narrowed)
            if tiled is not None:
                parts.append(tiled)
                continue
            starts = _starts(start, narrowed)
            if starts is None:
                return None
            parts.extend((int(s), int(s) + span.size, span.stride) for s in starts)
        elif isinstance(start, int):
            parts.append((start, start + (span.size - 1) * span.stride + 1, span.stride))
        else:
            parts.append((ends[0], ends[1] + (span.size - 1) * span.stride + 1, 1))
    if any(low <= 0 and high >= extent and stride == 1 for low, high, stride in parts):
        return None
    covered = np.zeros(extent, bool)
    for low, high, stride in parts:
        begin = low if low >= 0 else low + -(low // stride) * stride
        covered[begin : max(high, 0) : stride] = True
    return None if covered.all() else int(np.argmin(covered))


def _effective(
    form: v.Form, narrowed: Mapping[v.Symbol, tuple[int, int]]
) -> tuple[int, list[tuple[int, v.Symbol, int]]]:
    """The least value of a form, and for each symbol with more than one value: the distance of
    neighbouring values, the symbol, and how many values."""
    low, steps = form.constant, []
    for symbol, c in form.terms:
        least, most = narrowed.get(symbol, (0, symbol.extent - 1))
        low += min(c * least, c * most)
        if most > least:
            steps.append((abs(c), symbol, most - least + 1))
    return low, sorted(steps, key=lambda step: step[0])


def _tiling(
    form: v.Form, span: Span, narrowed: Mapping[v.Symbol, tuple[int, int]]
) -> tuple[int, int, int] | None:
    """What is covered, if that is one interval."""
    if span.stride != 1:
        return None
    low, steps = _effective(form, narrowed)
    length = span.size
    for distance, _, count in steps:
        if distance > length:
            return None
        length += distance * (count - 1)
    return low, low + length, 1


def _starts(form: v.Form, narrowed: Mapping[v.Symbol, tuple[int, int]]) -> Any:
    low, steps = _effective(form, narrowed)
    if math.prod(count for _, _, count in steps) > _MOST_STARTS:
        return None
    starts = np.array([low])
    for distance, _, count in steps:
        starts = np.unique((starts[:, None] + distance * np.arange(count)).ravel())
    return starts


# Twice --------------------------------------------------------------------------------------------


def repeated(window: Window, places: Places) -> v.Symbol | None:
    """A symbol of blocks along which the windows of different blocks have elements in common."""
    use = window.use
    if not window.exact or any(one in places.splits.parts for one in use.narrowed):
        return None
    forms = []
    for span in window.spans:
        start = places.splits.expand(span.start)
        if not isinstance(start, int | v.Form) or span.stride != 1:
            return None
        forms.append(start)
    used: dict[v.Symbol, list[int]] = {}
    for dimension, form in enumerate(forms):
        for symbol, _ in form.terms if isinstance(form, v.Form) else ():
            used.setdefault(symbol, []).append(dimension)
    for axis in places.symbols():
        for symbol in _parts(axis, places):
            least, most = use.narrowed.get(symbol, (0, symbol.extent - 1))
            if symbol not in used and most > least:
                return symbol
    for dimension, form in enumerate(forms):
        if isinstance(form, v.Form):
            found = _overlap(form, window.spans[dimension], use)
            if found and all(used[symbol] == [dimension] for symbol in found):
                return found[-1]
    return None


def _parts(symbol: v.Symbol, places: Places) -> list[v.Symbol]:
    if symbol not in places.splits.parts:
        return [symbol]
    _, quotient, remainder = places.splits.parts[symbol]
    return [*_parts(quotient, places), *_parts(remainder, places)]


def _overlap(form: v.Form, span: Span, use: Use) -> list[v.Symbol]:
    """Symbols by which two windows are equal in part, the last one of blocks; none if that is not
    known."""
    low, steps = _effective(form, use.narrowed)
    length, symbols = span.size, []
    for distance, symbol, count in steps:
        symbols.append(symbol)
        if distance > length:
            return []
        if distance < length:
            inside = 0 <= low + distance < span.extent
            return symbols if symbol.blocks and inside else []
        length *= count
    return []
