"""Loads, stores and transposition of small matrices by a warp (PTX ISA 9.7.14.5.15 to 9.7.14.5.17).

A matrix in shared memory has rows of 16 bytes, whose addresses are given by the first lanes of the
warp. In registers, lane ``4 * g + t`` has a part of row ``g``.
"""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import Words, bind_address, sort_modifiers
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array, Values

instructions = InstructionSet()

B32 = TYPES["b32"]

ROW = 16
"""Bytes of a matrix's row in shared memory."""

_MANDATORY = (".sync", ".aligned", "shape", "number", "type")

_GROUPS = {
    "sync": ("sync",),
    "aligned": ("aligned",),
    "number": ("x1", "x2", "x4"),
    "trans": ("trans",),
    "space": ("shared", "shared::cta"),
}


@instructions.register("ldmatrix", needs_warp=True)
def bind_load(instruction: Instruction, binder: Binder) -> Step:
    """Loads matrices from shared memory: PTX ISA 9.7.14.5.15, ldmatrix."""
    words = sort_modifiers(
        binder,
        {
            **_GROUPS,
            "shape": ("m8n8", "m16n16", "m8n16"),
            "type": ("b16", "b8", "b8x16"),
            "packed": ("b6x16_p32", "b4x16_p64"),
        },
    )
    _check_mandatory(binder, words)
    shape, kind, packed = words["shape"], words["type"], words["packed"]
    trans, number = bool(words["trans"]), int(words["number"][1:])
    if (kind == "b8x16") != bool(packed):
        raise binder.error(".b8x16 is given with a packed format, and the other way round")
    allowed = {
        "m8n8": kind == "b16",
        "m16n16": kind in ("b8", "b8x16") and trans and number < 4,
        "m8n16": kind == "b8x16" and not trans,
    }
    if not allowed[shape]:
        raise binder.error("ldmatrix has no such combination of shape, number, .trans and type")
    binder.expect_operands(2)
    # Registers and rows of a matrix.
    registers, rows = (2, 16) if shape == "m16n16" else (1, 8)
    writes = [binder.destination(one, B32) for one in binder.elements(0)]
    if len(writes) != number * registers:
        raise binder.error(
            "wrong number of registers", got=len(writes), expected=str(number * registers)
        )
    space, address = bind_address(binder, 1, words["space"])

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        chosen, addresses = _rows(lanes, space, address, number * rows, instruction)
        raw = lanes.wave.memory.load(chosen, space, addresses, ROW, instruction)
        data = raw.view(np.uint8).reshape(-1, number, rows, ROW)
        if packed:
            data = _unpack(data, 6 if packed == "b6x16_p32" else 4)
        if shape == "m8n8" and trans:
            halves = data.view(np.uint16).swapaxes(2, 3)
            data = np.ascontiguousarray(halves).view(np.uint8)
        elif shape == "m16n16":
            # Lane 4g + t has in register r the bytes 8r + g of the rows 4t to 4t + 3.
            data = np.ascontiguousarray(data.swapaxes(2, 3))
        words = data.view(np.uint32).reshape(-1, number * registers, WARP)
        for place, write in enumerate(writes):
            write(lanes, words[:, place].reshape(-1))

    return step


