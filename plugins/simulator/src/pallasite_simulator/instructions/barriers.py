"""Barriers of blocks and clusters."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder, Destination
from pallasite_simulator.engine.barriers import Reduction
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.program import WHOLE_WARP
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

instructions = InstructionSet()


def _converge(instruction: Instruction, binder: Binder) -> None:
    """Makes whole warps execute ``.aligned`` forms, as all ``bar`` instructions are."""
    if instruction.opcode == "bar" or instruction.has("aligned"):
        binder.converge_by(WHOLE_WARP)


@instructions.register("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def bind_sync(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at a barrier and waits until it is complete: PTX ISA 9.7.13.1, bar and barrier."""
    binder.only_modifiers("cta", "sync", "aligned")
    binder.expect_operands(1, 2)
    _converge(instruction, binder)
    identifier = binder.source(0, U32)
    if len(instruction.operands) == 1:

        def all_threads(lanes: Lanes) -> list[Wait] | None:
            return lanes.wave.barriers.arrive(lanes, identifier(lanes), None, instruction, True)

        return all_threads
    count = binder.source(1, U32)

    def some_threads(lanes: Lanes) -> list[Wait] | None:
        barriers = lanes.wave.barriers
        return barriers.arrive(lanes, identifier(lanes), count(lanes), instruction, True)

    return some_threads


@instructions.register("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def bind_arrive(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at a barrier without waiting: PTX ISA 9.7.13.1, bar and barrier."""
    binder.only_modifiers("cta", "arrive", "aligned")
    binder.expect_operands(2)
    _converge(instruction, binder)
    identifier, count = binder.source(0, U32), binder.source(1, U32)

    def step(lanes: Lanes) -> list[Wait] | None:
        barriers = lanes.wave.barriers
        return barriers.arrive(lanes, identifier(lanes), count(lanes), instruction, False)

    return step


@instructions.register("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def bind_reduction(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at a barrier, waits, and gets a reduction of all threads' predicates: PTX ISA
    9.7.13.1, bar and barrier."""
    binder.only_modifiers("cta", "red", "popc", "and", "or", "aligned")
    binder.expect_operands(3, 4)
    operations = [one for one in instruction.modifiers if one in ("popc", "and", "or")]
    if len(operations) != 1:
        raise binder.error("unknown reduction", expected="one of .popc, .and, .or")
    (operation,) = operations
    kind = binder.only_type("u32" if operation == "popc" else "pred")
    _converge(instruction, binder)
    write = binder.destination(0, kind)
    identifier = binder.source(1, U32)
    count = binder.source(2, U32) if len(instruction.operands) == 4 else None
    predicate = binder.source(len(instruction.operands) - 1, PRED)
    deliver = _Delivery(operation, write)

    def step(lanes: Lanes) -> list[Wait] | None:
        values = np.broadcast_to(predicate(lanes), (lanes.count,))
        return lanes.wave.barriers.arrive(
            lanes,
            identifier(lanes),
            None if count is None else count(lanes),
            instruction,
            True,
            Reduction(values, deliver),
        )

    return step


class _Delivery:
    """Writes the result of a reduction to the register of lanes."""

    def __init__(self, operation: str, write: Destination):
        self._operation = operation
        self._write = write

    def __call__(self, lanes: Lanes, values: Array) -> None:
        if self._operation == "popc":
            self._write(lanes, np.uint32(np.count_nonzero(values)))
        else:
            self._write(lanes, values.all() if self._operation == "and" else values.any())


@instructions.register("barrier.cluster.arrive")
def bind_cluster_arrive(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at the barrier of the cluster: PTX ISA 9.7.13.4, barrier.cluster."""
    binder.only_modifiers("cluster", "arrive", "release", "relaxed", "aligned")
    binder.expect_operands(0)
    if instruction.has("release", "relaxed"):
        raise binder.error("an arrival is either .release or .relaxed")
    _converge(instruction, binder)
    release = not instruction.has("relaxed")

    def step(lanes: Lanes) -> None:
        lanes.wave.barriers.cluster_arrive(lanes, instruction, release)

    return step


@instructions.register("barrier.cluster.wait")
def bind_cluster_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits at the barrier of the cluster: PTX ISA 9.7.13.4, barrier.cluster."""
    binder.only_modifiers("cluster", "wait", "acquire", "aligned")
    binder.expect_operands(0)
    _converge(instruction, binder)

    def step(lanes: Lanes) -> list[Wait] | None:
        return lanes.wave.barriers.cluster_wait(lanes, instruction)

    return step
