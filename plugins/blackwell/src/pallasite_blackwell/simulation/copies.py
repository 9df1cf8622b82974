"""Copies from shared memory to tensor memory, and within it: PTX ISA 9.7.16.9, tcgen05.cp and
tcgen05.shift."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_blackwell.simulation.events import pipe, tell_pipe
from pallasite_blackwell.simulation.formats import unpack
from pallasite_blackwell.simulation.matrix_descriptors import CHUNK, SharedMatrix, Tile
from pallasite_blackwell.simulation.tensor_memory import (
    CELL,
    LANES,
    SPACE,
    TARGETS,
    TensorMemory,
    cta_group,
    require_target,
)
from pallasite_simulator.binder import U64, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

instructions = InstructionSet()

_SHIFT_TARGETS = frozenset(("sm_100a", "sm_101a", "sm_103a", "sm_110a"))

_FORMATS = {(): 0, ("b8x16", "b6x16_p32"): 6, ("b8x16", "b4x16_p64"): 4}
"""Bits of the elements that are decompressed, by what the name says."""


def _rows(count: int, *starts: int) -> Array:
    """For each row, the lanes that it goes to: ``count`` rows from each of the lanes."""
    found: Array = np.arange(count)[:, None] + np.array(starts)
    return found


_SHAPES: dict[tuple[str, ...], tuple[Array, int]] = {
    ("128x256b",): (_rows(128, 0), 2),
    ("128x128b",): (_rows(128, 0), 1),
    ("4x256b",): (32 * _rows(4, 0), 2),
    ("32x128b", "warpx4"): (_rows(32, 0, 32, 64, 96), 1),
    ("64x128b", "warpx2::02_13"): (_rows(64, 0, 64), 1),
    ("64x128b", "warpx2::01_23"): (
        np.concatenate([_rows(32, 0, 32), _rows(32, 64, 96)]),
        1,
    ),
}
"""The lanes of each row, and its chunks of 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    group: int
    lanes: Array
    chunks: int
    bits: int


def _parse(binder: Binder) -> _Form:
    words = binder.instruction.modifiers
    group = cta_group(binder)
    rest = tuple(one for one in words if one not in ("cp", f"cta_group::{group}"))
    formats = tuple(one for one in rest if one.startswith(("b8x16", "b6x16", "b4x16")))
    shape = tuple(one for one in rest if one not in formats)
    if shape not in _SHAPES or formats not in _FORMATS:
        raise binder.error(
            "there is no such copy",
            expected="one of "
            + ", ".join("." + ".".join(one) for one in _SHAPES)
            + ", with .b8x16.b6x16_p32 or .b8x16.b4x16_p64, or without",
        )
    lanes, chunks = _SHAPES[shape]
    return _Form(group, lanes, chunks, _FORMATS[formats])


@instructions.register("tcgen05.cp")
def bind_copy(instruction: Instruction, binder: Binder) -> Step:
    """Copies a matrix from shared memory: PTX ISA 9.7.16.9.2."""
    require_target(binder, TARGETS, "tensor memory")
    form = _parse(binder)
    binder.expect_operands(2)
    address, descriptor = binder.address(0), binder.source(1, U64)
    tile = Tile(len(form.lanes), 8 * form.chunks, 16, True)

    def step(lanes: Lanes) -> None:
        memory = TensorMemory.of(lanes.wave)
        addresses = np.broadcast_to(address(lanes), (lanes.count,)).tolist()
        descriptors = np.broadcast_to(descriptor(lanes), (lanes.count,)).tolist()
        for lane, start, source in zip(lanes.numbers.tolist(), addresses, descriptors, strict=True):
            accesses = []
            for block in memory.blocks(lane, form.group, instruction):
                contents, places = SharedMatrix(memory, instruction).read(
                    block, source, tile, lane, "what is copied"
                )
                accesses.append(("read", "shared", places.reshape(-1), CHUNK))
                words = _decompress(contents, form.bits).reshape(len(form.lanes), -1)
                words = np.ascontiguousarray(words).view(np.uint32)
                accesses.append(_write(memory, block, start, form, words, lane, instruction))
            _tell(memory, lane, accesses, instruction)
        lanes.wave.progress += 1

    return step


def _decompress(contents: Array, bits: int) -> Array:
    """Chunks of 16 bytes, of which the first hold 16 elements of ``bits`` bits, as bytes with one
    element each; those of 4 bits are in bits 2 to 5."""
    if not bits:
        return contents
    elements = unpack(contents[..., : 2 * bits], bits)
    return elements << 2 if bits == 4 else elements


def _write(
    memory: TensorMemory,
    block: int,
    start: int,
    form: _Form,
    words: Array,
    lane: int,
    instruction: Instruction,
) -> tuple[str, str, Array, int]:
    column, rows = start & 0xFFFF, (start >> 16) + form.lanes
    count = 4 * form.chunks
    if int(rows.max()) >= LANES:
        raise memory.failure(
            lane,
            "copies to lanes that tensor memory does not have",
            instruction,
            got=f"lane {int(rows.max())}",
            expected=f"lanes 0 to {LANES - 1}",
        )
    memory.check_columns(block, column, column + count - 1, lane, "copies to", instruction)
    columns = column + np.arange(count)
    memory.words[block][rows[:, :, None], columns] = words[:, None, :]
    memory.count("write", rows.size * count)
    offsets = memory.offsets(block, rows.reshape(-1), np.full(rows.size, column))
    return "write", SPACE, offsets, count * CELL


def _tell(
    memory: TensorMemory,
    lane: int,
    accesses: list[tuple[str, str, Array, int]],
    instruction: Instruction,
) -> None:
    if memory.wave.observer is None:
        return
    tell_pipe(memory, pipe(lane, instruction), accesses)


@instructions.register("tcgen05.shift")
def bind_shift(instruction: Instruction, binder: Binder) -> Step:
    """Moves 31 of 32 rows of 32 bytes to the lane before: PTX ISA 9.7.16.9.3."""
    require_target(binder, _SHIFT_TARGETS, "tcgen05.shift")
    group = cta_group(binder)
    binder.only_modifiers("shift", f"cta_group::{group}", "down")
    if not instruction.has("down"):
        raise binder.error("unknown form", expected=".down")
    binder.expect_operands(1)
    address = binder.address(0)

    def step(lanes: Lanes) -> None:
        memory = TensorMemory.of(lanes.wave)
        addresses = np.broadcast_to(address(lanes), (lanes.count,)).tolist()
        for lane, start in zip(lanes.numbers.tolist(), addresses, strict=True):
            row, column = start >> 16, start & 0xFFFF
            if row % 32 or row >= LANES:
                raise memory.failure(
                    lane,
                    "shifts rows that do not begin at a multiple of 32",
                    instruction,
                    got=f"lane {row}",
                    expected="lane 0, 32, 64 or 96",
                )
            accesses = []
            for block in memory.blocks(lane, group, instruction):
                memory.check_columns(block, column, column + 7, lane, "shifts", instruction)
                piece = memory.words[block][row : row + 32, column : column + 8]
                piece[:31] = piece[1:].copy()
                moved = memory.offsets(block, row + np.arange(32), np.full(32, column))
                accesses += [
                    ("read", SPACE, moved[1:], 8 * CELL),
                    ("write", SPACE, moved[:31], 8 * CELL),
                ]
                memory.count("read", 31 * 8)
                memory.count("write", 31 * 8)
            _tell(memory, lane, accesses, instruction)
        lanes.wave.progress += 1

    return step
