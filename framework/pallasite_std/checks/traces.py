"""What one thread of a block does to shared memory and to barriers, from its start.

The thread is followed as it runs. Of a branch on something unknown, the trace has what its sides
agree in; where they differ in more than plain accesses, it has an event that says which barriers
may have been used, and goes on behind it. Loops are followed iteration by iteration, long ones
until what they do repeats itself; then one period is run with a symbol for its number, which shows
that it goes on like this, and the last iterations follow. The trace ends where the kernel gets too
long. Until then, everything else in it happens, in that order, in every block.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pallasite.plugin import (
    GENERIC,
    BarrierRole,
    BarrierUse,
    EventContext,
    EventKind,
    SourceLocation,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import Region
from pallasite.plugin.language import (
    GMEM,
    MemorySpace,
    WarpMesh,
    memory_effect,
    memory_space_of,
    tensor_core_pipeline_effect,
)
from pallasite_std.barriers.base import is_barrier
from pallasite_std.checks import repeats
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import views_of
from pallasite_std.checks.scalars import Memory, Places, ScalarVisitor, is_scalar
from pallasite_std.memory.regions import MemoryRegion, memory_region
from pallasite_std.pipelines.warp_specialized.register_split import split_registers_p
from pallasite_std.primitives import barriers, copies
from pallasite_std.primitives.arguments import argument_of
from pallasite_std.rules.registers import set_max_registers_p

MOST_EQUATIONS = 3000
"""Of all threads of a kernel together, which compute integers or touch references."""

MOST_ITERATIONS = 10
"""Of loops that end then, or of which it is not known how long they are."""

MOST_UNLIKE_ITERATIONS = 26
"""Before a loop begins to repeat itself."""

FEWEST_ITERATIONS = 5
"""That it takes to find out that a loop repeats itself, after one of them."""

MOST_PERIODS_BEHIND = 4
"""That may differ at the end of a loop."""

MOST_TILL_RETRY = 4
"""Iterations, at first and after a period that did not go on like this."""

_HARMLESS = frozenset(
    {
        *(set_max_registers_p, split_registers_p, copies.async_prefetch_p),
        *(barriers.griddepcontrol_wait_p, barriers.griddepcontrol_launch_dependents_p),
    }
)


_KNOWN = frozenset({int, v.Form, Memory})
"""Classes of operands of which two that are equal are the same."""


class Kind(enum.Enum):
    """What an event is.

    READ, WRITE: of shared memory, by the lanes of the thread.
    COPY_IN: an asynchronous write of shared memory; it is complete when its barrier's phase is.
    COPY_OUT: an asynchronous read of shared memory, which belongs to the open group of copies.
    COMMIT: the group of copies is closed.
    AWAIT_COPIES: all but some groups are complete, or have read shared memory.
    FENCE: what the thread wrote may be read by copies.
    ARRIVE: on a barrier, by the thread or by something asynchronous; EXPECT announces bytes, too.
    WAIT: for the next phase of a barrier.
    FORK: the warps of the thread go on, each for itself, until all have come to their ends.
    UNKNOWN: anything, to some barriers and in the groups of copies.
    REPEAT: some events, again and again.
    """

    READ = "read"
    WRITE = "write"
    COPY_IN = "copy in"
    COPY_OUT = "copy out"
    COMMIT = "commit"
    AWAIT_COPIES = "await copies"
    FENCE = "fence"
    ARRIVE = "arrive"
    WAIT = "wait"
    FORK = "fork"
    UNKNOWN = "unknown"
    REPEAT = "repeat"

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BarrierAt:
    """One barrier of an allocation, of which there is one object only."""

    variable: Any
    index: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"barrier {', '.join(map(str, self.index))} of the array"
            if self.index
            else ("the barrier")
        )

    @property
    def dtype(self) -> Any:
        """Its element type."""
        return self.variable.aval.dtype


@dataclasses.dataclass(slots=True, eq=False)
class Event:
    """One thing that a thread does.

    Attributes:
      kind: what.
      equation: the equation, for its line.
      region: of shared memory.
      barrier: that is arrived on, waited for, or on which a copy completes.
      arrivals: of ARRIVE and COPY_IN.
      expected: bytes that are announced.
      delivered: bytes that arrive.
      left: how many groups may stay, of AWAIT_COPIES.
      warps: what the warps do, of FORK.
      lost: arrays of barriers that UNKNOWN may use.
      groups: whether UNKNOWN may begin, close or wait for groups of copies.
      period: the events of REPEAT.
      count: how often they happen.
      key: what tells it apart from others, once that was asked for; see :func:`repeats.keys`.
    """

    kind: Kind
    equation: Any
    region: MemoryRegion | None = None
    barrier: BarrierAt | None = None
    arrivals: int = 0
    expected: int = 0
    delivered: int = 0
    left: int = 0
    warps: tuple[Trace | repeats.Thread, ...] = ()
    lost: tuple[Any, ...] = ()
    groups: bool = False
    period: tuple[Event, ...] = ()
    count: int = 0
    key: Any = dataclasses.field(default=None, init=False)

    @property
    def location(self) -> SourceLocation | None:
        """The user's line."""
        return _jax.user_location(self.equation.source_info)


