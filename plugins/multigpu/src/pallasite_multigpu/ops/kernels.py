"""The kernels: arrays of two dimensions, whose rows each device has a part of.

What is read from peers is there when a kernel begins: the barrier between devices sees to that.
What is written to peers, or has been read there, is announced by semaphores: a block does on each
device the same tiles, so that it is enough to wait for the same block of the other devices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_multigpu.ops.tiles import BLOCKS, Tiles

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
"""By name of a reduction, what combines two arrays."""


def _peer(ref: Any, axis: Hashable, rank: Any) -> Any:
    """The array of the device at an index along an axis, whose other coordinates are this one's."""
    return plgpu.remote_ref(ref, {axis: rank})


def _after(own: Any, offset: int, count: int) -> Any:
    return lax.rem(own + offset, np.int32(count))


def _sum_up(parts: list[Any], reduction: str, dtype: Any, accumulate: Any) -> Any:
    """The reduction of tiles in their order, in the type of accumulation."""
    wide = [part.astype(accumulate) for part in parts]
    return functools.reduce(COMBINE[reduction], wide).astype(dtype)


def accumulation_type(dtype: Any, reduction: str) -> Any:
    """In which type elements are added: float32 for narrower floating-point types."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow and reduction == "add" else jnp.dtype(dtype)


def _of_all(x: jax.Array, axis: Hashable) -> jax.ShapeDtypeStruct:
    """The type of a result as ``x``, which is the same on all devices along an axis."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    others = jax.typeof(x).manual_axis_type.varying - frozenset(axes)
    kind = jax.sharding.ManualAxisType(varying=others)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind)


def _kernel(
    body: Callable[..., None], out_type: Any, blocks: int, name: str, **options: Any
) -> Callable[..., jax.Array]:
    made: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=(BLOCKS,),
        kernel_name=name,
        **options,
    )
    return made


def _reading(
    body: Callable[..., None], axis: Hashable, count: int, out_type: Any, blocks: int, name: str
) -> Callable[..., jax.Array]:
    """A kernel whose blocks read of other devices what the same blocks there read of this one.

    They announce that they have done so, in place of a barrier of all blocks at the end.
    """

    def whole(x_ref: Any, y_ref: Any, done: Any) -> None:
        body(x_ref, y_ref)
        announce(done, axis, lax.axis_index(axis), count)

    return _kernel(
        whole,
        out_type,
        blocks,
        name,
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(exit_barrier=False),
    )


def gather_by_reading(x: jax.Array, axis: Hashable, count: int, tiles: Tiles) -> jax.Array:
    """(rows, columns) of each device to (rows, count, columns): each reads what the others have."""

    def body(x_ref: Any, y_ref: Any) -> None:
        own = lax.axis_index(axis)

        def move(rows: Any, columns: Any) -> None:
            # The other tiles are on their way while this one arrives.
            found = [
                _peer(x_ref, axis, _after(own, offset, count))[rows, columns]
                for offset in range(1, count)
            ]
            y_ref[rows, own, columns] = x_ref[rows, columns]
            for offset, part in enumerate(found, 1):
                y_ref[rows, _after(own, offset, count), columns] = part

        tiles.each(move)

    out_type = jax.ShapeDtypeStruct((tiles.rows, count, tiles.columns), x.dtype)
    return _reading(body, axis, count, out_type, tiles.blocks, "all_gather")(x)


def gather_by_writing(x: jax.Array, axis: Hashable, count: int, tiles: Tiles) -> jax.Array:
    """As :func:`gather_by_reading`, by stores to all devices."""

    def body(x_ref: Any, y_ref: Any, arrived: Any) -> None:
        own = lax.axis_index(axis)

        def move(rows: Any, columns: Any) -> None:
            tile = x_ref[rows, columns]
            y_ref[rows, own, columns] = tile
            for offset in range(1, count):
                _peer(y_ref, axis, _after(own, offset, count))[rows, own, columns] = tile

        tiles.each(move)
        announce(arrived, axis, own, count)

    out_type = jax.ShapeDtypeStruct((tiles.rows, count, tiles.columns), x.dtype)
    scratch = [plgpu.SemaphoreType.REGULAR]
    return _kernel(body, out_type, tiles.blocks, "all_gather", scratch_types=scratch)(x)


STAGES = 4
"""Tiles in shared memory at a time, of kernels that copy in bulk."""


