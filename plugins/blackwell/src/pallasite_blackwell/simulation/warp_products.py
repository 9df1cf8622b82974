"""Products of warps with narrow elements and scale factors: PTX ISA 9.7.14.5, mma with ``.kind``.

Fragments lie as those of other types: see :mod:`pallasite_simulator.instructions.mma`. Elements of
4 and 6 bits of the kinds ``f8f6f4`` and ``mxf8f6f4`` are in containers of 8 bits.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_blackwell.simulation import formats
from pallasite_blackwell.simulation.tensor_memory import TARGETS, require_target
from pallasite_simulator.binder import U32, Binder, Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions import tensor_core
from pallasite_simulator.instructions.asynchronous import failure
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Instruction, Operand
from pallasite_simulator.types import TYPES, Array

instructions = InstructionSet()

_TARGETS = frozenset(("sm_120a", "sm_120f", "sm_121a", "sm_121f"))

_M, _N = 16, 8

_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")

_VECTORS = {
    ("mxf8f6f4", "", "ue8m0"): 1,
    ("mxf8f6f4", "scale_vec::1X", "ue8m0"): 1,
    ("mxf4", "", "ue8m0"): 2,
    ("mxf4", "scale_vec::2X", "ue8m0"): 2,
    ("mxf4nvf4", "scale_vec::2X", "ue8m0"): 2,
    ("mxf4nvf4", "scale_vec::4X", "ue4m3"): 4,
}
"""Scale factors of a row, by kind, size of the vectors, and type of the factors."""

_RATES = {"f8f6f4": "f8", "mxf8f6f4": "f8", "mxf4": "f4", "mxf4nvf4": "f4"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What the name says: ``vectors`` is how many scale factors a row has, 0 for none."""

    kind: str
    k: int
    a: str
    b: str
    d: str
    vectors: int
    scale: str


@instructions.register(
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4",
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4",
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4",
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4",
    needs_warp=True,
)
def bind_product(instruction: Instruction, binder: Binder) -> Step:
    """Multiplies 16 x K and K x 8 elements: PTX ISA 9.7.14.5.14."""
    form = _parse(binder)
    wide = form.kind == "f8f6f4" and {form.a, form.b} <= {"e4m3", "e5m2"}
    require_target(binder, _TARGETS | TARGETS if wide else _TARGETS, "mma with .kind")
    binder.expect_operands(8 if form.vectors else 4)
    a, b = _sources(binder, 1, "b32", 4), _sources(binder, 2, "b32", 2)
    register, count = ("b32", 2) if form.d == "f16" else ("f32", 4)
    c = _sources(binder, 3, register, count)
    d = [binder.destination(one, TYPES[register]) for one in _elements(binder, 0, count)]
    scale_a = _Scales(binder, 4, form, 2) if form.vectors else None
    scale_b = _Scales(binder, 6, form, 4) if form.vectors else None
    rate = f"{tensor_core.COUNTER} {_RATES[form.kind]}"

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        warps = lanes.count // WARP
        rows = _matrix(lanes, a, 2, form.a, form.kind)
        columns = _matrix(lanes, b, 1, form.b, form.kind)
        if scale_a is not None and scale_b is not None:
            # A pair of lanes has rows of both halves of A; of four, one has a column of B.
            factors = scale_a.read(lanes).reshape(warps, 8, 2, form.vectors)
            rows = _scaled(rows, factors.swapaxes(1, 2).reshape(warps, _M, -1))
            columns = _scaled(columns, scale_b.read(lanes).reshape(warps, _N, -1))
        sums = np.matmul(rows, columns.swapaxes(1, 2))
        held = np.stack([np.broadcast_to(read(lanes), (lanes.count,)) for read in c])
        # Of rows 8h + g and columns 2t + i, lane 4g + t has element 2h + i.
        parts = sums.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        if form.d == "f32":
            with np.errstate(over="ignore", invalid="ignore"):
                found = held.astype(np.float32) + parts.astype(np.float32)
            results: Array = found
        else:
            pairs = np.stack([parts[0::2], parts[1::2]], axis=-1).astype(np.float32)
            halves = np.ascontiguousarray(held).view(np.float16).reshape(pairs.shape)
            added = tensor_core.add_to_f16(np.ascontiguousarray(halves), pairs)
            results = np.ascontiguousarray(added).view(np.uint32)[..., 0]
        for write, values in zip(d, results, strict=True):
            write(lanes, values)
        counters = lanes.wave.counters
        done = warps * 2 * _M * _N * form.k
        for name in (tensor_core.COUNTER, rate):
            counters[name] = counters.get(name, 0) + done

    return step


