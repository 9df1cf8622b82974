"""Arrays that are loaded from global memory only to be stored there in another order.

Slices, concatenations, repetitions and transpositions of arrays of odd shapes move elements between
registers, which takes shared memory and code for each register. Where that is all that happens to
an array between its load and its store, elements are copied instead: one equation takes the place
of the load, of what brings them into order, and of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import InvalidValueError, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.jaxprs import RegionKind
from pallasite.plugin.language import MemorySpace, memory_space_of
from pallasite.plugin.layouts import BANKS, LANES, WARPS, Extent, MemoryLayout, row_major
from pallasite_std.memory.movements import direct, loop_code, portions
from pallasite_std.memory.relayout import USUAL
from pallasite_std.passes.odd_rows import is_whole
from pallasite_std.primitives.movements import Movement, Rows, Strip, View, move_elements_p

_lax = _jax.lax_primitives

_SLACK = 8192
"""Bytes of shared memory that are left for barriers and alignment."""

_UNIT = 64
"""Bits of what is moved as one, at most."""

_WIDE = 128
"""Bits of the widest access."""

_THREADS = LANES * WARPS

_FEW = 4 * 128
"""Elements, at most, that are transposed without shared memory."""

_NEAR = 4
"""Elements from one that is loaded to the next, at most, if caches make up for those between."""

_SHORT = 32
"""Elements of a row, at most, of which quotients say where they are from."""

_SHORT_CODE = 30
"""Instructions, at most, of copies that are as short as those of arrays that lie as they should."""

_CONFLICTS = 4
"""Accesses of a warp to one bank, at most, when arrays are transposed."""


def move_directly(jaxpr: Any, context: Any) -> Any:
    """The kernel with copies in the place of arrays that are loaded and stored in another order;
    None if there are none."""
    kernel = _Kernel(jaxpr, context)
    replaced: dict[int, Any] = {}
    for number, equation in enumerate(jaxpr.eqns):
        if equation.primitive is _jax.swap_p:
            found = kernel.copy_of(number)
            if found is not None:
                copy, gone = found
                replaced |= dict.fromkeys(gone)
                replaced[id(equation)] = copy
    if not replaced:
        return None
    equations = [replaced.get(id(one), one) for one in jaxpr.eqns]
    return jaxpr.replace(eqns=[one for one in equations if one is not None])


@dataclasses.dataclass(frozen=True)
class _Array:
    """What an array is: elements of one in global memory.

    Attributes:
      reference: the variable of that one.
      layout: where in it the elements are.
      offset: of the first.
      flat: whether the layout is that of the flattened array.
      stepped: whether elements between others are left out.
    """

    reference: Any
    layout: MemoryLayout
    offset: int = 0
    flat: bool = False
    stepped: bool = False


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Arrays one beside the other."""

    references: tuple[Any, ...]
    rows: Rows


type _Value = _Array | _Joined


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
    """A jaxpr whose equations are looked at: which of them makes a variable, and what its inputs
    are outside."""

    producers: dict[Any, Any]
    inputs: dict[Any, Any]
    outside: _Scope | None


