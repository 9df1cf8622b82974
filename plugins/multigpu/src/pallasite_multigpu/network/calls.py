"""Kernels whose devices may be of several hosts: what they tell those that NVLink does not connect.

Each device is near or far, which its entry in the table says. Near ones are reached by loads and
stores, as in any kernel. To far ones go copies from shared memory, by way of a piece of memory that
the network can read, and signals; both by calls of NVSHMEM's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import UnsupportedError
from pallasite.plugin.ir import ops, pointer_type
from pallasite.plugin.lowering import Buffer, KernelContext, RuleContext
from pallasite_multigpu.network import library
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.protocol.blocks import block_number


def call(kernel: KernelContext, name: str, *operands: ir.Value) -> None:
    """Calls one of NVSHMEM's functions; a result is dropped."""
    body = kernel.launch.module.body
    kind = library.FUNCTIONS.get(name, "void (ptr<1>, i32, i32)")
    result, _, parameters = kind.partition(" ")
    known = {ir.StringAttr(one.attributes["sym_name"]).value for one in body.operations}
    if name not in known:
        typed = ", ".join(
            f"!llvm.{one}" if one.startswith("ptr") else one
            for one in parameters.strip("()").split(", ")
            if one
        )
        text = f"llvm.func @{name}({typed})" + (f" -> {result}" if result != "void" else "")
        ir.InsertionPoint.at_block_begin(body).insert(ir.Operation.parse(text))
    results = [ir.Type.parse(result)] if result != "void" else []
    ir.Operation.create(
        "llvm.call",
        results=results,
        operands=list(operands),
        attributes={
            "callee": ir.FlatSymbolRefAttr.get(name),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 0]),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        },
    )


def begin(kernel: KernelContext, table: ir.Value) -> None:
    """Each block gets the state of NVSHMEM's library; a barrier has to follow."""
    launch = kernel.launch
    state = llvm.inttoptr(pointer_type(1), _word(table, layout.NETWORK))
    threads = ops.i32_constant(kernel.geometry.threads)
    call(kernel, library.BEGIN, state, launch.thread_id, threads)


def announce(
    kernel: KernelContext,
    table: ir.Value,
    devices: int,
    told: ir.Value,
    fingerprint: int,
    buffers: Sequence[ir.Value],
) -> None:
    """Tells far devices that the kernel has begun, and where its buffers are.

    Args:
      kernel: the kernel.
      table: its address.
      devices: of the group.
      told: what the first part of the entry barrier gives.
      fingerprint: of the kernel.
      buffers: addresses of those that peers reach.
    """

    def tell(there: ir.Value, offset: ir.Value, element: ir.Value, epoch: ir.Value) -> None:
        rank = ops.cast_integer(_word(table, layout.RANK), ops.i32())
        parity = _wide(ops.remainder_unsigned(epoch, 2))
        place = ops.add(there, ops.multiply(parity, layout.SLOTS_OF_PARITY))
        place = ops.add(place, ops.multiply(_wide(rank), layout.SLOTS_OF_DEVICE))
        for number, buffer in enumerate(buffers):
            address = ops.add(llvm.ptrtoint(ops.i64(), buffer), offset)
            low = ops.arith.shli(address, ops.i64_constant(32))
            high = ops.arith.andi(address, ops.i64_constant(-(2**32)))
            for half, value in enumerate((low, high)):
                at = layout.SLOTS + (1 + number) * layout.SLOT + half * layout.WORD
                word = ops.arith.ori(value, _wide(epoch))
                call(kernel, "nvshmem_uint64_p", _generic(ops.add(place, at)), word, element)
        call(kernel, "nvshmem_quiet")
        signed = fingerprint - 2**32 if fingerprint >= 2**31 else fingerprint
        word = ops.arith.ori(_wide(epoch), ops.i64_constant(signed << 32))
        _signal_flag(kernel, there, layout.ENTRY_FLAGS, rank, word, element)

    _to_far_devices(kernel, table, devices, told, tell)


def announce_end(kernel: KernelContext, table: ir.Value, devices: int, told: ir.Value) -> None:
    """Tells far devices that the kernel has ended; ``told`` is of the exit barrier."""

    def tell(there: ir.Value, offset: ir.Value, element: ir.Value, epoch: ir.Value) -> None:
        del offset
        rank = ops.cast_integer(_word(table, layout.RANK), ops.i32())
        call(kernel, "nvshmem_quiet")
        _signal_flag(kernel, there, layout.EXIT_FLAGS, rank, _wide(epoch), element)

    _to_far_devices(kernel, table, devices, told, tell)


def signal(
    ctx: RuleContext, table: ir.Value, rank: ir.Value, pointer: ir.Value, amount: ir.Value
) -> None:
    """One thread signals a semaphore of another device, after all that the network was given.

    Args:
      ctx: of the rule.
      table: the table's address.
      rank: of the device (i32).
      pointer: to the semaphore there.
      amount: i32.
    """
    kernel = ctx.kernel
    call(kernel, "nvshmem_quiet")
    far = _is_far(_mailbox(table, rank))
    with ops.when(far):
        address = _generic(llvm.ptrtoint(ops.i64(), pointer))
        call(kernel, "nvshmem_uint32_atomic_add", address, amount, _element(kernel, table, rank))
    with ops.when(_not(far)):
        ops.inline_assembly(
            "red.release.sys.global.add.s32 [$0], $1;", "l,r,~{memory}", pointer, amount
        )


