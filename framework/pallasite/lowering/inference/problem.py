"""The problem that layout inference solves: variables, choices of memory layouts, and factors."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.errors import InternalError, PallasiteError, SourceLocation
from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.proposals import LayoutProposals
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.costs import (
    IMPOSSIBLE,
    REFUSED,
    UNCERTAIN,
    layout_costs,
)
from pallasite.lowering.inference.values import MemoryValue
from pallasite.lowering.inference.views import view_of


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a factor comes from: the user's line and the name of the primitive."""

    location: SourceLocation | None
    primitive: str

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location is not None else ""
        return f"{where}{self.primitive}"

    def failure(self, error: Exception, got: str) -> InternalError:
        """The error for an exception that no invalid input explains."""
        return InternalError(
            f"the layout inference of primitive {self.primitive} failed:"
            f" {type(error).__name__}: {error}",
            got=got,
            hint="report this; no kernel should make a rule fail like this",
            location=self.location,
        )


@dataclasses.dataclass
class Variable:
    """An array that an equation makes.

    Attributes:
      shape: of the array.
      bits: of an element.
      sources: variables on whose elements it depends; it is a splat if all of them are.
      varying: whether its elements differ for sure.
      place: the equation.
      dtype: name of the element type, for reports.
      used: whether anything uses the array, for reports.
      weight: how often the equation runs, about.
    """

    shape: tuple[int, ...]
    bits: int
    sources: list[int]
    varying: bool
    place: Place
    dtype: str = ""
    used: bool = True
    weight: float = 1.0


@dataclasses.dataclass
class MemoryChoice:
    """An allocation whose layout is open.

    Attributes:
      value: the allocation.
      candidates: layouts that it may have, in the order of preference.
      place: where it is allocated.
      given: whether the program says how it lies.
    """

    value: MemoryValue
    candidates: list[MemoryLayout]
    place: Place
    given: bool = False


class Factor(abc.ABC):
    """What an equation costs, given the layouts of some groups and allocations.

    Attributes:
      place: the equation.
      weight: how often it runs, about.
      variables: whose groups' layouts matter.
      choices: the allocations whose layouts matter.
    """

    place: Place
    weight: float
    variables: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()

    @abc.abstractmethod
    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        """The cost of running once, for layouts of ``variables`` and of ``choices``."""

    def proposals(
        self, position: int, layouts: Sequence[Layout | None], memory: Sequence[MemoryLayout]
    ) -> list[Layout]:
        """Layouts for ``variables[position]`` that would suit, given those of the others."""
        return []


@dataclasses.dataclass(eq=False)
class Fixed(Factor):
    """An equation that needs or makes an array in one layout.

    Attributes:
      layout: that layout.
      bits: of an element.
      pinned: whether the array cannot be converted there.
      makes: whether the equation makes the array, rather than needs it.
      why: in the user's terms.
    """

    place: Place
    weight: float
    variable: int
    layout: Layout
    bits: int
    pinned: bool = False
    makes: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        self.variables = (self.variable,)
        self._costs = layout_costs()

    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        (layout,) = layouts
        if layout == self.layout:
            return 0.0
        if self.pinned:
            return IMPOSSIBLE
        ends = (self.layout, layout) if self.makes else (layout, self.layout)
        return self._costs.conversion(*ends, self.bits)

    def proposals(
        self, position: int, layouts: Sequence[Layout | None], memory: Sequence[MemoryLayout]
    ) -> list[Layout]:
        return [self.layout]


@dataclasses.dataclass(eq=False)
class Copies(Factor):
    """The work on arrays of one layout that is done in more than one thread.

    Attributes:
      bits: of an element.
    """

    place: Place
    weight: float
    variable: int
    bits: int

    def __post_init__(self) -> None:
        self.variables = (self.variable,)
        self._costs = layout_costs()

    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        return self._costs.copies(layouts[0], self.bits)


type Pairs = Callable[[Layout | None, Layout | None], Sequence[tuple[Layout, Layout]]]
"""Layouts (of the operand, of the result) between which an equation can work without moving data,
given the layouts that the operand has and that the result should have, if they are known. The
operand's layouts come first that suit best."""


