"""Pairs of blocks: which of the two starts what both do, and which barriers it signals."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext


def check_pairs(ctx: RuleContext, axis: Hashable) -> None:
    """Raises unless blocks that differ along an axis of the cluster are pairs: two along the
    minormost axis.

    The blocks of a pair differ in the last bit of their rank (PTX ISA, "CTA pair").
    """
    geometry = ctx.kernel.geometry
    if axis not in geometry.cluster_names:
        raise InvalidValueError(
            f"{axis!r} is not an axis of the cluster",
            expected=f"one of {list(geometry.cluster_names)}",
        )
    dimension = geometry.cluster_dimension(axis)
    if dimension != 0:
        raise InvalidValueError(
            "pairs of blocks are along another axis than the minormost of the cluster",
            got=f"collective_axis={axis!r}",
            expected=repr(geometry.cluster_names[-1]),
        )
    if geometry.cluster[0] != 2:
        raise InvalidValueError(
            "blocks along an axis of the cluster are no pair",
            got=f"{geometry.cluster[0]} blocks along {axis!r}",
            expected="two",
            hint="give larger clusters further axes, before this one",
        )


def issuer(ctx: RuleContext, axis: Hashable | None) -> ir.Value:
    """True in the lane that starts what the thread does, of the first block of a pair if ``axis``
    is given."""
    leader = ctx.leader
    if axis is None:
        return leader
    check_pairs(ctx, axis)
    ctx.launch.uses_cluster_memory = True
    return ops.arith.andi(leader, ops.compare("eq", ctx.launch.cluster_block_id(0), 0))


def commit(ctx: RuleContext, barrier: Any, axis: Hashable | None) -> None:
    """All that this lane has started arrives on a barrier when it is complete; of the two blocks of
    a pair if ``axis`` is given.

    By intrinsics: ptxas is reported to miscompile assembly with the address in a register.
    """
    if axis is None:
        ops.intrinsic(None, "llvm.nvvm.tcgen05.commit.shared.cg1", barrier.pointer())
        return
    mask = ops.i32_constant(3)
    launch = ctx.launch
    if launch.geometry.cluster != (2, 1, 1):
        rank = launch.cluster_rank({})
        mask = ops.arith.shli(mask, ops.bitwise_and(rank, ~1))
    ops.intrinsic(
        None,
        "llvm.nvvm.tcgen05.commit.mc.shared.cg2",
        barrier.pointer(),
        ops.cast_integer(mask, ir.IntegerType.get_signless(16)),
    )
