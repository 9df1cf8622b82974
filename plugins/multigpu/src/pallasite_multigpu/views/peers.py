"""Views of other devices' memory: one device's, or that of all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InvalidValueError, UnsupportedError, ViewRule, nothing_changes
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import Buffer, RuleContext, TensorMapParameter
from pallasite_multigpu import protocol
from pallasite_multigpu.language.references import MulticastRef, PeerMemRef
from pallasite_multigpu.network import calls
from pallasite_multigpu.protocol.kernel import COMMUNICATION, slot_of, table_of
from pallasite_multigpu.rules.devices import check_all_axes, device_rank, rank_value
from pallasite_multigpu.views import tensor_maps
from pallasite_std.api import Elsewhere, MemoryReference, arrays, copies

_ALIGNMENT = 128
_ONE_PIECE = (
    "copy to it from shared memory, whole rows of a contiguous array at a time:"
    " plgpu.copy_smem_to_gmem"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Peer(Elsewhere):
    """The memory of one other device.

    Attributes:
      rank: which (i32).
    """

    rank: ir.Value

    def descriptor(self, ctx: RuleContext, parameter: TensorMapParameter) -> ir.Value:
        """A pointer to a TMA descriptor of that device's array."""
        if ctx.kernel.state(COMMUNICATION).network:
            raise calls.refuse(f"{ctx.primitive} of a window in several pieces", _ONE_PIECE)
        return tensor_maps.descriptor_of_peer(ctx, parameter, self.rank)

    def send(
        self, ctx: RuleContext, target: ir.Value, source: ir.Value, size: ir.Value, most: int
    ) -> None:
        """One lane starts the copy of a piece of shared memory to there."""
        if not ctx.kernel.state(COMMUNICATION).network:
            super().send(ctx, target, source, size, most)
            return
        blocks, warps = ctx.kernel.geometry.blocks, -(-ctx.kernel.geometry.threads // 32)
        room = -(-most // _ALIGNMENT) * _ALIGNMENT
        shape = (blocks * warps * room,)
        staging = ctx.launch.new_scratch(shape, np.dtype(np.uint8), zeroed=False)
        slot_of(ctx.kernel, staging)  # So it lies where the network can read it.
        calls.send(ctx, table_of(ctx.kernel), self.rank, staging, room, target, source, size)


@dataclasses.dataclass(frozen=True, eq=False)
class Everywhere(Elsewhere):
    """The memory of all devices at once."""

    copied_to = True

    def descriptor(self, ctx: RuleContext, parameter: TensorMapParameter) -> ir.Value:
        """A pointer to a TMA descriptor of all devices' arrays."""
        return tensor_maps.descriptor_of_all(ctx, parameter)


def at_peer(ctx: RuleContext, reference: MemoryReference, rank: ir.Value) -> MemoryReference:
    """The memory of another device that a reference is on this one.

    Args:
      ctx: the rule's context.
      reference: memory of one of the kernel's buffers.
      rank: the place of that device in the mesh (i32).

    Raises:
      InvalidValueError: memory that other devices do not have.
    """
    buffer = _buffer(reference, "remote_ref")
    base = protocol.peer_pointer(ctx.kernel, buffer, rank)
    return _moved(ctx, reference, buffer, base, Peer(rank))


def everywhere(ctx: RuleContext, reference: MemoryReference, what: str) -> MemoryReference:
    """The memory of all devices that a reference is on this one.

    Raises:
      InvalidValueError: memory that other devices do not have.
      UnsupportedError: the target has no multicast.
    """
    buffer = _buffer(reference, what)
    require_multicast(ctx, what)
    base = protocol.multicast_pointer(ctx.kernel, buffer)
    return _moved(ctx, reference, buffer, base, Everywhere())


def require_multicast(ctx: RuleContext, what: str) -> None:
    """Multicast between devices needs Hopper's instructions.

    Raises:
      UnsupportedError: the target does not have them.
    """
    if ctx.target.compute_capability < (9, 0):
        raise UnsupportedError(
            f"{what} on {ctx.target.name}, which has no multicast between devices",
            expected="sm_90 or later",
        )


def _moved(
    ctx: RuleContext,
    reference: MemoryReference,
    buffer: Buffer,
    base: ir.Value,
    where: Elsewhere,
) -> MemoryReference:
    """The reference with the same distance from another base."""
    pointer = reference.pointer
    if pointer is not None and reference.peer is None:
        own = ctx.launch.array_pointer(buffer)
        if pointer != own:
            distance = ops.arith.subi(
                llvm.ptrtoint(ops.i64(), pointer), llvm.ptrtoint(ops.i64(), own)
            )
            base = ops.byte_pointer(base, distance)
    elif reference.peer is not None:
        raise UnsupportedError(
            "a view of another device's array, seen from yet another device",
            hint="begin with the reference to this device's array: remote_ref(ref, device)",
        )
    return dataclasses.replace(
        reference, pointer=base, peer=where, constant=False, may_be_read=True
    )


def _buffer(reference: MemoryReference, what: str) -> Buffer:
    if not reference.space.is_global:
        raise InvalidValueError(
            f"{what} of memory that is not global", got=str(reference.space), expected="gmem"
        )
    if reference.buffer is None:
        raise InvalidValueError(
            f"{what} of memory that is not a buffer of the kernel",
            expected="an argument, an output, or semaphores of the kernel",
            hint="pass a constant that the kernel captures as an argument",
        )
    return reference.buffer


def _lower_peer(ctx: RuleContext, reference: MemoryReference, view: PeerMemRef) -> MemoryReference:
    if ctx.kernel.state(COMMUNICATION).network and ctx.primitive != copies.copy_smem_to_gmem_p:
        raise calls.refuse(ctx.primitive, _ONE_PIECE)
    rank = device_rank(ctx, view.device_id, "remote_ref")
    moved = at_peer(ctx, reference, rank_value(rank))
    protocol.communicates(ctx.kernel, reads=ctx.primitive not in _WRITES or any(ctx.used))
    return moved


def _lower_all(ctx: RuleContext, reference: MemoryReference, view: MulticastRef) -> MemoryReference:
    if ctx.kernel.state(COMMUNICATION).network:
        raise calls.refuse(f"{ctx.primitive} by multicast", "copy to one device after another")
    check_all_axes(ctx.kernel, view.collective_axes, "multicast_ref")
    moved = everywhere(ctx, reference, "multicast_ref")
    protocol.communicates(ctx.kernel)
    return moved


_WRITES = (
    _jax.swap_p,
    _jax.masked_swap_p,
    _jax.addupdate_p,
    copies.copy_smem_to_gmem_p,
    arrays.atomic_p,
)
"""Primitives that read nothing of what a view of another device shows, if no result is used."""


def _elsewhere(builder: Any, transform: Any) -> None:
    del transform
    builder.elsewhere = True


VIEW_RULES = (
    ViewRule(transform=PeerMemRef, lower=_lower_peer, infer=nothing_changes, region=_elsewhere),
    ViewRule(transform=MulticastRef, lower=_lower_all, infer=nothing_changes, region=_elsewhere),
)
"""What these views mean."""
