"""Reductions of arrays whose rows are odd numbers of 16-bit elements, by vectors of several rows.

Such rows begin between two words of memory, so that lanes could only load and combine elements one
by one. But eight rows together are a whole number of vectors of 16 bytes: the array is reduced as
one of rows that are eight times as long, and then what is left of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import Layout
from pallasite_std.memory.relayout import rows_in_registers
from pallasite_std.primitives import layouts

_TOGETHER = 8
"""Rows of 16-bit elements that are whole vectors of 16 bytes, whatever their length."""

_LEAST = 10000
"""Elements of an array for which the second reduction is less than what the first saves."""


class _ByColumns(layouts.SomeLayout):
    """Lanes along the last dimension, the others in registers."""

    def resolve(self, shape: Sequence[int], dtype: Any) -> Layout:
        """See :class:`SomeLayout`."""
        return rows_in_registers(shape)


_BY_COLUMNS = _ByColumns()
_lax = _jax.lax_primitives
_COMBINATIONS = {
    _lax.reduce_max_p: jax.lax.max,
    _lax.reduce_min_p: jax.lax.min,
    _lax.reduce_sum_p: jax.lax.add,
    _lax.reduce_and_p: jax.lax.bitwise_and,
    _lax.reduce_or_p: jax.lax.bitwise_or,
    _lax.reduce_xor_p: jax.lax.bitwise_xor,
}


def join_odd_rows(jaxpr: Any, context: Any) -> Any:
    """The kernel with other reductions in the place of those over leading dimensions of whole
    arrays in global memory, loaded for nothing else, whose rows are odd; None if there are none."""
    del context
    uses = Counter(atom for one in jaxpr.eqns for atom in one.invars if _is_variable(atom))
    uses.update(atom for atom in jaxpr.outvars if _is_variable(atom))
    whole = set(jaxpr.invars)
    loads: dict[Any, Any] = {}
    replaced: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive is _jax.get_p and equation.invars[0] in whole:
            loads[equation.outvars[0]] = equation
        elif equation.primitive in _COMBINATIONS and uses[equation.invars[0]] == 1:
            load = loads.get(equation.invars[0])
            if load is not None and _is_whole(load) and _is_odd(equation):
                replaced[id(load)], replaced[id(equation)] = _joined(load, equation)
    if not replaced:
        return None
    equations = [new for one in jaxpr.eqns for new in replaced.get(id(one), [one])]
    return jaxpr.replace(eqns=equations)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _is_whole(load: Any) -> bool:
    """Whether a load takes all elements of an array in global memory as they are."""
    aval = load.invars[0].aval
    space = getattr(aval, "memory_space", None)
    return bool(
        len(load.invars) == 1
        and getattr(space, "is_global", True)
        and load.outvars[0].aval.shape == aval.shape
        and all(
            isinstance(one, _jax.NDIndexer) and one.get_indexer_shape() == aval.shape
            for one in load.params["tree"].unflatten([])
        )
    )


def _is_odd(equation: Any) -> bool:
    """Whether a reduction is over leading dimensions, of rows that are odd."""
    (x,) = equation.invars
    axes = sorted(equation.params["axes"])
    shape = x.aval.shape
    if axes != list(range(len(axes))) or types.bit_width(x.aval.dtype) != 16:
        return False
    if equation.primitive is _lax.reduce_sum_p and types.is_float(x.aval.dtype):
        return False  # Sums are rounded once.
    rows, row = math.prod(shape[: len(axes)]), math.prod(shape[len(axes) :])
    return bool(row % 2 and row > 1 and rows >= 2 * _TOGETHER and rows * row >= _LEAST)


def _joined(load: Any, equation: Any) -> tuple[list[Any], list[Any]]:
    """What takes the place of the load, and of the reduction."""
    (reference,) = load.invars
    axes = equation.params["axes"]
    shape = reference.aval.shape
    rows, row = math.prod(shape[: len(axes)]), math.prod(shape[len(axes) :])
    most = rows // _TOGETHER * _TOGETHER
    parts = [(0, most, (most // _TOGETHER, row * _TOGETHER))]
    if most < rows:
        parts.append((most, rows - most, (rows - most, row)))
    made = []
    for start, count, wanted in parts:
        slices = (_jax.Slice(start, count), _jax.Slice(0, row))
        transforms = (
            _jax.ReshapeTransform((rows, row)),
            _jax.NDIndexer(slices, (rows, row), ()),
            _jax.ReshapeTransform(wanted),
        )
        leaves, tree = jax.tree.flatten(transforms)
        aval = load.outvars[0].aval.update(shape=wanted)
        made.append(
            load.replace(
                invars=[reference, *leaves],
                outvars=[_jax.new_var(aval)],
                params={**load.params, "tree": tree},
            )
        )
    combine, primitive = _COMBINATIONS[equation.primitive], equation.primitive
    params = {**equation.params, "axes": (0,)}

    def function(main: Any, *rest: Any) -> Sequence[Any]:
        with _jax.location_of_equation(equation):
            left = primitive.bind(main, **params).reshape(_TOGETHER, row)
            found, *others = (
                primitive.bind(layouts.layout_cast(one, _BY_COLUMNS), **params)
                for one in (left, *rest)
            )
            for one in others:
                found = combine(found, one)
            return [found.reshape(shape[len(axes) :])]

    # In this jaxpr, not in a call: loads follow the layouts that reductions ask for.
    traced, _ = _jax.trace_to_jaxpr(function, [one.outvars[0].aval for one in made])
    inner = getattr(traced, "jaxpr", traced)
    loads = [
        one.replace(outvars=[variable]) for one, variable in zip(made, inner.invars, strict=True)
    ]
    (last,) = inner.outvars
    body = [
        one.replace(outvars=[equation.outvars[0] if v is last else v for v in one.outvars])
        for one in inner.eqns
    ]
    return loads, body
