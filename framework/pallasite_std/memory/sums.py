"""Numbers that kernels compute, as sums, and by how much two of them may differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

from jaxlib.mlir import ir

from pallasite.plugin.lowering import KernelContext, StateKey
from pallasite_std.memory.divisibility import known_divisor
from pallasite_std.memory.reference_types import MemoryReference, WindowStart
from pallasite_std.memory.references import constant_integer

type Key = tuple[int, frozenset[tuple[Hashable, int]]]
"""A sum: its constant, its terms and how often it has each."""


@dataclasses.dataclass(frozen=True)
class Computed:
    """What an operation that is no sum makes of its operands; the same operation with the same
    operands is the same number.

    Attributes:
      operation: its name, its attributes and the type of its result.
      operands: their keys.
      value: one that is such a result, if there is one.
    """

    operation: Hashable
    operands: tuple[Key, ...]
    value: ir.Value | None = dataclasses.field(compare=False, default=None)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A number: a constant and multiples of values that are computed in the kernel."""

    constant: int
    terms: dict[Hashable, int]

    @classmethod
    def of(cls, memory: MemoryReference) -> Sum:
        """Where the first element of a reference is in its array."""
        total = cls(memory.offset, {})
        for part in memory.dynamic:
            divisor, modulus = part.term.divisor, part.term.modulus
            index = cls.of_value(part.index)
            if divisor != 1 or modulus is not None:
                index = cls(0, {Computed((divisor, modulus), (index.key,)): 1})
            total = total.plus(index, part.term.stride)
        return total

    @classmethod
    def of_window(cls, start: WindowStart) -> Sum:
        """Where a window begins."""
        total = cls(start.static, {})
        for value in start.dynamic:
            total = total.plus(cls.of_value(value))
        return total

    @classmethod
    def of_value(cls, value: ir.Value, depth: int = 10) -> Sum:
        """The same computations of the same values are the same number."""
        number = constant_integer(value)
        if number is not None:
            return cls(number, {})
        owner = value.owner
        if isinstance(owner, ir.Block) or not owner.name.startswith("arith.") or not depth:
            return cls(0, {value: 1})
        name = owner.name
        parts = [cls.of_value(operand, depth - 1) for operand in owner.operands]
        if name == "arith.addi":
            return parts[0].plus(parts[1])
        if name == "arith.subi":
            return parts[0].plus(parts[1], -1)
        if name == "arith.muli":
            for factor, other in (parts, parts[::-1]):
                if not factor.terms:
                    return cls(0, {}).plus(other, factor.constant)
        if name in ("arith.extsi", "arith.index_cast") and isinstance(value.type, ir.IntegerType):
            return parts[0]
        keys = tuple(part.key for part in parts)
        named = [owner.attributes[number] for number in range(len(owner.attributes))]
        attributes = tuple((one.name, str(one.attr)) for one in named)
        return cls(0, {Computed((name, attributes, str(value.type)), keys, value): 1})

    @property
    def key(self) -> Key:
        """Equal for equal sums."""
        return self.constant, frozenset(self.terms.items())

    def plus(self, other: Sum, factor: int = 1) -> Sum:
        """The sum with a multiple of another one."""
        terms = dict(self.terms)
        for term, count in other.terms.items():
            terms[term] = terms.get(term, 0) + factor * count
        return Sum(
            self.constant + factor * other.constant,
            {term: count for term, count in terms.items() if count},
        )

    def behind(self, other: Sum) -> int | None:
        """How far this number is behind another one, or None if that is not known."""
        difference = self.plus(other, -1)
        return None if difference.terms else difference.constant


@dataclasses.dataclass(frozen=True)
class Difference:
    """What a difference of two numbers may be: a constant plus any multiple of ``unit``."""

    constant: int
    unit: int

    def is_multiple(self, size: int) -> bool:
        """Whether it always is a multiple."""
        return self.constant % size == 0 and self.unit % size == 0


