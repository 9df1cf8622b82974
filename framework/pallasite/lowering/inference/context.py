"""What an inference rule gets to work with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite import _jax
from pallasite.barrier_kinds import BarrierRole, BarrierUse
from pallasite.errors import InternalError, PallasiteError, SourceLocation
from pallasite.extensions import InferenceRule, Semantics
from pallasite.ir import types
from pallasite.language.memory import MemorySpace, memory_space_of
from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.proposals import LayoutProposals, proposals_for
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.fences import Event, Fork, Loop
from pallasite.lowering.inference.pairs import Pair, broadcast
from pallasite.lowering.inference.plan import Path
from pallasite.lowering.inference.problem import (
    Access,
    AccessCheck,
    Fixed,
    MemoryUse,
    Pairs,
    Place,
    Relation,
    Variable,
)
from pallasite.lowering.inference.releases import BarrierEvent
from pallasite.lowering.inference.values import (
    AbstractValue,
    ArrayValue,
    MemoryValue,
    OtherValue,
    ScalarValue,
)
from pallasite.lowering.inference.views import (
    begins_at_any_row,
    split_member,
    transformed_layout,
    view_of,
)
from pallasite.lowering.layout_report import Insertion
from pallasite.lowering.memory_access import memory_access
from pallasite.memory_events import GENERIC, EventContext, EventKind, Proxy
from pallasite.rule_selection import RuleTable
from pallasite.rules import Rule

if TYPE_CHECKING:
    from pallasite.lowering.inference.walk import Walk

MOST_WEIGHT = 1e6


@dataclasses.dataclass
class Record:
    """What the walk found out about one equation.

    Attributes:
      needs: by position of an operand, what decides the layout that it needs: a factor, or the
        variable of what it becomes (a carried value, say).
      results: variables of the results.
    """

    needs: dict[int, Fixed | Relation | int] = dataclasses.field(default_factory=dict)
    results: list[int | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class InferenceContext:
    """The context of one equation.

    Attributes:
      walk: the walk over the kernel.
      equation: the equation.
      path: the calls around it.
      weight: how often it runs, about.
      in_warp: whether single warps run it.
      declared: whether the table of memory events says what the primitive does to memory.
      rules: the equation's rules that are being called, each by the one before it.
    """

    walk: Walk
    equation: Any
    path: Path
    weight: float
    in_warp: bool = False
    record: Record = dataclasses.field(default_factory=Record)
    fork: Fork | None = None
    declared: bool = False
    rules: tuple[InferenceRule, ...] = ()

    def find_rule[Kind: Rule](self, table: RuleTable[Kind]) -> Kind | None:
        """The most specific rule of a kind for the equation."""
        return table.find(
            self.equation.primitive,
            self.semantics,
            self.walk.kernel.target,
            self.avals_in,
            self.equation.params,
        )

    def call(
        self, rule: InferenceRule, operands: Sequence[AbstractValue], params: Mapping[str, Any]
    ) -> Any:
        """What a rule of the equation returns."""
        before, self.rules = self.rules, (*self.rules, rule)
        try:
            return rule.function(self, *operands, **params)
        finally:
            self.rules = before

    def next_rule(self, *operands: AbstractValue, **params: Any) -> Any:
        """Calls the rule that would be called if this one were not there, and returns its result.

        Raises:
          MissingRuleError: there is none.
        """
        kernel = self.walk.kernel
        table = kernel.registry.inference
        rule = table.next(self.rules, self.semantics, kernel.target, self.avals_in, params)
        return self.call(rule, operands, params)

    def suits(self, value: Any, aval: Any) -> bool:
        """Whether a rule may have made an abstract value for a result."""
        known = not isinstance(value, ArrayValue) or (
            value.shape == aval.shape and 0 <= value.variable < len(self.walk.problem.variables)
        )
        return known and isinstance(value, ArrayValue | ScalarValue | MemoryValue | OtherValue)

    @property
    def semantics(self) -> Semantics:
        """What one user thread is here."""
        return Semantics.WARP if self.in_warp else self.walk.kernel.semantics

    @property
    def params(self) -> Any:
        """The kernel's ``CompilerParams``."""
        return self.walk.kernel.params

    @functools.cached_property
    def avals_in(self) -> list[Any]:
        """Abstract values of the operands."""
        return [atom.aval for atom in self.equation.invars]

    @property
    def avals_out(self) -> list[Any]:
        """Abstract values of the results."""
        return [variable.aval for variable in self.equation.outvars]

    @functools.cached_property
    def location(self) -> SourceLocation | None:
        """The user's line."""
        found: SourceLocation | None = _jax.user_location(self.equation.source_info)
        return found or self.walk.location

    @functools.cached_property
    def place(self) -> Place:
        """The equation, for reports."""
        return Place(self.location, self.equation.primitive.name)

    @property
    def proposals(self) -> LayoutProposals:
        """The layouts that plugins propose on the kernel's target."""
        return proposals_for(self.walk.kernel.registry, self.walk.kernel.target)

    # Results --------------------------------------------------------------------------------------

    def result(
        self, aval: Any | None = None, *sources: AbstractValue, varying: bool | None = None
    ) -> AbstractValue:
        """A new value of the type of the (first) result, or of ``aval``.

        Args:
          aval: its abstract value.
          *sources: values on which it depends: if all of them are splats, so is it.
          varying: whether its elements differ whatever they are; by default, if there are no
            sources.
        """
        aval = self.avals_out[0] if aval is None else aval
        if not isinstance(aval, _jax.ShapedArray) or aval.shape == ():
            return ScalarValue()
        numbers = [value.variable for value in sources if isinstance(value, ArrayValue)]
        bits = types.bit_width(aval.dtype)
        number = self.walk.problem.variable(
            Variable(
                tuple(aval.shape),
                bits,
                numbers,
                not sources if varying is None else varying,
                self.place,
                str(aval.dtype),
                weight=self.weight,
            )
        )
        return ArrayValue(number, tuple(aval.shape), bits)

    def same_layout(self, *values: AbstractValue) -> None:
        """Arrays of one shape that have to have one layout; others are left out."""
        arrays = [value for value in values if isinstance(value, ArrayValue)]
        for array in arrays[1:]:
            if array.shape == arrays[0].shape:
                self.walk.problem.join(arrays[0].variable, array.variable)

    def elementwise(self, *operands: AbstractValue, aval: Any | None = None) -> AbstractValue:
        """The result of an element-wise operation.

        Operands with extents of 1 get the layout of the result, reduced over these.
        """
        result = self.result(aval, *operands, varying=False)
        if not isinstance(result, ArrayValue):
            return result
        for position, operand in enumerate(operands):
            if not isinstance(operand, ArrayValue):
                continue
            if operand.shape == result.shape:
                self.walk.problem.join(operand.variable, result.variable)
            elif math.prod(operand.shape) > 1 and len(operand.shape) == len(result.shape):
                dims = tuple(range(len(result.shape)))
                self.relate(
                    position,
                    operand,
                    result,
                    broadcast(operand.shape, result.shape, dims, self.proposals),
                )
        return result

    # Constraints ----------------------------------------------------------------------------------

    def needs(
        self, position: int, value: AbstractValue, layout: Layout, why: str, *, pinned: bool = False
    ) -> None:
        """The operand at ``position`` has to come in this layout."""
        if isinstance(value, ArrayValue) and math.prod(value.shape) > 1:
            _check_shape(value, layout)
            fixed = (self.place, self.weight, value.variable, layout, value.bits)
            factor = Fixed(*fixed, pinned, False, why)
            self.walk.problem.factors.append(factor)
            self.record.needs[position] = factor

    def makes(
        self, value: AbstractValue, layout: Layout, why: str, *, pinned: bool = False
    ) -> None:
        """The equation makes a result in this layout; if pinned, it cannot be converted here."""
        if isinstance(value, ArrayValue) and math.prod(value.shape) > 1:
            _check_shape(value, layout)
            fixed = (self.place, self.weight, value.variable, layout, value.bits)
            self.walk.problem.factors.append(Fixed(*fixed, pinned, True, why))

    def becomes(self, position: int, operand: AbstractValue, value: AbstractValue) -> None:
        """The operand at ``position`` becomes another value, such as one that a loop carries."""
        if isinstance(operand, ArrayValue) and isinstance(value, ArrayValue):
            self.walk.problem.variables[value.variable].sources.append(operand.variable)
            self.walk.problem.join(operand.variable, value.variable)
            self.record.needs[position] = value.variable

    def relate(
        self,
        position: int,
        operand: AbstractValue,
        result: AbstractValue,
        pairs: Pairs,
        work: Callable[[Layout, Layout], float] | None = None,
    ) -> None:
        """The layout of a result follows from that of the operand at ``position``.

        Args:
          position: of the operand.
          operand, result: the values.
          pairs: between which layouts the equation can work.
          work: what that costs, given both layouts.
        """
        if isinstance(operand, ArrayValue) and isinstance(result, ArrayValue):
            between = (self.place, self.weight, operand.variable, result.variable)
            factor = Relation(*between, pairs, (operand.bits, result.bits), work)
            self.walk.problem.factors.append(factor)
            self.record.needs[position] = factor

    def proposes(self, value: AbstractValue, layouts: Sequence[Layout]) -> None:
        """Layouts that an array may have, beside those that memory and other equations suggest."""
        if isinstance(value, ArrayValue) and layouts:

            def pairs(one: Layout | None, _: Layout | None) -> list[Pair]:
                return [(layout, layout) for layout in (one, *layouts) if layout is not None]

            between = (self.place, self.weight, value.variable, value.variable)
            relation = Relation(*between, pairs, (value.bits, value.bits))
            self.walk.problem.factors.append(relation)

    # Memory ---------------------------------------------------------------------------------------

    def _view(
        self, reference: Any, transforms: Sequence[Any]
    ) -> tuple[MemoryValue, list[Any]] | None:
        if isinstance(reference, _jax.TransformedRef):
            transforms = (*reference.transforms, *transforms)
            reference = reference.ref
        if not isinstance(reference, MemoryValue):
            return None
        registry = self.walk.kernel.registry
        root, views = split_member(registry, reference, transforms)
        rule = registry.view_rule(type(views[0])) if views else None
        if rule is not None and rule.physical:
            # The program says how it lies, so this is the physical array.
            self.walk.keep_row_major(root)
        elif root.choice is not None and begins_at_any_row(root, views):
            # In tiles of all rows, what begins at one row lies as what begins at any other.
            self.walk.propose_tiles(root, root.shape[-2])
        return root, views

    def event(
        self,
        kind: EventKind,
        reference: Any = None,
        *,
        proxy: Proxy = GENERIC,
        source: Proxy = GENERIC,
    ) -> None:
        """An event of memory order that depends on what the rule finds out.

        What a primitive always does is better declared, by :class:`~.MemoryEvents`.

        Args:
          kind: what happens.
          reference: the memory; only shared memory matters, and what has no layout (such as a
            plugin's memory) if it is accessed by a proxy of its own.
          proxy, source: see :class:`~.MemoryEvent`.
        """
        base = reference.ref if isinstance(reference, _jax.TransformedRef) else reference
        shared = isinstance(base, MemoryValue) and base.space.is_shared
        opaque = isinstance(base, OtherValue) and proxy != GENERIC
        if base is not None and not (shared or opaque):
            return
        key = self.walk.anchor or (self.path, id(self.equation))
        self.walk.places.setdefault(key, self.place)
        self.walk.events.append(Event(kind, key, self.walk.branches, base, proxy, source))

    def declared_events(self, operands: Sequence[AbstractValue]) -> None:
        """What the tables of plugins declare of the primitive: of memory, and of barriers."""
        registry, target = self.walk.kernel.registry, self.walk.kernel.target
        primitive = self.equation.primitive
        uses = registry.barriers.uses(primitive)
        self.declared = registry.memory.declares(primitive)
        if not uses and not self.declared:
            return
        for use in uses:
            if use.role is BarrierRole.WAIT:
                self._barrier_event(use, operands)
                if not self.in_warp:
                    self.event(EventKind.WAIT)
        context = EventContext(target, self.in_warp)
        for event in registry.memory.events(context, self.equation, operands) or ():
            self.event(event.kind, event.reference, proxy=event.proxy, source=event.source)
        for use in uses:
            if use.role is BarrierRole.ARRIVE:
                self._barrier_event(use, operands)
                self.event(EventKind.ARRIVE)
            elif use.role is BarrierRole.EXPECT and not self.in_warp:
                self.event(EventKind.ELECTED_ARRIVE)

    def _barrier_event(self, use: BarrierUse, operands: Sequence[AbstractValue]) -> None:
        barrier = use.arguments(operands, self.equation.params)[use.barrier]
        base = barrier.ref if isinstance(barrier, _jax.TransformedRef) else barrier
        key = (self.path, id(self.equation))
        self.walk.barrier_events.append(BarrierEvent(use.role, key, self.walk.branches, base))

    def added(self, what: str, before: str) -> None:
        """The equation is not the program's: a pass has added it before one of the primitive
        ``before``, as the report shall say."""
        key = (self.path, id(self.equation))
        self.walk.places[key] = self.place
        self.walk.added[key] = Insertion(self.place.location, before, what)

    def space_of(self, reference: Any) -> MemorySpace:
        """The memory space of a reference, or of a view of one."""
        base = reference.ref if isinstance(reference, _jax.TransformedRef) else reference
        if isinstance(base, MemoryValue):
            return base.space
        space = memory_space_of(base.aval) if isinstance(base, OtherValue) else None
        return space if isinstance(space, MemorySpace) else MemorySpace.GMEM

    def opaque(self, aval: Any) -> AbstractValue:
        """Something without a layout, of this type."""
        return OtherValue(aval)

    def shared_allocation(
        self, variable: Any, name: str, layouts: Sequence[MemoryLayout] | None = None
    ) -> AbstractValue:
        """A scope's allocation of numbers in shared memory.

        Args:
          variable: the scope's variable.
          name: what the kernel calls it.
          layouts: those that it may have, the one to prefer first; by default, all that shared
            memory can have.
        """
        from pallasite.lowering.inference.allocations import shared_allocation

        return shared_allocation(self, variable, name, layouts)

    def load(
        self,
        reference: Any,
        value: AbstractValue,
        transforms: Sequence[Any] = (),
        check: AccessCheck | None = None,
    ) -> None:
        """A load makes an array.

        Args:
          reference: what is loaded.
          value: the array.
          transforms: further views.
          check: raises a PallasiteError if the lowering refuses the load.
        """
        if not self.declared:
            self.event(EventKind.LOAD, reference)
        self._access(reference, value, transforms, "the load", check)

    def store(
        self,
        reference: Any,
        value: AbstractValue,
        transforms: Sequence[Any] = (),
        check: AccessCheck | None = None,
    ) -> None:
        """A store takes an array; for the arguments see :meth:`load`."""
        if not self.declared:
            self.event(EventKind.STORE, reference)
        self._access(reference, value, transforms, "the store", check)

    def _access(
        self,
        reference: Any,
        value: AbstractValue,
        transforms: Sequence[Any],
        what: str,
        check: AccessCheck | None,
    ) -> None:
        found = self._view(reference, transforms)
        if found is None:
            return
        if not isinstance(value, ArrayValue) or math.prod(value.shape) == 1:
            self.uses(reference, lambda view: None, "an element", transforms)
            return
        root, views = found
        factor = Access(
            self.place,
            self.weight,
            value.variable,
            root,
            views,
            memory_access().suitable_layouts,
            self.proposals,
            what,
            check,
        )
        self.walk.problem.factors.append(factor)

    def uses(
        self,
        reference: Any,
        check: Callable[[Any], float | None],
        why: str,
        transforms: Sequence[Any] = (),
        *,
        proposes: Sequence[Any] = (),
    ) -> None:
        """Memory is used in a way that not every layout allows.

        Args:
          reference: what is used.
          check: takes the :class:`~.views.View`; it raises a PallasiteError if its layout will not
            do, and may return what the use costs.
          why: what uses it, in the user's terms.
          transforms: further views.
          proposes: transforms (tiling, swizzle) that would suit, if the whole allocation is used.
        """
        found = self._view(reference, transforms)
        if found is None or not found[0].space.is_shared:
            return
        root, views = found
        if proposes and root.choice is not None and not views:
            choice = self.walk.problem.choices[root.choice]
            with contextlib.suppress(PallasiteError):
                layout = transformed_layout(root.shape, types.bit_width(root.dtype), proposes)
                if not choice.given and layout not in choice.candidates:
                    choice.candidates.append(layout)
        self.walk.problem.factors.append(
            MemoryUse(self.place, self.weight, root, views, check, why)
        )

    def propose_height(self, reference: Any, check: Callable[[Any], float | None]) -> None:
        """Proposes tiles as high as a part of an allocation, if lower ones do not suit a use of it.

        Args:
          reference: the part.
          check: of the use; see :meth:`uses`.
        """
        found = self._view(reference, ())
        if found is None:
            return
        root, views = found
        if root.choice is None or not all(isinstance(view, _jax.NDIndexer) for view in views):
            return
        with contextlib.suppress(PallasiteError):
            shape = view_of(root, None, views).layout.shape
            candidates = self.walk.problem.choices[root.choice].candidates
            if len(shape) < 2 or len(candidates) < 2:
                return
            if shape[-2] % 8 or root.shape[-2] % shape[-2]:
                return  # Tiles are of whole groups of 8 rows, as a swizzle is.
            with contextlib.suppress(PallasiteError):
                if not check(view_of(root, candidates[1], views)):
                    return
            self.walk.propose_tiles(root, shape[-2])

    # Nested programs ------------------------------------------------------------------------------

    def infer(
        self,
        jaxpr: Any,
        values: Sequence[AbstractValue],
        *,
        times: float | None = None,
        branch: int | None = None,
    ) -> list[AbstractValue]:
        """Walks a nested jaxpr; returns the values of its results.

        Args:
          jaxpr: what is called.
          values: of its inputs.
          times: for the body of a loop, how often it runs, about.
          branch: for a conditional, the number of the branch.
        """
        weight = min(self.weight * (times or 1.0), MOST_WEIGHT)
        path = (*self.path, id(self.equation))
        walk = self.walk
        outer, around = walk.events, walk.branches
        if times is not None:
            walk.events = []
            outer.append(Loop(walk.events))
        elif branch is not None:
            walk.events = []
            if self.fork is None:
                self.fork = Fork([])
                outer.append(self.fork)
            self.fork.ways.append(walk.events)
            walk.branches = (*around, ((self.path, id(self.equation)), branch))
        try:
            return walk.jaxpr(path, jaxpr, values, weight, self.in_warp)
        finally:
            walk.events, walk.branches = outer, around

    def returns(self, jaxpr: Any, results: Sequence[AbstractValue], values: Sequence[Any]) -> None:
        """The results of a nested jaxpr become other values (or None), such as those that a loop
        carries."""
        outputs: list[int | None] = []
        for result, value in zip(results, values, strict=True):
            if isinstance(result, ArrayValue) and isinstance(value, ArrayValue):
                self.walk.problem.variables[value.variable].sources.append(result.variable)
                self.walk.problem.join(result.variable, value.variable)
                outputs.append(value.variable)
            else:
                outputs.append(None)
        path = (*self.path, id(self.equation))
        self.walk.outputs[path, id(jaxpr)] = outputs
        self.walk.kept.append(jaxpr)

    @contextlib.contextmanager
    def warps(self) -> Iterator[None]:
        """Inside, nested programs are run by single warps."""
        before, self.in_warp = self.in_warp, True
        anchor = self.walk.anchor
        # A fence has to be run by all warps, so it comes before the region.
        self.walk.anchor = anchor or (self.path, id(self.equation))
        try:
            yield
        finally:
            self.in_warp, self.walk.anchor = before, anchor


def _check_shape(value: ArrayValue, layout: Layout) -> None:
    if layout.shape != value.shape:
        raise InternalError(
            f"a rule of layout inference has a layout of shape {layout.shape} for an array of shape"
            f" {value.shape}"
        )
