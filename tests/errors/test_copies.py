"""Copies between global and shared memory that no TMA instruction can do."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError

TILE = plgpu.SMEM((64, 64), jnp.float32)


@refused(
    InvalidValueError,
    r"""
    HERE: the window of src does not have the shape of dst
      got: src: (32, 64), dst: (64, 64)
      expected: src of shape (64, 64)
    """,
)
def test_shapes_that_differ():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 32)], tile, barrier)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: src and dst have different dtypes
      got: src: float32, dst: bfloat16
      expected: the same dtype
      try: convert in registers: read, astype, write
    """,
)
def test_dtypes_that_differ():
    @make(scratch_types=[plgpu.SMEM((128, 64), jnp.bfloat16), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: src is in SMEM
      got: Ref<smem>{float32[64,64]}
      expected: a reference to data in GMEM
    """,
)
def test_source_in_shared_memory():
    @make(scratch_types=[TILE, TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, other, barrier):
        plgpu.copy_gmem_to_smem(other, tile, barrier)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: dst is in GMEM
      got: Ref<gmem>{float32[128,64]}
      expected: a reference to data in SMEM
      try: allocate it as plgpu.SMEM (scratch_types, pl.run_scoped), and copy what is needed; \
    for a block of pallas_call, plgpu.BlockSpec(..., memory_space=plgpu.SMEM) does both
    """,
)
def test_destination_in_global_memory():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref, o_ref, barrier)  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: src is not a reference
      got: ShapedArray(float32[64,64])
      expected: a Ref of the kernel, or a view of one such as ref.at[...]
      try: pass the reference itself; ref[...] reads it
    """,
)
def test_array_instead_of_reference():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_smem_to_gmem(tile[...], o_ref.at[:64])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a TMA copy of 300 elements along one dimension exceeds 256 and cannot be split evenly
      expected: at most 256, or a multiple of a number up to that
      try: tile the shared memory, or use an extent with a divisor below 257
    """,
)
def test_box_too_large_in_bytes():
    @make(
        (1024, 64),
        scratch_types=[plgpu.SMEM((512, 300), jnp.int8), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("c",),
    )
    def kernel(x_ref, o_ref, tile, barrier):
        window = x_ref.at[:512, :300]
        plgpu.copy_gmem_to_smem(window, tile, barrier, collective_axes="c")  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(1024, 304, dtype=jnp.int8))


@refused(
    InvalidValueError,
    r"""
    HERE: the innermost dimension of a TMA copy has 6 elements of 16 bits
      expected: a multiple of 16 bytes
    """,
)
def test_multicast_of_unaligned_rows():
    @make(
        (64, 64),
        scratch_types=[plgpu.SMEM((64, 6), jnp.bfloat16), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("c",),
    )
    def kernel(x_ref, o_ref, tile, barrier):
        window = x_ref.at[:64, :6]
        plgpu.copy_gmem_to_smem(window, tile, barrier, collective_axes="c")  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(64, 64, dtype=jnp.bfloat16))


