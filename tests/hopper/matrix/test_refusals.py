"""Products that cannot be: each message names the line and what would be accepted."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from products_support import BF16, E4M3, F16, F32, I8, transforms
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingRuleError,
    UnsupportedError,
)

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
TILES = transforms(128, BF16)
TILE = plgpu.SMEM((64, 64), BF16, transforms=TILES)


def product(
    multiply,
    a=TILE,
    b=TILE,
    acc=lambda: plgpu.ACC((64, 64)),
    *,
    shape=(64, 64),
    target="sm_90a",
    **options,
) -> None:
    """Compiles a kernel that calls ``multiply(acc, a, b)``, the first two scratches in memory."""

    @make(shape, scratch_types=[a, b], **options)
    def kernel(x_ref, o_ref, a_smem, b_smem):
        def scope(acc):
            multiply(acc, a_smem, b_smem)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, acc())

    build(kernel, target=target)


def smem(shape, dtype=BF16, swizzle=128):
    return plgpu.SMEM(shape, dtype, transforms=transforms(swizzle, dtype))


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator cannot have this shape
      got: (96, 64)
      expected: (rows, columns) with rows a multiple of 64, columns a multiple of 8
    """,
)
def test_accumulator_rows():
    product(lambda acc, a, b: None, acc=lambda: plgpu.ACC((96, 64)))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator cannot have this shape
      got: (64, 12)
      expected: (rows, columns) with rows a multiple of 64, columns a multiple of 8
    """,
)
def test_accumulator_columns():
    product(lambda acc, a, b: None, acc=lambda: plgpu.ACC((64, 12)))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator cannot have this shape
      got: (64,)
      expected: (rows, columns) with rows a multiple of 64, columns a multiple of 8
    """,
)
def test_accumulator_rank():
    product(lambda acc, a, b: None, acc=lambda: plgpu.ACC((64,)))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: products are not accumulated in this dtype
      got: bfloat16
      expected: float32, float16 or int32
      try: convert the result: acc[...].astype(dtype)
    """,
)
def test_accumulator_dtype():
    product(lambda acc, a, b: None, acc=lambda: plgpu.ACC((64, 64), BF16))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: products are not accumulated in this dtype
      got: uint32
      expected: float32, float16 or int32
      try: convert the result: acc[...].astype(dtype)
    """,
)
def test_accumulator_unsigned():
    product(lambda acc, a, b: None, acc=lambda: plgpu.ACC((64, 64), jnp.uint32))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator with initial contents is allocated as a scratch
      expected: pl.run_state(body)(plgpu.ACC.init(array))
      try: or allocate it without contents and write them: acc[...] = array
    """,
)
def test_accumulator_as_scratch_with_contents():
    @make((64, 64))
    def kernel(x_ref, o_ref):
        x = x_ref[0:64]
        pl.run_scoped(lambda acc: None, plgpu.ACC.init(x))  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is shared by the threads of a block
      got: collective_axes=('wg',)
      expected: no collective_axes: every thread has its own registers
      try: allocate accumulators in a pl.run_scoped of their own
    """,
)
def test_accumulator_with_collective_axes():
    @make((64, 64), num_threads=2, thread_name="wg")
    def kernel(x_ref, o_ref):
        def scope(acc):
            o_ref[...] = acc[...]

        pl.run_scoped(scope, plgpu.ACC((64, 64)), collective_axes="wg")  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is shared by the threads of a block
      got: collective_axes=('wg',)
      expected: no collective_axes: every thread has its own registers
      try: allocate accumulators in a pl.run_scoped of their own
    """,
)
def test_accumulator_next_to_shared_memory_with_collective_axes():
    @make((64, 64), num_threads=2, thread_name="wg")
    def kernel(x_ref, o_ref):
        def scope(acc, tile):
            o_ref[...] = acc[...]

        pl.run_scoped(  # here
            scope, plgpu.ACC((64, 64)), plgpu.SMEM((64, 64), F32), collective_axes="wg"
        )

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is shared by \
    the threads of a block
      got: collective_axes=('wg',)
      expected: no collective_axes: every thread has its own registers
      try: allocate accumulators in a pl.run_scoped of their own
    """,
)
def test_accumulator_as_scratch_of_several_threads():
    @make((64, 64), scratch_types=[plgpu.ACC((64, 64))], num_threads=2, thread_name="wg")  # here
    def kernel(x_ref, o_ref, acc):
        o_ref[...] = acc[...]

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: acc is not an accumulator
      got: Ref<smem>{bfloat16[8,1,8,64]}
      expected: a reference allocated as plgpu.ACC((m, n), dtype)
    """,
)
def test_accumulator_is_memory():
    product(lambda acc, a, b: plgpu.wgmma(a, a, b))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: acc is not an accumulator
      got: float32[64,64]
      expected: a reference allocated as plgpu.ACC((m, n), dtype)
    """,
)
def test_accumulator_is_an_array():
    product(lambda acc, a, b: plgpu.wgmma(jnp.zeros((64, 64)), a, b))  # here