class Own:
    """Stands for an allocation of one thread."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


class _Stop(Exception):
    """It is not known what the thread does next."""


class _TooLongError(_Stop):
    """The kernel has too many equations to follow."""


class Trace(ScalarVisitor):
    """The events of one thread.

    Attributes:
      events: in order.
      complete: whether they are all that the thread does.
    """

    def __init__(
        self, context: Any, places: Places, thread: int, budget: int, warp: Any = (None, None)
    ):
        super().__init__(context.jaxprs, places, thread)
        self.warp = warp
        self.context = context
        self.events: list[Event] = []
        self.complete = False
        self.budget = budget
        self._event_context = EventContext(context.target, in_warp=warp[1] is not None)

    def follow(self, jaxpr: Any, operands: Sequence[Any]) -> None:
        """Follows the thread until its end, or to where it is not known what comes next."""
        try:
            self.run(jaxpr, operands)
        except _Stop:
            return
        self.complete = True

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        self.budget -= len(self.steps(jaxpr).steps)
        if self.budget < 0:
            raise _TooLongError
        return super().run(jaxpr, operands)

    def allocation(self, equation: Any, region: Region, position: int) -> Any:
        """Memory that the threads of the block share, or that is this thread's own."""
        variable = region.inputs[position]
        shared = self.places.thread_name in equation.params.get("collective_axes", ())
        key = variable, None if shared else self.thread
        found = self.places.memories.get(key)
        if found is None:
            found = Memory(variable if shared else Own(variable.aval))
            self.places.memories[key] = found
        return found

    # Control flow ---------------------------------------------------------------------------------

    def ways(
        self, equation: Any, regions: Sequence[Region], operands: list[Any]
    ) -> list[dict[int, Any]]:
        if not any(_matters(region.jaxpr) for region in regions):
            return [{} for _ in regions]
        before = self.events
        sides, found = [], list[dict[int, Any]]()
        try:
            for region in regions:
                self.events = []
                found.append(self.call(equation, region, operands))
                sides.append(self.events)
        finally:
            self.events = before
        agreed = common_events(sides)
        if agreed is None:
            self._unknown(equation, regions, operands)
        else:
            self.events.extend(agreed)
        return found

    def _unknown(self, equation: Any, regions: Sequence[Region], operands: list[Any]) -> None:
        """Goes on behind regions of which it is not known what they do.

        Raises:
          _Stop: nor is it known what they do it to.
        """
        lost: dict[Any, None] = {}
        for region in regions:
            inputs = dict(zip(region.inputs, operands_of(region, operands), strict=True))
            for effect in region.jaxpr.effects:
                variable = _jax.input_of_effect(effect)
                if variable is None:
                    if effect not in (memory_effect, tensor_core_pipeline_effect):
                        raise _Stop
                elif (
                    memory_space_of(variable.aval) is not GMEM
                    and type(inputs.get(variable)) is not Memory
                ):
                    raise _Stop
            # Not all that uses a barrier has an effect on it.
            for variable, memory in inputs.items():
                if is_barrier(variable.aval):
                    if type(memory) is not Memory:
                        raise _Stop
                    lost[memory.variable] = None
        self.events.append(Event(Kind.UNKNOWN, equation, lost=tuple(lost), groups=True))

    def loop(self, equation: Any, regions: Sequence[Region], operands: list[Any]) -> dict[int, Any]:
        *conditions, body = regions
        matters = any(_matters(region.jaxpr) for region in regions)
        if not matters and (body.trips is None or body.trips > MOST_ITERATIONS):
            return self.carried_results(body, _after_any(body, operands))
        if matters and not conditions and (body.trips or 0) > MOST_ITERATIONS:
            after = self._loop_again(equation, body, operands)
            if after is None:
                self._unknown(equation, regions, operands)
                after = _after_any(body, operands)
            return self.carried_results(body, after)
        for number in range(MOST_ITERATIONS + 1 if conditions or body.trips is not None else 0):
            if number == body.trips:
                return self.carried_results(body, operands)
            for condition in conditions:
                inputs = self.inputs(equation, condition, operands)
                (again,) = self.region(equation, condition, inputs)
                if again == 0:
                    return self.carried_results(body, operands)
                if not isinstance(again, int):
                    break
            else:
                if number < MOST_ITERATIONS:
                    operands = self.after(equation, body, operands)
                continue
            break
        self._unknown(equation, regions, operands)
        return self.carried_results(body, _after_any(body, operands))

    def _loop_again(self, equation: Any, body: Region, operands: list[Any]) -> list[Any] | None:
        """A long loop, which is not followed again where it began the same before."""
        known = self.places.loops
        relevant = [n for n, one in enumerate(equation.invars) if _matters_as(one)]
        chosen = [operands[one] for one in relevant]
        if not _KNOWN.issuperset(map(type, chosen)):
            return self._long_loop(equation, body, operands)
        key = id(equation), self.thread, *self.warp, *chosen
        found = known.get(key)
        if found is not None and found[2] <= self.budget:
            events, after, spent = found
            self.events.extend(events)
            self.budget -= spent
            return list(after)
        first, before = len(self.events), self.budget
        result = self._long_loop(equation, body, operands)
        events = self.events[first:]
        if result is not None and not any(map(repeats.is_vague, events)):
            known[key] = events, result, before - self.budget
        return result

    def _long_loop(self, equation: Any, body: Region, operands: list[Any]) -> list[Any] | None:
        """A loop of known length; returns the operands after it. None if what it does does not
        repeat itself; its first iterations are then among the events."""
        assert body.trips is not None
        carried = [operand for _, operand in body.carried_operands()]
        states, parts, keys = [operands], list[list[Event]](), list[Any]()
        retry = MOST_TILL_RETRY
        while len(parts) < body.trips:
            if len(parts) == MOST_UNLIKE_ITERATIONS:
                return None
            before = self.budget
            operands = self._part(equation, body, operands, parts, keys)
            states.append(operands)
            if (before - self.budget) * FEWEST_ITERATIONS > self.budget:
                return None  # There is no end to this.
            if len(parts) < retry:
                continue
            period = repeats.period_of(keys, states, carried)
            left = body.trips - len(parts)
            if period is None or left < 2 * period:
                continue
            expected = [event for part in parts[-period:] for event in part]
            # Most loops end as they began; some have fewer copies to start in the end.
            none, fewest = left % period, left % period + period
            most = min(fewest + (MOST_PERIODS_BEHIND - 1) * period, left - period)
            for behind in sorted({none, fewest, most}):
                count = (left - behind) // period
                after = self._period(equation, body, states, carried, period, count, keys)
                if after is not None:
                    self.events.append(
                        Event(Kind.REPEAT, equation, period=tuple(expected), count=count)
                    )
                    for _ in range(behind):
                        after = self._part(equation, body, after, parts, keys)
                    return after
            # While rings are being filled, all iterations are alike.
            retry = len(parts) + min(len(parts), MOST_TILL_RETRY)
        return operands

    def _part(
        self,
        equation: Any,
        body: Region,
        operands: list[Any],
        parts: list[list[Event]],
        keys: list[Any],
    ) -> list[Any]:
        """One iteration, whose events are noted; returns the operands of the next one."""
        before = len(self.events)
        operands = self.after(equation, body, operands)
        parts.append(self.events[before:])
        keys.append(repeats.keys(parts[-1]))
        return operands

    def _period(
        self,
        equation: Any,
        body: Region,
        states: Sequence[list[Any]],
        carried: Sequence[int],
        period: int,
        count: int,
        keys: Sequence[Any],
    ) -> list[Any] | None:
        """The operands after so many periods like the last one, if there certainly are any.

        They are run at once, with a symbol for the number of the period: if each then does what
        the last one did, and leaves to the next what that began with, all do.
        """
        latest, earlier = states[-1], states[-1 - period]
        number = v.symbol(count, "the period")
        one = repeats.advanced(latest, earlier, carried, number)
        expected = repeats.advanced(latest, earlier, carried, v.add(number, 1))
        before, self.events = self.events, []
        try:
            for place in range(period):
                first = len(self.events)
                one = self.after(equation, body, one)
                if repeats.keys(self.events[first:]) != keys[len(keys) - period + place]:
                    return None
        finally:
            self.events = before
        expand = self.places.splits.expand
        if any(expand(one[each]) != expand(expected[each]) for each in carried):
            return None
        return repeats.advanced(latest, earlier, carried, count)

    def region(self, equation: Any, region: Region, inputs: Sequence[Any]) -> list[Any]:
        if region.per_warp:
            if _matters(region.jaxpr):
                self.events.append(self._fork(equation, region, inputs))
            return [None] * len(region.jaxpr.outvars)
        return super().region(equation, region, inputs)

    def _fork(self, equation: Any, region: Region, inputs: Sequence[Any]) -> Event:
        meshes = equation.params.get("meshes", ())
        name = next((mesh.axis_name for mesh in meshes if isinstance(mesh, WarpMesh)), None)
        warps = []
        for number in range(WarpMesh.NUM_WARPS):
            # Most often one or two of them do something.
            is_last = number == WarpMesh.NUM_WARPS - 1
            budget = self.budget if is_last else self.budget // 2
            warp = Trace(self.context, self.places, self.thread, budget, (name, number))
            warp.follow(region.jaxpr, inputs)
            self.budget -= budget - warp.budget
            warps.append(warp)
        return Event(Kind.FORK, equation, warps=tuple(warps))

    def axis(self, name: Any) -> Any:
        """The position along an axis; warps of a thread are one, too."""
        if name is not None and name == self.warp[0]:
            return self.warp[1]
        return super().axis(name)

    # Events ---------------------------------------------------------------------------------------

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        if not equation.effects:  # What computes integers does not get here.
            return None
        key = self._key(equation, operands)
        events = self.places.events.get(key) if key is not None else None
        if events is None:
            try:
                events = [*self._events(equation, operands)]
            except _Stop:
                events = [self._unknown_equation(equation, operands)]
            if key is not None:
                self.places.events[key] = events
        self.events.extend(events)
        return None

    def _key(self, equation: Any, operands: list[Any]) -> Any:
        """What the events of an equation depend on, where it may come again; None if some of it is
        not known."""
        # Rings come back to the same slots, and other threads and blocks do the same. What is equal
        # but no number may yet differ.
        known = self.places.relevant
        positions = known.get(id(equation))
        if positions is None:
            positions = known[id(equation)] = relevant_operands(equation)
        chosen = [operands[position] for position in positions]
        return (id(equation), *chosen) if _KNOWN.issuperset(map(type, chosen)) else None

    def _unknown_equation(self, equation: Any, operands: list[Any]) -> Event:
        """Stands for an equation of which it is not known what it does.

        Raises:
          _Stop: nor is it known what it does it to.
        """
        others = {e for e in equation.effects if _jax.input_of_effect(e) is None}
        if others - {memory_effect, tensor_core_pipeline_effect}:
            raise _Stop
        groups = memory_effect in others and not self.context.barriers.uses(equation.primitive)
        lost = [o.variable for o in operands if type(o) is Memory and is_barrier(o.aval)]
        return Event(Kind.UNKNOWN, equation, lost=tuple(lost), groups=groups)

    def _events(self, equation: Any, operands: list[Any]) -> Iterator[Event]:
        primitive, params = equation.primitive, equation.params
        if primitive in _HARMLESS:
            return
        # An operand that is not known differs from one that is not there, which is None.
        operands = [object() if one is None else one for one in operands]
        if primitive is copies.commit_group_p:
            yield Event(Kind.COMMIT, equation)
            return
        if primitive is copies.wait_smem_to_gmem_p:
            yield Event(Kind.AWAIT_COPIES, equation, left=params["n"])
            return
        if primitive is copies.copy_smem_to_gmem_p:
            yield from self._copy_out(equation, operands)
            return
        uses = self.context.barriers.uses(primitive)
        events: Any = ()
        if not uses or any(_is_memory(one.aval) for one in equation.invars):
            events = self.context.memory.events(self._event_context, equation, operands)
        if uses:
            yield from self._barriers(equation, operands, uses, events)
        elif events is None:
            yield from self._undeclared(equation, operands)
        else:
            yield from self._accesses(equation, events)

    def _copy_out(self, equation: Any, operands: list[Any]) -> Iterator[Event]:
        source, _, predicate = equation.params["args_tree"].unflatten(operands)
        if predicate is not None and not isinstance(predicate, int):
            raise _Stop
        if predicate is None or predicate:
            yield Event(Kind.COPY_OUT, equation, self._region(source))
        if equation.params["commit_group"]:
            yield Event(Kind.COMMIT, equation)

    def _accesses(self, equation: Any, events: Sequence[Any]) -> Iterator[Event]:
        for event in events:
            if event.kind is EventKind.FENCE:
                yield Event(Kind.FENCE, equation)
            elif event.kind is EventKind.ACCESS or (
                event.kind is EventKind.STORE and event.proxy != GENERIC
            ):
                raise _Stop
            elif event.kind in (EventKind.LOAD, EventKind.STORE) and event.certain:
                region = self._region(event.reference)
                if region is not None:
                    kind = Kind.READ if event.kind is EventKind.LOAD else Kind.WRITE
                    yield Event(kind, equation, region)

    def _barriers(
        self, equation: Any, operands: list[Any], uses: Sequence[BarrierUse], events: Any
    ) -> Iterator[Event]:
        stores: Iterator[Any] = iter(())
        if events is not None:
            reads = [e for e in events if e.kind is EventKind.LOAD]
            yield from self._accesses(equation, reads)
            stores = iter([e for e in events if e.kind is EventKind.STORE])
        for use in uses:
            barrier = argument_of(use, use.barrier, equation.params, operands)
            if barrier is None:
                if use.role is BarrierRole.COMPLETE and events is not None:
                    for _ in stores:  # What waits for it is not known.
                        raise _Stop
                continue
            if use.role is BarrierRole.TEST:
                continue
            condition = None
            if use.predicate is not None:
                condition = argument_of(use, use.predicate, equation.params, operands)
            if condition is not None and not isinstance(condition, int):
                raise _Stop
            if condition == 0:
                if _arrives_anyway(equation):
                    yield Event(Kind.ARRIVE, equation, None, self._barrier(barrier), 1)
                continue
            yield from self._use(equation, use, self._barrier(barrier), stores)

    def _use(
        self, equation: Any, use: BarrierUse, barrier: BarrierAt, stores: Iterator[Any]
    ) -> Iterator[Event]:
        params = equation.params
        kind = self.context.barriers.kind(barrier.dtype)
        arrivals = use.arrivals(barrier.dtype, params)
        if kind is None or not kind.counted(barrier.dtype) or arrivals is None:
            raise _Stop
        if use.role is BarrierRole.WAIT:
            yield Event(Kind.WAIT, equation, barrier=barrier)
            return
        transferred = self._transferred(equation, use) if use.transfers is not None else 0
        if use.role is BarrierRole.COMPLETE:
            expected = transferred if arrivals else 0
            event = Event(Kind.ARRIVE, equation, None, barrier, arrivals, expected, transferred)
            for store in stores:
                event.kind, event.region = Kind.COPY_IN, self._region(store.reference)
                break
            yield event
        else:
            yield Event(Kind.ARRIVE, equation, None, barrier, arrivals, transferred)

    def _transferred(self, equation: Any, use: BarrierUse) -> int:
        """Bytes, which do not change from iteration to iteration."""
        known = self.places.transfers
        key = id(equation), use.barrier
        if key not in known:
            assert use.transfers is not None
            types = use.arguments([one.aval for one in equation.invars], equation.params)
            known[key] = use.transfers(types, equation.params)
        return known[key]

    def _undeclared(self, equation: Any, operands: list[Any]) -> Iterator[Event]:
        """A primitive of which no plugin has said what it does: it may read what it is given."""
        for effect in equation.effects:
            variable = _jax.input_of_effect(effect)
            if variable is None:
                if effect is not tensor_core_pipeline_effect:
                    raise _Stop
                continue
            aval = equation.invars[variable].aval if isinstance(variable, int) else variable.aval
            if is_barrier(aval) or (type(effect) is not _jax.ReadEffect and _is_shared(aval)):
                raise _Stop
        for memory, transforms in views_of(equation, operands):
            region = self._region(_jax.TransformedRef(memory, transforms))
            if region is not None:
                yield Event(Kind.READ, equation, region)

    def _region(self, reference: Any) -> MemoryRegion | None:
        """The shared memory behind a reference; None for other memory."""
        transforms: Sequence[Any] = ()
        if isinstance(reference, _jax.TransformedRef):
            reference, transforms = reference.ref, reference.transforms
        if type(reference) is not Memory or not _is_shared(reference.aval):
            return None
        return memory_region(reference.variable, transforms, self.context.view_rule)

    def _barrier(self, reference: Any) -> BarrierAt:
        transforms: Sequence[Any] = ()
        if isinstance(reference, _jax.TransformedRef):
            reference, transforms = reference.ref, reference.transforms
        if type(reference) is not Memory:
            raise _Stop
        starts = [0] * len(reference.aval.shape)
        sizes = list(reference.aval.shape)
        free = list(range(len(sizes)))
        for one in transforms:
            if not isinstance(one, _jax.NDIndexer) or len(one.indices) != len(free):
                raise _Stop
            for position, index in zip([*free], one.indices, strict=True):
                is_slice = isinstance(index, _jax.Slice)
                start = index.start if is_slice else index
                if not isinstance(start, int) or (is_slice and index.stride != 1):
                    raise _Stop
                starts[position] += start
                sizes[position] = index.size if is_slice else 1
                if not is_slice:
                    free.remove(position)
        if any(size != 1 for size in sizes):
            raise _Stop
        key = reference.variable, *starts
        found: BarrierAt | None = self.places.barriers.get(key)
        if found is None:
            found = self.places.barriers[key] = BarrierAt(reference.variable, tuple(starts))
        return found


