"""Tensor maps that programs change: PTX ISA 9.7.9.28 (tensormap.replace) and 9.7.13.16
(tensormap.cp_fenceproxy)."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import U32, U64, Binder, Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.program import WHOLE_WARP
from pallasite_simulator.engine.tensor_map import (
    BYTES,
    FIELDS,
    MAX_RANK,
    NARROW_TYPES,
    PTX_ELEMENT_TYPES,
)
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    SCOPES,
    bind_address,
    check_addresses,
    sort_modifiers,
)
from pallasite_simulator.ptx.syntax import Immediate, Instruction
from pallasite_simulator.types import Values

instructions = InstructionSet()

ALIGNMENT = 64
PIECE = 16

_LISTED = ("global_dim", "global_stride", "box_dim", "element_stride")
_CONSTANTS = {
    "elemtype": len(PTX_ELEMENT_TYPES),
    "interleave_layout": 3,
    "swizzle_mode": 4,
    "swizzle_atomicity": 4,
    "fill_mode": 2,
}
"""Fields whose new value is a constant, and how many values are known."""


@instructions.register("tensormap.replace")
def bind_replace(instruction: Instruction, binder: Binder) -> Step:
    """Changes a field of a tensor map: PTX ISA 9.7.9.28, tensormap.replace."""
    words = sort_modifiers(
        binder,
        {
            "replace": ("replace",),
            "mode": ("tile",),
            "field": tuple(FIELDS),
            "space": ("global", "shared::cta"),
            "size": ("b1024",),
            "type": ("b32", "b64"),
        },
    )
    name = words["field"]
    if not words["mode"] or not name or not words["size"]:
        raise binder.error("unknown change of a tensor map", expected=".tile with a field")
    kind = U64 if name in ("global_address", "global_stride") else U32
    if words["type"] != f"b{kind.bits}":
        raise binder.error("wrong type of a field", expected=f".b{kind.bits}")
    field = FIELDS[name]
    space, address = bind_address(binder, 0, words["space"])
    binder.expect_operands(3 if name in _LISTED else 2)
    offset = field.offset
    if name in _LISTED:
        offset += _ordinal(binder, field.count) * field.size
    number = 2 if name in _LISTED else 1
    value = _constant(binder, name, number) if name in _CONSTANTS else binder.source(number, kind)
    largest = MAX_RANK - 1 if name == "rank" else (1 << 8 * field.size) - 1

    def step(lanes: Lanes) -> None:
        places = np.broadcast_to(address(lanes), (lanes.count,))
        check_addresses(lanes, space, places, BYTES, instruction, ALIGNMENT)
        given = np.broadcast_to(value(lanes), (lanes.count,))
        _check_range(lanes, given, largest, name, instruction)
        contents = given.astype(f"u{field.size}")
        moved = places + np.uint64(offset)
        lanes.wave.memory.store(lanes, space, moved, contents, field.size, instruction)

    return step


def _ordinal(binder: Binder, count: int) -> int:
    operand = binder.operand(1)
    if not isinstance(operand, Immediate) or not 0 <= operand.value < count:
        raise binder.error("wrong dimension of a field", got=operand, expected=f"0 to {count - 1}")
    return operand.value


def _constant(binder: Binder, name: str, number: int) -> Source:
    operand = binder.operand(number)
    count = _CONSTANTS[name]
    if name == "elemtype" and binder.program.module.target.startswith("sm_90"):
        count -= len(NARROW_TYPES)
    if not isinstance(operand, Immediate) or not 0 <= operand.value < count:
        raise binder.error(
            f"the simulator does not know this .{name}",
            got=operand,
            expected=f"a constant from 0 to {count - 1}",
        )
    chosen = operand.value
    constant: Values = np.uint32(PTX_ELEMENT_TYPES[chosen] if name == "elemtype" else chosen)
    return lambda lanes: constant


def _check_range(
    lanes: Lanes, values: Values, largest: int, name: str, instruction: Instruction
) -> None:
    if int(values.max()) <= largest:
        return
    lane = int(lanes.numbers[np.argmax(values)])
    raise SimulationError(
        f"{lanes.wave.thread_name(lane)} gives a tensor map a wrong .{name},"
        f" in: {instruction.text}",
        got=int(values.max()),
        expected=f"at most {largest}",
        location=instruction.location,
    )


@instructions.register("tensormap.cp_fenceproxy")
def bind_copy_and_fence(instruction: Instruction, binder: Binder) -> Step:
    """Copies a tensor map from shared to global memory, and orders its use after that: PTX ISA
    9.7.13.16, tensormap.cp_fenceproxy."""
    words = sort_modifiers(
        binder,
        {
            "copy": ("cp_fenceproxy",),
            "global": ("global",),
            "shared": ("shared::cta",),
            "proxies": ("tensormap::generic",),
            "order": ("release",),
            "scope": SCOPES,
            "sync": ("sync",),
            "aligned": ("aligned",),
        },
    )
    names = ("global", "shared", "proxies", "order", "scope", "sync", "aligned")
    if not all(words[name] for name in names):
        raise binder.error(
            "unknown copy of a tensor map",
            expected=".global.shared::cta.tensormap::generic.release.scope.sync.aligned",
        )
    binder.expect_operands(3)
    if binder.operand(2) != Immediate(BYTES):
        raise binder.error("the size must be that of a tensor map", expected=str(BYTES))
    binder.converge_by(WHOLE_WARP)
    target_space, target = bind_address(binder, 0, "global")
    source_space, source = bind_address(binder, 1, "shared::cta")

    def step(lanes: Lanes) -> None:
        memory = lanes.wave.memory
        targets = np.broadcast_to(target(lanes), (lanes.count,))
        sources = np.broadcast_to(source(lanes), (lanes.count,))
        check_addresses(lanes, target_space, targets, BYTES, instruction, ALIGNMENT)
        check_addresses(lanes, source_space, sources, BYTES, instruction, ALIGNMENT)
        # A warp copies as one; where its lanes name several places, each does.
        warps = lanes.numbers // WARP
        keys = np.stack([warps.astype(np.uint64), targets, sources], axis=1)
        _, first = np.unique(keys, axis=0, return_index=True)
        first.sort()
        chosen = lanes.wave.lanes(lanes.numbers[first])
        for offset in range(0, BYTES, PIECE):
            distance = np.uint64(offset)
            values = memory.load(
                chosen, source_space, sources[first] + distance, PIECE, instruction
            )
            memory.store(
                chosen, target_space, targets[first] + distance, values, PIECE, instruction
            )
        observer = lanes.wave.observer
        if observer is not None:
            observer.fence(lanes.numbers, "release", words["scope"])
            observer.proxy_fence(lanes.numbers, "tensormap::generic")

    return step
