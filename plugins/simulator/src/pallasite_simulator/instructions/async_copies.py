"""Asynchronous copies of single lanes: PTX ISA 9.7.9.25.3 (cp.async), 9.7.9.12 (st.async) and
9.7.13.7 (red.async)."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers
from pallasite_simulator.engine.transfers import Transfer, async_groups
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions import bulk_copies, tensor_map_updates
from pallasite_simulator.instructions.accesses import (
    CACHE_HINT,
    PREFETCH_SIZES,
    VECTORS,
    bind_address,
    bind_cache_policy,
    bind_stored,
    join_vectors,
    sort_modifiers,
)
from pallasite_simulator.instructions.asynchronous import (
    COMPLETION,
    commit_step,
    failure,
    group_count,
    shared_addresses,
    tell_completion,
    wait_step,
)
from pallasite_simulator.instructions.mbarriers import bind_barrier
from pallasite_simulator.instructions.updates import update_of, update_unread
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Negated, Register
from pallasite_simulator.types import Array, PtxType, Values

instructions = InstructionSet()
instructions.extend(bulk_copies.instructions, tensor_map_updates.instructions)


@instructions.register("cp.async.ca", "cp.async.cg")
def bind_copy(instruction: Instruction, binder: Binder) -> Step:
    """Copies 4, 8 or 16 bytes from global to shared memory: PTX ISA 9.7.9.25.3.1, cp.async.

    What is not copied of them, as the source is smaller or ignored, becomes zero.
    """
    words = sort_modifiers(
        binder,
        {
            "async": ("async",),
            "cache": ("ca", "cg"),
            "destination": ("shared", "shared::cta"),
            "source": ("global",),
            "hint": (CACHE_HINT,),
            "prefetch": PREFETCH_SIZES,
        },
    )
    if not words["destination"] or not words["source"]:
        raise binder.error("a copy must name its state spaces", expected=".shared.global")
    hint = bool(words["hint"])
    binder.expect_operands(3 + hint, 4 + hint)
    if hint:
        bind_cache_policy(binder, len(instruction.operands) - 1)
    size_operand = binder.operand(2)
    sizes = (16,) if words["cache"] == "cg" else (4, 8, 16)
    if not isinstance(size_operand, Immediate) or size_operand.value not in sizes:
        raise binder.error("wrong size of a copy", expected=" or ".join(map(str, sizes)))
    size = size_operand.value
    target_space, target = bind_address(binder, 0, words["destination"])
    source_space, source = bind_address(binder, 1, words["source"])
    given: Source | None = None
    if len(instruction.operands) == 4 + hint:
        operand = binder.operand(3)
        if isinstance(operand, Negated) or (
            isinstance(operand, Register) and operand.type == "pred"
        ):
            ignore = binder.source(operand, PRED)
            given = lambda lanes: np.where(ignore(lanes), np.uint32(0), np.uint32(size))  # noqa: E731
        else:
            given = binder.source(operand, U32)

    def step(lanes: Lanes) -> None:
        memory = lanes.wave.memory
        transfer = Transfer(lanes, instruction, "cp.async", "generic")
        if transfer.operation is not None:
            async_groups(lanes.wave, "cp.async").add(transfer.operation)
        targets = np.broadcast_to(target(lanes), (lanes.count,))
        sources = np.broadcast_to(source(lanes), (lanes.count,))
        places = memory.offsets(lanes, target_space, targets, size, instruction)
        memory.check_alignment(lanes, "shared", targets, size, size, instruction)
        memory.check_alignment(lanes, "global", sources, size, size, instruction)
        if given is None:
            found = memory.offsets(lanes, source_space, sources, size, instruction)
            values = memory.regions["global"].views[size][found // size]
            _tell_read(lanes, transfer, found, size, instruction)
        else:
            counts = np.broadcast_to(given(lanes), (lanes.count,))
            values = _cut_values(lanes, transfer, sources, counts, size, instruction)
        if transfer.operation is not None:
            transfer.tell_of("write", "shared", places, size)
        if lanes.wave.traffic is not None:
            lanes.wave.traffic.shared(lanes, places, size, instruction)
        transfer.moved("shared", "write", size * lanes.count)
        memory.regions["shared"].views[size][places // size] = values
        lanes.wave.progress += 1

    return step


def _cut_values(
    lanes: Lanes,
    transfer: Transfer,
    sources: Array,
    counts: Array,
    size: int,
    instruction: Instruction,
) -> Array:
    """``counts`` bytes of each lane from global addresses, and zeros up to ``size`` bytes."""
    if int(counts.max()) > size:
        wrong = int(lanes.numbers[counts > size][0])
        raise failure(
            lanes.wave,
            wrong,
            "copies more bytes than there is room for",
            instruction,
            got=int(counts.max()),
            expected=f"at most {size}",
        )
    memory = lanes.wave.memory
    bytes_ = np.zeros((lanes.count, size), np.uint8)
    for count in np.unique(counts).tolist():
        chosen = lanes.where(counts == count)
        if not count or chosen is None:
            continue
        where = counts == count
        found = memory.offsets(chosen, "global", sources[where], count, instruction)
        _tell_read(chosen, transfer, found, count, instruction)
        bytes_[where, :count] = memory.regions["global"].bytes[found[:, None] + np.arange(count)]
    dtype = memory.regions["global"].views[size].dtype
    values: Array = bytes_.view(dtype).reshape(lanes.count)
    return values


def _tell_read(
    lanes: Lanes, transfer: Transfer, offsets: Array, size: int, instruction: Instruction
) -> None:
    transfer.moved("global", "read", size * lanes.count)
    if transfer.operation is not None and lanes.wave.observer is not None:
        lanes.wave.observer.async_access(
            transfer.operation, "read", "global", offsets, size, lanes.numbers
        )
    if lanes.wave.traffic is not None:
        lanes.wave.traffic.global_(lanes, offsets, size, instruction, "read")


@instructions.register("cp.async.commit_group")
def bind_commit(instruction: Instruction, binder: Binder) -> Step:
    """Commits a thread's copies to a group: PTX ISA 9.7.9.25.3.2, cp.async.commit_group."""
    binder.only_modifiers("async", "commit_group")
    binder.expect_operands(0)
    return commit_step("cp.async")


