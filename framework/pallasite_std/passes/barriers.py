"""A check for waits on barriers that can never end, and for phases that complete unobserved.

The threads of one block are followed equation by equation. What is known then is which barriers
each of them arrives on and waits for, in order: of barriers that are allocated once, chosen by
known indices, and used outside of loops and of branches on unknown conditions (whether a thread has
a certain number is known). Everything else makes the barrier in question uncertain, and nothing is
said about it, except that there are no arrivals on it at all. All blocks of a cluster run the same
code, so an arrival on a ``ClusterBarrier`` is matched by one of each other block.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import BarrierRole, BarrierTables, InvalidValueError, SourceLocation
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable, Region, RegionKind, Visitor
from pallasite_std.barriers.base import is_barrier
from pallasite_std.primitives.arguments import argument_of

_MOST_EQUATIONS = 100_000
lax = _jax.lax_primitives

_ARITHMETIC: dict[Any, Callable[[int, int], Any]] = {
    lax.add_p: operator.add,
    lax.sub_p: operator.sub,
    lax.mul_p: operator.mul,
    lax.eq_p: operator.eq,
    lax.ne_p: operator.ne,
    lax.lt_p: operator.lt,
    lax.le_p: operator.le,
    lax.gt_p: operator.gt,
    lax.ge_p: operator.ge,
    lax.and_p: operator.and_,
    lax.or_p: operator.or_,
}


class _Group:
    """The barriers of one allocation.

    Attributes:
      dtype: their element type.
      shape: of the array of barriers.
      needed: how many arrivals complete a phase.
      arrives: whether anything arrives on one of them.
      certain: whether all that happens to them is known.
    """

    def __init__(self, aval: Any, tables: BarrierTables):
        kind = tables.kind(aval.dtype)
        self.dtype = aval.dtype
        self.shape = tuple(aval.shape)
        self.needed = 1 if kind is None else kind.arrivals(aval.dtype)
        self.arrives = False
        self.certain = kind is not None and kind.counted(aval.dtype)

    def __str__(self) -> str:
        count = f", num_barriers={self.shape}" if self.shape else ""
        return f"plgpu.{self.dtype.title}(num_arrivals={self.dtype.num_arrivals}{count})"


@dataclasses.dataclass(frozen=True)
class _Barrier:
    """One barrier of a group; ``index`` is None where it is not known which one."""

    group: _Group
    index: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Which one, for messages."""
        return f"barrier {list(self.index)} of the group" if self.index else "the barrier"


@dataclasses.dataclass(frozen=True)
class _Event:
    barrier: _Barrier
    waits: bool
    location: SourceLocation | None
    arrivals: int


class _TooLong(Exception):
    """The kernel has too many equations to follow."""


def check_barriers(jaxpr: Any, context: Any) -> None:
    """Raises if a wait on a barrier can never end.

    Args:
      jaxpr: the kernel.
      context: the :class:`~pallasite.passes.pipeline.PassContext`; its mesh says how many threads
        a block has.

    Raises:
      InvalidValueError: at the line of the wait, or of the arrival that comes too early.
    """
    mesh = getattr(context, "mesh", None)
    count, name = getattr(mesh, "num_threads", None) or 1, getattr(mesh, "thread_name", None)
    jaxprs: JaxprTable = context.jaxprs
    if not any(is_barrier(v.aval) for inner in jaxprs.jaxprs(jaxpr) for v in inner.invars):
        return
    groups: dict[Any, _Group] = {}
    threads = [_Thread(number, name, groups, jaxprs, context.barriers) for number in range(count)]
    try:
        for thread in threads:
            thread.run(jaxpr, [None] * len(jaxpr.invars))
    except _TooLong:
        return
    _check_arrivals(threads)
    _check_progress(threads)
    _check_overruns(threads)


