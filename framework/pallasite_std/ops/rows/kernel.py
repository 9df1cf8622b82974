"""Kernels over the rows of matrices: what is read once, reduced, and written.

A body describes the work by chunks of columns. A row that fits into the registers of its
warpgroups is one chunk per warpgroup, loaded once, whatever the number of passes; a longer one is
read again, chunk by chunk, in each pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rings import over_steps
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling

COMBINE: dict[str, Callable[[Any, Any], Any]] = {"sum": jnp.add, "max": jnp.maximum}
NEUTRAL = {"sum": 0.0, "max": -np.inf}
type Reductions = tuple[Callable[[Chunk], Any], tuple[str, ...], list[Any]]
"""Arguments of :meth:`Rows.reduce`, and a list of what the first of them found to add to sums."""
type Work = Generator[Reductions, tuple[Any, ...], None]
"""A body that yields what it reduces, and gets the results; see :func:`in_step`."""

INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
"""Whole rows, of any width that vectors divide, are copied."""

MOST_KEPT = 4
"""Elements of a row that a lane keeps in registers although they are in shared memory."""

SAMPLES = 4
"""Elements of a row whose mean stands for that of all, in differences that few digits have to
hold."""

REDUCE: dict[str, Callable[..., Any]] = {"sum": jnp.sum, "max": jnp.max}


def parameters(dtype: Any) -> Any:
    """Compiler parameters of kernels that read a dtype: functions are approximate for 16 bits."""
    narrow = np.dtype(dtype).itemsize < 4
    return plgpu.CompilerParams(approx_math=narrow)


BESIDES: int | None = 34
"""Registers of a lane besides the elements that it holds, in kernels that hold whole rows."""

_ONE_BY_ONE = 56
"""Elements of a lane from which on registers are saved if they are moved one by one: of fewer, it
helps that many loads are on their way (2457 to 6119 columns took 1.02 to 1.09 of the time with more
blocks on an H200, 7755 columns 0.74 to 0.95)."""

_REGISTERS = 512
"""Those of a multiprocessor for each lane of a warpgroup."""


def resident_parameters(tiling: RowTiling, dtype: Any, params: Any, least: int = 1) -> Any:
    """Compiler parameters with as many blocks as the elements that lanes hold leave room for.

    Without, loads of all operands may be on their way to registers, of fewer blocks.

    Args:
      tiling: of the rows.
      dtype: of what is held.
      params: other ``CompilerParams``.
      least: blocks at least.
    """
    blocks = least
    if tiling.resident and BESIDES is not None:
        size = np.dtype(dtype).itemsize
        vector = VECTOR_BYTES // size if tiling.columns * size % VECTOR_BYTES == 0 else 1
        elements = -(-tiling.height * tiling.chunk // (LANES * vector)) * vector
        needed = -(-(elements + BESIDES) // 8) * 8
        if vector > 1 or elements >= _ONE_BY_ONE:
            blocks = max(least, _REGISTERS // (needed * tiling.threads))
    return dataclasses.replace(params, min_blocks=min(blocks, MOST_BLOCKS))


MOST_BLOCKS = 16
"""Blocks of a multiprocessor for which registers are saved."""


class Chunk:
    """Some columns of a block's rows, in the registers of one warpgroup.

    Attributes:
      first: the first column.
      width: columns.
    """

    def __init__(self, rows: Rows, first: Any, width: int, *, kept: bool) -> None:
        self.rows = rows
        self.first = first
        self.width = width
        self._kept: dict[int, Any] | None = {} if kept else None

    @property
    def keeps(self) -> bool:
        """Whether what has been loaded stays in registers."""
        return self._kept is not None

    def load(self, ref: Any) -> Any:
        """Elements of a (rows, columns) matrix as float32: (height, width), or (width,)."""
        if self._kept is None:
            return self.load_again(ref)
        if id(ref) not in self._kept:
            self._kept[id(ref)] = self.load_again(ref)
        return self._kept[id(ref)]

    def load_again(self, ref: Any) -> Any:
        """As :meth:`load`, without keeping it in registers."""
        staged = self.rows.staged.get(id(ref))
        if staged is not None:
            return staged[...].astype(jnp.float32)
        return ref[self.rows.place, pl.ds(self.first, self.width)].astype(jnp.float32)

    def computed(self, ref: Any, compute: Callable[[], Any]) -> Any:
        """What a function returns, once if rows are kept; ``ref`` is the result that needs it."""
        if self._kept is None:
            return compute()
        if id(ref) not in self._kept:
            self._kept[id(ref)] = compute()
        return self._kept[id(ref)]

    def keep(self, ref: Any, value: Any) -> None:
        """Makes :meth:`load` return a float32 value that was computed, if rows are kept."""
        if self._kept is not None:
            self._kept[id(ref)] = value

    def vector(self, ref: Any) -> Any:
        """Elements of a vector with one for each column as float32, the same for all rows."""
        value = self.rows.held.get(id(ref))
        if id(ref) in self.rows.staged:
            value = self.rows.staged[id(ref)][...]
        elif value is None:
            value = ref[pl.ds(self.first, self.width)]
        value = value.astype(jnp.float32)
        if self.rows.tiling.height == 1:
            return value
        return lax.broadcast_in_dim(value, (self.rows.tiling.height, self.width), (1,))

    def store(self, ref: Any, value: Any) -> None:
        """Writes elements of a (rows, columns) matrix, converted to its dtype."""
        ref[self.rows.place, pl.ds(self.first, self.width)] = value.astype(ref.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what :meth:`load` returns."""
        height = self.rows.tiling.height
        return (self.width,) if height == 1 else (height, self.width)

    def columns(self) -> Any:
        """The number of each element's column, int32 of :attr:`shape`."""
        axis = len(self.shape) - 1
        return self.first + lax.broadcasted_iota(jnp.int32, self.shape, axis)