class Counters:
    """How numbers differ from one iteration of a loop to others, by what is known of the values
    that loops carry."""

    def __init__(self) -> None:
        self._steps: dict[ir.Value, int] = {}

    def note(self, value: ir.Value, step: int) -> None:
        """Notes what a value that a loop carries goes up by."""
        self._steps[value] = step

    def difference(self, new: Sum, old: Sum, loop: ir.Operation | None = None) -> Difference:
        """The difference of two numbers, in the same iteration of the loops around both or, given
        the outermost one, in any two of its iterations."""
        unit = 0
        for term in {**new.terms, **old.terms}:
            count, other = new.terms.get(term, 0), old.terms.get(term, 0)
            if loop is None or not _changes(term, loop):
                unit = math.gcd(unit, (count - other) * _divisor(term))
            elif count == other:
                unit = math.gcd(unit, count * math.lcm(_divisor(term), self._unit(term, loop)))
            else:
                unit = math.gcd(unit, count * _divisor(term), other * _divisor(term))
        return Difference(new.constant - old.constant, unit)

    def distance(self, new: Sum, old: Sum, loops: Sequence[ir.Operation]) -> int:
        """How far two numbers are apart at least where the first of ``loops`` is in different
        iterations, and the others, which are in it, anywhere; 0 if that is not known."""
        if new.terms != old.terms or any(loop.name != "scf.for" for loop in loops):
            return 0
        outer = loops[0]
        rates = [0] * len(loops)
        for term, count in new.terms.items():
            if not _changes(term, outer):
                continue
            loop, step = _loop(term), self._step(term)
            if loop is None or loop not in loops or not step:
                return 0
            rates[loops.index(loop)] += count * step
            if loop != outer and any(_changes(one, outer) for one in _start(term).terms):
                return 0
        inner = sum(
            abs(rate) * _repetitions(loop) for rate, loop in zip(rates[1:], loops[1:], strict=True)
        )
        return max(abs(rates[0]) - inner - abs(new.constant - old.constant), 0)

    def _step(self, term: Hashable) -> int:
        """What a counter goes up by; 0 for what is none."""
        loop = _loop(term)
        if loop is None or loop.name != "scf.for" or not isinstance(term, ir.Value):
            return 0
        if ir.BlockArgument(term).arg_number == 0:
            return constant_integer(loop.operands[2]) or 0
        return self._steps.get(term, 0)

    def _unit(self, term: Hashable, loop: ir.Operation) -> int:
        """What a term changes by from one iteration of a loop to others: a multiple of this."""
        step = self._step(term)
        if not step:
            return 1
        start = _start(term)
        return math.gcd(step, self.difference(start, start, loop).unit)


def _divisor(term: Hashable) -> int:
    """What a term is known to be a multiple of."""
    value = term.value if isinstance(term, Computed) else term
    return known_divisor(value) if isinstance(value, ir.Value) else 1


def _loop(term: Hashable) -> ir.Operation | None:
    """The loop whose argument a term is, if it is one's."""
    owner = term.owner if isinstance(term, ir.Value) else None
    return owner.owner.operation if isinstance(owner, ir.Block) else None


def _start(term: Hashable) -> Sum:
    """What a for loop's argument is in its first iteration."""
    loop = _loop(term)
    assert loop is not None and isinstance(term, ir.Value)
    number = ir.BlockArgument(term).arg_number
    return Sum.of_value(loop.operands[number + 2 if number else 0])


FAR = 1 << 62
"""More than any extent."""


def _repetitions(loop: ir.Operation) -> int:
    """How often a for loop goes on after its first iteration, at most."""
    first, end, step = (constant_integer(bound) for bound in list(loop.operands)[:3])
    if first is None or end is None or not step:
        return FAR
    return max(end - first - 1, 0) // step


def _changes(term: Hashable, loop: ir.Operation) -> bool:
    """Whether a term is computed of what is computed in a loop."""
    return any(loop in _around(value) for value in _leaves(term))


def _leaves(term: Hashable) -> Iterator[ir.Value]:
    """The values that a term is computed of."""
    if isinstance(term, Computed):
        for _, terms in term.operands:
            for one, _ in terms:
                yield from _leaves(one)
    elif isinstance(term, ir.Value):
        yield term


def _around(value: ir.Value) -> Iterator[ir.Operation]:
    """The operations around the one that makes a value, or whose argument it is."""
    owner = value.owner
    around = owner.owner if isinstance(owner, ir.Block) else owner.parent
    while around is not None and around.parent is not None:
        operation = around.operation
        yield operation
        around = operation.parent


def _no_counters(kernel: KernelContext) -> Counters:
    return Counters()


_COUNTERS = StateKey("standard.counters", _no_counters)


def counters_of(kernel: KernelContext) -> Counters:
    """What is known of the values that a kernel's loops carry."""
    return kernel.state(_COUNTERS)
