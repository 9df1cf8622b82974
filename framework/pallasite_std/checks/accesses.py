"""A walk over all that a kernel does to references, in any block and in any iteration.

Loops are visited once, with a symbol for their counter, and carried values that grow by the same
amount in each iteration are forms of it. Where a condition says of one symbol that it lies within
bounds, what it guards happens for all of these values; under any other condition that is not known,
nothing is certain to happen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import SourceLocation
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable, Region
from pallasite.plugin.language import WarpMesh, transforms
from pallasite_std.checks import values as v
from pallasite_std.checks.scalars import Memory, Places, ScalarVisitor, Test

MOST_EQUATIONS = 50_000
lax = _jax.lax_primitives


@dataclasses.dataclass(frozen=True)
class Span:
    """Indices of one dimension of an array: ``size`` from ``start`` in steps of ``stride``.

    Attributes:
      extent: of the dimension.
      kept: whether the view has the dimension.
    """

    start: Any
    size: int
    stride: int
    extent: int
    kept: bool


@dataclasses.dataclass(frozen=True)
class Use:
    """An equation's use of a reference.

    Attributes:
      equation: the equation.
      memory: the reference.
      indexers: what its view is indexed by, one after the other: the spans of each.
      plain: whether the view is made by indices alone.
      certain: whether it takes place for all values of the symbols, within ``narrowed``.
      narrowed: symbols that are known to lie within bounds there.
      thread: the number of the thread.
      reads, writes: what is done to the memory.
      member: which of the arrays that share the memory, if it is a union.
      data: symbols that what is written depends on.
    """

    equation: Any
    memory: Memory
    indexers: tuple[tuple[Span, ...], ...]
    plain: bool
    certain: bool
    narrowed: Mapping[v.Symbol, tuple[int, int]]
    thread: int
    reads: bool
    writes: bool
    member: Any = None
    data: frozenset[v.Symbol] = frozenset()

    @property
    def location(self) -> SourceLocation | None:
        """The user's line."""
        return _jax.user_location(self.equation.source_info)


class TooLongError(Exception):
    """The kernel has too many equations to follow."""


class Accesses(ScalarVisitor):
    """Collects the uses of references by one thread.

    Attributes:
      uses: in the order of the equations.
      opaque: references that something unknown is done to.
    """

    def __init__(self, table: JaxprTable, places: Places, thread: int):
        super().__init__(table, places, thread)
        self.uses: list[Use] = []
        self.opaque: set[Any] = set()
        self.certain = True
        self.narrowed: dict[v.Symbol, tuple[int, int]] = {}
        self.equations = 0

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        self.equations += len(jaxpr.eqns)
        if self.equations > MOST_EQUATIONS:
            raise TooLongError
        return super().run(jaxpr, operands)

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        found = self.scalar(equation, operands)
        if found is not None:
            return found
        for operand in operands:
            if type(operand) is Memory:
                self.use(equation, operands)
                break
        return None

    def allocation(self, equation: Any, region: Region, position: int) -> Any:
        variable = region.inputs[position]
        is_reference = isinstance(variable.aval, _jax.AbstractRef)
        return Memory(variable, scope=equation) if is_reference else self.unknown(variable)

    # Control flow ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def perhaps(self, certain: bool = False) -> Iterator[None]:
        """What is visited meanwhile happens for certain only if ``certain``."""
        before = self.certain
        self.certain = before and certain
        yield
        self.certain = before

    def ways(
        self, equation: Any, regions: Sequence[Region], operands: list[Any]
    ) -> list[dict[int, Any]]:
        selector = regions[0].selector
        test = None if selector is None else operands[selector]
        found = []
        for number, region in enumerate(regions):
            holds = test if number == 1 else None
            if number == 0 and isinstance(test, Test):
                holds = test.negation()
            if len(regions) == 2 and isinstance(holds, Test):
                with self.where(holds):
                    found.append(self.call(equation, region, operands))
            else:
                with self.perhaps():
                    found.append(self.call(equation, region, operands))
        return found

    @contextlib.contextmanager
    def where(self, test: Test) -> Iterator[None]:
        """What is visited meanwhile happens only where a condition holds."""
        before = self.narrowed
        low, high = before.get(test.symbol, (0, test.symbol.extent - 1))
        low, high = max(low, test.low), min(high, test.high)
        self.narrowed = {**before, test.symbol: (low, high)}
        with self.perhaps(low <= high):
            yield
        self.narrowed = before

    def loop(self, equation: Any, regions: Sequence[Region], operands: list[Any]) -> dict[int, Any]:
        *conditions, body = regions
        if body.trips == 0:
            return self.carried_results(body, operands)
        counter = v.symbol(body.trips, "the loop's counter") if body.trips else None
        first, last = list(operands), list(operands)
        steps = dict(_steps(body))
        for output, operand in body.carried_operands():
            initial, step = operands[operand], steps.get(output)
            if step == 0:
                continue
            if step is None or counter is None:
                first[operand] = initial if isinstance(initial, Memory) else None
                last[operand] = first[operand]
                continue
            first[operand] = v.add(_value(initial), v.multiply(counter, step))
            assert body.trips is not None
            last[operand] = v.add(_value(initial), body.trips * step)
        with self.perhaps(body.trips is not None):
            for condition in conditions:
                self.region(equation, condition, self.inputs(equation, condition, first))
            self.region(equation, body, self.inputs(equation, body, first))
        return self.carried_results(body, last)

    def region(self, equation: Any, region: Region, inputs: Sequence[Any]) -> list[Any]:
        if region.per_warp:
            mesh = next((m for m in equation.params["meshes"] if isinstance(m, WarpMesh)), None)
            return self.by_warps(mesh, region, inputs)
        return super().region(equation, region, inputs)

    def by_warps(self, mesh: Any, region: Region, inputs: Sequence[Any]) -> list[Any]:
        """A region that each warp runs for itself."""
        before = self.warp
        self.warp = (getattr(mesh, "axis_name", None), v.symbol(4, "the warp"))
        outputs = self.run(region.jaxpr, inputs)
        self.warp = before
        return outputs

    warp: tuple[Any, Any] = (None, None)

    def axis(self, name: Any) -> Any:
        """The position along an axis; warps of a thread are one, too."""
        if name is not None and name == self.warp[0]:
            return self.warp[1]
        return super().axis(name)

    # References -----------------------------------------------------------------------------------

    def use(self, equation: Any, operands: list[Any]) -> None:
        """Notes how an equation uses the references that it is given."""
        found = list(views_of(equation, operands))
        for memory, views in found:
            indexers = tuple(
                tuple(
                    _span(index, extent)
                    for index, extent in zip(one.indices, one.shape, strict=True)
                )
                for one in views
                if isinstance(one, _jax.NDIndexer) and not one.int_indexer_shape
            )
            plain = len(indexers) == len(views)
            self.uses.append(
                Use(
                    equation,
                    memory,
                    indexers,
                    plain,
                    self.certain,
                    self.narrowed,
                    self.thread,
                    *_effects(equation, operands, memory),
                    _member(views),
                )
            )
        if len(found) < sum(type(operand) is Memory for operand in operands):
            seen = {id(memory) for memory, _ in found}
            for operand in operands:
                if type(operand) is Memory and id(operand) not in seen:
                    self.opaque.add(operand.variable)


