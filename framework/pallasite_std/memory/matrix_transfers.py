"""Moving arrays between registers and shared memory by ``ldmatrix`` and ``stmatrix``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxlib.mlir import ir

from pallasite.plugin import Target
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import gather
from pallasite_std.memory.access import Access
from pallasite_std.memory.matrix_access import MatrixPlan
from pallasite_std.memory.reference_types import MemoryReference

LOAD = "ldmatrix"
"""The feature of targets that load matrices into the registers of a warp (``ldmatrix``)."""
STORE = "stmatrix"
"""The feature of targets that store them (``stmatrix``)."""


def can_move_matrices(target: Target, reference: MemoryReference, instruction: str) -> bool:
    """Whether a target has the instruction, and the memory is the block's own shared memory."""
    shared = reference.space.is_shared and reference.remote is None
    return shared and target.has(instruction)


def load_matrices(
    plan: MatrixPlan, address_of: Callable[[Access], ir.Value], element: ir.Type
) -> tuple[list[ir.Value], dict[tuple[int, int], tuple[int, int]]]:
    """Emits the loads of an array.

    Args:
      plan: the plan.
      address_of: emits the address (a pointer) of the calling lane's row.
      element: the type of the elements.

    Returns:
      The words, vectors of ``element``, and for each (register, vector element) of the array the
      (word, vector element) that holds it.
    """
    words: list[ir.Value] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    count = plan.matrices
    names = ", ".join(f"${number}" for number in range(count))
    for access in plan.rows.accesses:
        loaded = ops.inline_assembly(
            f"ldmatrix.sync.aligned.m8n8.x{count}{_suffix(plan)}.b16 {{{names}}}, [${count}];",
            ",".join([*["=r"] * count, "r", "~{memory}"]),
            ops.shared_address(address_of(access)),
            results=[ops.i32()] * count,
        )
        for word, parts in zip([loaded] if count == 1 else loaded, plan.words(access), strict=True):
            for position, part in enumerate(parts):
                places[part] = (len(words), position)
            words.append(ops.bitcast(word, ops.vector_type(element, len(parts))))
    return words, places


def store_matrices(
    plan: MatrixPlan, address_of: Callable[[Access], ir.Value], registers: Sequence[ir.Value]
) -> None:
    """Emits the stores of an array, whose registers are given as memory holds elements."""
    count = plan.matrices
    names = ", ".join(f"${number + 1}" for number in range(count))
    constraints = ",".join(["r"] * (count + 1) + ["~{memory}"])
    for access in plan.rows.accesses:
        words = gather(registers, plan.words(access))
        ops.inline_assembly(
            f"stmatrix.sync.aligned.m8n8.x{count}{_suffix(plan)}.b16 [$0], {{{names}}};",
            constraints,
            ops.shared_address(address_of(access)),
            *(ops.bitcast(word, ops.i32()) for word in words),
        )


def _suffix(plan: MatrixPlan) -> str:
    return ".trans.shared" if plan.transposed else ".shared"