class _Kernel:
    """A kernel's equations, and which of its references are only read."""

    def __init__(self, jaxpr: Any, context: Any):
        self.jaxpr, self.context = jaxpr, context
        self.carriers = context.jaxprs
        self.uses = Counter(v for one in jaxpr.eqns for v in one.invars if _is_variable(v))
        self.uses.update(v for v in jaxpr.outvars if _is_variable(v))
        self.reads: Counter[Any] = Counter(
            one.invars[0] for one in jaxpr.eqns if one.primitive is _jax.get_p
        )
        self.whole = {
            v
            for v in jaxpr.invars
            if isinstance(v.aval, _jax.AbstractRef) and memory_space_of(v.aval) is MemorySpace.GMEM
        }
        self.scope = _Scope({v: one for one in jaxpr.eqns for v in one.outvars}, {}, None)
        self.room = USUAL - _SLACK - self._shared()
        self.aliased = context.spec is None or bool(context.spec.input_output_aliases)

    def _shared(self) -> int:
        """Bytes of shared memory that the kernel has anyway; more than there are if that depends
        on where it is."""
        if any(region.scoped for one in self.jaxpr.eqns for region in self._regions(one)):
            return USUAL
        total = 0
        for variable in self.jaxpr.invars:
            aval = variable.aval
            if variable not in self.whole and isinstance(aval, _jax.AbstractRef):
                bits = 64
                if isinstance(aval.dtype, np.dtype):
                    bits = types.bit_width(aval.dtype)
                total += math.prod(aval.shape) * bits // 8
        return total

    def _regions(self, equation: Any) -> Sequence[Any]:
        if equation.primitive not in self.carriers.primitives:
            return ()
        return list(self.carriers.regions(equation))

    def copy_of(self, number: int) -> tuple[Any, list[int]] | None:
        """The equation that takes the place of a store, and the others that are not needed any
        more, by identity; None if the store stays."""
        store = self.jaxpr.eqns[number]
        target, value = store.invars[:2]
        if target not in self.whole or self.uses[target] != 1 or not _is_variable(value):
            return None
        if any(self.uses[v] for v in store.outvars) or not is_whole(store, operands=2):
            return None
        seen: dict[int, Any] = {}
        found = self._value(value, self.scope, seen)
        if found is None or not self._can_go(list(seen.values()), number, value):
            return None
        references = found.references if isinstance(found, _Joined) else (found.reference,)
        bits = _bits(target.aval)
        movement = _movement(found)
        if movement is None or not self._is_worth_it(movement, found, references, target.aval):
            return None
        count = math.gcd(movement.run, _UNIT // bits)
        effects = {_effect(store, _jax.WriteEffect, target, 0)} | {
            _effect(self._load(one), _jax.ReadEffect, one, place)
            for place, one in enumerate(references, start=1)
        }
        copy = store.replace(
            primitive=move_elements_p,
            invars=[target, *references],
            outvars=[],
            params={
                "movement": movement.of_units(count),
                "bits": bits * count,
                "room": self.room,
            },
            effects=effects,
        )
        return copy, list(seen)

    def _load(self, reference: Any) -> Any:
        return next(
            one
            for one in self.jaxpr.eqns
            if one.primitive is _jax.get_p and one.invars[0] is reference
        )

    def _can_go(self, equations: Sequence[Any], last: int, stored: Any) -> bool:
        """Whether equations serve one store only, and loads may be made where that is."""
        inside = Counter(v for one in equations for v in one.invars if _is_variable(v))
        inside[stored] += 1
        if any(self.uses[v] != inside[v] for one in equations for v in one.outvars):
            return False
        own = {id(one) for one in equations}
        places = [n for n, one in enumerate(self.jaxpr.eqns) if id(one) in own]
        if self.aliased:
            between = self.jaxpr.eqns[min(places) : last]
            return not any(one.effects for one in between if id(one) not in own)
        return all(
            effect_is_access(effect)
            for one in self.jaxpr.eqns[min(places) : last]
            for effect in one.effects
        )

    # What values are.

    def _value(self, atom: Any, scope: _Scope, seen: dict[int, Any]) -> _Value | None:
        if not _is_variable(atom):
            return None
        if atom in scope.inputs:
            assert scope.outside is not None
            return self._value(scope.inputs[atom], scope.outside, seen)
        equation = scope.producers.get(atom)
        if equation is None:
            return None
        if scope is self.scope:
            seen[id(equation)] = equation
        if equation.primitive is _jax.get_p:
            return self._loaded(equation) if scope is self.scope else None
        regions = self._regions(equation)
        if regions:
            return self._returned(atom, equation, regions, scope, seen)
        if len(equation.outvars) != 1:
            return None
        if equation.primitive is _lax.concatenate_p:
            parts = [self._value(one, scope, seen) for one in equation.invars]
            return _joined(parts, equation)
        rule = _RULES.get(equation.primitive)
        if rule is None or len(equation.invars) != 1:
            return None
        operand = self._value(equation.invars[0], scope, seen)
        if isinstance(operand, _Array) and operand.flat and rule not in (_reshaped, _same):
            return None
        if isinstance(operand, _Joined):
            return operand if equation.primitive in _SAME_ORDER else None
        return None if operand is None else rule(operand, equation)

    def _loaded(self, equation: Any) -> _Array | None:
        reference = equation.invars[0]
        if reference not in self.whole or self.uses[reference] != self.reads[reference]:
            return None
        aval = reference.aval
        if not is_whole(equation) or 0 in aval.shape or not isinstance(aval.dtype, np.dtype):
            return None
        bits = _bits(aval)
        return _Array(reference, row_major(aval.shape, bits)) if bits >= 8 else None

    def _returned(
        self, atom: Any, equation: Any, regions: Sequence[Any], scope: _Scope, seen: dict[int, Any]
    ) -> _Value | None:
        """What a call returns."""
        (region, *others) = regions
        if others or region.kind is not RegionKind.CALL or region.scoped or region.per_warp:
            return None
        jaxpr = getattr(region.jaxpr, "jaxpr", region.jaxpr)
        if equation.effects or region.states or None in region.operands:
            return None
        inputs = {
            inner: equation.invars[number]
            for inner, number in zip(region.inputs, region.operands, strict=True)
        }
        inside = _Scope({v: one for one in jaxpr.eqns for v in one.outvars}, inputs, scope)
        number = list(equation.outvars).index(atom)
        if number not in region.results:
            return None
        return self._value(jaxpr.outvars[region.results.index(number)], inside, seen)

    def _is_worth_it(
        self, movement: Movement, value: _Value, references: Sequence[Any], aval: Any
    ) -> bool:
        """Whether the array is of an odd shape, and not just a part of another one; and whether
        there is room for it."""
        shapes = [aval.shape, *(one.aval.shape for one in references)]
        if not any(extent & (extent - 1) for shape in shapes for extent in shape):
            return False
        sizes = tuple(math.prod(one.aval.shape) for one in references)
        bits = _bits(aval)
        stored = -(-sum(sizes) * bits // 8)
        if isinstance(movement, View) and isinstance(value, _Array):
            steps = [extent.stride for extent in movement.extents]
            strides = [abs(step) for step in steps]
            again = 0 in strides
            in_order = sorted(strides, reverse=True) == strides
            if not in_order and not again:
                # Both arrays together do not fit.
                step = strides[-1] * bits // 32
                few = math.gcd(step, BANKS) <= _CONFLICTS and bits >= 32
                fits = stored + math.prod(aval.shape) * bits // 8 <= USUAL
                # What does not fit at all would be stored element by element.
                if fits or (stored <= self.room and not few):
                    return self._is_short(movement, math.prod(aval.shape), bits)
            elif not (again or value.stepped) and strides[-1] == 1 and steps == strides:
                width = math.gcd(movement.run, _WIDE // bits)
                accesses = math.prod(aval.shape) / (width * _THREADS)
                # One element of a thread lies where its number says.
                single = math.prod(aval.shape) <= _THREADS
                if len(steps) > 1:
                    return False
                if 3 * accesses < loop_code(movement) and not single:
                    if math.prod(aval.shape) == sizes[0]:
                        return False
                    # A part would be loaded with the whole, and go through shared memory.
                    plan = direct(movement, bits)
                    return plan is not None and plan.instructions <= _SHORT_CODE
        count = math.gcd(movement.run, _UNIT // bits)
        if direct(movement.of_units(count), bits * count) is not None:
            return True
        sizes = tuple(size // count for size in sizes)
        parts = len(portions(movement.of_units(count), sizes, bits * count, self.room))
        # All is loaded before something is stored, where that may be the same memory.
        return parts == 1 or (parts > 1 and not self.aliased)

    def _is_short(self, movement: View, size: int, bits: int) -> bool:
        """Whether threads have few elements, which they store where they belong, or neighbours load
        what is near each other; under lane semantics, loads follow what becomes of them."""
        spec = self.context.spec
        planned = spec is not None and spec.params.semantics.extends(Semantics.WARPGROUP)
        near = 0 < movement.extents[-1].stride <= _NEAR
        return (near or (planned and size <= _FEW)) and direct(movement, bits) is not None


def _bits(aval: Any) -> int:
    """Bits of an element in memory."""
    return 8 if types.is_bool(aval.dtype) else types.bit_width(aval.dtype)


def effect_is_access(effect: Any) -> bool:
    """Whether an effect is a read or a write of memory."""
    return isinstance(effect, _jax.ReadEffect | _jax.WriteEffect)


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _effect(equation: Any, kind: Any, reference: Any, place: int) -> Any:
    """The effect on a reference that is the operand at a place, as an equation tells its own."""
    by_number = any(
        isinstance(effect, kind) and isinstance(effect.input, int) for effect in equation.effects
    )
    return kind(place if by_number else reference)


def _movement(value: _Value) -> Movement | None:
    if isinstance(value, _Joined):
        return value.rows
    extents = value.layout.flat_extents
    if not any(extent.stride for extent in extents):
        return None
    return View(value.offset, tuple(extents))


def _joined(parts: Sequence[_Value | None], equation: Any) -> _Value | None:
    """Arrays one beside the other, of which each is made of evenly spaced rows."""
    dimension = equation.params["dimension"]
    first, whole = parts[0], equation.outvars[0].aval.shape
    short = math.prod(whole[dimension:]) <= _SHORT < math.prod(whole)
    if short and isinstance(first, _Array) and not first.flat and len(set(parts)) == 1:
        dims = list(first.layout.dims)
        dims[dimension] = (Extent(len(parts), 0), *dims[dimension])
        return dataclasses.replace(first, layout=first.layout.with_dims(dims))
    shape = equation.outvars[0].aval.shape
    count = math.prod(shape[:dimension])
    references: list[Any] = []
    strips = []
    for part, atom in zip(parts, equation.invars, strict=True):
        if not isinstance(part, _Array):
            return None
        size = math.prod(atom.aval.shape[dimension:])
        stride = _stride(part.layout.flat_extents, count, size)
        if stride is None or stride < 0:
            return None
        if part.reference not in references:
            references.append(part.reference)
        strips.append(Strip(references.index(part.reference), part.offset, stride, size))
    return _Joined(tuple(references), Rows(count, tuple(strips)))


def _stride(extents: Sequence[Extent], count: int, size: int) -> int | None:
    """Elements from row to row, if so many rows of a size are evenly spaced."""
    found = list(extents) or [Extent(1, 1)]
    if len(found) == 1 and found[0].stride == 1:
        return size if found[0].size == count * size else None
    if size == 1 and len(found) == 1 and found[0].size == count:
        return found[0].stride
    if [extent.size for extent in found] == [count, size] and found[1].stride == 1:
        return found[0].stride
    return None


def _transposed(array: _Array, equation: Any) -> _Array:
    layout = array.layout.transpose(tuple(equation.params["permutation"]))
    return dataclasses.replace(array, layout=layout)


def _reshaped(array: _Array, equation: Any) -> _Array | None:
    if equation.params.get("dimensions") not in (None, ()) and equation.primitive is _lax.reshape_p:
        return None
    shape = equation.outvars[0].aval.shape
    with contextlib.suppress(InvalidValueError):
        return dataclasses.replace(array, layout=array.layout.reshape(shape), flat=False)
    layout = array.layout.with_dims([array.layout.flat_extents])
    return dataclasses.replace(array, layout=layout, flat=True)


def _stretched(array: _Array, equation: Any) -> _Array | None:
    if "broadcast_dimensions" in equation.params:
        dims = tuple(equation.params["broadcast_dimensions"])
    else:
        before, after = len(array.layout.dims), len(equation.outvars[0].aval.shape)
        dims = tuple(range(after - before, after))
    shape = equation.outvars[0].aval.shape
    extents: list[tuple[Extent, ...]] = [(Extent(n, 0),) for n in shape]
    for d, own in zip(dims, array.layout.dims, strict=True):
        if math.prod(extent.size for extent in own) == shape[d]:
            extents[d] = own
    return dataclasses.replace(array, layout=array.layout.with_dims(extents))


def _tiled(array: _Array, equation: Any) -> _Array:
    pairs = zip(equation.params["reps"], array.layout.dims, strict=True)
    layout = array.layout.with_dims([(Extent(count, 0), *own) for count, own in pairs])
    return dataclasses.replace(array, layout=layout)


def _sliced(array: _Array, equation: Any) -> _Array | None:
    starts, strides = equation.params["start_indices"], equation.params["strides"]
    shape = equation.outvars[0].aval.shape
    dims, offset = [], array.offset
    strides = strides or [1] * len(shape)
    for own, start, size, step in zip(array.layout.dims, starts, shape, strides, strict=True):
        if len(own) > 1:
            return None
        stride = own[0].stride if own else 0
        offset += start * stride
        dims.append((Extent(size, stride * step),))
    stepped = array.stepped or any(step != 1 for step in strides)
    return _Array(array.reference, array.layout.with_dims(dims), offset, stepped=stepped)


def _reversed(array: _Array, equation: Any) -> _Array | None:
    dims, offset = list(array.layout.dims), array.offset
    for d in equation.params["dimensions"]:
        if len(dims[d]) > 1:
            return None
        for own in dims[d]:
            dims[d] = (Extent(own.size, -own.stride),)
            offset += (own.size - 1) * own.stride
    return dataclasses.replace(array, layout=array.layout.with_dims(dims), offset=offset)


def _same(array: _Array, equation: Any) -> _Array:
    return array


_RULES: dict[Any, Callable[[_Array, Any], _Array | None]] = {
    _lax.transpose_p: _transposed,
    _lax.reshape_p: _reshaped,
    _lax.squeeze_p: _reshaped,
    _lax.broadcast_in_dim_p: _stretched,
    _jax.broadcast_to_p: _stretched,
    _jax.slice_p: _sliced,
    _lax.copy_p: _same,
    jax.lax.rev_p: _reversed,
    jax.lax.tile_p: _tiled,
}
_SAME_ORDER = (_lax.reshape_p, _lax.squeeze_p, _lax.copy_p)
