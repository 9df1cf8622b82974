"""Addresses of parameters are taken outside of loops.

A tensor map is a parameter by value. Where its address is taken under a condition within a loop,
MLIR leaves it there, as what is not always run, and ptxas computes it each time in registers of
lanes, from which copies cannot take it.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

_LOOPS = ("scf.for", "scf.while")

_OPTIMIZED = "wgmma"
"""Where matrix instructions have their results in registers, LLVM's longer pipeline runs, which
does this where it pays: a register more for a whole loop can be one too many."""


def hoist_parameter_addresses(module: Any, context: Any) -> Any:
    """Takes addresses of parameters once, before the outermost loop around where they are used.

    Returns False if there are none in loops, else None.
    """
    if _OPTIMIZED in context.target.features:
        return False
    changed = False
    for function in module.body.operations:
        if function.operation.name == "llvm.func" and function.operation.regions[0].blocks:
            for argument in function.operation.regions[0].blocks[0].arguments:
                changed |= _hoist(argument)
    return None if changed else False


def _hoist(argument: ir.Value) -> bool:
    found: dict[ir.Operation, ir.Operation] = {}
    changed = False
    for operation in [use.owner.operation for use in argument.uses]:
        loop = _outermost_loop(operation) if operation.name == "llvm.ptrtoint" else None
        if loop is None:
            continue
        changed = True
        if loop not in found:
            operation.move_before(loop)
            found[loop] = operation
        else:
            operation.results[0].replace_all_uses_with(found[loop].results[0])
            operation.erase()
    return changed


def _outermost_loop(operation: ir.Operation) -> ir.Operation | None:
    found = None
    while (parent := operation.parent) is not None:
        operation = parent.operation
        if operation.name in _LOOPS:
            found = operation
    return found
