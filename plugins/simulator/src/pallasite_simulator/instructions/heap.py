"""Memory that kernels allocate: ``malloc`` and ``free`` of CUDA's device runtime, and the stack.

The heap is as large as CUDA's is by default, and every block of it is used once: what was freed is
not given out again. The stack of each thread holds :data:`STACK_BYTES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.program import HEAP_BYTES, STACK_BYTES
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Operand
from pallasite_simulator.types import TYPES, Array

if TYPE_CHECKING:
    from collections.abc import Callable

    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.instruction_set import Step
    from pallasite_simulator.types import PtxType, Values

    type BindResult = Callable[
        [Binder, tuple[Operand, ...], PtxType], Callable[[Lanes, Values], None]
    ]

instructions = InstructionSet()

ALIGNMENT = 16
U32, U64 = TYPES["u32"], TYPES["u64"]


def bind_malloc(binder: Binder, sources: list[Source], write: Callable[..., None]) -> Step:
    """CUDA's ``malloc(size)``: 16-byte aligned memory of the heap, or null if there is none."""
    (size,) = sources

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        heap = wave.memory.global_memory.heap
        sizes = np.broadcast_to(size(lanes), (lanes.count,)).tolist()
        found = []
        for one in sizes:
            place = heap.get("used", 0)
            if one + place > HEAP_BYTES:
                found.append(0)
                continue
            heap["used"] = -(-(place + max(one, 1)) // ALIGNMENT) * ALIGNMENT
            heap[wave.program.heap + place] = one
            found.append(wave.program.heap + place)
        write(lanes, np.array(found, np.uint64))

    return step


def bind_free(binder: Binder, sources: list[Source], write: Callable[..., None]) -> Step:
    """CUDA's ``free(address)``; null is allowed."""
    (address,) = sources
    instruction = binder.instruction

    def step(lanes: Lanes) -> None:
        heap = lanes.wave.memory.global_memory.heap
        for lane, one in enumerate(np.broadcast_to(address(lanes), (lanes.count,)).tolist()):
            if one and heap.pop(one, None) is None:
                raise SimulationError(
                    f"{lanes.wave.thread_name(int(lanes.numbers[lane]))} frees what malloc did not"
                    f" give, or what is free already, in: {instruction.text}",
                    got=f"{one:#x}",
                    location=instruction.location,
                )

    return step


# The stack ----------------------------------------------------------------------------------------


def _stack(wave: Wave) -> Array:
    """How many bytes of its stack each lane uses."""
    found = wave.resources.get("stack")
    if found is None:
        found = wave.resources["stack"] = np.zeros(wave.lane_count, np.int64)
    assert isinstance(found, np.ndarray)
    return found


@instructions.register("alloca")
def bind_alloca(instruction: Instruction, binder: Binder) -> Step:
    """Memory on the stack: PTX ISA 9.7.20.3, ``alloca.type ptr, size{, immAlign}``."""
    kind = binder.only_type("u32", "u64")
    binder.expect_operands(2, 3)
    write, size = binder.destination(0, kind), binder.source(1, kind)
    alignment = 8
    if len(instruction.operands) == 3:
        operand = binder.operand(2)
        if not isinstance(operand, Immediate) or operand.value not in (1, 2, 4, 8, 16, 32):
            raise binder.error("wrong alignment", got=operand, expected="a power of two up to 32")
        alignment = operand.value

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        used = _stack(wave)
        start = -(-used[lanes.index] // alignment) * alignment
        end = start + np.asarray(size(lanes)).astype(np.int64)
        over = end > STACK_BYTES
        if over.any():
            raise SimulationError(
                f"{wave.thread_name(int(lanes.numbers[over][0]))} overflows its stack,"
                f" in: {instruction.text}",
                got=f"{int(end.max())} bytes",
                expected=f"at most {STACK_BYTES}",
                location=instruction.location,
            )
        used[lanes.index] = end
        write(lanes, (start + wave.program.stack).astype(kind.dtype))

    return step


@instructions.register("stacksave")
def bind_stacksave(instruction: Instruction, binder: Binder) -> Step:
    """The stack pointer: PTX ISA 9.7.20.1, ``stacksave.type d``."""
    kind = binder.only_type("u32", "u64")
    binder.expect_operands(1)
    write = binder.destination(0, kind)
    return lambda lanes: write(lanes, _stack(lanes.wave)[lanes.index].astype(kind.dtype))


@instructions.register("stackrestore")
def bind_stackrestore(instruction: Instruction, binder: Binder) -> Step:
    """Frees what was allocated on the stack since: PTX ISA 9.7.20.2, ``stackrestore.type a``."""
    kind = binder.only_type("u32", "u64")
    binder.expect_operands(1)
    saved = binder.source(0, kind)

    def step(lanes: Lanes) -> None:
        _stack(lanes.wave)[lanes.index] = np.asarray(saved(lanes)).astype(np.int64)

    return step