def _member(views: Sequence[Any]) -> Any:
    return next((one for one in views if isinstance(one, transforms.ExtractAliasedRef)), None)


def _effects(equation: Any, operands: Sequence[Any], memory: Memory) -> tuple[bool, bool]:
    """Whether an equation may read a reference, and whether it may write it."""
    reads = writes = False
    for effect in equation.effects:
        variable = _jax.input_of_effect(effect)
        if variable is None:
            continue
        read = type(effect) is _jax.ReadEffect
        for number, one in enumerate(equation.invars):
            if (one is variable or number == variable) and operands[number] is memory:
                reads, writes = reads or read, writes or not read
    # What has no effect that is known may do anything.
    return (reads, writes) if reads or writes else (True, True)


def views_of(equation: Any, operands: Sequence[Any]) -> Iterator[tuple[Memory, tuple[Any, ...]]]:
    """The references that an equation is given, each with the transforms that make its view."""
    params = equation.params
    tree = params.get("args_tree")
    if tree is None:
        leaves = params.get("tree")
        reference = operands[0] if operands else None
        if leaves is None or type(reference) is not Memory:
            return
        skipped = len(operands) - leaves.num_leaves
        yield reference, tuple(jax.tree.unflatten(leaves, operands[skipped:]))
        return
    arguments = tree.unflatten(operands)
    first = arguments[0] if isinstance(arguments, tuple | list) and arguments else None
    if type(first) is Memory and len(arguments) > 1 and isinstance(arguments[1], tuple | list):
        yield first, tuple(arguments[1])  # As Pallas's own loads and stores have them.
        arguments = arguments[2:]
    for one in jax.tree.leaves(arguments, is_leaf=_is_view):
        if type(one) is Memory:
            yield one, ()
        elif isinstance(one, _jax.TransformedRef) and type(one.ref) is Memory:
            yield one.ref, tuple(one.transforms)


def _is_view(value: Any) -> bool:
    return isinstance(value, _jax.TransformedRef)


def _span(index: Any, extent: int) -> Span:
    if isinstance(index, _jax.Slice):
        size = index.size if isinstance(index.size, int) else 0
        start = _number(index.start)
        return Span(start, size, int(index.stride or 1), extent, kept=True)
    return Span(_number(index), 1, 1, extent, kept=False)


def _number(value: Any) -> Any:
    """An index as a value; one that the program made before it called the kernel as a number."""
    if value is None or isinstance(value, Test):
        return None
    if isinstance(value, int | v.Form | v.Range):
        return value
    known = getattr(value, "ndim", None) == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if known else None


def _steps(body: Region) -> Iterator[tuple[int, int]]:
    """For outputs of a loop's body, by how much they exceed the inputs that they become."""
    jaxpr = body.jaxpr
    inputs = body.inputs
    made = None
    for output, position in enumerate(body.carried):
        if position is None:
            continue
        result, carried = jaxpr.outvars[output], inputs[position]
        if result is carried:
            yield output, 0
            continue
        if isinstance(result, _jax.Literal) or getattr(result.aval, "shape", None) != ():
            continue
        if made is None:
            made = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive is lax.add_p}
        equation = made.get(result)
        if equation is None:
            continue
        for one, other in (equation.invars, equation.invars[::-1]):
            if one is carried and isinstance(other, _jax.Literal) and other.aval.dtype.kind in "iu":
                yield output, int(other.val)
                break


def _value(value: Any) -> Any:
    return None if isinstance(value, Test | Memory) else value
