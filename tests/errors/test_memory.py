"""Too much memory, the wrong memory, indices and windows that do not fit."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, ResourceError, UnsupportedError

TILE = plgpu.SMEM((128, 64), jnp.float32)


@refused(
    ResourceError,
    r"""
    HERE: kernel kernel exceeds available shared memory: smem_bytes=262176
          131,072 bytes  stages: float32[4, 128, 64]        HERE
          131,072 bytes  result: bfloat16[2, 256, 128]      HERE
      expected: at most 232448 bytes per block on sm_90a
      try: smaller blocks, fewer pipeline stages (max_concurrent_steps), or plgpu.RefUnion for \
        buffers that are not live at the same time
    """,
)
def test_too_much_shared_memory():
    @make(  # here
        scratch_types=[
            plgpu.SMEM((4, 128, 64), jnp.float32),
            plgpu.SMEM((2, 256, 128), jnp.bfloat16),
            plgpu.Barrier(num_barriers=4),
        ]
    )
    def kernel(x_ref, o_ref, stages, result, barriers):
        o_ref[...] = stages[0]

    build(kernel)


@refused(
    ResourceError,
    r"""
    HEREscope: kernel kernel exceeds available shared memory: smem_bytes=262144
          131,072 bytes  more: float32[4, 128, 64]          HEREscope
          131,072 bytes  stages: float32[4, 128, 64]        HEREscratch
      expected: at most 232448 bytes per block on sm_90a
      try: smaller blocks, fewer pipeline stages (max_concurrent_steps), or plgpu.RefUnion for \
        buffers that are not live at the same time
    """,
)
def test_too_much_shared_memory_in_a_scope():
    @make(scratch_types=[plgpu.SMEM((4, 128, 64), jnp.float32)])  # here scratch
    def kernel(x_ref, o_ref, stages):
        def body(more):
            more[...] = stages[...]

        pl.run_scoped(body, plgpu.SMEM((4, 128, 64), jnp.float32))  # here scope

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: an allocation without elements
      got: SMEM((0, 64), float32)
      expected: extents of at least 1
    """,
)
def test_shared_memory_of_nothing():
    plgpu.SMEM((0, 64), jnp.float32)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: shape[0] is too small
      got: -1
      expected: an integer >= 0
    """,
)
def test_shared_memory_of_negative_size():
    plgpu.SMEM((-1, 64), jnp.float32)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: the dtype of an allocation is unknown
      got: 'float99'
      expected: jnp.float32, say
    """,
)
def test_shared_memory_of_unknown_dtype():
    plgpu.SMEM((64,), "float99")  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: arrays of dtype complex64 have no representation on the GPU
      expected: bool, an integer of 2 to 64 bits, or a float of 8, 16, 32 or 64 bits
    """,
)
def test_shared_memory_of_complex_numbers():
    @make(scratch_types=[plgpu.SMEM((64,), jnp.complex64)])
    def kernel(x_ref, o_ref, tile):
        tile[...] = jnp.zeros((64,), jnp.complex64)  # here

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: an allocation in regs
      got: float32[64]
      expected: plgpu.SMEM, plgpu.Barrier, plgpu.ClusterBarrier or a semaphore
      try: a value is in registers anyway; global memory to work in is a further output
    """,
)
def test_allocation_in_registers():
    @make(scratch_types=[plgpu.REGS((64,), jnp.float32)])  # here
    def kernel(x_ref, o_ref, tile):
        o_ref[0] = tile[...]

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: an allocation in gmem
      got: float32[64]
      expected: plgpu.SMEM, plgpu.Barrier, plgpu.ClusterBarrier or a semaphore
      try: a value is in registers anyway; global memory to work in is a further output
    """,
)
def test_allocation_in_global_memory():
    @make(scratch_types=[plgpu.GMEM((64,), jnp.float32)])  # here
    def kernel(x_ref, o_ref, tile):
        o_ref[0] = tile[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the members of a RefUnion must all be in shared memory
      got: gmem
      expected: allocations described by SMEM(shape, dtype)
    """,
)
def test_union_of_global_memory():
    plgpu.RefUnion(plgpu.GMEM((64,), jnp.float32))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the members of a RefUnion must all be in shared memory
      got: no members
      expected: allocations described by SMEM(shape, dtype)
    """,
)
def test_union_of_nothing():
    plgpu.RefUnion()  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: member 0 of a RefUnion is not memory
      got: Barrier(num_arrivals=1, num_barriers=(), orders_tensor_core=False)
      expected: an allocation such as SMEM(shape, dtype), or a tuple of them
    """,
)
def test_union_of_barriers():
    plgpu.RefUnion(plgpu.Barrier())  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: member 0 of a RefUnion is not memory
      got: ()
      expected: an allocation such as SMEM(shape, dtype), or a tuple of them
    """,
)
def test_union_of_an_empty_group():
    plgpu.RefUnion((), TILE)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: a RefUnion is indexed by the number of the member
      got: Ellipsis
      expected: a Python integer
    """,
)
def test_union_read_as_a_whole():
    @make(scratch_types=[plgpu.RefUnion(TILE, plgpu.SMEM((64,), jnp.int32))])
    def kernel(x_ref, o_ref, union):
        o_ref[...] = union[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a RefUnion can't be assigned to as a whole
      try: write one of its members
    """,
)
def test_union_written_as_a_whole():
    @make(scratch_types=[plgpu.RefUnion(TILE, plgpu.SMEM((64,), jnp.int32))])
    def kernel(x_ref, o_ref, union):
        union[...] = x_ref[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a RefUnion of 2 members has no member 2
      expected: an index from 0 to 1
    """,
)
def test_union_member_beyond():
    @make(scratch_types=[plgpu.RefUnion(TILE, plgpu.SMEM((64,), jnp.int32))])
    def kernel(x_ref, o_ref, union):
        o_ref[...] = union[2][...]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a RefUnion is indexed by the number of the member
      got: JitTracer(int32[])
      expected: a Python integer
    """,
)
def test_union_indexed_by_a_traced_number():
    @make(grid=(2,), grid_names=("row",), scratch_types=[plgpu.RefUnion(TILE, TILE)])
    def kernel(x_ref, o_ref, union):
        o_ref[...] = union[lax.axis_index("row")][...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: 'pair' is not a cluster axis
      expected: a kernel with cluster= and cluster_names=
    """,
)
def test_block_of_an_unknown_axis():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.cluster_ref(tile, {"pair": 1})[...] = x_ref[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the window leaves a dimension of 128 elements
      got: 64 elements from 96, stride 1
      expected: a window inside the array
    """,
)
def test_window_outside():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 64)] = x_ref[pl.ds(96, 64)]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: this access leaves the array: dimension 0 has 128 elements
      got: index 128 of an array of shape (128, 64)
      expected: indices from 0 to 127
      try: fewer blocks or iterations, pl.when around the access, or a mask
    """,
)
def test_index_outside():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[128]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: `indices` must not be longer than `shape`: indices=(0, 0, 0), shape=(128, 64)
    """,
)
def test_too_many_indices():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[0, 0, 0]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: primitive get indexes a reference by a float32
      expected: an integer, or a slice that starts at one
    """,
)
def test_float_index():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[x_ref[0, 0]]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: Argument 'row' of type <class 'str'> is not a valid JAX type
    """,
)
def test_string_index():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref["row"]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the size of a window is computed in the kernel
      expected: a size that is known while tracing; the start may be computed
    """,
)
def test_window_of_a_traced_size():
    @make(grid=(2,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        size = lax.axis_index("row") + 1
        o_ref[0] = x_ref[pl.ds(0, size)][0]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a slice begins or ends at a value that the kernel computes
      expected: a size that is known while tracing
      try: ref[i * 128 : (i + 1) * 128] is ref[pl.ds(i * 128, 128)]
    """,
)
def test_slice_of_a_traced_size():
    @make(grid=(2,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[: lax.axis_index("row")][0]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: JAX does not take the operands of this line
      got: AssertionError in _swap_abstract_eval
      expected: arrays of numbers, of shapes that fit together
    """,
)
def test_store_of_what_is_no_array():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.create_token(x_ref[...])  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a reference is indexed by an array of bool
      expected: integers
      try: read the whole array and choose: jnp.where(mask, x, y)
    """,
)
def test_boolean_index():
    """As numbers, which they would count as, they would select the first two rows."""

    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[x_ref[:, 0] > 0]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a reference is indexed by an array of float32
      expected: integers
      try: x.astype(int)
    """,
)
def test_index_of_floats():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[x_ref[:, 0]] = x_ref[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the array that is stored does not have the shape of the reference
      got: (64, 64)
      expected: (128, 64)
      try: jnp.full_like(ref, x) of a number, jnp.broadcast_to(x, ref.shape) of a row
    """,
)
def test_stored_shape_that_differs():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:64]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: cannot reshape shape (128, 64) into shape (100, 64)
    """,
)
def test_view_in_another_shape():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.reshape(100, 64)[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: Expected input and output shapes are the same after multiplying the second-minor \
        dimension by the bitwidths.
    """,
)
def test_view_of_a_wider_dtype_in_odd_shapes():
    @make((3, 31), jnp.int32)
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.bitcast(jnp.int32)[...]  # here

    build(kernel, array(3, 31, dtype=jnp.int16))


@refused(
    InvalidValueError,
    r"""
    HERE: (0, 1, 2) is not a permutation of the dimensions of shape (128, 64)
      expected: each of 0..1 once
    """,
)
def test_transpose_of_too_many_dimensions():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        o_ref[...] = plgpu.transpose_ref(tile, (0, 1, 2))[...]  # here

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: atomic_add of int8 in global memory
      expected: 32- and 64-bit integers and floats, float16, bfloat16
      try: update a reference of a wider dtype
    """,
)
def test_atomic_of_an_unsupported_dtype():
    @make((128, 64), jnp.int8)
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        plgpu.atomic_add(o_ref, x_ref[...])  # here

    build(kernel, array(128, 64, dtype=jnp.int8))


