"""Small slices of arrays of odd shapes that were just loaded from global memory: loads of these.

Otherwise they would go through shared memory where they are not registers of the whole.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.language import MemorySpace, memory_space_of
from pallasite_std.memory.reduced_layouts import SHORT
from pallasite_std.memory.relayout import USUAL
from pallasite_std.passes.odd_rows import is_whole

_THREADS = 128

_SHARE = 3
"""How much larger than a slice, at least, the array is."""

_FEW = 4
"""Accesses of a thread to a slice that are always fewer than what else moves it."""

_FEW_PARTS = 12
"""The same, where nothing else than slices of the array is used."""


def load_slices(jaxpr: Any, context: Any) -> Any:
    """The kernel with loads in the place of slices; None if there are none."""
    spec = context.spec
    if spec is None or spec.input_output_aliases:
        return None
    reads = Counter(one.invars[0] for one in jaxpr.eqns if one.primitive is _jax.get_p)
    uses = Counter(v for one in jaxpr.eqns for v in one.invars if not isinstance(v, _jax.Literal))
    kept = {
        v
        for v in jaxpr.invars
        if isinstance(v.aval, _jax.AbstractRef)
        and memory_space_of(v.aval) is MemorySpace.GMEM
        and uses[v] == reads[v]
    }
    slices: Counter[Any] = Counter()
    sliced: Counter[Any] = Counter()  # How many elements these have.
    for one in jaxpr.eqns:
        if one.primitive is _jax.slice_p:
            slices[one.invars[0]] += 1
            sliced[one.invars[0]] += math.prod(one.outvars[0].aval.shape)
    loads: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    equations = []
    changed = False
    for equation in jaxpr.eqns:
        new = equation
        if equation.primitive is _jax.get_p and equation.invars[0] in kept and is_whole(equation):
            loads[equation.outvars[0]] = seen[equation.outvars[0]] = equation
        elif equation.primitive is _jax.slice_p:
            load = loads.get(equation.invars[0])
            whole = equation.invars[0]
            several = load is not None and uses[whole] > 1
            parts = slices[whole] == uses[whole] and sliced[whole] <= math.prod(whole.aval.shape)
            if several and _is_worth_it(equation, parts):
                new = _loaded(load, equation)
                changed = True
        elif any(not _is_plain(effect) for effect in equation.effects):
            loads.clear()  # What is in memory may be others' from here on.
        equations.append(new)
    if not changed:
        return None
    used = {v for one in equations for v in one.invars if not isinstance(v, _jax.Literal)}
    gone = {id(load) for variable, load in seen.items() if variable not in used}
    return jaxpr.replace(eqns=[one for one in equations if id(one) not in gone])


def _is_plain(effect: Any) -> bool:
    return isinstance(effect, _jax.ReadEffect | _jax.WriteEffect)


def _is_renamed(equation: Any) -> bool:
    """Whether it takes columns of rows so short that threads have whole ones, of which there are
    enough for the greater part of them: elements of the slice are registers of the array, in its
    layout."""
    whole, part = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    cut = [dim for dim, extent in enumerate(whole) if part[dim] != extent]
    many = bool(2 * math.prod(whole[:-1]) > _THREADS)
    return cut == [len(whole) - 1] and whole[-1] <= SHORT and many


def _is_worth_it(equation: Any, parts: bool) -> bool:
    """Whether to load a slice; ``parts``: nothing else of the array is used, nothing twice."""
    whole, part = equation.invars[0].aval, equation.outvars[0].aval
    bits = 8 if types.is_bool(whole.dtype) else types.bit_width(whole.dtype)
    size: int = math.prod(part.shape)
    if bits < 8 or not size or not any(extent & (extent - 1) for extent in whole.shape):
        return False
    if math.prod(whole.shape) * bits // 8 > USUAL:
        return True  # It cannot go through shared memory.
    if _is_renamed(equation):
        return False
    if not parts and _SHARE * size > math.prod(whole.shape):
        return False
    least = _FEW_PARTS if parts else _FEW
    few: bool = _accesses(equation, bits) <= max(least, 2 * -(-size * bits // (128 * _THREADS)))
    return few


def _accesses(equation: Any, bits: int) -> int:
    """Of each thread to the slice in global memory, at least."""
    shape, part = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    starts = equation.params["start_indices"]
    strides = equation.params["strides"] or (1,) * len(shape)
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(start * step for start, step in zip(starts, steps, strict=True))
    run, dim = 1, len(shape) - 1
    while dim >= 0 and part[dim] == shape[dim]:
        run, dim = run * shape[dim], dim - 1
    if dim >= 0 and strides[dim] == 1:
        run *= part[dim]
    outer = [steps[d] * strides[d] for d in range(max(dim, 0)) if part[d] > 1]
    width = math.gcd(128 // bits, run, first, *outer)
    count: int = -(-math.prod(part) // (width * _THREADS))
    return count


def _loaded(load: Any, equation: Any) -> Any:
    aval = equation.invars[0].aval
    starts = equation.params["start_indices"]
    strides = equation.params["strides"] or (1,) * len(aval.shape)
    slices = tuple(
        _jax.Slice(int(start), int(size), int(step))
        for start, size, step in zip(starts, equation.outvars[0].aval.shape, strides, strict=True)
    )
    leaves, tree = jax.tree.flatten((_jax.NDIndexer(slices, aval.shape, ()),))
    return load.replace(
        invars=[load.invars[0], *leaves],
        outvars=equation.outvars,
        params={**load.params, "tree": tree},
        source_info=equation.source_info,
    )