class _Thread(Visitor[Any]):
    """What one thread of a block does to barriers; values are numbers and groups of barriers.

    Attributes:
      events: arrivals and waits that certainly happen, in order.
      waits: waits that certainly happen at least once, on barriers known or not.
      once: False in loops.
      certain: False where it is not known whether it runs at all.
    """

    def __init__(
        self,
        number: int,
        name: Any,
        groups: dict[Any, _Group],
        jaxprs: JaxprTable,
        tables: BarrierTables,
    ):
        super().__init__(jaxprs)
        self.thread = number
        self.name = name
        self.groups = groups
        self.tables = tables
        self.events: list[_Event] = []
        self.waits: list[_Event] = []
        self.allocated: set[Any] = set()
        self.equations = 0
        self.once = self.certain = True

    def unknown(self, variable: Any) -> Any:
        return None

    def literal(self, atom: Any) -> Any:
        return int(atom.val) if _is_number(atom.aval) else None

    def number(self, value: Any) -> int | None:
        return value if isinstance(value, int) else None

    def carried(self, value: Any, variable: Any) -> Any:
        return value if isinstance(value, _Group) else None

    def allocation(self, equation: Any, region: Region, position: int) -> Any:
        variable = region.inputs[position]
        if not is_barrier(variable.aval):
            return None
        group = self.groups.setdefault(variable, _Group(variable.aval, self.tables))
        first = variable not in self.allocated
        group.certain = group.certain and self.once and self.certain and first
        self.allocated.add(variable)
        return group

    def region(self, equation: Any, region: Region, inputs: Sequence[Any]) -> list[Any]:
        once, certain = self.once, self.certain
        if region.is_loop and region.trips != 1 or region.per_warp:
            self.once = False
        if region.kind is RegionKind.LOOP_BODY and region.trips is None:
            self.certain = False
        outputs = super().region(equation, region, inputs)
        self.once, self.certain = once, certain
        return outputs

    def ways(
        self, equation: Any, regions: Sequence[Region], operands: list[Any]
    ) -> list[dict[int, Any]]:
        certain, self.certain = self.certain, False
        found = super().ways(equation, regions, operands)
        self.certain = certain
        return found

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        self.equations += len(jaxpr.eqns)
        if self.equations > _MOST_EQUATIONS:
            raise _TooLong
        return super().run(jaxpr, operands)

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        primitive, params = equation.primitive, equation.params
        if primitive is _jax.axis_index_p:
            return (self.thread,) if params["axis_name"] == self.name else None
        if equation.outvars and None not in operands and _is_number(equation.outvars[0].aval):
            if primitive in _ARITHMETIC:
                return (int(_ARITHMETIC[primitive](*operands)),)
            if primitive is lax.convert_element_type_p:
                return operands
            if primitive is lax.not_p and equation.invars[0].aval.dtype == np.bool_:
                return (1 - operands[0],)
        for operand in operands:
            if isinstance(operand, _Group):
                self.use(equation, operands)
                break
        return None

    def use(self, equation: Any, operands: list[Any]) -> None:
        """Notes what a primitive does to the barriers that it is given."""
        params = equation.params
        location = _jax.user_location(equation.source_info)
        found = []
        uses = self.tables.uses(equation.primitive)
        # An operand that is not known differs from one that is not there, which is None.
        given = [object() if one is None else one for one in operands]
        for use in uses:
            barrier = _selected(argument_of(use, use.barrier, params, given))
            if barrier is not None:
                found.append((use, barrier))
        known = {barrier.group for _, barrier in found}
        for operand in operands:
            if isinstance(operand, _Group) and operand not in known:
                operand.arrives, operand.certain = True, False
        for use, barrier in found:
            group = barrier.group
            arrivals = use.arrivals(group.dtype, params)
            if use.role is BarrierRole.TEST or arrivals == 0:
                continue
            waits = use.role is BarrierRole.WAIT
            group.arrives = group.arrives or not waits
            sure = self.certain and self.once and barrier.index is not None and arrivals is not None
            if use.predicate is not None:
                sure = sure and argument_of(use, use.predicate, params, given) is None
            group.certain = group.certain and sure
            event = _Event(barrier, waits, location, arrivals or 0)
            if waits and self.certain:
                self.waits.append(event)
            self.events.append(event)


def _is_number(aval: Any) -> bool:
    return getattr(aval, "shape", None) == () and aval.dtype in (np.int32, np.bool_)


