"""Loops that only start copies and products are run by the lane that starts them.

Where a warpgroup does everything, all its lanes go around such a loop: each waits for the barriers,
they synchronize, one lane branches to start something. Nothing of that is of use to the others.
They synchronize before the loop and behind it, as all lanes did in it; what the one lane has waited
for is certain for them then, since order is transitive (PTX ISA, memory consistency model,
causality order). What is left of the loop is unrolled, so that slots of rings are constants.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin.ir import ops
from pallasite_blackwell.uniformity import is_same_in_block

_WARPGROUP = 128
_MOST_COPIES = 8
"""How often a body is repeated at most."""

_OVERFLOW = 1 << 31

_PURE = frozenset(
    f"llvm.{name}"
    for name in (
        "getelementptr",
        "ptrtoint",
        "inttoptr",
        "addrspacecast",
        "bitcast",
        "extractvalue",
        "insertvalue",
        "mlir.addressof",
        "mlir.constant",
        "mlir.poison",
        "mlir.undef",
    )
)
_REMAINDERS = ("arith.remsi", "arith.remui")

_COMPARISONS: dict[int, Callable[[int, int], bool]] = {
    0: operator.eq,
    1: operator.ne,
    2: operator.lt,
    3: operator.le,
    4: operator.gt,
    5: operator.ge,
    6: operator.lt,
    7: operator.le,
    8: operator.gt,
    9: operator.ge,
}
"""By MLIR's number of the predicate: equality, signed and unsigned order."""


def run_in_one_lane(module: Any, context: Any) -> Any:
    """Runs loops of warpgroups in one lane, where that lane alone has something to do in them.

    Such a loop has, besides arithmetic and memory of single threads: waits for mbarriers, barriers
    of the warpgroup, and what the leader of the warpgroup does. Returns False if there is none,
    else None.
    """
    del context
    changed = False
    for function in module.body.operations:
        operation = function.operation
        if "nvvm.reqntid" not in operation.attributes:
            continue
        whole = list(operation.attributes["nvvm.reqntid"]) == [_WARPGROUP]
        changed |= _change_loops(operation, whole)
    return None if changed else False


def _change_loops(root: ir.Operation, whole: bool) -> bool:
    """Changes the outermost loops that can be changed; returns whether there are any."""
    changed = False
    for view in list(_nested(root)):
        # The generated classes of nearly all operations say that these have no region.
        if getattr(view, "_ODS_REGIONS", None) == (0, True):
            continue
        operation = view.operation
        if isinstance(view, scf.ForOp):
            body = _Body(whole)
            if body.accepts(operation) and body.leader is not None and body.barrier is not None:
                _split(operation, body)
                changed = True
                continue
        changed |= _change_loops(operation, whole)
    return changed


def _nested(root: ir.Operation) -> Iterator[Any]:
    for region in root.regions:
        for block in region.blocks:
            yield from block.operations


def _text(operation: ir.Operation) -> str:
    return str(ir.StringAttr(operation.attributes["asm_string"]).value)


