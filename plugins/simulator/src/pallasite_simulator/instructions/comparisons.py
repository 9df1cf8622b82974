"""Comparisons of numbers as functions of arrays: PTX ISA 9.3 and 9.7.6."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from pallasite_simulator.instructions.float_conversions import between_formats
from pallasite_simulator.instructions.float_formats import F32, FORMATS
from pallasite_simulator.types import PtxType, Values

type Comparison = Callable[[Values, Values], Values]

_EQUALITIES: dict[str, Comparison] = {"eq": np.equal, "ne": np.not_equal}
_ORDERS: dict[str, Comparison] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _negated(comparison: Comparison) -> Comparison:
    return lambda a, b: np.logical_not(comparison(a, b))


def _different(a: Values, b: Values) -> Values:
    return (a < b) | (a > b)


def _numbers(a: Values, b: Values) -> Values:
    return (a == a) & (b == b)


_FLOAT: dict[str, Comparison] = {
    **_ORDERS,
    "eq": np.equal,
    "ne": _different,
    # The unordered ones are also true if an operand is NaN.
    "equ": _negated(_different),
    "neu": np.not_equal,
    "ltu": _negated(np.greater_equal),
    "leu": _negated(np.greater),
    "gtu": _negated(np.less_equal),
    "geu": _negated(np.less),
    "num": _numbers,
    "nan": _negated(_numbers),
}

NAMES = (*_FLOAT, *_UNSIGNED)
"""All comparisons."""


def allowed(kind: PtxType) -> tuple[str, ...]:
    """The comparisons that there are of a type."""
    if kind.kind in ("float", "packed"):
        return tuple(_FLOAT)
    if kind.kind == "bits":
        return tuple(_EQUALITIES)
    signed = (*_EQUALITIES, *_ORDERS)
    return signed if kind.kind == "signed" else (*signed, *_UNSIGNED)


@functools.cache
def comparison(name: str, kind: PtxType, ftz: bool = False) -> Comparison:
    """A comparison of arrays of a type's dtype, which may be scalars.

    Args:
      name: one of :func:`allowed`.
      kind: type of both operands.
      ftz: whether subnormal numbers (of f16 or f32) count as zeros.
    """
    if kind.kind not in ("float", "packed"):
        integers = {**_EQUALITIES, **_ORDERS}
        return integers[_UNSIGNED.get(name, name)]
    compare = _FLOAT[name]
    form = FORMATS[kind.name.removesuffix("x2")]
    if form.bits == 64 or (form is F32 and not ftz):
        return compare
    # f16 is flushed in its own range, so before it becomes f32.
    flags = frozenset({"ftz"} if ftz else ())
    flush = form.bits == 16 and ftz
    smallest = np.float32(2.0 ** (1 - form.bias))
    widen = between_formats(form, F32, "rn", frozenset() if flush else flags)

    def wide(values: Values) -> Values:
        number = widen(values).view(np.float32)
        return np.where(np.abs(number) < smallest, np.float32(0), number) if flush else number

    if kind.kind != "packed":
        return lambda a, b: compare(wide(a), wide(b))

    def compare_both(a: Values, b: Values) -> Values:
        halves = [np.atleast_1d(one).view(np.uint16) for one in np.broadcast_arrays(a, b)]
        result = compare(wide(halves[0]), wide(halves[1])).reshape(-1, 2)
        return result if a.ndim or b.ndim else result[0]

    return compare_both
