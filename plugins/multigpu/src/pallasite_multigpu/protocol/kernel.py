"""The kernel's side of the protocol: what rules ask for, and the record of it."""

from __future__ import annotations

import dataclasses
import math

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InternalError, Semantics, UnsupportedError
from pallasite.plugin.ir import ops, pointer_type
from pallasite.plugin.lowering import (
    Buffer,
    DeviceMesh,
    KernelContext,
    RuleContext,
    StateKey,
)
from pallasite_multigpu.network import calls, library
from pallasite_multigpu.options import peer_network
from pallasite_multigpu.protocol import code, layout

TABLE = "multigpu.table"
"""Name of the hidden operand."""
PROVIDER = "pallasite_multigpu.runtime.provider:TABLES"
"""What provides it when a program runs."""


@dataclasses.dataclass
class Communication:
    """What one kernel needs of the protocol.

    Attributes:
      table: the address of its table, or what stands for it until the kernel is finished; None
        until it is needed.
      slots_of_epoch: what stands for the address of the slots of this epoch, in the prologue.
      slots: the number of each buffer that peers reach.
      shared_slots: the byte of shared memory from which on each block keeps the addresses of all
        devices' buffers; None where there is no room, or before the kernel is finished.
      cleared: scratch that the kernel fills with zeros itself, when it begins.
      begins: whether the kernel begins with the exchange and a barrier.
      multicasts: whether it uses addresses that mean all devices.
      reads: whether it reads the memory of peers, so that these may not go on before it has ended.
      network: whether devices may be of several hosts, which no NVLink connects.
      fingerprint: what tells it from other kernels; set when it is finished.
    """

    table: ir.Value | None = None
    slots_of_epoch: ir.Value | None = None
    slots: dict[Buffer, int] = dataclasses.field(default_factory=dict)
    shared_slots: int | None = None
    cleared: tuple[Buffer, ...] = ()
    begins: bool = False
    multicasts: bool = False
    reads: bool = False
    network: bool = False
    fingerprint: int = 0


COMMUNICATION = StateKey(
    "multigpu.communication", lambda kernel: Communication(network=peer_network() != "off")
)


def placeholder(type: ir.Type) -> ir.Value:
    """A value that stands for one that is not known yet, to be replaced."""
    made = ir.Operation.create("builtin.unrealized_conversion_cast", results=[type], operands=[])
    return made.result


def replace(value: ir.Value, by: ir.Value | None) -> None:
    """Lets a value take the place of a placeholder; without one, nothing may use it."""
    if by is not None:
        value.replace_all_uses_with(by)
    value.owner.erase()


def _table(kernel: KernelContext) -> ir.Value:
    state = kernel.state(COMMUNICATION)
    if state.table is None:
        with kernel.launch.at_entry():
            state.table = placeholder(pointer_type(1))
    return state.table


def mesh(kernel: KernelContext) -> DeviceMesh:
    """The device mesh around the kernel's call.

    Raises:
      UnsupportedError: there is none, or the call is not manually sharded over all of its axes.
    """
    found = kernel.device_mesh
    if not found.manual:
        raise UnsupportedError(
            "a kernel that reaches other devices is called outside of jax.shard_map",
            hint="call it inside jax.shard_map, over all axes of the mesh",
        )
    return found


def is_manual(kernel: KernelContext) -> bool:
    """Whether the call is manually sharded over all axes of a device mesh."""
    found = kernel.device_mesh
    return bool(found.manual) and len(found.manual_sizes) == len(found.axes)


def device_count(kernel: KernelContext) -> int:
    """Devices of the mesh around the kernel's call.

    Raises:
      UnsupportedError: there is no mesh, or the call is not manually sharded over all of its axes,
        or it has more devices than a mailbox.
    """
    found = mesh(kernel)
    others = [name for name, _ in found.axes if name not in found.manual]
    if others:
        raise UnsupportedError(
            "a kernel that reaches other devices is called where the mesh is not fully manual",
            got=f"axes {list(found.manual)}",
            expected=f"axes {others} as well",
            hint="let jax.shard_map be over all axes of the mesh (axis_names)",
        )
    count = math.prod(size for _, size in found.axes)
    if count > layout.MAX_DEVICES:
        raise UnsupportedError(
            "a kernel reaches other devices of a mesh that has too many",
            got=f"{count} devices",
            expected=f"at most {layout.MAX_DEVICES}",
        )
    return count


def rank(kernel: KernelContext) -> ir.Value:
    """This device's number in the mesh, its index in ``mesh.devices.flat`` (i32)."""
    device_count(kernel)
    table = _table(kernel)
    return kernel.launch.emit_once(
        "multigpu.rank",
        lambda: ops.inline_assembly(
            f"ld.global.nc.b32 $0, [$1+{layout.RANK * layout.WORD}];",
            "=r,l",
            table,
            results=[ops.i32()],
            side_effects=False,
        ),
    )


def communicates(kernel: KernelContext, *, reads: bool = False) -> None:
    """The kernel begins with a barrier of all devices, at which they exchange addresses.

    Args:
      kernel: the kernel.
      reads: whether it reads the memory of peers, and so ends with a barrier, too, unless it has
        ``CompilerParams(exit_barrier=False)``.
    """
    device_count(kernel)
    _table(kernel)
    state = kernel.state(COMMUNICATION)
    if state.network and not state.begins:
        library.required()
    state.begins = True
    state.reads |= reads


