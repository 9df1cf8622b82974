"""Kernels that cannot be launched, and arguments that do not fit: meshes, parameters, operands."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from refusals import array, build, make, narrowed, refused

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingRuleError,
    TargetError,
    UnsupportedError,
)
from pallasite.language.kernel import kernel as make_kernel


@refused(
    InvalidTypeError,
    r"""
    HERE: the body of kernel kernel returns a value
      got: float32[128,64]
      expected: None; results are written to the references of the outputs
    """,
)
def test_returned_value():
    @make()  # here
    def kernel(x_ref, o_ref):
        return x_ref[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the body of kernel kernel captures an array of shape (64, 32)
      got: float32[64,32]
      expected: references, and arrays of up to 4096 bytes
      try: pass the array as an operand of the kernel
    """,
)
def test_captured_array():
    table = np.zeros((64, 32), np.float32)

    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jnp.asarray(table)[0, 0]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the body of kernel kernel captures an array of shape (64, 32)
      got: float32[64,32]
      expected: references, and arrays of up to 4096 bytes
      try: pass the array as an operand of the kernel
    """,
)
def test_captured_tracer():
    def function(x, scale):
        @make()
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * scale[0, 0]  # here

        return kernel(x)

    build(function, array(128, 64), array(64, 32))


@refused(
    InvalidValueError,
    r"""
    HERE: too many threads per block: 17
      expected: at most 16; each is a warpgroup of 128 CUDA threads
      try: num_threads counts warpgroups, not CUDA threads
    """,
)
def test_too_many_threads_to_name():
    make(num_threads=17, thread_name="thread")(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: a block of 9 threads needs 1152 CUDA threads
      got: num_threads=9
      expected: at most 8 on sm_90a
    """,
)
def test_too_many_threads():
    @make(num_threads=9, thread_name="thread")  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: num_threads is given without thread_name
      got: num_threads=2, thread_name=None
      expected: both or neither
    """,
)
def test_threads_without_a_name():
    make(num_threads=2)(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: num_threads is too small
      got: 0
      expected: an integer >= 1
    """,
)
def test_no_threads():
    make(num_threads=0, thread_name="thread")(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: a cluster of 32 blocks is too large for sm_90a
      got: cluster=(32,)
      expected: at most 16 blocks
    """,
)
def test_cluster_too_large():
    @make(cluster=(32,), cluster_names=("pair",))  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a cluster cannot have 4 axes
      got: cluster=(1, 1, 1, 2)
      expected: at most 3 axes, which is what the hardware has
    """,
)
def test_cluster_of_four_axes():
    make(cluster=(1, 1, 1, 2), cluster_names=tuple("abcd"))(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: cluster has 1 axes but cluster_names has 0
      got: cluster=(2,), cluster_names=()
      expected: one name for each axis
    """,
)
def test_cluster_names_missing():
    make(cluster=(2,))(lambda x, o: None)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: grid is an integer
      got: 4
      expected: a tuple, (4,)
    """,
)
def test_grid_that_is_a_number():
    make(grid=4, grid_names=("row",))(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: grid[1] is not positive
      got: (4, 0)
      expected: integers >= 1
    """,
)
def test_grid_with_a_zero():
    make(grid=(4, 0), grid_names=("row", "column"))(lambda x, o: None)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: grid[0] is a float, not an integer
      got: 4.0
      expected: a Python integer that is known while tracing
    """,
)
def test_grid_that_is_not_an_integer():
    make(grid=(4.0,), grid_names=("row",))(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the grid has 70000 blocks along CUDA's z
      got: grid=(70000, 1, 1), cluster=()
      expected: at most 65535
      try: move large extents to the last grid axis, which is CUDA's x
    """,
)
def test_grid_too_large():
    @make(grid=(70000, 1, 1), grid_names=("a", "b", "c"))  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the grid has 2147483648 blocks along CUDA's x
      got: grid=(2147483648,), cluster=()
      expected: at most 2147483647
      try: move large extents to the last grid axis, which is CUDA's x
    """,
)
def test_grid_too_large_along_x():
    @make(grid=(2**31,), grid_names=("a",))  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: axis name 'row' is used more than once
      got: grid_names=('row', 'row'), cluster_names=(), thread_name=None
      expected: a different name for each axis
    """,
)
def test_axis_name_twice():
    make(grid=(2, 2), grid_names=("row", "row"))(lambda x, o: None)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: there is no axis named 'column'
      expected: one of grid_names, cluster_names or thread_name of the kernel
    """,
)
def test_axis_unknown():
    @make(grid=(2,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        o_ref[lax.axis_index("column")] = x_ref[0]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: Axis 3 is out of bounds for grid (2,)
    """,
)
def test_program_id_beyond_the_grid():
    @make(grid=(2,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        o_ref[pl.program_id(3)] = x_ref[0]  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: interpret is of no kind that is known
      got: builtins.str
      expected: True, False, None or pallasite.gpu.InterpretGPUParams
    """,
)
def test_interpret():
    make(interpret="yes")(lambda x, o: None)  # here


@refused(
    UnsupportedError,
    r"""
    HERE: operand 0 of kernel kernel has extents that are symbols
      got: (rows, 64)
      expected: numbers: kernels are compiled for certain shapes
      try: export a program for each shape, or pad to one
    """,
)
def test_shapes_of_any_size():
    def program(x):
        def kernel(x_ref, o_ref):  # here
            o_ref[...] = x_ref[...]

        return plgpu.kernel(kernel, out_type=x)(x)

    (rows,) = jax.export.symbolic_shape("rows")
    pallasite.compile(program, jax.ShapeDtypeStruct((rows, 64), jnp.float32))


@refused(
    InvalidTypeError,
    r"""
    HERE: kernel has no parameter 'num_warps'
      expected: one of cluster, cluster_names, grid, grid_names, kernel_name, num_threads, \
        thread_name or a parameter of kernel itself
    """,
)
def test_unknown_parameter():
    make(num_warps=4)(lambda x, o: None)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: compiler_params belong to another backend
      got: builtins.dict
      expected: pallasite.gpu.CompilerParams
    """,
)
def test_parameters_of_another_backend():
    make(compiler_params={"num_warps": 4})(lambda x, o: None)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: output 0 of kernel <lambda> has no type
      got: 128
      expected: jax.ShapeDtypeStruct(shape, dtype)
    """,
)
def test_output_without_a_dtype():
    kernel = make_kernel(lambda x, o: None, out_type=[(128, 64)])

    build(kernel)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: output 0 of kernel <lambda> is not in global memory
      got: GPUMemoryRef(inner_aval=ShapedArray(float32[64]), memory_space=<MemorySpace.SMEM: \
        'smem'>, transforms=())
      expected: jax.ShapeDtypeStruct(shape, dtype)
    """,
)
def test_output_in_shared_memory():
    kernel = make_kernel(lambda x, o: None, out_type=plgpu.SMEM((64,), jnp.float32))
    build(kernel)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: out_type and its older name out_shape are both given
      expected: only out_type
    """,
)
def test_two_names_for_the_outputs():
    make_kernel(out_type=array(64), out_shape=array(64))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: the body of kernel kernel cannot take its references: missing a required argument: \
        'o_ref'
      got: 1 inputs, 1 outputs, 0 scratch allocations
      expected: one parameter for each, in this order; the body is kernel(x_ref, y_ref, o_ref)
    """,
)
def test_too_few_arguments():
    @make()  # here
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: the body of kernel kernel cannot take its references: too many positional arguments
      got: 2 inputs, 1 outputs, 0 scratch allocations
      expected: one parameter for each, in this order; the body is kernel(x_ref, o_ref)
    """,
)
def test_too_many_arguments():
    @make()  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel, array(64), array(64))


