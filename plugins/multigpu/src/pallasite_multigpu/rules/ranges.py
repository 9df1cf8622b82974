"""What is known of an integer that a kernel computes: the least and the largest that it can be."""

from __future__ import annotations

from collections.abc import Callable

from jaxlib.mlir import ir

type Range = tuple[int, int]

LIMIT = 2**31 - 1
"""Beyond it, results of 32 bits are not those of the integers."""
DEPTH = 24
"""Operations that are looked through, at most, one behind another."""


def range_of(
    value: ir.Value, known: Callable[[ir.Value], Range | None], depth: int = DEPTH
) -> Range | None:
    """The least and the largest that a signed integer of 32 bits can be; None if that is not known.

    Args:
      value: of the kernel.
      known: ranges of values that operations do not tell.
      depth: operations that are looked through.
    """
    found = known(value)
    if found is not None or depth == 0:
        return found
    owner = value.owner
    if isinstance(owner, ir.Block):
        return _index(value, owner)
    name = owner.name
    if name == "arith.constant":
        number = ir.IntegerAttr(owner.attributes["value"]).value
        return number, number
    operands = list(owner.operands)
    if name == "arith.select":
        truth = _truth(operands[0], known, depth - 1)
        if truth is not None:
            return range_of(operands[1 if truth else 2], known, depth - 1)
        operands = operands[1:]
    combine = _COMBINE.get(name)
    if combine is None:
        return None
    found = combine(*(range_of(one, known, depth - 1) for one in operands))
    return found if found is not None and -LIMIT <= found[0] <= found[1] <= LIMIT else None


def _index(value: ir.Value, block: ir.Block) -> Range | None:
    """The index of a loop with bounds that are known."""
    loop = block.owner
    if loop.name != "scf.for" or ir.BlockArgument(value).arg_number != 0:
        return None
    bounds = [range_of(one, lambda _: None) for one in list(loop.operands)[:3]]
    low, high, step = bounds
    if low is None or high is None or step is None or step[0] <= 0 or high[1] <= low[0]:
        return None
    return low[0], high[1] - 1


def _truth(value: ir.Value, known: Callable[[ir.Value], Range | None], depth: int) -> bool | None:
    """Whether a condition holds; None if that is not known."""
    owner = value.owner
    if depth <= 0 or isinstance(owner, ir.Block):
        return None
    if owner.name == "arith.constant":
        return bool(ir.IntegerAttr(owner.attributes["value"]).value)
    if owner.name in ("arith.andi", "arith.ori"):
        decides = owner.name == "arith.ori"  # One that is so decides.
        parts = [_truth(one, known, depth - 1) for one in owner.operands]
        return decides if decides in parts else None if None in parts else not decides
    if owner.name != "arith.cmpi":
        return None
    x, y = (range_of(one, known, depth - 1) for one in owner.operands)
    if x is None or y is None:
        return None
    predicate = ir.IntegerAttr(owner.attributes["predicate"]).value
    negated, always, never = {
        0: (False, x == y and x[0] == x[1], x[1] < y[0] or y[1] < x[0]),  # eq
        1: (True, x == y and x[0] == x[1], x[1] < y[0] or y[1] < x[0]),  # ne
        2: (False, x[1] < y[0], x[0] >= y[1]),  # slt
        3: (False, x[1] <= y[0], x[0] > y[1]),  # sle
        4: (True, x[1] <= y[0], x[0] > y[1]),  # sgt
        5: (True, x[1] < y[0], x[0] >= y[1]),  # sge
    }.get(predicate, (False, False, False))
    return (always != negated) if always or never else None


def _corners(x: Range | None, y: Range | None, what: Callable[[int, int], int]) -> Range | None:
    if x is None or y is None:
        return None
    values = [what(one, other) for one in x for other in y]
    return min(values), max(values)


def _remainder(x: Range | None, y: Range | None) -> Range | None:
    """Of signed numbers: it has the sign of the dividend."""
    if y is None or y[0] <= 0:
        return None
    if x is not None and x[0] >= 0 and x[1] < y[0]:
        return x
    most = y[1] - 1
    return (0 if x is not None and x[0] >= 0 else -most), (
        0 if x is not None and x[1] <= 0 else most
    )


def _unsigned_remainder(x: Range | None, y: Range | None) -> Range | None:
    if y is None or y[0] <= 0:
        return None
    return _remainder(x, y) if x is not None and x[0] >= 0 else (0, y[1] - 1)


def _quotient(x: Range | None, y: Range | None) -> Range | None:
    """Of numbers that are not negative, where both kinds of division are the same."""
    if x is None or y is None or x[0] < 0 or y[0] <= 0:
        return None
    return x[0] // y[1], x[1] // y[0]


def _union(x: Range | None, y: Range | None) -> Range | None:
    return None if x is None or y is None else (min(x[0], y[0]), max(x[1], y[1]))


def _least(x: Range | None, y: Range | None) -> Range | None:
    (a, b), (c, d) = (one or (-LIMIT, LIMIT) for one in (x, y))
    return min(a, c), min(b, d)


def _largest(x: Range | None, y: Range | None) -> Range | None:
    (a, b), (c, d) = (one or (-LIMIT, LIMIT) for one in (x, y))
    return max(a, c), max(b, d)


_COMBINE: dict[str, Callable[..., Range | None]] = {
    "arith.addi": lambda x, y: _corners(x, y, lambda a, b: a + b),
    "arith.subi": lambda x, y: _corners(x, y, lambda a, b: a - b),
    "arith.muli": lambda x, y: _corners(x, y, lambda a, b: a * b),
    "arith.remsi": _remainder,
    "arith.remui": _unsigned_remainder,
    "arith.divsi": _quotient,
    "arith.divui": _quotient,
    "arith.minsi": _least,
    "arith.maxsi": _largest,
    "arith.select": _union,
}
