"""Arrays of odd shapes that are made of several and stored: stores of these.

Where these lie one behind the other in memory, nothing has to bring them into one array before.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.jaxprs import RegionKind
from pallasite.plugin.language import MemorySpace, memory_space_of
from pallasite_std.passes.odd_rows import is_whole

_lax = _jax.lax_primitives
_SAME = (_lax.reshape_p, _lax.squeeze_p)

_THREADS = 128

_WORD = 32
"""Bits that are stored at once, at least, where many elements are."""

_FEW = 16
"""Accesses of a thread that are always less than what brings arrays into one."""


def store_parts(jaxpr: Any, context: Any) -> Any:
    """The kernel with several stores in the place of one of a concatenation; None if there are
    none."""
    uses = Counter(v for one in jaxpr.eqns for v in one.invars if _is_variable(v))
    uses.update(v for v in jaxpr.outvars if _is_variable(v))
    producers = {v: one for one in jaxpr.eqns for v in one.outvars}
    whole = {
        v
        for v in jaxpr.invars
        if isinstance(v.aval, _jax.AbstractRef) and memory_space_of(v.aval) is MemorySpace.GMEM
    }
    gone: set[int] = set()
    replaced: dict[int, list[Any]] = {}
    for store in jaxpr.eqns:
        if store.primitive is not _jax.swap_p or store.invars[0] not in whole:
            continue
        value = store.invars[1]
        if not _is_variable(value) or uses[value] != 1 or any(uses[v] for v in store.outvars):
            continue
        made = producers.get(value)
        if made is None or len(made.outvars) != 1 or not is_whole(store, operands=2):
            continue
        parts = _parts(value, producers, None, context.jaxprs)
        if parts is None or not _is_worth_it(*parts, store.invars[0].aval):
            continue
        gone.add(id(made))
        replaced[id(store)] = _stores(store, *parts)
    if not replaced:
        return None
    kept = [one for one in jaxpr.eqns if id(one) not in gone]
    return jaxpr.replace(eqns=[new for one in kept for new in replaced.get(id(one), [one])])


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _inside(equation: Any, carriers: Any) -> tuple[Any, dict[Any, Any]] | None:
    """What a call without effects runs, and what its inputs are outside."""
    if equation.primitive not in carriers.primitives or equation.effects:
        return None
    regions = list(carriers.regions(equation))
    if len(regions) != 1 or regions[0].kind is not RegionKind.CALL:
        return None
    (region,) = regions
    if region.scoped or region.states or region.per_warp or None in region.operands:
        return None
    operands = [equation.invars[number] for number in region.operands]
    return region.jaxpr, dict(zip(region.inputs, operands, strict=True))


def _parts(
    atom: Any, producers: dict[Any, Any], inputs: dict[Any, Any] | None, carriers: Any
) -> tuple[int, list[tuple[Any, tuple[int, ...]]]] | None:
    """Along which dimension a variable is made of others, and these: variables outside, each with
    the shape in which it is part of the result; ``inputs`` is None outside."""
    equation = producers.get(atom) if _is_variable(atom) else None
    if equation is None:
        return None
    if equation.primitive is _lax.concatenate_p:
        found = []
        for one in equation.invars:
            source = _source(one, producers, inputs, carriers)
            if source is None or not _is_variable(source):
                return None
            found.append((source, tuple(one.aval.shape)))
        return equation.params["dimension"], found
    inner = _inside(equation, carriers)
    if inner is None:
        return None
    jaxpr, own = inner
    sources = {v: _source(value, producers, inputs, carriers) for v, value in own.items()}
    outside = {variable: source for variable, source in sources.items() if source is not None}
    number = list(equation.outvars).index(atom)
    made = {v: one for one in jaxpr.eqns for v in one.outvars}
    return _parts(jaxpr.outvars[number], made, outside, carriers)


def _source(
    atom: Any, producers: dict[Any, Any], inputs: dict[Any, Any] | None, carriers: Any
) -> Any | None:
    """The variable outside whose elements, in this order, are those of another."""
    while _is_variable(atom):
        if inputs is None or atom in inputs:
            return atom if inputs is None else inputs[atom]
        equation = producers.get(atom)
        if equation is None or len(equation.outvars) != 1:
            return None
        if equation.primitive in _SAME and equation.params.get("dimensions") is None:
            atom = equation.invars[0]
            continue
        inner = _inside(equation, carriers)
        if inner is None:
            return None
        jaxpr, own = inner
        made = {v: one for one in jaxpr.eqns for v in one.outvars}
        atom = _source(jaxpr.outvars[0], made, own, carriers)
    return None


def _is_worth_it(dimension: int, parts: list[tuple[Any, tuple[int, ...]]], aval: Any) -> bool:
    bits = types.bit_width(aval.dtype)
    if types.is_bool(aval.dtype) or bits < 8 or math.prod(aval.shape[:dimension]) != 1:
        return False
    if not any(extent & (extent - 1) for _, shape in parts for extent in shape):
        return False
    before = 0
    for _, shape in parts:
        size = math.prod(shape)
        width = math.gcd(128 // bits, before)
        if size < 2 or (width * bits < _WORD and size > _FEW * width * _THREADS):
            return False
        before += size
    return True


def _stores(store: Any, dimension: int, parts: list[tuple[Any, tuple[int, ...]]]) -> list[Any]:
    reference = store.invars[0]
    equations = []
    before = 0
    for value, shape in parts:
        stored = value
        if tuple(value.aval.shape) != shape:

            def reshaped(x: Any, shape: tuple[int, ...] = shape) -> list[Any]:
                return [x.reshape(shape)]

            traced, _ = _jax.trace_to_jaxpr(reshaped, [value.aval])
            inner = getattr(traced, "jaxpr", traced)
            (change,) = inner.eqns
            stored = inner.outvars[0]
            equations.append(change.replace(invars=[value], source_info=store.source_info))
        slices = [_jax.Slice(0, extent) for extent in reference.aval.shape]
        slices[dimension] = _jax.Slice(before, shape[dimension])
        indexer = _jax.NDIndexer(tuple(slices), reference.aval.shape, ())
        leaves, tree = jax.tree.flatten((indexer,))
        equations.append(
            store.replace(
                invars=[reference, stored, *leaves],
                outvars=[_jax.new_var(stored.aval)],
                params={**store.params, "tree": tree},
            )
        )
        before += shape[dimension]
    return equations