@refused(
    InvalidValueError,
    r"""
    HERE: val and ref have different shapes
      got: val: (64, 64), ref: (128, 64)
      expected: the same shape
    """,
)
def test_atomic_of_another_shape():
    @make((128, 64))
    def kernel(x_ref, o_ref):
        plgpu.atomic_add(o_ref, x_ref[:64])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: atomic_or works on bits
      got: float32
      expected: an integer dtype
    """,
)
def test_bitwise_atomic_of_floats():
    @make((128, 64))
    def kernel(x_ref, o_ref):
        plgpu.atomic_or(o_ref, x_ref[...])  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: semaphore is not a semaphore
      got: Ref<gmem>{float32[128,64]}
      expected: a reference to a SemaphoreType
    """,
)
def test_semaphore_that_is_data():
    @make()
    def kernel(x_ref, o_ref):
        plgpu.semaphore_signal(o_ref)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a reference is indexed by None or a list
      try: index ref[...] instead
    """,
)
def test_new_axis_of_a_reference():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[None, :][0]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a reference is used as an array
      try: read it first: ref[...]
    """,
)
def test_reference_as_a_value():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref + 1  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: elements of 4 bits in the layout [3, 31]:[(warp 3), (lane 31)] are not stored in whole \
        bytes of memory laid out as [(3:31), (31:1)]
      expected: 2 neighbouring elements in every thread
      try: rows of a multiple of 2 elements, or convert to int8
    """,
)
def test_odd_number_of_four_bit_integers():
    @make((3, 31), jnp.int4)
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]  # here

    build(kernel, array(3, 31, dtype=jnp.int4))


def test_kernel_without_elements():
    @make((0, 64))
    def kernel(x_ref, o_ref):
        pass

    build(kernel, array(0, 64))
