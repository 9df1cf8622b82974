"""The order of plain stores to overlapping parts of an array in global memory.

Memory that a kernel never reads needs no barriers around stores, except where one store of a user's
thread overwrites what an earlier one wrote: other lanes may store there, and nothing orders them.
Such a store has a barrier before it. It is one

- whose window provably overlaps that of the earlier store: their starts differ by a constant, or
  one of them spans the whole dimension; windows whose starts differ by a computed value count as
  disjoint;
- or which is no window (a slice with a stride, indices that are arrays) and not provably disjoint.

In a loop, the next iteration's store over what another store of this one wrote has one, too.

Not covered are windows of one store that overlap in different iterations of a loop, nor computed
windows that only happen to overlap; the simulator's sanitizer reports these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, RegisterArray, RuleContext, StateKey
from pallasite_std.memory.places import places_of
from pallasite_std.memory.reference_types import MemoryReference, WindowStart, default_layout
from pallasite_std.memory.references import constant_integer, index_reference

LEADER = "leader"
"""Who stores a scalar."""

SPLAT = "splat"
"""Who stores equal elements: each lane some, as the memory's default layout has it."""

MOST_ELEMENTS = 1 << 16
"""Of stores with more elements, only the ranges of addresses are compared."""


@dataclasses.dataclass(eq=False)
class _Store:
    """A store that was emitted.

    Attributes:
      memory: what it writes, or more.
      lanes: which lanes hold the elements; None if that is not known.
      anchor: an operation right before it.
      waits: whether there is to be a barrier.
      barriers: operations at the places of barriers that were emitted since.
    """

    memory: MemoryReference
    lanes: Hashable
    anchor: ir.Operation
    waits: bool = False
    barriers: list[ir.Operation] = dataclasses.field(default_factory=list)


