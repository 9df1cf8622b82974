"""Atomic operations on memory: PTX ISA 9.7.13.5 (atom) and 9.7.13.6 (red)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_simulator.binder import Binder, Destination, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    CACHE_HINT,
    SCOPES,
    VECTORS,
    Order,
    Words,
    bind_address,
    bind_cache_policy,
    bind_stored,
    by_space,
    raw_type,
    sort_modifiers,
    stored_bits,
    tell_order,
)
from pallasite_simulator.instructions.updates import (
    Update,
    compare_and_swap,
    element_type,
    update,
    update_of,
    update_unread,
)
from pallasite_simulator.ptx.syntax import Instruction, Operand, Sink
from pallasite_simulator.types import TYPES, Array, PtxType

instructions = InstructionSet()

SPACES = ("global", "shared", "shared::cta", "shared::cluster")

_INTEGERS = ("u32", "s32", "u64", "s64")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_BITS = ("b32", "b64")

OPERATIONS: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALVES),
    "min": (*_INTEGERS, *_HALVES),
    "max": (*_INTEGERS, *_HALVES),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
    "exch": (*_BITS, "b128"),
    "cas": ("b16", *_BITS, "b128"),
}
"""Operations of ``atom`` to their types."""

_VECTORS = {"f32": (2, 4), "f16": (2, 4, 8), "bf16": (2, 4, 8), "f16x2": (2, 4), "bf16x2": (2, 4)}

_ATOM = {
    "semantics": ("relaxed", "acquire", "release", "acq_rel"),
    "scope": SCOPES,
    "space": SPACES,
    "operation": tuple(OPERATIONS),
    "noftz": ("noftz",),
    "vector": tuple(VECTORS),
    "type": tuple(dict.fromkeys(name for names in OPERATIONS.values() for name in names)),
    "hint": (CACHE_HINT,),
}

_RED = {
    **_ATOM,
    "semantics": ("relaxed", "release"),
    "operation": tuple(name for name in OPERATIONS if name not in ("exch", "cas")),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    """What ``atom`` or ``red`` does.

    Attributes:
      name: of the operation.
      type: of an element; ``count`` elements make a vector.
      order: the memory order.
      hint: whether a cache policy is the last operand.
    """

    name: str
    type: PtxType
    count: int
    space: str
    order: Order
    hint: bool

    @property
    def size(self) -> int:
        """Bytes of a lane's access."""
        return self.type.bytes * self.count


def _operation(binder: Binder, words: Words) -> _Operation:
    name, kind, vector = words["operation"], words["type"], words["vector"]
    if not name or kind not in OPERATIONS[name]:
        raise binder.error(
            "wrong operation or type",
            got=f".{name}.{kind}",
            expected="one of ."
            + " .".join(f"{one}" for one in (OPERATIONS[name] if name else OPERATIONS)),
        )
    halves = kind in _HALVES
    if halves != (words["noftz"] != ""):
        raise binder.error(f".{kind} {'needs' if halves else 'excludes'} .noftz")
    count = VECTORS.get(vector, 1)
    if vector:
        if name not in ("add", "min", "max") or count not in _VECTORS.get(kind, ()):
            raise binder.error("there are no such vectors", got=f".{name}.{vector}.{kind}")
        if words["space"] not in ("", "global"):
            raise binder.error("vectors are updated in .global only", got=f".{words['space']}")
    elif halves and name != "add":
        raise binder.error(f".{name}.{kind} needs a vector", expected=".v2, .v4 or .v8")
    if words["semantics"] not in ("", "relaxed") and not words["scope"]:
        raise binder.error(f".{words['semantics']} needs a scope", expected="." + " .".join(SCOPES))
    order = Order.of(words["semantics"], words["scope"])
    return _Operation(name, TYPES[kind], count, words["space"], order, words["hint"] != "")


@instructions.register("atom")
def bind_atom(instruction: Instruction, binder: Binder) -> Step:
    """Atomic operation that returns what was there before: PTX ISA 9.7.13.5 (atom)."""
    operation = _operation(binder, sort_modifiers(binder, _ATOM))
    values = 2 if operation.name == "cas" else 1
    binder.expect_operands(2 + values + operation.hint)
    if operation.hint:
        bind_cache_policy(binder, 2 + values)
    write = _writer(binder, operation)
    if operation.name == "cas":
        return _bind_cas(instruction, binder, operation, write)
    return _bind_update(instruction, binder, operation, 1, write)


@instructions.register("red")
def bind_red(instruction: Instruction, binder: Binder) -> Step:
    """Atomic operation that returns nothing: PTX ISA 9.7.13.6 (red)."""
    operation = _operation(binder, sort_modifiers(binder, _RED))
    binder.expect_operands(2 + operation.hint)
    if operation.hint:
        bind_cache_policy(binder, 2)
    return _bind_update(instruction, binder, operation, 0, None)


# Operands -----------------------------------------------------------------------------------------


def _listed(binder: Binder, operand: Operand, count: int) -> tuple[Operand, ...]:
    """The elements of an operand."""
    if isinstance(operand, Sink):
        return (operand,) * count
    elements = binder.elements(operand)
    if len(elements) != count:
        raise binder.error(
            "wrong number of vector elements", got=len(elements), expected=str(count)
        )
    return elements


def _writer(binder: Binder, operation: _Operation) -> Destination | None:
    """Writes bits, one row of elements for each lane; None if they are not wanted."""
    operands = _listed(binder, binder.operand(0), operation.count)
    if all(isinstance(one, Sink) for one in operands):
        return None
    kind = raw_type(operation.type)
    if kind.bits == 128:
        return binder.destination(operands[0], kind)
    writes = [binder.destination(one, kind) for one in operands]

    def write(lanes: Lanes, found: Array) -> None:
        columns = found.reshape(lanes.count, -1)
        for number, one in enumerate(writes):
            one(lanes, np.ascontiguousarray(columns[:, number]).view(kind.dtype))

    return write