@refused(
    UnsupportedError,
    r"""
    HERE: acc is a part that is not known while tracing, or no matrix
      got: acc.at[pl.ds(..., 64), 0:64]
      expected: slices with numbers that are known while tracing: acc.at[:, 0:64]
    """,
)
def test_part_by_computed_index():
    def multiply(acc, a, b):
        plgpu.wgmma(acc.at[pl.ds(lax.axis_index("x") * 64, 64)], a, b)  # here

    product(multiply, grid=(2,), grid_names=("x",))


@refused(
    UnsupportedError,
    r"""
    HERE: acc is a part that is not known while tracing, or no matrix
      got: acc.at[an index, 0:64]
      expected: slices with numbers that are known while tracing: acc.at[:, 0:64]
    """,
)
def test_part_by_number():
    product(lambda acc, a, b: plgpu.wgmma(acc.at[0], a, b))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: a part of an accumulator cuts an instruction's registers apart
      got: rows 0:64, columns 4:12
      expected: rows in multiples of 64, columns in multiples of 8
    """,
)
def test_part_that_cuts_registers():
    def multiply(acc, a, b):
        plgpu.wgmma(acc.at[:, 4:12], a, b.at[:, 8:16])  # here

    product(multiply)


@refused(
    UnsupportedError,
    r"""
    HERE: a part of an accumulator is written
      got: index (slice(None, None, None), slice(0, 8, None))
      expected: acc[...] = value
      try: products may add to a part: plgpu.wgmma(acc.at[:, 0:64], ...)
    """,
)
def test_part_is_written():
    def multiply(acc, a, b):
        acc[:, 0:8] = jnp.zeros((64, 8))  # here

    product(multiply)


@refused(
    UnsupportedError,
    r"""
    HERE: a part of an accumulator is read
      expected: the whole accumulator
      try: slice the array: acc[...][:, 0:64]
    """,
)
def test_part_is_loaded():
    product(lambda acc, a, b: plgpu.wgmma_accumulator_load(acc.at[:, 0:8]))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the array does not have the shape of the accumulator
      got: (64, 32)
      expected: (64, 64)
    """,
)
def test_store_of_another_shape():
    def multiply(acc, a, b):
        acc[...] = jnp.zeros((64, 32))  # here

    product(multiply)


@refused(
    InvalidValueError,
    r"""
    HERE: value and acc have different dtypes
      got: value: bfloat16, acc: float32
      expected: the same dtype
      try: convert in registers: read, astype, write
    """,
)
def test_store_of_another_dtype():
    def multiply(acc, a, b):
        acc[...] = jnp.zeros((64, 64), BF16)  # here

    product(multiply)


@refused(
    InvalidValueError,
    r"""
    HERE: a is in GMEM
      got: Ref<gmem>{bfloat16[128,64]}
      expected: a reference to data in SMEM
    """,
)
def test_left_operand_in_global_memory():
    @make((64, 64), scratch_types=[smem((64, 64))])
    def kernel(x_ref, o_ref, b):
        pl.run_scoped(lambda acc: plgpu.wgmma(acc, x_ref, b), plgpu.ACC((128, 64)))  # here

    build(kernel, array(128, 64, dtype=BF16))


@refused(
    InvalidValueError,
    r"""
    HERE: b is in GMEM
      got: Ref<gmem>{bfloat16[64,64]}
      expected: a reference to data in SMEM
    """,
)
def test_right_operand_in_global_memory():
    @make((64, 64), scratch_types=[smem((64, 64))])
    def kernel(x_ref, o_ref, a):
        pl.run_scoped(lambda acc: plgpu.wgmma(acc, a, x_ref), plgpu.ACC((64, 64)))  # here

    build(kernel, array(64, 64, dtype=BF16))


