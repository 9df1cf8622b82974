"""What a lowering rule gets to work with: one kernel's shared state, the mode, the equation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxlib.mlir import ir

from pallasite.errors import InvalidValueError, SourceLocation, UnsupportedError
from pallasite.ir import ops
from pallasite.semantics import Semantics

if TYPE_CHECKING:
    from pallasite.extensions import LoweringRule
    from pallasite.jaxpr_table import JaxprTable
    from pallasite.launch import DeviceMesh
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.arrays import RegisterArray
    from pallasite.lowering.geometry import Geometry
    from pallasite.lowering.inference.plan import LayoutPlan
    from pallasite.lowering.launch import LaunchContext
    from pallasite.lowering.memory_access import MemoryAccess
    from pallasite.lowering.memory_plan import SharedStack
    from pallasite.lowering.recording import Recorder
    from pallasite.lowering.resources import Resources
    from pallasite.lowering.strategy import LayoutStrategy
    from pallasite.registry import Registry
    from pallasite.targets import Target

type Value = Any
"""A jaxpr value while lowering: RegisterArray, MemoryReference, BarrierReference, or whatever a
plugin's rules hand to each other."""


@dataclasses.dataclass(frozen=True, eq=False)
class StateKey[T]:
    """Names one piece of state of a kernel; ``kernel.state(KEY)`` is the state itself.

    A key is made once, as a constant of a module, and only who imports it can reach the state: two
    keys of one name are two pieces of state.

    Attributes:
      name: for messages, such as ``"my-plugin.counters"``.
      create: ``create(kernel)`` makes the state of a kernel when it is first asked for.
    """

    name: str
    create: Callable[[KernelContext], T]


@dataclasses.dataclass
class KernelContext:
    """State of one kernel while it is lowered, shared by all of its rules.

    Attributes:
      target: what is compiled for.
      params: the kernel's ``CompilerParams``.
      registry: where rules come from.
      launch: ids, parameters, barriers, synchronisation.
      geometry: grid, cluster and threads.
      shared: the stack of scoped shared-memory allocations.
      device_mesh: the JAX device mesh around the kernel.
      estimate: what the resource estimator found for the whole kernel.
      semantics: what one user thread is outside of regions that say otherwise.
      location: the user's line that defines the kernel.
      on_trial: whether the code that is being emitted will be thrown away.
      recorder: records layouts, if requested.
      strategy: how arrays get their layouts; set before anything is lowered.
      accesses: what memory spaces do by default; set before anything is lowered.
      discharged: scopes as functions, which :mod:`~pallasite.lowering.retracing` keeps here.
    """

    target: Target
    params: Any
    registry: Registry
    launch: LaunchContext
    geometry: Geometry
    shared: SharedStack
    device_mesh: DeviceMesh
    estimate: Resources
    semantics: Semantics
    location: SourceLocation | None = None
    on_trial: bool = False
    recorder: Recorder | None = None
    strategy: LayoutStrategy = dataclasses.field(init=False)
    accesses: MemoryAccess = dataclasses.field(init=False)
    discharged: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    _states: dict[StateKey[Any], Any] = dataclasses.field(default_factory=dict)

    def state[T](self, key: StateKey[T]) -> T:
        """The state that a plugin keeps for this kernel; made when it is first asked for."""
        if key not in self._states:
            self._states[key] = key.create(self)
        found: T = self._states[key]
        return found

    def emit_later(self, build: Callable[..., None], *operands: ir.Value) -> ir.Operation | None:
        """Lets ``build(*operands)`` emit operations without results at this place, when the whole
        body is lowered and it is known what the kernel asks for.

        Values that are computed before go through ``operands``: others may have been replaced.

        Returns:
          What stands here until then, and uses the operands; None for code that will be thrown
          away, where ``build`` was called at once.
        """
        if self.on_trial:
            build(*operands)
            return None
        return self.launch.defer(build, *operands)

    @functools.cached_property
    def jaxprs(self) -> JaxprTable:
        """The primitives that carry jaxprs; it finds the regions of each equation once."""
        return self.registry.jaxprs.remembering()

    @property
    def plan(self) -> LayoutPlan | None:
        """What layout inference has chosen; None under lane semantics."""
        return self.strategy.plan


