"""What orders operations on tensor memory: PTX ISA 9.7.16.6, 9.7.16.11 and 9.7.16.12.

All operations take effect when they are issued, so these matter to an observer only, except for
the arrivals of ``tcgen05.commit``.
"""

from __future__ import annotations

import numpy as np

from pallasite_blackwell.simulation.events import Events
from pallasite_blackwell.simulation.tensor_memory import (
    TARGETS,
    TensorMemory,
    cta_group,
    require_target,
)
from pallasite_blackwell.simulation.thread_fences import ThreadFences
from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.asynchronous import multicast_blocks
from pallasite_simulator.instructions.mbarriers import bind_barrier
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

_MULTICAST = "multicast::cluster"


@instructions.register("tcgen05.wait", needs_warp=True)
def bind_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits for loads or stores of the warp: PTX ISA 9.7.16.8.3."""
    require_target(binder, TARGETS, "tensor memory")
    words = instruction.modifiers
    if sorted(words[1:]) not in (["aligned", "ld", "sync"], ["aligned", "st", "sync"]):
        waits = [one for one in words if one.startswith("wait::")]
        if words[:1] != ("wait",) or waits:
            raise binder.error("unknown form", expected="tcgen05.wait::ld or ::st.sync.aligned")
    return _wait(instruction, binder)


@instructions.register("tcgen05.wait::ld", "tcgen05.wait::st", needs_warp=True)
def bind_named_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits for loads or stores of the warp: PTX ISA 9.7.16.8.3."""
    require_target(binder, TARGETS, "tensor memory")
    if instruction.modifiers[1:] != ("sync", "aligned"):
        raise binder.error("unknown form", expected=".sync.aligned")
    return _wait(instruction, binder)


def _wait(instruction: Instruction, binder: Binder) -> Step:
    binder.expect_operands(0)
    kind = "read" if instruction.modifiers[0].endswith("ld") else "write"

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        if lanes.wave.observer is not None:
            Events.of(lanes.wave).wait(lanes, kind)

    return step


@instructions.register("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def bind_fence(instruction: Instruction, binder: Binder) -> Step:
    """Orders operations with those of other threads: PTX ISA 9.7.16.11.1."""
    require_target(binder, TARGETS, "tensor memory")
    if len(instruction.modifiers) != 1:
        raise binder.error("unknown form")
    binder.expect_operands(0)
    name = instruction.modifiers[0].removeprefix("fence::")

    def step(lanes: Lanes) -> None:
        observer = lanes.wave.observer
        if observer is not None:
            observer.proxy_fence(lanes.numbers, f"tensor::{name}")
        fences = ThreadFences.of(lanes.wave)
        if fences is not None:
            fences.fenced(lanes.numbers, name.removesuffix("_thread_sync"))

    return step


@instructions.register("tcgen05.commit")
def bind_commit(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at an mbarrier when all that the thread began is over: PTX ISA 9.7.16.12.1."""
    require_target(binder, TARGETS, "tensor memory")
    group = cta_group(binder)
    binder.only_modifiers(
        "commit",
        f"cta_group::{group}",
        "mbarrier::arrive::one",
        "shared::cluster",
        _MULTICAST,
        "b64",
    )
    if not instruction.has("mbarrier::arrive::one") or not instruction.has("b64"):
        raise binder.error("unknown form", expected=".mbarrier::arrive::one and .b64")
    multicast = instruction.has(_MULTICAST)
    binder.expect_operands(1 + multicast)
    space = "shared::cluster" if instruction.has("shared::cluster") else ""
    locate = bind_barrier(binder, 0, ("shared::cluster",), space=space, local=False)
    masks = binder.source(1, TYPES["u16"]) if multicast else None

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        slots = locate(lanes)
        memory = TensorMemory.of(wave)
        for lane in lanes.numbers.tolist():
            memory.use_group(int(wave.lane_block[lane]), group, lane, instruction)
        if masks is None:
            _arrive(lanes, slots, instruction)
            return
        own = np.broadcast_to(masks(lanes), (lanes.count,)).astype(np.int64)
        blocks = multicast_blocks(lanes, own, instruction)
        stride = wave.memory.shared_stride // 8
        numbers = np.repeat(lanes.numbers, [len(one) for one in blocks])
        targets = np.concatenate(blocks) * stride + np.repeat(
            slots % stride, [len(one) for one in blocks]
        )
        _tell(lanes, numbers, targets)
        for lane, slot in zip(numbers.tolist(), targets.tolist(), strict=True):
            one = wave.lanes(np.array([lane]))
            _count(one, np.array([slot]), instruction)

    return step


def _arrive(lanes: Lanes, slots: Array, instruction: Instruction) -> None:
    _tell(lanes, lanes.numbers, slots)
    _count(lanes, slots, instruction)


def _count(lanes: Lanes, slots: Array, instruction: Instruction) -> None:
    """Counts an arrival for each lane; it says nothing of what the lanes did themselves."""
    observer, lanes.wave.observer = lanes.wave.observer, None
    try:
        mbarriers(lanes.wave).arrive(lanes, slots, np.int64(1), instruction)
    finally:
        lanes.wave.observer = observer


def _tell(lanes: Lanes, numbers: Array, slots: Array) -> None:
    wave = lanes.wave
    observer = wave.observer
    if observer is None:
        return
    fences = ThreadFences.of(wave)
    if fences is not None:
        fences.fenced(lanes.numbers, "before")
    barriers, events = mbarriers(wave), Events.of(wave)
    for lane in lanes.numbers.tolist():
        chosen = numbers == lane
        for operation in events.commit(lane):
            mine = slots[chosen]
            observer.completions(operation, np.full(len(mine), lane), mine, barriers.phase[mine])