def gather_in_bulk(x: jax.Array, axis: Hashable, count: int, tile: int, blocks: int) -> jax.Array:
    """(columns,) of each device to (count, columns): each copies what it has to all, by way of
    shared memory.

    Args:
      x: whose bytes ``tile`` divides into whole tiles.
      axis: of the mesh.
      count: devices along it.
      tile: elements of a tile, a multiple of 16 bytes.
      blocks: that share the tiles.
    """
    (columns,) = x.shape
    tiles = columns // tile

    def body(x_ref: Any, y_ref: Any, buffers: Any, filled: Any, arrived: Any) -> None:
        own, block = lax.axis_index(axis), lax.axis_index(BLOCKS)
        steps = lax.div(tiles - block + blocks - 1, np.int32(blocks))

        def place(step: Any) -> Any:
            return pl.ds((block + step * blocks) * tile, tile)

        def fetch(step: Any) -> None:
            @pl.when(step < steps)  # type: ignore[untyped-decorator]
            def _() -> None:
                stage = lax.rem(step, np.int32(STAGES))
                plgpu.copy_gmem_to_smem(x_ref.at[place(step)], buffers.at[stage], filled.at[stage])

        for stage in range(STAGES - 1):
            fetch(stage)

        def move(step: Any, _: Any) -> None:
            stage = lax.rem(step, np.int32(STAGES))
            plgpu.barrier_wait(filled.at[stage])
            for offset in range(1, count):
                there = _peer(y_ref, axis, _after(own, offset, count))
                plgpu.copy_smem_to_gmem(
                    buffers.at[stage], there.at[own, place(step)], commit_group=False
                )
            plgpu.copy_smem_to_gmem(buffers.at[stage], y_ref.at[own, place(step)])
            # The copies of the step before have read the place of the next tile.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            fetch(step + STAGES - 1)

        lax.fori_loop(np.int32(0), steps, move, None)
        plgpu.wait_smem_to_gmem(0)
        announce(arrived, axis, own, count)

    scratch = [
        plgpu.SMEM((STAGES, tile), x.dtype),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.SemaphoreType.REGULAR,
    ]
    out_type = jax.ShapeDtypeStruct((count, columns), x.dtype)
    return _kernel(body, out_type, blocks, "all_gather", scratch_types=scratch)(x)


def announce(arrived: Any, axis: Hashable, own: Any, count: int) -> None:
    """Tells the same block of each other device that this one has written or read there, and waits
    until they have done so here. Each block has a semaphore of its own, which no other wait uses:
    that nothing is subtracted from it saves a round trip to memory."""
    for offset in range(1, count):
        pl.semaphore_signal(arrived, 1, device_id={axis: _after(own, offset, count)})
    pl.semaphore_wait(arrived, count - 1, decrement=False)


def scatter_by_reading(
    x: jax.Array, axis: Hashable, count: int, reduction: str, tiles: Tiles
) -> jax.Array:
    """(rows, count, columns) of each device to (rows, columns): the own part of the reduction."""
    accumulate = accumulation_type(x.dtype, reduction)

    def body(x_ref: Any, y_ref: Any) -> None:
        own = lax.axis_index(axis)

        def reduce(rows: Any, columns: Any) -> None:
            parts = [_peer(x_ref, axis, rank)[rows, own, columns] for rank in range(count)]
            y_ref[rows, columns] = _sum_up(parts, reduction, x.dtype, accumulate)

        tiles.each(reduce)

    out_type = jax.ShapeDtypeStruct((tiles.rows, tiles.columns), x.dtype)
    return _reading(body, axis, count, out_type, tiles.blocks, "reduce_scatter")(x)


def reduce_in_one_step(
    x: jax.Array, axis: Hashable, count: int, reduction: str, tiles: Tiles
) -> jax.Array:
    """The reduction of arrays (rows, columns) of all devices, on each: each reads all of them."""
    accumulate = accumulation_type(x.dtype, reduction)

    def body(x_ref: Any, y_ref: Any) -> None:
        def reduce(rows: Any, columns: Any) -> None:
            parts = [_peer(x_ref, axis, rank)[rows, columns] for rank in range(count)]
            y_ref[rows, columns] = _sum_up(parts, reduction, x.dtype, accumulate)

        tiles.each(reduce)

    out_type = _of_all(x, axis)
    return _reading(body, axis, count, out_type, tiles.blocks, "all_reduce")(x)


