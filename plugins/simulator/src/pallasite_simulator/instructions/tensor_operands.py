"""The operands of tensor copies: tensor map, coordinates, and the box in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pallasite.plugin import PallasiteError
from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.boxes import PIECE, Box, Part, box_of
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.tensor_map import BYTES, TensorMap
from pallasite_simulator.engine.transfers import Transfer
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instructions.accesses import bind_address, by_space
from pallasite_simulator.instructions.asynchronous import check_own_block, failure
from pallasite_simulator.ptx.syntax import Address, Instruction, Symbol
from pallasite_simulator.types import TYPES, Array

S32 = TYPES["s32"]

ALIGNMENT = 128
MAP_ALIGNMENT = 64

UNKNOWN_MODES = ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs")
"""Modes that are not simulated."""

MODES = ("tile", "tile::gather4", "tile::scatter4", *UNKNOWN_MODES)


class TensorOperand:
    """The operand ``[map, {coordinates}]``."""

    def __init__(self, binder: Binder, number: int, dimensions: int, mode: str):
        operand = binder.operand(number)
        if not isinstance(operand, Address) or operand.coordinates is None:
            raise binder.error("a tensor map and coordinates are needed", got=operand)
        if operand.extra:
            raise binder.error("unknown operands of a tensor copy", got=operand.extra)
        if mode in UNKNOWN_MODES:
            raise binder.error(f"the simulator does not know .{mode} copies", expected=".tile")
        self._rows = mode != "tile"
        if self._rows and dimensions != 2:
            raise binder.error("rows are gathered and scattered in two dimensions", expected=".2d")
        needed = 5 if self._rows else dimensions
        if len(operand.coordinates) != needed:
            raise binder.error(
                "wrong number of coordinates",
                got=len(operand.coordinates),
                expected=str(needed),
            )
        self._instruction = binder.instruction
        self._dimensions = dimensions
        self._space, self._address = bind_address(
            binder, Address(operand.base, operand.offset), _space_of(binder, operand)
        )
        self._coordinates = [binder.source(one, S32) for one in operand.coordinates]

    def groups(self, lanes: Lanes) -> Iterator[tuple[Lanes, Array | None, Box]]:
        """Lanes by tensor map: the lanes, which of the given ones they are (None: all), and how
        boxes of the map are moved.

        Raises:
          SimulationError: the map is misaligned or out of bounds, or no copy can use it.
        """
        instruction = self._instruction
        memory = lanes.wave.memory
        addresses = np.broadcast_to(self._address(lanes), (lanes.count,))
        if (addresses == addresses[0]).all():
            found = [(lanes, None, addresses[:1])]
        else:
            found = []
            for one in np.unique(addresses):
                mask = addresses == one
                chosen = lanes.where(mask)
                assert chosen is not None
                found.append((chosen, mask, np.full(1, one)))
        for chosen, mask, address in found:
            # Of one map, lanes see the same bytes, unless it is in local memory.
            first = chosen if chosen.count == 1 else chosen.wave.lanes(chosen.numbers[:1])
            ((space, _, _, inner),) = by_space(first, self._space, address)
            if space not in ("param", "const", "global"):
                raise failure(
                    lanes.wave,
                    int(first.numbers[0]),
                    "uses a tensor map in memory where none can be",
                    instruction,
                    got=f"{space} memory",
                    expected="param, const or global memory",
                )
            offset = int(memory.offsets(first, space, inner, BYTES, instruction)[0])
            memory.check_alignment(first, space, inner, BYTES, MAP_ALIGNMENT, instruction)
            contents = memory.regions[space].bytes[offset : offset + BYTES].tobytes()
            yield chosen, mask, self._box(chosen, contents)

    def _box(self, lanes: Lanes, contents: bytes) -> Box:
        try:
            tensor = TensorMap.decode(contents)
        except PallasiteError as error:
            raise SimulationError(
                f"{lanes.wave.thread_name(int(lanes.numbers[0]))} uses a {error.message},"
                f" in: {self._instruction.text}",
                got=error.got,
                expected=error.expected,
                location=self._instruction.location,
            ) from error
        if tensor.rank != self._dimensions:
            raise failure(
                lanes.wave,
                int(lanes.numbers[0]),
                "copies with a tensor map of another number of dimensions",
                self._instruction,
                got=tensor.rank,
                expected=str(self._dimensions),
            )
        return box_of(tensor)

    def coordinates(self, lanes: Lanes) -> Array:
        """The coordinates of each lane: a row of integers."""
        values = np.empty((lanes.count, len(self._coordinates)), np.int64)
        for number, one in enumerate(self._coordinates):
            values[:, number] = one(lanes)
        return values


def _space_of(binder: Binder, operand: Address) -> str:
    """The space of a tensor map that is named by a variable; else ``""`` for a generic address."""
    if isinstance(operand.base, Symbol):
        return binder.program.symbol(operand.base, binder.instruction)[0]
    return ""


def check_coordinates(
    lanes: Lanes, lane: int, place: Sequence[int], box: Box, instruction: Instruction, store: bool
) -> None:
    """Raises :class:`SimulationError` for coordinates at which the hardware stops: boxes start at
    multiples of 16 bytes, and those that are written not before the tensor."""
    if place[0] * box.tensor.element.bytes % PIECE:
        raise failure(
            lanes.wave,
            lane,
            "copies a box that does not start at a multiple of 16 bytes",
            instruction,
            got=f"first coordinate {place[0]}, elements of {box.tensor.element.bytes} bytes",
        )
    if store and min(place) < 0:
        raise failure(
            lanes.wave,
            lane,
            "writes a box that starts before the tensor",
            instruction,
            got=f"coordinates {tuple(place)}",
            expected="coordinates that are not negative",
        )


def check_part(lanes: Lanes, lane: int, box: Box, part: Part, instruction: Instruction) -> None:
    """Raises :class:`SimulationError` unless a part of a tensor is inside one allocation."""
    memory = lanes.wave.memory.global_memory
    found = memory.allocation_at(part.start)
    last = part.end - (part.row_bytes - part.counts[0] * box.tensor.element.bytes)
    if found is None or last > found.offset + found.size:
        raise failure(
            lanes.wave,
            lane,
            "copies a box of a tensor that is not inside one array",
            instruction,
            got=f"bytes from {lanes.wave.memory.describe('global', part.start)}"
            f" to {lanes.wave.memory.describe('global', last - 1)}",
            expected=f"the tensor map to describe an array: sizes {box.tensor.sizes},"
            f" strides {box.tensor.strides} bytes",
        )


def box_offsets(
    lanes: Lanes, space: str, addresses: Array, box: Box, instruction: Instruction, count: int = 1
) -> Array:
    """Where boxes are in shared memory, after all checks."""
    memory = lanes.wave.memory
    size = box.footprint * count
    addresses = np.broadcast_to(addresses, (lanes.count,))
    offsets = memory.offsets(lanes, space, addresses, size, instruction)
    memory.check_alignment(lanes, space, addresses, size, ALIGNMENT, instruction)
    if space == "shared::cta":
        check_own_block(lanes, offsets, instruction)
    return offsets


def tell_shared(transfer: Transfer, kind: str, box: Box, offset: int, lane: int) -> None:
    """Notes that what a lane began reads or writes a box in shared memory."""
    transfer.access(kind, "shared", *box.whole_places(offset), lane)


def check_rows(lanes: Lanes, box: Box, instruction: Instruction) -> None:
    """Raises :class:`SimulationError` unless boxes are rows, as gathering and scattering need."""
    if box.tensor.box[1] != 1:
        raise failure(
            lanes.wave,
            int(lanes.numbers[0]),
            "gathers or scatters with a tensor map whose boxes are not rows",
            instruction,
            got=f"box {box.tensor.box}",
            expected="a second extent of 1",
        )


def whole_boxes(lanes: Lanes, box: Box, corners: Array) -> Array:
    """Which lanes' boxes can be moved together: those that are wholly inside tensor and array."""
    found = np.zeros(lanes.count, np.bool_)
    if not box.together:
        return found
    whole = box.whole(corners)
    if not whole.any():
        return found
    starts = box.starts(corners[whole])
    low, high = int(starts.min()), int(starts.max()) + box.extent
    array = lanes.wave.memory.global_memory.allocation_at(low)
    return whole if array is not None and high <= array.offset + array.size else found


def tell_whole(
    transfer: Transfer,
    kinds: tuple[str, str],
    box: Box,
    starts: Array,
    offsets: Array,
    lanes: tuple[Array, Array],
) -> None:
    """Notes accesses of whole boxes: of kinds in global and in shared memory, at offsets, by
    lanes."""
    rows = box.rows_of(starts)
    owners = np.repeat(lanes[0], rows.shape[1])
    transfer.access(kinds[0], "global", rows.reshape(-1), box.row_bytes, owners)
    if box.contiguous:
        transfer.access(kinds[1], "shared", offsets, box.bytes, lanes[1])
        return
    for offset, lane in zip(offsets.tolist(), lanes[1].tolist(), strict=True):
        tell_shared(transfer, kinds[1], box, offset, lane)