@dataclasses.dataclass(eq=False)
class Relation(Factor):
    """An equation whose result's layout follows from that of its operand, or the other way round.

    Attributes:
      operand, result: the variables.
      pairs: what it can do.
      bits: of an element of the operand and of the result.
      work: what it costs to do it, given both layouts; nothing by default.
    """

    place: Place
    weight: float
    operand: int
    result: int
    pairs: Pairs
    bits: tuple[int, int]
    work: Callable[[Layout, Layout], float] | None = None

    def __post_init__(self) -> None:
        self.variables = (self.operand, self.result)
        self._costs = layout_costs()
        self._found: dict[Any, list[tuple[Layout, Layout]]] = {}

    def options(self, operand: Layout | None, result: Layout | None) -> list[tuple[Layout, Layout]]:
        """The pairs for two layouts."""
        key = (operand, result)
        if key not in self._found:
            try:
                self._found[key] = list(self.pairs(operand, result))
            except PallasiteError:
                self._found[key] = []
            except Exception as error:
                raise self.place.failure(error, f"layouts {operand} and {result}") from error
        return self._found[key]

    def best(self, operand: Layout, result: Layout) -> tuple[float, tuple[Layout, Layout] | None]:
        """The cheapest pair, and what conversions to and from it cost."""
        best: tuple[float, tuple[Layout, Layout] | None] = (IMPOSSIBLE / 1e3, None)
        for pair in self.options(operand, result):
            cost = 0.0 if self.work is None else self.work(*pair)
            cost += self._costs.conversion(operand, pair[0], self.bits[0])
            cost += self._costs.conversion(pair[1], result, self.bits[1])
            if cost < best[0]:
                best = cost, pair
        return best

    def suits(self, operand: Layout, result: Layout) -> bool:
        """Whether it can work between two layouts without any conversion."""
        return (operand, result) in self.options(operand, result)

    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        return self.best(*layouts)[0]

    def proposals(
        self, position: int, layouts: Sequence[Layout | None], memory: Sequence[MemoryLayout]
    ) -> list[Layout]:
        operand, result = layouts
        if position == 0:
            return [pair[0] for pair in self.options(None, result)] if result is not None else []
        return [pair[1] for pair in self.options(operand, None)] if operand is not None else []


type AccessCheck = Callable[[Any, Layout], None]
"""Takes memory and the layout of the array that is loaded from it or stored there, and raises a
PallasiteError if the lowering refuses them."""


@dataclasses.dataclass(eq=False)
class Access(Factor):
    """A load or a store.

    Attributes:
      variable: the array.
      root: the allocation that is accessed.
      transforms: the view of it.
      suitable: makes the layouts that suit a view, that which does best by itself first.
      suggested: the layouts that plugins propose.
      what: the access in the user's terms.
      check: whether the lowering refuses it.
    """

    place: Place
    weight: float
    variable: int
    root: MemoryValue
    transforms: Sequence[Any]
    suitable: Callable[[Any], Sequence[Layout]]
    suggested: LayoutProposals
    what: str = "the access"
    check: AccessCheck | None = None

    def __post_init__(self) -> None:
        self.variables = (self.variable,)
        self._costs = layout_costs()
        self.choices = () if self.root.choice is None else (self.root.choice,)
        self._refused: dict[tuple[Layout, MemoryLayout], bool] = {}
        self._views: dict[MemoryLayout | None, Any] = {}
        self._uncertain: set[MemoryLayout | None] = set()

    def view(self, memory: Sequence[MemoryLayout]) -> Any:
        """The view, or None if the layout has no such one."""
        layout = memory[0] if memory else None
        if layout not in self._views:
            try:
                view = view_of(self.root, layout, self.transforms)
                self._views[layout] = view.memory()
                if not view.certain:
                    self._uncertain.add(layout)
            except PallasiteError:
                self._views[layout] = None
        return self._views[layout]

    def refusal(self, layout: MemoryLayout | None) -> PallasiteError | None:
        """Why a layout has no such view."""
        try:
            view_of(self.root, layout, self.transforms)
        except PallasiteError as error:
            return error
        return None

    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        view = self.view(memory)
        if view is None:
            return IMPOSSIBLE
        cost = self._costs.access(layouts[0], view.layout, view.offset_alignment, self.root.space)
        if self._is_refused(view, layouts[0]):
            cost += REFUSED
        return cost + UNCERTAIN if memory and memory[0] in self._uncertain else cost

    def proposals(
        self, position: int, layouts: Sequence[Layout | None], memory: Sequence[MemoryLayout]
    ) -> list[Layout]:
        view = self.view(memory)
        if view is None:
            return []
        found = list(self.suitable(view))
        order = view.layout.order
        if order != tuple(range(len(order))):
            # A turned view of memory, which is best accessed as it lies there.
            turned = dataclasses.replace(view, layout=view.layout.transpose(order))
            inverse = [order.index(i) for i in range(len(order))]
            rows = (one for one in self.suitable(turned) if not getattr(one, "flat", False))
            found += [one.transpose(inverse).layout for one in rows]
            found += self.suggested.for_transpose(view.layout.shape)
        return found

    def _is_refused(self, view: Any, layout: Layout) -> bool:
        if self.check is None:
            return False
        key = layout, view.layout
        if key not in self._refused:
            try:
                self.check(view, layout)
                self._refused[key] = False
            except PallasiteError:
                self._refused[key] = True
        return self._refused[key]


