"""What plugins contribute about barriers: kinds, orders, and what primitives do to barriers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pallasite.resource import Count
from pallasite.targets import ANY_TARGET, TargetPredicate

if TYPE_CHECKING:
    from jax.extend.core import Primitive

MOST_HARDWARE_ARRIVALS = 2**20 - 1
"""How many arrivals one phase of an mbarrier can count (PTX ISA, "mbarrier object")."""

MOST_BARRIERS = 32
"""How many barriers one array can have: each thread keeps their phases in one word."""


@dataclasses.dataclass(frozen=True)
class BarrierPhase:
    """How a phase of barriers completes in hardware.

    Attributes:
      hardware_arrivals: how many arrivals the mbarrier counts, which is what it is initialised
        with.
      cluster_dimensions: for barriers whose arrivals reach other blocks, CUDA's dimensions of the
        cluster along which these lie, one tuple for each axis; None for barriers of one block.
    """

    hardware_arrivals: Count
    cluster_dimensions: tuple[tuple[int, ...], ...] | None = None


def _num_arrivals(dtype: Any) -> int:
    return int(dtype.num_arrivals)


def _is_counted(dtype: Any) -> bool:
    del dtype
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierKind:
    """A kind of barriers in shared memory.

    Its references are made by a :class:`~pallasite_std.barriers.base.BarrierAllocation`, whose
    element type is of class ``dtype``.

    Attributes:
      dtype: a subclass of :class:`~pallasite_std.barriers.base.BarrierDType`; its ``title`` names
        the kind.
      phase: ``phase(dtype, geometry)`` says how a phase completes, as a :class:`BarrierPhase`; an
        error if the geometry of the kernel does not allow it.
      arrivals: ``arrivals(dtype)`` is how many arrivals of the program complete a phase.
      counted: ``counted(dtype)`` is whether each arrival on a barrier reaches that very barrier,
        so that the check of barriers can count arrivals.
      most_arrivals: the limit on the hardware arrivals of one phase.
      most_barriers: the limit on the barriers of one array.
      arrive: ``arrive(ctx, barrier, condition, by)`` emits one arrival of the user's thread on a
        ``BarrierReference``, if the predicate (an i1, or None) is true; ``by`` is that of
        ``plgpu.barrier_arrive``. None: each lane is one hardware arrival, with the semantics of
        release for the block.
      before_arrive: ``before_arrive(ctx, barrier)`` emits what all lanes of the user's thread do
        before an arrival, before they synchronise for it.
      after_wait: ``after_wait(ctx, barrier)`` emits what they do after a wait.
      overrides: names of plugins whose kind of the same title this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    dtype: type[Any]
    phase: Callable[[Any, Any], BarrierPhase]
    arrivals: Callable[[Any], Count] = _num_arrivals
    counted: Callable[[Any], bool] = _is_counted
    most_arrivals: Count = MOST_HARDWARE_ARRIVALS
    most_barriers: Count = MOST_BARRIERS
    arrive: Callable[[Any, Any, Any, Any], None] | None = None
    before_arrive: Callable[[Any, Any], None] | None = None
    after_wait: Callable[[Any, Any], None] | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""

    @property
    def title(self) -> str:
        """The kind as users write it."""
        return str(self.dtype.title)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierOrder:
    """How barriers order work that ordinary release and acquire leave out, on some targets.

    Barriers ask for it by name, with the ``orders`` of their element type; a plugin for a hardware
    generation provides it for its targets, for barriers of any kind.

    Attributes:
      name: such as ``"tensor_core"``.
      before_arrive: ``before_arrive(ctx, barrier)`` emits what all lanes of the user's thread do
        before an arrival, before they synchronise for it.
      after_wait: ``after_wait(ctx, barrier)`` emits what they do after a wait.
      target: the targets that it is for; the most specific order of a name is taken.
      overrides: names of plugins whose equally specific orders this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    name: str
    before_arrive: Callable[[Any, Any], None] | None = None
    after_wait: Callable[[Any, Any], None] | None = None
    target: TargetPredicate = ANY_TARGET
    overrides: tuple[str, ...] = ()
    plugin: str = ""


class BarrierRole(enum.Enum):
    """What a primitive does to a barrier.

    ARRIVE: the user's thread arrives, and releases what it did to memory before.
    EXPECT: one lane arrives for the user's thread, and announces bytes of asynchronous copies.
    COMPLETE: an asynchronous operation that the primitive starts arrives when it has completed.
    WAIT: the user's thread waits for the next phase, and acquires what was released for it.
    TEST: the user's thread asks whether the next phase is complete; this is no wait.
    """

    ARRIVE = "arrive"
    EXPECT = "expect"
    COMPLETE = "complete"
    WAIT = "wait"
    TEST = "test"

    __hash__ = object.__hash__


def _one_arrival(dtype: Any, params: Mapping[str, Any]) -> int:
    del dtype, params
    return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierUse:
    """What a primitive does to a barrier that it is given.

    The check of barriers, layout inference and checks of plugins look it up. A primitive that uses
    two barriers has two records.

    Attributes:
      primitive: the JAX primitive.
      role: what it does.
      barrier: position of the barrier among the primitive's arguments, which are what
        ``params["args_tree"]`` makes of its operands, or the operands themselves.
      predicate: position of a boolean scalar without which nothing happens; the argument may be
        None.
      arrivals: ``arrivals(dtype, params)`` is how many of the arrivals that the program counts it
        makes; 0 for none, None where that is not known.
      transfers: ``transfers(arguments, params)`` is how many bytes it announces (EXPECT), or that
        arrive (COMPLETE); ``arguments`` are types. A primitive that arrives for what it transfers
        announces as much.
      overrides: names of plugins whose record for the same argument this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    primitive: Primitive
    role: BarrierRole
    barrier: int = 0
    predicate: int | None = None
    arrivals: Callable[[Any, Mapping[str, Any]], Count | None] = _one_arrival
    transfers: Callable[[tuple[Any, ...], Mapping[str, Any]], Count] | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""

    def arguments(self, operands: Iterable[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of an equation, of whatever stands for its operands."""
        tree = params.get("args_tree")
        return tuple(operands if tree is None else tree.unflatten(list(operands)))