def _selected(reference: Any) -> _Barrier | None:
    """The barrier that a reference to a group, or a view of it, selects."""
    group = getattr(reference, "ref", reference)
    if not isinstance(group, _Group):
        return None
    kept: list[int | None] = [None] * len(group.shape)
    for transform in getattr(reference, "transforms", ()):
        if not isinstance(transform, _jax.NDIndexer):
            return _Barrier(group, None)
        free = [position for position, index in enumerate(kept) if index is None]
        for position, index in zip(free, transform.indices, strict=False):
            if isinstance(index, _jax.Slice):
                if index.start != 0 or index.stride != 1:
                    return _Barrier(group, None)
                continue
            if not isinstance(index, int):
                return _Barrier(group, None)
            kept[position] = index
    for position, extent in enumerate(group.shape):
        if kept[position] is None and extent == 1:
            kept[position] = 0
    index = tuple(number for number in kept if number is not None)
    return _Barrier(group, index if len(index) == len(group.shape) else None)


def _check_arrivals(threads: Sequence[_Thread]) -> None:
    """A wait on a barrier that nothing in the kernel arrives on."""
    for thread in threads:
        for event in thread.waits:
            if not event.barrier.group.arrives:
                raise InvalidValueError(
                    "this wait never ends: nothing in the kernel arrives on the barrier",
                    got=str(event.barrier.group),
                    expected="a barrier that a copy_gmem_to_smem is given, or that some thread"
                    " arrives on",
                    location=event.location,
                )


def _check_progress(threads: Sequence[_Thread]) -> None:
    """Lets all threads go as far as they can; whoever is left has a wait that never ends."""
    arrived: collections.Counter[_Barrier] = collections.Counter()
    position = [0] * len(threads)
    awaited: list[collections.Counter[_Barrier]] = [collections.Counter() for _ in threads]
    moved = True
    while moved:
        moved = False
        for number, thread in enumerate(threads):
            while position[number] < len(thread.events):
                event = thread.events[position[number]]
                barrier = event.barrier
                if barrier.group.certain and event.waits:
                    needed = (awaited[number][barrier] + 1) * barrier.group.needed
                    if arrived[barrier] < needed:
                        break
                    awaited[number][barrier] += 1
                elif barrier.group.certain:
                    arrived[barrier] += event.arrivals
                position[number] += 1
                moved = True
    for number, thread in enumerate(threads):
        if position[number] < len(thread.events):
            event = thread.events[position[number]]
            barrier, phase = event.barrier, awaited[number][event.barrier] + 1
            needed = barrier.group.needed * phase
            ordinal = {1: "first", 2: "second", 3: "third"}.get(phase, f"{phase}th")
            raise InvalidValueError(
                f"this wait never ends: the {ordinal} phase of {barrier.name} completes with"
                f" arrival {needed}, but only {arrived[barrier]} can come before",
                got=str(barrier.group),
                expected="num_arrivals copies or arrivals for each wait, before it",
                location=event.location,
            )


def _check_overruns(threads: Sequence[_Thread]) -> None:
    """Two phases that complete between two waits, of barriers that only one thread uses."""
    users: dict[_Barrier, set[int]] = collections.defaultdict(set)
    for thread in threads:
        for event in thread.events:
            users[event.barrier].add(thread.thread)
    for thread in threads:
        waits = {event.barrier for event in thread.events if event.waits}
        pending: collections.Counter[_Barrier] = collections.Counter()
        for event in thread.events:
            barrier = event.barrier
            group = barrier.group
            if not group.certain or users[barrier] != {thread.thread} or barrier not in waits:
                continue
            if event.waits:
                pending[barrier] -= group.needed
                continue
            pending[barrier] += event.arrivals
            if pending[barrier] >= 2 * group.needed:
                raise InvalidValueError(
                    f"{pending[barrier]} arrivals on {barrier.name} complete two phases without a"
                    " wait in between",
                    got=str(group),
                    expected="a wait after each phase",
                    hint=f"num_arrivals={pending[barrier]}, if one wait is for all of them, or one"
                    " barrier for each",
                    location=event.location,
                )