@dataclasses.dataclass(eq=False)
class MemoryUse(Factor):
    """An equation that can use memory in certain layouts only, such as an asynchronous copy.

    Attributes:
      root: the allocation.
      transforms: the view of it.
      check: raises a PallasiteError if it cannot use such a view; or returns what it costs.
      why: in the user's terms.
    """

    place: Place
    weight: float
    root: MemoryValue
    transforms: Sequence[Any]
    check: Callable[[Any], float | None]
    why: str = ""

    def __post_init__(self) -> None:
        self.choices = () if self.root.choice is None else (self.root.choice,)
        self._costs: dict[MemoryLayout | None, float] = {}

    def refusal(self, layout: MemoryLayout | None) -> PallasiteError | None:
        """Why a layout will not do."""
        try:
            self.check(view_of(self.root, layout, self.transforms))
        except PallasiteError as error:
            return error
        return None

    def cost(self, layouts: Sequence[Layout], memory: Sequence[MemoryLayout]) -> float:
        layout = memory[0] if memory else None
        if layout not in self._costs:
            try:
                view = view_of(self.root, layout, self.transforms)
                found = self.check(view) or 0.0
                self._costs[layout] = found if view.certain else found + UNCERTAIN
            except PallasiteError:
                self._costs[layout] = IMPOSSIBLE
            except Exception as error:
                raise self.place.failure(error, f"memory in layout {layout}") from error
        return self._costs[layout]


class Problem:
    """Everything that the walk over a kernel has found."""

    def __init__(self) -> None:
        self.variables: list[Variable] = []
        self.choices: list[MemoryChoice] = []
        self.factors: list[Factor] = []
        self._parents: list[int] = []

    def variable(self, variable: Variable) -> int:
        """Adds a variable, in a group of its own."""
        self.variables.append(variable)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def group(self, variable: int) -> int:
        """The representative of a variable's group: its first member."""
        parents = self._parents
        while parents[variable] != variable:
            parents[variable] = parents[parents[variable]]
            variable = parents[variable]
        return variable

    def join(self, one: int, other: int) -> None:
        """Puts two variables of one shape into one group."""
        first, second = sorted((self.group(one), self.group(other)))
        self._parents[second] = first

    def varying(self) -> list[bool]:
        """For each variable, whether its elements may differ."""
        result = [variable.varying for variable in self.variables]
        users: dict[int, list[int]] = {}
        for number, variable in enumerate(self.variables):
            for source in variable.sources:
                users.setdefault(source, []).append(number)
        pending = [number for number, known in enumerate(result) if known]
        while pending:
            for user in users.get(pending.pop(), ()):
                if not result[user]:
                    result[user] = True
                    pending.append(user)
        return result
