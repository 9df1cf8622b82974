"""What an integer MLIR value is known to be a multiple of.

Addresses and windows start at products with block sizes, so looking back through the operations
that compute them tells how wide accesses can be, and whether a window begins with a tile.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import operator
from collections.abc import Callable, Iterator, Sequence

from jaxlib.mlir import ir

from pallasite.plugin.inference import ANY
from pallasite.plugin.ir import ops

_DEPTH = 64
_FACT = "pallasite.multiple_of"
MEMREF_ALIGNMENT = "pallasite.alignment"
"""Attribute of the cast that makes a memref: bytes that its address is a multiple of."""


def known_divisor(value: ir.Value) -> int:
    """A positive number that divides ``value`` (i32 or i64) whatever the inputs; at least 1.

    Sums and products are taken not to overflow.
    """
    return (_search.get() or _Search()).ask(value)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Within the block, what questions find out serves later ones. No operation may be changed or
    erased in it; others may be added."""
    token = _search.set(_Search())
    try:
        yield
    finally:
        _search.reset(token)


def known_remainder(value: ir.Value, divisor: int) -> int | None:
    """The remainder of ``value`` (i32 or i64) by a positive number whatever the inputs, if that is
    known; sums are taken not to overflow."""
    return _remainder(value, divisor, _DEPTH)


def _remainder(value: ir.Value, divisor: int, depth: int) -> int | None:
    number = _constant(value)
    if number is not None:
        return number % divisor
    owner = value.owner
    if depth and not isinstance(owner, ir.Block) and owner.name in ("arith.addi", "arith.subi"):
        left, right = (_remainder(part, divisor, depth - 1) for part in owner.operands)
        if left is not None and right is not None:
            return (left + right if owner.name == "arith.addi" else left - right) % divisor
    return 0 if known_divisor(value) % divisor == 0 else None


def with_divisor(value: ir.Value, divisor: int) -> ir.Value:
    """The same number (i32 or i64), which :func:`known_divisor` takes to be a multiple."""
    fact = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), divisor)
    result = ops.arith.addi(value, ops.constant(0, value.type))
    result.owner.attributes[_FACT] = fact
    return result


def _two(divisor: int) -> int:
    """The largest power of two in a divisor."""
    return divisor & -divisor