def _constant(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    attribute = owner.attributes["value"]
    return int(attribute.value) if isinstance(attribute, ir.IntegerAttr) else None


class _Body:
    """What is in a loop, if all of it is known.

    Attributes:
      leader: the predicate of the lane that starts something; None if there is none.
      barrier: the operation that synchronizes the warpgroup; None if there is none.
    """

    def __init__(self, whole: bool):
        """``whole``: the block is one warpgroup."""
        self._whole = whole
        self.leader: ir.Value | None = None
        self.barrier: ir.Operation | None = None

    def accepts(self, loop: ir.Operation) -> bool:
        """Whether nothing else is in a loop."""
        return is_same_in_block(*list(loop.operands)[:3]) and self._all(loop)

    def _all(self, root: ir.Operation) -> bool:
        return all(self._one(view.operation) for view in _nested(root))

    def _one(self, operation: ir.Operation) -> bool:
        name = operation.name
        if name.startswith("arith.") or name in _PURE or name == "scf.yield":
            return True
        if name in ("llvm.load", "llvm.store"):
            pointer = operation.operands[1 if name == "llvm.store" else 0]
            return str(pointer.type) == "!llvm.ptr<5>"
        if name == "llvm.inline_asm":
            return self._assembly(operation)
        if name == "scf.for":
            return self.accepts(operation)
        if name != "scf.if":
            return False
        if self._is_leader(operation.operands[0]):
            return self._leads(operation)
        return is_same_in_block(operation.operands[0]) and self._all(operation)

    def _leads(self, operation: ir.Operation) -> bool:
        if list(operation.results) or list(operation.regions[1].blocks):
            return False
        self.leader = self.leader or operation.operands[0]
        return bool(self.leader == operation.operands[0])

    def _assembly(self, operation: ir.Operation) -> bool:
        if _waits(operation) or _is_fence(operation):
            return True
        text = "bar.sync 0;" if self._whole else f"bar.sync $0, {_WARPGROUP};"
        if _text(operation) != text:
            return False
        first, self.barrier = self.barrier, operation
        # One that is defined in the loop, or differs from another one, cannot be moved out of it.
        return first is None or list(first.operands) == list(operation.operands)

    def _is_leader(self, value: ir.Value) -> bool:
        """Whether this is true in one lane of a warpgroup: the elected one of its first warp."""
        owner = value.owner
        if isinstance(owner, ir.Block) or owner.name != "arith.andi":
            return False
        first, elected = (one.owner for one in owner.operands)
        if any(isinstance(one, ir.Block) or one.name != "arith.cmpi" for one in (first, elected)):
            return False
        warp, chosen = first.operands[0].owner, elected.operands[0].owner
        if any(isinstance(one, ir.Block) for one in (warp, chosen)):
            return False
        if chosen.name != "llvm.inline_asm" or "elect.sync" not in _text(chosen):
            return False
        # Of several warpgroups, each has a leader: the number of the warp is that in its warpgroup.
        number = "llvm.call_intrinsic" if self._whole else "arith.andi"
        return bool(warp.name == number) and _constant(first.operands[1]) == 0


def _waits(operation: ir.Operation) -> bool:
    return "mbarrier.try_wait" in _text(operation) and not list(operation.results)


def _is_fence(operation: ir.Operation) -> bool:
    return _text(operation).startswith("tcgen05.fence::")


def _split(loop: ir.Operation, body: _Body) -> None:
    """Has one lane run the loop, and the others only what they compute for themselves in it."""
    assert body.leader is not None and body.barrier is not None
    leader = body.leader
    with ir.InsertionPoint(loop), loop.location:
        ops.inline_assembly("tcgen05.fence::before_thread_sync;", "~{memory}")
        body.barrier.clone()
        types = [result.type for result in loop.results]
        branch = scf.IfOp(leader, types, has_else=True)
        body.barrier.clone()
        ops.inline_assembly("tcgen05.fence::after_thread_sync;", "~{memory}")
    for before, after in zip(loop.results, branch.operation.results, strict=True):
        before.replace_all_uses_with(after)
    with ir.InsertionPoint(branch.else_block):
        other = loop.clone()
        with loop.location:
            scf.yield_(list(other.operation.results))
    with ir.InsertionPoint(branch.then_block), loop.location:
        ops.inline_assembly("tcgen05.fence::after_thread_sync;", "~{memory}")
        ops.inline_assembly("tcgen05.fence::before_thread_sync;", "~{memory}")
        end = scf.yield_(list(loop.results))
    loop.move_before(end.operation.owner if isinstance(end, ir.Value) else end.operation)
    _strip(loop, leader, _is_barrier, inline=True)
    _strip(other.operation, leader, lambda one: True, inline=False)
    _drop_unused(other.operation)
    if (copies := _ring(loop)) > 1:
        _unroll(loop, copies)


def _is_barrier(operation: ir.Operation) -> bool:
    return _text(operation).startswith("bar.sync")


def _strip(
    root: ir.Operation,
    leader: ir.Value,
    unused: Callable[[ir.Operation], bool],
    *,
    inline: bool,
) -> None:
    """Removes instructions from a loop, and branches on the leader, with what is in them or not."""
    for view in list(_nested(root)):
        operation = view.operation
        if operation.name == "llvm.inline_asm":
            if unused(operation):
                operation.erase()
        elif operation.name == "scf.if" and operation.operands[0] == leader:
            if inline:
                inner = [one.operation for one in operation.regions[0].blocks[0].operations]
                for one in inner[:-1]:
                    one.move_before(operation)
            operation.erase()
        elif operation.name in ("scf.if", "scf.for"):
            _strip(operation, leader, unused, inline=inline)


def _drop_unused(root: ir.Operation) -> None:
    """Removes operations without effects from a loop, if nothing uses their results."""
    for region in root.regions:
        for block in region.blocks:
            for view in reversed(list(block.operations)):
                operation = view.operation
                if operation.name in ("scf.if", "scf.for"):
                    _drop_unused(operation)
                elif operation.name in ("scf.yield", "llvm.store"):
                    continue
                elif not any(list(result.uses) for result in operation.results):
                    operation.erase()


@dataclasses.dataclass(frozen=True)
class _Counter:
    """A value of an iteration: its number, plus a constant."""

    offset: int


def _counters(loop: ir.Operation) -> dict[ir.Value, _Counter]:
    """What counts the iterations of a loop: it and what it carries begin with constants."""
    lower, step = (_constant(loop.operands[number]) for number in (0, 2))
    block = loop.regions[0].blocks[0]
    found: dict[ir.Value, _Counter] = {}
    if step != 1:
        return found
    if lower is not None and lower >= 0:
        found[block.arguments[0]] = _Counter(lower)
    yielded = block.operations[len(block.operations) - 1].operation.operands
    for number, argument in enumerate(list(block.arguments)[1:]):
        start, owner = _constant(loop.operands[3 + number]), yielded[number].owner
        if start is None or start < 0 or isinstance(owner, ir.Block):
            continue
        added = owner.operands if owner.name == "arith.addi" else ()
        if added and added[0] == argument and _constant(added[1]) == 1:
            found[argument] = _Counter(start)
    return found


def _ahead(operation: ir.Operation, counters: dict[ir.Value, _Counter]) -> _Counter | None:
    """The result of an addition, if it counts, too."""
    if operation.name != "arith.addi" or operation.operands[0] not in counters:
        return None
    distance = _constant(operation.operands[1])
    if distance is None or distance < 0:
        return None
    return _Counter(counters[operation.operands[0]].offset + distance)


def _ring(loop: ir.Operation) -> int:
    """How many iterations a loop goes through all slots of its rings in; 1 if there are none, or
    too many."""
    sizes: set[int] = set()
    _add_rings(loop, _counters(loop), sizes)
    copies = 1
    for size in sorted(sizes, reverse=True):
        if size > 1 and math.lcm(copies, size) <= _MOST_COPIES:
            copies = math.lcm(copies, size)
    return copies


def _add_rings(root: ir.Operation, counters: dict[ir.Value, _Counter], sizes: set[int]) -> None:
    for view in _nested(root):
        operation = view.operation
        if (counter := _ahead(operation, counters)) is not None:
            counters[operation.results[0]] = counter
        elif operation.name in _REMAINDERS and operation.operands[0] in counters:
            sizes.add(_constant(operation.operands[1]) or 0)
        elif operation.name in ("scf.if", "scf.for"):
            _add_rings(operation, counters, sizes)


def _unroll(loop: ir.Operation, copies: int) -> None:
    """Repeats the body of a loop; what remains of the iterations is done by a second loop."""
    counters = _counters(loop)
    lower, upper, step, *starts = loop.operands
    first, last = _constant(lower), _constant(upper)
    trips = 0 if first is None or last is None else max(0, last - first)
    if first is not None and last is not None and trips < copies:
        return
    exact = first is not None and last is not None and trips % copies == 0
    with ir.InsertionPoint(loop), loop.location:
        if first is not None and last is not None:
            main = ops.constant(first + trips // copies * copies, lower.type)
        else:
            count = ops.arith.maxsi(ops.arith.subi(upper, lower), ops.constant(0, lower.type))
            rest = ops.arith.remui(count, ops.constant(copies, lower.type))
            main = ops.arith.addi(lower, ops.arith.subi(count, rest))
        many = ops.constant(copies, lower.type)
        made = scf.ForOp(lower, main, many, starts)
    carried = list(made.inner_iter_args)
    with ir.InsertionPoint(made.body), loop.location:
        for number in range(copies):
            index = made.induction_variable
            index = ops.add(index, number) if number else index
            copier = _Copier(counters, range(number, trips // copies * copies, copies))
            carried = copier.copy(loop, [index, *carried])
        scf.yield_(carried)
    if exact:
        results = list(made.operation.results)
        for before, after in zip(loop.results, results, strict=True):
            before.replace_all_uses_with(after)
        loop.erase()
        return
    loop.operands[0] = main
    for number, result in enumerate(made.operation.results):
        loop.operands[3 + number] = result


class _Copier:
    """Copies the body of a loop for one of the iterations that become one."""

    def __init__(self, counters: dict[ir.Value, _Counter], numbers: range):
        """``numbers``: of the iterations that this copy does; it is empty where the program tells
        only from which one on, and which of them."""
        self._counters = dict(counters)
        self._numbers = numbers

    def copy(self, loop: ir.Operation, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies the body to the insertion point, with values for its arguments; returns what it
        yields."""
        whole = loop.clone().operation
        (block,) = whole.regions[0].blocks
        for argument, value in zip(block.arguments, values, strict=True):
            argument.replace_all_uses_with(value)
        self._simplify(block, loop.regions[0].blocks[0])
        *body, end = (view.operation for view in block.operations)
        for one in body:
            one.move_before(whole)
        yielded = list(end.operands)
        whole.erase()
        return yielded

    def _simplify(self, copy: ir.Block, original: ir.Block) -> None:
        """Puts constants in the place of operations that have one result in this copy."""
        for made, view in zip(list(copy.operations), original.operations, strict=True):
            one, other = made.operation, view.operation
            known = self._known(other)
            if known is not None:
                with ir.InsertionPoint(one), other.location:
                    constant = ops.constant(known, other.results[0].type)
                one.results[0].replace_all_uses_with(constant)
                one.erase()
            elif getattr(view, "_ODS_REGIONS", None) != (0, True):
                for ours, theirs in zip(one.regions, other.regions, strict=True):
                    for inner, outer in zip(ours.blocks, theirs.blocks, strict=True):
                        self._simplify(inner, outer)

    def _known(self, operation: ir.Operation) -> int | None:
        """The remainder of a counter by the size of a ring, or what it is when it is compared."""
        if (counter := _ahead(operation, self._counters)) is not None:
            self._counters[operation.results[0]] = counter
        compared = operation.name == "arith.cmpi"
        if not compared and operation.name not in _REMAINDERS:
            return None
        counter, other = self._counters.get(operation.operands[0]), _constant(operation.operands[1])
        if counter is None or other is None:
            return None
        start = self._numbers.start + counter.offset
        if not compared:
            ring = other > 0 and self._numbers.step % other == 0
            return start % other if ring else None
        # Where it is not known how often the loop runs, additions might overflow.
        last = start + self._numbers[-1] - self._numbers[0] if self._numbers else _OVERFLOW
        predicate = ir.IntegerAttr(operation.attributes["predicate"]).value
        if other < 0 or last >= _OVERFLOW or (predicate < 2 and start != last):
            return None
        found = {_COMPARISONS[predicate](one, other) for one in (start, last)}
        return found.pop() if len(found) == 1 else None
