"""Kernels over rows that lanes read once from shared memory, and keep in registers.

Blocks of few warpgroups, of which a multiprocessor has several, work on rows of their own, with
their own copies on their way. So there are few instructions for an element, also where rows begin
within vectors and lanes take elements one by one; what a block waits for in its reductions, others
hide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin.layouts import Digit, Layout, Owner, RegisterLayout, padded
from pallasite_std.ops.rings import over_steps
from pallasite_std.ops.rows.kernel import (
    INSIDE,
    Chunk,
    Exchange,
    Rows,
    Work,
    in_step,
)
from pallasite_std.ops.rows.tiling import BUSY_ROWS, LANES, VECTOR_BYTES, RowTiling, size_of
from pallasite_std.primitives.layouts import SomeLayout


@dataclasses.dataclass(frozen=True)
class Kept:
    """How rows are shared, and fetched before their turn.

    Attributes:
      threads: warpgroups of a block, which share a row.
      chunk: columns of each of them but for the last one, which has those that are left.
      stages: rows in shared memory.
      resident: blocks of a multiprocessor.
      kept: whether registers keep what has been read from shared memory.
      held: whether vectors with an element for each column stay in registers.
    """

    threads: int
    chunk: int
    stages: int
    resident: int
    kept: bool = True
    held: bool = True


@dataclasses.dataclass(frozen=True)
class _OneByOne(SomeLayout):
    """Neighbouring lanes have neighbouring elements."""

    def resolve(self, shape: Sequence[int], dtype: Any) -> Layout:
        """See the base class."""
        *outer, inner = shape
        row = padded((inner,))
        if not outer:
            return row
        # Rows of a few arrays: each lane has the same places of all.
        dims = (*((Digit(n, Owner.REGISTER, row.registers),) for n in outer), *row.dims)
        return RegisterLayout(tuple(shape), dims, 1)


def one_by_one(array: Any) -> Any:
    """An array whose elements lanes load and store one by one: those of vectors would not lie
    together where rows begin within them."""
    return plgpu.layout_cast(array, _OneByOne())


class _FlatChunk(Chunk):
    """Columns of a row of a flattened matrix."""

    def __init__(self, rows: Rows, first: Any, width: int, position: Any, *, kept: bool) -> None:
        super().__init__(rows, first, width, kept=kept)
        self._position = position

    def load_again(self, ref: Any) -> Any:
        """See the base class."""
        return one_by_one(self.rows.staged[id(ref)][...]).astype(jnp.float32)

    def vector(self, ref: Any) -> Any:
        """See the base class."""
        value = self.rows.held.get(id(ref))
        value = self.rows.staged[id(ref)][...] if value is None else value
        return one_by_one(value).astype(jnp.float32)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to a flattened matrix."""
        ref[pl.ds(self._position, self.width)] = value.astype(ref.dtype)


class _KeptRow(Rows):
    """A row of which products and sums are one instruction."""

    fused = True


_WARPGROUPS = 512
"""Registers of a multiprocessor by lanes of a warpgroup."""

_BESIDES, _BESIDES_SHARED = 30, 48
"""Registers of a lane besides arrays: where a warpgroup has whole rows, and where several share
them. Spills are to be avoided: shared memory leaves little of the cache that they go through."""

_COMFORT = 10
"""More of them with which warpgroups that have whole rows are faster than more warpgroups are: of
1147 columns, five took 110 us on an H200, and six 115."""

_OF_VECTORS = 16
"""Those for whole vectors of elements."""

_ELEMENT, _ROW = 16, 120
"""Instructions for an element of a lane, and for a row, about."""

_LEAST_WARPGROUPS, _MOST_RESIDENT = 3, 8
"""Warpgroups of a multiprocessor at least, if there are rows enough, and blocks at most."""

_MOST_THREADS = 4
"""Warpgroups that share a row: what more of them wait for one another takes longer."""

_LEAST_CHUNK = 8 * LANES
"""Columns of each of them at least, where one has registers enough."""

