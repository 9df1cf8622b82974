"""Allocation of tensor memory: PTX ISA 9.7.16.7, tcgen05.alloc and its kin."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import (
    COLUMNS,
    POISON,
    SPACE,
    TARGETS,
    Piece,
    TensorMemory,
    cta_group,
    require_target,
    uniform_of_warps,
)
from pallasite_blackwell.simulation.thread_fences import ThreadFences
from pallasite_simulator.binder import U32, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import bind_address
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Immediate, Instruction
from pallasite_simulator.types import Array

instructions = InstructionSet()

_FREED = "tensor memory was released"
_SIZES = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """A warp of a block asks for columns.

    Attributes:
      warp: its lanes.
      count: of columns.
      space, address: where the result goes.
    """

    warp: Array
    count: int
    space: str
    address: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Blocks that wait for columns: one, or a pair."""

    blocks: tuple[int, ...]
    count: int


@instructions.register("tcgen05.alloc", needs_warp=True)
def bind_alloc(instruction: Instruction, binder: Binder) -> Step:
    """Allocates columns and writes their address to shared memory: PTX ISA 9.7.16.7.1."""
    require_target(binder, TARGETS, "tensor memory")
    binder.only_modifiers(
        "alloc", "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32"
    )
    group = _aligned_group(binder)
    binder.expect_operands(2)
    named = "shared::cta" if instruction.has("shared::cta") else ""
    space, address = bind_address(binder, 0, named)
    columns = binder.source(1, U32)
    count = binder.operand(1)
    if isinstance(count, Immediate) and count.value in _SIZES:
        program = binder.program
        program.most_blocks = min(program.most_blocks, COLUMNS // count.value)

    def step(lanes: Lanes) -> list[Wait] | None:
        check_whole_warps(lanes, instruction)
        wave = lanes.wave
        memory = TensorMemory.of(wave)
        addresses = np.broadcast_to(address(lanes), (lanes.count,))
        counts = uniform_of_warps(columns(lanes), lanes, "numbers of columns", instruction)
        waits: list[Wait] = []
        for number, count in enumerate(counts.tolist()):
            warp = lanes.numbers[number * 32 : number * 32 + 32]
            lane = int(warp[0])
            block = int(wave.lane_block[lane])
            memory.use_group(block, group, lane, instruction)
            _check_count(memory, lane, count, instruction)
            if memory.relinquished[block]:
                raise memory.failure(
                    lane,
                    "allocates tensor memory after its block has given up the right to",
                    instruction,
                    hint="tcgen05.relinquish_alloc_permit comes after the last allocation",
                )
            request = _Request(warp, count, space, addresses[number * 32])
            waits += _allocate(memory, block, group, request, instruction)
        # The other block of a pair may have come with the same execution.
        asking = _requests(wave)
        waits = [
            one
            for one in waits
            if one.key == _FREED or int(wave.lane_block[one.lanes[0]]) in asking
        ]
        return waits or None

    return step


def _allocate(
    memory: TensorMemory, block: int, group: int, request: _Request, instruction: Instruction
) -> list[Wait]:
    wave = memory.wave
    requests: dict[int, _Request] = {block: request}
    if group == 2:
        waiting = _requests(wave)
        peer = memory.peer(block)
        if peer not in waiting:
            waiting[block] = request
            key = ("tensor memory of a pair", block)
            return [Wait(request.warp, key, lambda: "the other block of the pair to allocate")]
        other = waiting[peer]
        if other.count != request.count:
            raise memory.failure(
                int(request.warp[0]),
                "allocates another number of columns than the other block of the pair",
                instruction,
                got=request.count,
                expected=str(other.count),
            )
        requests[peer] = other
    asked = _Asked(tuple(requests), request.count)
    start, text = _free_columns(memory, asked)
    if start is None:
        _wait_for_others(memory).append(asked)
        return [Wait(request.warp, _FREED, lambda: text, again=True)]
    for owner, one in requests.items():
        columns = slice(start, start + one.count)
        memory.allocated[owner, columns] = True
        memory.words[owner, :, columns] = POISON
        memory.pieces[owner].append(Piece(start, one.count, group, instruction))
        _tell_forgotten(memory, owner, start, one.count)
        first = wave.lanes(one.warp[:1])
        result = np.array([start], np.uint32)
        wave.memory.store(
            first, one.space, np.array([one.address], np.uint64), result, 4, instruction
        )
        if owner != block:
            del _requests(wave)[owner]
            wave.wake(("tensor memory of a pair", owner))
    wave.progress += 1
    return []


def _requests(wave: Wave) -> dict[int, _Request]:
    """What blocks of pairs ask for, whose peers have not come yet."""
    found: Any = wave.resources.setdefault("tensor memory requests", {})
    result: dict[int, _Request] = found
    return result


def _free_columns(memory: TensorMemory, asked: _Asked) -> tuple[int | None, str]:
    """The first columns that are free for all blocks; None if there are none, and what they wait
    for."""
    used = np.zeros(COLUMNS, np.bool_)
    names: set[str] = set()
    for block in asked.blocks:
        found = memory.multiprocessors.used(memory, block)
        if found is None:
            return None, "an earlier block of the multiprocessor to end"
        used |= found[0]
        names.update(found[1])
    for start in range(0, COLUMNS - asked.count + 1, 32):
        if not used[start : start + asked.count].any():
            return start, ""
    held = ", ".join(f"{one.count} from {one.start}" for one in memory.pieces[asked.blocks[0]])
    own = f"in use: {held or 'none of its own'}"
    others = f"; others by block {', '.join(sorted(names))} on its multiprocessor" if names else ""
    return None, f"{asked.count} columns of tensor memory to be released ({own}{others}),"


def _wait_for_others(memory: TensorMemory) -> list[_Asked]:
    """What blocks wait for. It may be other waves that release it, or blocks that end."""
    wave = memory.wave
    found: Any = wave.resources.get(_FREED)
    if found is None:
        found = wave.resources[_FREED] = []

        def look() -> bool:
            asked: list[_Asked] = found
            if not any(_free_columns(memory, one)[0] is not None for one in asked):
                return False
            asked.clear()
            wave.wake(_FREED)
            return True

        wave.at_standstill.append(look)
    result: list[_Asked] = found
    return result


def _check_count(memory: TensorMemory, lane: int, count: int, instruction: Instruction) -> None:
    if count not in _SIZES:
        raise memory.failure(
            lane,
            "names a number of columns that cannot be allocated",
            instruction,
            got=count,
            expected="a power of two from 32 to 512",
        )


def _tell_forgotten(memory: TensorMemory, block: int, start: int, count: int) -> None:
    """Tells the observer that cells hold nothing of meaning any more."""
    observer = memory.wave.observer
    if observer is not None:
        lanes = np.arange(128)
        offsets = memory.offsets(block, lanes, np.full(128, start))
        observer.forget_contents(SPACE, offsets, 4 * count)
    fences = ThreadFences.of(memory.wave)
    if fences is not None:
        fences.forget(block, start, count)


def _aligned_group(binder: Binder) -> int:
    if not (binder.instruction.has("sync") and binder.instruction.has("aligned")):
        raise binder.error("unknown form", expected=".sync.aligned")
    return cta_group(binder)


@instructions.register("tcgen05.dealloc", needs_warp=True)
def bind_dealloc(instruction: Instruction, binder: Binder) -> Step:
    """Releases columns: PTX ISA 9.7.16.7.1."""
    require_target(binder, TARGETS, "tensor memory")
    binder.only_modifiers("dealloc", "cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    group = _aligned_group(binder)
    binder.expect_operands(2)
    address, columns = binder.source(0, U32), binder.source(1, U32)

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        wave = lanes.wave
        memory = TensorMemory.of(wave)
        starts = uniform_of_warps(address(lanes), lanes, "addresses", instruction)
        counts = uniform_of_warps(columns(lanes), lanes, "numbers of columns", instruction)
        for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            lane = int(lanes.numbers[number * 32])
            block = int(wave.lane_block[lane])
            memory.use_group(block, group, lane, instruction)
            _check_count(memory, lane, count, instruction)
            pieces = memory.pieces[block]
            found = [one for one in pieces if (one.start, one.count) == (start, count)]
            if not found:
                held = ", ".join(f"{one.count} from {one.start:#x}" for one in pieces)
                raise memory.failure(
                    lane,
                    "releases columns that were not allocated like this",
                    instruction,
                    got=f"{count} columns from {start:#x}",
                    expected=held or "an allocation, of which there is none",
                )
            pieces.remove(found[0])
            memory.allocated[block, start : start + count] = False
            _tell_released(memory, block, lane, start, count, instruction)
            wave.progress += 1
        if wave.waiting(_FREED):
            wave.wake(_FREED)

    return step


def _tell_released(
    memory: TensorMemory, block: int, lane: int, start: int, count: int, instruction: Instruction
) -> None:
    """For the observer, columns that are released are read: what writes to them must be over."""
    from pallasite_simulator.engine.observer import Access

    observer = memory.wave.observer
    if observer is None:
        return
    lanes = np.repeat(np.arange(128), count // 4)
    columns = start + np.tile(np.arange(0, count, 4), 128)
    offsets = memory.offsets(block, lanes, columns)
    owners = np.full(len(offsets), lane)
    observer.access(Access("read", SPACE, owners, offsets, 16, instruction, False, contents=False))


@instructions.register("tcgen05.relinquish_alloc_permit", needs_warp=True)
def bind_relinquish(instruction: Instruction, binder: Binder) -> Step:
    """Gives up the right to allocate: PTX ISA 9.7.16.7.1."""
    require_target(binder, TARGETS, "tensor memory")
    binder.only_modifiers(
        "relinquish_alloc_permit", "cta_group::1", "cta_group::2", "sync", "aligned"
    )
    group = _aligned_group(binder)
    binder.expect_operands(0)

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        memory = TensorMemory.of(lanes.wave)
        for lane in lanes.numbers[::32].tolist():
            block = int(lanes.wave.lane_block[lane])
            memory.use_group(block, group, lane, instruction)
            memory.relinquished[block] = True

    return step
