"""Remainders of loop counters become counters of their own, or unsigned.

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
_UNSIGNED = {"arith.remsi": "remui", "arith.divsi": "divui"}
_DIVISIONS = frozenset((*_REMAINDERS, *_UNSIGNED))


@dataclasses.dataclass(frozen=True)
class _Counter:
    """A value that goes up by one in each iteration, and what it begins with."""

    value: ir.Value
    start: int


def carry_remainders(module: Any, context: Any) -> Any:
    """Replaces remainders and quotients of loop counters by constants.

    A remainder by what is no power of two is carried from one iteration to the next: it goes up by
    one, or back to zero. Other operations become unsigned, since counters are: then powers of two
    take an instruction, where LLVM's shorter pipeline makes four of signed ones.
    Returns False if there are none, else None.
    """
    del context
    changed = False
    for loop in reversed(list(_loops(module.operation))):
        groups: dict[tuple[int, int], list[ir.Operation]] = {}
        for counter in _counters(loop):
            for divisor, operation in _divisions(counter):
                if operation.name in _REMAINDERS and divisor > 2 and divisor & (divisor - 1):
                    groups.setdefault((counter.start % divisor, divisor), []).append(operation)
                elif operation.name in _UNSIGNED:
                    _make_unsigned(operation)
                    changed = True
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
        yield from _ahead(_Counter(body.arguments[0], lower), upper)
    trips = None
    if step is not None and step > 0 and lower is not None and upper is not None:
        trips = max(0, -(-(upper - lower) // step))
    yielded = body.operations[len(body.operations) - 1].operation.operands
    for number, argument in enumerate(list(body.arguments)[1:]):
        start = _constant(loop.operands[3 + number])
        owner = yielded[number].owner
        if start is None or start < 0 or isinstance(owner, ir.Block):
            continue  # What is handed on may also be what a loop around this one carries.
        if trips is None and (start or width is None or _width(argument.type) != width):
            continue  # The counter might go beyond what its type can hold.
        if trips is not None and start + trips >= _end(argument.type):
            continue
        if owner.name != "arith.addi" or owner.operands[0] != argument:
            continue
        if _constant(owner.operands[1]) == 1:
            yield from _ahead(_Counter(argument, start), trips and start + trips)


def _ahead(counter: _Counter, stop: int | None) -> Iterator[_Counter]:
    """A counter that stays below ``stop``, and what is ahead of it by a constant."""
    yield counter
    if stop is None:
        return
    for use in counter.value.uses:
        operation = use.owner.operation
        if operation.name != "arith.addi" or operation.operands[0] != counter.value:
            continue
        distance = _constant(operation.operands[1])
        if distance is not None and 0 < distance < _end(counter.value.type) - stop:
            yield _Counter(operation.results[0], counter.start + distance)


def _end(type: ir.Type) -> int:
    """Of the signed numbers of an integer type."""
    return int(1 << ((_width(type) or 1) - 1))


def _width(type: ir.Type) -> int | None:
    return type.width if isinstance(type, ir.IntegerType) else None


def _divisions(counter: _Counter) -> list[tuple[int, ir.Operation]]:
    """The divisions of a counter by positive constants: the divisor, and the operation."""
    found = []
    for use in counter.value.uses:
        operation = use.owner.operation
        if operation.name not in _DIVISIONS or operation.operands[0] != counter.value:
            continue
        divisor = _constant(operation.operands[1])
        if divisor is not None and divisor > 0:
            found.append((divisor, operation))
    return found


def _make_unsigned(operation: ir.Operation) -> None:
    with ir.InsertionPoint(operation), operation.location:
        made = getattr(ops.arith, _UNSIGNED[operation.name])(*operation.operands)
    operation.results[0].replace_all_uses_with(made)
    operation.erase()


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
