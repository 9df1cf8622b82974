"""Loads and stores of tensor memory: PTX ISA 9.7.16.8, tcgen05.ld and tcgen05.st.

A warp moves pieces of its own 32 lanes. Which lane and column each register of each thread has is
the subject of PTX ISA 9.7.16.2.3.1.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallasite_blackwell.simulation.events import tell_move
from pallasite_blackwell.simulation.tensor_memory import (
    BLOCK_CELLS,
    COLUMNS,
    TARGETS,
    WARP_LANES,
    TensorMemory,
    require_target,
    uniform_of_warps,
)
from pallasite_simulator.binder import U32, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Immediate, Instruction
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

_REGISTERS = {"16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1}
"""Registers of a thread for ``.x1``."""

_MOST = 128
"""Registers of a thread."""

_REDUCTION_TARGETS = frozenset(("sm_101a", "sm_103a", "sm_103f", "sm_110a", "sm_110f"))
"""Those with ``tcgen05.ld.red``."""

CANONICAL_NAN = np.float32(np.uint32(0x7FFFFFFF).view(np.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What the name says.

    Attributes:
      shape: of the piece.
      registers: of each thread.
      half: whether a register has the lower 16 bits of two columns.
      split: columns between the two halves of ``16x32bx2``.
    """

    shape: str
    registers: int
    half: bool
    split: int = 0


