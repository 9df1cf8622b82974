"""The arithmetic of forms and ranges, against enumeration."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from pallasite_std.checks import grids
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import Span

EXTENTS = (4, 6)


def expressions(depth: int):
    leaf = st.one_of(st.sampled_from(["i", "j"]), st.integers(-3, 9))
    if depth == 0:
        return leaf
    inner = expressions(depth - 1)
    return st.one_of(
        leaf,
        st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 6)),
    )


FUNCTIONS = {
    "+": v.add,
    "-": lambda a, b: v.add(a, b, -1),
    "*": v.multiply,
    "min": v.minimum,
    "max": v.maximum,
}
NUMBERS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "min": min,
    "max": max,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def abstract(expression, symbols, splits):
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return symbols[expression]
    name, a, b = expression
    left, right = (abstract(one, symbols, splits) for one in (a, b))
    if name in ("//", "%"):
        return splits.divide(left, right)[name == "%"]
    return FUNCTIONS[name](left, right)


def concrete(expression, place):
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return place[expression]
    name, a, b = expression
    return NUMBERS[name](concrete(a, place), concrete(b, place))


@hypothesis.given(expressions(3), expressions(2))
@hypothesis.settings(max_examples=300, deadline=None)
def test_bounds_and_comparisons(first, second):
    splits = v.Splits()
    symbols = {n: v.symbol(e, n, blocks=True) for n, e in zip("ij", EXTENTS, strict=True)}
    places = [dict(zip("ij", p, strict=True)) for p in itertools.product(*map(range, EXTENTS))]
    one, other = abstract(first, symbols, splits), abstract(second, symbols, splits)
    numbers = [(concrete(first, p), concrete(second, p)) for p in places]
    ends = v.bounds(splits.expand(one))
    if ends is not None:
        low, high = min(a for a, _ in numbers), max(a for a, _ in numbers)
        assert ends[0] <= low and high <= ends[1]
        if v.are_reached(one) or isinstance(one, int):
            assert ends == (low, high)
    less, equal = v.less(one, other), v.equal(one, other)
    assert less in (None, int(numbers[0][0] < numbers[0][1])) or less is None
    if less is not None:
        assert all((a < b) == less for a, b in numbers)
    if equal is not None:
        assert all((a == b) == equal for a, b in numbers)


@hypothesis.given(
    st.lists(st.tuples(st.integers(-70, 70), st.integers(1, 5)), max_size=3),
    st.integers(-8, 20),
    st.integers(1, 24),
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_what_windows_cover(terms, constant, size):
    symbols = [v.Symbol(extent, f"s{k}", blocks=True) for k, (_, extent) in enumerate(terms)]
    form = v.make_form(constant, dict(zip(symbols, (c for c, _ in terms), strict=True)))
    starts = [
        constant + sum(c * p for (c, _), p in zip(terms, place, strict=True))
        for place in itertools.product(*(range(extent) for _, extent in terms))
    ]
    extent = max(1, max(starts) + size)
    written = np.zeros(extent, int)
    for start in starts:
        written[max(start, 0) : max(start + size, 0)] += 1
    span = Span(form, size, 1, extent, kept=True)
    if isinstance(form, v.Form):
        tiled = grids._tiling(form, span, {})
        exact = grids._starts(form, {})
        assert sorted(set(starts)) == exact.tolist()
        if tiled is not None:
            low, high, _ = tiled
            assert np.array_equal(
                written > 0, (np.arange(extent) >= low) & (np.arange(extent) < high)
            )
        use = type("Use", (), {"narrowed": {}})()
        if grids._overlap(form, span, use):
            assert written.max() > 1
