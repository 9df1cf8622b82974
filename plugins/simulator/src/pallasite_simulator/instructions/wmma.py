"""Loads, stores and products of matrices whose fragments are opaque (PTX ISA 9.7.14.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite_simulator.binder import U32, Binder, Destination, Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions import tensor_core
from pallasite_simulator.instructions.accesses import bind_address
from pallasite_simulator.instructions.tensor_core import FORMATS
from pallasite_simulator.instructions.wmma_fragments import (
    ACCUMULATORS,
    SHAPES,
    Fragment,
    accumulator,
    extents,
    multiplicand,
)
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array, Values

instructions = InstructionSet()

_SPACES = ("global", "shared", "shared::cta")
_LAYOUTS = ("row", "col")
_ALL_SHAPES = {shape for shapes in SHAPES.values() for shape in shapes}
_NAN = {np.dtype(np.float32): 0x7FFFFFFF, np.dtype(np.float16): 0x7FFF}


class _Words:
    """The modifiers of an instruction, taken out one by one."""

    def __init__(self, binder: Binder, count: int):
        self._binder = binder
        self.rest = list(binder.instruction.modifiers[count:])
        self.take(("sync",), "sync")
        self.take(("aligned",), "aligned")

    def take(self, allowed: Any, what: str, default: str | None = None) -> str:
        """Takes the modifier that is one of these.

        Raises:
          PtxError: there is none, unless there is a default, or several.
        """
        found = [one for one in self.rest if one in allowed]
        if len(found) > 1 or (not found and default is None):
            raise self._binder.error(f"one {what} must be given", got=" ".join(found) or "none")
        if not found:
            assert default is not None
            return default
        self.rest.remove(found[0])
        return found[0]


# Loads and stores ---------------------------------------------------------------------------------


@instructions.register("wmma.load", needs_warp=True)
def bind_load(instruction: Instruction, binder: Binder) -> Step:
    """Loads a matrix: PTX ISA 9.7.14.4.3, wmma.load."""
    which = instruction.modifiers[1] if len(instruction.modifiers) > 1 else ""
    fragment, unit, space, address, stride = _access(binder, which, "abc", 1)
    registers = binder.elements(0)
    _check_count(binder, len(registers), fragment)
    kind = TYPES["b64" if fragment.bits == 64 else "b32"]
    writes = [binder.destination(one, kind) for one in registers]

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        items = np.empty((lanes.count, len(unit.places)), f"u{unit.bytes}")
        for number, places in enumerate(unit.addresses(lanes, address, stride)):
            items[:, number] = lanes.wave.memory.load(lanes, space, places, unit.bytes, instruction)
        words = items.view(kind.storage)
        for number, write in enumerate(writes):
            write(lanes, np.ascontiguousarray(words[:, number]))

    return step


@instructions.register("wmma.store", needs_warp=True)
def bind_store(instruction: Instruction, binder: Binder) -> Step:
    """Stores a matrix: PTX ISA 9.7.14.4.4, wmma.store."""
    which = instruction.modifiers[1] if len(instruction.modifiers) > 1 else ""
    fragment, unit, space, address, stride = _access(binder, which, "d", 0)
    registers = binder.elements(1)
    _check_count(binder, len(registers), fragment)
    kind = TYPES["b64" if fragment.bits == 64 else "b32"]
    reads = [binder.source(one, kind) for one in registers]

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        items = _registers(lanes, reads, kind.storage).view(f"u{unit.bytes}")
        for number, places in enumerate(unit.addresses(lanes, address, stride)):
            values = np.ascontiguousarray(items[:, number])
            lanes.wave.memory.store(lanes, space, places, values, unit.bytes, instruction)

    return step


class _Unit:
    """What is loaded and stored at once: elements, or for those of less than 8 bits, the contents
    of a register.

    Attributes:
      bytes: of a unit.
      places: for each unit, the place of its first element (minor and major) in each lane.
    """

    def __init__(self, fragment: Fragment, layout: str):
        minor, major = fragment.columns, fragment.rows
        if layout == "col":
            minor, major = major, minor
        each = max(1, 32 // fragment.bits) if fragment.bits < 8 else 1
        self._bits = fragment.bits
        self.bytes = fragment.bits * each // 8
        self.places = [
            (minor[:, number].astype(np.uint64), major[:, number].astype(np.uint64))
            for number in range(0, minor.shape[1], each)
        ]

    def addresses(self, lanes: Lanes, address: Source, stride: Source) -> list[Array]:
        """For each unit, its address in each lane."""
        start, width = address(lanes), stride(lanes).astype(np.uint64)
        within = lanes.numbers % WARP
        bits = np.uint64(self._bits)
        return [
            start + ((major[within] * width + minor[within]) * bits >> np.uint64(3))
            for minor, major in self.places
        ]


def _access(
    binder: Binder, which: str, allowed: str, place: int
) -> tuple[Fragment, _Unit, str, Source, Source]:
    """The fragment of a load or store, its units, and where it is."""
    if which not in allowed or not which:
        raise binder.error(
            "the matrix is not named", expected=" or ".join(f".{x}" for x in allowed)
        )
    words = _Words(binder, 2)
    shape = words.take(_ALL_SHAPES, "shape")
    layout = words.take(_LAYOUTS, "layout")
    space = words.take(_SPACES, "state space", "")
    kind = words.take({*SHAPES, "f32", "s32"}, "type")
    if words.rest:
        raise binder.error(f"unknown modifier .{words.rest[0]}")
    if which in "ab":
        if shape not in SHAPES.get(kind, ()):
            raise binder.error("there are no such matrices", got=f".{shape} of .{kind}")
        if kind in ("s4", "u4", "b1") and layout != ("row" if which == "a" else "col"):
            raise binder.error(f"there are no such matrices in .{layout} layout", got=f".{kind}")
        fragment = multiplicand(which, shape, kind)
    else:
        if not any(kind in ACCUMULATORS[one] and shape in shapes for one, shapes in SHAPES.items()):
            raise binder.error("there are no such matrices", got=f".{shape} of .{kind}")
        fragment = accumulator(shape, kind)
    binder.expect_operands(2, 3)
    memory, address = bind_address(binder, place, space, _SPACES)
    rows, columns = fragment.shape
    default = np.uint32(columns if layout == "row" else rows)
    given = len(binder.instruction.operands) == 3
    stride = binder.source(2, U32) if given else lambda lanes: default
    return fragment, _Unit(fragment, layout), memory, address, stride


def _check_count(binder: Binder, got: int, fragment: Fragment) -> None:
    if got != fragment.registers:
        raise binder.error("wrong number of registers", got=got, expected=str(fragment.registers))


def _registers(lanes: Lanes, reads: list[Source], dtype: Any) -> Array:
    """Registers, of shape (lanes, registers)."""
    words = np.empty((lanes.count, len(reads)), dtype)
    for number, read in enumerate(reads):
        words[:, number] = read(lanes)
    return words


# Products -----------------------------------------------------------------------------------------


@instructions.register("wmma.mma", needs_warp=True)
def bind_product(instruction: Instruction, binder: Binder) -> Step:
    """Multiplies matrices and adds them to others: PTX ISA 9.7.14.4.5, wmma.mma."""
    shape, (d, a, c), operation, saturate, rounding = _parse(binder)
    binder.expect_operands(4)
    get_a = _matrix(binder, 1, multiplicand("a", shape, a), a)
    get_b = _matrix(binder, 2, multiplicand("b", shape, a), a)
    get_c = _matrix(binder, 3, accumulator(shape, c), c)
    put = _result(binder, accumulator(shape, d), d)
    m, n, k = extents(shape)

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        rows, columns, held = get_a(lanes), get_b(lanes), get_c(lanes)
        if a == "f64":
            result = tensor_core.multiply_f64(held, rows, columns, rounding)
        else:
            if operation == "xor":
                columns = columns.swapaxes(-1, -2)
                rows, columns = tensor_core.count_differences(rows, columns)
                columns = columns.swapaxes(-1, -2)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                sums = np.matmul(rows, columns)
                if d == "s32":
                    sums = sums.astype(np.int32)
                    result = tensor_core.add_saturating(held, sums) if saturate else held + sums
                else:
                    result = (held + sums).astype(TYPES[d].dtype)
                    result.view(f"u{result.itemsize}")[np.isnan(result)] = _NAN[result.dtype]
        put(lanes, result)
        counters = lanes.wave.counters
        operations = lanes.count // WARP * 2 * m * n * k
        counters[tensor_core.COUNTER] = counters.get(tensor_core.COUNTER, 0) + operations

    return step


def _parse(binder: Binder) -> tuple[str, tuple[str, str, str], str, bool, str]:
    """The shape, the types of D, A and C, the operation of bits, whether to saturate, and the
    rounding."""
    words = _Words(binder, 1)
    shape = words.take(_ALL_SHAPES, "shape")
    saturate = bool(words.take(("satfinite",), "satfinite", ""))
    rounding = words.take(("rn", "rz", "rm", "rp"), "rounding", "")
    operation = words.take(("xor", "and"), "operation", "")
    counts = bool(words.take(("popc",), "popc", ""))
    layouts = [one for one in words.rest if one in _LAYOUTS]
    types = [one for one in words.rest if one not in _LAYOUTS]
    if len(types) == 2:
        # Of two types, A and B are of .f16.
        types = [types[0], "f16", "f16", types[1]]
    elif "f16" in types[1:3]:
        raise binder.error("the types of A and B are not named if they are .f16")
    if len(layouts) != 2 or len(types) != 4:
        raise binder.error(
            "the name has other parts than those of wmma.mma",
            expected="wmma.mma.sync.aligned.alayout.blayout.shape.dtype.ctype, with"
            " .atype.btype between the types unless they are .f16",
        )
    d, a, b, c = types
    allowed = ACCUMULATORS.get(a, ())
    if a != b or shape not in SHAPES.get(a, ()) or d not in allowed or c not in allowed:
        raise binder.error(
            "wmma has no such combination of shape and types", got=f"{shape}.{'.'.join(types)}"
        )
    if a in ("s4", "u4", "b1") and layouts != ["row", "col"]:
        raise binder.error(f"A of .{a} is in .row layout and B in .col layout")
    if (a == "b1") != (counts and bool(operation)) or (a != "b1" and (counts or operation)):
        raise binder.error(".xor.popc or .and.popc belong to .b1, which has one of them")
    if saturate and d != "s32":
        raise binder.error(".satfinite is for products of integers")
    if rounding and a != "f64":
        raise binder.error(f".{rounding} is for .f64")
    return shape, (d, a, c), operation, saturate, rounding or "rn"


def _matrix(binder: Binder, number: int, fragment: Fragment, kind: str) -> Callable[[Lanes], Array]:
    """Puts the fragments of an operand together: of shape (warps, rows, columns)."""
    elements = binder.elements(number)
    _check_count(binder, len(elements), fragment)
    word = TYPES["b64" if fragment.bits == 64 else "b32"]
    reads = [binder.source(one, TYPES[kind] if kind == "f32" else word) for one in elements]
    index, dtype = fragment.index, TYPES[kind].dtype if kind == "f32" else word.storage
    decode = _as_accumulators(kind) if kind in ("f32", "s32") else FORMATS[kind].decode

    def get(lanes: Lanes) -> Array:
        values = decode(_registers(lanes, reads, dtype))
        found: Array = values.reshape(lanes.count // WARP, -1)[:, index]
        return found

    return get


def _as_accumulators(kind: str) -> Callable[[Array], Array]:
    dtype = TYPES[kind].dtype
    return lambda words: words.view(dtype)


def _result(binder: Binder, fragment: Fragment, kind: str) -> Callable[[Lanes, Array], None]:
    """Takes a result apart into fragments."""
    elements = binder.elements(0)
    _check_count(binder, len(elements), fragment)
    word = TYPES["b64" if fragment.bits == 64 else "b32"]
    writes: list[Destination] = [binder.destination(one, word) for one in elements]

    def put(lanes: Lanes, result: Values) -> None:
        parts = np.ascontiguousarray(result[:, fragment.rows, fragment.columns])
        words = parts.reshape(lanes.count, -1).view(word.storage)
        for number, write in enumerate(writes):
            write(lanes, np.ascontiguousarray(words[:, number]))

    return put
