"""The order of plain stores to overlapping parts of an array in global memory.

Memory that a kernel never reads needs no barriers around stores, except where one store of a user's
thread overwrites what an earlier one wrote: other lanes may store there, and nothing orders them.
Such a store has a barrier before it, also where it overwrites what another store, or itself, wrote
in an earlier iteration of a loop. It needs none where both provably have no element in common, or
the same ones by the same lanes: windows of one size at multiples of it are equal or disjoint.
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
from pallasite_std.memory.reference_types import MemoryReference, default_layout
from pallasite_std.memory.references import constant_integer, index_reference
from pallasite_std.memory.sums import Counters, Sum, counters_of

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
      waits: whether there is to be a barrier right before it.
      follows_barrier: whether there is one anyway.
      number: which of the kernel's stores it is.
      barriers: operations at the places of barriers that were emitted since.
    """

    memory: MemoryReference
    lanes: Hashable
    anchor: ir.Operation
    waits: bool = False
    follows_barrier: bool = False
    number: int = dataclasses.field(default_factory=itertools.count().__next__)
    barriers: list[ir.Operation] = dataclasses.field(default_factory=list)


type _Terms = frozenset[tuple[Hashable, int]]


class _Windows:
    """Stores to windows of one array whose starts have the same computed parts, with their starts
    and sizes in an array, since a kernel may have thousands."""

    def __init__(self, terms: Sequence[_Terms], counters: Counters):
        self._terms, self._counters = terms, counters
        self._ranges = np.zeros((16, 2, len(terms)), np.int64)
        self.stores: list[_Store] = []

    def add(self, store: _Store, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Adds a store."""
        count = len(self.stores)
        if count == len(self._ranges):
            self._ranges = np.concatenate([self._ranges, np.zeros_like(self._ranges)])
        self._ranges[count] = starts, sizes
        self.stores.append(store)

    def overlapping(
        self, sums: Sequence[Sum], sizes: Sequence[int], loop: ir.Operation | None
    ) -> list[_Store]:
        """Those that may overlap a window, in the same iteration of the loops around both or, given
        the outermost one, in another of its iterations."""
        count = len(self.stores)
        begin, size = (self._ranges[:count, number] for number in (0, 1))
        apart = np.zeros(count, np.bool_)
        for axis, (start, terms) in enumerate(zip(sums, self._terms, strict=True)):
            unit = self._counters.difference(start, Sum(0, dict(terms)), loop).unit
            behind = start.constant - begin[:, axis]
            if not unit:
                apart |= (behind <= -sizes[axis]) | (behind >= size[:, axis])
                continue
            above = behind % unit
            apart |= (above >= size[:, axis]) & (above - unit <= -sizes[axis])
        return [self.stores[number] for number in np.flatnonzero(~apart)]


class _Stores:
    """The stores so far to global memory that the kernel does not read."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._windows: dict[tuple[Any, tuple[_Terms, ...]], _Windows] = {}
        self._others: list[_Store] = []

    def add(self, store: _Store) -> None:
        """Adds a store."""
        window, buffer = store.memory.window, store.memory.buffer
        if window is None or buffer is None:
            self._others.append(store)
        elif all(one.size for one in window):
            sums = [Sum.of_window(one) for one in window]
            terms = tuple(frozenset(one.terms.items()) for one in sums)
            windows = self._windows.setdefault((buffer, terms), _Windows(terms, self._counters))
            windows.add(store, [one.constant for one in sums], [one.size for one in window])

    def candidates(self, new: _Store, loop: ir.Operation | None = None) -> list[_Store]:
        """Those that may overlap one, in the same iteration of the loops around both or, given the
        outermost one, in another of its iterations."""
        memory = new.memory
        found = [one for one in self._others if one.memory.buffer == memory.buffer]
        window = memory.window
        if window is not None and not all(one.size for one in window):
            return []
        for (buffer, _), windows in self._windows.items():
            if buffer == memory.buffer and window is None:
                found += windows.stores
            elif buffer == memory.buffer and window is not None:
                sums, sizes = [Sum.of_window(one) for one in window], [one.size for one in window]
                found += windows.overlapping(sums, sizes, loop)
        return found

    def has_barrier(self, earlier: _Store, later: _Store, loop: ir.Operation) -> bool:
        """Whether all lanes meet between a store in an iteration of a loop and one in the next."""
        return any(
            (store.waits or store.follows_barrier)
            and store.anchor.parent.operation == loop
            and (store.number <= later.number or store.number > earlier.number)
            for store in self._all()
        )

    def _all(self) -> Iterator[_Store]:
        yield from self._others
        for windows in self._windows.values():
            yield from windows.stores

    def keep(self, kept: Callable[[_Store], bool]) -> None:
        """Forgets the others."""
        stores = list(self._all())
        self.clear()
        for store in filter(kept, stores):
            self.add(store)

    def clear(self) -> None:
        """Forgets all."""
        self._windows, self._others = {}, []


def _no_stores(kernel: KernelContext) -> _Stores:
    return _Stores(counters_of(kernel))


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
    stores = ctx.kernel.state(_STORES)
    earlier = stores.candidates(new)
    replaced = [one for one in earlier if _replaces(new, one)]
    counters = counters_of(ctx.kernel)
    if any(_needs_barrier(counters, staged, old, new) for old in earlier):
        new.waits = True
        _note_barrier(ctx)
    elif replaced:
        stores.keep(lambda store: all(store is not one for one in replaced))
    stores.add(new)
    _order_iterations(ctx, new)


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
    new.follows_barrier = True
    _order_iterations(ctx, new)
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


def _order_iterations(ctx: RuleContext, new: _Store) -> None:
    """Has this store of a loop, or an earlier one, wait where it overwrites, in a later iteration,
    what the other or itself wrote."""
    loops = _loops(new.anchor)
    if not loops:
        return
    counters, stores = counters_of(ctx.kernel), ctx.kernel.state(_IN_LOOPS)
    stores.add(new)
    for old in sorted(stores.candidates(new, loops[0]), key=lambda store: store.number):
        common = [one for one in loops if one in _loops(old.anchor)]
        if not common or _are_apart(counters, old, new, common):
            continue
        if not _keeps_lanes(counters, old, new, loops[0]):
            old.waits |= not stores.has_barrier(new, old, common[-1])
            new.waits |= not stores.has_barrier(old, new, common[-1])


def _loops(operation: ir.Operation) -> list[ir.Operation]:
    """The loops around an operation, outermost first."""
    loops = [one for _, one in _around(operation) if one.name in ("scf.for", "scf.while")]
    return loops[::-1]


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
    difference = Sum.of_value(left).plus(Sum.of_value(right), -1)
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


def _needs_barrier(counters: Counters, staged: Sequence[_Branch], old: _Store, new: _Store) -> bool:
    if old.memory.buffer != new.memory.buffer or not _overlaps(old, new):
        return False
    if _keeps_lanes(counters, old, new):
        return False
    return _precedes(staged, old.anchor, new.anchor) and not _is_ordered(old, new)


def _keeps_lanes(
    counters: Counters, old: _Store, new: _Store, loop: ir.Operation | None = None
) -> bool:
    """Whether each element that both store is stored by the same lane: one stores all, or both
    store windows that are equal or disjoint in one manner; in the same iteration of the loops
    around both or, given the outermost one, in any."""
    left, right = old.memory, new.memory
    if old.lanes is None or old.lanes != new.lanes:
        return False
    if old.lanes == LEADER:
        return True
    if left.layout != right.layout:
        return False
    if left.window is None or right.window is None:
        whole = counters.difference(Sum.of(right), Sum.of(left), loop)
        return whole.is_multiple(max(left.layout.cosize, 1))
    for one, other in zip(left.window, right.window, strict=True):
        apart = counters.difference(Sum.of_window(other), Sum.of_window(one), loop)
        aligned = one.divisor % one.size == 0 and other.divisor % one.size == 0
        if one.size != other.size or not (aligned or apart.is_multiple(one.size)):
            return False
    return True


def _are_apart(counters: Counters, old: _Store, new: _Store, loops: Sequence[ir.Operation]) -> bool:
    """Whether windows have no element in common in different iterations of loops."""
    left, right = old.memory.window, new.memory.window
    if left is None or right is None:
        return False
    pairs = [
        (Sum.of_window(other), Sum.of_window(one), max(one.size, other.size))
        for one, other in zip(left, right, strict=True)
    ]
    return all(
        any(counters.distance(start, first, loops[number:]) >= size for start, first, size in pairs)
        for number in range(len(loops))
    )


def _replaces(new: _Store, old: _Store) -> bool:
    """Whether what has to come after the earlier store has to come after the later one, too."""
    return old.anchor.block == new.anchor.block and _is_repeated(old, new)


def _is_repeated(old: _Store, new: _Store) -> bool:
    """Whether each lane stores the very elements, in the later store, that it did in the earlier
    one: of references that view the same in the same order."""
    left, right = old.memory, new.memory
    same_lanes = old.lanes is not None and old.lanes == new.lanes
    same_layout = same_lanes and left.layout == right.layout
    return same_layout and Sum.of(left).behind(Sum.of(right)) == 0


def _overlaps(old: _Store, new: _Store) -> bool:
    left, right = old.memory, new.memory
    if left.window is not None and right.window is not None:
        return True  # Otherwise, it was no candidate.
    distance = Sum.of(left).behind(Sum.of(right))
    if distance is None:
        return True
    if distance + left.layout.cosize <= 0 or distance >= right.layout.cosize:
        return False
    if max(left.layout.size, right.layout.size) > MOST_ELEMENTS:
        return True
    return bool(np.isin(places_of(left.layout) + distance, places_of(right.layout)).any())