_ENOUGH = 4
"""Rows of each block, if multiprocessors have several."""

_IN_FLIGHT = 56 * 1024
"""Bytes of rows of a multiprocessor that are on their way, if there is room."""

_MOST_STAGES = 4


def lane_elements(columns: int, threads: int, vector: int) -> int:
    """Elements of a lane if so many warpgroups share whole vectors; of odd rows it has one by
    one."""
    unit = LANES * (vector if columns % vector == 0 else 1)
    return -(-columns // (threads * unit)) * unit // LANES


def kept_plan(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    vectors: Sequence[int],
    sums: int,
    multiprocessors: int,
    shared_memory: int,
    held: bool = True,
) -> Kept | None:
    """How rows are shared by few warpgroups whose registers hold them; None if none do.

    Args:
      rows, columns: of the matrices.
      dtypes: of the matrices that are read.
      vectors: bytes of the elements of vectors with one for each column.
      sums: over rows, for each column.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
      held: whether registers hold vectors, too.
    """
    vector = VECTOR_BYTES // min(map(size_of, dtypes))
    flat = columns % vector > 0
    if flat and rows * columns >= 2**31:
        return None
    # Few rows have more warpgroups each, and few blocks, whose sums are summed.
    least = min(_MOST_THREADS, -(-BUSY_ROWS // rows), max(1, columns // _LEAST_CHUNK))
    most_resident = max(1, min(_MOST_RESIDENT, rows // (_ENOUGH * multiprocessors)))
    best: tuple[float, Kept] | None = None
    for threads in range(least, _MOST_THREADS + 1):
        elements = lane_elements(columns, threads, vector)
        unit = LANES if flat else vector
        chunk = columns if threads == 1 else -(-columns // (threads * unit)) * unit
        if columns - (threads - 1) * chunk < 2 * vector:
            continue
        place = chunk + 2 * vector if flat else chunk
        row = threads * place * sum(map(size_of, dtypes))
        beside = 4096 + (0 if held else threads * chunk * sum(vectors))
        cost = threads * (_ELEMENT * elements + _ROW)
        # Whole vectors are as well read again: that takes few instructions.
        for kept in (True,) if flat or threads == 1 or not held else (True, False):
            # Of 16 bits, two are in a register until they are converted.
            arrays = sums + held * len(vectors) + len(dtypes) * (1.0 if kept else 0.5)
            needed = _BESIDES if threads == 1 else _BESIDES_SHARED
            needed += int(arrays * elements) + (0 if flat else _OF_VECTORS)
            given = threads, row, beside, most_resident, shared_memory
            resident = _resident(needed, *given)
            if flat and threads == 1 and sums:
                few = min(resident, _LEAST_WARPGROUPS)
                resident = _resident(needed + _COMFORT, *given) or few
            if resident and (best is None or cost < best[0]):
                room = (shared_memory // resident - beside) // row
                wanted = 1 + -(-_IN_FLIGHT // (resident * row))
                stages = min(room, max(3, wanted), _MOST_STAGES)
                best = cost, Kept(threads, chunk, stages, resident, kept, held)
    return None if best is None else best[1]


def _resident(
    needed: int, threads: int, row: int, beside: int, most: int, shared_memory: int
) -> int:
    """Blocks of a multiprocessor for whose lanes there are so many registers, and room for two
    rows each; 0 if they are too few."""
    for resident in range(most, 0, -1):
        warpgroups = threads * resident
        if warpgroups < _LEAST_WARPGROUPS and resident < most:
            break
        registers = min(_WARPGROUPS // warpgroups // 8 * 8, 255)
        if needed <= registers and shared_memory // resident - beside >= 2 * row:
            return resident
    return 0


def kept_row_kernel(
    body: Callable[..., Work],
    finish: Callable[..., None],
    rows: int,
    columns: int,
    plan: Kept,
    blocks: int,
    dtypes: Sequence[np.dtype[Any]],
    sums: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    vectors: Sequence[int] = (),
    of_rows: Sequence[int] = (),
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel whose blocks go over many rows each, and keep sums over them in registers.

    Args:
      body, finish, sums, name, exchanges, vectors, of_rows: of :func:`.kernel.folding_row_kernel`.
      rows, columns: of the matrices.
      plan: how they are distributed.
      blocks: how many share the rows.
      dtypes: of the first operands, matrices that are fetched.
      out_types: of the results: matrices, or with an element for each row, then sums.
      params: ``CompilerParams``.
    """
    threads, chunk = plan.threads, plan.chunk
    vector = VECTOR_BYTES // min(map(size_of, dtypes))
    flat = columns % vector > 0
    last = columns - (threads - 1) * chunk
    # Elements behind the last whole vector of a matrix, which no copy can fetch.
    behind = rows * columns % vector
    whole = rows * columns - behind

    def place_of(width: int) -> int:
        """Elements of all whole vectors that so many may be of."""
        return -(-(width + vector - 1) // vector) * vector if flat else width

    def on_rows(*refs: Any, **scratch: Any) -> None:
        thread: Any = lax.axis_index("part") if threads > 1 else 0
        given = functools.partial(over_rows, thread, refs, **scratch)
        if (last == chunk and not flat) or threads == 1:
            given(thread=thread, width=last)
            return
        pl.when(thread < threads - 1)(lambda: given(thread=thread, width=chunk))
        pl.when(thread == threads - 1)(lambda: given(thread=threads - 1, width=last))

    def over_rows(
        part: Any, refs: Sequence[Any], *, thread: Any, width: int, loaded: Any,
        partials: Any = None, combined: Any = None, **buffers: Any,
    ) -> None:  # fmt: skip
        unit = lax.axis_index("block")
        first, sources = thread * chunk, refs[: len(dtypes)]
        window = pl.ds(first, width)
        tiling = RowTiling(1, threads, width, width * threads)
        ordered = one_by_one if flat else (lambda array: array)
        held, near = dict[int, Any](), dict[int, Any]()
        for one in vectors:
            values = ordered(refs[one][window])
            if plan.held:
                held[id(refs[one])] = values
                continue
            there = buffers[f"vector_{one}"]
            near[id(refs[one])] = (there.at[part] if threads > 1 else there).at[pl.ds(0, width)]
            near[id(refs[one])][...] = values
        barriers = loaded.at[pl.ds(part * plan.stages, plan.stages)]
        # What ends behind the last whole vector is the last warpgroup's.
        ends = flat and isinstance(thread, int) and thread == threads - 1

        def row_of(step: Any) -> Any:
            return unit + step * blocks

        def start_of(row: Any) -> Any:
            return lax.rem(row * columns + first, vector) if flat else 0

        def places(stage: Any) -> list[Any]:
            there = (stage, part) if threads > 1 else stage
            return [buffers[f"staged_{number}"].at[there] for number in range(len(dtypes))]

        def fetch(step: Any, stage: Any) -> None:
            row = row_of(step)

            def copy(count: int) -> None:
                for source, place in zip(sources, places(stage), strict=True):
                    if flat:
                        begin = pl.multiple_of(row * columns + first - start_of(row), vector)
                        some = source.at[pl.ds(begin, count)]
                    else:
                        some = source.at[row, window]
                    there = place.at[pl.ds(0, count)]
                    plgpu.copy_gmem_to_smem(some, there, barriers.at[stage], oob_mode=INSIDE)

            wanted = place_of(width)
            if not ends or inside == wanted:
                copy(wanted)
                return
            pl.when(row < rows - 1)(lambda: copy(wanted))
            pl.when(row == rows - 1)(lambda: copy(inside))

        # Of the last row's place, what whole vectors of the matrix are there.
        begin = ((rows - 1) * columns + (threads - 1) * chunk) // vector * vector
        inside = min(whole - begin, place_of(width)) if ends else place_of(width)

        def add_behind(stage: Any) -> None:
            for source, place in zip(sources, places(stage), strict=True):
                place[pl.ds(inside, behind)] = source[pl.ds(whole, behind)]

        def early(step: Any) -> tuple[Any, ...]:
            row = lax.min(row_of(step), rows - 1)
            return tuple(refs[one][row] for one in of_rows)

        def work(step: Any, stage: Any, carry: Any) -> Any:
            row = row_of(step)
            if ends and behind and inside < place_of(width):
                pl.when(row == rows - 1)(lambda: add_behind(stage))
            so_far, mine = list(carry[:sums]), carry[sums:]
            following = early(step + 1)
            exchange = None
            if threads > 1:
                slot = lax.rem(step, 2) * exchanges
                exchange = Exchange(threads, partials, combined, first=slot)
            there = near | {
                id(source): place.at[pl.ds(start_of(row), width)]
                for source, place in zip(sources, places(stage), strict=True)
            }
            values = {id(refs[one]): value for one, value in zip(of_rows, mine, strict=True)}
            block = _KeptRow(tiling, row, thread, exchange, there, held | values)
            if flat:
                position = row * columns + first
                block.resident = _FlatChunk(block, first, width, position, kept=plan.kept)
            else:
                block.resident = Chunk(block, first, width, kept=plan.kept)

            def add(added: list[Any]) -> None:
                so_far[:] = [one + more for one, more in zip(so_far, added, strict=True)]

            in_step([body(block, *refs)], [block], add)
            return (*so_far, *following)

        steps = lax.div(rows - unit + (blocks - 1), blocks)
        carry = (*(ordered(jnp.zeros((width,), jnp.float32)),) * sums, *early(jnp.int32(0)))
        carry = over_steps(steps, plan.stages, barriers, fetch, work, carry)
        if sums:
            finish(first, unit, carry[:sums], *refs)

    count = len(out_types) - sums
    flattened = [
        flat and number < count and len(one.shape) == 2 for number, one in enumerate(out_types)
    ]
    scratch: dict[str, Any] = {
        f"staged_{number}": plgpu.SMEM(
            (plan.stages, *((threads,) if threads > 1 else ()), place_of(chunk)), dtype
        )
        for number, dtype in enumerate(dtypes)
    }
    scratch["loaded"] = plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=plan.stages * threads)
    if threads > 1:
        scratch["partials"] = plgpu.SMEM((2 * exchanges, threads), jnp.float32)
        scratch["combined"] = plgpu.Barrier(num_arrivals=threads)
    arguments: dict[str, Any] = dict(num_threads=threads, thread_name="part") if threads > 1 else {}

    @functools.lru_cache(maxsize=8)
    def kernel_of(*vector_types: np.dtype[Any]) -> Callable[..., tuple[jax.Array, ...]]:
        shape = (threads, chunk) if threads > 1 else (chunk,)
        of_vectors = {
            f"vector_{one}": plgpu.SMEM(shape, dtype)
            for one, dtype in zip(vectors, vector_types, strict=True)
            if not plan.held
        }
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            on_rows,
            out_type=tuple(
                jax.ShapeDtypeStruct((rows * columns,), one.dtype) if apart else one
                for one, apart in zip(out_types, flattened, strict=True)
            ),
            grid=(blocks,),
            grid_names=("block",),
            kernel_name=name,
            compiler_params=dataclasses.replace(
                params or plgpu.CompilerParams(), min_blocks=plan.resident
            ),
            scratch_types=scratch | of_vectors,
            **arguments,
        )
        return kernel

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        kernel = kernel_of(*(np.dtype(operands[one].dtype) for one in vectors))
        if not flat:
            return kernel(*operands)
        matrices = [one.reshape(-1) for one in operands[: len(dtypes)]]
        written = kernel(*matrices, *operands[len(dtypes) :])
        return tuple(
            one.reshape(rows, columns) if apart else one
            for one, apart in zip(written, flattened, strict=True)
        )

    return call
