"""Reductions of whole arrays of odd shapes in global memory, as matrices with suitable rows.

Dimensions that are reduced together, or kept together, are one: its extent leaves less padding, and
rows are multiples of wider vectors.

Rows of an odd number of 16-bit elements begin between two words of memory, so that lanes could only
load and combine elements one by one. But eight rows together are a whole number of vectors of 16
bytes: such a matrix is reduced over its rows as one of rows that are eight times as long, and then
what is left of these. The same holds for sixteen rows of bytes.
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

_THREADS = 128

_SINGLE = 1.5
"""Instructions that load an element and combine it with others."""

_SECOND = 70
"""Those around a second reduction."""


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
_REDUCTIONS = {*_COMBINATIONS, _lax.reduce_prod_p, _lax.argmax_p, _lax.argmin_p}


def join_odd_rows(jaxpr: Any, context: Any) -> Any:
    """The kernel with other reductions in the place of those of whole arrays in global memory,
    loaded for nothing else, of odd shapes; None if there are none."""
    del context
    uses = Counter(atom for one in jaxpr.eqns for atom in one.invars if _is_variable(atom))
    uses.update(atom for atom in jaxpr.outvars if _is_variable(atom))
    whole = set(jaxpr.invars)
    loads: dict[Any, Any] = {}
    stores = {
        one.invars[1]: one
        for one in jaxpr.eqns
        if one.primitive is _jax.swap_p
        and one.invars[0] in whole
        and _is_variable(one.invars[1])
        and not any(uses[variable] for variable in one.outvars)
        and is_whole(one, operands=2)
    }
    replaced: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive is _jax.get_p and equation.invars[0] in whole:
            loads[equation.outvars[0]] = equation
        elif equation.primitive in _REDUCTIONS and uses[equation.invars[0]] == 1:
            load = loads.get(equation.invars[0])
            if load is None or not is_whole(load):
                continue
            matrix = _matrix(equation)
            if matrix is not None:
                made = equation.outvars[0]
                store = stores.get(made) if uses[made] == 1 else None
                if store is not None:
                    made = _jax.new_var(made.aval.update(shape=(math.prod(made.aval.shape),)))
                    replaced[id(store)] = [_flat(store, made)]
                replaced[id(load)], body = _joined(load, equation, made, *matrix)
                replaced[id(equation)] = body
    if not replaced:
        return None
    equations = [new for one in jaxpr.eqns for new in replaced.get(id(one), [one])]
    return jaxpr.replace(eqns=equations)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def is_whole(access: Any, operands: int = 1) -> bool:
    """Whether a load or store moves all elements of an array in global memory as they are; its
    transforms follow so many operands."""
    aval = access.invars[0].aval
    space = getattr(aval, "memory_space", None)
    return bool(
        len(access.invars) == operands
        and getattr(space, "is_global", True)
        and access.outvars[0].aval.shape == aval.shape
        and all(
            isinstance(one, _jax.NDIndexer) and one.get_indexer_shape() == aval.shape
            for one in access.params["tree"].unflatten([])
        )
    )


def _flat(store: Any, value: Any) -> Any:
    """The store of an array in one dimension, to the same memory."""
    transforms = (
        _jax.ReshapeTransform(value.aval.shape),
        _jax.NDIndexer((_jax.Slice(0, value.aval.shape[0]),), value.aval.shape, ()),
    )
    leaves, tree = jax.tree.flatten(transforms)
    return store.replace(
        invars=[store.invars[0], value, *leaves],
        outvars=[_jax.new_var(value.aval)],
        params={**store.params, "tree": tree},
    )


def _matrix(equation: Any) -> tuple[int, int, int] | None:
    """Rows and elements of a row of what a reduction sees as a matrix, and which of the two
    dimensions it is over; None if it is to stay as it is."""
    (x,) = equation.invars
    axes = sorted(equation.params["axes"])
    shape, count = x.aval.shape, len(axes)
    if 0 in shape or not 0 < count < len(shape) or not any(n & (n - 1) for n in shape):
        return None
    if axes == list(range(count)):
        cut, axis = count, 0
    elif axes == list(range(len(shape) - count, len(shape))):
        cut, axis = len(shape) - count, 1
    else:
        return None
    if equation.primitive not in _COMBINATIONS and count > 1:
        return None  # Which element it is does not follow from its number in the matrix.
    rows, row = math.prod(shape[:cut]), math.prod(shape[cut:])
    if min(rows, row) == 1:
        return None
    together = _together(equation, rows, row, axis)
    return (rows, row, axis) if together > 1 or len(shape) > 2 else None


def _together(equation: Any, rows: int, row: int, axis: int) -> int:
    """How many rows are one, first; 1 where that is no less code."""
    dtype = equation.invars[0].aval.dtype
    bits = types.bit_width(dtype)
    if axis == 1 or equation.primitive not in _COMBINATIONS or bits not in (8, 16):
        return 1
    if row * bits % 32 == 0 or (equation.primitive is _lax.reduce_sum_p and types.is_float(dtype)):
        return 1  # Sums of floats are rounded once.
    share, columns = row / _THREADS, -(-row // _THREADS)

    def code(count: int) -> float:
        """Instructions of a lane, about."""
        vectors = rows // count * share * (1 + count * 8 / bits)
        return vectors + (count + rows % count) * columns * _SINGLE + _SECOND

    best = min((count for count in (2, 4, 8, 16) if 32 <= count * bits <= 128), key=code)
    return best if rows >= 2 * best and code(best) < 2 * rows * share else 1


def _joined(
    load: Any, equation: Any, made: Any, rows: int, row: int, axis: int
) -> tuple[list[Any], list[Any]]:
    """What takes the place of the load, and of the reduction, whose result is ``made``."""
    (reference,) = load.invars
    together = _together(equation, rows, row, axis)
    parts = [(0, rows, (rows, row))]
    if together > 1:
        most = rows // together * together
        parts = [(0, most, (most // together, row * together))]
        if most < rows:
            parts.append((most, rows - most, (rows - most, row)))
    moved = []
    for start, count, wanted in parts:
        slices = (_jax.Slice(start, count), _jax.Slice(0, row))
        transforms = [
            _jax.ReshapeTransform((rows, row)),
            _jax.NDIndexer(slices, (rows, row), ()),
        ]
        if wanted != (count, row):
            transforms.append(_jax.ReshapeTransform(wanted))
        leaves, tree = jax.tree.flatten(tuple(transforms))
        aval = load.outvars[0].aval.update(shape=wanted)
        moved.append(
            load.replace(
                invars=[reference, *leaves],
                outvars=[_jax.new_var(aval)],
                params={**load.params, "tree": tree},
            )
        )
    primitive = equation.primitive
    params = {**equation.params, "axes": (axis,)}
    result = made.aval.shape

    def function(main: Any, *rest: Any) -> Sequence[Any]:
        with _jax.location_of_equation(equation):
            found = primitive.bind(main, **params)
            if together > 1:
                found, *others = (
                    primitive.bind(layouts.layout_cast(one, _BY_COLUMNS), **params)
                    for one in (found.reshape(together, row), *rest)
                )
                for one in others:
                    found = _COMBINATIONS[primitive](found, one)
            return [found.reshape(result)]

    # In this jaxpr, not in a call: loads follow the layouts that reductions ask for.
    traced, _ = _jax.trace_to_jaxpr(function, [one.outvars[0].aval for one in moved])
    inner = getattr(traced, "jaxpr", traced)
    loads = [
        one.replace(outvars=[variable]) for one, variable in zip(moved, inner.invars, strict=True)
    ]
    (last,) = inner.outvars
    body = [
        one.replace(outvars=[made if v is last else v for v in one.outvars]) for one in inner.eqns
    ]
    return loads, body
