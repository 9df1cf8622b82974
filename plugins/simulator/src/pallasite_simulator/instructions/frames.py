"""What :mod:`pallasite_simulator.engine.inline` makes of calls that it cannot inline.

Functions that call themselves, or whose address is taken, exist once. Each call of one keeps aside
the registers and parameters that the call before it uses, for lanes at different depths.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.binder import U64, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Register, Symbol, Vector
from pallasite_simulator.types import Array

instructions = InstructionSet()

DEEPEST = 1000
"""How many calls may be inside one another."""


@dataclasses.dataclass
class _Kept:
    """What one call of a function keeps aside: arrays over all lanes, of which some are valid."""

    registers: dict[int, Array]
    undefined: dict[int, Array]
    parameters: list[Array]


class _Frames:
    """Calls of one function in a wave.

    Attributes:
      depth: for each lane, in how many calls it is.
      kept: what each of them keeps.
    """

    def __init__(self, wave: Wave):
        self.depth = np.zeros(wave.lane_count, np.int64)
        self.kept: list[_Kept] = []


class _Function:
    """A function that has frames, as the operands of its ``@push`` and ``@pop`` say it."""

    def __init__(self, binder: Binder):
        instruction = binder.instruction
        name, registers, parameters, frame, size = instruction.operands
        assert isinstance(name, Symbol) and isinstance(frame, Register)
        assert isinstance(registers, Vector) and isinstance(parameters, Vector)
        assert isinstance(size, Immediate)
        program = binder.program
        self.instruction = instruction
        self.name = name.name
        self.base = program.frames
        self.size = int(size.value)
        self.set_frame = binder.destination(frame, U64)
        self.registers = [
            program.register(one) for one in registers.elements if isinstance(one, Register)
        ]
        self.parameters: list[tuple[int, int]] = []
        for one in parameters.elements:
            assert isinstance(one, Symbol)
            # The offset of the symbol says how many bytes there are.
            address = program.symbol(Symbol(one.name), instruction)[1]
            self.parameters.append((address, one.offset))

    def frames(self, wave: Wave) -> _Frames:
        """The calls of the function so far."""
        found = wave.resources.get(("frames", self.name))
        if found is None:
            found = wave.resources["frames", self.name] = _Frames(wave)
        assert isinstance(found, _Frames)
        return found

    def memory(self, wave: Wave) -> list[Array]:
        """The bytes of its parameters: a row for each lane."""
        memory = wave.memory
        rows = memory.regions["local"].bytes[: memory.local_stride * wave.lane_count]
        rows = rows.reshape(wave.lane_count, memory.local_stride)
        return [rows[:, start : start + size] for start, size in self.parameters]


def _used(wave: Wave) -> Array:
    """For each lane, how many bytes its frames have, and in how many calls it is."""
    found = wave.resources.get("stacks")
    if found is None:
        found = wave.resources["stacks"] = np.zeros((2, wave.lane_count), np.int64)
    assert isinstance(found, np.ndarray)
    return found


@instructions.register("@push")
def bind_push(instruction: Instruction, binder: Binder) -> Step:
    """Begins a call: keeps what the function holds, and gives it a frame in local memory."""
    function, limit = _Function(binder), binder.program.frame_bytes

    def step(lanes: Lanes) -> None:
        wave, numbers = lanes.wave, lanes.numbers
        frames, used = function.frames(wave), _used(wave)
        bytes_, calls = used[:, numbers]
        deep = (calls >= DEEPEST) | (bytes_ + function.size > limit)
        if deep.any():
            lane = int(np.flatnonzero(deep)[0])
            raise SimulationError(
                f"{wave.thread_name(int(numbers[lane]))} has no stack left for a call of"
                f" {function.name!r}",
                got=f"{calls[lane]} calls inside one another, {bytes_[lane]} bytes of local memory",
                expected=f"at most {DEEPEST} calls and {limit} bytes",
                hint="look for a recursion without an end",
                location=instruction.location,
            )
        for depth in np.unique(frames.depth[numbers]):
            if depth == len(frames.kept):
                frames.kept.append(_Kept({}, {}, []))
            _keep(function, wave, frames.kept[depth], numbers[frames.depth[numbers] == depth])
        frames.depth[numbers] += 1
        function.set_frame(lanes, (function.base + bytes_).astype(np.uint64))
        used[0, numbers] += function.size
        used[1, numbers] += 1

    return step


def _keep(function: _Function, wave: Wave, kept: _Kept, numbers: Array) -> None:
    for register in function.registers:
        held = wave.registers[register]
        if held is None:
            continue
        if register not in kept.registers:
            kept.registers[register] = wave.new_register(register)
            kept.undefined[register] = wave.new_undefined(register)
        kept.registers[register][numbers] = held[numbers]
        undefined = wave.undefined.get(register)
        kept.undefined[register][numbers] = 0 if undefined is None else undefined[numbers]
    now = function.memory(wave)
    if not kept.parameters:
        kept.parameters = [np.zeros_like(one) for one in now]
    for target, source in zip(kept.parameters, now, strict=True):
        target[numbers] = source[numbers]


@instructions.register("@pop")
def bind_pop(instruction: Instruction, binder: Binder) -> Step:
    """Ends a call: the function holds again what it held before."""
    function = _Function(binder)

    def step(lanes: Lanes) -> None:
        wave, numbers = lanes.wave, lanes.numbers
        frames, used = function.frames(wave), _used(wave)
        used[0, numbers] -= function.size
        used[1, numbers] -= 1
        frames.depth[numbers] -= 1
        for depth in np.unique(frames.depth[numbers]):
            _restore(function, wave, frames.kept[depth], numbers[frames.depth[numbers] == depth])

    return step


def _restore(function: _Function, wave: Wave, kept: _Kept, numbers: Array) -> None:
    some = wave.lanes(numbers)
    for register, held in kept.registers.items():
        some.put(register, held[numbers])
        undefined = kept.undefined[register][numbers]
        if undefined.any():
            if register not in wave.undefined:
                wave.undefined[register] = np.zeros_like(kept.undefined[register])
            wave.undefined[register][numbers] = undefined
            wave.defined.pop(register, None)
    for target, source in zip(function.memory(wave), kept.parameters, strict=True):
        target[numbers] = source[numbers]


@instructions.register("@unknown")
def bind_unknown(instruction: Instruction, binder: Binder) -> Step:
    """A call of an address that is no function's which it could mean."""
    address = binder.source(0, U64)

    def step(lanes: Lanes) -> None:
        found = int(np.broadcast_to(address(lanes), (lanes.count,))[0])
        raise SimulationError(
            f"{lanes.wave.thread_name(int(lanes.numbers[0]))} calls an address where there is no"
            f" function with such parameters and results, in: {instruction.text}",
            got=f"{found:#x}",
            location=instruction.location,
        )

    return step
