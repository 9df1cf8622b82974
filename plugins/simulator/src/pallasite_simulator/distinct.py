"""Distinct values of integers, of which a wave has hundreds: ``np.unique`` hashes them, or sorts
them and does much else, which takes several times as long."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.types import Array


def starts_of(ordered: Array) -> Array:
    """Where each value of a sorted array begins."""
    return _fresh(ordered).nonzero()[0]


def distinct(values: Array) -> Array:
    """The values of a one-dimensional array, sorted, each once."""
    ordered = np.sort(values)
    return ordered[_fresh(ordered)]


def distinct_inverse(values: Array) -> tuple[Array, Array]:
    """:func:`distinct`, and for each value its number among them."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    fresh = _fresh(ordered)
    inverse = np.empty(len(ordered), np.int64)
    inverse[order] = fresh.cumsum() - 1
    return ordered[fresh], inverse


def _fresh(ordered: Array) -> Array:
    """Which values of a sorted array differ from the one before."""
    fresh = np.empty(len(ordered), np.bool_)
    fresh[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return fresh