class _Search:
    """One question or several: operations that many paths lead to are looked at once."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, int] = {}
        self._conditions: dict[ir.Value, bool | None] = {}
        self._cut = False

    def ask(self, value: ir.Value) -> int:
        """The divisor of a value; see :func:`known_divisor`."""
        found = self.divisor(value, _DEPTH)
        if self._cut:
            # Other ways to the same operations may be shorter.
            self._known.clear()
            self._cut = False
        return found

    def divisor(self, value: ir.Value, depth: int) -> int:
        """The divisor of a value that ``depth`` operations may lead back from."""
        found = self._known.get(value)
        if found is None:
            self._cut |= not depth
            found = self._find(value, depth - 1) if depth else 1
            self._known[value] = found
        return found

    def _find(self, value: ir.Value, depth: int) -> int:
        owner = value.owner
        if isinstance(owner, ir.Block):
            return self._argument(value, owner, depth)
        name = owner.name
        if name == "arith.constant":
            return _constant_divisor(owner)
        if name in ("scf.if", "scf.index_switch", "scf.execute_region"):
            return self._yielded(value, owner, depth)
        if name in ("scf.for", "scf.while"):
            return self._loop_result(value, owner, depth)
        rule = _RULES.get(name)
        if rule is None:
            return 1
        operands = list(owner.operands)
        if name == "arith.select":
            chosen = _chosen(operands, self._conditions)
            if chosen is not None:
                return self.divisor(chosen, depth)
            del operands[0]
        if rule is _common:
            return self._common(name, owner, operands, depth)
        return rule(operands, [self.divisor(operand, depth) for operand in operands])

    def _common(
        self, name: str, owner: ir.Operation, operands: Sequence[ir.Value], depth: int
    ) -> int:
        """What divides all operands."""
        # First what takes no search; and nothing after what makes the result 1.
        result, computed = 0, []
        for operand in operands:
            source = operand.owner
            kind = "" if isinstance(source, ir.Block) else source.name
            if kind != "arith.constant":
                if operand in self._known or (kind and kind not in _LOOKED_THROUGH):
                    result = math.gcd(result, self._known.get(operand, 1))
                else:
                    computed.append(operand)
                continue
            divisor = _constant_divisor(source)
            if divisor == ANY and name == "arith.addi" and _FACT in owner.attributes:
                fact = int(ir.IntegerAttr(owner.attributes[_FACT]).value)
                return math.lcm(fact, self.divisor(operands[0], depth))
            result = math.gcd(result, divisor)
        for operand in computed:
            if result == 1:
                break
            result = math.gcd(result, self.divisor(operand, depth))
        return result

    def _argument(self, value: ir.Value, block: ir.Block, depth: int) -> int:
        """The induction variable of a for loop is a multiple of what its start and step are."""
        owner = block.owner
        if owner.name != "scf.for" or ir.BlockArgument(value).arg_number != 0:
            return 1
        lower, _, step = list(owner.operands)[:3]
        return math.gcd(self.divisor(lower, depth), self.divisor(step, depth))

    def _yielded(self, value: ir.Value, owner: ir.Operation, depth: int) -> int:
        number = ir.OpResult(value).result_number
        result = 0
        for region in owner.regions:
            for block in region.blocks:
                last = block.operations[-1]
                if last.operation.name != "scf.yield":
                    return 1
                result = math.gcd(result, self.divisor(last.operation.operands[number], depth))
        return result or 1

    def _loop_result(self, value: ir.Value, owner: ir.Operation, depth: int) -> int:
        """What a carried value starts as, and what the body makes of it."""
        number = ir.OpResult(value).result_number
        body = owner.regions[len(owner.regions) - 1].blocks[0]
        if owner.name == "scf.while":
            before = owner.regions[0].blocks[0]
            condition = before.operations[-1].operation
            if condition.operands[1 + number] != before.arguments[number]:
                return 1
            start = owner.operands[number]
        else:
            start = owner.operands[3 + number]
        following = body.operations[-1].operation.operands[number]
        return math.gcd(self.divisor(start, depth), self.divisor(following, depth))


_search: contextvars.ContextVar[_Search | None] = contextvars.ContextVar("search", default=None)


def _constant_divisor(owner: ir.Operation) -> int:
    return abs(int(ir.IntegerAttr(owner.attributes["value"]).value)) or ANY


def _constant(value: ir.Value, conditions: dict[ir.Value, bool | None] | None = None) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    name = owner.name
    if name == "arith.select":
        conditions = {} if conditions is None else conditions
        chosen = _chosen(list(owner.operands), conditions)
        return None if chosen is None else _constant(chosen, conditions)
    if name != "arith.constant":
        return None
    return int(ir.IntegerAttr(owner.attributes["value"]).value)


def _chosen(
    operands: Sequence[ir.Value], conditions: dict[ir.Value, bool | None]
) -> ir.Value | None:
    """The value that a selection always gives, if its condition does not depend on anything."""
    condition, yes, no = operands
    known = _truth(condition, conditions)
    return None if known is None else yes if known else no


_COMPARISONS = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.lt, operator.le, operator.gt, operator.ge),
)
"""By number of the predicate; the last four are unsigned."""


def _truth(value: ir.Value, conditions: dict[ir.Value, bool | None]) -> bool | None:
    """Whether a condition always holds, or never; None if that is not known.

    ``conditions`` has what was found before.
    """
    if value not in conditions:
        conditions[value] = _find_truth(value, conditions)
    return conditions[value]


def _find_truth(value: ir.Value, conditions: dict[ir.Value, bool | None]) -> bool | None:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    name = owner.name
    if name == "arith.constant":
        return bool(ir.IntegerAttr(owner.attributes["value"]).value)
    if name in ("arith.andi", "arith.ori"):
        deciding = name == "arith.ori"
        known = [_truth(operand, conditions) for operand in owner.operands]
        return deciding if deciding in known else None if None in known else not deciding
    if name != "arith.cmpi":
        return None
    # A constant on the right is found at once, and nothing is left to be looked for without it.
    right = _constant(owner.operands[1], conditions)
    left = None if right is None else _constant(owner.operands[0], conditions)
    predicate = int(ir.IntegerAttr(owner.attributes["predicate"]).value)
    if left is None or right is None or (predicate >= 6 and min(left, right) < 0):
        return None
    return bool(_COMPARISONS[predicate](left, right))


type _Rule = Callable[[Sequence[ir.Value], Sequence[int]], int]
"""From an operation's operands and their divisors to the divisor of its result."""


def _common(_: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    return math.gcd(*divisors)


def _common_bits(_: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    return min(map(_two, divisors))


def _product(_: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    return ANY if ANY in divisors else math.prod(divisors)


def _mask(_: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    return max(map(_two, divisors))


def _shift_left(operands: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    amount = _constant(operands[1])
    if amount is None or not 0 <= amount < 31:
        return divisors[0]
    return _product((), (divisors[0], 1 << amount))


def _shift_right(operands: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    amount = _constant(operands[1])
    if amount is None or not 0 <= amount < 31:
        return 1
    return _quotient(divisors[0], 1 << amount)


def _divide(operands: Sequence[ir.Value], divisors: Sequence[int]) -> int:
    return _quotient(divisors[0], _constant(operands[1]))


def _quotient(dividend: int, divisor: int | None) -> int:
    return dividend // abs(divisor) if divisor and dividend % divisor == 0 else 1


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        (f"arith.{name}" for name in ("addi", "subi", "maxsi", "minsi", "maxui", "minui")), _common
    ),
    # x - x // y * y
    **dict.fromkeys(("arith.remsi", "arith.remui"), _common),
    **dict.fromkeys(("arith.ori", "arith.xori"), _common_bits),
    **dict.fromkeys(("arith.divsi", "arith.divui", "arith.floordivsi"), _divide),
    **dict.fromkeys(("arith.shrsi", "arith.shrui"), _shift_right),
    **dict.fromkeys(("arith.extsi", "arith.extui", "arith.trunci", "math.absi"), _common),
    **dict.fromkeys(("arith.index_cast", "arith.index_castui"), _common),
    "arith.muli": _product,
    "arith.shli": _shift_left,
    "arith.andi": _mask,
    "arith.select": _common,
}

_STRUCTURES = ("scf.if", "scf.index_switch", "scf.execute_region", "scf.for", "scf.while")
_LOOKED_THROUGH = frozenset((*_RULES, *_STRUCTURES))
"""Operations whose results may be known to be multiples, besides constants."""