@refused(
    InvalidValueError,
    r"""
    HERE: the copy needs a tensor map of 6 dimensions (3, 3, 3, 3, 3, 32), but TMA has at most 5
      expected: at most 5 dimensions that the copy does not cover whole
      try: merge dimensions of the array, or tile fewer of them
    """,
)
def test_too_many_dimensions():
    @make((8, 64), scratch_types=[plgpu.SMEM((2, 2, 2, 2, 2, 16), jnp.float32), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        window = x_ref.at[:2, :2, :2, :2, :2, :16]
        plgpu.copy_gmem_to_smem(window, tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(3, 3, 3, 3, 3, 32))


@refused(
    InvalidValueError,
    r"""
    HERE: the slice of 12 elements from 4 of dimension 0 cuts through a tile of shape (64, 64), \
        which lies in memory as [(8:512 8:32), (2:256 32:1)] swizzle 128
      expected: start and size that are multiples of 8, or that stay within such a block in steps \
        of 1
    """,
)
def test_window_that_cuts_tiles():
    tiles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    @make(scratch_types=[plgpu.SMEM((64, 64), jnp.float32, transforms=tiles), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:12, :64], tile.at[pl.ds(4, 12)], barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the slice of 16 elements from 4 of dimension 0 cuts through a tile of shape (64, 64), \
        which lies in memory as [(8:512 8:32), (2:256 32:1)] swizzle 128
      got: a computed start, always 4 behind a multiple of 8
      expected: start and size that are multiples of 8, or that stay within such a block in steps \
        of 1
    """,
)
def test_computed_window_that_cuts_tiles():
    tiles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    @make(
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32, transforms=tiles), plgpu.Barrier()],
        grid=(3,),
        grid_names=("i",),
    )
    def kernel(x_ref, o_ref, tile, barrier):
        rows = pl.ds(4 + lax.axis_index("i") * 16, 16)
        plgpu.copy_gmem_to_smem(x_ref.at[:16, :64], tile.at[rows], barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: swizzle 128 does not fit rows of shape (8, 4, 8, 16) and dtype float32
      expected: a last dimension of 32 elements (128 bytes)
      try: put TilingTransform((8, 32)) before SwizzleTransform
    """,
)
def test_swizzle_that_does_not_fit_the_tile():
    tiles = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(128))
    plgpu.SMEM((64, 64), jnp.float32, transforms=tiles)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: there is no swizzle of 48 bytes
      expected: 32, 64 or 128
    """,
)
def test_swizzle_unknown():
    plgpu.SwizzleTransform(48)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: dimension of size 64 cannot be cut into tiles of 48
      got: shape (64, 64) with tiling (8, 48)
      expected: each of the last 2 dimensions a multiple of its tile
    """,
)
def test_tiling_that_does_not_divide():
    tiles = (plgpu.TilingTransform((8, 48)),)
    plgpu.SMEM((64, 64), jnp.float32, transforms=tiles)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: there is no axis named 'pair'
      expected: a cluster axis of the kernel
    """,
)
def test_collective_axis_unknown():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier, collective_axes="pair")  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: 'row' is not a cluster axis
      expected: a kernel with cluster= and cluster_names=
    """,
)
def test_collective_axis_of_the_grid():
    @make(grid=(2,), grid_names=("row",), scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier, collective_axes="row")  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a copy cannot be shared by 4 blocks: the extents in shared memory [1, 3, 64] (major to \
        minor) do not divide by it
      expected: extents of which the major ones are divisible by the number of blocks, without \
        splitting a swizzled row
    """,
)
def test_collective_slices_that_do_not_divide():
    @make(
        cluster=(4,),
        cluster_names=("pair",),
        scratch_types=[plgpu.SMEM((2, 3, 64), jnp.float32), plgpu.Barrier()],
    )
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier, collective_axes="pair")  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(2, 3, 64))


@refused(
    InvalidValueError,
    r"""
    HERE: TMA has no reduction 'add' for int8
      expected: no reduction
    """,
)
def test_reduction_of_an_unsupported_dtype():
    @make(dtype=jnp.int8, scratch_types=[plgpu.SMEM((128, 64), jnp.int8)])
    def kernel(x_ref, o_ref, tile):
        o_ref[...] = x_ref[...].astype(jnp.int8)
        plgpu.copy_smem_to_gmem(tile, o_ref, reduction_op="add")  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: TMA has no reduction 'and' for float32
      expected: one of add
    """,
)
def test_reduction_unsupported_for_floats():
    @make(scratch_types=[plgpu.SMEM((128, 64), jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        o_ref[...] = x_ref[...]
        plgpu.copy_smem_to_gmem(tile, o_ref, reduction_op="and")  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: reduction_op is unknown
      got: 'mul'
      expected: one of add, min, max, umin, umax, smin, smax, inc, dec, and, or, xor
    """,
)
def test_reduction_unknown():
    @make(scratch_types=[plgpu.SMEM((128, 64), jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_smem_to_gmem(tile, o_ref, reduction_op="mul")  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: predicate is not a boolean scalar
      got: bool[64]
      expected: a bool or a bool[] array
    """,
)
def test_predicate_that_is_an_array():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, barrier, predicate=x_ref[0] > 0)  # here

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: output 0 is accessed in more ways than the launcher can pass
      got: 1 pointers and 2 different TMA descriptors
      expected: a pointer and one descriptor, or two descriptors
      try: use one set of transforms for all copies to this output, with tiles that none of them \
        cuts: they share descriptors then
    """,
)
def test_output_that_needs_many_descriptors():
    @make(
        (256, 256),
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.SMEM((64, 32), jnp.float32, transforms=[plgpu.SwizzleTransform(128)]),
        ],
    )
    def kernel(x_ref, o_ref, tile, swizzled):
        plgpu.copy_smem_to_gmem(tile, o_ref.at[:64, :64])
        plgpu.copy_smem_to_gmem(swizzled, o_ref.at[:64, :32])  # here
        plgpu.wait_smem_to_gmem(0)
        o_ref[0, 0] = 0.0

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the window leaves a dimension of 128 elements
      got: 64 elements from 96, stride 1
      expected: a window inside the array
    """,
)
def test_static_window_of_a_copy_outside():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(96, 64)], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: src and dst have different dtypes
      got: src: float32, dst: bfloat16
      expected: the same dtype
      try: convert in registers: read, astype, write
    """,
)
def test_store_to_another_dtype():
    @make(dtype=jnp.bfloat16, scratch_types=[plgpu.SMEM((128, 64), jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_smem_to_gmem(tile, o_ref)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the window of src does not have the shape of dst
      got: src: (16, 64), dst: (64, 64)
      expected: src of shape (64, 64)
    """,
)
def test_gather_of_a_wrong_number_of_rows():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        rows = lax.broadcasted_iota(jnp.int32, (16,), 0)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, target="sm_100a")