@instructions.register("stmatrix", needs_warp=True)
def bind_store(instruction: Instruction, binder: Binder) -> Step:
    """Stores matrices to shared memory: PTX ISA 9.7.14.5.16, stmatrix."""
    words = sort_modifiers(binder, {**_GROUPS, "shape": ("m8n8", "m16n8"), "type": ("b16", "b8")})
    _check_mandatory(binder, words)
    trans, number = bool(words["trans"]), int(words["number"][1:])
    bytewise = words["shape"] == "m16n8"
    if bytewise != (words["type"] == "b8") or (bytewise and not trans):
        raise binder.error("stmatrix has no such combination of shape, .trans and type")
    binder.expect_operands(2)
    reads = [binder.source(one, B32) for one in binder.elements(1)]
    if len(reads) != number:
        raise binder.error("wrong number of registers", got=len(reads), expected=str(number))
    space, address = bind_address(binder, 0, words["space"])

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        chosen, addresses = _rows(lanes, space, address, number * 8, instruction)
        words = np.empty((lanes.count // WARP, number, WARP), np.uint32)
        for place, read in enumerate(reads):
            words[:, place] = _by_warp(read(lanes))
        data: Array = words
        if bytewise:
            # Byte 2h + e of lane 4g + t goes to byte 8h + g of row 2t + e.
            parts = words.view(np.uint8).reshape(-1, number, 8, 4, 2, 2)
            data = np.ascontiguousarray(parts.transpose(0, 1, 3, 5, 4, 2))
        elif trans:
            halves = words.view(np.uint16).reshape(-1, number, 8, 8)
            data = np.ascontiguousarray(halves.swapaxes(2, 3))
        values = data.reshape(-1).view(np.complex128)
        lanes.wave.memory.store(chosen, space, addresses, values, ROW, instruction)

    return step


@instructions.register("movmatrix", needs_warp=True)
def bind_transpose(instruction: Instruction, binder: Binder) -> Step:
    """Transposes a matrix in registers: PTX ISA 9.7.14.5.17, movmatrix."""
    if sorted(instruction.modifiers) != ["aligned", "b16", "m8n8", "sync", "trans"]:
        raise binder.error("unknown form", expected="movmatrix.sync.aligned.m8n8.trans.b16")
    binder.expect_operands(2)
    write, read = binder.destination(0, B32), binder.source(1, B32)

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        words = np.ascontiguousarray(np.broadcast_to(read(lanes), (lanes.count,)))
        halves = words.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        write(lanes, np.ascontiguousarray(halves).reshape(-1).view(np.uint32))

    return step


def _check_mandatory(binder: Binder, words: Words) -> None:
    for group in ("sync", "aligned", "shape", "number", "type"):
        if not words[group]:
            raise binder.error("a part of the name is missing", expected=", ".join(_MANDATORY))


def _by_warp(values: Values) -> Values:
    return values.reshape(-1, WARP) if values.ndim else values


def _rows(
    lanes: Lanes, space: str, address: Source, count: int, instruction: Instruction
) -> tuple[Lanes, Array]:
    """The lanes of each warp that give addresses, and these, generic ones checked to be shared.

    Args:
      count: how many lanes of a warp give addresses.
    """
    addresses: Array = np.broadcast_to(address(lanes), (lanes.count,))
    chosen = lanes
    if count < WARP:
        numbers = lanes.numbers.reshape(-1, WARP)[:, :count].reshape(-1)
        chosen = lanes.wave.lanes(numbers)
        addresses = addresses.reshape(-1, WARP)[:, :count].reshape(-1)
    if space == "generic":
        for name, mask, _ in lanes.wave.memory.resolve(chosen, addresses):
            if name != "shared":
                first = 0 if mask is None else int(np.flatnonzero(mask)[0])
                raise SimulationError(
                    f"{lanes.wave.thread_name(int(chosen.numbers[first]))} gives the address of a"
                    f" matrix that is not in shared memory, in: {instruction.text}",
                    got=f"{int(addresses[first]):#x}, in .{name}",
                    location=instruction.location,
                )
    return chosen, addresses


def _unpack(data: Array, bits: int) -> Array:
    """Elements of 6 or 4 bits, 16 in the first bytes of each row, one to a byte (zeros above)."""
    if bits == 4:
        pairs = data[..., :8, None] >> np.array([0, 4], np.uint8) & 15
        return np.ascontiguousarray(pairs.reshape(*data.shape))
    triples = data[..., :12].reshape(*data.shape[:-1], 4, 3).astype(np.uint32)
    packed = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    parts = packed[..., None] >> np.array([0, 6, 12, 18], np.uint32) & 63
    return parts.astype(np.uint8).reshape(*data.shape)