@refused(
    InvalidTypeError,
    r"""
    HERE: operand 0 of kernel kernel is not an array
      got: str: 'text'
      expected: an array or a jax.Ref
    """,
)
def test_operand_that_is_not_an_array():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    kernel("text")  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: operand 0 of kernel kernel has keys of a generator that kernels do not have
      got: key<rbg>[]
      expected: keys of jax.random.key(seed, impl='threefry2x32')
    """,
)
def test_operand_with_keys_of_another_generator():
    @make()
    def kernel(x_ref, o_ref):
        pass

    kernel(jax.random.key(0, impl="rbg"))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: the array that is stored does not have the shape of the reference
      got: (32, 64)
      expected: (64, 64)
      try: jnp.full_like(ref, x) of a number, jnp.broadcast_to(x, ref.shape) of a row
    """,
)
def test_operand_of_another_shape_than_the_body_needs():
    @make((64, 64))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]  # here

    build(kernel, array(32, 64))


@refused(
    InvalidValueError,
    r"""
    HERE: the array that is stored does not have the dtype of the reference
      got: bfloat16
      expected: float32
      try: x.astype(ref.dtype)
    """,
)
def test_operand_of_another_dtype_than_the_body_needs():
    @make((64, 64))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]  # here

    build(kernel, array(64, 64, dtype=jnp.bfloat16))


@refused(
    InvalidValueError,
    r"""
    HERE: input 0 and output 0 cannot share a buffer
      got: float32[32,64] and float32[64,64]
      expected: the same shape and dtype
    """,
)
def test_alias_of_another_shape():
    kernel = make((64, 64), input_output_aliases={0: 0})(lambda x, o: None)
    build(kernel, array(32, 64))  # here