class Rows:
    """The rows of a block.

    Attributes:
      tiling: how they are distributed.
      first: the number of the first row.
      place: index of the rows in a matrix.
      thread: which of the warpgroups that share a row this is.
      resident: the columns that this warpgroup holds, if rows are held.
      staged: by the identity of a matrix, where in shared memory these columns of it are.
      held: by the identity of a vector, its elements for these columns, or rows, if they are in
        registers.
      exchanged: through which warpgroups that share a row combine values.
      near: whether chunks are read from shared memory.
      fused: whether products and sums are to be one instruction, where that is exact enough.
    """

    near = False
    fused = False

    def __init__(
        self,
        tiling: RowTiling,
        first: Any,
        thread: Any,
        exchange: Exchange | None = None,
        staged: dict[int, Any] | None = None,
        held: dict[int, Any] | None = None,
    ) -> None:
        self.tiling = tiling
        self.first = first
        self.place: Any = first if tiling.height == 1 else pl.ds(first, tiling.height)
        self.thread = thread
        self.exchanged = exchange
        self.staged = staged or {}
        self.held = held or {}
        # What is in shared memory takes less registers if it is read again.
        kept = not self.staged or tiling.height * tiling.chunk <= MOST_KEPT * LANES
        self.resident = Chunk(self, thread * tiling.chunk, tiling.chunk, kept=kept)

    # Passes over the row --------------------------------------------------------------------------

    def reduce(self, values: Callable[[Chunk], Any], *kinds: str) -> tuple[Any, ...]:
        """Reductions of each row, in one pass, for every warpgroup.

        Args:
          values: the array to reduce, of the chunk's shape, for each kind.
          *kinds: "sum" or "max".

        Returns:
          A float32 value for each kind: (height,), or a scalar.
        """
        return self.exchange(self.partial(values, kinds), kinds)

    def partial(self, values: Callable[[Chunk], Any], kinds: Sequence[str]) -> tuple[Any, ...]:
        """:meth:`reduce` of what this warpgroup has of each row."""

        def partial(chunk: Chunk) -> tuple[Any, ...]:
            arrays = values(chunk)
            return tuple(
                REDUCE[kind](array, axis=-1) for kind, array in zip(kinds, arrays, strict=True)
            )

        if self.tiling.resident:
            return partial(self.resident)

        def step(chunk: Chunk, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            arrays = values(chunk)
            return tuple(
                COMBINE[kind](one, array)
                for kind, one, array in zip(kinds, sums, arrays, strict=True)
            )

        # Chunks are combined element by element; lanes exchange values once.
        shape = self.resident.shape
        start = tuple(jnp.full(shape, NEUTRAL[kind], jnp.float32) for kind in kinds)
        sums = self._over_chunks(step, start)
        results = tuple(REDUCE[kind](one, axis=-1) for kind, one in zip(kinds, sums, strict=True))
        rest = self.rest()
        if rest is not None:
            # It may hold what only the last warpgroup has written.
            neutral = tuple(jnp.full(shape[:-1], NEUTRAL[kind], jnp.float32) for kind in kinds)
            ends = lax.cond(
                self.thread == self.tiling.threads - 1, lambda: partial(rest), lambda: neutral
            )
            results = tuple(
                COMBINE[kind](one, end) for kind, one, end in zip(kinds, results, ends, strict=True)
            )
        return results

    def each(self, work: Callable[[Chunk], None]) -> None:
        """Does something with each chunk, such as to store a result."""
        if self.tiling.resident:
            work(self.resident)
            return

        def step(chunk: Chunk, carry: tuple[()]) -> tuple[()]:
            work(chunk)
            return carry

        self._over_chunks(step, ())
        rest = self.rest()
        if rest is not None:
            pl.when(self.thread == self.tiling.threads - 1)(lambda: work(rest))

    def fold(self, step: Callable[[Chunk, Any], Any], start: Any) -> Any:
        """The carry of full chunks of this warpgroup."""
        if self.tiling.resident:
            return step(self.resident, start)
        return self._over_chunks(step, start)

    def _over_chunks(self, step: Callable[[Chunk, Any], Any], carry: Any) -> Any:
        chunk, threads = self.tiling.chunk, self.tiling.threads
        full = self.tiling.columns // chunk
        # Chunks take turns, so that all warpgroups read neighbouring memory.
        mine = lax.div(full - self.thread + (threads - 1), threads)

        def body(number: Any, carry: Any) -> Any:
            first = pl.multiple_of((number * threads + self.thread) * chunk, chunk)
            return step(self.chunk_at(first, chunk), carry)

        return lax.fori_loop(0, mine, body, carry)

    def chunk_at(self, first: Any, width: int) -> Chunk:
        """Columns from ``first`` on."""
        return Chunk(self, first, width, kept=False)

    def rest(self) -> Chunk | None:
        """The columns behind the full chunks, if any; they are the last warpgroup's."""
        width = self.tiling.columns % self.tiling.chunk
        first = self.tiling.columns - width
        return Chunk(self, first, width, kept=False) if width else None

    # Values of whole rows -------------------------------------------------------------------------

    def spread(self, value: Any, chunk: Chunk) -> Any:
        """A value of each row, for all columns of a chunk."""
        if self.tiling.height == 1:
            return value
        return lax.broadcast_in_dim(value, chunk.shape, (0,))

    def values(self, ref: Any) -> Any:
        """Elements of a (rows,) vector: (height,), or a scalar."""
        value = self.held.get(id(ref))
        return ref[self.place] if value is None else value

    def row_values(
        self, compute: Callable[..., tuple[Any, ...]], chunk: Chunk, *refs: Any
    ) -> tuple[Any, ...]:
        """Values that are computed from elements of (rows,) vectors, each for all columns."""
        results = compute(*(self.values(ref) for ref in refs))
        return tuple(self.spread(one, chunk) for one in results)

    def store(self, ref: Any, value: Any) -> None:
        """Writes a value of each row to a (rows,) vector."""

        def write() -> None:
            ref[self.place] = value.astype(ref.dtype)

        if self.tiling.threads == 1:
            write()
        else:
            pl.when(self.thread == 0)(write)

    def elements(self, ref: Any, columns: Any) -> Any:
        """An element of each row of a (rows, columns) matrix, as float32; columns is like them."""
        if self.tiling.height == 1:
            return ref[self.first, columns].astype(jnp.float32)
        rows = self.first + lax.broadcasted_iota(jnp.int32, columns.shape, 0)
        return ref[rows, columns].astype(jnp.float32)

    def samples(self, ref: Any) -> list[Any] | None:
        """Some elements of the row as float32, the same for all warpgroups that share it; None
        where they are not at hand."""
        return None

    def use_slots(self, first: Any) -> None:
        """In a loop: which reductions of the body, counted from 0, those of a turn are."""
        if self.exchanged is not None:
            self.exchanged.next = first

    def exchange(self, values: Sequence[Any], kinds: Sequence[str]) -> tuple[Any, ...]:
        """Combines values of the warpgroups that share a row; all of them get the results."""
        if self.exchanged is None:
            return tuple(values)
        return self.exchanged(self.thread, values, kinds)


def in_step(
    works: Sequence[Work], blocks: Sequence[Rows], add: Callable[[list[Any]], None] | None = None
) -> None:
    """Runs bodies, of which each works on rows of its own.

    They go on together: what all of them reduce at a time is exchanged at once.

    Args:
      works: the bodies, which all reduce equally often.
      blocks: their rows, of the same warpgroups.
      add: gets what is to be added to sums, as soon as there is something.
    """
    answers: list[Any] = [None] * len(works)
    while True:
        asked: list[Reductions] = []
        for work, answer in zip(works, answers, strict=True):
            with contextlib.suppress(StopIteration):
                asked.append(work.send(answer))
        if not asked:
            return
        kinds = [kind for _, each, _ in asked for kind in each]
        parts: list[Any] = []
        for block, (values, each, added) in zip(blocks, asked, strict=True):
            parts += block.partial(values, each)
            if add is not None and added:
                add(added)
        combined = list(blocks[0].exchange(parts, kinds))
        answers = [tuple(combined.pop(0) for _ in each) for _, each, _ in asked]


def alone(body: Callable[..., Work]) -> Callable[..., None]:
    """A body that yields what it reduces, for :func:`row_kernel`."""

    def work(block: Rows, *refs: Any) -> None:
        in_step([body(block, *refs)], [block])

    return work


def no_sums(first: Any, group: Any, sums: tuple[Any, ...], *refs: Any) -> None:
    """What is stored of the sums over rows where there are none."""


BY_BLOCK = False
"""Whether warpgroups of a block that all share one row wait for one another by the barrier of the
block, which takes no turn through shared memory."""


@plgpu.inline_mgpu(values="pallasite")  # type: ignore[untyped-decorator]
def _await_block(context: Any) -> None:
    context.block_barrier()


def barrier_of(threads: int) -> dict[str, Any]:
    """What :func:`await_all` needs in a block of so many warpgroups."""
    return {} if BY_BLOCK else dict(barrier=plgpu.Barrier(num_arrivals=threads))


def await_all(barrier: Any) -> None:
    """All warpgroups that share work have come here; those of the block if there is no barrier."""
    if barrier is None:
        _await_block()
        return
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


class Exchange:
    """Shared memory through which warpgroups combine values.

    Each use has a slot of its own, so that no warpgroup overwrites what another has not read.

    Args:
      threads: warpgroups that share a row.
      partials: shared memory, (slots, threads).
      barrier: on which all of them arrive; None if they are all of the block.
      first: the first slot.
    """

    def __init__(self, threads: int, partials: Any, barrier: Any = None, first: Any = 0) -> None:
        self.threads = threads
        self.partials = partials
        self.barrier = barrier
        self.next = first

    def __call__(self, thread: Any, values: Sequence[Any], kinds: Sequence[str]) -> tuple[Any, ...]:
        """The combined values."""
        slots = [self.next + number for number in range(len(values))]
        self.next = self.next + len(values)
        for slot, value in zip(slots, values, strict=True):
            self.partials[slot, thread] = value
        await_all(self.barrier)
        results = []
        for slot, kind in zip(slots, kinds, strict=True):
            total = self.partials[slot, 0]
            for other in range(1, self.threads):
                total = COMBINE[kind](total, self.partials[slot, other])
            results.append(total)
        return tuple(results)


@dataclasses.dataclass(frozen=True)
class Staging:
    """How rows are fetched to shared memory before their turn.

    Attributes:
      stages: rows, or groups of them, in shared memory.
      dtypes: of the first operands, which are fetched.
      together: rows of a stage, of which ``RowTiling.height`` is 1; their reductions are exchanged
        together.
    """

    stages: int
    dtypes: tuple[np.dtype[Any], ...]
    together: int = 1

    @property
    def operands(self) -> int:
        """So many of the first operands are fetched."""
        return len(self.dtypes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the buffers."""
        return tuple(f"staged_{number}" for number in range(self.operands))

    def scratch(self, tiling: RowTiling) -> dict[str, Any]:
        """Buffers and barriers; each warpgroup has its own."""
        height = tiling.height * self.together
        inner = (tiling.chunk,) if height == 1 else (height, tiling.chunk)
        parts = (self.stages,) if tiling.threads == 1 else (self.stages, tiling.threads)
        buffers: dict[str, Any] = {
            name: plgpu.SMEM((*parts, *inner), dtype)
            for name, dtype in zip(self.names, self.dtypes, strict=True)
        }
        barriers = plgpu.Barrier(
            num_arrivals=self.operands * self.together, num_barriers=self.stages * tiling.threads
        )
        return buffers | {"loaded": barriers}


def threads_of(tiling: RowTiling, slots: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Arguments of ``plgpu.kernel`` for the warpgroups that share a row.

    Args:
      tiling: how they share it.
      slots: values that they exchange.
      dtype: of these.
    """
    if tiling.threads == 1:
        return {}
    several: dict[str, Any] = dict(num_threads=tiling.threads, thread_name="part")
    if slots:
        several["scratch_types"] = dict(
            partials=plgpu.SMEM((slots, tiling.threads), dtype), **barrier_of(tiling.threads)
        )
    return several


def row_kernel(
    body: Callable[..., Any],
    rows: int,
    tiling: RowTiling,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    params: Any = None,
    exchanged: Any = jnp.float32,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel with a block for each ``tiling.height`` rows.

    Args:
      body: ``body(rows, *refs)`` with a :class:`Rows`, the operands and the results.
      rows: of the matrices, at least ``tiling.height``.
      tiling: how they are distributed.
      out_types: types of the results.
      name: of the kernel, in profiles.
      exchanges: values that the body reduces altogether.
      params: ``CompilerParams``.
      exchanged: dtype of these values.
    """
    height, threads = tiling.height, tiling.threads

    def with_rows(*refs: Any, **scratch: Any) -> None:
        block, left = lax.axis_index("rows"), rows % height
        thread = lax.axis_index("part") if threads > 1 else 0
        if tiling.ragged:
            last = threads - 1

            def share(width: int) -> None:
                exchange = Exchange(threads, **scratch) if scratch else None
                part = RowTiling(1, threads, width, width * threads)
                one = Rows(part, block, thread, exchange)
                one.resident = Chunk(one, thread * tiling.chunk, width, kept=True)
                body(one, *refs)

            pl.when(thread < last)(lambda: share(tiling.chunk))
            pl.when(thread == last)(lambda: share(tiling.columns - last * tiling.chunk))
            return
        exchange = Exchange(threads, **scratch) if scratch else None

        def work(count: int) -> None:
            part = dataclasses.replace(tiling, height=count)
            body(Rows(part, block * height, thread, exchange), *refs)

        if left:
            pl.when(block < rows // height)(lambda: work(height))
            pl.when(block == rows // height)(lambda: work(left))
        else:
            work(height)

    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        with_rows,
        out_type=tuple(out_types),
        grid=(-(-rows // height),),
        grid_names=("rows",),
        kernel_name=name,
        compiler_params=params,
        **threads_of(tiling, exchanges, exchanged),
    )
    return kernel


def folding_row_kernel(
    body: Callable[..., Work],
    finish: Callable[..., None],
    rows: int,
    tiling: RowTiling,
    blocks: int,
    sums: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    staging: Staging | None = None,
    params: Any = None,
    vectors: Sequence[int] = (),
    of_rows: Sequence[int] = (),
    most_held: float = math.inf,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel whose blocks go over many rows each, and keep sums over them in registers.

    Args:
      body: ``body(rows, *refs)`` works on a block's next rows, which its warpgroups have to hold
        (``tiling.resident``); it yields what it reduces and what to add to each sum, of the
        chunk's shape (:func:`in_step`).
      finish: ``finish(first, block, sums, *refs)`` stores the sums of a block's rows, each (width,)
        from column ``first`` on.
      rows: of the matrices.
      tiling: how they are distributed.
      blocks: how many share the rows, at most one for each ``tiling.height`` rows.
      sums: how many there are.
      out_types: types of the results.
      name: of the kernel, in profiles.
      exchanges: values that the body reduces altogether.
      staging: which operands are fetched to shared memory before their turn, if any.
      params: ``CompilerParams``.
      vectors: numbers of the operands with an element for each column, which stay in registers.
      of_rows: of those with an element for each row, which is read a step before.
      most_held: registers of a lane for vectors; those that do not fit are read for each row.
    """
    height, threads = tiling.height, tiling.threads
    together = 1 if staging is None else staging.together
    group = height * together
    full = rows // group
    exchanges *= together

    def over_rows(*refs: Any, **scratch: Any) -> None:
        block = lax.axis_index("block")
        thread = lax.axis_index("part") if threads > 1 else 0
        staged_names = () if staging is None else ("loaded", *staging.names)
        ring = {name: scratch.pop(name) for name in staged_names}

        chunk = Rows(tiling, 0, thread).resident
        held, room = dict[int, Any](), most_held
        for one in vectors:
            room -= refs[one].dtype.itemsize * chunk.width / (4 * LANES)
            if room >= 0:
                held[id(refs[one])] = refs[one][pl.ds(chunk.first, chunk.width)]

        def exchange_of(step: Any) -> Exchange | None:
            # The slots of one step are free two steps later.
            first = lax.rem(step, 2) * exchanges
            return Exchange(threads, **scratch, first=first) if scratch else None

        def early(step: Any) -> tuple[Any, ...]:
            """Elements for the rows of a step; those of the last one if there is none."""
            row = lax.min(block + step * blocks, full - 1) * group
            return tuple(
                refs[one][row + number if height == 1 else pl.ds(row, height)]
                for number in range(together)
                for one in of_rows
            )

        def work(step: Any, carry: tuple[Any, ...], staged: Any = None) -> tuple[Any, ...]:
            exchange, row = exchange_of(step), (block + step * blocks) * group
            carry, mine = carry[:sums], list(carry[sums:])
            following = early(step + 1)
            parts = [
                Rows(
                    tiling,
                    row + number,
                    thread,
                    exchange,
                    None if staged is None else staged(number),
                    held | {id(refs[one]): mine.pop(0) for one in of_rows},
                )
                for number in range(together)
            ]
            so_far = list(carry)

            def add(added: list[Any]) -> None:
                so_far[:] = [one + more for one, more in zip(so_far, added, strict=True)]

            in_step([body(part, *refs) for part in parts], parts, add)
            return (*so_far, *following)

        steps = lax.div(full - block + (blocks - 1), blocks)
        carry = (*(jnp.zeros(chunk.shape, jnp.float32),) * sums, *early(jnp.int32(0)))
        if staging is None:
            carry = lax.fori_loop(0, steps, work, carry)
        else:
            sources = refs[: staging.operands]
            loaded = ring.pop("loaded").at[pl.ds(thread * staging.stages, staging.stages)]
            buffers = [ring[name] for name in staging.names]

            def places(stage: Any, number: int) -> list[Any]:
                parts = (stage,) if threads == 1 else (stage, thread)
                parts = parts if together == 1 else (*parts, number)
                return [buffer.at[parts] for buffer in buffers]

            def fetch(step: Any, stage: Any) -> None:
                row = (block + step * blocks) * group
                columns = pl.ds(chunk.first, chunk.width)
                for number in range(together):
                    there: Any = row + number if height == 1 else pl.ds(row, height)
                    for source, place in zip(sources, places(stage, number), strict=True):
                        plgpu.copy_gmem_to_smem(
                            source.at[there, columns], place, loaded.at[stage], oob_mode=INSIDE
                        )

            def staged_work(step: Any, stage: Any, carry: Any) -> Any:
                def staged(number: int) -> dict[int, Any]:
                    there = places(stage, number)
                    return {id(one): place for one, place in zip(sources, there, strict=True)}

                return work(step, carry, staged)

            carry = over_steps(steps, staging.stages, loaded, fetch, staged_work, carry)
        carry = carry[:sums]
        single = dataclasses.replace(tiling, height=1)

        # Of the last rows, the blocks that would be next take one each.
        number, left = lax.rem(block + (blocks - full % blocks), blocks), rows - full * group

        def rest(step: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            row = full * group + number + step * blocks
            part = Rows(single, row, thread, exchange_of(steps + step), None, held)
            added: list[Any] = []
            in_step([body(part, *refs)], [part], added.extend)
            if height == 1:
                return tuple(one + more for one, more in zip(carry, added, strict=True))
            top = lax.broadcasted_iota(jnp.int32, chunk.shape, 0) == 0
            return tuple(
                one + jnp.where(top, lax.broadcast_in_dim(more, chunk.shape, (1,)), 0.0)
                for one, more in zip(carry, added, strict=True)
            )

        if left == 1:
            carry = lax.cond(
                number == 0, lambda carry: rest(jnp.int32(0), carry), lambda carry: carry, carry
            )
        elif left:
            count = lax.div(left - number + (blocks - 1), blocks)
            carry = lax.fori_loop(0, count, rest, carry)
        if height > 1:
            carry = tuple(jnp.sum(one, axis=0) for one in carry)
        finish(chunk.first, block, carry, *refs)

    arguments = threads_of(tiling, 2 * exchanges)
    if staging is not None:
        arguments["scratch_types"] = arguments.get("scratch_types", {}) | staging.scratch(tiling)
    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        over_rows,
        out_type=tuple(out_types),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=params,
        **arguments,
    )
    return kernel
