"""The table of primitives that carry jaxprs: which regions each has and what flows through them.

A primitive of calls, loops, branches or scopes holds jaxprs in its parameters. A plugin says once,
with a :class:`JaxprPrimitive`, what these are to the equation: its regions (:class:`Region`).
Whatever walks a kernel (:class:`pallasite.jaxpr_visitor.Visitor`) then sees inside.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.errors import PluginError

if TYPE_CHECKING:
    from jax.extend.core import Primitive


class RegionKind(enum.Enum):
    """When a region runs.

    CALL: once, each time that the equation does; several follow one another.
    BRANCH: it is one of the adjacent regions of this kind, of which one runs.
    LOOP_CONDITION: before each iteration of the loop whose body is the next region; its output
      says whether there is one.
    LOOP_BODY: in each iteration.
    """

    CALL = "call"
    BRANCH = "branch"
    LOOP_CONDITION = "loop condition"
    LOOP_BODY = "loop body"

    __hash__ = object.__hash__


def inputs_of(jaxpr: Any) -> list[Any]:
    """The variables of a jaxpr that whoever runs it gives values to: its inputs, and before them
    the constants of which it holds no values."""
    if jaxpr.constvars and not jaxpr.consts:
        return [*jaxpr.constvars, *jaxpr.invars]
    return list(jaxpr.invars)


def binders(jaxpr: Any, count: int) -> list[Any]:
    """The variables that so many values are for: the inputs of a jaxpr, and before them, if the
    values are enough, its constants."""
    constants = jaxpr.constvars if count > len(jaxpr.invars) else ()
    return [*constants, *jaxpr.invars]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """One jaxpr of an equation.

    Inputs are counted as :func:`inputs_of` lists them, operands and results are those of the
    equation, all from 0.

    Attributes:
      jaxpr: what runs.
      kind: when it runs.
      operands: for each input, which operand it is, or None for a value of its own: the counter of
        a loop, an element of a scanned array, an allocation. Constants are inputs, too, where the
        equation has operands for them although the jaxpr holds values.
      results: for each output, which result it becomes (of a loop: in the last iteration), or
        None.
      carried: of a loop's body: for each output, which input it becomes in the next iteration, or
        None. Those inputs are operands.
      trips: of a loop's body: how often it runs, if the equation says so.
      selector: of a branch: the operand whose value is the number of the branch, clamped to those
        that there are.
      per_warp: whether each warp of a user's thread runs it for itself.
      scoped: inputs that are references to memory which is allocated while the region runs.
      states: pairs of an input and a result: a reference (a state) that begins with the value of
        its operand, and whose contents at the end are the result. Where the operand is a reference
        already, it is that one, in the result, too.
    """

    jaxpr: Any
    kind: RegionKind = RegionKind.CALL
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    carried: tuple[int | None, ...] = ()
    trips: int | None = None
    selector: int | None = None
    per_warp: bool = False
    scoped: frozenset[int] = frozenset()
    states: tuple[tuple[int, int], ...] = ()

    @property
    def inputs(self) -> list[Any]:
        """The variables that the region's inputs are."""
        return binders(self.jaxpr, len(self.operands))

    @property
    def is_loop(self) -> bool:
        """Whether it is part of a loop."""
        return self.kind is RegionKind.LOOP_BODY or self.kind is RegionKind.LOOP_CONDITION

    @property
    def is_plain_call(self) -> bool:
        """Whether it can be inlined where the equation is."""
        special = self.per_warp or self.scoped or self.states
        return self.kind is RegionKind.CALL and not special

    @functools.cached_property
    def passed_on(self) -> tuple[int, ...] | None:
        """The operands that the inputs are, if all of them are operands, and none is a state."""
        operands = tuple(operand for operand in self.operands if operand is not None)
        return operands if len(operands) == len(self.operands) and not self.states else None

    def carried_operands(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an output and the operand whose place it takes in the next iteration."""
        return self._carried_operands

    @functools.cached_property
    def _carried_operands(self) -> tuple[tuple[int, int], ...]:
        pairs = []
        for output, position in enumerate(self.carried):
            if position is not None:
                operand = self.operands[position]
                assert operand is not None
                pairs.append((output, operand))
        return tuple(pairs)


def call(jaxpr: Any, *, per_warp: bool = False) -> Region:
    """The region of a call: the operands are the inputs, the outputs are the results."""
    return Region(
        jaxpr=jaxpr,
        operands=tuple(range(len(inputs_of(jaxpr)))),
        results=tuple(range(len(jaxpr.outvars))),
        per_warp=per_warp,
    )


def branches(jaxprs: Sequence[Any]) -> list[Region]:
    """The regions of a conditional: the first operand is the number of the branch, the others are
    the inputs of each."""
    return [
        Region(
            jaxpr=jaxpr,
            kind=RegionKind.BRANCH,
            operands=tuple(range(1, len(inputs_of(jaxpr)) + 1)),
            results=tuple(range(len(jaxpr.outvars))),
            selector=0,
        )
        for jaxpr in jaxprs
    ]


def loop_body(
    jaxpr: Any,
    *,
    constants: int = 0,
    first: int = 0,
    counter: bool = False,
    trips: int | None = None,
) -> Region:
    """The region of a loop's body whose outputs are the carried values, which are the results.

    Args:
      jaxpr: of the loop's counter (if it has one), constants and carried values.
      constants: how many operands every iteration gets as they are.
      first: which operand is the first of the constants; the carried values come after those.
      counter: whether the number of the iteration is the first input.
      trips: the number of iterations, if it is known.
    """
    count = len(jaxpr.outvars)
    given = range(first, first + constants + count)
    own = (None,) if counter else ()
    start = len(own) + constants
    return Region(
        jaxpr=jaxpr,
        kind=RegionKind.LOOP_BODY,
        operands=(*own, *given),
        results=tuple(range(count)),
        carried=tuple(range(start, start + count)),
        trips=trips,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxprPrimitive:
    """A primitive that carries jaxprs.

    Attributes:
      primitive: the JAX primitive.
      regions: ``regions(equation)`` returns the regions of an equation of the primitive, in the
        order in which they run.
      rebind: ``rebind(equation, operands, functions)`` binds the primitive anew, in the current
        trace, and returns its results. ``functions`` has for each region a function of its inputs
        that returns its outputs; it may capture values of the trace around it. Operands may be
        views of references (``TransformedRef``), which cannot be operands of a primitive, but can
        be captured. Without it, calls are inlined when a kernel's body is traced anew, and
        other regions cannot capture anything.
      with_jaxprs: ``with_jaxprs(params, jaxprs)`` returns the parameters with other jaxprs of the
        same types for the regions. Without it, each region's jaxpr is replaced where a parameter,
        or an item of one, is that very object.
      overrides: names of plugins whose entry for the primitive this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    primitive: Primitive
    regions: Callable[[Any], Sequence[Region]]
    rebind: Callable[[Any, list[Any], list[Callable[..., list[Any]]]], Sequence[Any]] | None = None
    with_jaxprs: Callable[[dict[str, Any], Sequence[Any]], dict[str, Any]] | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""


class JaxprTable:
    """What all plugins say of primitives that carry jaxprs.

    Attributes:
      primitives: those that it has.
    """

    def __init__(self, entries: Iterable[JaxprPrimitive] = ()):
        self._entries = {entry.primitive: entry for entry in entries}
        self.primitives: frozenset[Any] = frozenset(self._entries)
        self._remembered: dict[int, tuple[Any, Sequence[Region]]] | None = None

    def remembering(self) -> JaxprTable:
        """A table of the same primitives that finds the regions of an equation once only.

        It keeps references to the equations, so it is for the work on one kernel.
        """
        table = JaxprTable(self)
        table._remembered = {}
        return table

    @property
    def remembers(self) -> bool:
        """Whether it is for the work on one kernel, see :meth:`remembering`."""
        return self._remembered is not None

    def __contains__(self, primitive: Any) -> bool:
        return primitive in self._entries

    def __iter__(self) -> Iterator[JaxprPrimitive]:
        return iter(self._entries.values())

    def entry(self, primitive: Any) -> JaxprPrimitive | None:
        """What is known of a primitive; None if it carries no jaxprs."""
        return self._entries.get(primitive)

    def regions(self, equation: Any) -> Sequence[Region]:
        """The regions of an equation; none if its primitive is not in the table.

        Raises:
          PluginError: the plugin's description does not fit the equation.
        """
        entry = self._entries.get(equation.primitive)
        if entry is None:
            return ()
        remembered = self._remembered
        if remembered is not None and (found := remembered.get(id(equation))) is not None:
            return found[1]
        regions = entry.regions(equation)
        for region in regions:
            _check(entry, equation, region)
        if remembered is not None:
            remembered[id(equation)] = (equation, regions)
        return regions

    def inner(self, equation: Any) -> list[Any]:
        """The jaxprs of an equation's regions."""
        return [region.jaxpr for region in self.regions(equation)]

    def jaxprs(self, jaxpr: Any) -> Iterator[Any]:
        """A jaxpr and, after it, those of its equations' regions, all the way down."""
        yield jaxpr
        for equation in jaxpr.eqns:
            if equation.primitive in self._entries:
                for inner in self.inner(equation):
                    yield from self.jaxprs(inner)

    def equations(self, jaxpr: Any) -> Iterator[Any]:
        """The equations of a jaxpr, each followed by those of its regions, all the way down."""
        for equation in jaxpr.eqns:
            yield equation
            if equation.primitive in self._entries:
                for inner in self.inner(equation):
                    yield from self.equations(inner)


def groups(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Regions that belong together: a call, all branches of one conditional, or the conditions and
    the body of one loop."""
    if len(regions) == 1:
        yield [*regions]
        return
    group: list[Region] = []
    for region in regions:
        last = group[-1] if group else None
        joins = last is not None and (
            (last.kind is RegionKind.LOOP_CONDITION and region.is_loop)
            or (last.kind is region.kind is RegionKind.BRANCH and last.selector == region.selector)
        )
        if group and not joins:
            yield group
            group = []
        group.append(region)
    if group:
        yield group


def _check(entry: JaxprPrimitive, equation: Any, region: Region) -> None:
    jaxpr, given, outputs = region.jaxpr, len(region.operands), len(region.results)
    constants, inputs = len(jaxpr.constvars), len(jaxpr.invars)
    wrong = None
    if given != constants + inputs and (given != inputs or not jaxpr.consts):
        wrong = f"{given} operands for {len(inputs_of(jaxpr))} inputs"
    elif outputs != len(jaxpr.outvars):
        wrong = f"{outputs} results for {len(jaxpr.outvars)} outputs"
    elif region.carried and len(region.carried) != outputs:
        wrong = f"{len(region.carried)} carried inputs for {outputs} outputs"
    elif _beyond((*region.operands, region.selector), len(equation.invars)):
        wrong = f"an operand that is not among the equation's {len(equation.invars)}"
    elif _beyond((*region.carried, *region.scoped, *(one for one, _ in region.states)), given):
        wrong = f"an input that is not among its {given}"
    elif _beyond((*region.results, *(one for _, one in region.states)), len(equation.outvars)):
        wrong = f"a result that is not among the equation's {len(equation.outvars)}"
    elif any(one is not None and region.operands[one] is None for one in region.carried):
        wrong = "a carried input that is no operand"
    if wrong is not None:
        raise PluginError(
            f"plugin {entry.plugin!r} describes a region of primitive {equation.primitive.name}"
            f" ({region.kind.value}) with {wrong}",
            expected="one operand (or None) for each input of the region's jaxpr, one result (or"
            " None) for each of its outputs",
        )


def _beyond(numbers: Sequence[int | None], count: int) -> bool:
    return any(number is not None and not 0 <= number < count for number in numbers)
