"""What plugins contribute about the order of memory: events of primitives, proxies and fences."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pallasite.targets import ANY_TARGET, Target, TargetPredicate

if TYPE_CHECKING:
    from jax.extend.core import Primitive


@dataclasses.dataclass(frozen=True)
class Proxy:
    """A path by which memory is accessed (PTX ISA, "Proxies").

    Accesses of the same memory by different proxies are ordered by a fence between the two only.

    Attributes:
      name: such as ``"generic"``.
    """

    name: str

    def __str__(self) -> str:
        return self.name


GENERIC = Proxy("generic")
"""Ordinary loads and stores."""


class EventKind(enum.Enum):
    """What an event does.

    LOAD, STORE: an access of the memory of ``reference``, by ``proxy``.
    ACCESS: perhaps both.
    ELECTED_STORE: one lane is about to start an asynchronous store to ``reference`` for all lanes
      of its thread, and perhaps to arrive on a barrier for them: what they do before comes first.
    ELECTED_ARRIVE: one lane is about to arrive on a barrier for all lanes.
    ARRIVE: an arrival on a barrier, which releases what the thread did before.
    WAIT: a wait on a barrier.
    SYNCHRONIZE: all lanes of the thread converge, and see one another's accesses.
    FENCE: what the thread did by ``source`` comes before what is done by ``proxy``.
    ALLOCATE: ``reference`` is allocated, perhaps where something else lay.
    """

    LOAD = "load"
    STORE = "store"
    ACCESS = "access"
    ELECTED_STORE = "elected store"
    ELECTED_ARRIVE = "elected arrive"
    ARRIVE = "arrive"
    WAIT = "wait"
    SYNCHRONIZE = "synchronize"
    FENCE = "fence"
    ALLOCATE = "allocate"

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class MemoryEvent:
    """One event of memory order.

    Attributes:
      kind: what it does.
      reference: the memory: an operand, or a view of it (a ``TransformedRef``).
      proxy: by which it is accessed; of a fence, that of the later accesses.
      source: of a fence, the proxy of the earlier accesses.
      certain: whether all of the view is accessed wherever the equation is reached; False with a
        mask or a predicate.
    """

    kind: EventKind
    reference: Any = None
    proxy: Proxy = GENERIC
    source: Proxy = GENERIC
    certain: bool = True


@dataclasses.dataclass(frozen=True)
class EventContext:
    """Where an equation is, as far as its events depend on it.

    Attributes:
      target: what is compiled for.
      in_warp: whether single warps run it.
    """

    target: Target
    in_warp: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEvents:
    """What one primitive does to shared memory, or by proxies of its own to a plugin's memory.

    Layout inference inserts fences and barriers by it; checks look it up. A primitive without such
    a record has the events that its rule of layout inference tells, and without a rule, ACCESS of
    all memory that it is given.

    Attributes:
      primitive: the JAX primitive.
      function: ``function(context, *operands, **params)`` returns the events in their order, as
        :class:`MemoryEvent`; operands are whatever stands for references where it is called.
      overrides: names of plugins whose record for the primitive this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    primitive: Primitive
    function: Callable[..., Iterable[MemoryEvent]]
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProxyFence:
    """The fence between accesses by one proxy and later ones by another.

    Where layouts are inferred, the primitive is inserted wherever what was stored by ``source`` is
    about to be accessed by ``proxy``, or a thread that may access it so is about to be told. A
    proxy without a fence on a target needs none there.

    Attributes:
      proxy: of the later accesses.
      source: of the earlier accesses.
      primitive: what is inserted, with ``params``; it has no operands and no results. All lanes of
        the thread fence what they did, and then converge.
      params: its parameters.
      emit: ``emit(ctx)`` emits the fence alone, where memory of a scope may have been that of an
        earlier scope, before the threads of the block synchronise; None if that needs no fence.
      target: where there is such a fence; the most specific one of a pair of proxies is taken.
      overrides: names of plugins whose equally specific fences this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    proxy: Proxy
    source: Proxy = GENERIC
    primitive: Primitive
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    emit: Callable[[Any], None] | None = None
    target: TargetPredicate = ANY_TARGET
    overrides: tuple[str, ...] = ()
    plugin: str = ""

    def events(self) -> tuple[MemoryEvent, ...]:
        """What the primitive does."""
        fence = MemoryEvent(EventKind.FENCE, proxy=self.proxy, source=self.source)
        return fence, MemoryEvent(EventKind.SYNCHRONIZE)
