"""What asynchronous copies and reductions have in common: PTX ISA 9.7.9.25."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.grouping import Groups
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import MBarriers
from pallasite_simulator.engine.observer import AsyncOperation, Observer
from pallasite_simulator.engine.transfers import async_groups
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import Step
from pallasite_simulator.instructions.updates import update_of
from pallasite_simulator.ptx.syntax import Immediate, Instruction
from pallasite_simulator.types import Array, PtxType

COMPLETION = "mbarrier::complete_tx::bytes"
GROUP = "bulk_group"
MULTICAST = "multicast::cluster"

type Combine = Callable[[Array, Array], Array]
"""From what is in memory and values, what is there then."""


def failure(
    wave: Wave,
    lane: int,
    what: str,
    instruction: Instruction,
    got: object = None,
    expected: str | None = None,
) -> SimulationError:
    """An error about what a lane does, to be raised."""
    return SimulationError(
        f"{wave.thread_name(lane)} {what}, in: {instruction.text}",
        got=got,
        expected=expected,
        location=instruction.location,
    )


def shared_addresses(lanes: Lanes, addresses: Array, instruction: Instruction) -> Array:
    """Shared addresses from generic ones.

    Raises:
      SimulationError: one is not in shared memory.
    """
    result: Array | None = None
    for name, mask, inner in lanes.wave.memory.resolve(lanes, addresses):
        if name != "shared":
            lane = int(lanes.numbers[0] if mask is None else lanes.numbers[mask][0])
            raise failure(
                lanes.wave,
                lane,
                "uses an address that is not in shared memory",
                instruction,
                got=f"an address of {name} memory",
            )
        result = inner
    assert result is not None
    return result


def check_writable(lanes: Lanes, offsets: Array, instruction: Instruction) -> None:
    """Raises :class:`SimulationError` if one of the offsets in global memory cannot be written."""
    memory = lanes.wave.memory
    wrong = memory.global_memory.read_only(offsets)
    if wrong is not None:
        raise failure(
            lanes.wave,
            int(lanes.numbers[wrong][0]),
            "writes to read-only memory",
            instruction,
            got=memory.describe("global", int(offsets[wrong][0])),
        )


def reduction_of(operation: str, kind: PtxType) -> Combine:
    """What asynchronous reductions to global memory compute, from what is there and values.

    Sums of ``f32`` keep subnormal numbers, as on an H200, where ``red.global`` does not.
    """
    space = "shared" if kind.name == "f32" else "global"
    return update_of(operation, kind, space).combine


def tell_completion(
    observer: Observer,
    barriers: MBarriers,
    operation: AsyncOperation,
    numbers: Array,
    slots: Array,
) -> None:
    """Tells that what lanes began with an operation completes with the phases of barriers."""
    for lanes, slot in Groups(slots).split(numbers):
        observer.complete_on(operation, barriers.key(slot), lanes)


def commit_step(kind: str) -> Step:
    """A step that commits operations of a kind to a group."""

    def step(lanes: Lanes) -> None:
        if lanes.wave.observer is not None:
            async_groups(lanes.wave, kind).commit(lanes)

    return step


def wait_step(kind: str, allowed: int, *, reads_only: bool) -> Step:
    """A step that waits until at most ``allowed`` groups are not complete."""

    def step(lanes: Lanes) -> None:
        if lanes.wave.observer is not None:
            async_groups(lanes.wave, kind).wait(lanes, allowed, reads_only=reads_only)

    return step


def group_count(binder: Binder) -> int:
    """The constant number of groups of a wait."""
    binder.expect_operands(1)
    operand = binder.operand(0)
    if not isinstance(operand, Immediate) or operand.value < 0:
        raise binder.error("the number of groups must be a constant", got=operand)
    return operand.value


def multicast_blocks(lanes: Lanes, masks: Array, instruction: Instruction) -> list[Array]:
    """Numbers in the wave of the blocks that each lane's mask names (PTX ISA 9.7.9.25.4.1).

    Raises:
      SimulationError: a mask names no block, or blocks beyond the cluster.
    """
    wave = lanes.wave
    first = lanes.of(wave.lane_cluster_block)
    wrong = (masks == 0) | (masks >> wave.cluster_size != 0)
    if wrong.any():
        raise failure(
            wave,
            int(lanes.numbers[wrong][0]),
            "copies to blocks that the cluster does not have",
            instruction,
            got=f"mask {int(masks[wrong][0]):#06x}",
            expected=f"at least one of {wave.cluster_size} bits",
        )
    bits = np.arange(wave.cluster_size)
    return [
        block + bits[(mask >> bits) & 1 != 0]
        for block, mask in zip(first.tolist(), masks.tolist(), strict=True)
    ]


def check_barrier_block(
    lanes: Lanes, destinations: Array, slots: Array, instruction: Instruction
) -> None:
    """Raises :class:`SimulationError` unless barriers are in the blocks that are copied to."""
    wave = lanes.wave
    elsewhere = slots * 8 // wave.memory.shared_stride != destinations
    if elsewhere.any():
        raise failure(
            wave,
            int(lanes.numbers[elsewhere][0]),
            "names an mbarrier of another block than the one that it copies to",
            instruction,
            got=wave.memory.describe("shared", int(slots[elsewhere][0]) * 8),
            expected=f"block {wave.block_name(int(destinations[elsewhere][0]))}",
        )


def count_bytes(wave: Wave, count: int) -> None:
    """Counts bytes that bulk copies move."""
    wave.counters["tma bytes"] = wave.counters.get("tma bytes", 0) + count


def check_own_block(lanes: Lanes, offsets: Array, instruction: Instruction) -> None:
    """Raises :class:`SimulationError` unless shared memory is that of the lanes' own blocks, as
    ``.shared::cta`` says."""
    wave = lanes.wave
    foreign = offsets // wave.memory.shared_stride != lanes.of(wave.lane_block)
    if foreign.any():
        raise failure(
            wave,
            int(lanes.numbers[foreign][0]),
            "uses an address of another block's shared memory as .shared::cta",
            instruction,
            got=wave.memory.describe("shared", int(offsets[foreign][0])),
        )