def show_what_came(kernel: KernelContext, semaphore: ir.Value) -> None:
    """What the network has brought before a signal is visible from here on."""
    address = _generic(llvm.ptrtoint(ops.i64(), semaphore))
    compare = ops.i32_constant(library.GREATER_OR_EQUAL)
    call(kernel, "nvshmem_uint32_test", address, compare, ops.i32_constant(0))


def send(
    ctx: RuleContext,
    table: ir.Value,
    rank: ir.Value,
    staging: Buffer,
    most: int,
    target: ir.Value,
    source: ir.Value,
    size: ir.Value,
) -> None:
    """One lane starts the copy of a piece of shared memory to another device.

    Args:
      ctx: of the rule.
      table: the table's address.
      rank: of the device (i32).
      staging: memory that the network can read, with ``most`` bytes for each warp of each block.
      most: bytes of a piece at most.
      target: address there.
      source: 32-bit address in shared memory.
      size: of the piece, in bytes (i32).
    """
    kernel, launch = ctx.kernel, ctx.launch
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    constraints = "l,r,r,~{memory}"
    far = _is_far(_mailbox(table, rank))
    with ops.when(_not(far)):
        ops.inline_assembly(text, constraints, target, source, size)
    with ops.when(far):
        number = block_number(kernel)
        warps = -(-kernel.geometry.threads // 32)
        warp = ops.divide_unsigned(launch.thread_id, 32)
        place = ops.multiply(_wide(ops.add(ops.multiply(number, warps), warp)), most)
        piece = ops.byte_pointer(launch.array_pointer(staging), place)
        ops.inline_assembly(
            f"{text}\n\tcp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;\n\t"
            "fence.proxy.async;\n\tfence.acq_rel.sys;",
            constraints,
            piece,
            source,
            size,
        )
        there, here = (_generic(llvm.ptrtoint(ops.i64(), one)) for one in (target, piece))
        element = _element(kernel, table, rank)
        call(kernel, "nvshmem_putmem_nbi", there, here, _wide(size), element)
        call(kernel, "nvshmem_quiet")


def refuse(primitive: object, hint: str) -> UnsupportedError:
    """What is not done where devices may be of several hosts."""
    return UnsupportedError(
        f"{primitive} of another device's array, in a kernel whose devices may be of several hosts"
        " (the option peer_network)",
        expected="copies from shared memory of a window that lies in one piece, and semaphores",
        hint=hint,
    )


def _to_far_devices(
    kernel: KernelContext,
    table: ir.Value,
    devices: int,
    told: ir.Value,
    tell: Callable[[ir.Value, ir.Value, ir.Value, ir.Value], None],
) -> None:
    thread = kernel.launch.thread_id
    epoch = ops.cast_integer(told, ops.i32())
    mine = ops.cast_integer(ops.arith.shrui(told, ops.i64_constant(32)), ops.i32())
    tells = ops.compare("ne", ops.remainder_unsigned(mine, 2), 0)
    with ops.when(ops.arith.andi(tells, ops.compare("ult", thread, devices))):
        mailbox = _mailbox(table, thread)
        with ops.when(_is_far(mailbox)):
            place = _place(table, thread, layout.WORDS_OF_DEVICE, layout.MAILBOXES + 1)
            offset = ops.load(ops.i64(), place, alignment=8)
            there = ops.add(mailbox, -layout.FAR)
            tell(there, offset, _element(kernel, table, thread), epoch)


def _signal_flag(
    kernel: KernelContext,
    there: ir.Value,
    flags: int,
    rank: ir.Value,
    word: ir.Value,
    element: ir.Value,
) -> None:
    flag = ops.add(ops.add(there, flags), ops.multiply(_wide(rank), layout.LINE))
    kind = ops.i32_constant(library.SIGNAL_SET)
    call(kernel, "nvshmemx_signal_op", _generic(flag), word, kind, element)


def _word(table: ir.Value, number: int) -> ir.Value:
    return ops.load(ops.i64(), ops.byte_pointer(table, number * layout.WORD), alignment=8)


def _place(table: ir.Value, rank: ir.Value, words: int, first: int) -> ir.Value:
    skipped = ops.multiply(_wide(rank), words * layout.WORD)
    return ops.byte_pointer(table, ops.add(skipped, first * layout.WORD))


def _mailbox(table: ir.Value, rank: ir.Value) -> ir.Value:
    place = _place(table, rank, layout.WORDS_OF_DEVICE, layout.MAILBOXES)
    return ops.load(ops.i64(), place, alignment=8)


def _is_far(mailbox: ir.Value) -> ir.Value:
    low = ops.arith.andi(mailbox, ops.i64_constant(layout.FAR))
    return ops.compare("ne", low, 0)


def _not(condition: ir.Value) -> ir.Value:
    return ops.arith.xori(condition, ops.constant(1, ops.i1()))


def _element(kernel: KernelContext, table: ir.Value, rank: ir.Value) -> ir.Value:
    devices = _devices(kernel)
    place = _place(table, rank, 1, layout.elements(devices))
    return ops.cast_integer(ops.load(ops.i64(), place, alignment=8), ops.i32())


def _devices(kernel: KernelContext) -> int:
    """Devices of the mesh around the kernel."""
    return math.prod(size for _, size in kernel.device_mesh.axes)


def _wide(value: ir.Value) -> ir.Value:
    return ops.cast_integer(value, ops.i64(), signed=False)


def _generic(address: ir.Value) -> ir.Value:
    return llvm.inttoptr(pointer_type(0), address)
