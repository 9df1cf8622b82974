"""Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.11)."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.binder import Binder, Destination, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import (
    CACHE_HINT,
    L1_PRIORITIES,
    L2_PRIORITIES,
    PREFETCH_SIZES,
    SCOPES,
    SPACES,
    VECTORS,
    Order,
    Words,
    bind_address,
    bind_cache_policy,
    bind_stored,
    check_addresses,
    from_memory,
    join_vectors,
    raw_type,
    sort_modifiers,
    split_vectors,
    tell_order,
    to_memory,
)
from pallasite_simulator.ptx.syntax import Address, Instruction, Operand, Sink, Symbol
from pallasite_simulator.types import TYPES, Array, PtxType, Values

instructions = InstructionSet()

_TYPES = tuple(
    [f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64)] + ["b128", "f32", "f64"]
)

_COMMON = {
    "space": SPACES,
    "scope": SCOPES,
    "l1": L1_PRIORITIES,
    "l2": L2_PRIORITIES,
    "hint": (CACHE_HINT,),
    "vector": tuple(VECTORS),
    "type": _TYPES,
    "mmio": ("mmio",),
}

_LOAD = {
    **_COMMON,
    "semantics": ("weak", "volatile", "relaxed", "acquire"),
    "caching": ("ca", "cg", "cs", "lu", "cv"),
    "nc": ("nc",),
    "prefetch": PREFETCH_SIZES,
}

_STORE = {
    **_COMMON,
    "semantics": ("weak", "volatile", "relaxed", "release"),
    "caching": ("wb", "cg", "cs", "wt"),
}

_LOAD_UNIFORM = {"space": ("global",), "vector": ("v2", "v4"), "type": _TYPES}


@dataclasses.dataclass(frozen=True, slots=True)
class _Access:
    """What a load or store does: ``kind`` for :class:`Memory`, ``size`` in bytes for each lane."""

    space: str
    address: Source
    type: PtxType
    elements: tuple[Operand, ...]
    size: int
    kind: str
    order: Order


def _access(binder: Binder, words: Words, place: int, value: int, weak: str) -> _Access:
    """Reads what loads and stores have in common.

    Args:
      place, value: numbers of the operands.
      weak: :class:`Memory`'s kind of access if it is a weak one.
    """
    _check_order(binder, words)
    if not words["type"]:
        raise binder.error("the instruction has no type", expected="one of ." + " .".join(_TYPES))
    if binder.instruction.modifiers[-1] != words["type"]:
        raise binder.error("the type must be the last modifier")
    kind = TYPES[words["type"]]
    hint = words["hint"] != ""
    binder.expect_operands(3 if hint else 2)
    if hint:
        bind_cache_policy(binder, 2)
    elements = binder.elements(value)
    count = VECTORS.get(words["vector"], 1)
    size = kind.bytes * count
    if len(elements) != count:
        raise binder.error(
            "wrong number of vector elements", got=len(elements), expected=str(count)
        )
    if size > 16 or count == 8:
        _check_wide(binder, count, kind, words["space"])
    space, address = bind_address(binder, place, words["space"])
    strong = words["semantics"] not in ("", "weak")
    if strong and space in ("const", "param"):
        raise binder.error(f".{space} memory has no .{words['semantics']} accesses")
    order = Order.of(words["semantics"], words["scope"])
    return _Access(space, address, kind, elements, size, "atomic" if strong else weak, order)


def _check_wide(binder: Binder, count: int, kind: PtxType, space: str) -> None:
    """PTX ISA 5.4.2: vectors of 32 bytes are only in global memory."""
    if (count, kind.bytes) not in ((8, 4), (4, 8)):
        raise binder.error(
            "there are no such vectors",
            got=f".v{count}.{kind.name}",
            expected="at most 16 bytes, or 32 bytes as .v8 of 4 bytes or .v4 of 8 bytes",
        )
    if space not in ("", "global"):
        raise binder.error("vectors of 32 bytes are only in .global", got=f".{space}")


def _check_order(binder: Binder, words: Words) -> None:
    """PTX ISA 8.2: strong accesses other than volatile ones name a scope, others do not."""
    needs = words["semantics"] in ("relaxed", "acquire", "release")
    if needs and not words["scope"]:
        raise binder.error(f".{words['semantics']} needs a scope", expected="." + " .".join(SCOPES))
    if words["scope"] and not needs:
        raise binder.error(f".{words['scope']} needs .relaxed, .acquire or .release")
    if words["mmio"] and (words["semantics"], words["scope"]) != ("relaxed", "sys"):
        raise binder.error(".mmio needs .relaxed.sys")
    if words["caching"] and (words["semantics"] not in ("", "weak") or words["l1"] or words["l2"]):
        raise binder.error(f".{words['caching']} excludes a memory order and eviction priorities")


@instructions.register("ld")
def bind_load(instruction: Instruction, binder: Binder) -> Step:
    """Load: PTX ISA 9.7.9.8 (ld) and 9.7.9.9 (ld.global.nc)."""
    words = sort_modifiers(binder, _LOAD)
    if words["nc"] and (words["space"] != "global" or words["semantics"]):
        raise binder.error(".nc needs .global, and no memory order")
    return _bind_load(instruction, binder, words)


@instructions.register("ldu")
def bind_uniform_load(instruction: Instruction, binder: Binder) -> Step:
    """Load from an address that is the same in all threads of a warp: PTX ISA 9.7.9.10 (ldu)."""
    return _bind_load(instruction, binder, sort_modifiers(binder, _LOAD_UNIFORM))


def _bind_load(instruction: Instruction, binder: Binder, words: Words) -> Step:
    access = _access(binder, words, 1, 0, "read")
    operand = binder.operand(1)
    assert isinstance(operand, Address)
    if access.space == "param" and isinstance(operand.base, Symbol):
        return _bind_parameter_load(binder, access, operand.base, operand.offset)
    write = _writer(binder, access)
    space, address, size, kind = access.space, access.address, access.size, access.kind
    order = access.order

    def load(lanes: Lanes) -> None:
        write(lanes, lanes.wave.memory.load(lanes, space, address(lanes), size, instruction, kind))

    def strong_load(lanes: Lanes) -> None:
        places = address(lanes)
        raw = lanes.wave.memory.load(lanes, space, places, size, instruction, kind)
        lanes.wave.poll(places, lanes)
        tell_order(lanes, space, places, order, instruction)
        write(lanes, raw)

    return strong_load if kind == "atomic" else load


def _writer(binder: Binder, access: _Access) -> Destination:
    """Writes what :meth:`Memory.load` returned to the destinations."""
    kind, count = raw_type(access.type), len(access.elements)
    writes = [binder.destination(one, kind) for one in access.elements]
    if count == 1:
        (write,) = writes
        return lambda lanes, raw: write(lanes, from_memory(raw, kind))

    def write_all(lanes: Lanes, raw: Array) -> None:
        for write, values in zip(writes, split_vectors(raw, kind, count), strict=True):
            write(lanes, values)

    return write_all


def _bind_parameter_load(binder: Binder, access: _Access, symbol: Symbol, offset: int) -> Step:
    """Kernel parameters are the same for all lanes: PTX ISA 5.1.6.1."""
    (variable, start), *_ = [
        (variable, start)
        for variable, start in binder.program.parameters
        if variable.name == symbol.name
    ]
    offset += symbol.offset
    if offset < 0 or offset + access.size > variable.bytes:
        raise binder.error(
            "out of bounds of the parameter",
            got=f"bytes {offset} to {offset + access.size}",
            expected=f"inside the {variable.bytes} bytes of {variable.name}",
        )
    if (start + offset) % access.size:
        raise binder.error(f"an access of {access.size} bytes is misaligned", got=offset)
    kind, width = raw_type(access.type), access.type.bytes
    places = [(start + offset) // width + number for number in range(len(access.elements))]
    targets = [
        (binder.destination(one, kind), place)
        for one, place in zip(access.elements, places, strict=True)
    ]

    def load(lanes: Lanes) -> None:
        held = lanes.wave.memory.regions["param"].views[width]
        for write, place in targets:
            write(lanes, held[place].view(kind.dtype))

    def load_wide(lanes: Lanes) -> None:
        held = lanes.wave.memory.regions["param"].views[8]
        for write, place in targets:
            write(lanes, np.tile(held[2 * place : 2 * place + 2], (lanes.count, 1)))

    return load if kind.bits < 128 else load_wide


@instructions.register("st")
def bind_store(instruction: Instruction, binder: Binder) -> Step:
    """Store: PTX ISA 9.7.9.11 (st)."""
    words = sort_modifiers(binder, _STORE)
    access = _access(binder, words, 0, 1, "write")
    if access.space in ("const", "param"):
        raise binder.error(f".{access.space} memory cannot be written")
    space, address, size, kind = access.space, access.address, access.size, access.kind
    order, element = access.order, access.type
    if any(isinstance(one, Sink) for one in access.elements):
        return _bind_partial_store(instruction, binder, access)
    reads = [bind_stored(binder, one, element) for one in access.elements]
    first = reads[0]

    def store(lanes: Lanes) -> None:
        values = to_memory(first(lanes), element, lanes.count)
        lanes.wave.memory.store(lanes, space, address(lanes), values, size, instruction, kind)

    def store_vectors(lanes: Lanes) -> None:
        values = join_vectors([read(lanes) for read in reads], element, lanes.count)
        lanes.wave.memory.store(lanes, space, address(lanes), values, size, instruction, kind)

    weak = store if len(reads) == 1 else store_vectors

    def releasing_store(lanes: Lanes) -> None:
        places: Values = address(lanes)
        weak(lanes)
        tell_order(lanes, space, places, order, instruction)

    return releasing_store if order.releases else weak


def _bind_partial_store(instruction: Instruction, binder: Binder, access: _Access) -> Step:
    """Stores of vectors of 32 bytes of which ``_`` leaves out elements: PTX ISA 9.7.9.11."""
    if access.size < 32:
        raise binder.error("only vectors of 32 bytes are stored in part, with _ in places")
    if access.order.releases:
        raise binder.error("a store of a part of a vector has no memory order")
    element, width = access.type, access.type.bytes
    reads = [
        (np.uint64(number * width), bind_stored(binder, one, element))
        for number, one in enumerate(access.elements)
        if not isinstance(one, Sink)
    ]
    space, address, size, kind = access.space, access.address, access.size, access.kind

    def store(lanes: Lanes) -> None:
        places = address(lanes)
        check_addresses(lanes, space, places, size, instruction, alignment=size)
        for offset, read in reads:
            values = to_memory(read(lanes), element, lanes.count)
            memory = lanes.wave.memory
            memory.store(lanes, space, places + offset, values, width, instruction, kind)

    return store