@functools.lru_cache(maxsize=512)
def places(form: Form) -> tuple[Array, Array]:
    """The lane and the column of each register, relative to the address: arrays of shape
    (registers, 32 threads). Of a register with two columns it is the first."""
    thread, register = np.arange(32)[None, :], np.arange(form.registers)[:, None]
    if form.shape == "32x32b":
        lane, column = thread, register
    elif form.shape == "16x32bx2":
        lane, column = thread % 16, register
    elif form.shape == "16x64b":
        lane, column = thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 2 * register
    elif form.shape == "16x128b":
        lane, column = thread // 4 + 8 * (register % 2), thread % 4 + 4 * (register // 2)
    else:
        lane = thread // 4 + 8 * (register // 2 % 2)
        column = register % 2 + 2 * (thread % 4) + 8 * (register // 4)
    column = column * (1 + form.half)
    if form.shape == "16x32bx2":
        column = column + form.split * (thread // 16)
    shape = (form.registers, 32)
    return np.broadcast_to(lane, shape), np.broadcast_to(column, shape)


def _parse(binder: Binder, packing: str, others: tuple[str, ...]) -> Form:
    """Takes the name apart.

    Raises:
      PtxError: there is no such instruction.
    """
    words = list(binder.instruction.modifiers)
    shapes = [one for one in words if one in _REGISTERS]
    counts = [one for one in words if one[:1] == "x" and one[1:].isdigit()]
    if len(shapes) != 1 or len(counts) != 1:
        raise binder.error(
            "unknown form",
            expected="one shape of " + ", ".join(_REGISTERS) + " and a number from .x1 to .x128",
        )
    known = {*shapes, *counts, "ld", "st", "sync", "aligned", "b32", packing, *others}
    unknown = [one for one in words if one not in known]
    if unknown or not {"sync", "aligned"} <= set(words):
        raise binder.error(f"unknown modifier .{unknown[0]}" if unknown else "unknown form")
    shape, count = shapes[0], int(counts[0][1:])
    registers = _REGISTERS[shape] * count
    if count & (count - 1) or not 1 <= count <= _MOST or registers > _MOST:
        raise binder.error(
            f"there is no such number for .{shape}",
            got=counts[0],
            expected=f"a power of two up to .x{_MOST // _REGISTERS[shape]}",
        )
    return Form(shape, registers, packing in words)


def _split(binder: Binder, form: Form, number: int) -> Form:
    """Adds the offset between the halves of ``16x32bx2``, the operand of this number."""
    if form.shape != "16x32bx2":
        binder.expect_operands(number)
        return form
    binder.expect_operands(number + 1)
    operand = binder.operand(number)
    if not isinstance(operand, Immediate):
        raise binder.error("the offset between the halves must be a constant", got=operand)
    return dataclasses.replace(form, split=operand.value)


class _Access:
    """Where the warps of some lanes find their cells."""

    def __init__(self, instruction: Instruction, form: Form, address: Source, verb: str):
        self._instruction = instruction
        self.form = form
        self._address = address
        self._verb = verb
        self._lanes, self._columns = places(form)
        self._relative = self._lanes * COLUMNS + self._columns
        self._extent = int(self._columns.max()) + form.half
        self._first = int(self._columns.min())
        self._rows = int(self._lanes.max())

    def cells(self, lanes: Lanes) -> tuple[TensorMemory, Array]:
        """Numbers of cells, of shape (registers, lanes).

        Raises:
          SimulationError: beyond what the warp can reach, or not allocated.
        """
        instruction, wave = self._instruction, lanes.wave
        check_whole_warps(lanes, instruction)
        memory = TensorMemory.of(wave)
        addresses = self._address(lanes)
        own = uniform_of_warps(addresses, lanes, "addresses", instruction).astype(np.int64)
        first = lanes.numbers[::32]
        blocks = wave.lane_block[first]
        quarter = wave.lane_thread[first] // 32 % 4
        row, column = own >> 16, own & 0xFFFF
        inside = row % WARP_LANES
        wrong = (row // WARP_LANES != 0) & (row // WARP_LANES != quarter)
        wrong |= inside + self._rows >= WARP_LANES
        if wrong.any():
            number = int(np.flatnonzero(wrong)[0])
            start = int(quarter[number]) * WARP_LANES
            raise memory.failure(
                int(first[number]),
                f"{self._verb} lanes of tensor memory that its warp cannot reach",
                instruction,
                got=f"{self._rows + 1} lanes from lane {int(row[number])}",
                expected=f"lanes {start} to {start + WARP_LANES - 1} (or 0 to 31, relative to"
                " them)",
            )
        for block, start in sorted(set(zip(blocks.tolist(), column.tolist(), strict=True))):
            number = int(np.flatnonzero((blocks == block) & (column == start))[0])
            low, high = start + self._first, start + self._extent
            lane = int(first[number])
            memory.check_columns(block, low, high, lane, self._verb, instruction)
        base = blocks * BLOCK_CELLS + (quarter * WARP_LANES + inside) * COLUMNS + column
        cells = base[None, :, None] + self._relative[:, None, :]
        return memory, cells.reshape(len(self._relative), -1)


@instructions.register("tcgen05.ld", needs_warp=True)
def bind_load(instruction: Instruction, binder: Binder) -> Step:
    """Loads from tensor memory: PTX ISA 9.7.16.8.1."""
    require_target(binder, TARGETS, "tensor memory")
    if instruction.has("red"):
        return _bind_reducing(instruction, binder)
    form = _split(binder, _parse(binder, "pack::16b", ()), 2)
    registers = binder.elements(0)
    _check_registers(binder, form, len(registers))
    writes = [binder.destination(one, U32) for one in registers]
    access = _Access(instruction, form, binder.address(1), "loads")

    def step(lanes: Lanes) -> None:
        memory, cells = access.cells(lanes)
        values = _load(memory, cells, form.half)
        tell_move(lanes, memory, "read", cells, form.half, instruction)
        for write, row in zip(writes, values, strict=True):
            write(lanes, row)

    return step


def _check_registers(binder: Binder, form: Form, given: int) -> None:
    if given != form.registers:
        raise binder.error("wrong number of registers", got=given, expected=str(form.registers))


def _load(memory: TensorMemory, cells: Array, half: bool) -> Array:
    """The values of registers; each row is an array of its own."""
    values: Array = memory.cells[cells]
    memory.count("read", values.size * (1 + half))
    if half:
        values &= np.uint32(0xFFFF)
        values |= memory.cells[cells + 1] << np.uint32(16)
    return values


def _bind_reducing(instruction: Instruction, binder: Binder) -> Step:
    """``tcgen05.ld.red``: also gives each thread the minimum or maximum of what it loads."""
    require_target(binder, _REDUCTION_TARGETS, "tcgen05.ld.red")
    form = _parse(binder, "", ("red", "min", "max", "abs", "NaN", "f32", "u32", "s32"))
    form = _split(binder, form, 3)
    words = instruction.modifiers
    kinds = [one for one in words if one in ("f32", "u32", "s32")]
    operations = [one for one in words if one in ("min", "max")]
    if len(kinds) != 1 or len(operations) != 1 or form.shape not in ("32x32b", "16x32bx2"):
        raise binder.error(
            "unknown form",
            expected="tcgen05.ld.red of .32x32b or .16x32bx2 with .min or .max of a type",
        )
    absolute, propagate = "abs" in words, "NaN" in words
    if form.registers < 2 or (kinds[0] != "f32" and (absolute or propagate)):
        raise binder.error("there is no such form of tcgen05.ld.red")
    kind = TYPES[kinds[0]]
    registers = binder.elements(0)
    _check_registers(binder, form, len(registers))
    writes = [binder.destination(one, U32) for one in registers]
    reduced = binder.destination(1, TYPES["b32"])
    access = _Access(instruction, form, binder.address(2), "loads")

    def step(lanes: Lanes) -> None:
        memory, cells = access.cells(lanes)
        values = _load(memory, cells, False)
        tell_move(lanes, memory, "read", cells, False, instruction)
        reduced(lanes, _reduce(values.view(kind.dtype), operations[0], absolute, propagate))
        for write, row in zip(writes, values, strict=True):
            write(lanes, row)

    return step


def _reduce(values: Array, operation: str, absolute: bool, propagate: bool) -> Array:
    if values.dtype != np.float32:
        found: Array = getattr(values, operation)(axis=0)
        return found.view(np.uint32)
    if absolute:
        values = np.abs(values)
    name = {"min": ("fmin", "minimum"), "max": ("fmax", "maximum")}[operation][propagate]
    result: Array = getattr(np, name).reduce(values, axis=0)
    result[np.isnan(result)] = CANONICAL_NAN
    return result.view(np.uint32)


@instructions.register("tcgen05.st", needs_warp=True)
def bind_store(instruction: Instruction, binder: Binder) -> Step:
    """Stores to tensor memory: PTX ISA 9.7.16.8.2."""
    require_target(binder, TARGETS, "tensor memory")
    form = _parse(binder, "unpack::16b", ())
    if form.shape == "16x32bx2":
        # The offset is between the address and the values.
        binder.expect_operands(3)
        offset = binder.operand(1)
        if not isinstance(offset, Immediate):
            raise binder.error("the offset between the halves must be a constant", got=offset)
        form = dataclasses.replace(form, split=offset.value)
        registers = binder.elements(2)
    else:
        binder.expect_operands(2)
        registers = binder.elements(1)
    _check_registers(binder, form, len(registers))
    reads = [binder.source(one, U32) for one in registers]
    access = _Access(instruction, form, binder.address(0), "stores to")

    def step(lanes: Lanes) -> None:
        memory, cells = access.cells(lanes)
        tell_move(lanes, memory, "write", cells, form.half, instruction)
        values = np.empty(cells.shape, np.uint32)
        for number, read in enumerate(reads):
            values[number] = read(lanes)
        memory.count("write", values.size * (1 + form.half))
        if form.half:
            memory.cells[cells + 1] = values >> np.uint32(16)
            values &= np.uint32(0xFFFF)
        memory.cells[cells] = values
        lanes.wave.progress += 1

    return step