def _arrives_anyway(equation: Any) -> bool:
    """Whether a copy arrives on its barrier even where its predicate is false."""
    return equation.primitive is copies.copy_gmem_to_smem_p and bool(equation.params["arrive"])


def operands_of(region: Region, operands: Sequence[Any]) -> list[Any]:
    """What a region's inputs are, as far as they are operands."""
    return [None if one is None else operands[one] for one in region.operands]


def relevant_operands(equation: Any) -> tuple[int, ...]:
    """The positions of all operands but references to memory that is not shared, and what these are
    indexed by."""
    operands = equation.invars
    tree, rest = equation.params.get("args_tree"), equation.params.get("tree")
    ignored: set[int] = set()
    if tree is not None:
        arguments = tree.unflatten([_Position(number) for number in range(len(operands))])
        for view in jax.tree.leaves(arguments, is_leaf=_is_view):
            reference = view.ref if _is_view(view) else view
            if type(reference) is not _Position:
                continue
            aval = operands[reference.number].aval
            # Scalars, such as predicates, are no references.
            if isinstance(aval, _jax.AbstractRef) and not _is_followed(aval):
                parts = [reference, *(jax.tree.leaves(view.transforms) if _is_view(view) else ())]
                ignored.update(one.number for one in parts if type(one) is _Position)
    elif rest is not None and not _is_followed(operands[0].aval):
        return ()
    return tuple(n for n, one in enumerate(operands) if n not in ignored and _matters_as(one))