@dataclasses.dataclass(frozen=True)
class Mode:
    """What changes as lowering enters nested regions.

    Attributes:
      semantics: what one user thread is.
      program_ids: what ``pl.program_id`` returns for each grid axis, or None where the launch
        decides.
      warp_axis: name of the warp axis inside a warp-mapped region.
      path: the equations around, outermost first, by their ids.
    """

    semantics: Semantics
    program_ids: tuple[RegisterArray | None, ...] | None = None
    warp_axis: Hashable | None = None
    path: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """The context of one equation, passed to its rule.

    Attributes:
      kernel: the kernel's shared state.
      mode: semantics and the like; replace it for nested regions.
      primitive: the primitive being lowered.
      avals_in, avals_out: abstract values of operands and results.
      used: for each result, whether anything uses it.
      layout_hint: the register layout that a later cast asks of the (first) result, or None.
      vector_limit: how many elements one access should move at most, so that arrays combined
        later have one layout; None if nothing is known.
      location: the user's source line.
      path: this equation and those around it, outermost first, by their ids.
      rules: the equation's rules that are being called, each by the one before it.
    """

    kernel: KernelContext
    mode: Mode
    primitive: Any
    avals_in: tuple[Any, ...]
    avals_out: tuple[Any, ...]
    used: tuple[bool, ...] = ()
    layout_hint: Layout | None = None
    vector_limit: int | None = None
    location: SourceLocation | None = None
    path: tuple[int, ...] = ()
    rules: tuple[LoweringRule, ...] = ()

    @property
    def target(self) -> Target:
        """What is compiled for."""
        return self.kernel.target

    @property
    def params(self) -> Any:
        """The kernel's ``CompilerParams``."""
        return self.kernel.params

    @property
    def launch(self) -> LaunchContext:
        """Ids, kernel parameters, barriers, synchronisation."""
        return self.kernel.launch

    @property
    def semantics(self) -> Semantics:
        """What one user thread is here."""
        return self.mode.semantics

    @property
    def in_warp(self) -> bool:
        """Whether one user thread is a single warp here."""
        return self.mode.semantics.extends(Semantics.WARP)

    @property
    def auto_barriers(self) -> bool:
        """Whether rules insert the barriers that make loads and stores look synchronous."""
        return not self.kernel.params.unsafe_no_auto_barriers

    @property
    def leader(self) -> ir.Value:
        """True in one lane of the user's thread (a warpgroup, or a warp), always the same one."""
        return self.launch.elected_lane if self.in_warp else self.launch.warpgroup_leader

    def synchronize(self) -> None:
        """All lanes of the user's thread converge; shared and global memory is consistent after."""
        if self.in_warp:
            self.launch.warp_barrier()
        else:
            self.launch.warpgroup_barrier()

    @property
    def is_release(self) -> bool:
        """Whether this equation is an arrival on a barrier that only other threads wait on."""
        return self.kernel.strategy.is_release(self.path)

    def converge_before_copy(self) -> None:
        """All lanes of the user's thread converge before one starts a copy for all, and arrives
        on a barrier; where layouts are inferred, so is where that is necessary."""
        if self.auto_barriers and not self.in_warp and not self.kernel.strategy.places_barriers:
            self.synchronize()

    def next_rule(self, *operands: Value, **params: Any) -> Any:
        """Calls the rule that would be called if this one were not there, and returns its result.

        Of the equation's other rules it is the most specific: one for a semantics that this one
        falls back to, one for more targets or more operands, or an equal one that this one
        overrides.

        Args:
          *operands: as the next rule shall see them.
          **params: likewise; as a rule, those of the equation.

        Raises:
          MissingRuleError: there is none.
        """
        table = self.kernel.registry.lowering
        rule = table.next(self.rules, self.semantics, self.target, self.avals_in, params)
        context = dataclasses.replace(self, rules=(*self.rules, rule))
        return rule.function(context, *operands, **params)

    def insert(self, primitive: Any, **params: Any) -> None:
        """Emits a primitive without operands and results that the program has not, here."""
        kernel, mode = self.kernel, self.mode
        rule = kernel.registry.lowering_rule(primitive, mode.semantics, self.target, (), params)
        context = RuleContext(
            kernel, mode, primitive, (), (), location=self.location, path=self.path, rules=(rule,)
        )
        rule.function(context, **params)

    def lower(self, jaxpr: Any, args: Sequence[Value], *, mode: Mode | None = None) -> list[Value]:
        """Lowers a nested jaxpr in place; returns the values of its results."""
        from pallasite.lowering.walker import lower_jaxpr

        mode = dataclasses.replace(mode or self.mode, path=self.path)
        return lower_jaxpr(self.kernel, mode, jaxpr, args)

    def scalar(self, value: Value, type: ir.Type | None = None) -> ir.Value:
        """The scalar MLIR value of an operand (a number, an IR value or a scalar array)."""
        result = getattr(value, "scalar", value)  # That of an array in registers.
        if not isinstance(result, ir.Value):
            return ops.constant(value, type or ops.i32())
        if type is not None and result.type != type:
            if isinstance(result.type, ir.IntegerType) and isinstance(type, ir.IntegerType):
                result = ops.cast_integer(result, type)
            else:
                raise InvalidValueError(f"expected a scalar of type {type}, got {result.type}")
        return result

    def static_integer(self, value: Value, what: str) -> int:
        """The number behind an operand that must be known at compile time.

        Raises:
          UnsupportedError: it is computed in the kernel.
        """
        if isinstance(value, int):
            return value
        scalar = getattr(value, "scalar", value)  # That of an array in registers.
        if isinstance(scalar, ir.Value):
            owner = scalar.owner
            operation = owner if not isinstance(owner, ir.Block) else None
            if operation is not None and operation.name == "arith.constant":
                return int(ir.IntegerAttr(operation.attributes["value"]).value)
        raise UnsupportedError(
            f"{what} is computed in the kernel", expected="a number known at compile time"
        )

    # What memory spaces do by default; see MemorySpace.

    def view(self, reference: Value, transform: Any) -> Value:
        """A view of a reference, as the table of views has it."""
        return self.kernel.accesses.view(self, reference, transform)

    def read(self, reference: Value, transforms: Sequence[Any] = ()) -> RegisterArray:
        """Loads what a reference to memory with addresses views; see ``accesses.read``."""
        return self.kernel.accesses.read(self, reference, transforms)

    def write(
        self, reference: Value, transforms: Sequence[Any], value: RegisterArray
    ) -> RegisterArray:
        """Stores to memory with addresses; returns what was there, if it is used."""
        return self.kernel.accesses.swap(self, reference, transforms, value)

    def update(
        self,
        reference: Value,
        transforms: Sequence[Any],
        value: RegisterArray,
        combine: Callable[[RegisterArray, RegisterArray], RegisterArray],
    ) -> None:
        """Stores ``combine(old, value)`` to memory with addresses."""
        self.kernel.accesses.update(self, reference, transforms, value, combine)

    def describe_memory(self, reference: Value, transforms: Sequence[Any]) -> str:
        """How elements of memory with addresses lie, in words."""
        return self.kernel.accesses.describe(self, reference, transforms)

    def shared_array(self, variable: Any) -> contextlib.AbstractContextManager[Any]:
        """The array of a scope's variable on the stack of shared memory, for the time of a scope.

        Yields a :class:`~.references.MemoryReference` in the space of the variable's type.
        """
        return self.kernel.accesses.shared_array(self, variable)

    @contextlib.contextmanager
    def scratch(self, size: int, what: str) -> Iterator[tuple[ir.Value, int]]:
        """Shared memory for the rule's own use, one region per user thread.

        Yields a shared pointer to this thread's region and its size in bytes, which is ``size``
        rounded up to 16. The caller synchronises before it reads what others wrote and before it
        leaves.
        """
        yield self.kernel.shared.thread_scratch(self.launch, size, what, self.location)