def peer_pointer(kernel: KernelContext, buffer: Buffer, rank: ir.Value) -> ir.Value:
    """The address of a buffer on another device, a global pointer.

    Args:
      kernel: the kernel.
      buffer: an input, an output or scratch of the kernel; all devices have one of the same type.
      rank: the number of the device in the mesh (i32), in range.

    Raises:
      UnsupportedError: more buffers of the kernel than a mailbox has slots for.
    """
    number = slot_of(kernel, buffer)
    slots = kernel.state(COMMUNICATION).slots_of_epoch
    if slots is None:
        raise InternalError("memory of a peer is used before the kernel's body")
    return slot_pointer(kernel, slots, number, rank)


def slot_of(kernel: KernelContext, buffer: Buffer) -> int:
    """The number of the slots that have the addresses of a buffer on all devices.

    Raises:
      UnsupportedError: more buffers of the kernel than a mailbox has slots for.
    """
    communicates(kernel)
    slots = kernel.state(COMMUNICATION).slots
    number = slots.setdefault(buffer, len(slots))
    if number >= layout.MAX_BUFFERS:
        raise UnsupportedError(
            "a kernel gives too many of its buffers to other devices",
            expected=f"at most {layout.MAX_BUFFERS} arrays that peers reach",
        )
    return number


def slot_pointer(kernel: KernelContext, slots: ir.Value, number: int, rank: ir.Value) -> ir.Value:
    """What a slot holds: a global pointer, from shared memory if the block has kept it there.

    Args:
      kernel: the kernel.
      slots: the address of the slots of the epoch (i64).
      number: of the slot.
      rank: the number of the device whose address it is (i32), in range.
    """
    state = kernel.state(COMMUNICATION)
    made = placeholder(ops.i64())

    def load(slots: ir.Value, rank: ir.Value) -> None:
        if state.shared_slots is None:
            replace(made, _slot_of_mailbox(slots, number, rank))
            return
        row = ops.multiply(rank, len(state.slots) * layout.WORD)
        base = kernel.launch.shared_pointer(state.shared_slots + number * layout.WORD)
        replace(made, ops.load(ops.i64(), ops.byte_pointer(base, row), alignment=layout.WORD))

    kernel.emit_later(load, slots, rank)
    return llvm.inttoptr(pointer_type(1), made)


def _slot_of_mailbox(slots: ir.Value, number: int, rank: ir.Value) -> ir.Value:
    """The load is a strong one, since no fence is between the slot's store on the other device and
    the flag; each block has waited until it was there."""
    return ops.inline_assembly(
        "{ .reg .b64 place, front, back;\n\t.reg .b32 epoch, low, high;\n\t"
        f"mad.wide.u32 place, $1, {layout.SLOTS_OF_DEVICE}, $2;\n\t"
        f"ld.relaxed.sys.global.v2.b64 {{front, back}}, [place+{(1 + number) * layout.SLOT}];\n\t"
        "mov.b64 {epoch, low}, front;\n\tmov.b64 {epoch, high}, back;\n\t"
        "mov.b64 $0, {low, high};\n\t}",
        "=l,r,l",
        rank,
        slots,
        results=[ops.i64()],
        side_effects=False,
    )


def multicast_pointer(kernel: KernelContext, buffer: Buffer) -> ir.Value:
    """The address that means a buffer on all devices, a global pointer.

    The runtime says before the kernel is launched that there is no multicast.
    """
    communicates(kernel)
    kernel.state(COMMUNICATION).multicasts = True
    own = llvm.ptrtoint(ops.i64(), kernel.launch.array_pointer(buffer))
    table = _table(kernel)
    offset = kernel.launch.emit_once(
        "multigpu.multicast",
        lambda: ops.inline_assembly(
            f"ld.global.nc.b64 $0, [$1+{layout.MULTICAST * layout.WORD}];",
            "=l,l",
            table,
            results=[ops.i64()],
            side_effects=False,
        ),
    )
    return llvm.inttoptr(pointer_type(1), ops.add(own, offset))


def wait(ctx: RuleContext, pointer: ir.Value, amount: ir.Value, decrement: bool) -> None:
    """Lets one thread wait for a semaphore that other devices signal, as long as kernels wait.

    Args:
      ctx: of the rule.
      pointer: to the semaphore.
      amount: that it has to reach (i32).
      decrement: whether that is subtracted then.
    """
    communicates(ctx.kernel)
    state = ctx.kernel.state(COMMUNICATION)
    # Nobody else can take what this thread has seen.
    geometry = ctx.kernel.geometry
    alone = geometry.blocks == geometry.threads == 1 and ctx.semantics is not Semantics.WARP

    def emit(table: ir.Value, *operands: ir.Value) -> None:
        text, constraints = code.wait(state.fingerprint, decrement, alone)
        ops.inline_assembly(text, constraints, table, *operands)
        if state.network:
            calls.show_what_came(ctx.kernel, operands[0])

    ctx.kernel.emit_later(emit, _table(ctx.kernel), pointer, amount)


def table_of(kernel: KernelContext) -> ir.Value:
    """The address of the kernel's table, or what stands for it."""
    return _table(kernel)


def trap(ctx: RuleContext, code_: int, value: ir.Value) -> None:
    """Lets the threads that come here end the kernel with an error that the host reports.

    Args:
      ctx: of the rule.
      code_: see :class:`~.layout.Trap`.
      value: what the error is about, an integer.
    """
    communicates(ctx.kernel)
    state = ctx.kernel.state(COMMUNICATION)

    def give_up(table: ir.Value, wide: ir.Value) -> None:
        text, constraints = code.trap(code_, state.fingerprint)
        ops.inline_assembly(text, constraints, table, wide)

    ctx.kernel.emit_later(give_up, _table(ctx.kernel), ops.cast_integer(value, ops.i64()))
