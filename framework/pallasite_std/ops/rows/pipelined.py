"""Kernels over rows whose warpgroups do not wait for one another's reductions.

While the sums of a row are on their way, a warpgroup reduces what it has of the next one, and only
then finishes the first (software pipelining). So rows may be shared by many warpgroups, also of the
blocks of a cluster, where they are too long for the registers or the shared memory of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import (
    COMBINE,
    INSIDE,
    NEUTRAL,
    REDUCE,
    SAMPLES,
    Chunk,
    Reductions,
    Rows,
    Work,
)
from pallasite_std.ops.rows.tiling import RowTiling

CLUSTER = "side"
"""The axis of the blocks that share a row."""
INTERVAL = 8
"""After so many turns the blocks of a cluster tell one another what they have read: an arrival that
says so waits for the stores to global memory before it."""


FEW_TURNS = 4
"""Of more turns, blocks that have one more than others take hardly longer."""


def fewest(units: int, blocks: int) -> int:
    """How many of so many blocks suffice for units of work, in no more turns, if those are few."""
    turns = -(-units // blocks)
    return min(units, blocks if turns > FEW_TURNS else -(-units // turns))


FITTING_CLUSTERS = 0.88
"""Of the clusters of more than two blocks that multiprocessors suffice for, those that fit."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How rows are shared, and fetched before their turn.

    Attributes:
      threads: warpgroups of a block that share a row.
      blocks: of a cluster that share a row.
      columns: of the matrix.
      stages: rows in shared memory: at least two more than there are reductions of a row.
      resident: blocks that a multiprocessor has at a time.
      chunk: columns of each warpgroup but for the last, which has those that are left, at most as
        many; whole vectors.
      together: rows of a stage, which are reduced at once.
      held: whether vectors with an element for each column stay in registers, or in shared memory.
      vector: elements of a vector, if rows do not begin at whole ones: then what the warpgroups
        share begins with the vector that a row begins in. Rows of a group all begin at the same
        place of a vector.
      by_columns: whether warpgroups share the columns of such rows instead, which lanes take one by
        one from shared memory.
    """

    threads: int
    blocks: int
    columns: int
    stages: int
    resident: int
    chunk: int
    together: int = 1
    held: bool = True
    vector: int = 1
    by_columns: bool = False

    @property
    def parts(self) -> int:
        """Warpgroups that share a row."""
        return self.threads * self.blocks

    @property
    def interval(self) -> int:
        """Turns after which the blocks of a cluster tell one another what they have read."""
        return INTERVAL if self.blocks <= 4 else INTERVAL // 2

    @property
    def unaligned(self) -> bool:
        """Whether rows begin within vectors."""
        return self.columns % self.vector > 0

    @property
    def masked(self) -> bool:
        """Whether what the warpgroups share has elements of other rows."""
        return self.unaligned and not self.by_columns

    @property
    def period(self) -> int:
        """After so many rows of a group one begins at the same place of a vector again, if all of
        them have to."""
        return 1 if self.by_columns else self.vector // math.gcd(self.columns, self.vector)

    @property
    def padded(self) -> int:
        """Columns of all whole vectors that any row has elements of."""
        if not self.masked:
            return self.columns
        return self.whole_vectors(self.columns)

    @property
    def fetched(self) -> int:
        """Elements of each warpgroup's place for a row in shared memory."""
        return self.whole_vectors(self.chunk) if self.unaligned and self.by_columns else self.chunk

    def whole_vectors(self, width: int) -> int:
        """Elements of all whole vectors that so many elements may be of."""
        return -(-(width + self.vector - 1) // self.vector) * self.vector

    @property
    def last(self) -> int:
        """Columns of the last warpgroup."""
        return self.padded - (self.parts - 1) * self.chunk

    def groups(self, multiprocessors: int, rows: int | None = None) -> int:
        """Blocks, or clusters, that are resident at a time; of few rows, as many as take as long.

        Larger clusters lie within parts of the chip, of which the last one may be incomplete: an
        H200 of 132 multiprocessors had room for 30 clusters of 4 and 15 of 8. One too many takes
        as long as all of them, and others of this kind may have room for less.
        """
        found = multiprocessors * self.resident // self.blocks
        if self.blocks > 2:
            found = int(found * FITTING_CLUSTERS)
        most = max(1, found // self.period)
        if rows is not None:
            found = fewest(-(-rows // self.together), most * self.period)
            most = max(1, min(most, -(-found // self.period), rows // self.period))
        return most * self.period


class _UnalignedChunk(Chunk):
    """Whole vectors that a row of a flattened matrix has elements of.

    Attributes:
      inside: which elements are the row's.
    """

    def __init__(self, rows: Rows, position: Any, width: int, inside: Any) -> None:
        super().__init__(rows, position, width, kept=rows.resident.keeps)
        self.inside = inside

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to a flattened matrix."""
        place = ref.at[pl.ds(self.first, self.width)]
        pltriton.store(place, value.astype(ref.dtype), mask=self.inside)


class _FlatChunk(Chunk):
    """Columns of a row of a flattened matrix."""

    def __init__(self, rows: Rows, first: Any, width: int, position: Any) -> None:
        super().__init__(rows, first, width, kept=rows.resident.keeps)
        self._position = position

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to a flattened matrix."""
        ref[pl.ds(self._position, self.width)] = value.astype(ref.dtype)


class _PipelinedRow(Rows):
    """A row in flight.

    Attributes:
      sampled: elements that were read early, by the identity of a matrix.
    """

    fused = True
    sampled: dict[int, list[Any]]

    def samples(self, ref: Any) -> list[Any] | None:
        """See the base class."""
        return self.sampled.get(id(ref))


@dataclasses.dataclass
class _Flight:
    """Rows in flight: their step, and of each its values and what is known of its reductions."""

    step: Any
    values: list[list[Any]]
    known: list[list[tuple[Any, ...]]]

    @property
    def turns(self) -> int:
        """Reductions that are known."""
        return len(self.known[0])


def pipelined_row_kernel(
    body: Callable[..., Work],
    finish: Callable[..., None],
    rows: int,
    pipeline: Pipeline,
    groups: int,
    dtypes: Sequence[np.dtype[Any]],
    reductions: Sequence[Sequence[str]],
    sums: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    vectors: Sequence[int] = (),
    of_rows: Sequence[int] = (),
    params: Any = None,
    samples: bool = False,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel whose blocks, or clusters, go over many rows each.

    Args:
      body: ``body(rows, *refs)`` works on one row; it yields what it reduces and what to add to
        each sum, of the chunk's shape. It is run anew for each part of the work between reductions,
        so it stores results after the last of them only.
      finish: ``finish(first, group, sums, *refs)`` stores the sums of a group's rows, each (width,)
        from column ``first`` on.
      rows: of the matrices; for each group, as many as there are reductions at least.
      pipeline: how they are distributed.
      groups: of blocks that share rows.
      dtypes: of the first operands, matrices that are fetched.
      reductions: the kinds of what the body reduces at a time.
      sums: how many there are.
      out_types: types of the results: matrices, then sums.
      name: of the kernel, in profiles.
      vectors: numbers of the operands with an element for each column, which stay in registers.
      of_rows: of those with an element for each row, which is read early.
      params: ``CompilerParams``.
      samples: whether the body asks for :meth:`.kernel.Rows.samples`.
    """
    depth, stages, threads = len(reductions), pipeline.stages, pipeline.threads
    blocks, parts, columns = pipeline.blocks, pipeline.parts, pipeline.columns
    together, units = pipeline.together, -(-rows // pipeline.together)
    vector, flat, masked = pipeline.vector, pipeline.unaligned, pipeline.masked
    # Elements behind the last whole vector of a matrix, which no copy can fetch.
    behind = rows * columns % vector
    whole = rows * columns - behind
    # Each warpgroup has a place for what it sends: whole vectors.
    places_of_values = -(-together * sum(map(len, reductions)) // 4) * 4
    # Warpgroups of a block have read a slot when they fill the next; of a cluster, see INTERVAL.
    slots = 2 if blocks == 1 else 2 * pipeline.interval + depth
    assert stages >= depth + 2 and units >= groups * depth
    assert groups % pipeline.period == 0

    def over_rows(*refs: Any, **scratch: Any) -> None:
        own = lax.axis_index("part") if threads > 1 else 0
        thread = own if blocks == 1 else own + threads * lax.axis_index(CLUSTER)
        last, chunk = parts - 1, pipeline.chunk
        if pipeline.last == chunk and not flat:
            over_columns(chunk, own, thread, *refs, **scratch)
            return
        # Behind the end of a matrix there may be nothing: that is the last warpgroup's.
        ends = last if flat else thread
        pl.when(thread < last)(lambda: over_columns(chunk, own, thread, *refs, **scratch))
        pl.when(thread == last)(lambda: over_columns(pipeline.last, own, ends, *refs, **scratch))

    def over_columns(
        width: int, own: Any, thread: Any, *refs: Any, partials: Any, combined: Any, loaded: Any,
        **buffers: Any,
    ) -> None:  # fmt: skip
        group = lax.axis_index("group")
        staged = [buffers[f"staged_{number}"] for number in range(len(dtypes))]
        tiling = RowTiling(1, parts, width, width * parts)
        first = thread * pipeline.chunk
        window = pl.ds(first, width)
        shift: Any = lax.rem(group * columns, vector) if masked else 0
        place = lax.broadcasted_iota(jnp.int32, (width,), 0)
        column = place + (first - shift)
        inside = None
        if masked:
            # Of most of a lane's elements that is known here, whatever a row begins with.
            ends, begins = isinstance(first, int), parts == 1 or not isinstance(first, int)
            inside = (place < columns - first) if ends else None
            if begins:
                after = lax.bitcast_convert_type(place, jnp.uint32) >= np.uint32(vector)
                inside = after if inside is None else inside & after
            inside |= lax.bitcast_convert_type(column, jnp.uint32) < np.uint32(columns)
        held, kept = dict[int, Any](), dict[int, Any]()
        for one in vectors:
            values = refs[one].at[pl.ds(first - shift, width)] if masked else refs[one][window]
            if masked:
                values = pltriton.load(values, mask=inside)
            if pipeline.held:
                held[id(refs[one])] = values
            else:
                place = buffers[f"vector_{one}"]
                place = (place.at[own] if threads > 1 else place).at[pl.ds(0, width)]
                place[...] = values
                kept[id(refs[one])] = place
        if masked:  # Rows of a group follow one another in a distance of all groups.
            mine = lax.div(rows - group + (groups - 1), groups)
            steps = lax.div(mine + (together - 1), together)
        else:
            steps = lax.div(units - group + (groups - 1), groups)

        def exists(step: Any, number: int) -> Any:
            if masked:
                return step * together + number < mine
            return (group + step * groups) * together + number < rows

        def row_of(step: Any, number: int) -> Any:
            # What is not there is the last row once more.
            if masked:
                return group + lax.min(step * together + number, mine - 1) * groups
            row = (group + step * groups) * together + number
            return lax.min(row, rows - 1) if rows % together and number else row

        def places(step: Any, number: int) -> list[Any]:
            there = (lax.rem(step, stages), *((own,) if threads > 1 else ()))
            return [one.at[(*there, number) if together > 1 else there] for one in staged]

        def start_of(row: Any) -> Any:
            """Where this warpgroup's part of a row begins in its place in shared memory."""
            return lax.rem(row * columns + first, vector) if flat and not masked else 0

        def position(row: Any) -> Any:
            return pl.multiple_of(row * columns - shift + first - start_of(row), vector)

        # The last warpgroup's part of the last row may end behind the last whole vector.
        wanted = pipeline.whole_vectors(width) if flat and not masked else width
        fetched, short = wanted, False
        if flat and isinstance(first, int):
            last_row = (rows - 1) * columns
            begin = last_row // vector * vector + first
            if not masked:
                begin = (last_row + first) // vector * vector
            short = whole - begin < wanted
            fetched = min(whole - begin, wanted)

        def fetch(step: Any) -> None:
            barrier = loaded.at[lax.rem(step, stages)]

            def copy(count: int, number: int) -> None:
                row = row_of(step, number)
                for source, place in zip(refs, places(step, number), strict=False):
                    columns_there = pl.ds(position(row), count)
                    some = source.at[columns_there] if flat else source.at[row, window]
                    plgpu.copy_gmem_to_smem(
                        some, place.at[pl.ds(0, count)], barrier, oob_mode=INSIDE
                    )

            def copy_all() -> None:
                for number in range(together):
                    copy(wanted, number)

            def copy_each() -> None:
                for number in range(together - 1):
                    last = row_of(step, number) == rows - 1
                    pl.when(jnp.logical_not(last))(functools.partial(copy, wanted, number))
                    pl.when(last)(functools.partial(copy, fetched, number))
                copy(fetched, together - 1)

            if short:
                pl.when(jnp.logical_not(has_last(step)))(copy_all)
                pl.when(has_last(step))(copy_each)
            else:
                copy_all()

        def has_last(step: Any) -> Any:
            """Whether the last row of the matrix is among those of a step: its last one."""
            return row_of(step, together - 1) == rows - 1

        def await_rows(step: Any) -> None:
            plgpu.barrier_wait(loaded.at[lax.rem(step, stages)])
            if not (short and behind):
                return

            def add(number: int) -> None:
                for source, place in zip(refs, places(step, number), strict=False):
                    place[pl.ds(fetched, behind)] = source[pl.ds(whole, behind)]

            def add_each() -> None:
                for number in range(together - 1):
                    last = row_of(step, number) == rows - 1
                    pl.when(last)(functools.partial(add, number))
                add(together - 1)

            pl.when(has_last(step))(add_each)

        def early(step: Any) -> list[list[Any]]:
            step = lax.min(step, steps - 1)
            rows_there = [row_of(step, number) for number in range(together)]
            found = [[refs[one][row] for one in of_rows] for row in rows_there]
            if samples and blocks > 1:
                return [one + some_of(row) for one, row in zip(found, rows_there, strict=True)]
            return found

        def some_of(row: Any) -> list[Any]:
            places = [(columns - 1) * one // (SAMPLES - 1) for one in range(SAMPLES)]
            return [
                (ref[row * columns + place] if flat else ref[row, place]).astype(jnp.float32)
                for ref in refs[: len(dtypes)]
                for place in places
            ]

        def near(step: Any, number: int) -> list[Any]:
            """Samples of the first warpgroup's part of a row, which is in shared memory."""
            found = list[Any]()
            for one in staged:
                of_stage = one.at[lax.rem(step, stages)]
                of_first = of_stage.at[0] if threads > 1 else of_stage
                there = of_first.at[number] if together > 1 else of_first
                found += [there[vector + n].astype(jnp.float32) for n in range(SAMPLES)]
            return found

        def start(flight: _Flight, number: int) -> tuple[Rows, Work]:
            row, there = row_of(flight.step, number), dict(kept)
            for ref, place in zip(refs, places(flight.step, number), strict=False):
                there[id(ref)] = place.at[pl.ds(start_of(row), width)]
            values = dict(
                zip((id(refs[one]) for one in of_rows), flight.values[number], strict=False)
            )
            block = _PipelinedRow(tiling, row, thread, None, there, held | values)
            some = flight.values[number][len(of_rows) :]
            block.sampled = {
                id(ref): some[one * SAMPLES : (one + 1) * SAMPLES]
                for one, ref in enumerate(refs[: len(dtypes) if samples else 0])
            }
            if masked:
                block.resident = _UnalignedChunk(block, position(row), width, inside)
            elif flat:
                block.resident = _FlatChunk(block, first, width, row * columns + first)
            else:
                block.resident = Chunk(block, first, width, kept=block.resident.keeps)
            return block, body(block, *refs)

        def partial(flight: _Flight, number: int) -> list[tuple[str, Any]]:
            """What is reduced next, with the kinds."""
            block, work = start(flight, number)
            asked: Reductions = next(work)
            for known in flight.known[number]:
                asked = work.send(known)
            values, kinds, _ = asked
            arrays = values(block.resident)
            if inside is not None:
                arrays = [
                    jnp.where(inside, one, NEUTRAL[kind])
                    for kind, one in zip(kinds, arrays, strict=True)
                ]
            return list(zip(kinds, arrays, strict=True))

        def complete(flight: _Flight, number: int, so_far: list[Any]) -> list[Any]:
            block, work = start(flight, number)
            asked: Reductions = next(work)
            for turn, known in enumerate(flight.known[number]):
                values, _, added = asked
                if sums:
                    values(block.resident)
                    if added and (masked or rows % together) and number:
                        there = exists(flight.step, number)
                        added = [jnp.where(there, one, 0.0) for one in added]
                    if added:
                        so_far = [a + b for a, b in zip(so_far, added, strict=True)]
                if turn < depth - 1:
                    asked = work.send(known)
                    continue

                def store(known: tuple[Any, ...] = known) -> None:
                    with contextlib.suppress(StopIteration):
                        work.send(known)
                        raise AssertionError("a body reduces more often than it says")

                # Lanes of its two turns differ, as one is known to begin at whole words.
                apart = number and rows % together and flat and not masked
                pl.when(exists(flight.step, number))(store) if apart else store()
            return so_far

        def send(turn: Any, given: Sequence[tuple[str, Any]]) -> None:
            """Reduces arrays, those of a kind at once."""
            place, scalars = 0, list[Any]()
            slot = lax.rem(turn, slots)
            for kind in dict.fromkeys(kind for kind, _ in given):
                arrays = [array for other, array in given if other == kind]
                values = REDUCE[kind](jnp.stack(arrays), axis=1)
                if blocks == 1:
                    partials[slot, thread, pl.ds(place, values.size)] = values
                    place += values.size
                else:
                    scalars += [values[number] for number in range(values.size)]
            if blocks == 1:
                plgpu.barrier_arrive(combined)
                return
            lanes = lax.broadcasted_iota(jnp.int32, (places_of_values,), 0)
            packed = jnp.zeros((places_of_values,), jnp.float32)
            for place, value in enumerate(scalars):
                packed = jnp.where(lanes == place, value, packed)
            for block in range(blocks):
                plgpu.async_store_smem(
                    packed, partials.at[slot, thread], combined.at[lax.rem(turn, 2)],
                    cluster_idx=jnp.int32(block), cluster_dim=CLUSTER, relaxed=True,
                )  # fmt: skip

        def receive(turn: Any, kinds: Sequence[str]) -> list[Any]:
            slot = lax.rem(turn, slots)
            plgpu.barrier_wait(combined if blocks == 1 else combined.at[lax.rem(turn, 2)])
            order = [n for kind in dict.fromkeys(kinds) for n, k in enumerate(kinds) if k == kind]
            results: list[Any] = [None] * len(kinds)
            for place, number in enumerate(order):
                total = partials[slot, 0, place]
                for other in range(1, parts):
                    total = COMBINE[kinds[number]](total, partials[slot, other, place])
                results[number] = total
            return results

        def turn(
            number: Any, flying: list[_Flight], so_far: list[Any], following: Any
        ) -> tuple[list[_Flight], list[Any], Any]:
            """Goes on with the rows in flight, and begins the next ones if there are any."""
            if flying:
                kinds = [k for one in flying for k in list(reductions[one.turns]) * together]
                results = receive(number - 1, kinds)
                for one in flying:
                    count = len(reductions[one.turns])
                    for known in one.known:
                        known.append(tuple(results.pop(0) for _ in range(count)))
            if following is not None:
                await_rows(number)
                if samples and blocks == 1:
                    following = [one + near(number, n) for n, one in enumerate(following)]
                flying.append(_Flight(number, following, [[] for _ in range(together)]))
                following = early(number + 1)
            waiting = [one for one in flying if one.turns < depth]
            if waiting:
                some = [
                    part for one in waiting for n in range(together) for part in partial(one, n)
                ]
                send(number, some)
            if len(waiting) < len(flying):
                for n in range(together):
                    so_far = complete(flying[0], n, so_far)
            return waiting, so_far, following

        def flights(first_step: Any, values: Any, known: Any) -> list[_Flight]:
            return [
                _Flight(first_step + number, list(v), [list(each) for each in k])
                for number, (v, k) in enumerate(zip(values, known, strict=True))
            ]

        def one_step(step: Any, carry: Any) -> Any:
            so_far, values, known, following = carry
            if blocks > 1:

                def read_until_now() -> None:
                    pl.when(step > 0)(lambda: plgpu.barrier_wait(buffers["seen"]))
                    plgpu.barrier_arrive(buffers["seen"])

                pl.when(lax.rem(step, pipeline.interval) == 0)(read_until_now)
            pl.when(step + stages - 1 < steps)(lambda: fetch(step + stages - 1))
            flying = flights(step, values, known)
            return packed_state(*turn(step + depth, flying, list(so_far), following))

        def packed_state(flying: list[_Flight], so_far: Any, following: Any) -> Any:
            values, known = [one.values for one in flying], [one.known for one in flying]
            return tuple(so_far), values, known, following

        ahead = lax.min(steps, stages - 1)
        lax.fori_loop(0, ahead, lambda step, _: fetch(step), None)
        flying: list[_Flight] = []
        so_far = [jnp.zeros((width,), jnp.float32)] * sums
        following: Any = early(jnp.int32(0))
        for number in range(depth):
            flying, so_far, following = turn(jnp.int32(number), flying, so_far, following)
        carry = packed_state(flying, so_far, following)
        sums_now, rows_values, rows_known, _ = lax.fori_loop(0, steps - depth, one_step, carry)
        flying, so_far = flights(steps - depth, rows_values, rows_known), list(sums_now)
        for number in range(depth):
            flying, so_far, _ = turn(steps + number, flying, so_far, None)
        if sums:
            finish(first, group, tuple(so_far), *refs)

    count = len(out_types) - sums
    flattened = [
        flat and number < count and len(one.shape) == 2 for number, one in enumerate(out_types)
    ]

    def in_memory(number: int, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The type of a result as the kernel writes it."""
        if flattened[number]:
            return jax.ShapeDtypeStruct((rows * columns,), one.dtype)
        padded = masked and number >= count
        return jax.ShapeDtypeStruct((groups, pipeline.padded), one.dtype) if padded else one

    @functools.lru_cache(maxsize=8)
    def kernel_of(*vector_types: np.dtype[Any]) -> Callable[..., tuple[jax.Array, ...]]:
        vector_dtypes = dict(zip(vectors, vector_types, strict=True))
        inner = tuple(size for size in (threads, together) if size > 1)
        scratch: dict[str, Any] = {}
        for number, dtype in enumerate(dtypes):
            scratch[f"staged_{number}"] = plgpu.SMEM((stages, *inner, pipeline.fetched), dtype)
        for number in () if pipeline.held else vectors:
            shape = (threads, pipeline.chunk) if threads > 1 else (pipeline.chunk,)
            scratch[f"vector_{number}"] = plgpu.SMEM(shape, vector_dtypes[number])
        scratch["partials"] = plgpu.SMEM((slots, parts, places_of_values), jnp.float32)
        scratch["combined"] = plgpu.Barrier(
            num_arrivals=parts, num_barriers=1 if blocks == 1 else 2
        )
        if blocks > 1:
            scratch["seen"] = plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=threads)
        scratch["loaded"] = plgpu.Barrier(
            num_arrivals=len(dtypes) * together * threads, num_barriers=stages
        )
        arguments: dict[str, Any] = dict(scratch_types=scratch)
        if threads > 1:
            arguments |= dict(num_threads=threads, thread_name="part")
        if blocks > 1:
            arguments |= dict(cluster=(blocks,), cluster_names=(CLUSTER,))
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            over_rows,
            out_type=tuple(in_memory(number, one) for number, one in enumerate(out_types)),
            grid=(groups,),
            grid_names=("group",),
            kernel_name=name,
            compiler_params=params,
            **arguments,
        )
        return kernel

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        kernel = kernel_of(*(np.dtype(operands[one].dtype) for one in vectors))
        if not flat:
            return kernel(*operands)
        matrices = [one.reshape(-1) for one in operands[: len(dtypes)]]
        written = kernel(*matrices, *operands[len(dtypes) :])
        results = [
            one.reshape(rows, columns) if whole else one
            for one, whole in zip(written, flattened, strict=True)
        ]
        if not masked:
            return tuple(results)
        return (*results[:count], *(_without_padding(one, pipeline) for one in results[count:]))

    return call


def _without_padding(sums: jax.Array, pipeline: Pipeline) -> jax.Array:
    """Sums over rows of groups by columns, from those of all whole vectors: (period, columns)."""
    of_period = jnp.sum(sums.reshape(-1, pipeline.period, pipeline.padded), axis=0)
    starts = [number * pipeline.columns % pipeline.vector for number in range(pipeline.period)]
    return jnp.stack(
        [
            one[start : start + pipeline.columns]
            for one, start in zip(of_period, starts, strict=True)
        ]
    )