@refused(
    UnsupportedError,
    r"""
    HERE: a copy that gathers rows, which sm_90a cannot do
      expected: a target whose TMA gathers (sm_100 and later), or indices that are scalars and \
        slices
    """,
)
def test_gather_on_a_target_without_it():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        rows = lax.broadcasted_iota(jnp.int32, (64,), 0)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, target="sm_90a")


@refused(
    InvalidValueError,
    r"""
    HERE: leader_tracked is given without collective_axes
      expected: the cluster axis over which the copy is partitioned
    """,
)
def test_copy_partition_without_cluster():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        partition = plgpu.CopyPartition.PARTITIONED(0)
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier, leader_tracked=partition)  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the innermost dimension of a TMA copy has 31 elements of 4 bits
      expected: a multiple of 16 bytes
    """,
)
def test_four_bit_integers_of_odd_count():
    @make(scratch_types=[plgpu.SMEM((4, 31), jnp.int4), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:, :31], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(4, 64, dtype=jnp.int4))


@refused(
    InvalidValueError,
    r"""
    HERE: the slice of 0 elements from 0 is outside dimension 0 of shape (64, 64)
    """,
)
def test_copy_of_nothing():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:0], tile.at[:0], barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: TMA cannot copy this window from every start along dimension 1: a part of the copy would \
    start 32 elements of 16 bits into the shared memory, which is not a multiple of 128 bytes
      got: any number
      expected: multiples of 16
      try: if a start always is one, say so where it is computed: pl.multiple_of(start, 16)
    """,
)
def test_columns_of_narrow_tiles_from_an_unknown_start():
    tiles = (plgpu.TilingTransform((2, 16)),)

    @make(
        (64, 32),
        jnp.bfloat16,
        scratch_types=[plgpu.SMEM((64, 32), jnp.bfloat16, transforms=tiles), plgpu.Barrier()],
        grid=(4,),
        grid_names=("i",),
    )
    def kernel(x_ref, o_ref, tile, barrier):
        columns = pl.ds(lax.axis_index("i"), 32)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 64), columns], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(64, 128, dtype=jnp.bfloat16))


