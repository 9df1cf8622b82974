"""Instructions that access the memory of all devices at once: PTX ISA 9.7.9.14 (multimem).

A multicast address means the same place in the memory of each of the devices that run together.
``multimem.st`` stores there on all of them, ``multimem.red`` updates all, and
``multimem.ld_reduce`` loads from all what it combines, in the order of devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from pallasite_simulator.binder import Binder, Destination, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    SCOPES,
    Order,
    Words,
    bind_address,
    bind_stored,
    join_vectors,
    raw_type,
    sort_modifiers,
    split_vectors,
    stored_bits,
    tell_order,
)
from pallasite_simulator.instructions.atomics import view_of
from pallasite_simulator.instructions.multicast import on_each_device
from pallasite_simulator.instructions.updates import element_type, update_of, update_unread
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array, PtxType, Values

instructions = InstructionSet()

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_BITS = ("b32", "b64")
_UNSIGNED, _SIGNED = ("u32", "u64"), ("s32", "s64")
_HALVES = ("f16", "bf16")
_PAIRS = ("f16x2", "bf16x2")
_BYTES = ("e5m2", "e4m3")
_BYTE_PAIRS = ("e5m2x2", "e4m3x2")
_BYTE_QUADS = ("e5m2x4", "e4m3x4")

_COUNTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*_BITS, *_UNSIGNED, *_SIGNED, "f64"), (1,)),
    "f32": (1, 2, 4),
    **dict.fromkeys(_HALVES, (2, 4, 8)),
    **dict.fromkeys(_PAIRS, (1, 2, 4)),
    **dict.fromkeys(_BYTES, (4, 8)),
    **dict.fromkeys(_BYTE_PAIRS, (2, 4, 8)),
    **dict.fromkeys(_BYTE_QUADS, (1, 2, 4)),
}
"""Types, and of how many elements the vectors are that the instructions take."""

_FLOATS = (*_HALVES, *_PAIRS)
_NARROW = (*_BYTES, *_BYTE_PAIRS, *_BYTE_QUADS)

_LOADS = {
    "add": (*_UNSIGNED, "s32", "f32", "f64", *_FLOATS, *_NARROW),
    "min": (*_UNSIGNED, *_SIGNED, *_FLOATS, *_NARROW),
    "max": (*_UNSIGNED, *_SIGNED, *_FLOATS, *_NARROW),
    **dict.fromkeys(("and", "or", "xor"), _BITS),
}
"""Operations of ``ld_reduce`` to their types."""

_UPDATES = {
    name: tuple(one for one in kinds if one not in _NARROW) for name, kinds in _LOADS.items()
}
"""The same of ``red``."""

_ELEMENTS: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Access:
    """What an instruction says.

    Attributes:
      what: ``"ld_reduce"``, ``"st"`` or ``"red"``.
      operation: empty for ``st``.
      type: of an element of the vector.
      name: of that type.
      count: elements of the vector.
      wide: whether sums have more bits than the elements.
      space: that the instruction names.
      order: its order and scope.
      weak: whether it is not strong.
    """

    what: str
    operation: str
    type: PtxType
    name: str
    count: int
    wide: bool
    space: str
    order: Order
    weak: bool

    @property
    def size(self) -> int:
        """Bytes that a lane accesses on each device."""
        return self.type.bytes * self.count


_COMMON = {
    "what": ("ld_reduce", "st", "red"),
    "semantics": ("weak", "relaxed", "acquire", "release"),
    "scope": SCOPES,
    "space": ("global",),
    "operation": tuple(_LOADS),
    "accumulator": ("acc::f32", "acc::f16"),
    "vector": tuple(_VECTORS),
    "type": tuple(_COUNTS),
}

_SEMANTICS = {
    "ld_reduce": ("", "weak", "relaxed", "acquire"),
    "st": ("", "weak", "relaxed", "release"),
    "red": ("", "relaxed", "release"),
}


@instructions.register("multimem")
def bind_multimem(instruction: Instruction, binder: Binder) -> Step:
    """PTX ISA 9.7.9.14, multimem.ld_reduce, multimem.st and multimem.red."""
    access = _access(binder, sort_modifiers(binder, _COMMON))
    binder.expect_operands(2)
    if access.what == "ld_reduce":
        return _bind_load(instruction, binder, access)
    _, address = bind_address(binder, 0, access.space)
    values = _reader(binder, 1, access)
    if access.what == "st":
        return _bind_store(instruction, access, address, values)
    return _bind_update(instruction, access, address, values)


def _access(binder: Binder, words: Words) -> _Access:
    what, operation, name = words["what"], words["operation"], words["type"]
    known = {"ld_reduce": _LOADS, "red": _UPDATES, "st": {"": tuple(_COUNTS)}}.get(what)
    if known is None or name not in known.get(operation, ()):
        raise binder.error(
            "wrong operation or type",
            got=f".{operation}.{name}" if operation else f".{name}",
            expected="a type of " + ("the operation" if known else ".ld_reduce, .st or .red"),
        )
    count = _VECTORS.get(words["vector"], 1)
    if count not in _COUNTS[name]:
        raise binder.error(
            "there are no such vectors",
            got=f".v{count}.{name}" if count > 1 else f".{name} alone",
            expected="vectors of " + " or ".join(map(str, _COUNTS[name])),
        )
    accumulator = words["accumulator"]
    allowed = "acc::f32" if name in _FLOATS else "acc::f16" if name in _NARROW else ""
    if accumulator and (what != "ld_reduce" or operation != "add" or accumulator != allowed):
        raise binder.error(f"sums of .{name} are not accumulated like that", got=f".{accumulator}")
    semantics = words["semantics"]
    if semantics not in _SEMANTICS[what]:
        raise binder.error(f"multimem.{what} has no such order", got=f".{semantics}")
    if semantics not in ("", "weak") and not words["scope"]:
        raise binder.error(f".{semantics} needs a scope", expected="." + " .".join(SCOPES))
    weak = semantics == "weak" or (not semantics and what != "red")
    return _Access(
        what,
        operation,
        TYPES[name] if name in TYPES else TYPES["b8"],
        name,
        count,
        bool(accumulator),
        words["space"],
        Order.of(semantics, words["scope"]),
        weak,
    )


# Operands -----------------------------------------------------------------------------------------


def _operands(binder: Binder, number: int, count: int) -> tuple[Any, ...]:
    elements = binder.elements(number)
    if len(elements) != count:
        raise binder.error(
            "wrong number of vector elements", got=len(elements), expected=str(count)
        )
    return elements


def _reader(binder: Binder, number: int, access: _Access) -> Source:
    """A row of elements for each lane, as bits."""
    kind = access.type
    reads = [bind_stored(binder, one, kind) for one in _operands(binder, number, access.count)]

    def read(lanes: Lanes) -> Array:
        rows = np.empty((lanes.count, len(reads)), kind.storage)
        for place, one in enumerate(reads):
            rows[:, place] = stored_bits(one(lanes), kind)
        return rows

    return read


def _writer(binder: Binder, access: _Access) -> Destination:
    """Writes rows of elements, given as bits."""
    kind = raw_type(access.type)
    writes = [binder.destination(one, kind) for one in _operands(binder, 0, access.count)]

    def write(lanes: Lanes, rows: Array) -> None:
        for place, one in enumerate(writes):
            one(lanes, np.ascontiguousarray(rows[:, place]).view(kind.dtype))

    return write


# Steps --------------------------------------------------------------------------------------------


def _bind_store(instruction: Instruction, access: _Access, address: Source, read: Source) -> Step:
    kind = "write" if access.weak else "atomic"

    def step(lanes: Lanes) -> None:
        rows = read(lanes)
        columns: list[Values] = [rows[:, place] for place in range(rows.shape[1])]
        values = join_vectors(columns, TYPES[f"b{access.type.bits}"], lanes.count)
        for places in on_each_device(lanes, address(lanes), instruction):
            memory = lanes.wave.memory
            memory.store(lanes, "global", places, values, access.size, instruction, kind)
            tell_order(lanes, "global", places, access.order, instruction)

    return step


def _bind_update(instruction: Instruction, access: _Access, address: Source, read: Source) -> Step:
    element = element_type(access.type)
    change = update_of(access.operation, element, "global")

    def step(lanes: Lanes) -> None:
        bits = np.ascontiguousarray(read(lanes))
        values = bits.view(change.dtype).reshape(lanes.count, -1)
        wave = lanes.wave
        for places in on_each_device(lanes, address(lanes), instruction):
            region, offsets = wave.memory.locate(
                lanes, "global", places, access.size, instruction, "atomic"
            )
            memory = view_of(region.bytes, element)
            for number in range(values.shape[1]):
                part = np.ascontiguousarray(values[:, number])
                at = offsets // element.bytes + number
                if update_unread(memory, at, part, change):
                    wave.progress += 1
            tell_order(lanes, "global", places, access.order, instruction)

    return step


def _bind_load(instruction: Instruction, binder: Binder, access: _Access) -> Step:
    _, address = bind_address(binder, 1, access.space)
    write = _writer(binder, access)
    kind = "read" if access.weak else "atomic"
    stored = TYPES[f"b{access.type.bits}"]

    def step(lanes: Lanes) -> None:
        found: list[Array] = []
        for places in on_each_device(lanes, address(lanes), instruction):
            memory = lanes.wave.memory
            raw = memory.load(lanes, "global", places, access.size, instruction, kind)
            tell_order(lanes, "global", places, access.order, instruction)
            rows = split_vectors(raw, stored, access.count).T
            found.append(np.ascontiguousarray(rows))
        if not access.weak:
            lanes.wave.poll()
        result = _reduced(found, access)
        write(lanes, result.reshape(lanes.count, access.count))

    return step


def _reduced(found: list[Array], access: _Access) -> Array:
    """Bits of what rows of elements of all devices give."""
    base = access.name.partition("x")[0]
    storage = access.type.storage
    dtype = np.dtype(_ELEMENTS.get(base, access.type.dtype))
    rows = [one.view(dtype) for one in found]
    if dtype.kind in "iu":
        ufunc = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[access.operation]
        total = rows[0]
        for one in rows[1:]:
            total = ufunc(total, one)
        combined: Array = total.view(storage)
        return combined
    wider: Any = dtype
    if access.name in _NARROW:
        wider = np.float16
    elif access.wide:
        wider = np.float32
    values = [one.astype(wider) for one in rows]
    with np.errstate(all="ignore"):
        total = values[0]
        for one in values[1:]:
            if access.operation == "add":
                total = total + one
            else:
                # A number, if there is one.
                extreme = np.fmin if access.operation == "min" else np.fmax
                total = extreme(total, one)
        result: Array = np.ascontiguousarray(total.astype(dtype)).view(storage)
    return result
