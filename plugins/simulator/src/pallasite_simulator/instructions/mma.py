"""Warp-level MMA, with the layouts of fragments that PTX defines (PTX ISA 9.7.14.5).

Lane ``4 * g + t`` holds parts of the rows ``g`` and ``g + 8`` of A, of the column ``g`` of B and of
the rows ``g`` and ``g + 8`` of the accumulators. Along K, the 32-bit registers of the lanes
``t = 0 ... 3`` hold consecutive elements, and each further register (or pair, for 16 rows) of a
lane continues behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_simulator.binder import U32, U64, Binder, Destination, Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions import tensor_core
from pallasite_simulator.instructions.products import add_products
from pallasite_simulator.instructions.tensor_core import FORMATS
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

_SHAPES: dict[str, tuple[str, ...]] = {
    "f16": ("m8n8k4", "m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    "e4m3": ("m16n8k16", "m16n8k32"),
    "s8": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "s4": ("m8n8k32", "m16n8k32", "m16n8k64"),
    "b1": ("m8n8k128", "m16n8k128", "m16n8k256"),
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
}
"""Shapes by the type of A; types that can be combined with each other are listed once."""

_FAMILY = {"e5m2": "e4m3", "u8": "s8", "u4": "s4"}

_ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "s8": ("s32",),
    "s4": ("s32",),
    "b1": ("s32",),
    "f64": ("f64",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What the name of an instruction says: types of D, A, B and C, rounding of ``.f64``."""

    m: int
    k: int
    layout: tuple[str, str]
    d: str
    a: str
    b: str
    c: str
    operation: str
    saturate: bool
    rounding: str

    @property
    def shape(self) -> str:
        return f"m{self.m}n8k{self.k}"

    @property
    def elements(self) -> int:
        """Elements of A or B in a register (32 bits, or 64 for ``.f64``)."""
        return max(1, 32 // FORMATS[self.a].bits)

    @property
    def steps(self) -> int:
        """How many registers follow each other along K."""
        return self.k // (4 * self.elements)

    @property
    def halves(self) -> int:
        """How many groups of eight rows there are."""
        return self.m // 8


@instructions.register("mma", needs_warp=True)
def bind_mma(instruction: Instruction, binder: Binder) -> Step:
    """Multiplies matrices and adds them to others: PTX ISA 9.7.14.5.14, mma."""
    form = _parse(binder)
    binder.expect_operands(4)
    if form.shape == "m8n8k4" and form.a == "f16":
        return _bind_quarters(instruction, binder, form)
    if form.a == "f64":
        return _bind_f64(instruction, binder, form)
    a = _sources(binder, 1, "b32", form.halves * form.steps)
    b = _sources(binder, 2, "b32", form.steps)
    kind = _register_type(form.d)
    count = form.halves if form.d == "f16" else 2 * form.halves
    c, d = _sources(binder, 3, kind, count), _destinations(binder, 0, kind, count)
    operations, differences = 2 * form.m * 8 * form.k, form.operation == "xor"
    decode_a, decode_b = FORMATS[form.a].decode, FORMATS[form.b].decode
    add = _add_f16 if form.d == "f16" else _add_saturating if form.saturate else _add
    halves, dtype = form.halves, TYPES[kind].dtype

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        warps = lanes.count // WARP
        rows = decode_a(_fragment(lanes, a, halves, U32.storage)).reshape(warps, form.m, -1)
        columns = decode_b(_fragment(lanes, b, 1, U32.storage)).reshape(warps, 8, -1)
        if differences:
            rows, columns = tensor_core.count_differences(rows, columns)
        held = np.empty((count, lanes.count), dtype)
        for number, read in enumerate(c):
            held[number] = read(lanes)
        for write, values in zip(d, add(held, tensor_core.along_k(rows), columns), strict=True):
            write(lanes, values)
        _count(lanes, warps * operations)

    return step


def _add(held: Array, rows: Array, columns: Array) -> Array:
    """Adds products to accumulators, of shape (registers, lanes), in place."""
    tiles = len(rows)
    add_products(rows, columns, held, np.arange(tiles) * WARP, np.ones(tiles, np.uint8))
    return held


def _sums(registers: int, rows: Array, columns: Array, dtype: Any, pairs: bool) -> Array:
    """Products on their own, in the order of registers."""
    tiles = len(rows)
    sums = np.empty((registers, tiles * WARP * (1 + pairs)), dtype)
    starts, keep = np.arange(tiles) * WARP, np.zeros(tiles, np.uint8)
    add_products(rows, columns, sums, starts, keep, pairs=pairs)
    return sums


def _add_saturating(held: Array, rows: Array, columns: Array) -> Array:
    sums = _sums(len(held), rows, columns, np.int32, False)
    return tensor_core.add_saturating(held, sums)


def _add_f16(held: Array, rows: Array, columns: Array) -> Array:
    sums = _sums(len(held), rows, columns, np.float32, True)
    return tensor_core.add_to_f16(held.view(np.float16), sums).view(np.uint32)


def _bind_f64(instruction: Instruction, binder: Binder, form: _Form) -> Step:
    """Products of ``.f64``: PTX ISA 9.7.14.5.2 and others."""
    a = _sources(binder, 1, "b64", form.halves * form.steps)
    b = _sources(binder, 2, "b64", form.steps)
    c, d = (
        _sources(binder, 3, "f64", 2 * form.halves),
        _destinations(binder, 0, "f64", 2 * form.halves),
    )
    decode = FORMATS["f64"].decode
    halves, operations = form.halves, 2 * form.m * 8 * form.k

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        warps = lanes.count // WARP
        rows = decode(_fragment(lanes, a, halves, U64.storage)).reshape(warps, form.m, -1)
        columns = decode(_fragment(lanes, b, 1, U64.storage)).reshape(warps, 8, -1)
        held = np.empty((warps, halves, 8, 4, 2))
        for number, read in enumerate(c):
            values = read(lanes)
            held[:, number // 2, :, :, number % 2] = (
                values.reshape(-1, 8, 4) if values.ndim else values
            )
        total = tensor_core.multiply_f64(
            held.reshape(warps, form.m, 8), rows, columns.swapaxes(1, 2), form.rounding
        )
        parts = total.reshape(-1, halves, WARP, 2)
        for number, write in enumerate(d):
            write(lanes, parts[:, number // 2, :, number % 2].reshape(-1))
        _count(lanes, warps * operations)

    return step


# Names --------------------------------------------------------------------------------------------


def _parse(binder: Binder) -> _Form:
    """Takes the name apart.

    Raises:
      PtxError: there is no such instruction, or the simulator does not have it.
    """
    words = list(binder.instruction.modifiers)

    def take(*allowed: str, missing: str = "") -> str:
        found = [one for one in words if one in allowed]
        if len(found) > 1 or not (found or not missing):
            raise binder.error(missing or "two modifiers that exclude each other")
        if found:
            words.remove(found[0])
        return found[0] if found else ""

    if "sp" in words or "sp::ordered_metadata" in words:
        raise binder.error("the simulator does not have products of sparse matrices (mma.sp)")
    if any(one.startswith(("kind::", "block_scale")) for one in words):
        raise binder.error("the simulator does not have mma with .kind or .block_scale")
    take("sync", missing=".sync is mandatory")
    take("aligned", missing=".aligned is mandatory")
    shapes = [one for one in words if one.startswith("m") and one[1:2].isdigit()]
    if len(shapes) != 1:
        raise binder.error("mma has one shape", got=" ".join(shapes) or "none")
    words.remove(shapes[0])
    saturate = bool(take("satfinite"))
    rounding = take("rn", "rz", "rm", "rp")
    operation = take("and", "xor")
    counts = bool(take("popc"))
    layout = tuple(one for one in words if one in ("row", "col"))
    types = tuple(one for one in words if one not in ("row", "col"))
    if len(types) != 4 or len(layout) != 2:
        raise binder.error(
            "the name has other parts than those of mma",
            expected="mma.sync.aligned.shape.alayout.blayout.dtype.atype.btype.ctype",
        )
    d, a, b, c = types
    family = _FAMILY.get(a, a)
    if family not in _SHAPES or _FAMILY.get(b, b) != family or shapes[0] not in _SHAPES[family]:
        raise binder.error(
            "mma has no such combination of shape and types",
            got=f"{shapes[0]} of .{a} and .{b}",
            expected=", ".join(_SHAPES.get(family, ())) or "other types",
        )
    quarters = shapes[0] == "m8n8k4" and a == "f16"
    if layout != ("row", "col") and not quarters:
        raise binder.error("A is in .row layout and B in .col layout", got=" and ".join(layout))
    allowed = _ACCUMULATORS[family]
    if c not in allowed or d not in allowed or (c != d and not (quarters and d == "f32")):
        raise binder.error("mma has no such accumulators for these types", got=f".{d} and .{c}")
    if (family == "b1") != (counts and bool(operation)) or (
        family != "b1" and (operation or counts)
    ):
        raise binder.error(".xor.popc or .and.popc belong to .b1, which has one of them")
    if saturate and family not in ("s8", "s4"):
        raise binder.error(".satfinite is for products of integers")
    if rounding and a != "f64":
        raise binder.error(f".{rounding} is for .f64")
    m, rest = shapes[0][1:].split("n")
    k = int(rest.split("k")[1])
    return _Form(
        int(m), k, (layout[0], layout[1]), d, a, b, c, operation, saturate, rounding or "rn"
    )


def _register_type(kind: str) -> str:
    """As what the registers of accumulators are read: two ``.f16`` are in one of 32 bits."""
    return "b32" if kind == "f16" else kind


def _sources(binder: Binder, number: int, kind: str, count: int) -> list[Source]:
    elements = binder.elements(number)
    _check_count(binder, number, len(elements), count)
    return [binder.source(one, TYPES[kind]) for one in elements]


def _destinations(binder: Binder, number: int, kind: str, count: int) -> list[Destination]:
    elements = binder.elements(number)
    _check_count(binder, number, len(elements), count)
    return [binder.destination(one, TYPES[kind]) for one in elements]


def _check_count(binder: Binder, number: int, got: int, expected: int) -> None:
    if got != expected:
        raise binder.error(
            f"wrong number of registers of operand {number}", got=got, expected=str(expected)
        )


def _count(lanes: Lanes, operations: int) -> None:
    counters = lanes.wave.counters
    counters[tensor_core.COUNTER] = counters.get(tensor_core.COUNTER, 0) + operations


# Fragments ----------------------------------------------------------------------------------------


def _fragment(lanes: Lanes, reads: Sequence[Source], halves: int, word: Any) -> Array:
    """The words of A or B: of shape (warps, halves, 8, words of a row)."""
    words = np.empty((lanes.count // WARP, halves, 8, len(reads) // halves, 4), word)
    for number, read in enumerate(reads):
        values = read(lanes)
        along, half = divmod(number, halves)
        words[:, half, :, along] = values.reshape(-1, 8, 4) if values.ndim else values
    return words.reshape(*words.shape[:3], -1)


# Four products of quarters of the warp ------------------------------------------------------------


def _bind_quarters(instruction: Instruction, binder: Binder, form: _Form) -> Step:
    """Four products of 8x4 and 4x8 matrices: PTX ISA 9.7.14.5.1.

    Each is computed by four of the first 16 lanes, and those 16 behind them: ``h`` says which
    sixteen, ``q`` the product, ``t`` the lane of four.
    """
    reads_a, reads_b = _sources(binder, 1, "b32", 2), _sources(binder, 2, "b32", 2)
    reads_c = _sources(binder, 3, _register_type(form.c), 4 if form.c == "f16" else 8)
    writes = _destinations(binder, 0, _register_type(form.d), 4 if form.d == "f16" else 8)
    # Of B, .row means that a lane holds several columns.
    across = (form.layout[0] == "col", form.layout[1] == "row")
    decode = FORMATS["f16"].decode

    def factor(lanes: Lanes, reads: Sequence[Source], across: bool) -> Array:
        """A, or B by columns: of shape (warps, q, 8, 4)."""
        parts = decode(_quarter_words(lanes, reads))
        rows = parts if not across else parts.swapaxes(-1, -2)
        found: Array = rows.transpose(0, 2, 1, 3, 4).reshape(-1, 4, 8, 4)
        return found

    def step(lanes: Lanes) -> None:
        tensor_core.check_whole_warps(lanes, instruction)
        a = factor(lanes, reads_a, across[0])
        b = factor(lanes, reads_b, across[1])
        held = _quarter_accumulators(lanes, reads_c, form.c)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            total = np.matmul(a, b.swapaxes(-1, -2)) + held
            result = total if form.d == "f32" else total.astype(np.float16)
        _write_quarters(lanes, writes, result)
        _count(lanes, lanes.count // WARP * 4 * 2 * 8 * 8 * 4)

    return step


def _quarter_words(lanes: Lanes, reads: Sequence[Source]) -> Array:
    """Registers: of shape (warps, h, q, t, registers)."""
    words = np.empty((lanes.count // WARP, 2, 4, 4, len(reads)), np.uint32)
    for number, read in enumerate(reads):
        values = read(lanes)
        words[..., number] = values.reshape(-1, 2, 4, 4) if values.ndim else values
    return words


def _quarter_accumulators(lanes: Lanes, reads: Sequence[Source], kind: str) -> Array:
    """C: of shape (warps, q, 8, 8)."""
    if kind == "f16":
        # Row 4h + t, all columns.
        halves = _quarter_words(lanes, reads).view(np.float16)
        return halves.transpose(0, 2, 1, 3, 4).reshape(-1, 4, 8, 8)
    held = np.empty((lanes.count // WARP, 2, 4, 2, 2, 2, 2, 2), np.float32)
    for number, read in enumerate(reads):
        values = read(lanes)
        held[..., number // 4, number // 2 % 2, number % 2] = (
            values.reshape(-1, 2, 4, 2, 2) if values.ndim else values
        )
    # From (h, q, t / 2, t % 2, i / 4, i / 2 % 2, i % 2): row 4h + 2 (i / 2 % 2) + t % 2,
    # column 4 (i / 4) + 2 (t / 2) + i % 2.
    return held.transpose(0, 2, 1, 6, 4, 5, 3, 7).reshape(-1, 4, 8, 8)


def _write_quarters(lanes: Lanes, writes: Sequence[Destination], result: Array) -> None:
    """D, from an array of shape (warps, q, 8, 8)."""
    if result.dtype == np.float16:
        rows = result.reshape(-1, 4, 2, 4, 8).transpose(0, 2, 1, 3, 4)
        words = np.ascontiguousarray(rows).view(np.uint32)
        for number, write in enumerate(writes):
            write(lanes, words[..., number].reshape(-1))
        return
    parts = result.reshape(-1, 4, 2, 2, 2, 2, 2, 2)
    for number, write in enumerate(writes):
        # (q, h, i / 2 % 2, t % 2, i / 4, t / 2, i % 2)
        chosen = parts[:, :, :, number // 2 % 2, :, number // 4, :, number % 2]
        write(lanes, chosen.transpose(0, 2, 1, 4, 3).reshape(-1))
