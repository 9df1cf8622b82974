"""A check of wgmma waits: operands and accumulators that are touched in flight.

The equations of each thread of a block are followed in order. what is known then is which wgmma
certainly are in flight, which parts of shared memory they read, and what was stored to shared
memory without ``commit_smem``. Loops are followed for their first iterations, with the numbers that
their counters have, so a slot of a ring is known where it comes back; of a branch on an unknown
condition, all sides are followed, and what is in flight after it is what is so after each. So only
mistakes that happen whenever the code runs are found, and nothing is said about the rest.

In warpgroup semantics, waits that are missing are added instead.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pallasite.plugin import (
    GENERIC,
    BarrierRole,
    BarrierTables,
    BarrierUse,
    EventContext,
    EventKind,
    InvalidValueError,
    MemoryEvent,
    MemoryTables,
    Semantics,
    SourceLocation,
    jaxprs,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import tensor_core_pipeline_effect
from pallasite_hopper.matrix import products as prim
from pallasite_hopper.matrix.accumulators import AbstractAccumulatorRef
from pallasite_hopper.matrix.regions import Accumulator, Memory, region_of
from pallasite_hopper.matrix.scalars import Scalars, Symbol
from pallasite_std.api import ASYNC, MemoryRegion, inline, is_barrier

_MOST_EQUATIONS = 30_000
_MOST_ITERATIONS = 8
_MOST_OUTER_ITERATIONS = 2
"""Of a loop around others: enough to come from its end to its beginning."""


class UnusedAccumulatorWarning(UserWarning):
    """MMAs accumulate into an accumulator that nothing reads."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """A ``wgmma`` that was issued.

    Attributes:
      accumulator: what it is added to.
      operands: what it reads of shared memory.
      location: where it was started.
    """

    accumulator: Accumulator
    operands: tuple[MemoryRegion, ...]
    location: SourceLocation | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Store:
    region: MemoryRegion
    location: SourceLocation | None


class _State:
    """What is certain at one point of a thread.

    Attributes:
      flying: wgmma in flight; for each, how many may have been issued since.
      stored: what was stored to shared memory and not committed.
    """

    def __init__(self) -> None:
        self.flying: dict[_Product, int] = {}
        self.stored: dict[_Store, None] = {}

    def copy(self) -> _State:
        new = _State()
        new.flying, new.stored = dict(self.flying), dict(self.stored)
        return new

    def forget(self) -> None:
        self.flying, self.stored = {}, {}

    def replace(self, other: _State) -> None:
        self.flying, self.stored = other.flying, other.stored

    def start(self, product: _Product) -> None:
        self.flying = {one: since + 1 for one, since in self.flying.items()}
        self.flying[product] = 0

    def wait(self, left: int) -> None:
        self.flying = {one: since for one, since in self.flying.items() if since < left}


def _join(states: Sequence[_State]) -> _State:
    """The join: what is certain where control flow merges."""
    first, *rest = states
    joined = _State()
    for product, since in first.flying.items():
        if all(product in other.flying for other in rest):
            joined.flying[product] = max(since, *(other.flying[product] for other in states))
    for store in first.stored:
        if all(store in other.stored for other in rest):
            joined.stored[store] = None
    return joined


class _TooLong(Exception):
    """The kernel has too many equations to follow."""


def check_matrix_waits(jaxpr: Any, context: Any) -> Any:
    """Raises if something is touched that a wgmma in flight certainly uses.

    Where the semantics imply waits, they are added instead.

    Args:
      jaxpr: the kernel.
      context: the :class:`~pallasite.passes.pipeline.PassContext`; its mesh says how many threads
        a block has.

    Returns:
      The kernel, with further waits.

    Warns with :class:`UnusedAccumulatorWarning`.

    Raises:
      InvalidValueError: at the line that touches it, or that issues a wgmma that is never waited
      for.
    """
    table: jaxprs.JaxprTable = context.jaxprs
    if not any(one.primitive is prim.wgmma_ref_p for one in table.equations(jaxpr)):
        return jaxpr
    missing: _Missing | None = _Missing() if _adds_waits(context) else None
    mesh = getattr(context, "mesh", None)
    count, name = getattr(mesh, "num_threads", None) or 1, getattr(mesh, "thread_name", None)
    accumulators: dict[Any, Accumulator] = {}
    steps: dict[int, tuple[Any, list[_Step]]] = {}
    try:
        for number in range(count):
            thread = _Thread(number, name, accumulators, missing, steps, context)
            thread.run(jaxpr, [_argument(variable) for variable in jaxpr.invars])
    except _TooLong:
        return jaxpr
    for one in accumulators.values():
        if one.multiplied is not None and not one.read:
            warnings.warn(
                f"{one.multiplied}: wgmma accumulates into an accumulator that is never read",
                UnusedAccumulatorWarning,
                stacklevel=2,
            )
    return jaxpr if missing is None else missing.added_to(jaxpr, table)


def _adds_waits(context: Any) -> bool:
    options = getattr(context, "options", None)
    semantics = getattr(options, "semantics", Semantics.LANE)
    if not semantics.extends(Semantics.WARPGROUP):
        return False
    return not getattr(options, "unsafe_no_auto_barriers", False)


class _Missing:
    """Waits to add: before which equations, and how many wgmma may stay in flight."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Any, int]] = {}

    def add(self, equation: Any, left: int) -> None:
        """Before ``equation`` at most ``left`` wgmma may be in flight."""
        _, before = self._left.get(id(equation), (equation, left))
        self._left[id(equation)] = (equation, min(before, left))

    def added_to(self, jaxpr: Any, table: jaxprs.JaxprTable) -> Any:
        """The jaxpr with the waits."""
        effects = {tensor_core_pipeline_effect}
        waits = {}
        for key, (equation, left) in self._left.items():
            params = {"n": left, "before": str(equation.primitive)}
            waits[key] = [(prim.wgmma_added_wait_p, params, effects)]
        return jaxprs.with_insertions(table, jaxpr, waits)


