"""Accumulators, targets and waits that cannot be: messages say what would be accepted."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from products_support import BF16, F32
from refusal_support import product, smem
from refusals import build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingRuleError,
    UnsupportedError,
)


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
      try: wgmma can accumulate into a part: plgpu.wgmma(acc.at[:, 0:64], ...)
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
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wgmma' under WARPGROUP semantics on target 'sm_100a'
      expected: a case that has a rule: LANE on targets with wgmma (plugin 'hopper')
      try: compile for sm_90a
    """,
)
def test_other_target():
    product(lambda acc, a, b: plgpu.wgmma(acc, a, b), target="sm_100a")  # here


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wgmma_wait' under WARPGROUP semantics on target 'sm_100a'
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
    HERE: no lowering rule for primitive 'wgmma_accumulator_read' under WARPGROUP semantics \
    on target 'sm_100a'
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
    HERE: wgmma in flight cannot be told apart so far back
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
    HERE: src is in ACCUMULATORS
      got: Ref<accumulators>{float32[64,64]}
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