class _Position:
    """Stands for an operand."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


def _is_view(value: Any) -> bool:
    return isinstance(value, _jax.TransformedRef)


def _matters_as(operand: Any) -> bool:
    """Whether an operand may matter: arrays do not, which the walk knows nothing of."""
    return isinstance(operand.aval, _jax.AbstractRef) or is_scalar(operand.aval)


def _after_any(body: Region, operands: Sequence[Any]) -> list[Any]:
    """The operands of a loop after any number of iterations."""
    after = list(operands)
    for _, operand in body.carried_operands():
        if type(after[operand]) is not Memory:
            after[operand] = None
    return after


def common_events(sides: Sequence[Sequence[Event]]) -> list[Event] | None:
    """What happens whichever of some events do; None if they differ in more than accesses."""
    keys = [repeats.keys(side) for side in sides]
    if all(one == keys[0] for one in keys):
        return list(sides[0])
    kept = [[e for e in side if e.kind not in (Kind.READ, Kind.WRITE)] for side in sides]
    keys = [repeats.keys(side) for side in kept]
    return kept[0] if all(one == keys[0] for one in keys) else None


def _is_memory(aval: Any) -> bool:
    return isinstance(aval, _jax.AbstractRef) and not is_barrier(aval) and _is_shared(aval)


def _is_followed(aval: Any) -> bool:
    return is_barrier(aval) or _is_shared(aval)


def _is_shared(aval: Any) -> bool:
    space = memory_space_of(aval)
    return isinstance(space, MemorySpace) and space.is_shared


def _matters(jaxpr: Any) -> bool:
    """Whether a jaxpr may do anything to shared memory or to barriers."""
    for effect in jaxpr.effects:
        variable = _jax.input_of_effect(effect)
        if variable is None:
            if effect is memory_effect or effect is not tensor_core_pipeline_effect:
                return True
        elif memory_space_of(variable.aval) is not GMEM:
            return True
    return False
