"""The result of layout inference, as the walker follows it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.registers import Layout
from pallasite.memory_events import ProxyFence

type Path = tuple[int, ...]
"""Which call of a jaxpr: the ids of the equations around it, outermost first."""


@dataclasses.dataclass(frozen=True)
class EquationPlan:
    """How one equation is lowered.

    Attributes:
      operands: for each operand the layout to bring it into before, or None.
      materialized: positions of operands that must not stay splats.
      hint: layout in which the equation should make its first result, or None.
      results: for each result the layout to bring it into afterwards, or None.
    """

    operands: tuple[Layout | None, ...]
    materialized: frozenset[int]
    hint: Layout | None
    results: tuple[Layout | None, ...]


@dataclasses.dataclass
class LayoutPlan:
    """The layouts of a kernel.

    Attributes:
      equations: by path and id of the equation; without those that need nothing.
      outputs: by path and id of the jaxpr, the layouts of its results, or None.
      memory: by path and id of the variable of an allocation (of a union's member, with its
        place), its layout.
      fenced_scopes: by path and id of the equations of scopes, the fences that they begin with.
      releases: path and id of the arrivals on barriers that other threads wait on.
      barriers: path and id of the equations before which all lanes of the thread converge.
      before: by path and id of an equation, primitives without operands (and their parameters) that
        are lowered before it.
      kept: what has to be kept, so that no other object gets its id.
    """

    equations: dict[tuple[Path, int], EquationPlan] = dataclasses.field(default_factory=dict)
    outputs: dict[tuple[Path, int], tuple[Layout | None, ...]] = dataclasses.field(
        default_factory=dict
    )
    memory: dict[tuple[Path, int, Any], MemoryLayout] = dataclasses.field(default_factory=dict)
    fenced_scopes: dict[tuple[Path, int], tuple[ProxyFence, ...]] = dataclasses.field(
        default_factory=dict
    )
    barriers: set[tuple[Path, int]] = dataclasses.field(default_factory=set)
    releases: set[tuple[Path, int]] = dataclasses.field(default_factory=set)
    before: dict[tuple[Path, int], list[tuple[Any, dict[str, Any]]]] = dataclasses.field(
        default_factory=dict
    )
    kept: list[Any] = dataclasses.field(default_factory=list)