@refused(
    InvalidTypeError,
    r"""
    HERE: b is not in shared memory
      got: bfloat16[64,64]
      expected: a reference to shared memory
      try: store it: ref[...] = value, then plgpu.commit_smem()
    """,
)
def test_right_operand_in_registers():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b[...]))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: b is a reference to a barrier, not to data
      got: Ref<smem>{barrier[]}
      expected: a reference to data in SMEM
    """,
)
def test_operand_is_a_barrier():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), b=plgpu.Barrier())  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: a is an accumulator
      got: Ref<regs>{float32[64,64]}
      expected: a reference to shared memory or an array
      try: read it and convert it: acc[...].astype(dtype)
    """,
)
def test_operand_is_an_accumulator():
    product(lambda acc, a, b: plgpu.wgmma(acc, acc, b))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: a is not in shared memory
      got: float
      expected: a reference to shared memory or an array
    """,
)
def test_operand_is_a_number():
    product(lambda acc, a, b: plgpu.wgmma(acc, 2.0, b))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: a is not a matrix
      got: shape (2, 64, 64)
      expected: rank 2
    """,
)
def test_operand_of_rank_3():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), a=smem((2, 64, 64)))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the shapes do not fit together as acc (m, n) += a (m, k) @ b (k, n)
      got: acc (64, 64), a (64, 128), b (64, 64)
      expected: a (64, k) and b (k, 64)
    """,
)
def test_shapes_that_do_not_fit():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), a=smem((64, 128)))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the depth of products of bfloat16 is no multiple of 32 bytes
      got: k=8
      expected: k a multiple of 16
    """,
)
def test_depth_of_half_an_instruction():
    tiles = transforms(16, BF16)
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, b),  # here
        a=plgpu.SMEM((64, 8), BF16, transforms=tiles),
        b=plgpu.SMEM((8, 64), BF16, transforms=tiles),
    )


@refused(
    InvalidValueError,
    r"""
    HERE: the matrix units do not multiply this dtype
      got: int16
      expected: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8, uint8
    """,
)
def test_dtype_that_is_not_multiplied():
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, b),  # here
        a=plgpu.SMEM((64, 64), jnp.int16, transforms=TILES),
        b=plgpu.SMEM((64, 64), jnp.int16, transforms=TILES),
    )


@refused(
    InvalidValueError,
    r"""
    HERE: a and b have dtypes that are not multiplied with each other
      got: a: float16, b: bfloat16
      expected: the same dtype (or two kinds of 8-bit float, or int8 and uint8)
      try: convert one of them in registers; a may stay there
    """,
)
def test_two_dtypes():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), a=smem((64, 64), F16))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: a and b have dtypes that are not multiplied with each other
      got: a: int8, b: float8_e4m3fn
      expected: the same dtype (or two kinds of 8-bit float, or int8 and uint8)
      try: convert one of them in registers; a may stay there
    """,
)
def test_float8_and_integers():
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0))),  # here
        a=smem((64, 128), I8),
        b=smem((64, 128), E4M3),
    )


@refused(
    InvalidValueError,
    r"""
    HERE: products of bfloat16 are not accumulated in float16
      got: an accumulator of dtype float16
      expected: float32
    """,
)
def test_accumulator_of_another_kind():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), acc=lambda: plgpu.ACC((64, 64), F16))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: accumulate is not a boolean scalar
      got: ~int32[]
      expected: a bool or a bool[] array
    """,
)
def test_flag_is_an_integer():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b, accumulate=1))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: accumulate is not a boolean scalar
      got: bool[64,64]
      expected: a bool or a bool[] array
    """,
)
def test_flag_is_an_array():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b, accumulate=acc[...] > 0))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the matrix units cannot read a from shared memory as it lies there
      got: (64, 64) laid out as [(64:64), (64:1)]
      expected: tiles of 8 rows as wide as the swizzle, or of 16 bytes without swizzle
      try: plgpu.SMEM(..., transforms=(plgpu.TilingTransform((8, 64)), \
    plgpu.SwizzleTransform(128)))
    """,
)
def test_memory_without_tiles():
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, b),  # here
        a=plgpu.SMEM((64, 64), BF16),
        compiler_params=LANE,
    )