def reduce_in_two_steps(
    x: jax.Array, axis: Hashable, count: int, reduction: str, tiles: Tiles
) -> jax.Array:
    """As :func:`reduce_in_one_step`, of (elements,): each device reduces its own part, and writes
    it to all.

    The result takes the place of the operand: nobody else reads or writes a device's part. So there
    is no copy in a loop whose next step begins with it.

    Args:
      x: the elements.
      axis: of the mesh.
      count: devices along it.
      reduction: by its name.
      tiles: of the one row that is a device's part; behind all parts, some elements may be left.
    """
    accumulate = accumulation_type(x.dtype, reduction)
    part = tiles.columns

    def body(x_ref: Any, y_ref: Any, arrived: Any) -> None:
        own = lax.axis_index(axis)
        reduce = functools.partial(
            _reduce_for_all, x_ref, y_ref, axis, count, reduction, accumulate
        )
        tiles.each(lambda _, at: reduce(pl.ds(own * part + at.start, at.size)))
        _each_rest(x.size, part * count, tiles.columns_of_tile, own, count, tiles.blocks, reduce)
        announce(arrived, axis, own, count)

    out_type = _of_all(x, axis)
    scratch = [plgpu.SemaphoreType.REGULAR]
    # What is announced has been read before: nobody ends while another device reads.
    options: dict[str, Any] = {"compiler_params": plgpu.CompilerParams(exit_barrier=False)}
    options |= {"scratch_types": scratch, "input_output_aliases": {0: 0}}
    return _kernel(body, out_type, tiles.blocks, "all_reduce", **options)(x)


def _reduce_for_all(
    x_ref: Any,
    y_ref: Any,
    axis: Hashable,
    count: int,
    reduction: str,
    accumulate: Any,
    at: Any,
) -> None:
    """Reduces some elements of all devices, and writes the result to all."""
    own = lax.axis_index(axis)
    parts = [_peer(x_ref, axis, rank)[at] for rank in range(count)]
    made = _sum_up(parts, reduction, x_ref.dtype, accumulate)
    y_ref[at] = made
    for offset in range(1, count):
        _peer(y_ref, axis, _after(own, offset, count))[at] = made


def _each_rest(
    size: int,
    begin: int,
    tile: int,
    own: Any,
    count: int,
    blocks: int,
    use: Callable[[Any], None],
) -> None:
    """Calls ``use`` for the tiles of what is left behind the parts of all devices, each on one
    block of one device.

    Args:
      size: of the array.
      begin: where the parts end.
      tile: elements of a tile, at most.
      own: number of this device.
      count: devices.
      blocks: of the kernel.
      use: gets a slice.
    """
    for number, first in enumerate(range(begin, size, tile)):
        device, block = number % count, number // count % blocks

        @pl.when((own == device) & (lax.axis_index(BLOCKS) == block))  # type: ignore[untyped-decorator]
        def _(first: int = first) -> None:
            use(pl.ds(first, min(tile, size - first)))


def reduce_by_multicast(
    x: jax.Array, axis: Hashable, count: int, reduction: str, tiles: Tiles
) -> jax.Array:
    """As :func:`reduce_in_two_steps`, of (rows, count, columns), where the switch between the GPUs
    reduces and distributes.

    It reduces as its hardware does, in no certain order; all devices get the same bits.
    """

    def body(x_ref: Any, y_ref: Any, arrived: Any) -> None:
        own = lax.axis_index(axis)

        def reduce(rows: Any, columns: Any) -> None:
            made = plgpu.multimem_load_reduce(
                x_ref.at[rows, own, columns], collective_axes=axis, reduction_op=reduction
            )
            plgpu.multimem_store(made, y_ref.at[rows, own, columns], axis)

        tiles.each(reduce)
        announce(arrived, axis, own, count)

    out_type = _of_all(x, axis)
    scratch = [plgpu.SemaphoreType.REGULAR]
    return _kernel(body, out_type, tiles.blocks, "all_reduce", scratch_types=scratch)(x)


PIECE = 64 << 10
"""Bytes that a block writes to another device, about, before it says so."""


