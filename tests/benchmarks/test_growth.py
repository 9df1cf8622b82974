"""The work of a compilation grows with the size of a kernel: steps are counted, not seconds."""

from __future__ import annotations

import collections

import compile_growth
import jax
import pytest

import pallasite
from pallasite.jaxpr_visitor import Visitor
from pallasite.lowering.inference import factor_costs, problem
from pallasite_std.inference import missing_barriers, missing_fences


class _Counts(collections.Counter):
    """Counts calls of functions that are the steps of loops over a kernel or its problem."""

    def of(self, monkeypatch, where, name, key):
        function = getattr(where, name)

        def counted(*args, **kwargs):
            self[key] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)


def counts(monkeypatch, kernel: str, size: int) -> _Counts:
    """The steps of compiling a kernel up to the end of lowering."""
    found = _Counts()
    make, _ = compile_growth.KERNELS[kernel]
    with monkeypatch.context() as patch:
        found.of(patch, factor_costs.KnownFactor, "cost", "costs asked for")
        for factor in (problem.Fixed, problem.Copies, problem.Relation, problem.Access):
            found.of(patch, factor, "cost", "costs computed")
        found.of(patch, Visitor, "run", "jaxprs visited")
        for module in (missing_barriers, missing_fences):
            found.of(patch, module._Search, "_event", "events followed")
        function, args = make(size)
        jax.clear_caches()
        with pallasite.config.scoped(cache=False):
            pallasite.compile_all(function, *args, target="sm_90a")
    return found


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [("pairs", (12, 48)), ("allocations", (8, 32)), ("loops", (4, 16)), ("branches", (4, 16))],
)
def test_steps_are_linear_in_the_size(monkeypatch, kernel, sizes):
    small, large = (counts(monkeypatch, kernel, size) for size in sizes)
    growth = sizes[1] / sizes[0]
    assert all(small[what] for what in ("jaxprs visited", "costs asked for", "costs computed"))
    for what, count in large.items():
        assert count <= 1.6 * growth * small[what] + 40, what


def test_the_power_of_the_size():
    row = compile_growth.Row("loops", [2, 4, 8], [{}, {"lower": 3.0}, {"lower": 12.0}])
    assert row.growth("lower") == pytest.approx(2.0)
    assert row.growth("infer layouts") is None
    assert compile_growth.Row("loops", [2], [{"lower": 3.0}]).growth("lower") is None