def _parse(binder: Binder) -> _Form:
    """Takes the name apart.

    Raises:
      PtxError: there is no such instruction.
    """
    words = binder.instruction.modifiers
    shape, kind, rest = words[2], words[5].removeprefix("kind::"), list(words[6:])
    scaled = "block_scale" in rest[:1]
    if scaled != (kind != "f8f6f4"):
        raise binder.error(".block_scale belongs to the kinds mxf8f6f4, mxf4 and mxf4nvf4")
    rest = rest[scaled:]
    vector = rest.pop(0) if rest and rest[0].startswith("scale_vec::") else ""
    if len(rest) != 4 + scaled:
        raise binder.error(
            "the name has other parts than those of mma",
            expected=".kind.block_scale.scale_vec::NX.dtype.atype.btype.ctype.stype",
        )
    d, a, b, c, *scales = rest
    scale = scales[0] if scales else ""
    types = ("e2m1",) if kind.startswith("mxf4") else _NARROW
    accumulators = ("f32",) if scaled else ("f16", "f32")
    if a not in types or b not in types or d not in accumulators or c != d:
        raise binder.error(
            "the kind has no such types",
            got=f".{d}.{a}.{b}.{c}",
            expected=f"A and B of {', '.join(types)}; C and D of {' or '.join(accumulators)}",
        )
    vectors = 0
    if scaled:
        if (kind, vector, scale) not in _VECTORS:
            raise binder.error("the kind has no such scale factors", got=f"{vector} of .{scale}")
        vectors = _VECTORS[kind, vector, scale]
    return _Form(kind, int(shape.partition("k")[2]), a, b, d, vectors, scale)


def _elements(binder: Binder, number: int, count: int) -> tuple[Operand, ...]:
    found = binder.elements(number)
    if len(found) != count:
        raise binder.error(
            f"wrong number of registers of operand {number}", got=len(found), expected=str(count)
        )
    return found


def _sources(binder: Binder, number: int, kind: str, count: int) -> list[Source]:
    return [binder.source(one, TYPES[kind]) for one in _elements(binder, number, count)]


class _Scales:
    """The scale factors of a matrix: a register, and which bytes of which lanes of four."""

    def __init__(self, binder: Binder, number: int, form: _Form, choices: int):
        self._form = form
        self._instruction = binder.instruction
        self._each = WARP // 8 // choices
        self._choices = choices
        self._read = _sources(binder, number, "b32", 1)[0]
        self._byte, self._lane = _sources(binder, number + 1, "u16", 2)

    def read(self, lanes: Lanes) -> Array:
        """Factors in single precision, of shape (warps, 8, lanes that have some, factors)."""
        vectors = self._form.vectors
        byte, lane = (
            np.broadcast_to(one(lanes), (lanes.count,)).reshape(-1, WARP)
            for one in (self._byte, self._lane)
        )
        wrong = (byte % vectors != 0) | (byte > 3) | (lane >= self._choices)
        wrong |= (byte != byte[:, :1]) | (lane != lane[:, :1])
        if wrong.any():
            warp, thread = np.argwhere(wrong)[0].tolist()
            raise failure(
                lanes.wave,
                int(lanes.numbers[warp * WARP + thread]),
                "selects scale factors that there are not",
                self._instruction,
                got=f"byte {int(byte[warp, thread])} of lane {int(lane[warp, thread])}",
                expected=f"the same in all threads of the warp: a byte of 0 to 3 that is a multiple"
                f" of {vectors}, and a lane of 0 to {self._choices - 1}",
            )
        words = np.broadcast_to(self._read(lanes), (lanes.count,)).astype(np.uint32)
        held = (
            np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8, self._choices, self._each, 4)
        )
        warps = np.arange(len(held))
        chosen = held[warps, :, lane[:, 0]]
        places = byte[:, :1].astype(np.int64) + np.arange(vectors)
        found = np.take_along_axis(chosen, places[:, None, None, :], axis=-1)
        values: Array = formats.scale_table(self._form.scale)[found]
        return values


def _matrix(lanes: Lanes, reads: list[Source], halves: int, name: str, kind: str) -> Array:
    """The rows of A, or the columns of B: in double precision, of shape (warps, rows, K)."""
    words = np.empty((lanes.count // WARP, halves, 8, len(reads) // halves, 4), U32.storage)
    for number, read in enumerate(reads):
        along, half = divmod(number, halves)
        values = np.broadcast_to(read(lanes), (lanes.count,))
        words[:, half, :, along] = values.reshape(-1, 8, 4)
    contents = words.view(np.uint8).reshape(len(words), 8 * halves, -1)
    if kind.startswith("mxf4"):
        found = np.take(formats.table(name), formats.unpack(contents, 4))
    else:
        found = formats.decode_containers(contents, name)
    wide: Array = found.astype(np.float64)
    return wide


def _scaled(elements: Array, factors: Array) -> Array:
    each = elements.shape[-1] // factors.shape[-1]
    found: Array = elements * np.repeat(factors, each, axis=-1)
    return found