@refused(
    InvalidValueError,
    r"""
    HERE: the matrix units cannot read b from shared memory as it lies there
      got: (64, 64) laid out as [(64:64), (64:1)]
      expected: tiles of 8 rows as wide as the swizzle, or of 16 bytes without swizzle
      try: plgpu.SMEM(..., transforms=(plgpu.TilingTransform((8, 64)), \
    plgpu.SwizzleTransform(128)))
    """,
)
def test_tiles_without_their_swizzle():
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, b),  # here
        b=plgpu.SMEM((64, 64), BF16, transforms=(plgpu.TilingTransform((8, 64)),)),
    )


@refused(
    InvalidValueError,
    r"""
    HERE: elements of 8 bits are not contiguous along k in b
      got: (128, 128) laid out as [(128:128), (128:1)] swizzle 128
      expected: rows of k; only elements of 16 bits may be contiguous along m or n
      try: store b as (n, k), and pass plgpu.transpose_ref(b, (1, 0))
    """,
)
def test_bytes_that_are_not_contiguous_along_k():
    product(
        lambda acc, a, b: plgpu.wgmma(acc, a, b),  # here
        a=smem((64, 128), E4M3),
        b=smem((128, 128), E4M3),
        acc=lambda: plgpu.ACC((64, 128)),
        shape=(64, 128),
    )


@refused(
    InvalidValueError,
    r"""
    HERE: a starts inside of a block of the matrix units
      got: a view that starts at, or in steps of, 512 bytes, in memory laid out as [(64:64), \
    (64:1)] swizzle 128
      expected: rows from a multiple of 8 (blocks of 1024 bytes), and along the contiguous \
    dimension multiples of 16 bytes
      try: if a start is computed in the kernel, say what it is a multiple of: \
    pl.multiple_of(start, 8)
    """,
)
def test_rows_from_within_a_tile():
    def multiply(acc, a, b):
        plgpu.wgmma(acc, a.at[4:68], b)  # here

    product(multiply, a=smem((128, 64)))


@refused(
    InvalidValueError,
    r"""
    HERE: a starts inside of a block of the matrix units
      got: a view that starts at, or in steps of, 2 bytes, in memory laid out as [(64:64), \
    (16:1)] swizzle 128
      expected: rows from a multiple of 8 (blocks of 1024 bytes), and along the contiguous \
    dimension multiples of 16 bytes
      try: if a start is computed in the kernel, say what it is a multiple of: \
    pl.multiple_of(start, 8)
    """,
)
def test_depth_from_an_unknown_start():
    def multiply(acc, a, b):
        window = pl.ds(lax.axis_index("x"), 16)
        plgpu.wgmma(acc, a.at[:, window], b.at[0:16])  # here

    product(multiply, grid=(2,), grid_names=("x",))


@refused(
    InvalidValueError,
    r"""
    HERE: a is in the shared memory of another block
      expected: the block's own shared memory
    """,
)
def test_shared_memory_of_another_block():
    def multiply(acc, a, b):
        plgpu.wgmma(acc, plgpu.cluster_ref(a, {"pair": 0}), b)  # here

    product(multiply, cluster=(2,), cluster_names=("pair",))


@refused(
    InvalidValueError,
    r"""
    HERE: a is distributed over the lanes in another way than the matrix units read it
      got: bfloat16[64, 64] with layout strided(vector 2)
      expected: layout WGMMA
      try: plgpu.layout_cast(a, plgpu.Layout.WGMMA), best right where it is loaded
    """,
)
def test_left_operand_in_another_layout():
    def multiply(acc, a, b):
        x = plgpu.load(a, (), layout=plgpu.Layout.WG_STRIDED((64, 64), vec_size=2))
        plgpu.wgmma(acc, x, b)  # here

    product(multiply, compiler_params=LANE)


@refused(
    InvalidValueError,
    r"""
    HERE: a is distributed over the lanes in another way than the matrix units read it
      got: float8_e4m3fn[64, 128] with layout WGMMA
      expected: layout WGMMA_8BIT
      try: plgpu.layout_cast(a, plgpu.Layout.WGMMA_8BIT), best right where it is loaded
    """,
)
def test_float8_in_the_layout_of_16_bits():
    def multiply(acc, a, b):
        x = plgpu.load(a, (), layout=plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, x.astype(E4M3), plgpu.transpose_ref(b, (1, 0)))  # here

    product(multiply, a=smem((64, 128), F16), b=smem((64, 128), E4M3), compiler_params=LANE)


