"""Which code all threads of a block run alike, as far as the program that is being built tells."""

from __future__ import annotations

from jaxlib.mlir import ir

_BLOCK_REGISTERS = ("ctaid", "nctaid", "cluster.")
"""Special registers, after their common prefix, that are the same in a whole block."""

_PREFIX = "llvm.nvvm.read.ptx.sreg."

_COPIES = frozenset(
    f"llvm.{name}"
    for name in (
        "mlir.addressof",
        "mlir.constant",
        "getelementptr",
        "ptrtoint",
        "inttoptr",
        "addrspacecast",
        "bitcast",
    )
)


def all_threads_alike(*values: ir.Value) -> bool:
    """Whether the code at the insertion point is run by all threads, with the same ``values``.

    It is if all that is branched upon around it, and all values, are computed from constants,
    parameters of the kernel and numbers of blocks. False also means that this is not known, for
    example of what was loaded.
    """
    block = ir.InsertionPoint.current.block
    pending = list(values)
    while (owner := block.owner) is not None and not isinstance(owner, ir.Module):
        operation = owner.operation
        if operation.name in ("llvm.func", "builtin.module"):
            break
        if operation.name not in ("scf.if", "scf.for", "scf.index_switch"):
            return False
        # Of a loop, how often it runs; not what it carries.
        count = 3 if operation.name == "scf.for" else 1
        pending += list(operation.operands)[:count]
        block = operation.block
    return _same(pending)


def is_same_in_block(*values: ir.Value) -> bool:
    """Whether values are the same in all threads of a block that get to them together.

    False also means that this is not known.
    """
    return _same(list(values))


def _same(pending: list[ir.Value]) -> bool:
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        sources = _sources(value)
        if sources is None:
            return False
        pending += sources
    return True


def _sources(value: ir.Value) -> list[ir.Value] | None:
    """From what a value is computed; None if it may differ between threads."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return _sources_of_argument(value, owner)
    operation = owner.operation
    name = operation.name
    if name == "llvm.call_intrinsic":
        called = ir.StringAttr(operation.attributes["intrin"]).value
        same = called.startswith(_PREFIX) and called[len(_PREFIX) :].startswith(_BLOCK_REGISTERS)
        return [] if same else None
    if name.startswith("arith.") or name in _COPIES:
        return list(operation.operands)
    return None


def _sources_of_argument(value: ir.Value, block: ir.Block) -> list[ir.Value] | None:
    operation = block.owner.operation
    number = ir.BlockArgument(value).arg_number
    if operation.name == "llvm.func":
        return []
    if operation.name != "scf.for":
        return None
    bounds = list(operation.operands)[:3]
    if number == 0:
        return bounds
    # What a loop carries also depends on how often it runs.
    last = block.operations[len(block.operations) - 1].operation if len(block.operations) else None
    if last is None or last.name != "scf.yield":
        return None  # The loop is being built.
    return [*bounds, operation.operands[2 + number], last.operands[number - 1]]
