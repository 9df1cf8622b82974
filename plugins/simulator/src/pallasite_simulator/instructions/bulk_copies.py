"""Bulk copies of bytes between global and shared memory: PTX ISA 9.7.9.25.4, and the groups of bulk
copies, 9.7.9.27.2."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import U32, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers
from pallasite_simulator.engine.transfers import Transfer, async_groups
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    CACHE_HINT,
    bind_address,
    bind_cache_policy,
    check_addresses,
    sort_modifiers,
)
from pallasite_simulator.instructions.asynchronous import (
    COMPLETION,
    GROUP,
    MULTICAST,
    Combine,
    check_barrier_block,
    check_own_block,
    check_writable,
    commit_step,
    count_bytes,
    failure,
    group_count,
    multicast_blocks,
    reduction_of,
    wait_step,
)
from pallasite_simulator.instructions.mbarriers import bind_barrier
from pallasite_simulator.instructions.multicast import destinations
from pallasite_simulator.instructions.updates import update_of
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array, PtxType

instructions = InstructionSet()

ALIGNMENT = 16

U16 = TYPES["u16"]

_TO_SHARED = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}
"""Reductions to shared memory and their types (PTX ISA 9.7.9.25.4.2)."""

_EXTREMES = ("u32", "s32", "u64", "s64", "f16", "bf16")
_TO_GLOBAL = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": _EXTREMES,
    "max": _EXTREMES,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
"""Reductions to global memory and their types."""


# Copies -------------------------------------------------------------------------------------------


class _Operands:
    """The operands of a bulk copy: after destination, source and size come those that its form
    needs."""

    def __init__(self, binder: Binder, count: int):
        binder.expect_operands(count)
        self._binder = binder
        self._next = 3

    def take(self) -> int:
        """The number of the next operand."""
        self._next += 1
        return self._next - 1


@instructions.register("cp.async.bulk")
def bind_bulk_copy(instruction: Instruction, binder: Binder) -> Step:
    """Copies bytes between global and shared memory, or between blocks: PTX ISA 9.7.9.25.4.1,
    cp.async.bulk."""
    words = sort_modifiers(
        binder,
        {
            "async": ("async",),
            "bulk": ("bulk",),
            "to": ("shared::cluster",),
            "own": ("shared::cta",),
            "global": ("global",),
            "completion": (COMPLETION, GROUP),
            "multicast": (MULTICAST,),
            "hint": (CACHE_HINT,),
            "mask": ("cp_mask",),
        },
    )
    target, source = _spaces(instruction, binder)
    hint, multicast, masked = words["hint"], words["multicast"], words["mask"]
    to_global = target == "global"
    if words["completion"] != (GROUP if to_global else COMPLETION):
        raise binder.error("the copy cannot complete in this way", got=words["completion"])
    if multicast and (target, source) != ("shared::cluster", "global"):
        raise binder.error("only copies from global memory to a cluster can be multicast")
    if masked and not to_global:
        raise binder.error("only copies to global memory have a mask of bytes")
    if hint and source == "shared::cta" and not to_global:
        raise binder.error("only copies of global memory have a cache policy")
    operands = _Operands(binder, 3 + (not to_global) + bool(multicast) + bool(hint) + bool(masked))
    move = _Move(instruction, binder, target, source)
    if to_global:
        if hint:
            bind_cache_policy(binder, operands.take())
        mask = binder.source(operands.take(), U16) if masked else None
        return lambda lanes: move.to_global(lanes, mask, None)
    locate = bind_barrier(binder, operands.take(), (target,), space=target, local=False)
    blocks = binder.source(operands.take(), U16) if multicast else None
    if hint:
        bind_cache_policy(binder, operands.take())
    return lambda lanes: move.to_shared(lanes, locate(lanes), blocks, None)


@instructions.register("cp.reduce.async.bulk")
def bind_bulk_reduction(instruction: Instruction, binder: Binder) -> Step:
    """Reduces bytes of shared memory into global memory or that of another block: PTX ISA
    9.7.9.25.4.2, cp.reduce.async.bulk."""
    words = sort_modifiers(
        binder,
        {
            "reduce": ("reduce",),
            "async": ("async",),
            "bulk": ("bulk",),
            "to": ("shared::cluster",),
            "own": ("shared::cta",),
            "global": ("global",),
            "completion": (COMPLETION, GROUP),
            "hint": (CACHE_HINT,),
            "operation": tuple(_TO_GLOBAL),
            "flush": ("noftz",),
            "type": tuple(TYPES),
        },
    )
    target, source = _spaces(instruction, binder)
    to_global = target == "global"
    if source != "shared::cta" or words["completion"] != (GROUP if to_global else COMPLETION):
        raise binder.error("unknown form of an asynchronous reduction")
    operation, hint = words["operation"], bool(words["hint"])
    table = _TO_GLOBAL if to_global else _TO_SHARED
    if operation not in table:
        raise binder.error("unknown reduction", expected="one of " + ", ".join(table))
    kind = binder.only_type(*table[operation])
    must_keep = operation == "add" and kind.name in ("f16", "bf16")
    if bool(words["flush"]) != must_keep:
        raise binder.error(".noftz belongs to .add of .f16 and .bf16, and only there")
    if hint and not to_global:
        raise binder.error("only reductions to global memory have a cache policy")
    operands = _Operands(binder, 3 + (not to_global) + hint)
    move = _Move(instruction, binder, target, source)
    if to_global:
        if hint:
            bind_cache_policy(binder, operands.take())
        combine = reduction_of(operation, kind)
        return lambda lanes: move.to_global(lanes, None, (kind, combine))
    combine = update_of(operation, kind, "shared").combine
    locate = bind_barrier(binder, operands.take(), (target,), space=target, local=False)
    return lambda lanes: move.to_shared(lanes, locate(lanes), None, (kind, combine))


def _spaces(instruction: Instruction, binder: Binder) -> tuple[str, str]:
    """The state spaces of destination and source."""
    names = ("global", "shared::cta", "shared::cluster")
    found = tuple(one for one in instruction.modifiers if one in names)
    known = (
        ("shared::cta", "global"),
        ("shared::cluster", "global"),
        ("shared::cluster", "shared::cta"),
        ("global", "shared::cta"),
    )
    if found not in known:
        raise binder.error(
            "wrong state spaces of a bulk copy",
            expected=" or ".join("." + ".".join(one) for one in known),
        )
    return found


class _Move:
    """The execution of bulk copies and reductions of bytes."""

    def __init__(self, instruction: Instruction, binder: Binder, target: str, source: str):
        self._instruction = instruction
        self._target_space, self._target = bind_address(binder, 0, target)
        self._source_space, self._source = bind_address(binder, 1, source)
        self._size = binder.source(2, U32)

    def _sizes(self, lanes: Lanes) -> Array:
        sizes = np.broadcast_to(self._size(lanes), (lanes.count,)).astype(np.int64)
        wrong = sizes % ALIGNMENT != 0
        if wrong.any():
            raise failure(
                lanes.wave,
                int(lanes.numbers[wrong][0]),
                "copies a wrong number of bytes",
                self._instruction,
                got=int(sizes[wrong][0]),
                expected=f"a multiple of {ALIGNMENT}",
            )
        return sizes

    def _offsets(self, lanes: Lanes, space: str, addresses: Array, sizes: Array) -> Array:
        """Byte offsets in the memory of a space, after all checks."""
        memory = lanes.wave.memory
        addresses = np.broadcast_to(addresses, (lanes.count,))
        memory.check_alignment(lanes, space, addresses, ALIGNMENT, ALIGNMENT, self._instruction)
        # A copy of nothing may begin where a buffer ends. In shared memory its place still tells
        # the block.
        checked = np.maximum(sizes, 0 if space == "global" else 1)
        if checked[0] and (checked == checked[0]).all():
            return memory.offsets(lanes, space, addresses, int(checked[0]), self._instruction)
        offsets = np.zeros(lanes.count, np.int64)
        for size in np.unique(checked[checked > 0]).tolist():
            where = checked == size
            chosen = lanes.where(where)
            assert chosen is not None
            offsets[where] = memory.offsets(
                chosen, space, addresses[where], size, self._instruction
            )
        return offsets

    def to_global(
        self, lanes: Lanes, mask: Source | None, reduction: tuple[PtxType, Combine] | None
    ) -> None:
        """Shared to global memory."""
        wave = lanes.wave
        memory = wave.memory
        sizes = self._sizes(lanes)
        if not sizes.any():
            return  # Of what accesses nothing, nobody has to know when it is complete.
        sources = self._offsets(lanes, self._source_space, self._source(lanes), sizes)
        check_own_block(lanes, sources, self._instruction)
        masks = None if mask is None else np.broadcast_to(mask(lanes), (lanes.count,))
        transfer = Transfer(lanes, self._instruction)
        if transfer.operation is not None:
            async_groups(wave, "bulk").add(transfer.operation)
        kind = "write" if reduction is None else "atomic"
        shared, target = memory.regions["shared"].bytes, memory.regions["global"].bytes
        copies = 0
        for addresses in destinations(lanes, self._target(lanes), self._instruction):
            targets = self._offsets(lanes, self._target_space, addresses, sizes)
            check_writable(lanes, targets, self._instruction)
            copies += 1
            for number, (lane, source, place, size) in enumerate(
                zip(
                    lanes.numbers.tolist(),
                    sources.tolist(),
                    targets.tolist(),
                    sizes.tolist(),
                    strict=True,
                )
            ):
                if not size:
                    continue
                values, there = shared[source : source + size], target[place : place + size]
                if transfer.listens:
                    transfer.access("read", "shared", np.array([source]), size, lane)
                    transfer.access(kind, "global", np.array([place]), size, lane)
                if reduction is not None:
                    dtype, combine = reduction[0].dtype, reduction[1]
                    there.view(dtype)[...] = combine(there.view(dtype), values.view(dtype))
                elif masks is None:
                    there[...] = values
                else:
                    bits = int(masks[number]) >> np.arange(ALIGNMENT) & 1
                    kept = np.tile(bits.astype(np.bool_), size // ALIGNMENT)
                    there[kept] = values[kept]
        total = int(sizes.sum())
        transfer.moved("shared", "read", total)
        transfer.moved("global", kind, total * copies)
        count_bytes(wave, total)
        transfer.tell()

    def to_shared(
        self,
        lanes: Lanes,
        slots: Array,
        blocks: Source | None,
        reduction: tuple[PtxType, Combine] | None,
    ) -> None:
        """Global or shared memory to shared memory."""
        wave = lanes.wave
        memory = wave.memory
        sizes = self._sizes(lanes)
        if not sizes.any():
            return  # Of what accesses nothing, nobody has to know when it is complete.
        sources = self._offsets(lanes, self._source_space, self._source(lanes), sizes)
        targets = self._offsets(lanes, self._target_space, self._target(lanes), sizes)
        source_name = "global" if self._source_space == "global" else "shared"
        if source_name == "shared":
            check_own_block(lanes, sources, self._instruction)
        if self._target_space == "shared::cta":
            check_own_block(lanes, targets, self._instruction)
        stride = memory.shared_stride
        destinations = targets // stride
        if blocks is None:
            check_barrier_block(lanes, destinations, slots, self._instruction)
            chosen = list(destinations[:, None])
        else:
            masks = np.broadcast_to(blocks(lanes), (lanes.count,)).astype(np.int64)
            chosen = multicast_blocks(lanes, masks, self._instruction)
        transfer = Transfer(lanes, self._instruction)
        kind = "write" if reduction is None else "atomic"
        origin, shared = memory.regions[source_name].bytes, memory.regions["shared"].bytes
        signals: list[tuple[int, int, int]] = []
        for lane, source, place, size, slot, there in zip(
            lanes.numbers.tolist(),
            sources.tolist(),
            (targets % stride).tolist(),
            sizes.tolist(),
            (slots % (stride // 8)).tolist(),
            chosen,
            strict=True,
        ):
            if transfer.listens and size:
                transfer.access("read", source_name, np.array([source]), size, lane)
                transfer.access(kind, "shared", there * stride + place, size, lane)
            values = origin[source : source + size]
            for block in there.tolist():
                start = block * stride + place
                part = shared[start : start + size]
                if reduction is None:
                    part[...] = values
                else:
                    dtype, combine = reduction[0].dtype, reduction[1]
                    part.view(dtype)[...] = combine(part.view(dtype), values.view(dtype))
                signals.append((lane, block * (stride // 8) + slot, size))
        total = int(sizes.sum())
        transfer.moved(source_name, "read", total)
        transfer.moved("shared", kind, sum(size for _, _, size in signals))
        count_bytes(wave, total)
        transfer.tell()
        numbers, places, amounts = np.array(signals).T
        transfer.complete(mbarriers(wave), numbers, places, amounts, self._instruction)


# Prefetches and groups ----------------------------------------------------------------------------


@instructions.register("cp.async.bulk.prefetch")
def bind_prefetch(instruction: Instruction, binder: Binder) -> Step:
    """Prefetches global memory, which only checks its addresses: PTX ISA 9.7.9.25.4.3,
    cp.async.bulk.prefetch."""
    binder.only_modifiers("async", "bulk", "prefetch", "L2", "global", CACHE_HINT)
    if not instruction.has("L2", "global"):
        raise binder.error("unknown prefetch", expected=".L2.global")
    hint = instruction.has(CACHE_HINT)
    binder.expect_operands(2 + hint)
    if hint:
        bind_cache_policy(binder, 2)
    space, address = bind_address(binder, 0, "global")
    size = binder.source(1, U32)

    def step(lanes: Lanes) -> None:
        sizes = np.broadcast_to(size(lanes), (lanes.count,))
        addresses = np.broadcast_to(address(lanes), (lanes.count,))
        for one in np.unique(sizes).tolist():
            where = sizes == one
            chosen = lanes.where(where)
            assert chosen is not None
            if one % ALIGNMENT:
                raise failure(
                    lanes.wave,
                    int(chosen.numbers[0]),
                    "prefetches a wrong number of bytes",
                    instruction,
                    got=one,
                    expected=f"a multiple of {ALIGNMENT}",
                )
            if one:
                check_addresses(chosen, space, addresses[where], one, instruction, ALIGNMENT)

    return step


@instructions.register("cp.async.bulk.commit_group")
def bind_commit(instruction: Instruction, binder: Binder) -> Step:
    """Commits a thread's bulk copies to a group: PTX ISA 9.7.9.27.2.1,
    cp.async.bulk.commit_group."""
    binder.only_modifiers("async", "bulk", "commit_group")
    binder.expect_operands(0)
    return commit_step("bulk")


@instructions.register("cp.async.bulk.wait_group")
def bind_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits for groups of bulk copies, or for what they read: PTX ISA 9.7.9.27.2.2,
    cp.async.bulk.wait_group."""
    binder.only_modifiers("async", "bulk", "wait_group", "read")
    return wait_step("bulk", group_count(binder), reads_only=instruction.has("read"))
