"""Shared memory, asynchronous copies, barriers, clusters, unions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from catalog import block_kernel, case, random, wide
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.int64)


def swizzle_transforms(swizzle, dtype):
    """The transforms of a matrix tile with rows of ``swizzle`` bytes."""
    if swizzle == 16:
        return ()
    elements = swizzle // np.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))


@case(
    *[(s, d, b) for s in (16, 32, 64, 128) for d in DTYPES for b in (1, 2, 4) if b == 1 or s > 32]
)
def tiled_copy(swizzle, dtype, blocks):
    columns = max(swizzle, 128) // np.dtype(dtype).itemsize
    transforms = swizzle_transforms(swizzle, dtype)
    cluster = dict(cluster=(blocks,), cluster_names=("pair",)) if blocks > 1 else {}
    scratch = dict(
        scratch_types=[
            plgpu.SMEM((2, 64, columns), dtype, transforms=transforms),
            plgpu.SMEM((64, columns), dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=2),
        ]
    )
    shape = (512, 2 * columns)
    x = random("x", shape, dtype, -50, 50)
    x = np.round(wide(x)).astype(x.dtype)

    @block_kernel(shape, dtype, grid=(4, 2), grid_names=("row", "column"), **cluster, **scratch)
    def kernel(x_ref, o_ref, tiles, result, loaded):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        @pl.loop(0, 2)
        def _(step):
            window = (
                pl.ds(row * 128 + step * 64, 64),
                pl.ds(column * columns, columns),
            )
            plgpu.copy_gmem_to_smem(
                x_ref.at[window],
                tiles.at[step],
                loaded.at[step],
                collective_axes="pair" if blocks > 1 else None,
            )
            plgpu.barrier_wait(loaded.at[step])
            value = tiles[step]
            result[...] = value + value
            plgpu.commit_smem()

            @pl.when(blocks == 1 or lax.axis_index("pair") == step % blocks)
            def _():
                plgpu.copy_smem_to_gmem(result, o_ref.at[window])
                plgpu.wait_smem_to_gmem(0)

    return kernel, (x,), lambda x: x + x


@case((100, 72), (130, 64), (64, 200))
def copies_beyond_the_array(*shape):
    x = random("x", shape, jnp.float32)
    rows, columns = (-(-n // 64) for n in shape)

    @block_kernel(
        shape,
        jnp.float32,
        grid=(rows, columns),
        grid_names=("row", "column"),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
    )
    def kernel(x_ref, o_ref, tile, loaded):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        def window(ref):
            return ref.at[pl.ds(row * 64, 64), pl.ds(column * 64, 64)]

        plgpu.copy_gmem_to_smem(window(x_ref), tile, loaded)
        plgpu.barrier_wait(loaded)
        tile[...] = tile[...] + 1.0
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, window(o_ref))
        plgpu.wait_smem_to_gmem(0)

    return kernel, (x,), lambda x: x + 1


@case(("add", jnp.float32), ("add", jnp.int32), ("min", jnp.bfloat16), ("max", jnp.float16),
      ("smax", jnp.int32), ("umin", jnp.uint32), ("or", jnp.int32), ("xor", jnp.int32))  # fmt: skip
def reducing_store(operation, dtype):
    x = random("x", (4, 64, 64), dtype, 0 if dtype == jnp.uint32 else -8, 8)
    x = np.round(wide(x)).astype(x.dtype)
    references = dict(
        add=np.add, min=np.minimum, max=np.maximum, smax=np.maximum, umin=np.minimum,
        xor=np.bitwise_xor,
    )  # fmt: skip
    references["or"] = np.bitwise_or

    @block_kernel(
        (64, 64),
        dtype,
        scratch_types=[plgpu.SMEM((64, 64), dtype)],
    )
    def kernel(x_ref, o_ref, tile):
        for block in range(4):
            tile[...] = x_ref[block]
            plgpu.commit_smem()
            if block == 0:
                plgpu.copy_smem_to_gmem(tile, o_ref)
            else:
                plgpu.copy_smem_to_gmem(tile, o_ref, reduction_op=operation)
            plgpu.wait_smem_to_gmem(0)

    return kernel, (x,), lambda x: references[operation].reduce(wide(x), axis=0).astype(x.dtype)


@case()
def predicated_copies():
    x = random("x", (8, 64), jnp.float32)

    @block_kernel(
        (8, 64),
        jnp.float32,
        grid=(8,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((64,), jnp.float32), plgpu.Barrier()],
    )
    def kernel(x_ref, o_ref, line, loaded):
        row = lax.axis_index("row")
        even = lax.rem(row, 2) == 0
        line[...] = jnp.full((64,), -1.0, jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x_ref.at[row], line, loaded, predicate=even)
        plgpu.barrier_wait(loaded)
        plgpu.async_prefetch(x_ref.at[row])
        plgpu.copy_smem_to_gmem(line, o_ref.at[row], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(0)

    def reference(x):
        result = np.full_like(x, -1.0)
        result[::2] = x[::2]
        return result

    return kernel, (x,), reference


@case(2, 4)
def threads_exchange_through_shared_memory(threads):
    x = random("x", (threads, 256), jnp.float32)

    @block_kernel(
        (threads, 256),
        jnp.float32,
        num_threads=threads,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM((threads, 256), jnp.float32),
            plgpu.Barrier(num_arrivals=threads),
        ],
    )
    def kernel(x_ref, o_ref, lines, written):
        thread = lax.axis_index("thread")
        lines[thread] = x_ref[thread] * 2
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)
        o_ref[thread] = lines[lax.rem(thread + 1, threads)]

    return kernel, (x,), lambda x: np.roll(x * 2, -1, axis=0)


@case(2, 4)
def concurrent_reductions_of_threads(threads):
    x = random("x", (threads, 512), jnp.int32)

    @block_kernel((threads, 512), jnp.int32, num_threads=threads, thread_name="thread")
    def kernel(x_ref, o_ref):
        thread = lax.axis_index("thread")
        x = x_ref[thread]
        for _ in range(4):
            x = x + jnp.sum(x) - jnp.max(x)
        o_ref[thread] = x

    def reference(x):
        x = x.astype(np.int32)
        with np.errstate(over="ignore"):
            for _ in range(4):
                x = x + x.sum(1, keepdims=True, dtype=np.int32) - x.max(1, keepdims=True)
        return x

    return kernel, (x,), reference


@case(2, 4)
def cluster_barrier_orders_slot_reuse(blocks):
    steps = 6
    x = random("x", (steps, 64, 64), jnp.float32)

    @block_kernel(
        (blocks, steps, 64, 64),
        jnp.float32,
        cluster=(blocks,),
        cluster_names=("block",),
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("block",)),
        ],
    )
    def kernel(x_ref, o_ref, tile, loaded, consumed):
        block = lax.axis_index("block")

        @pl.loop(0, steps)
        def _(step):
            plgpu.copy_gmem_to_smem(x_ref.at[step], tile, loaded, collective_axes="block")
            plgpu.barrier_wait(loaded)
            o_ref[block, step] = tile[...] + 1
            plgpu.barrier_arrive(consumed)
            plgpu.barrier_wait(consumed)

    return kernel, (x,), lambda x: np.broadcast_to(x + 1, (blocks, *x.shape))


@case()
def union_of_buffers():
    x = random("x", (64, 64), jnp.float32)

    @block_kernel(
        (64, 64),
        jnp.float32,
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM((64, 64), jnp.float32),
                (plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.SMEM((64, 64), jnp.int8)),
            )
        ],
    )
    def kernel(x_ref, o_ref, union):
        wide_ref, (half_ref, byte_ref) = union
        wide_ref[...] = x_ref[...]
        x = wide_ref[...]
        half_ref[...] = x.astype(jnp.bfloat16)
        byte_ref[...] = jnp.sign(x).astype(jnp.int8)
        o_ref[...] = half_ref[...].astype(jnp.float32) + byte_ref[...].astype(jnp.float32)

    def reference(x):
        half = x.astype(jnp.bfloat16).astype(np.float32)
        return half + np.sign(x)

    return kernel, (x,), reference


@case(jnp.float32, jnp.bfloat16, jnp.int8)
def transposed_through_shared_memory(dtype):
    x = random("x", (128, 256), dtype)

    @block_kernel(
        (256, 128),
        dtype,
        grid=(2, 4),
        grid_names=("row", "column"),
        scratch_types=[plgpu.SMEM((64, 64), dtype)],
    )
    def kernel(x_ref, o_ref, tile):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        tile[...] = x_ref[pl.ds(row * 64, 64), pl.ds(column * 64, 64)]
        o_ref[pl.ds(column * 64, 64), pl.ds(row * 64, 64)] = plgpu.load(
            tile.transpose((1, 0)), (), optimized=False
        )

    return kernel, (x,), lambda x: x.T


@case()
def views_of_shared_memory():
    x = random("x", (32, 128), jnp.int32)

    @block_kernel((3, 16, 64), jnp.int32, scratch_types=[plgpu.SMEM((32, 128), jnp.int32)])
    def kernel(x_ref, o_ref, buffer):
        buffer[...] = x_ref[...]
        o_ref[0] = buffer[pl.ds(8, 16), pl.ds(64, 64)]
        o_ref[1] = buffer.reshape(64, 64)[pl.ds(16, 16), :]
        buffer[pl.ds(0, 16), pl.ds(0, 64)] = o_ref[0] * 2
        o_ref[2] = buffer[pl.ds(0, 16), pl.ds(0, 64)] + buffer[3, 5]

    def reference(x):
        first = x[8:24, 64:]
        second = x.reshape(64, 64)[16:32]
        y = x.copy()
        y[:16, :64] = first * 2
        return np.stack([first, second, y[:16, :64] + y[3, 5]])

    return kernel, (x,), reference


@case(32, 64, 128)
def indexed_rows_of_a_swizzled_tile(swizzle):
    columns = swizzle // 2
    x = random("x", (64, columns), jnp.bfloat16)

    @block_kernel(
        (64, columns),
        jnp.bfloat16,
        scratch_types=[
            plgpu.SMEM(
                (64, columns), jnp.bfloat16, transforms=swizzle_transforms(swizzle, jnp.bfloat16)
            ),
            plgpu.Barrier(),
        ],
    )
    def kernel(x_ref, o_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        o_ref[pl.ds(0, 32)] = tile[pl.ds(32, 32)]

        @pl.loop(0, 4)
        def _(step):
            o_ref[pl.ds(32 + step * 8, 8)] = tile[pl.ds(step * 8, 8)]

    return kernel, (x,), lambda x: np.concatenate([x[32:], x[:32]])


@case((5,), (2, 3), (2, 3, 4), (2, 3, 2, 2), (2, 2, 3, 2, 2))
def program_ids(*grid):
    size = int(np.prod(grid))
    names = tuple(f"axis{i}" for i in range(len(grid)))

    @block_kernel((size, 2, 128), jnp.int32, grid=grid, grid_names=names)
    def kernel(o_ref):
        by_name, by_number = jnp.int32(0), jnp.int32(0)
        for axis, (name, extent) in enumerate(zip(names, grid, strict=True)):
            by_name = by_name * extent + lax.axis_index(name)
            by_number = by_number * pl.num_programs(axis) + pl.program_id(axis)
        o_ref[by_name, 0] = jnp.full((128,), by_name)
        o_ref[by_name, 1] = jnp.full((128,), by_number)

    return kernel, (), lambda: np.broadcast_to(np.arange(size)[:, None, None], (size, 2, 128))


@case((2,), (1, 2), (2, 1, 2))
def cluster_ids(*cluster):
    names = tuple(f"c{i}" for i in range(len(cluster)))
    size = int(np.prod(cluster))

    @block_kernel(
        (3, 4, size, 128),
        jnp.int32,
        grid=(3, 4),
        grid_names=("row", "column"),
        cluster=cluster,
        cluster_names=names,
    )
    def kernel(o_ref):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        rank = lax.axis_index(names)
        o_ref[row, column, rank] = jnp.full((128,), (pl.program_id(0) * 4 + column) * size + rank)

    return (
        kernel,
        (),
        lambda: np.broadcast_to(np.arange(12 * size).reshape(3, 4, size, 1), (3, 4, size, 128)),
    )


@case((64, 64), (8, 1024), (128,), (1024,))
def copies_by_the_lanes(*shape):
    x = random("x", (2, *shape), jnp.float32)

    @block_kernel(
        (2, *shape),
        jnp.float32,
        grid=(2,),
        grid_names=("half",),
        scratch_types=[plgpu.SMEM(shape, jnp.float32)],
    )
    def kernel(x_ref, o_ref, buffer):
        half = lax.axis_index("half")
        plgpu.copy_gmem_to_smem(x_ref.at[half], buffer)
        plgpu.wait_gmem_to_smem(0)
        o_ref[half] = buffer[...] * 2

    return kernel, (x,), lambda x: x * 2


@case(32, 64, 128)
def swizzled_copies_by_the_lanes(swizzle):
    columns = swizzle // 2
    x = random("x", (64, columns), jnp.bfloat16)
    transforms = swizzle_transforms(swizzle, jnp.bfloat16)

    @block_kernel(
        (64, columns),
        jnp.bfloat16,
        scratch_types=[plgpu.SMEM((64, columns), jnp.bfloat16, transforms=transforms)],
    )
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_gmem_to_smem(x_ref, tile)
        plgpu.wait_gmem_to_smem(0)
        o_ref[...] = -tile[...]

    return kernel, (x,), lambda x: -x