@refused(
    InvalidValueError,
    r"""
    HERE: TMA cannot copy this window from every start along dimension 0: the copy would take 512 \
    TMA instructions, because the window is not dense in shared memory or its tiles do not divide \
    the array
      got: multiples of 4
      expected: multiples of 8
      try: if a start always is one, say so where it is computed: pl.multiple_of(start, 8)
    """,
)
def test_many_tiles_from_an_unknown_row():
    tiles = (plgpu.TilingTransform((8, 16)),)

    @make(
        (4096, 32),
        jnp.int8,
        scratch_types=[plgpu.SMEM((4096, 32), jnp.int8, transforms=tiles)],
        grid=(4,),
        grid_names=("i",),
    )
    def kernel(x_ref, o_ref, tile):
        rows = pl.ds(lax.axis_index("i") * 4, 4096)
        plgpu.copy_smem_to_gmem(tile, o_ref.at[rows])  # here

    build(kernel, array(64, 128, dtype=jnp.int8))


@refused(
    InvalidValueError,
    r"""
    HERE: TMA cannot copy this window from every start along dimension 1: a TMA copy of elements \
    of 4 bits begins or ends inside of a byte
      got: any number
      expected: multiples of 2
      try: if a start always is one, say so where it is computed: pl.multiple_of(start, 2)
    """,
)
def test_four_bit_integers_from_an_unknown_column():
    @make(
        scratch_types=[plgpu.SMEM((4, 32), jnp.int4), plgpu.Barrier()],
        grid=(4,),
        grid_names=("i",),
    )
    def kernel(x_ref, o_ref, tile, barrier):
        columns = pl.ds(lax.axis_index("i"), 32)
        plgpu.copy_gmem_to_smem(x_ref.at[:, columns], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(4, 64, dtype=jnp.int4))


@refused(
    InvalidValueError,
    r"""
    HERE: a TMA copy of elements of 4 bits begins or ends inside of a byte
      expected: starts and extents that are multiples of 2 along the contiguous dimension
    """,
)
def test_four_bit_integers_from_an_odd_column():
    @make(scratch_types=[plgpu.SMEM((4, 32), jnp.int4), plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(3, 32)], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(4, 64, dtype=jnp.int4))


@refused(
    InvalidValueError,
    r"""
    HERE: the copy begins 12 bytes behind a multiple of 16 bytes in the rows of the array
      expected: a start that is a multiple of 4 along the contiguous dimension
    """,
)
def test_column_inside_of_a_unit():
    @make(scratch_types=[TILE, plgpu.Barrier()])
    def kernel(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(3, 64)], tile, barrier)  # here
        plgpu.barrier_wait(barrier)

    build(kernel, array(64, 128))


@refused(
    InvalidValueError,
    r"""
    HERE: the copy begins 8 bytes behind a multiple of 16 bytes in the rows of the array
      expected: a start that is a multiple of 8 along the contiguous dimension
    """,
)
def test_computed_column_inside_of_a_unit():
    @make(
        (64, 128),
        jnp.bfloat16,
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16)],
        grid=(4,),
        grid_names=("i",),
    )
    def kernel(x_ref, o_ref, tile):
        columns = o_ref.at[:, pl.ds(lax.axis_index("i") * 16, 80)]
        plgpu.copy_smem_to_gmem(tile, columns.at[:, pl.ds(4, 64)])  # here

    build(kernel, array(64, 128, dtype=jnp.bfloat16))


@refused(
    InvalidValueError,
    r"""
    HERE: a store that begins before the array along dimension 0
      got: -8
      expected: a start of at least 0; what is written behind the array is dropped
    """,
)
def test_store_before_the_array():
    @make((64, 128), scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_smem_to_gmem(tile, o_ref.at[pl.ds(jnp.int32(-8), 64), :64])  # here

    build(kernel)