def _reader(binder: Binder, operand: int, operation: _Operation) -> Source:
    """The value operand: bits, one row of elements for each lane; one-dimensional for scalars."""
    elements = _listed(binder, binder.operand(operand), operation.count)
    kind = operation.type
    reads = [bind_stored(binder, one, kind) for one in elements]
    first = reads[0]
    if kind.bits == 128:
        return lambda lanes: np.broadcast_to(first(lanes), (lanes.count, 2))
    if len(reads) == 1:

        def read(lanes: Lanes) -> Array:
            bits = stored_bits(first(lanes), kind)
            return bits if bits.ndim else np.full(lanes.count, bits)

        return read

    def read_all(lanes: Lanes) -> Array:
        rows = np.empty((lanes.count, len(reads)), kind.storage)
        for number, one in enumerate(reads):
            rows[:, number] = stored_bits(one(lanes), kind)
        return rows

    return read_all


# Steps --------------------------------------------------------------------------------------------


def view_of(contents: Array, kind: PtxType) -> Array:
    """Memory as elements of a type; ``b128`` as rows of two words."""
    if kind.bits == 128:
        return contents.view(np.uint64).reshape(-1, 2)
    return contents.view(kind.dtype)


def _bind_update(
    instruction: Instruction,
    binder: Binder,
    operation: _Operation,
    place: int,
    write: Destination | None,
) -> Step:
    space, address = bind_address(binder, place, operation.space, SPACES)
    read = _reader(binder, place + 1, operation)
    kind, size, order = operation.type, operation.size, operation.order
    element = element_type(kind)
    updates = {
        name: update_of(operation.name, element, name) for name in ("global", "shared", "local")
    }
    exchanges = operation.name == "exch"

    def step(lanes: Lanes) -> None:
        addresses, bits = address(lanes), read(lanes)
        found = None if write is None else np.empty_like(bits)
        wave = lanes.wave
        for name, chosen, mask, inner in by_space(lanes, space, addresses):
            region, offsets = wave.memory.locate(chosen, name, inner, size, instruction, "atomic")
            memory = view_of(region.bytes, element)
            given = bits if mask is None else bits[mask]
            old = _apply(memory, offsets // element.bytes, given, updates[region.space], write)
            if old.changed:
                wave.progress += 1
            if not old.changed or (
                exchanges and old.found is not None and np.any(old.found == given)
            ):
                wave.poll()
            if found is not None:
                found[slice(None) if mask is None else mask] = old.found
        tell_order(lanes, space, addresses, order, instruction)
        if write is not None:
            write(lanes, found)

    return step


@dataclasses.dataclass(frozen=True, slots=True)
class _Old:
    """What was found (bits as the values were given), and whether memory is different now."""

    found: Array | None
    changed: bool


def _apply(
    memory: Array, places: Array, bits: Array, what: Update, write: Destination | None
) -> _Old:
    """Updates all elements of each lane; ``places`` are those of the first elements."""
    if bits.ndim == 1 and bits.itemsize == what.dtype.itemsize:
        values: Any = bits.view(what.dtype)
        if write is None:
            return _Old(None, update_unread(memory, places, values, what))
        found, changed = update(memory, places, values, what)
        return _Old(found.view(bits.dtype), changed)
    if what.dtype.itemsize == 16:
        found, changed = update(memory, places, bits, what)
        return _Old(found, changed)
    values = np.ascontiguousarray(bits).view(what.dtype).reshape(len(places), -1)
    found = np.empty_like(values)
    different = False
    for number in range(values.shape[1]):
        part = np.ascontiguousarray(values[:, number])
        found[:, number], changed = update(memory, places + number, part, what)
        different |= changed
    return _Old(found.view(bits.dtype).reshape(bits.shape), different)


def _bind_cas(
    instruction: Instruction, binder: Binder, operation: _Operation, write: Destination | None
) -> Step:
    """Compare and swap: PTX ISA 9.7.13.5, ``atom.cas``."""
    space, address = bind_address(binder, 1, operation.space, SPACES)
    read_wanted, read = _reader(binder, 2, operation), _reader(binder, 3, operation)
    kind, size, order = operation.type, operation.size, operation.order
    failure = dataclasses.replace(order, releases=False)

    def step(lanes: Lanes) -> None:
        addresses, wanted, values = address(lanes), read_wanted(lanes), read(lanes)
        found, changed = np.empty_like(values), np.empty(lanes.count, np.bool_)
        wave = lanes.wave
        for name, chosen, mask, inner in by_space(lanes, space, addresses):
            region, offsets = wave.memory.locate(chosen, name, inner, size, instruction, "atomic")
            part = slice(None) if mask is None else mask
            found[part], changed[part] = compare_and_swap(
                view_of(region.bytes, kind), offsets // size, wanted[part], values[part]
            )
        if changed.any():
            wave.progress += 1
        if not changed.all():
            wave.poll()
        _tell(lanes, space, addresses, changed, order, instruction)
        _tell(lanes, space, addresses, ~changed, failure, instruction)
        if write is not None:
            write(lanes, found)

    return step


def _tell(
    lanes: Lanes, space: str, addresses: Any, mask: Array, order: Order, instruction: Instruction
) -> None:
    """Tells the observer of the order of those lanes for which ``mask`` is true."""
    if lanes.wave.observer is not None and (order.acquires or order.releases):
        chosen = lanes.where(mask)
        if chosen is not None:
            part = np.broadcast_to(addresses, (lanes.count,))[mask]
            tell_order(chosen, space, part, order, instruction)