class _Windows:
    """Stores to windows of one array whose starts have the same computed parts, with their starts
    and sizes in an array, since a kernel may have thousands."""

    def __init__(self, terms: Sequence[Hashable], extents: Sequence[int]):
        self._terms, self._extents = terms, np.array(extents, np.int64)
        self._no_terms = np.array([not one for one in terms], np.bool_)
        self._ranges = np.zeros((16, 2, len(extents)), np.int64)
        self.stores: list[_Store] = []

    def add(self, store: _Store, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Adds a store."""
        count = len(self.stores)
        if count == len(self._ranges):
            self._ranges = np.concatenate([self._ranges, np.zeros_like(self._ranges)])
        self._ranges[count] = starts, sizes
        self.stores.append(store)

    def overlapping(
        self, terms: Sequence[Hashable], starts: Sequence[int], sizes: Sequence[int]
    ) -> list[_Store]:
        """Those that provably overlap a window: along each dimension, they do by the constants of
        starts that differ by these alone, or one of both spans it."""
        begin, size = (self._ranges[: len(self.stores), number] for number in (0, 1))
        first, extent = np.array(starts, np.int64), np.array(sizes, np.int64)
        same = np.array(
            [one == other for one, other in zip(self._terms, terms, strict=True)], np.bool_
        )
        computed = np.array([bool(one) for one in terms], np.bool_)
        spans = (first == 0) & (extent == self._extents) & ~computed
        spans = spans | ((begin == 0) & (size == self._extents) & self._no_terms)
        near = (begin < first + extent) & (first < begin + size) & same
        found = np.flatnonzero((spans | near).all(axis=1))
        return [self.stores[number] for number in found]


class _Stores:
    """The stores so far to global memory that the kernel does not read."""

    def __init__(self) -> None:
        self._windows: dict[tuple[Any, tuple[Hashable, ...]], _Windows] = {}
        self._others: list[_Store] = []

    def add(self, store: _Store) -> None:
        """Adds a store."""
        window, buffer = store.memory.window, store.memory.buffer
        if window is None or buffer is None:
            self._others.append(store)
        elif all(one.size for one in window):
            terms, starts, sizes = _ranges_of(window)
            key = buffer, tuple(terms)
            if key not in self._windows:
                self._windows[key] = _Windows(terms, buffer.shape)
            self._windows[key].add(store, starts, sizes)

    def candidates(self, new: _Store) -> list[_Store]:
        """Those that may overlap one."""
        memory = new.memory
        found = [one for one in self._others if one.memory.buffer == memory.buffer]
        ranges = None if memory.window is None else _ranges_of(memory.window)
        if ranges is not None and not all(ranges[2]):
            return []
        for (buffer, _), windows in self._windows.items():
            if buffer == memory.buffer:
                found += windows.stores if ranges is None else windows.overlapping(*ranges)
        return found

    def keep(self, kept: Callable[[_Store], bool]) -> None:
        """Forgets the others."""
        stores = [*self._others, *itertools.chain(*(w.stores for w in self._windows.values()))]
        self.clear()
        for store in filter(kept, stores):
            self.add(store)

    def clear(self) -> None:
        """Forgets all."""
        self._windows, self._others = {}, []


def _ranges_of(window: Sequence[WindowStart]) -> tuple[list[Hashable], list[int], list[int]]:
    """For each dimension the computed part of the start, the constant and the size."""
    sums = [_Sum.of_window(one) for one in window]
    terms: list[Hashable] = [frozenset(one.terms.items()) for one in sums]
    return terms, [one.constant for one in sums], [one.size for one in window]


def _no_stores(kernel: KernelContext) -> _Stores:
    return _Stores()


_STORES = StateKey("standard.global-stores", _no_stores)
"""The stores to global memory that the kernel does not read."""

_IN_LOOPS = StateKey("standard.global-stores-in-loops", _no_stores)
"""Those in loops, whatever barriers are behind them."""


def lanes_of(value: RegisterArray, memory: MemoryReference) -> Hashable:
    """Which lanes store the elements of an array; None if several lanes store the same ones, of
    which one may be late with an earlier store."""
    if memory.layout.size == 1:
        return LEADER
    layout = default_layout(memory) if value.is_splat else value.layout
    if layout.replication > 1:
        return None
    return SPLAT if value.is_splat else layout


def order_store(ctx: RuleContext, memory: MemoryReference, lanes: Hashable) -> None:
    """Emits the barrier that a plain store to a reference needs, if it overwrites elements that
    other lanes may have stored; to be called where the store is emitted.

    Args:
      ctx: of the rule.
      memory: what is written.
      lanes: which lanes store which elements, as :func:`lanes_of` tells; None for others.
    """
    if not _is_concerned(ctx, memory):
        return
    new = _store(ctx, memory, lanes)
    staged = ctx.kernel.state(_BRANCHES)
    _order_iterations(ctx, staged, new)
    stores = ctx.kernel.state(_STORES)
    earlier = stores.candidates(new)
    replaced = [one for one in earlier if _replaces(new, one)]
    if any(_needs_barrier(staged, old, new) for old in earlier):
        ctx.synchronize()
        _note_barrier(ctx)
    elif replaced:
        stores.keep(lambda store: all(store is not one for one in replaced))
    stores.add(new)


def note_indexed_store(ctx: RuleContext, memory: MemoryReference, indices: Sequence[Any]) -> None:
    """Notes a store at indices of which some are arrays, and the barrier that is before it."""
    if not _is_concerned(ctx, memory):
        return
    _note_barrier(ctx)
    around = [
        _jax.Slice(0, size, 1) if isinstance(index, RegisterArray) and index.shape else index
        for index, size in zip(indices, memory.shape, strict=True)
    ]
    new = _store(ctx, index_reference(memory, around), None)
    _order_iterations(ctx, ctx.kernel.state(_BRANCHES), new)
    ctx.kernel.state(_STORES).add(new)


def _is_concerned(ctx: RuleContext, memory: MemoryReference) -> bool:
    if not ctx.auto_barriers or ctx.in_warp or ctx.kernel.on_trial:
        return False
    if memory.space.is_shared or memory.buffer is None or memory.may_be_read:
        return False
    return memory.remote is None and memory.peer is None


def _anchor(ctx: RuleContext) -> ir.Operation:
    """An operation that stays at this place, wherever that moves, while the body is lowered."""
    anchor = ctx.kernel.emit_later(ctx.kernel.state(_STORES).clear)
    assert anchor is not None
    return anchor


def _store(ctx: RuleContext, memory: MemoryReference, lanes: Hashable) -> _Store:
    store: _Store

    def wait() -> None:
        if store.waits:
            ctx.synchronize()

    anchor = ctx.kernel.emit_later(wait)
    assert anchor is not None
    store = _Store(memory, lanes, anchor)
    return store


def _order_iterations(ctx: RuleContext, staged: Sequence[_Branch], new: _Store) -> None:
    """Has earlier stores of a loop wait that, in the next iteration, overwrite what this one
    writes, and this one where it comes after them in the next iteration only."""
    stores = ctx.kernel.state(_IN_LOOPS)
    loops = _loops(new.anchor)
    if not loops:
        return
    for old in stores.candidates(new):
        repeated = any(one == other for one in loops for other in _loops(old.anchor))
        if repeated and _overlaps(old, new) and not _is_repeated(old, new):
            old.waits = True
            new.waits |= not _precedes(staged, old.anchor, new.anchor)
    stores.add(new)


def _loops(operation: ir.Operation) -> list[ir.Operation]:
    """The loops around an operation."""
    return [one for _, one in _around(operation) if one.name in ("scf.for", "scf.while")]


def _note_barrier(ctx: RuleContext) -> None:
    """Notes that all lanes have met here: what was stored before comes before what follows."""
    barrier = _anchor(ctx)
    block = barrier.block

    def kept(store: _Store) -> bool:
        if any(around == block for around, _ in _around(store.anchor)):
            return False
        store.barriers.append(barrier)
        return True

    ctx.kernel.state(_STORES).keep(kept)


# Program order --------------------------------------------------------------------------------


def _around(operation: ir.Operation | None) -> Iterator[tuple[ir.Block, ir.Operation]]:
    """The blocks around an operation, innermost first, and which of their operations it is in."""
    while operation is not None and operation.parent is not None:
        yield operation.block, operation
        operation = operation.parent.operation


def _precedes(staged: Sequence[_Branch], old: ir.Operation, new: ir.Operation) -> bool:
    """Whether an operation that was emitted earlier also comes earlier where both are executed."""
    places, before = list(_around(new)), []
    for block, operation in _around(old):
        before.append(operation)
        for number, (other, _) in enumerate(places):
            if block == other:
                after = [one for _, one in places[: number + 1]]
                return not _exclude_each_other(staged, before, after)
    return True


@dataclasses.dataclass(frozen=True, eq=False)
class _Branch:
    """A branch of a conditional that is being emitted: its region, and when it is chosen."""

    region: ir.Operation
    condition: ir.Value
    chosen: bool


def _no_branches(kernel: KernelContext) -> list[_Branch]:
    return []


_BRANCHES = StateKey("standard.staged-branches", _no_branches)


@contextlib.contextmanager
def staged_branch(
    ctx: RuleContext, region: ir.Operation, index: ir.Value, number: int, branches: int
) -> Iterator[None]:
    """While a branch is emitted into a region of its own: the one with a number, by an index."""
    staged = ctx.kernel.state(_BRANCHES)
    if branches != 2:
        yield
        return
    staged.append(_Branch(region, index, bool(number)))
    try:
        yield
    finally:
        staged.pop()


def _exclude_each_other(
    staged: Sequence[_Branch], before: Sequence[ir.Operation], after: Sequence[ir.Operation]
) -> bool:
    """Whether never both of two places are reached, by the operations around them in their common
    block, innermost first."""
    first, second = before[-1], after[-1]
    if first == second and first.name in ("scf.if", "scf.index_switch"):
        return True
    if first != second and first.name == second.name == "scf.execute_region":
        return True  # They become branches of one conditional.
    return any(
        terms == others and not _meet(ranges, other_ranges)
        for terms, ranges in _facts(staged, before)
        for others, other_ranges in _facts(staged, after)
    )


type _Ranges = tuple[tuple[float, float], ...]
type _Fact = tuple[frozenset[tuple[Hashable, int]], _Ranges]


def _meet(left: _Ranges, right: _Ranges) -> bool:
    return any(low <= top and bottom <= high for low, high in left for bottom, top in right)


def _facts(staged: Sequence[_Branch], operations: Sequence[ir.Operation]) -> list[_Fact]:
    """Sums that are known to be within ranges where operations around a place are executed."""
    found: list[_Fact] = []
    for inner, outer in itertools.pairwise([None, *operations]):
        assert outer is not None
        if outer.name == "scf.if" and inner is not None:
            chosen = inner.block == outer.regions[0].blocks[0]
            found += _conclusions(outer.operands[0], chosen)
        for branch in staged:
            if branch.region == outer:
                found += _conclusions(branch.condition, branch.chosen)
    return found


_SIGNED = {0: (0, 0), 2: (-math.inf, -1), 3: (-math.inf, 0), 4: (1, math.inf), 5: (0, math.inf)}
"""The range of the difference of two operands, by MLIR's number of a comparison."""

_OPPOSITE = {0: 1, 1: 0, 2: 5, 3: 4, 4: 3, 5: 2}


def _conclusions(value: ir.Value, chosen: bool) -> list[_Fact]:
    """What follows from a condition, or a 0 or 1, that holds or does not."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return []
    if owner.name == "arith.extui":
        return _conclusions(owner.operands[0], chosen)
    if owner.name != "arith.cmpi":
        return []
    left, right = owner.operands
    predicate = int(ir.IntegerAttr(owner.attributes["predicate"]).value)
    if predicate not in _OPPOSITE:
        return []
    predicate = predicate if chosen else _OPPOSITE[predicate]
    if constant_integer(right) == 0 and not isinstance(left.owner, ir.Block):
        widened = left.owner.name == "arith.extui"
        if widened and left.owner.operands[0].type == ops.i1() and predicate in (0, 1):
            return _conclusions(left.owner.operands[0], predicate == 1)
    difference = _Sum.of_value(left).plus(_Sum.of_value(right), -1)
    if not difference.terms:
        return []
    terms, constant = frozenset(difference.terms.items()), difference.constant
    if predicate == 1:
        return [(terms, ((-math.inf, -constant - 1), (1 - constant, math.inf)))]
    low, high = _SIGNED[predicate]
    return [(terms, ((low - constant, high - constant),))]


def _is_ordered(old: _Store, new: _Store) -> bool:
    """Whether a barrier between two stores is on every way to the later one."""
    return any(
        block == barrier.block for barrier in old.barriers for block, _ in _around(new.anchor)
    )


# Overlaps -------------------------------------------------------------------------------------


def _needs_barrier(staged: Sequence[_Branch], old: _Store, new: _Store) -> bool:
    if old.memory.buffer != new.memory.buffer or not _overlaps(old, new):
        return False
    if _is_repeated(old, new):
        return False
    return _precedes(staged, old.anchor, new.anchor) and not _is_ordered(old, new)


def _replaces(new: _Store, old: _Store) -> bool:
    """Whether what has to come after the earlier store has to come after the later one, too."""
    return old.anchor.block == new.anchor.block and _is_repeated(old, new)


def _is_repeated(old: _Store, new: _Store) -> bool:
    """Whether each lane stores the very elements, in the later store, that it did in the earlier
    one: of references that view the same in the same order."""
    left, right = old.memory, new.memory
    same_lanes = old.lanes is not None and old.lanes == new.lanes
    same_layout = same_lanes and left.layout == right.layout
    return same_layout and _Sum.of(left).behind(_Sum.of(right)) == 0


def _overlaps(old: _Store, new: _Store) -> bool:
    left, right = old.memory, new.memory
    if left.window is not None and right.window is not None:
        return True  # Otherwise, it was no candidate.
    distance = _Sum.of(left).behind(_Sum.of(right))
    if distance is None:
        return True
    if distance + left.layout.cosize <= 0 or distance >= right.layout.cosize:
        return False
    if max(left.layout.size, right.layout.size) > MOST_ELEMENTS:
        return True
    return bool(np.isin(places_of(left.layout) + distance, places_of(right.layout)).any())


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A number: a constant and multiples of values that are computed in the kernel."""

    constant: int
    terms: dict[Hashable, int]

    @classmethod
    def of(cls, memory: MemoryReference) -> _Sum:
        """Where the first element of a reference is in its array."""
        total = cls(memory.offset, {})
        for part in memory.dynamic:
            divisor, modulus = part.term.divisor, part.term.modulus
            index = cls.of_value(part.index)
            if divisor != 1 or modulus is not None:
                index = cls(0, {(divisor, modulus, index.key): 1})
            total = total.plus(index, part.term.stride)
        return total

    @classmethod
    def of_window(cls, start: WindowStart) -> _Sum:
        """Where a window begins."""
        total = cls(start.static, {})
        for value in start.dynamic:
            total = total.plus(cls.of_value(value))
        return total

    @classmethod
    def of_value(cls, value: ir.Value, depth: int = 10) -> _Sum:
        """The same computations of the same values are the same number."""
        number = constant_integer(value)
        if number is not None:
            return cls(number, {})
        owner = value.owner
        if isinstance(owner, ir.Block) or not owner.name.startswith("arith.") or not depth:
            return cls(0, {value: 1})
        name = owner.name
        parts = [cls.of_value(operand, depth - 1) for operand in owner.operands]
        if name == "arith.addi":
            return parts[0].plus(parts[1])
        if name == "arith.subi":
            return parts[0].plus(parts[1], -1)
        if name == "arith.muli":
            for factor, other in (parts, parts[::-1]):
                if not factor.terms:
                    return cls(0, {}).plus(other, factor.constant)
        if name in ("arith.extsi", "arith.index_cast") and isinstance(value.type, ir.IntegerType):
            return parts[0]
        keys = tuple(part.key for part in parts)
        named = [owner.attributes[number] for number in range(len(owner.attributes))]
        attributes = tuple((one.name, str(one.attr)) for one in named)
        return cls(0, {(name, attributes, str(value.type), keys): 1})

    @property
    def key(self) -> Hashable:
        """Equal for equal sums."""
        return self.constant, frozenset(self.terms.items())

    def plus(self, other: _Sum, factor: int = 1) -> _Sum:
        """The sum with a multiple of another one."""
        terms = dict(self.terms)
        for term, count in other.terms.items():
            terms[term] = terms.get(term, 0) + factor * count
        return _Sum(
            self.constant + factor * other.constant,
            {term: count for term, count in terms.items() if count},
        )

    def behind(self, other: _Sum) -> int | None:
        """How far this number is behind another one, or None if that is not known."""
        difference = self.plus(other, -1)
        return None if difference.terms else difference.constant