@refused(
    InvalidValueError,
    r"""
    HERE: a and b have dtypes that are not multiplied with each other
      got: a: float32, b: bfloat16
      expected: the same dtype (or two kinds of 8-bit float, or int8 and uint8)
      try: convert one of them in registers; a may stay there
    """,
)
def test_left_operand_with_dtype_of_its_own():
    product(lambda acc, a, b: plgpu.wgmma(acc, jnp.zeros((64, 64)), b))  # here


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wgmma' under LANE semantics on target 'sm_100a'
      expected: a case that has a rule: LANE on targets with wgmma (plugin 'hopper')
      try: compile for sm_90a
    """,
)
def test_other_target():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), target="sm_100a")  # here


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wgmma_wait' under LANE semantics on target 'sm_100a'
      expected: a case that has a rule: LANE on targets with wgmma (plugin 'hopper')
      try: compile for sm_90a
    """,
)
def test_wait_on_another_target():
    @make((64, 64))
    def kernel(x_ref, o_ref):
        plgpu.wgmma_wait(0)  # here

    build(kernel, target="sm_100a")


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wgmma_accumulator_read' under LANE semantics on target \
    'sm_100a'
      expected: a case that has a rule: LANE on targets with wgmma (plugin 'hopper')
      try: compile for sm_90a
    """,
)
def test_accumulator_on_another_target():
    @make((64, 64))
    def kernel(x_ref, o_ref):
        o_ref[...] = pl.run_scoped(lambda acc: acc[...], plgpu.ACC((64, 64)))  # here

    build(kernel, target="sm_100a")


@refused(
    UnsupportedError,
    r"""
    HERE: wgmma in code that runs per warp
      expected: the four warps of a warpgroup together
      try: call it outside of plgpu.warp_map
    """,
)
def test_single_warp():
    def multiply(acc, a, b):
        @plgpu.warp_map
        def _(warp):
            plgpu.wgmma(acc, a, b)  # here

    product(multiply)


@refused(
    UnsupportedError,
    r"""
    HERE: wgmma_wait in code that runs per warp
      expected: the four warps of a warpgroup together
      try: call it outside of plgpu.warp_map
    """,
)
def test_wait_of_a_single_warp():
    def multiply(acc, a, b):
        @plgpu.warp_map
        def _(warp):
            plgpu.wgmma_wait(0)  # here

    product(multiply)


@refused(
    InvalidValueError,
    r"""
    HERE: products in flight cannot be told apart so far back
      got: n=8
      expected: an integer from 0 to 7
    """,
)
def test_wait_for_too_many():
    product(lambda acc, a, b: plgpu.wgmma_wait(8))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: n is too small
      got: -1
      expected: an integer >= 0
    """,
)
def test_wait_for_a_negative_number():
    product(lambda acc, a, b: plgpu.wgmma_wait(-1))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: n must be known while tracing
      got: JitTracer(int32[]) of type DynamicJaxprTracer
      expected: a Python integer >= 0
    """,
)
def test_wait_for_a_computed_number():
    product(lambda acc, a, b: plgpu.wgmma_wait(jnp.int32(1) + 1))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: acc is not an accumulator
      got: Ref<smem>{bfloat16[8,1,8,64]}
      expected: a reference allocated as plgpu.ACC((m, n), dtype)
    """,
)
def test_load_of_memory():
    product(lambda acc, a, b: plgpu.wgmma_accumulator_load(a))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: src is in REGS
      got: Ref<regs>{float32[64,64]}
      expected: a reference to data in GMEM
    """,
)
def test_atomic_on_an_accumulator():
    def multiply(acc, a, b):
        plgpu.copy_gmem_to_smem(acc, a, None)  # here

    product(multiply)


@refused(
    InvalidValueError,
    r"""
    HERE: an accumulator is used outside of the scope that allocates it
      expected: uses in the function that pl.run_scoped or pl.run_state calls
    """,
)
def test_use_after_the_scope():
    kept = []

    def multiply(acc, a, b):
        kept.append(acc)

    @make((64, 64), scratch_types=[smem((64, 64))] * 2)
    def kernel(x_ref, o_ref, a, b):
        pl.run_scoped(kept.append, plgpu.ACC((64, 64)))
        plgpu.wgmma(kept[0], a, b)  # here

    build(kernel)
