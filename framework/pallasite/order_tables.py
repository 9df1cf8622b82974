"""The tables of barriers and of the order of memory: what all plugins contribute, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pallasite.barrier_kinds import BarrierKind, BarrierOrder, BarrierRole, BarrierUse
from pallasite.conflicts import most_specific, one_for_each, unique, with_plugin
from pallasite.errors import UnsupportedError
from pallasite.known_plugins import remedy
from pallasite.memory_events import EventContext, MemoryEvent, MemoryEvents, Proxy, ProxyFence
from pallasite.targets import Target

if TYPE_CHECKING:
    from jax.extend.core import Primitive

    from pallasite.extensions import Contribution


class _Argument(NamedTuple):
    primitive: Any
    position: int

    def __str__(self) -> str:
        return f"{self.primitive}, argument {self.position}"


class BarrierTables:
    """What all plugins contribute about barriers.

    Attributes:
      kinds: by title.

    Raises:
      PluginError: two plugins contradict each other.
    """

    def __init__(
        self,
        contributions: Iterable[Contribution],
        targets: Iterable[Target],
        present: Mapping[str, str],
    ):
        """Merges and checks contributions.

        Args:
          contributions: what each plugin contributes.
          targets: all targets.
          present: by name of installed plugin, why it is of no use (see ``remedy``).
        """
        contributions = tuple(contributions)
        self._present = present
        self.kinds: dict[str, BarrierKind] = one_for_each(
            contributions, "barrier_kinds", "barrier kinds named", "title"
        )
        self._kinds = {kind.dtype: kind for kind in self.kinds.values()}
        self._orders: dict[str, list[BarrierOrder]] = {}
        for order in with_plugin(contributions, "barrier_orders"):
            self._orders.setdefault(order.name, []).append(order)
        for target in targets:
            for name, orders in self._orders.items():
                most_specific(f"barrier orders {name!r}", orders, target)
        self._uses: dict[Primitive, tuple[BarrierUse, ...]] = {}
        uses: dict[_Argument, BarrierUse] = unique(
            "barrier uses of primitive",
            with_plugin(contributions, "barrier_uses"),
            lambda use: _Argument(use.primitive, use.barrier),
        )
        waits_first = sorted(uses.values(), key=lambda use: use.role is not BarrierRole.WAIT)
        for use in waits_first:
            self._uses[use.primitive] = (*self._uses.get(use.primitive, ()), use)

    def kind(self, dtype: Any) -> BarrierKind | None:
        """The kind of barriers with an element type, or None if no plugin loaded has it."""
        return self._kinds.get(type(dtype))

    def order(self, name: str, target: Target) -> BarrierOrder:
        """The most specific order of a name for a target.

        Raises:
          UnsupportedError: no plugin loaded provides it.
        """
        order = most_specific(f"barrier orders {name!r}", self._orders.get(name, ()), target)
        if order is None:
            what = name.replace("_", " ")
            raise UnsupportedError(
                f"a barrier that orders the work of the {what}, for which no plugin loaded has an"
                f" order on target {target.name!r}",
                expected=f"a plugin that contributes the barrier order {name!r} for the target",
                hint=remedy("barrier_orders", name, self._present),
            )
        return order

    def orders(self) -> tuple[BarrierOrder, ...]:
        """All orders, for listings."""
        return tuple(order for orders in self._orders.values() for order in orders)

    def uses(self, primitive: Primitive) -> tuple[BarrierUse, ...]:
        """What a primitive does to the barriers that it is given; waits come first."""
        return self._uses.get(primitive, ())

    def all_uses(self) -> tuple[BarrierUse, ...]:
        """The uses of all primitives, for listings."""
        return tuple(use for uses in self._uses.values() for use in uses)


class _Pair(NamedTuple):
    source: Proxy
    proxy: Proxy

    def __str__(self) -> str:
        return f"{self.source} to {self.proxy}"


class MemoryTables:
    """What all plugins contribute about the order of memory.

    Raises:
      PluginError: two plugins contradict each other.
    """

    def __init__(self, contributions: Iterable[Contribution], targets: Iterable[Target]):
        contributions = tuple(contributions)
        self._events: dict[Primitive, MemoryEvents] = one_for_each(
            contributions, "memory_events", "memory events of primitive", "primitive"
        )
        self._fences: dict[_Pair, list[ProxyFence]] = {}
        for fence in with_plugin(contributions, "proxy_fences"):
            self._fences.setdefault(_Pair(fence.source, fence.proxy), []).append(fence)
        self._of_fences: dict[Primitive, tuple[MemoryEvent, ...]] = {}
        for fence in self.all_fences():
            before = self._of_fences.get(fence.primitive, ())
            self._of_fences[fence.primitive] = before + fence.events()
        for target in targets:
            for pair, fences in self._fences.items():
                most_specific(f"fences from proxy {pair}", fences, target)

    def declares(self, primitive: Primitive) -> bool:
        """Whether anything is declared of a primitive."""
        return primitive in self._events or primitive in self._of_fences

    def events(
        self, context: EventContext, equation: Any, operands: Iterable[Any]
    ) -> tuple[MemoryEvent, ...] | None:
        """What an equation does to memory, or None if nothing is declared of its primitive.

        Args:
          context: where it is.
          equation: the equation.
          operands: what stands for its operands.
        """
        declared = self._events.get(equation.primitive)
        if declared is not None:
            return tuple(declared.function(context, *operands, **equation.params))
        return self._of_fences.get(equation.primitive)

    def declared(self) -> tuple[MemoryEvents, ...]:
        """The records of all primitives, for listings."""
        return tuple(self._events.values())

    def fences(self, target: Target) -> tuple[ProxyFence, ...]:
        """The fences of a target: the most specific one for each pair of proxies."""
        found = (
            most_specific(f"fences from proxy {pair}", fences, target)
            for pair, fences in self._fences.items()
        )
        return tuple(fence for fence in found if fence is not None)

    def all_fences(self) -> tuple[ProxyFence, ...]:
        """The fences of all targets."""
        return tuple(fence for fences in self._fences.values() for fence in fences)