def reduce_by_writing(
    x: jax.Array, axis: Hashable, count: int, reduction: str, tile: int, blocks: int
) -> jax.Array:
    """The reduction of arrays (elements,) of all devices, on each.

    One warpgroup of each block writes its pieces of the others' parts to them; the other one waits
    for the pieces of this device's part, reduces them, and writes the result to all. So both
    directions of a link are busy from the beginning to the end, with stores only.

    The result takes the place of the operand, as in :func:`reduce_in_two_steps`: a device writes a
    piece of the result to another one after that has sent its own elements of the piece.

    A device's part are whole tiles. What is left behind them is reduced as in two steps.

    Args:
      x: at least a tile for each device.
      axis: of the mesh.
      count: devices along it.
      reduction: by its name.
      tile: elements that a warpgroup moves at once.
      blocks: of the kernel, at most.
    """
    number = x.size // (count * tile)
    columns = number * tile
    blocks = max(1, min(blocks, number))
    turns = max(1, columns * x.dtype.itemsize // (blocks * PIECE))
    length = -(-number // (blocks * turns))
    pieces = -(-number // length)
    accumulate = accumulation_type(x.dtype, reduction)
    # In the order of the devices, which does not matter to two of them.
    others = range(0 if count > 2 else 1, count)

    def body(x_ref: Any, y_ref: Any, parts_ref: Any, arrived: Any, finished: Any) -> None:
        own, block = lax.axis_index(axis), lax.axis_index(BLOCKS)

        def each(begin: Callable[[], None], move: Callable[[Any], None], end: Any) -> None:
            def piece(step: Any, _: Any) -> None:
                first = (block + step * blocks) * length
                begin()
                lax.fori_loop(
                    first,
                    lax.min(first + length, np.int32(number)),
                    lambda index, _: move(pl.ds(index * tile, tile)),
                    None,
                )
                end()

            steps = lax.div(pieces - block + blocks - 1, np.int32(blocks))
            lax.fori_loop(np.int32(0), steps, piece, None)

        def send() -> None:
            def move(at: Any) -> None:
                for offset in others:
                    peer = _after(own, offset, count)
                    there = _peer(parts_ref, axis, peer)
                    there[own, at] = x_ref[pl.ds(peer * columns + at.start, at.size)]

            def tell() -> None:
                for offset in others:
                    there = {axis: _after(own, offset, count)}
                    pl.semaphore_signal(arrived.at[own], 1, device_id=there)

            each(lambda: None, move, tell)

        def reduce() -> None:
            def wait() -> None:
                for offset in others:
                    pl.semaphore_wait(arrived.at[_after(own, offset, count)])

            def move(at: Any) -> None:
                place = pl.ds(own * columns + at.start, at.size)
                if count > 2:
                    found = [parts_ref[rank, at] for rank in range(count)]
                else:
                    found = [x_ref[place], parts_ref[_after(own, 1, count), at]]
                made = _sum_up(found, reduction, x.dtype, accumulate)
                y_ref[place] = made
                for offset in range(1, count):
                    _peer(y_ref, axis, _after(own, offset, count))[place] = made

            each(wait, move, lambda: None)
            rest = functools.partial(
                _reduce_for_all, x_ref, y_ref, axis, count, reduction, accumulate
            )
            _each_rest(x.size, columns * count, tile, own, count, blocks, rest)
            announce(finished, axis, own, count)

        lax.cond(lax.axis_index("warpgroup") == 0, send, reduce)

    parts = jax.ShapeDtypeStruct((count, columns), x.dtype)
    kernel = _kernel(
        body,
        [_of_all(x, axis), parts],
        blocks,
        "all_reduce",
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SemaphoreType.REGULAR((count,)), plgpu.SemaphoreType.REGULAR],
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(
            exit_barrier=False,  # What is announced has been read before.
            plugin_options={"standard": {"partial_outputs": True}},  # The parts of two devices.
        ),
    )
    return kernel(x)[0]


def exchange_by_reading(x: jax.Array, axis: Hashable, count: int, tiles: Tiles) -> jax.Array:
    """(count, rows, columns) of each device: part ``i`` comes from device ``i``, which has it at
    the place of this device."""

    def body(x_ref: Any, y_ref: Any) -> None:
        own = lax.axis_index(axis)

        def move(rows: Any, columns: Any) -> None:
            found = [
                _peer(x_ref, axis, _after(own, offset, count))[own, rows, columns]
                for offset in range(count)
            ]
            for offset, part in enumerate(found):
                y_ref[_after(own, offset, count), rows, columns] = part

        tiles.each(move)

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _reading(body, axis, count, out_type, tiles.blocks, "all_to_all")(x)
