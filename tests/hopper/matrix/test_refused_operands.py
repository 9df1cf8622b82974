"""Operands of products that cannot be: messages name the line and what would be accepted."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from products_support import BF16, E4M3, F16, I8, transforms
from refusal_support import LANE, TILES, product, smem
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
)


@refused(
    InvalidValueError,
    r"""
    HERE: a is in GMEM
      got: Ref<gmem>{bfloat16[128,64]}
      expected: a reference to data in SMEM
      try: allocate it as plgpu.SMEM (scratch_types, pl.run_scoped), and copy what is needed; \
    for a block of pallas_call, plgpu.BlockSpec(..., memory_space=plgpu.SMEM) does both
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
      try: allocate it as plgpu.SMEM (scratch_types, pl.run_scoped), and copy what is needed; \
    for a block of pallas_call, plgpu.BlockSpec(..., memory_space=plgpu.SMEM) does both
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
      got: Ref<barriers>{barrier[]}
      expected: a reference to data in SMEM
    """,
)
def test_operand_is_a_barrier():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), b=plgpu.Barrier())  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: a is an accumulator
      got: Ref<accumulators>{float32[64,64]}
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
    HERE: the tensor cores do not multiply this dtype
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
    HERE: the tensor cores cannot read a from shared memory as it lies there
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
    HERE: the tensor cores cannot read b from shared memory as it lies there
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
    HERE: a starts inside of a block of the tensor cores
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
    HERE: a starts inside of a block of the tensor cores
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
    HERE: a is distributed over the lanes in another way than the tensor cores read it
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
    HERE: a is distributed over the lanes in another way than the tensor cores read it
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
