"""What tcgen05.mma computes.

Products are summed along K in single precision (integers exactly), in any order, and the sum is
added to D once, as the simulator does for all matrix instructions; products with scale factors are
summed in double precision and rounded once. Integer results are exact.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_blackwell.simulation import factors, formats, sparsity
from pallasite_blackwell.simulation.events import pipe, tell_pipe
from pallasite_blackwell.simulation.instruction_descriptors import (
    DescriptorError,
    Variant,
    decode,
)
from pallasite_blackwell.simulation.matrix_descriptors import CHUNK, SharedMatrix, Tile
from pallasite_blackwell.simulation.placement import placement
from pallasite_blackwell.simulation.tensor_memory import CELL, LANES, SPACE, TensorMemory
from pallasite_blackwell.simulation.zero_columns import MOST_SHIFT, shift_of, zero_columns
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.instructions import tensor_core
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

_RATES = {
    "f16": "f16",
    "tf32": "tf32",
    "f8f6f4": "f8",
    "i8": "i8",
    "mxf8f6f4": "f8",
    "mxf4": "f4",
    "mxf4nvf4": "f4",
}
"""Names of the rates of chips, by kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The operands of one thread.

    Attributes:
      d: address of D.
      a: address or descriptor of A.
      a_in_tensor_memory: which of them.
      b: descriptor of B.
      descriptor: of the instruction.
      keep: whether D is added to.
      metadata: address of the metadata of a sparse A.
      scales: addresses of the scale factors of A and B.
      disabled: bits of the lanes that are not written, in words; none for all.
      shift: binary logarithm of what D is divided by before.
      mask: the zero-column mask.
    """

    d: int
    a: int
    a_in_tensor_memory: bool
    b: int
    descriptor: int
    keep: bool
    metadata: int
    scales: tuple[int, int]
    disabled: tuple[int, ...]
    shift: int
    mask: int


class Multiplier:
    """Executes one instruction."""

    def __init__(self, variant: Variant, block: int, shifted: bool, instruction: Instruction):
        self._variant = variant
        self._block = block
        self._shifted = shifted
        self._instruction = instruction

    def run(self, lanes: Lanes, arguments: list[Arguments]) -> None:
        """Executes the instruction for lanes, each of which has its own product."""
        memory = TensorMemory.of(lanes.wave)
        for lane, one in zip(lanes.numbers.tolist(), arguments, strict=True):
            _Product(self, memory, lane, one).run()
        lanes.wave.progress += 1

    @property
    def variant(self) -> Variant:
        """What the name says."""
        return self._variant

    @property
    def block(self) -> int:
        """Elements that share a scale factor, or 0."""
        return self._block

    @property
    def shifted(self) -> bool:
        """Whether the rows of A are shifted."""
        return self._shifted

    @property
    def instruction(self) -> Instruction:
        """The instruction."""
        return self._instruction


class _Product:
    """The product of one thread."""

    def __init__(self, owner: Multiplier, memory: TensorMemory, lane: int, given: Arguments):
        self._owner = owner
        self._memory = memory
        self._lane = lane
        self._given = given
        self._instruction = owner.instruction
        variant = owner.variant
        self._blocks = memory.blocks(lane, variant.group, owner.instruction)
        try:
            self._shape = decode(given.descriptor, variant)
        except DescriptorError as error:
            raise memory.failure(
                lane,
                f"gives an instruction descriptor without meaning: {error}",
                owner.instruction,
                got=f"{error.got}, in {given.descriptor:#010x}",
                expected=error.expected,
            ) from None
        self._placed = placement(self._shape.m, variant.group, variant.sparse, variant.stationary)
        self._check_placement()
        self._shared = SharedMatrix(memory, owner.instruction)
        self._operation: AsyncOperation | None = None
        self._accesses: list[tuple[str, str, Array, int]] = []

    def run(self) -> None:
        """Computes it."""
        shape, memory, wave = self._shape, self._memory, self._memory.wave
        if wave.observer is not None:
            self._operation = pipe(self._lane, self._instruction)
        b = self._matrix_b()
        results = [self._of_block(number, block, b) for number, block in enumerate(self._blocks)]
        if self._operation is not None:
            tell_pipe(memory, self._operation, self._accesses)
        for write in results:
            memory.words[write[0]][write[1], write[2]] = write[3]
        counters = wave.counters
        done = 2 * shape.m * shape.n * shape.k
        counters[tensor_core.COUNTER] = counters.get(tensor_core.COUNTER, 0) + done
        # Sparse products take the time of dense ones of half of their extent along K.
        rate = f"{tensor_core.COUNTER} {_RATES[self._owner.variant.kind]}"
        spent = done // (1 + self._owner.variant.sparse)
        counters[rate] = counters.get(rate, 0) + spent

    def _check_placement(self) -> None:
        """PTX ISA 9.7.16.10.5, 9.7.16.10.7.2 and .3, 9.7.16.10.9: lanes where matrices begin, bytes
        of scale factors, shifted rows."""
        given, shape, owner = self._given, self._shape, self._owner
        allowed = (0, 16) if self._placed.halves else (0,)
        lanes = {"D": given.d >> 16}
        if given.a_in_tensor_memory:
            lanes["A"] = given.a >> 16
        if owner.variant.sparse:
            lanes["the metadata"] = given.metadata >> 16
        for name, lane in lanes.items():
            if lane not in allowed or lane != lanes["D"]:
                raise self._wrong(
                    f"has {name} in lanes where it cannot begin",
                    f"lane {lane}" + (f", D in lane {lanes['D']}" if name != "D" else ""),
                    f"lane {' or '.join(map(str, allowed))}, the same for D, A in tensor memory"
                    f" and metadata: data path layout {self._placed.name}",
                )
        if owner.shifted and shape.m < LANES:
            raise self._wrong("shifts rows of A (.ashift)", f"M={shape.m}", "M of 128 or 256")
        if owner.block:
            count = -(-shape.k // (owner.block * (1 + owner.variant.sparse)))
            ids = {1: (0, 1, 2, 3), 2: (0, 2), 3: (0, 1, 2, 3), 4: (0,), 6: (0, 2)}[count]
            for name, number in zip("AB", shape.scale_ids, strict=True):
                if number not in ids:
                    raise self._wrong(
                        f"names other bytes of the scale factors of {name}",
                        f"number {number}, for {count} of them along K",
                        " or ".join(map(str, ids)),
                    )

    def _wrong(self, message: str, got: str, expected: str) -> Exception:
        failure: Exception = self._memory.failure(
            self._lane, message, self._instruction, got=got, expected=expected
        )
        return failure

    # Operands -------------------------------------------------------------------------------------

    def _matrix_b(self) -> Array:
        """B of all blocks, of shape (N, K)."""
        shape, mask = self._shape, self._given.mask
        shift = self._column_shift()
        rows = shape.n // len(self._blocks) + shift
        parts = [
            self._from_shared(block, self._given.b, shape.b, rows, shape.k, shape.k_major[1], "B")
            for block in self._blocks
        ]
        b = parts[0][shift:] if len(parts) == 1 else np.concatenate(parts)
        if mask:
            try:
                zeros = zero_columns(mask, shape.m, shape.n)
            except ValueError as error:
                raise self._wrong(
                    f"gives a zero-column mask without meaning: {error}",
                    f"{mask:#018x}",
                    "a descriptor of the PTX ISA, 9.7.16.4.3",
                ) from None
            b = np.where(zeros[:, None], np.float32(0), b)
        return b

    def _column_shift(self) -> int:
        """How many columns of B a zero-column mask leaves out before the first."""
        shift = shift_of(self._given.mask)
        if not shift:
            return 0
        code = self._given.descriptor >> 30
        most = min(MOST_SHIFT[self._shape.m], 4 << code if code else 0)
        if shift > most:
            raise self._wrong(
                "shifts the columns of B by more than the instruction descriptor says",
                f"{shift} columns, {code} in bits 30 and 31",
                f"at most {most}: 8, 16 or 32 columns for 1, 2 or 3, and 16 with M=32",
            )
        return shift

    def _from_shared(
        self,
        block: int,
        descriptor: int,
        kind: str,
        rows: int,
        depth: int,
        k_major: bool,
        name: str,
    ) -> Array:
        """Elements of a matrix in shared memory, of shape (rows, depth)."""
        bits = formats.BITS[kind]
        if not k_major and (descriptor >> 61 & 7 == 1) != (kind == "tf32"):
            raise self._wrong(
                f"reads a transposed {name} with a swizzle for other elements",
                f"swizzle {descriptor >> 61 & 7} (bits 61 to 63), elements of .{kind}",
                "1 (128 bytes in atoms of 32) for .tf32, and another for elements of 8 and 16 bits",
            )
        padded = bits < 8 and self._owner.variant.kind in ("f8f6f4", "mxf8f6f4")
        tile = Tile(rows, depth, 8 if padded else bits, k_major)
        contents, places = self._shared.read(block, descriptor, tile, self._lane, name)
        self._accesses.append(("read", "shared", places.reshape(-1), CHUNK))
        flat = contents.reshape(tile.shape[0], -1)
        found = formats.decode(flat, kind, padded=padded)
        if not k_major:
            return found[:, :rows].T
        return found[:, :depth]

    def _matrix_a(self, block: int, stored: int) -> Array:
        """The rows of A of a block, of shape (1 or parts, rows, stored elements)."""
        shape, placed, given = self._shape, self._placed, self._given
        if not given.a_in_tensor_memory:
            found = self._from_shared(
                block, given.a, shape.a, placed.rows, stored, shape.k_major[0], "A"
            )
            return found[None]
        bits = formats.BITS[shape.a]
        contained = bits < 8 and self._owner.variant.kind in ("f8f6f4", "mxf8f6f4")
        words = -(-stored * (8 if contained else bits) // 32)
        lanes = (given.a >> 16) + placed.lanes
        if self._owner.shifted:
            # Of 32 lanes, each but the last has the row of the next.
            lanes = np.where(lanes % 32 < 31, lanes + 1, lanes)
        contents = self._cells(block, lanes, given.a & 0xFFFF, words, "reads A in")
        held = np.ascontiguousarray(contents).reshape(-1, words)
        if contained:
            found = formats.decode_containers(held.view(np.uint8), shape.a)
        else:
            found = formats.decode(held.view(np.uint8), shape.a)
        return found[:, :stored].reshape(*lanes.shape, stored)

    def _cells(self, block: int, lanes: Array, column: int, count: int, what: str) -> Array:
        """Cells of some lanes: of the shape of ``lanes`` and one more dimension of ``count``."""
        memory = self._memory
        self._check_lanes(block, lanes, what)
        memory.check_columns(block, column, column + count - 1, self._lane, what, self._instruction)
        memory.count("read", lanes.size * count)
        distinct = np.unique(lanes)
        self._accesses.append(
            (
                "read",
                SPACE,
                memory.offsets(block, distinct, np.full(len(distinct), column)),
                count * CELL,
            )
        )
        found: Array = memory.words[block][lanes, column : column + count]
        return found

    def _check_lanes(self, block: int, lanes: Array, what: str) -> None:
        if int(lanes.max()) < LANES:
            return
        raise self._memory.failure(
            self._lane,
            f"{what} lanes that tensor memory does not have",
            self._instruction,
            got=f"lane {int(lanes.max())} of block {self._memory.wave.block_name(block)}",
            expected=f"lanes 0 to {LANES - 1}; data path layout {self._placed.name}",
        )

    def _dense_a(self, block: int) -> tuple[Array, Array | None]:
        """A with its zeros, of shape (1 or parts, rows, K); for sparse ones also the numbers of
        what is stored, of shape (parts, rows, stored)."""
        shape, placed = self._shape, self._placed
        variant = self._owner.variant
        if not variant.sparse:
            return self._matrix_a(block, shape.k), None
        stored = self._matrix_a(block, shape.k // 2)
        found, places = [], []
        for part, lanes in enumerate(placed.lanes):
            where = sparsity.locate(
                variant.kind, self._given.metadata, lanes, shape.k, shape.selector
            )
            self._check_lanes(block, where.lanes, "reads metadata in")
            low, high = int(where.columns.min()), int(where.columns.max())
            self._memory.check_columns(
                block, low, high, self._lane, "reads metadata in", self._instruction
            )
            words = self._memory.words[block][where.lanes, where.columns]
            self._memory.count("read", words.size)
            distinct = np.unique(self._memory.offsets(block, where.lanes, where.columns))
            self._accesses.append(("read", SPACE, distinct, CELL))
            codes = words >> where.shifts.astype(np.uint32) & 15
            numbers, wrong = sparsity.indices(variant.kind, codes)
            if wrong.any():
                row, group = np.argwhere(wrong)[0].tolist()
                raise self._memory.failure(
                    self._lane,
                    "reads metadata of a sparse matrix that mean nothing",
                    self._instruction,
                    got=f"{int(codes[row, group]):#06b} for row {row}, group {group}, in lane"
                    f" {int(where.lanes[row, group])}, column {int(where.columns[row, group])}",
                    expected="the numbers of two different elements, ascending",
                )
            own = stored[part % len(stored)]
            found.append(sparsity.expand(own, numbers.astype(np.int64), shape.k))
            places.append(numbers)
        return np.stack(found), np.stack(places)

    # Results --------------------------------------------------------------------------------------

    def _of_block(self, number: int, block: int, b: Array) -> tuple[int, Array, Array, Array]:
        """The product of a block: the block, and lanes, columns and words of what is written."""
        shape, placed, given, memory = self._shape, self._placed, self._given, self._memory
        each = shape.n // placed.parts
        lanes = (given.d >> 16) + placed.lanes
        column = given.d & 0xFFFF
        self._check_lanes(block, lanes, "writes D to")
        memory.check_columns(
            block, column, column + each - 1, self._lane, "writes D to", self._instruction
        )
        a, places = self._dense_a(block)
        if self._owner.block:
            sums = self._scaled(block, a, b)
        else:
            columns = b.reshape(placed.parts, each, shape.k)
            sums = _multiply(a, columns)
            if places is not None and not np.isfinite(b).all():
                sums = _sparse_sums(a, places, columns)
        if shape.negate:
            sums = -sums
        held = memory.words[block][lanes, column : column + each]
        if given.keep:
            memory.count("read", held.size)
        words = self._added(held, sums)
        on = self._enabled(number, lanes)
        offsets = memory.offsets(block, lanes.reshape(-1), np.full(lanes.size, column))
        kind = "update" if given.keep else "write"
        self._accesses.append((kind, SPACE, offsets[on.reshape(-1)], each * CELL))
        memory.count("write", int(on.sum()) * each)
        chosen = lanes[on][:, None]
        return block, chosen, column + np.arange(each)[None, :], words[on]

    def _enabled(self, number: int, lanes: Array) -> Array:
        """Which lanes of a block are written."""
        given = self._given
        if not given.disabled or not any(given.disabled):
            return np.ones(lanes.shape, np.bool_)
        words = np.array(given.disabled[4 * number : 4 * number + 4], np.uint32)
        found: Array = words[lanes // 32] >> (lanes % 32).astype(np.uint32) & 1 == 0
        return found

    def _added(self, held: Array, sums: Array) -> Array:
        """The new words of D."""
        shape, given = self._shape, self._given
        if shape.d == "s32":
            exact = sums.astype(np.int64)
            before = held.view(np.int32).astype(np.int64) if given.keep else np.int64(0)
            total = before + exact
            if shape.saturate:
                bounds = np.iinfo(np.int32)
                total = total.clip(bounds.min, bounds.max)
            return total.astype(np.int32).view(np.uint32)
        sums = sums.astype(np.float32)
        if shape.d == "f16":
            half = (held & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
            if given.shift:
                half = np.ldexp(half.astype(np.float32), -given.shift).astype(np.float16)
            half = half if given.keep else np.zeros_like(half)
            added = tensor_core.add_to_f16(np.ascontiguousarray(half), np.ascontiguousarray(sums))
            return added.view(np.uint16).astype(np.uint32)
        if given.keep:
            before = held.view(np.float32)
            sums = sums + (np.ldexp(before, -given.shift) if given.shift else before)
        words: Array = np.ascontiguousarray(sums).view(np.uint32)
        words[np.isnan(sums)] = np.uint32(0x7FFFFFFF)
        return words

    def _scaled(self, block: int, a: Array, b: Array) -> Array:
        """Sums of products with scale factors, of shape (parts, rows, columns)."""
        shape, placed, given = self._shape, self._placed, self._given
        size = self._owner.block * (1 + self._owner.variant.sparse)
        count = -(-shape.k // size)
        address_a, address_b = (one & factors.ADDRESS for one in given.scales)
        where_a = factors.of_a(address_a, placed, shape.scale_ids[0], count)
        where_b = factors.of_b(address_b, placed, shape.n, shape.scale_ids[1], count)
        scale_a = self._factors(block, where_a, "A")
        scale_b = self._factors(block, where_b, "B")
        wide_a = np.repeat(scale_a, size, axis=-1)[..., : shape.k] * a
        columns = b.reshape(placed.parts, -1, shape.k).astype(np.float64)
        sums = np.empty((placed.parts, placed.rows, columns.shape[1]))
        for part in range(placed.parts):
            quarters = placed.lanes[part] // 32
            for number, quarter in enumerate(np.arange(4).reshape(placed.parts, -1)[part].tolist()):
                rows = quarters == quarter
                if rows.any():
                    wide_b = np.repeat(scale_b[part, number], size, axis=-1)[..., : shape.k]
                    own = _multiply(wide_a[part, rows][None], (wide_b * columns[part])[None])
                    sums[part, rows] = own[0]
        return sums

    def _factors(self, block: int, where: tuple[Array, Array, Array], name: str) -> Array:
        memory = self._memory
        lanes, columns, _ = where
        what = f"reads scale factors of {name} in"
        self._check_lanes(block, lanes, what)
        low, high = int(columns.min()), int(columns.max())
        memory.check_columns(block, low, high, self._lane, what, self._instruction)
        distinct = np.unique(memory.offsets(block, lanes, columns))
        self._accesses.append(("read", SPACE, distinct, CELL))
        return factors.read(memory, block, where, self._shape.scale)


_AT_ONCE = 1 << 18
"""Products of elements of one call of BLAS, which would use several threads for more: starting
these takes longer than the work."""


def _multiply(a: Array, columns: Array) -> Array:
    """``a`` of shape (1 or parts, rows, K) times the transposed ``columns`` (parts, columns, K)."""
    parts, count, depth = columns.shape
    rows = a.shape[1]
    pieces = next(
        number
        for number in range(1, count + 1)
        if not count % number and rows * (count // number) * depth <= _AT_ONCE or number == count
    )
    split = columns.reshape(parts, pieces, count // pieces, depth)
    found = np.matmul(a[:, None], split.swapaxes(2, 3))
    result: Array = found.swapaxes(1, 2).reshape(parts, rows, count)
    return result


def _sparse_sums(a: Array, places: Array, columns: Array) -> Array:
    """Sums of products of what is stored only: zeros that are not stored do not meet the infinities
    and NaNs of B."""
    found = []
    for part, numbers in enumerate(places.astype(np.int64)):
        stored = np.take_along_axis(a[part], numbers, axis=1)
        rows = [columns[part][:, one] @ held for one, held in zip(numbers, stored, strict=True)]
        found.append(np.stack(rows))
    return np.stack(found)
