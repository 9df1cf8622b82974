"""Bulk copies of boxes of tensors: PTX ISA 9.7.9.27.1, cp.async.bulk.tensor and its kin."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.boxes import Box, Part, box_of
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers
from pallasite_simulator.engine.memory import Region
from pallasite_simulator.engine.transfers import Transfer, async_groups
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    CACHE_HINT,
    bind_address,
    bind_cache_policy,
    sort_modifiers,
)
from pallasite_simulator.instructions.asynchronous import (
    COMPLETION,
    GROUP,
    MULTICAST,
    Combine,
    check_barrier_block,
    check_writable,
    count_bytes,
    failure,
    multicast_blocks,
    reduction_of,
)
from pallasite_simulator.instructions.mbarriers import bind_barrier
from pallasite_simulator.instructions.multicast import each_address
from pallasite_simulator.instructions.tensor_operands import (
    MODES,
    TensorOperand,
    box_offsets,
    check_coordinates,
    check_part,
    check_rows,
    tell_shared,
    tell_whole,
    whole_boxes,
)
from pallasite_simulator.instructions.updates import update_of
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

DIMENSIONS = {"1d": 1, "2d": 2, "3d": 3, "4d": 4, "5d": 5}
U16 = TYPES["u16"]

_INTEGERS = ("u32", "s32", "u64", "s64")
_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "tf32", "tf32.ftz", "f64"),
    "min": (*_INTEGERS, "f16", "bf16"),
    "max": (*_INTEGERS, "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "s32", "u64"),
    "or": ("u32", "s32", "u64"),
    "xor": ("u32", "s32", "u64"),
}
"""Reductions and the element types that an H200 accepts for them."""

_GROUPS = {
    "async": ("async",),
    "bulk": ("bulk",),
    "tensor": ("tensor",),
    "dimensions": tuple(DIMENSIONS),
    "mode": MODES,
    "hint": (CACHE_HINT,),
    "global": ("global",),
}


# Loads --------------------------------------------------------------------------------------------


@instructions.register("cp.async.bulk.tensor")
def bind_tensor_copy(instruction: Instruction, binder: Binder) -> Step:
    """Copies a box of a tensor to or from shared memory: PTX ISA 9.7.9.27.1.2,
    cp.async.bulk.tensor."""
    words = sort_modifiers(
        binder,
        {
            **_GROUPS,
            "shared": ("shared::cta", "shared::cluster"),
            "completion": (COMPLETION, GROUP),
            "multicast": (MULTICAST,),
            "pair": ("cta_group::1", "cta_group::2"),
        },
    )
    mode = words["mode"] or "tile"
    if not words["dimensions"] or not words["global"] or not words["shared"]:
        raise binder.error("unknown form of a tensor copy")
    dimensions = DIMENSIONS[words["dimensions"]]
    modifiers = instruction.modifiers
    if modifiers.index("global") < modifiers.index(words["shared"]):
        plain = not words["multicast"] and not words["pair"] and mode != "tile::gather4"
        if words["shared"] != "shared::cta" or words["completion"] != GROUP or not plain:
            raise binder.error("unknown form of a tensor copy to global memory")
        return _bind_to_global(instruction, binder, dimensions, mode, bool(words["hint"]), None)
    if words["completion"] != COMPLETION or mode == "tile::scatter4":
        raise binder.error("unknown form of a tensor copy to shared memory")
    multicast, hint = bool(words["multicast"]), bool(words["hint"])
    if multicast and words["shared"] != "shared::cluster":
        raise binder.error("only copies to a cluster can be multicast")
    tensor = TensorOperand(binder, 1, dimensions, mode)
    binder.expect_operands(3 + multicast + hint)
    masks = binder.source(3, U16) if multicast else None
    if hint:
        bind_cache_policy(binder, 3 + multicast)
    return _Load(
        instruction, binder, tensor, words["shared"], masks, words["pair"] == "cta_group::2", mode
    ).step


class _Load:
    """The execution of copies from global to shared memory."""

    def __init__(
        self,
        instruction: Instruction,
        binder: Binder,
        tensor: TensorOperand,
        space: str,
        masks: Source | None,
        pairs: bool,
        mode: str,
    ):
        self._instruction = instruction
        self._tensor = tensor
        self._space, self._address = bind_address(binder, 0, space)
        self._locate = bind_barrier(binder, 2, (space,), space=space, local=False)
        self._masks = masks
        self._pairs = pairs
        self._gather = mode == "tile::gather4"

    def step(self, lanes: Lanes) -> None:
        """Executes the instruction."""
        slots = self._locate(lanes)
        addresses = np.broadcast_to(self._address(lanes), (lanes.count,))
        coordinates = self._tensor.coordinates(lanes)
        masks = None
        if self._masks is not None:
            masks = np.broadcast_to(self._masks(lanes), (lanes.count,)).astype(np.int64)
        transfer = Transfer(lanes, self._instruction)
        signals = []
        for chosen, which, box in self._tensor.groups(lanes):
            part = slice(None) if which is None else np.flatnonzero(which)
            signals.append(
                self._load(
                    chosen,
                    addresses[part],
                    slots[part],
                    coordinates[part],
                    None if masks is None else masks[part],
                    box,
                    transfer,
                )
            )
        transfer.tell()
        numbers, targets, amounts = (np.concatenate(one) for one in zip(*signals, strict=True))
        transfer.complete(mbarriers(lanes.wave), numbers, targets, amounts, self._instruction)

    def _load(
        self,
        lanes: Lanes,
        addresses: Array,
        slots: Array,
        coordinates: Array,
        masks: Array | None,
        box: Box,
        transfer: Transfer,
    ) -> tuple[Array, Array, Array]:
        """Copies for lanes with one tensor map.

        Returns:
          For each signal: the lane, the slot of the mbarrier, and the bytes.
        """
        wave = lanes.wave
        memory = wave.memory
        copies = 4 if self._gather else 1
        if self._gather:
            check_rows(lanes, box, self._instruction)
        offsets = box_offsets(lanes, self._space, addresses, box, self._instruction, copies)
        stride = memory.shared_stride
        blocks = offsets // stride
        owners = np.arange(lanes.count)
        signalled = slots
        if masks is not None:
            several = multicast_blocks(lanes, masks, self._instruction)
            owners = np.repeat(owners, [len(one) for one in several])
            blocks = np.concatenate(several)
            signalled = self._signalled(blocks, slots[owners], stride // 8)
        elif not self._pairs:
            check_barrier_block(lanes, blocks, slots, self._instruction)
        targets = blocks * stride + offsets[owners] % stride
        whole = np.zeros(lanes.count, np.bool_)
        if not self._gather:
            whole = whole_boxes(lanes, box, coordinates)
        if whole.any():
            self._load_whole(lanes, coordinates, targets, owners, whole, box, transfer)
        for number in np.flatnonzero(~whole).tolist():
            place = coordinates[number].tolist()
            lane = int(lanes.numbers[number])
            there = targets[owners == number].tolist()
            for row in range(copies):
                corner = [place[0], place[1 + row]] if self._gather else place
                moved = [one + row * box.footprint for one in there]
                self._load_part(lanes, lane, corner, moved, box, transfer)
        amounts = np.full(len(owners), box.bytes * copies)
        transfer.moved("shared", "write", int(amounts.sum()))
        count_bytes(wave, box.bytes * copies * lanes.count)
        return lanes.numbers[owners], signalled, amounts

    def _load_whole(
        self,
        lanes: Lanes,
        coordinates: Array,
        targets: Array,
        owners: Array,
        whole: Array,
        box: Box,
        transfer: Transfer,
    ) -> None:
        """Copies the boxes that are wholly inside the tensor, all at once."""
        memory = lanes.wave.memory
        starts = box.starts(coordinates[whole])
        if not whole.all():
            kept = whole[owners]
            targets, owners = targets[kept], (np.cumsum(whole) - 1)[owners[kept]]
        numbers = lanes.numbers[whole]
        transfer.moved("global", "read", box.bytes * len(starts))
        if transfer.listens:
            lanes_of = (numbers, numbers[owners])
            tell_whole(transfer, ("read", "write"), box, starts, targets, lanes_of)
        source, shared = memory.regions["global"], memory.regions["shared"]
        box.load_whole(source, shared, starts, targets, owners)

    def _load_part(
        self,
        lanes: Lanes,
        lane: int,
        corner: list[int],
        targets: list[int],
        box: Box,
        transfer: Transfer,
    ) -> None:
        """Copies one box to some offsets in shared memory."""
        memory = lanes.wave.memory
        check_coordinates(lanes, lane, corner, box, self._instruction, store=False)
        part = box.clip(corner)
        if part is not None:
            check_part(lanes, lane, box, part, self._instruction)
            transfer.moved("global", "read", part.row_bytes * part.row_count)
            if transfer.listens:
                transfer.access("read", "global", box.rows(part), part.row_bytes, lane)
        pieces = box.load(memory.regions["global"], part)
        for target in targets:
            box.write_shared(memory.regions["shared"], target, pieces)
            if transfer.listens:
                tell_shared(transfer, "write", box, target, lane)

    def _signalled(self, blocks: Array, slots: Array, stride: int) -> Array:
        """The slots of the mbarriers that hear of multicast copies to blocks (PTX ISA
        9.7.9.27.1.2)."""
        if self._pairs:
            # The block of the pair that has the same parity as the one with the mbarrier.
            blocks = blocks & ~1 | (slots // stride) & 1
        found: Array = blocks * stride + slots % stride
        return found


# Stores -------------------------------------------------------------------------------------------


@instructions.register("cp.reduce.async.bulk.tensor")
def bind_tensor_reduction(instruction: Instruction, binder: Binder) -> Step:
    """Reduces a box of shared memory into a tensor: PTX ISA 9.7.9.27.1.3,
    cp.reduce.async.bulk.tensor."""
    words = sort_modifiers(
        binder,
        {
            **_GROUPS,
            "reduce": ("reduce",),
            "shared": ("shared::cta",),
            "completion": (GROUP,),
            "operation": tuple(_REDUCTIONS),
        },
    )
    for group in ("dimensions", "global", "shared", "completion", "operation"):
        if not words[group]:
            raise binder.error("unknown form of a tensor reduction")
    mode = words["mode"] or "tile"
    if mode in ("tile::gather4", "tile::scatter4"):
        raise binder.error("unknown mode of a tensor reduction", expected=".tile")
    dimensions = DIMENSIONS[words["dimensions"]]
    return _bind_to_global(
        instruction, binder, dimensions, mode, bool(words["hint"]), words["operation"]
    )


def _combine(box: Box, operation: str, lanes: Lanes, instruction: Instruction) -> Combine:
    """What a reduction computes.

    Raises:
      SimulationError: there is no such reduction of the tensor's elements.
    """
    element = box.tensor.element
    if element.name not in _REDUCTIONS[operation]:
        raise failure(
            lanes.wave,
            int(lanes.numbers[0]),
            f"reduces by .{operation} what has no such reduction",
            instruction,
            got=f"elements of type {element.name}",
            expected="one of " + ", ".join(_REDUCTIONS[operation]),
        )
    if element.flush:
        return update_of("add", TYPES["f32"], "global").combine
    name = {"tf32": "f32"}.get(element.name, element.name)
    if operation in ("and", "or", "xor"):
        name = f"b{8 * element.bytes}"
    return reduction_of(operation, TYPES[name])


def _bind_to_global(
    instruction: Instruction,
    binder: Binder,
    dimensions: int,
    mode: str,
    hint: bool,
    operation: str | None,
) -> Step:
    """A copy or reduction from shared to global memory."""
    tensor = TensorOperand(binder, 0, dimensions, mode)
    binder.expect_operands(2 + hint)
    if hint:
        bind_cache_policy(binder, 2)
    space, address = bind_address(binder, 1, "shared::cta")
    scatter = mode == "tile::scatter4"
    copies = 4 if scatter else 1
    kind = "write" if operation is None else "atomic"

    def step(lanes: Lanes) -> None:
        wave = lanes.wave
        addresses = np.broadcast_to(address(lanes), (lanes.count,))
        coordinates = tensor.coordinates(lanes)
        transfer = Transfer(lanes, instruction)
        if transfer.operation is not None:
            async_groups(wave, "bulk").add(transfer.operation)
        for chosen, which, box in tensor.groups(lanes):
            part = slice(None) if which is None else np.flatnonzero(which)
            for one in _boxes(wave, box):
                store(chosen, addresses[part], coordinates[part], one, transfer)
        transfer.tell()

    def store(
        lanes: Lanes, addresses: Array, coordinates: Array, box: Box, transfer: Transfer
    ) -> None:
        wave = lanes.wave
        memory = wave.memory
        if scatter:
            check_rows(lanes, box, instruction)
        combine = None if operation is None else _combine(box, operation, lanes, instruction)
        offsets = box_offsets(lanes, space, addresses, box, instruction, copies)
        total = box.bytes * copies * lanes.count
        transfer.moved("shared", "read", total)
        count_bytes(wave, total)
        whole = np.zeros(lanes.count, np.bool_)
        if combine is None and not scatter:
            whole = whole_boxes(lanes, box, coordinates)
        if whole.any():
            starts, numbers = box.starts(coordinates[whole]), lanes.numbers[whole]
            check_writable(wave.lanes(numbers), starts, instruction)
            transfer.moved("global", "write", box.bytes * len(starts))
            if transfer.listens:
                lanes_of = (numbers, numbers)
                tell_whole(transfer, ("write", "read"), box, starts, offsets[whole], lanes_of)
            target, shared = memory.regions["global"], memory.regions["shared"]
            box.store_whole(target, shared, starts, offsets[whole])
        for number in np.flatnonzero(~whole).tolist():
            place = coordinates[number].tolist()
            for row in range(copies):
                corner = [place[0], place[1 + row]] if scatter else place
                start = int(offsets[number]) + row * box.footprint
                store_part(lanes, int(lanes.numbers[number]), corner, start, box, combine, transfer)

    def store_part(
        lanes: Lanes,
        lane: int,
        corner: list[int],
        start: int,
        box: Box,
        combine: Combine | None,
        transfer: Transfer,
    ) -> None:
        wave = lanes.wave
        check_coordinates(lanes, lane, corner, box, instruction, store=True)
        part = box.clip(corner, whole_pieces=True)
        if part is None:
            return
        if transfer.listens:
            found = box.whole_places(start) if part.whole else box.stored_places(start, part)
            transfer.access("read", "shared", *found, lane)
        check_part(lanes, lane, box, part, instruction)
        check_writable(wave.lanes(np.array([lane])), np.array([part.start]), instruction)
        written = part.counts[0] * box.tensor.element.bytes * part.row_count
        transfer.moved("global", kind, written)
        if transfer.listens:
            _tell_rows(wave, transfer, kind, box, part, lane, instruction)
        regions = wave.memory.regions
        _write(regions["shared"], regions["global"], box, part, start, combine)

    return step


def _boxes(wave: Wave, box: Box) -> list[Box]:
    """The boxes that are written: several if the tensor map has a multicast address."""
    address = box.tensor.address
    found = each_address(wave.memory.global_memory, address)
    if found == [address]:
        return [box]
    return [box_of(dataclasses.replace(box.tensor, address=one)) for one in found]


def _write(
    shared: Region, target: Region, box: Box, part: Part, start: int, combine: Combine | None
) -> None:
    pieces = box.read_shared(shared, start)
    if combine is None:
        box.store(target, part, pieces)
    else:
        box.reduce(target, part, pieces, combine)


def _tell_rows(
    wave: Wave,
    transfer: Transfer,
    kind: str,
    box: Box,
    part: Part,
    lane: int,
    instruction: Instruction,
) -> None:
    """Tells of the rows that are written, and of what is written behind them: the hardware writes
    whole pieces of 16 bytes."""
    valid = part.counts[0] * box.tensor.element.bytes
    rows = box.rows(part)
    transfer.access(kind, "global", rows, valid, lane)
    if part.row_bytes == valid or wave.observer is None:
        return
    found = wave.memory.global_memory.allocation_at(part.end - 1)
    if found is not None:
        wave.observer.misuse(
            np.array([lane]),
            f"writes {part.row_bytes - valid} bytes behind the end of the rows of a tensor, as"
            " bulk copies write whole pieces of 16 bytes",
            instruction,
        )


# Prefetches ---------------------------------------------------------------------------------------


@instructions.register("cp.async.bulk.prefetch.tensor")
def bind_tensor_prefetch(instruction: Instruction, binder: Binder) -> Step:
    """Prefetches a box of a tensor, which only checks its tensor map: PTX ISA 9.7.9.27.1.4,
    cp.async.bulk.prefetch.tensor."""
    words = sort_modifiers(binder, {**_GROUPS, "prefetch": ("prefetch",), "level": ("L2",)})
    if not words["dimensions"] or not words["global"] or not words["level"]:
        raise binder.error("unknown form of a tensor prefetch")
    mode = words["mode"] or "tile"
    if mode == "tile::scatter4":
        raise binder.error("unknown mode of a tensor prefetch")
    hint = bool(words["hint"])
    tensor = TensorOperand(binder, 0, DIMENSIONS[words["dimensions"]], mode)
    binder.expect_operands(1 + hint)
    if hint:
        bind_cache_policy(binder, 1)

    def step(lanes: Lanes) -> None:
        for _ in tensor.groups(lanes):
            pass

    return step
