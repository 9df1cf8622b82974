"""Cluster launch control: PTX ISA 9.7.13.17, clusterlaunchcontrol.try_cancel and query_cancel.

A response has the index of the first block of the cluster in its first three words, and in the
fourth whether there is one; PTX leaves that open.
"""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers
from pallasite_simulator.engine.transfers import Transfer
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import bind_address
from pallasite_simulator.instructions.asynchronous import COMPLETION, failure, shared_addresses
from pallasite_simulator.instructions.mbarriers import bind_barrier
from pallasite_simulator.ptx.syntax import Instruction, Sink, Vector
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

_BYTES = 16
_EVERYBODY = "multicast::cluster::all"


def _require_blackwell(binder: Binder) -> None:
    target = binder.program.module.target
    digits = target.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) < 100:
        raise binder.error(
            "clusterlaunchcontrol needs a later target", got=target, expected="sm_100 or later"
        )


@instructions.register("clusterlaunchcontrol.try_cancel")
def bind_try_cancel(instruction: Instruction, binder: Binder) -> Step:
    """Asks for the work of a cluster that has not begun: PTX ISA 9.7.13.17.1."""
    _require_blackwell(binder)
    binder.program.cancels = True
    binder.only_modifiers("try_cancel", "async", "shared::cta", COMPLETION, _EVERYBODY, "b128")
    for word in ("async", COMPLETION, "b128"):
        if not instruction.has(word):
            raise binder.error("unknown form", expected=f".{word}")
    binder.expect_operands(2)
    named = "shared::cta" if instruction.has("shared::cta") else ""
    space, address = bind_address(binder, 0, named)
    locate = bind_barrier(binder, 1, ("shared::cta",), space=named, local=False)
    everybody = instruction.has(_EVERYBODY)

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        memory = wave.memory
        slots = locate(lanes)
        addresses = np.broadcast_to(address(lanes), (lanes.count,))
        if space == "generic":
            addresses = shared_addresses(lanes, addresses, instruction)
        low, high = int(addresses.min()), int(addresses.max())
        offsets = memory.shared_offsets(lanes, addresses, _BYTES, instruction, low, high)
        if (offsets % _BYTES).any():
            raise failure(
                wave,
                int(lanes.numbers[0]),
                "wants a response at a misaligned address",
                instruction,
                got=memory.describe("shared", int(offsets[0])),
                expected="a multiple of 16",
            )
        transfer = Transfer(lanes, instruction)
        numbers, targets = [], []
        for number, lane in enumerate(lanes.numbers.tolist()):
            blocks = np.array([int(offsets[number]) // memory.shared_stride])
            if everybody:
                first = int(wave.lane_cluster_block[lane])
                blocks = first + np.arange(wave.cluster_size)
            response = _response(wave.cancel_cluster(), wave.geometry.block_index)
            within = int(offsets[number]) % memory.shared_stride
            for block in blocks.tolist():
                start = block * memory.shared_stride + within
                memory.regions["shared"].bytes[start : start + _BYTES] = response
                transfer.access("write", "shared", np.array([start]), _BYTES, lane)
                numbers.append(lane)
                stride = memory.shared_stride // 8
                targets.append(block * stride + int(slots[number]) % stride)
        transfer.tell()
        amounts = np.full(len(numbers), _BYTES)
        transfer.complete(
            mbarriers(wave), np.array(numbers), np.array(targets), amounts, instruction
        )

    return step


def _response(block: int | None, index: object) -> Array:
    words = np.zeros(4, np.uint32)
    if block is not None:
        words[:3] = index(block)  # type: ignore[operator]
        words[3] = 1
    return words.view(np.uint8)


@instructions.register("clusterlaunchcontrol.query_cancel")
def bind_query_cancel(instruction: Instruction, binder: Binder) -> Step:
    """Reads a response: PTX ISA 9.7.13.17.2."""
    _require_blackwell(binder)
    binder.expect_operands(2)
    handle = binder.source(1, TYPES["b128"])

    def words(lanes: Lanes) -> Array:
        held = np.ascontiguousarray(np.broadcast_to(handle(lanes), (lanes.count, 2)))
        return held.view(np.uint32)

    if instruction.has("is_canceled"):
        binder.only_modifiers("query_cancel", "is_canceled", "pred", "b128")
        answer = binder.destination(0, PRED)
        return lambda lanes: answer(lanes, words(lanes)[:, 3] == 1)
    for number, name in enumerate("xyz"):
        if instruction.has(f"get_first_ctaid::{name}"):
            binder.only_modifiers("query_cancel", f"get_first_ctaid::{name}", "b32", "b128")
            write = binder.destination(0, U32)
            return lambda lanes: write(lanes, words(lanes)[:, number].copy())
    if not instruction.has("get_first_ctaid"):
        raise binder.error("unknown form", expected=".is_canceled or .get_first_ctaid")
    binder.only_modifiers("query_cancel", "get_first_ctaid", "v4", "b32", "b128")
    target = binder.operand(0)
    if not isinstance(target, Vector) or len(target.elements) != 4:
        raise binder.error("the index of a block takes a vector of four registers")
    writes = [
        (number, binder.destination(one, U32))
        for number, one in enumerate(target.elements)
        if not isinstance(one, Sink)
    ]

    def step(lanes: Lanes) -> None:
        held = words(lanes)
        for number, write in writes:
            write(lanes, held[:, number].copy())

    return step
