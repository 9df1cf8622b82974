"""TMA descriptors of other devices' arrays.

The launcher encodes a descriptor of this device's array. Each block makes one for each other device
from it, before its body runs: a copy in global memory, in which only the address is another one
(PTX ISA, ``tensormap.replace``), fenced for the engine that reads descriptors.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import (
    ArrayParameter,
    Buffer,
    KernelContext,
    RuleContext,
    StateKey,
    TensorMapParameter,
)
from pallasite_multigpu import protocol
from pallasite_multigpu.protocol.blocks import block_number
from pallasite_multigpu.protocol.kernel import COMMUNICATION, slot_of, slot_pointer

BYTES = 128
"""Of a descriptor."""

_WORDS = 16


@dataclasses.dataclass
class _Maps:
    """The descriptors that each block makes.

    Attributes:
      peers: by parameter, the memory for those of all devices, of each block.
      all: by parameter, the memory for those of the multicast addresses.
    """

    peers: dict[TensorMapParameter, Buffer] = dataclasses.field(default_factory=dict)
    all: dict[TensorMapParameter, Buffer] = dataclasses.field(default_factory=dict)


_MAPS = StateKey("multigpu.tensor-maps", lambda kernel: _Maps())


def descriptor_of_peer(ctx: RuleContext, parameter: TensorMapParameter, rank: ir.Value) -> ir.Value:
    """A pointer to the descriptor of another device's array.

    Args:
      ctx: the rule's context.
      parameter: the descriptor of this device's array.
      rank: the place of the other device in the mesh (i32).

    Raises:
      UnsupportedError: the target cannot change descriptors.
    """
    count = protocol.device_count(ctx.kernel)
    table = _table(ctx, ctx.kernel.state(_MAPS).peers, parameter, count)
    return ops.byte_pointer(table, ops.multiply(_wide(rank), BYTES))


def descriptor_of_all(ctx: RuleContext, parameter: TensorMapParameter) -> ir.Value:
    """A pointer to the descriptor of all devices' arrays at once.

    Raises:
      UnsupportedError: the target cannot change descriptors.
    """
    return _table(ctx, ctx.kernel.state(_MAPS).all, parameter, 1)


def _table(
    ctx: RuleContext,
    tables: dict[TensorMapParameter, Buffer],
    parameter: TensorMapParameter,
    count: int,
) -> ir.Value:
    """Where this block's descriptors for a parameter are."""
    if not ctx.target.name.endswith(("a", "f")):
        raise UnsupportedError(
            f"{ctx.primitive} of a window in several pieces to or from another device, on"
            f" {ctx.target.name}",
            expected="a target that can change TMA descriptors, such as sm_90a; or a window in one"
            " piece, which needs none",
            hint="copy whole rows of a contiguous array, one run of bytes at a time",
        )
    kernel, launch = ctx.kernel, ctx.launch
    if parameter not in tables:
        blocks = kernel.geometry.blocks
        buffer = launch.new_scratch((blocks * count * BYTES,), np.dtype(np.uint8), zeroed=False)
        tables[parameter] = buffer
        for slot in (0, 1):
            launch.parameter(ArrayParameter(buffer, slot=slot))
        launch.parameter(parameter)
    return _own_table(kernel, tables[parameter], count)


def _own_table(kernel: KernelContext, buffer: Buffer, count: int) -> ir.Value:
    launch = kernel.launch
    base = launch.array_pointer(buffer)

    def build() -> ir.Value:
        number = _wide(block_number(kernel))
        return ops.byte_pointer(base, ops.multiply(number, count * BYTES))

    return launch.emit_once(f"multigpu.tensor-maps.{buffer.index}", build)


def _wide(value: ir.Value) -> ir.Value:
    return ops.cast_integer(value, ops.i64(), signed=False)


def make_descriptors(kernel: KernelContext) -> None:
    """Emits what makes the descriptors, behind the exchange of addresses: thread i of the block
    makes those of device i."""

    def emit(slots: ir.Value) -> None:
        maps = kernel.state(_MAPS)
        if not (maps.peers or maps.all):
            return
        launch = kernel.launch
        count = protocol.device_count(kernel)
        thread = launch.thread_id
        for parameter, buffer in maps.peers.items():
            with ops.when(ops.compare("ult", thread, count)):
                number = slot_of(kernel, parameter.buffer)
                base = slot_pointer(kernel, slots, number, thread)
                table = _own_table(kernel, buffer, count)
                place = ops.byte_pointer(table, ops.multiply(_wide(thread), BYTES))
                _make(launch.parameter(parameter), place, base)
        for parameter, buffer in maps.all.items():
            with ops.when(ops.compare("eq", thread, 0)):
                base = protocol.multicast_pointer(kernel, parameter.buffer)
                _make(launch.parameter(parameter), _own_table(kernel, buffer, 1), base)
        launch.block_barrier()
        for buffer, number in [
            *((buffer, count) for buffer in maps.peers.values()),
            *((buffer, 1) for buffer in maps.all.values()),
        ]:
            table = _own_table(kernel, buffer, number)
            for place in range(number):
                _acquire(ops.byte_pointer(table, place * BYTES))

    kernel.emit_later(emit, kernel.state(COMMUNICATION).slots_of_epoch)


def _acquire(pointer: ir.Value) -> None:
    """From here on, the engine reads the descriptor that is there now for this thread."""
    ops.inline_assembly(
        "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
        "l,~{memory}",
        llvm.ptrtoint(ops.i64(), pointer),
    )


def _make(template: ir.Value, place: ir.Value, address: ir.Value) -> None:
    """One thread copies a descriptor, changes its address, and releases it."""
    for word in range(_WORDS):
        offset = 8 * word
        value = ops.load(ops.i64(), ops.byte_pointer(template, offset), alignment=8)
        ops.store(value, ops.byte_pointer(place, offset), alignment=8)
    pointer = llvm.ptrtoint(ops.i64(), place)
    ops.inline_assembly(
        "tensormap.replace.tile.global_address.global.b1024.b64 [$0], $1;\n\t"
        "fence.proxy.tensormap::generic.release.gpu;",
        "l,l,~{memory}",
        pointer,
        llvm.ptrtoint(ops.i64(), address),
    )
