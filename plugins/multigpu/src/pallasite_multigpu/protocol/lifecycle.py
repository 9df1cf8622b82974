"""Where a kernel meets its peers: the lifecycle that emits the protocol's code."""

from __future__ import annotations

import math
import zlib

import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext
from pallasite_multigpu.network import calls
from pallasite_multigpu.options import MultiGpuOptions
from pallasite_multigpu.protocol import code, layout
from pallasite_multigpu.protocol.kernel import (
    COMMUNICATION,
    PROVIDER,
    TABLE,
    device_count,
    placeholder,
    replace,
    wait,
)
from pallasite_std.api import semaphore_rules

CLEARED_AT_MOST = 1024
"""Semaphores that a kernel clears itself, which is faster than if its launch does it."""

MANY_BLOCKS = 32
"""Blocks of a multiprocessor, at most: what is less than such a part of its shared memory does not
matter."""


def applies(kernel: KernelContext) -> bool:
    """Only where there is a device mesh around the call."""
    return bool(kernel.device_mesh.manual)


def prologue(kernel: KernelContext) -> None:
    """The entry barrier, if it is found to be needed."""
    state = kernel.state(COMMUNICATION)
    kernel.state(semaphore_rules.WAITING).emit = wait
    slots = placeholder(ops.i64())
    state.slots_of_epoch = slots

    def enter() -> None:
        made = None
        if state.begins:
            launch = kernel.launch
            # Launches at the same time may share a table, but not what they write.
            own = (*launch.hidden.outputs, *launch.hidden.inputs)[0]
            pointers = [launch.array_pointer(one) for one in (own, *state.slots, *state.cleared)]
            devices, blocks = device_count(kernel), kernel.geometry.blocks
            cleared = [math.prod(one.shape) for one in state.cleared]
            shape = (state.fingerprint, devices, blocks, len(state.slots))
            kept = []
            if state.shared_slots is not None:
                kept = [ops.shared_address(launch.shared_pointer(state.shared_slots))]
            if not state.network:
                text, constraints = code.entry(*shape, cleared, kept=bool(kept))
                made = ops.inline_assembly(
                    text, constraints, state.table, *pointers, *kept, results=[ops.i64()]
                )
            else:
                text, constraints = code.entry_begin(*shape, cleared)
                made = ops.inline_assembly(
                    text, constraints, state.table, *pointers, results=[ops.i64()]
                )
                calls.begin(kernel, state.table)
                launch.block_barrier()
                reached = pointers[1 : 1 + len(state.slots)]
                calls.announce(kernel, state.table, devices, made, state.fingerprint, reached)
                text, constraints = code.entry_end(*shape, kept=bool(kept))
                made = ops.inline_assembly(
                    text, constraints, state.table, pointers[0], made, *kept, results=[ops.i64()]
                )
        # What other lifecycles have deferred may name it, even if it will not be used.
        replace(slots, ops.i64_constant(0) if made is None else made)

    kernel.emit_later(enter)


def epilogue(kernel: KernelContext) -> None:
    """The exit barrier, if it is found to be needed."""

    def leave() -> None:
        state = kernel.state(COMMUNICATION)
        wanted = kernel.params.options_of(MultiGpuOptions).exit_barrier
        if state.begins and (state.reads if wanted is None else wanted):
            devices, blocks = device_count(kernel), kernel.geometry.blocks
            if not state.network:
                ops.inline_assembly(*code.exit_(state.fingerprint, devices, blocks), state.table)
                return
            told = ops.inline_assembly(
                *code.exit_begin(devices, blocks), state.table, results=[ops.i64()]
            )
            calls.announce_end(kernel, state.table, devices, told)
            ops.inline_assembly(*code.exit_end(state.fingerprint, devices), state.table, told)

    kernel.emit_later(leave)


def finish(kernel: KernelContext) -> None:
    """Asks for the table, if anything uses it."""
    state = kernel.state(COMMUNICATION)
    if state.table is None:
        return
    launch = kernel.launch
    state.fingerprint = _fingerprint(kernel)
    zeroed = tuple(one for one in launch.buffers_scratch if one.zeroed)
    small = sum(math.prod(one.shape) for one in zeroed) <= CLEARED_AT_MOST
    if state.begins and small and all(np.dtype(one.dtype).itemsize == 4 for one in zeroed):
        state.cleared = zeroed
    state.shared_slots = _room_for_slots(kernel)
    buffer = launch.hidden_operand(
        TABLE,
        (layout.table_words(device_count(kernel)),),
        "uint64",
        provider=PROVIDER,
        arguments={
            "communicates": state.begins,
            "fingerprint": state.fingerprint,
            "location": _own_line(kernel),
            "multicasts": state.multicasts,
            "clears": bool(state.cleared),
            "network": state.network,
            "reached": [[one.kind.value, one.index] for one in state.slots],
        },
    )
    pointer = launch.array_pointer(buffer)
    replace(state.table, pointer)
    state.table = pointer


def _room_for_slots(kernel: KernelContext) -> int | None:
    """Where in shared memory addresses of peers are kept: reading them from the mailbox, which may
    not be cached, takes as long as any access of global memory. None if there are none, or if fewer
    blocks would fit on a multiprocessor then."""
    state, launch = kernel.state(COMMUNICATION), kernel.launch
    size = device_count(kernel) * len(state.slots) * layout.WORD
    if not state.begins or not size:
        return None
    limit = kernel.target.max_shared_memory

    def fitting(nbytes: int) -> int:
        return limit // max(nbytes, limit // MANY_BLOCKS)

    after = -(-launch.shared_bytes // layout.WORD) * layout.WORD + size
    if fitting(after) < fitting(launch.shared_bytes):
        return None
    return launch.reserve_shared(
        size, alignment=layout.WORD, what="addresses of other devices' arrays", location=None
    )


def _own_line(kernel: KernelContext) -> str:
    """The line that defines a kernel; empty if that is a library's, and the program's is to be
    told."""
    own = kernel.location
    return "" if own is None or _jax.users_line(own) is not own else str(own)


def _fingerprint(kernel: KernelContext) -> int:
    """32 bits that tell kernels apart; the same in all processes."""
    geometry, slots = kernel.geometry, kernel.state(COMMUNICATION).slots
    parts = [
        kernel.launch.module.operation.get_asm(enable_debug_info=False),
        str((geometry.cuda_grid, geometry.cluster, geometry.threads)),
        *map(str, slots),
    ]
    return zlib.crc32("\0".join(parts).encode())