def _argument(variable: Any) -> Any:
    return Memory(variable) if isinstance(variable.aval, _jax.AbstractRef) else None


@dataclasses.dataclass(slots=True)
class _Step:
    """An equation that a thread has to look at.

    Attributes:
      equation: the equation.
      reads: for each operand its variable, or None and the value of a literal.
      action: a rule, which may leave a cheaper one in ``changed``; ``_COMPUTES``; or None if it has
        jaxprs.
    """

    equation: Any
    reads: list[tuple[Any, Any]]
    action: Any


class _Thread(jaxprs.Visitor[Any]):
    """Follows one thread of a block; values are numbers, symbols, memory and accumulators.

    Attributes:
      state: what is certain where it has come to.
    """

    def __init__(
        self,
        number: int,
        name: Any,
        accumulators: dict[Any, Accumulator],
        missing: _Missing | None,
        steps: dict[int, tuple[Any, list[_Step]]],
        context: Any,
    ):
        super().__init__(context.jaxprs)
        self.missing = missing
        self.tables: tuple[MemoryTables, BarrierTables] = (context.memory, context.barriers)
        self.contexts = {
            in_warp: EventContext(context.target, in_warp=in_warp) for in_warp in (False, True)
        }
        self.view_rule = context.view_rule
        self.mapped: Any = None
        self.announced: Any = None
        self.scalars = Scalars(number, name)
        self.accumulators = accumulators
        self.iterations: dict[Any, int] = {}
        self.products: dict[Any, tuple[Any, tuple[MemoryRegion, ...]]] = {}
        self.steps = steps
        self.changed: dict[int, Any] = {}
        self.equations = 0
        self.state = _State()

    def unknown(self, variable: Any) -> Any:
        return None

    def literal(self, atom: Any) -> Any:
        return self.scalars.literal(atom)

    def number(self, value: Any) -> int | None:
        return value if isinstance(value, int) else None

    def join(self, values: Sequence[Any], variable: Any) -> Any:
        first, *rest = values
        return first if all(value is first for value in rest) else Symbol()

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        self.equations += len(jaxpr.eqns)
        if self.equations > _MOST_EQUATIONS:
            raise _TooLong
        inputs = jaxpr.invars
        if jaxpr.constvars and len(operands) > len(inputs):
            inputs = [*jaxpr.constvars, *inputs]
        values: dict[Any, Any] = dict(zip(inputs, operands, strict=True))
        value = values.get  # Of what is left out nothing is known.
        changed = self.changed
        for step in self._steps(jaxpr):
            equation, action = step.equation, step.action
            if action is _Thread.nothing:
                continue
            found = [one if variable is None else value(variable) for variable, one in step.reads]
            if action is _COMPUTES:
                values[equation.outvars[0]] = self.scalars.result(equation, found)
            elif action is not None:
                action(self, equation, found, self.state)
                if changed:
                    step.action = changed.pop(id(equation), action)
                    changed.clear()
            else:
                results = self.equation(equation, found)
                if results is not None:
                    values.update(zip(equation.outvars, results, strict=True))
        return [
            self.literal(atom) if isinstance(atom, _jax.Literal) else value(atom)
            for atom in jaxpr.outvars
        ]

    def _steps(self, jaxpr: Any) -> list[_Step]:
        """The equations of a jaxpr that matter, for all threads and iterations."""
        known = self.steps.get(id(jaxpr))
        if known is None:
            found = []
            for equation in jaxpr.eqns:
                carries = equation.primitive in self._carriers
                action = None if carries else self._action(equation)
                if carries or action is not None:
                    reads = [
                        (None, self.literal(one)) if isinstance(one, _jax.Literal) else (one, None)
                        for one in equation.invars
                    ]
                    found.append(_Step(equation, reads, action))
            known = self.steps[id(jaxpr)] = jaxpr, found
        return known[1]

    def _action(self, equation: Any) -> Any:
        """What an equation does, until it turns out to do less: a rule, ``_COMPUTES``, or None for
        nothing that matters here."""
        rule = _RULES.get(equation.primitive)
        if rule is not None:
            return rule
        if self.scalars.computes(equation):
            return _COMPUTES
        if tensor_core_pipeline_effect in equation.effects:
            return _Thread.unknown_and_accesses
        memory, barriers = self.tables
        expects = any(use.role is BarrierRole.EXPECT for use in barriers.uses(equation.primitive))
        if expects or (memory.declares(equation.primitive) and not _only_reads(equation)):
            return _Thread.accesses
        return None

    def _unknown(self, operands: Sequence[Any], state: _State) -> None:
        """Something that may wait, or use accumulators in its own way."""
        state.forget()
        for operand in operands:
            if isinstance(operand, Accumulator):
                operand.read = True

    # Control flow ---------------------------------------------------------------------------------

    def ways(
        self, equation: Any, regions: Sequence[jaxprs.Region], operands: list[Any]
    ) -> list[dict[int, Any]]:
        before, ends, results = self.state, [], []
        for region in regions:
            self.state = before.copy()
            results.append(self.call(equation, region, operands))
            ends.append(self.state)
        self.state = _join(ends)
        return results

    def loop(
        self, equation: Any, regions: Sequence[jaxprs.Region], operands: list[Any]
    ) -> dict[int, Any]:
        body = regions[-1]
        if body.trips is None:
            return self._repeat(equation, regions, operands)
        # The first iterations, and if there are more, the last one.
        most = self._iterations(body.jaxpr)
        for _ in range(min(body.trips, most)):
            operands = self.iteration(equation, regions, operands)
        if body.trips > most:
            self.state.forget()
            operands = self.iteration(equation, regions, _any_iteration(body, operands))
        return self.carried_results(body, operands)

    def _iterations(self, body: Any) -> int:
        """How many iterations of a loop are followed."""
        found = self.iterations.get(body)
        if found is None:
            inner = (one for each in self.table.equations(body) for one in self.table.regions(each))
            has_loop = any(region.is_loop for region in inner)
            found = _MOST_OUTER_ITERATIONS if has_loop else _MOST_ITERATIONS
            self.iterations[body] = found
        return found

    def _repeat(
        self, equation: Any, regions: Sequence[jaxprs.Region], operands: list[Any]
    ) -> dict[int, Any]:
        """A loop with a condition."""
        *conditions, body = regions
        before = self.state.copy()
        certain = bool(conditions)
        for _ in range(self._iterations(body.jaxpr)):
            again = [
                self.region(equation, one, self.inputs(equation, one, operands))[0]
                for one in conditions
            ]
            if 0 in again:
                break
            certain = certain and all(isinstance(number, int) for number in again)
            operands = self.after(equation, body, operands)
        else:
            certain = False
        if certain:
            return self.carried_results(body, operands)
        # How often it runs is not known, maybe not at all.
        operands = _any_iteration(body, operands)
        self.state = _State()
        self.after(equation, body, operands)
        if any(_touches(self.table, region.jaxpr) for region in regions):
            self.state.forget()
        else:
            self.state = before
            self.state.stored = {}
        return self.carried_results(body, _any_iteration(body, operands))

    # Scopes and warps -----------------------------------------------------------------------------

    def allocation(self, equation: Any, region: jaxprs.Region, position: int) -> Any:
        variable = region.inputs[position]
        if isinstance(variable.aval, AbstractAccumulatorRef):
            return self._accumulator(variable)
        return Memory(variable)

    def state_reference(
        self, equation: Any, region: jaxprs.Region, position: int, operand: Any
    ) -> Any:
        variable = region.inputs[position]
        if isinstance(variable.aval, AbstractAccumulatorRef):
            outer = isinstance(operand, Accumulator)
            accumulator = operand if outer else self._accumulator(variable)
            accumulator.read = True
            return accumulator
        return operand if isinstance(operand, Memory | Accumulator) else None

    def region(self, equation: Any, region: jaxprs.Region, inputs: Sequence[Any]) -> list[Any]:
        if region.per_warp:  # MMAs are not started there, but their operands written.
            self.mapped = equation
        outputs = super().region(equation, region, inputs)
        if region.per_warp:
            self.mapped = None
        if region.scoped:
            self._leave({inputs[position] for position in region.scoped})
        if any(isinstance(inputs[position], Accumulator) for position, _ in region.states):
            self.state.wait(0)
        return outputs

    def _leave(self, own: Collection[Any]) -> None:
        """The end of a scope, for its own accumulators."""
        for product in self.state.flying:
            if product.accumulator in own:
                raise InvalidValueError(
                    "this wgmma is never waited for: the scope of its accumulator ends while it is"
                    " in flight",
                    expected="acc[...], which waits and reads it, or plgpu.wgmma_wait(0), in the"
                    " scope",
                    location=product.location,
                )

    def _accumulator(self, variable: Any) -> Accumulator:
        return self.accumulators.setdefault(variable, Accumulator())

    # MMAs -----------------------------------------------------------------------------------------

    def product(self, equation: Any, operands: list[Any], state: _State) -> None:
        """``wgmma``."""
        location = _jax.user_location(equation.source_info)
        key = (id(equation), *operands)
        known = self.products.get(key)  # Rings come back to the same slots.
        if known is None:
            known = self.products[key] = self._operands(equation, operands)
        accumulator, regions = known
        if not isinstance(accumulator, Accumulator):
            state.forget()
            return
        accumulator.multiplied = accumulator.multiplied or location or "a kernel"
        for store in state.stored:
            if any(region.overlaps(store.region) for region in regions):
                if self.missing is not None:
                    break  # Layout inference adds the fence.
                raise InvalidValueError(
                    "a wgmma reads shared memory that was stored without plgpu.commit_smem()",
                    got=_place("the store", store.location),
                    expected="plgpu.commit_smem() between the store and the wgmma",
                    location=location,
                )
        state.start(_Product(accumulator, regions, location))

    def _operands(self, equation: Any, operands: list[Any]) -> tuple[Any, tuple[MemoryRegion, ...]]:
        """The accumulator of a product, and what it reads of shared memory."""
        acc, *matrices, _ = equation.params["args_tree"].unflatten(operands)
        regions = tuple(
            region
            for one in matrices
            if isinstance(one, _jax.TransformedRef)
            and (region := region_of(one, self.view_rule)) is not None
        )
        return acc.ref, regions

    def wait(self, equation: Any, operands: list[Any], state: _State) -> None:
        """``wgmma_wait``."""
        state.wait(equation.params["n"])

    def load(self, equation: Any, operands: list[Any], state: _State) -> None:
        """``wgmma_accumulator_load``."""
        left = equation.params["wait_n"]
        if left is not None:
            state.wait(left)
        self._use_accumulator(equation, operands[0], state, "read", f"wait_n={left}")
        if isinstance(operands[0], Accumulator):
            operands[0].read = True

    def store(self, equation: Any, operands: list[Any], state: _State) -> None:
        """``wgmma_accumulator_store``."""
        self._use_accumulator(equation, operands[0], state, "written", "acc[...] = value")

    def _use_accumulator(
        self, equation: Any, accumulator: Any, state: _State, what: str, got: str
    ) -> None:
        for product, since in list(state.flying.items()):
            if product.accumulator is accumulator:
                if self.missing is not None:
                    self._wait_first(equation, since, state)
                    continue
                raise InvalidValueError(
                    f"an accumulator is {what} while a wgmma into it is in flight",
                    got=f"{got} after {_place('the wgmma', product.location)}",
                    expected=f"plgpu.wgmma_wait({since}) before it"
                    + (f", or wait_n={since}" if what == "read" else ""),
                    location=_jax.user_location(equation.source_info),
                )

    # Shared memory --------------------------------------------------------------------------------

    def unknown_and_accesses(self, equation: Any, operands: list[Any], state: _State) -> None:
        """Something that may use accumulators, and that the tables may know besides."""
        self._unknown(operands, state)
        self.accesses(equation, operands, state)

    def accesses(self, equation: Any, operands: list[Any], state: _State) -> None:
        """What plugins' tables declare of a primitive: stores by any proxy, and fences."""
        memory, barriers = self.tables
        uses = barriers.uses(equation.primitive)
        if uses and any(use.role is BarrierRole.EXPECT for use in uses):
            self.announced = equation
        if not memory.declares(equation.primitive) or _only_reads(equation):
            return
        if self.missing is not None and not state.flying:
            return  # There is nothing to wait for; fences after stores are those of inference.
        context = self.contexts[self.mapped is not None]
        events = memory.events(context, equation, operands) or ()
        if not uses and all(event.kind not in _STORES_AND_FENCES for event in events):
            self.changed[id(equation)] = _Thread.nothing  # Nor will it store later.
        elif self.announced is not equation and all(map(_is_asynchronous, events)):
            self.changed[id(equation)] = _Thread.asynchronous_accesses
        for event in events:
            if event.kind is EventKind.FENCE and event.proxy == ASYNC:
                state.stored = {}
            elif event.kind is EventKind.STORE and event.certain:
                plain = event.proxy == GENERIC
                start = equation if plain else self._start(equation, uses)
                reference = event.reference
                if not isinstance(reference, _jax.TransformedRef):
                    reference = _jax.TransformedRef(reference, ())
                self._written(start, reference, state, plain=plain)

    def nothing(self, equation: Any, operands: list[Any], state: _State) -> None:
        """What has turned out not to matter here."""

    def asynchronous_accesses(self, equation: Any, operands: list[Any], state: _State) -> None:
        """Those that change nothing where nothing is in flight, and nothing was stored."""
        if state.flying or state.stored:
            self.accesses(equation, operands, state)

    def _start(self, equation: Any, uses: Sequence[BarrierUse]) -> Any:
        """Where an asynchronous store is decided: copies that do not arrive themselves belong to an
        equation that announces them, where the warps converge, and one of them starts them."""
        for use in uses:
            if use.role is BarrierRole.COMPLETE:
                dtypes = [v.aval.dtype for v in equation.invars if is_barrier(v.aval)]
                if dtypes and use.arrivals(dtypes[0], equation.params) == 0:
                    return self.announced or equation
        return equation

    def anything(self, equation: Any, operands: list[Any], state: _State) -> None:
        """Code that is not known."""
        self._unknown(operands, state)

    def _wait_first(self, equation: Any, left: int, state: _State) -> None:
        """Adds a wait before an equation; single warps cannot wait for the others' wgmma."""
        assert self.missing is not None
        self.missing.add(equation if self.mapped is None else self.mapped, left)
        state.wait(left)

    def _written(self, equation: Any, target: Any, state: _State, *, plain: bool) -> None:
        region = region_of(target, self.view_rule)
        if region is None:
            return
        location = _jax.user_location(equation.source_info)
        for product, since in list(state.flying.items()):
            if any(region.overlaps(one) for one in product.operands):
                if self.missing is not None:
                    self._wait_first(equation, since, state)
                    continue
                raise InvalidValueError(
                    "shared memory is overwritten while a wgmma that reads it is in flight",
                    got=_place("the wgmma", product.location),
                    expected=f"plgpu.wgmma_wait({since}) in between"
                    + (", or a smaller number" if since else ""),
                    location=location,
                )
        if plain:
            state.stored[_Store(region, location)] = None
        else:
            kept = [store for store in state.stored if store.region.memory is not region.memory]
            state.stored = dict.fromkeys(kept)


