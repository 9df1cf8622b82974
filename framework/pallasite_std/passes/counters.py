"""Remainders of loop counters become counters of their own.

A ring of n slots is indexed by ``i % n``. Where n is no power of two, that is two multiplications
each time, and LLVM spreads them over every address that is computed from the slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin.ir import ops

_REMAINDERS = ("arith.remsi", "arith.remui")


@dataclasses.dataclass(frozen=True)
class _Counter:
    """A value that goes up by one in each iteration, and what it begins with."""

    value: ir.Value
    start: int


def carry_remainders(module: Any, context: Any) -> Any:
    """Replaces remainders of loop counters by constants that are no powers of two.

    The remainder is carried from one iteration to the next: it goes up by one, or back to zero.
    Returns False if there are none, else None.
    """
    del context
    changed = False
    for loop in reversed(list(_loops(module.operation))):
        groups: dict[tuple[int, int], list[ir.Operation]] = {}
        for counter in _counters(loop):
            for start, divisor, operation in _remainders(counter):
                groups.setdefault((start, divisor), []).append(operation)
        if groups:
            _carry(loop, groups)
            changed = True
    return None if changed else False


def _loops(root: ir.Operation) -> Iterator[ir.Operation]:
    """All loops, those around others before them."""
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                # The generated classes of nearly all operations say that these have no region.
                if getattr(view, "_ODS_REGIONS", None) == (0, True):
                    continue
                if isinstance(view, scf.ForOp):
                    yield view.operation
                yield from _loops(view.operation)


def _constant(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    attribute = owner.attributes["value"]
    return attribute.value if isinstance(attribute, ir.IntegerAttr) else None


def _counters(loop: ir.Operation) -> Iterator[_Counter]:
    """The values of a loop that count its iterations, and never overflow."""
    lower, upper, step = (_constant(loop.operands[number]) for number in range(3))
    body = loop.regions[0].blocks[0]
    width = _width(body.arguments[0].type)
    if step == 1 and lower is not None and lower >= 0:
        yield _Counter(body.arguments[0], lower)
    trips = None
    if step is not None and step > 0 and lower is not None and upper is not None:
        trips = max(0, -(-(upper - lower) // step))
    yielded = body.operations[len(body.operations) - 1].operation.operands
    for number, argument in enumerate(list(body.arguments)[1:]):
        start = _constant(loop.operands[3 + number])
        if start is None or start < 0 or yielded[number].owner == body:
            continue
        if trips is None and (start or width is None or _width(argument.type) != width):
            continue  # The counter might go beyond what its type can hold.
        if trips is not None and start + trips >= 1 << ((_width(argument.type) or 1) - 1):
            continue
        owner = yielded[number].owner
        if owner.name != "arith.addi" or owner.operands[0] != argument:
            continue
        if _constant(owner.operands[1]) == 1:
            yield _Counter(argument, start)


def _width(type: ir.Type) -> int | None:
    return type.width if isinstance(type, ir.IntegerType) else None


def _remainders(counter: _Counter) -> Iterator[tuple[int, int, ir.Operation]]:
    """What the remainder of a counter begins with, by which divisor, and the operation."""
    for use in counter.value.uses:
        operation = use.owner.operation
        if operation.name not in _REMAINDERS or operation.operands[0] != counter.value:
            continue
        divisor = _constant(operation.operands[1])
        if divisor is not None and divisor > 2 and divisor & (divisor - 1):
            yield counter.start % divisor, divisor, operation


def _carry(loop: ir.Operation, groups: dict[tuple[int, int], list[ir.Operation]]) -> None:
    """Replaces a loop by one that carries the remainders, too."""
    types = [operations[0].results[0].type for operations in groups.values()]
    with ir.InsertionPoint(loop), loop.location:
        starts = [ops.constant(start, type) for (start, _), type in zip(groups, types, strict=True)]
        operands = list(loop.operands)
        made = scf.ForOp(*operands[:3], [*operands[3:], *starts])
    for name in loop.attributes:
        made.operation.attributes[name.name] = name.attr
    old, new = loop.regions[0].blocks[0], made.body
    for view in list(old.operations):
        new.append(view.operation)
    arguments = list(new.arguments)
    for before, after in zip(old.arguments, arguments, strict=False):
        before.replace_all_uses_with(after)
    last = new.operations[len(new.operations) - 1].operation
    following = []
    for (_, divisor), argument, operations in zip(
        groups, arguments[len(old.arguments) :], groups.values(), strict=True
    ):
        for operation in operations:
            operation.results[0].replace_all_uses_with(argument)
            operation.erase()
        with ir.InsertionPoint(last), loop.location:
            more = ops.add(argument, 1)
            around = ops.compare("eq", more, divisor)
            zero = ops.constant(0, argument.type)
            following.append(ops.arith.select(around, zero, more))
    with ir.InsertionPoint(last), last.location:
        scf.yield_([*last.operands, *following])
    last.erase()
    for before, after in zip(loop.results, made.operation.results, strict=False):
        before.replace_all_uses_with(after)
    loop.erase()