@instructions.register("cp.async.wait_group", "cp.async.wait_all")
def bind_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits for groups of copies: PTX ISA 9.7.9.25.3.3, cp.async.wait_group and wait_all."""
    binder.only_modifiers("async", "wait_group", "wait_all")
    if instruction.has("wait_all"):
        binder.expect_operands(0)
        return wait_step("cp.async", -1, reads_only=False)
    return wait_step("cp.async", group_count(binder), reads_only=False)


@instructions.register("cp.async.mbarrier.arrive")
def bind_barrier_arrive(instruction: Instruction, binder: Binder) -> Step:
    """Makes an mbarrier wait for a thread's earlier copies: PTX ISA 9.7.13.15.15,
    cp.async.mbarrier.arrive."""
    binder.only_modifiers("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta")
    binder.only_type("b64")
    binder.expect_operands(1)
    locate = bind_barrier(binder, 0)
    counted_on = instruction.has("noinc")
    one = np.uint32(1)

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        barriers = mbarriers(wave)
        slots = locate(lanes)
        if wave.observer is not None:
            for operation, numbers in async_groups(wave, "cp.async").pending(lanes):
                chosen = slots[np.searchsorted(lanes.numbers, numbers)]
                tell_completion(wave.observer, barriers, operation, numbers, chosen)
        if counted_on:
            barriers.arrive(lanes, slots, one, instruction)
        else:
            barriers.increment(lanes, slots, instruction)

    return step


# Stores and reductions ----------------------------------------------------------------------------


@instructions.register("st.async")
def bind_store(instruction: Instruction, binder: Binder) -> Step:
    """Stores to shared memory of the cluster and tells an mbarrier there: PTX ISA 9.7.9.12,
    st.async."""
    types = tuple(f"{letter}{bits}" for letter in "bus" for bits in (32, 64)) + ("f32", "f64")
    words = sort_modifiers(
        binder,
        {
            "async": ("async",),
            "order": ("weak",),
            "scope": ("cluster",),
            "space": ("shared::cluster",),
            "completion": (COMPLETION,),
            "vector": ("v2", "v4"),
            "type": types,
        },
    )
    if not words["completion"]:
        raise binder.error("only stores that complete on an mbarrier are known")
    kind = binder.only_type(*types)
    binder.expect_operands(3)
    elements = binder.elements(1)
    if len(elements) != VECTORS.get(words["vector"], 1):
        raise binder.error("wrong number of elements", got=len(elements))
    values = [bind_stored(binder, one, kind) for one in elements]
    return _remote_step(instruction, binder, kind, words["space"], values, None)


@instructions.register("red.async")
def bind_reduction(instruction: Instruction, binder: Binder) -> Step:
    """Reduces in shared memory of the cluster and tells an mbarrier there: PTX ISA 9.7.13.7,
    red.async."""
    words = sort_modifiers(
        binder,
        {
            "async": ("async",),
            "order": ("relaxed",),
            "scope": ("cluster",),
            "space": ("shared::cluster",),
            "completion": (COMPLETION,),
            "operation": tuple(_REDUCTIONS),
            "type": ("b32", "u32", "s32", "u64"),
        },
    )
    if not words["completion"] or not words["order"] or not words["scope"]:
        raise binder.error(
            "unknown asynchronous reduction", expected=f".relaxed.cluster with .{COMPLETION}"
        )
    if not words["operation"]:
        raise binder.error("unknown reduction", expected=" or ".join(_REDUCTIONS))
    kind = binder.only_type(*_REDUCTIONS[words["operation"]])
    binder.expect_operands(3)
    value = binder.source(1, kind)
    return _remote_step(instruction, binder, kind, words["space"], [value], words["operation"])


_REDUCTIONS = {
    "inc": ("u32",),
    "dec": ("u32",),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "add": ("u32", "s32", "u64"),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}
"""Operations of ``red.async`` and their types."""


def _remote_step(
    instruction: Instruction,
    binder: Binder,
    kind: PtxType,
    space: str,
    values: list[Source],
    operation: str | None,
) -> Step:
    """A store, or a reduction, that completes on the mbarrier of operand 2."""
    memory_space, address = bind_address(binder, 0, space)
    locate = bind_barrier(binder, 2, ("shared::cluster",), space=space, local=False)
    size = kind.bytes * len(values)
    change = None if operation is None else update_of(operation, kind, "shared")
    access = "write" if change is None else "atomic"

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        memory = wave.memory
        transfer = Transfer(lanes, instruction, "st.async", "generic")
        addresses = np.broadcast_to(address(lanes), (lanes.count,))
        if memory_space == "generic":
            addresses = shared_addresses(lanes, addresses, instruction)
        offsets = memory.offsets(lanes, "shared", addresses, size, instruction)
        memory.check_alignment(lanes, "shared", addresses, size, size, instruction)
        slots = locate(lanes)
        blocks = offsets // memory.shared_stride
        foreign = slots * 8 // memory.shared_stride != blocks
        if foreign.any():
            raise failure(
                wave,
                int(lanes.numbers[foreign][0]),
                "names an mbarrier of another block than the one that it stores to",
                instruction,
            )
        transfer.tell_of(access, "shared", offsets, size)
        transfer.moved("shared", access, size * lanes.count)
        given: list[Values] = [one(lanes) for one in values]
        region = memory.regions["shared"]
        if change is None:
            region.views[size][offsets // size] = join_vectors(given, kind, lanes.count)
        else:
            view = region.views[size].view(change.dtype)
            operand = np.broadcast_to(given[0], (lanes.count,))
            update_unread(view, offsets // size, operand, change)
        transfer.complete(
            mbarriers(wave), lanes.numbers, slots, np.full(lanes.count, size), instruction
        )

    return step
