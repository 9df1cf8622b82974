"""Concatenations of slices, such as rolled arrays: one movement in the place of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.jaxprs import with_jaxprs
from pallasite_std.memory.relayout import USUAL
from pallasite_std.primitives.slices import Slice, joined_slices_p

_BESIDE = 8192
"""Bytes for part of the result beside an array of the usual size."""


def join_slices(jaxpr: Any, context: Any) -> Any:
    """The kernel with one equation for concatenations of slices of arrays of odd shapes; None if
    there are none."""
    new = _joined(jaxpr, context.jaxprs)
    return None if new is jaxpr else new


def _joined(jaxpr: Any, carriers: Any) -> Any:
    slices = {one.outvars[0]: one for one in jaxpr.eqns if one.primitive is _jax.slice_p}
    equations = []
    changed = False
    for equation in jaxpr.eqns:
        new = equation
        if equation.primitive in carriers.primitives:
            new = _inside(equation, carriers)
        elif equation.primitive is _jax.lax_primitives.concatenate_p:
            new = _of_slices(equation, slices)
        equations.append(new)
        changed |= new is not equation
    if not changed:
        return jaxpr
    uses = Counter(atom for one in equations for atom in one.invars if _is_variable(atom))
    uses.update(atom for atom in jaxpr.outvars if _is_variable(atom))
    kept = [one for one in equations if one.outvars[:1] == [] or not _is_unused(one, uses)]
    return jaxpr.replace(eqns=kept)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _is_unused(equation: Any, uses: Counter[Any]) -> bool:
    return equation.primitive is _jax.slice_p and not uses[equation.outvars[0]]


def _inside(equation: Any, carriers: Any) -> Any:
    regions = carriers.regions(equation)
    # Single warps have no scratch memory to move arrays through.
    jaxprs = [
        region.jaxpr if region.per_warp else _joined(region.jaxpr, carriers) for region in regions
    ]
    if all(new is old.jaxpr for new, old in zip(jaxprs, regions, strict=True)):
        return equation
    return equation.replace(params=with_jaxprs(carriers, equation, regions, jaxprs))


def _of_slices(equation: Any, slices: dict[Any, Any]) -> Any:
    """A concatenation, or what takes its place."""
    dimension = equation.params["dimension"]
    operands: list[Any] = []
    parts: list[Slice] = []
    found = 0
    for atom in equation.invars:
        own = None if not _is_variable(atom) else _bounds(slices.get(atom), dimension)
        source = atom
        start, size = 0, atom.aval.shape[dimension]
        if own is not None:
            source, start = slices[atom].invars[0], own
            found += 1
        if source not in operands:
            operands.append(source)
        parts.append(Slice(operands.index(source), start, size))
    if not found or not _is_worth_it([atom.aval for atom in operands]):
        return equation
    return equation.replace(
        primitive=joined_slices_p,
        invars=operands,
        params={"parts": tuple(parts), "dimension": dimension},
    )


def _bounds(equation: Any, dimension: int) -> int | None:
    """Where a slice begins that cuts an array along one dimension only."""
    if equation is None or not _is_variable(equation.invars[0]):
        return None
    starts, strides = equation.params["start_indices"], equation.params["strides"]
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    others = all(
        n == m for d, (n, m) in enumerate(zip(before, after, strict=True)) if d != dimension
    )
    if not others or (strides is not None and any(step != 1 for step in strides)):
        return None
    return int(starts[dimension])


def _is_worth_it(avals: Sequence[Any]) -> bool:
    bits = types.bit_width(avals[0].dtype)
    if bits < 8 or any(math.prod(aval.shape) < 2 for aval in avals):
        return False
    if sum(math.prod(aval.shape) for aval in avals) * bits // 8 + _BESIDE > USUAL:
        return False
    return any(extent & (extent - 1) for aval in avals for extent in aval.shape)