@refused(
    InvalidValueError,
    r"""
    HERE: input_output_aliases has no such pair: input 3, output 0
      expected: inputs 0..0, outputs 0..0
    """,
)
def test_alias_of_a_missing_operand():
    kernel = make((64, 64), input_output_aliases={3: 0})(lambda x, o: None)
    build(kernel, array(64, 64))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: arrays of dtype complex64 have no representation on the GPU
      expected: bool, an integer of 2 to 64 bits, or a float of 8, 16, 32 or 64 bits
    """,
)
def test_complex_numbers():
    @make(dtype=jnp.complex64)
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]  # here

    build(kernel, array(128, 64, dtype=jnp.complex64))


@refused(
    MissingRuleError,
    r"""
    HERE: there is no call of a kernel in kernels
      expected: a function of the list in docs/functions.md
      try: call the body of the other kernel with references
    """,
)
def test_call_of_a_kernel_in_a_kernel():
    inner = make()(lambda x, o: None)

    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = inner(x_ref[...])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    sin calls no kernel
      expected: a call of pallasite.gpu.kernel, or of pl.pallas_call with \
        compiler_params=pallasite.CompilerParams(...), or of pl.kernel with \
        mesh=pallasite.gpu.Mesh(...)
    """,
)
def test_function_without_a_kernel():
    build(jnp.sin)


@refused(
    TargetError,
    r"""
    no target named 'sm_42' (from target=...)
      expected: one of sm_100, sm_100a, sm_103a, sm_110a, sm_120a, sm_90, sm_90a
    """,
)
def test_unknown_target():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(kernel, target="sm_42")


@refused(
    InvalidValueError,
    r"""
    HERE: max_concurrent_steps is too small
      got: 0
      expected: an integer >= 1
    """,
)
def test_concurrent_steps_not_positive():
    plgpu.CompilerParams(max_concurrent_steps=0)  # here


@refused(
    InvalidValueError,
    r"""
    HERE: dimension_semantics[1] is unknown
      got: 'arbitrary'
      expected: "parallel" or "sequential"
    """,
)
def test_dimension_semantics_unknown():
    plgpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: lowering_semantics is unknown
      got: lane
      expected: LoweringSemantics.Lane or LoweringSemantics.Warpgroup, or a Semantics of a plugin \
    that falls back to one of them
    """,
)
def test_semantics_unknown():
    plgpu.CompilerParams(lowering_semantics="lane")  # here


@refused(
    InvalidValueError,
    r"""
    HERE: profile_space and profile_dir go together
      got: profile_space=16, profile_dir=''
      expected: both or neither
    """,
)
def test_profile_without_directory():
    plgpu.CompilerParams(profile_space=16)  # here


@refused(
    InvalidTypeError,
    r"""
    HERE: target is not a name
      got: 90
      expected: a string such as "sm_90a"
    """,
)
def test_target_that_is_not_a_name():
    plgpu.CompilerParams(target=90)  # here


def _pallas_call(body, **arguments):
    defaults = dict(
        grid=(2,),
        in_specs=[pl.BlockSpec((64, 64), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((64, 64), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((128, 64), jnp.float32),
        compiler_params=plgpu.CompilerParams(),
    )
    return pl.pallas_call(body, **{**defaults, **arguments})


@refused(
    InvalidValueError,
    r"""
    HERE: dimension_semantics has 2 entries for a grid of 1 axes
      got: dimension_semantics=('parallel', 'parallel'), grid=(2,)
      expected: one entry for each axis
    """,
)
def test_dimension_semantics_of_another_length():
    def copy(x_ref, o_ref):  # here
        o_ref[...] = x_ref[...]

    params = plgpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
    build(_pallas_call(copy, compiler_params=params))


@refused(
    UnsupportedError,
    r"""
    HERE: pallas_call with a grid whose size is not known while compiling
      expected: a grid of Python integers
    """,
)
def test_pallas_call_with_dynamic_grid():
    def copy(x_ref, o_ref):  # here
        o_ref[...] = x_ref[...]

    build(lambda x, n: _pallas_call(copy, grid=(n,))(x), array(4, 4), array(dtype=jnp.int32))


@refused(
    UnsupportedError,
    r"""
    HERE: the block spec of args[0] has a dimension Element(block_size=64, padding=(3, 3))
      got: block shape ('Element(64, padding=(3, 3))', 'Blocked(64)') of an array of shape (128, \
        64), memory space default, index map { lambda ; a:i32[]. let  in (a, 0:i32[]) }
      expected: an integer, None, pl.Squeezed, pl.Blocked or pl.Element without padding
    """,
)
def test_pallas_call_with_padded_dimension():
    def copy(x_ref, o_ref):  # here
        o_ref[...] = x_ref[...]

    specification = pl.BlockSpec((pl.Element(64, (3, 3)), 64), lambda i: (i, 0))
    build(_pallas_call(copy, in_specs=[specification]))


def test_pallas_call_of_blocks_that_do_not_divide():
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    build(_pallas_call(copy), array(100, 64))


REFUSED = """
HERE: a conversion from float32 to float8_e4m3fnuz
  expected: float4_e2m1fn, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, bfloat16, float16, \
float32 or float64
"""


@refused(UnsupportedError, REFUSED)
def test_kernel_of_a_library():
    def program(x):
        return narrowed(x + 1)  # here

    jax.jit(program).lower(jnp.ones(128))