def _is_asynchronous(event: MemoryEvent) -> bool:
    """Whether an event is no store by the lanes themselves."""
    return event.kind is not EventKind.STORE or event.proxy != GENERIC


def _only_reads(equation: Any) -> bool:
    """Whether an equation can neither store nor fence."""
    effects = equation.effects
    return bool(effects) and all(type(effect) is _jax.ReadEffect for effect in effects)


def _place(what: str, location: SourceLocation | None) -> str:
    return what if location is None else f"{what} at {location}"


def _any_iteration(body: jaxprs.Region, operands: Sequence[Any]) -> list[Any]:
    """Operands of a loop's body in an iteration that may be any."""
    current = list(operands)
    for _, operand in body.carried_operands():
        if not isinstance(current[operand], Memory | Accumulator):
            current[operand] = Symbol()
    return current


def _touches(table: jaxprs.JaxprTable, jaxpr: Any) -> bool:
    """Whether wgmma may be issued or waited for."""
    return any(
        tensor_core_pipeline_effect in equation.effects
        or equation.primitive is inline.inline_mgpu_p
        for equation in table.equations(jaxpr)
    )


_COMPUTES = object()
_STORES_AND_FENCES = (EventKind.FENCE, EventKind.STORE)

_Rule = Callable[[_Thread, Any, list[Any], _State], None]

_RULES: dict[Any, _Rule] = {
    inline.inline_mgpu_p: _Thread.anything,
    prim.wgmma_ref_p: _Thread.product,
    prim.wgmma_wait_p: _Thread.wait,
    prim.wgmma_added_wait_p: _Thread.wait,
    prim.wgmma_accumulator_deref_p: _Thread.load,
    prim.wgmma_accumulator_store_p: _Thread.store,
}
