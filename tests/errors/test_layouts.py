"""Arrays in registers: layouts that do not match, operations and dtypes without a rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingRuleError,
    UnsupportedError,
)
from pallasite.ir import ops

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
WGMMA = plgpu.Layout.WGMMA
STRIDED = plgpu.Layout.WG_STRIDED((128, 64), vec_size=2)


@refused(
    InvalidValueError,
    r"""
    HERE: the operands are distributed over the lanes in different ways
      got: WGMMA and strided(vector 2) for shape [128, 64]
      expected: one layout for all operands
      try: cast one of them first: plgpu.layout_cast(x, layout)
    """,
)
def test_sum_of_two_layouts():
    @make(compiler_params=LANE)
    def kernel(x_ref, o_ref):
        x = plgpu.layout_cast(x_ref[...], WGMMA)
        y = plgpu.layout_cast(x_ref[...], STRIDED)
        o_ref[...] = x + y  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the loop body: value 1, float32[128, 64], has layout strided(vector 2), when it should \
        be WGMMA
      try: cast it inside with plgpu.layout_cast, or start with a value that has this layout
    """,
)
def test_loop_that_changes_a_layout():
    @make(compiler_params=LANE)
    def kernel(x_ref, o_ref):
        def step(_, x):
            return plgpu.layout_cast(x * 2, STRIDED)

        x = plgpu.layout_cast(x_ref[...], WGMMA)
        o_ref[...] = lax.fori_loop(0, 4, step, x)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the loop body: value 0, float32[128, 64], has layout strided(vector 2), when it should \
        be WGMMA
      try: cast it inside with plgpu.layout_cast, or start with a value that has this layout
    """,
)
def test_while_loop_that_changes_a_layout():
    @make(compiler_params=LANE)
    def kernel(x_ref, o_ref):
        x = plgpu.layout_cast(x_ref[...], WGMMA)
        o_ref[...] = lax.while_loop(  # here
            lambda x: True, lambda x: plgpu.layout_cast(x * 2, STRIDED), x
        )

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the branches of a conditional: value 0, float32[128, 64], has layout WGMMA, when it \
        should be strided(vector 2)
      try: cast it inside with plgpu.layout_cast, or start with a value that has this layout
    """,
)
def test_branches_of_two_layouts():
    @make(compiler_params=LANE)
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.cond(  # here
            x_ref[0, 0] > 0,
            lambda: plgpu.layout_cast(x_ref[...], WGMMA),
            lambda: plgpu.layout_cast(x_ref[...], STRIDED),
        )

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: dimension 0 of shape (100, 64) does not tile: the tile extent 64 of (64, 8)(16, 8)(8, \
        8)(2,) does not divide 100
      expected: dimension 0 to be a multiple of 64
    """,
)
def test_layout_that_does_not_fit():
    @make((100, 64))
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref[...], WGMMA)  # here

    build(kernel, array(100, 64))


@refused(
    InvalidValueError,
    r"""
    HERE: the layout WG_STRIDED is for shape (64, 64), but the array has (128, 64)
    """,
)
def test_layout_of_another_shape():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(  # here
            x_ref[...], plgpu.Layout.WG_STRIDED((64, 64), vec_size=2)
        )

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: wrong arguments for the layout WGMMA: WGMMA takes no arguments
    """,
)
def test_layout_with_unknown_arguments():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA(3, a=1))  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: new_layout is not a layout
      got: 'WGMMA'
      expected: a member of Layout, with arguments if it needs some
    """,
)
def test_layout_that_is_a_string():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref[...], "WGMMA")  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: an array whose elements may differ is cast to a splat
      got: strided(vector 4) for shape [128, 64]
      expected: another layout
    """,
)
def test_layout_of_distributed_as_splat():
    @make()
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = plgpu.layout_cast(x * 2, plgpu.Layout.WG_SPLAT((128, 64)))  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a load into a splat
      got: shape [128, 64]
      expected: another layout
    """,
)
def test_layout_of_distributed_as_splat_by_lanes():
    @make(compiler_params=LANE)
    def kernel(x_ref, o_ref):
        x = x_ref[...]  # here
        o_ref[...] = plgpu.layout_cast(x * 2, plgpu.Layout.WG_SPLAT((128, 64)))

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: a reference has no register layout
      got: JitTracer(Ref<gmem>{float32[128,64]})
      try: read it first: ref[...]
    """,
)
def test_layout_of_a_reference():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref, WGMMA)  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a layout of 2 dimensions is reduced along dimension 2
      got: Layout.WGMMA.reduce([2])
      expected: dimensions from 0 to 1
    """,
)
def test_reduced_layout_of_the_wrong_axis():
    @make((64,))
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.layout_cast(x_ref[...], WGMMA.reduce(2))  # here

    build(kernel, array(64))


@refused(
    InvalidValueError,
    r"""
    HERE: slice must have a step >= 1 (found: -1)
    """,
)
def test_load_with_strides():
    @make((32, 64))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[::-1]  # here

    build(kernel, array(64, 64))


@refused(
    UnsupportedError,
    r"""
    HERE: the kernel captures an array constant
      got: float32[65]
      expected: scalars, or arrays of one repeated value
      try: pass the array to the kernel as an input
    """,
)
def test_constant_table_of_a_jitted_function():
    @jax.jit
    def scaled(x):
        return x * np.arange(65, dtype=np.float32)

    @make((65,))
    def kernel(x_ref, o_ref):
        o_ref[...] = scaled(x_ref[...])  # here

    build(kernel, array(65))


@refused(
    InvalidValueError,
    r"""
    HERE: a single warp reads an array
      got: shape [128, 64]
      expected: scalars inside a warp-mapped region
      try: move the access out of the region, or index single elements
    """,
)
def test_array_in_a_warp():
    @make()
    def kernel(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp):
            o_ref[...] = x_ref[...]  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a warp-mapped region captures an array
      got: f32[128,64]
      expected: references and scalars
      try: write the array to shared memory before the region
    """,
)
def test_array_captured_by_a_warp():
    @make()
    def kernel(x_ref, o_ref):
        x = x_ref[...]

        @plgpu.warp_map  # here
        def _(warp):
            o_ref[0, 0] = x[0, 0]

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a warp-mapped region inside another one
      expected: one level: inside, a single warp runs the code already
    """,
)
def test_warps_in_warps():
    @make()
    def kernel(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp):
            @plgpu.warp_map  # here
            def _(inner):
                pass

    build(kernel)


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'reduce_sum' under WARP semantics on target 'sm_90a'
      expected: a case that has a rule: LANE on every target (plugin 'standard')
      try: use it under LANE semantics
    """,
)
def test_reduction_in_a_warp():
    @make(scratch_types=[plgpu.SMEM((64,), jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        @plgpu.warp_map
        def _(warp):
            o_ref[0, 0] = jnp.sum(jnp.zeros((4, 4)) + x_ref[0, 0])  # here

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: debug_print of an array together with other values
      got: float32[128, 64], float32[128, 64]
      expected: any number of scalars, or exactly one array
      try: print them one by one
    """,
)
def test_print_of_several_arrays():
    @make()
    def kernel(x_ref, o_ref):
        pl.debug_print("{} {}", x_ref[...], x_ref[...])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the format string has 2 placeholders for 1 values
      got: '{} {}'
      expected: one {} for each value; {{ and }} for braces
    """,
)
def test_print_with_too_few_values():
    @make()
    def kernel(x_ref, o_ref):
        pl.debug_print("{} {}", x_ref[0, 0])  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a placeholder of a device-side format string says more than {}
      got: '{:.3f}'
      expected: plain {} placeholders, filled in order
    """,
)
def test_print_with_a_format():
    @make()
    def kernel(x_ref, o_ref):
        pl.debug_print("{:.3f}", x_ref[0, 0])  # here

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: Python cannot branch on a value that the kernel computes
      try: pl.when, jax.lax.cond or jnp.where
    """,
)
def test_truth_of_a_traced_value():
    @make()
    def kernel(x_ref, o_ref):
        if x_ref[0, 0] > 0:  # here
            o_ref[...] = x_ref[...]

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: Python needs a number here, but the kernel computes the value
      try: pl.loop or jax.lax.fori_loop for loops; sizes must be known while tracing
    """,
)
def test_traced_loop_bound():
    @make(grid=(2,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        for row in range(lax.axis_index("row")):  # here
            o_ref[row] = x_ref[row]

    build(kernel)


@refused(
    InvalidTypeError,
    r"""
    HERE: add got incompatible shapes for broadcasting: (128, 64), (64, 64).
    """,
)
def test_shapes_that_do_not_broadcast():
    @make()
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + x_ref[:64]  # here

    build(kernel)


@refused(
    MissingRuleError,
    r"""
    HERE: there is no debug_callback in kernels
      expected: a function of the list in docs/functions.md
      try: pl.debug_print shows values; the host cannot be called from a kernel
    """,
)
def test_host_callback():
    @make()
    def kernel(x_ref, o_ref):
        jax.debug.callback(lambda x: None, x_ref[0, 0])  # here

    build(kernel)


@refused(
    MissingRuleError,
    r"""
    HERE: there is no fft in kernels
      expected: a function of the list in docs/functions.md
      try: compute it outside of the kernel, and pass the result
    """,
)
def test_within_a_jitted_function_of_jax():
    @make((64,), jnp.float32)
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.fft.fft(x_ref[0]).real  # here

    build(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: inlined code twice failed: ValueError: operand value cannot be None
    """,
)
def test_inline_code_that_uses_the_library_wrongly():
    layout = plgpu.Layout.WG_STRIDED((128,), 1)

    @make((128,))
    def kernel(x_ref, o_ref):
        @plgpu.inline_mgpu(
            arg_types=(layout,),
            return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, layout),
            values="pallasite",
        )
        def twice(ctx, x):
            return x.map(lambda value: ops.add(value, None))  # here

        o_ref[...] = twice(x_ref[...])

    build(kernel, array(128))


@refused(
    InvalidValueError,
    r"""
    HERE: result 0 of inlined code has another layout than return_type says
      got: strided(vector 1)
      expected: strided(vector 2)
    """,
)
def test_inline_code_that_returns_another_layout():
    layout = plgpu.Layout.WG_STRIDED((256,), 1)

    @make((256,))
    def kernel(x_ref, o_ref):
        @plgpu.inline_mgpu(
            arg_types=(layout,),
            return_type=plgpu.ShapeDtypeStruct(
                (256,), jnp.float32, plgpu.Layout.WG_STRIDED((256,), 2)
            ),
        )
        def same(ctx, x):
            return x

        o_ref[...] = same(x_ref[...])  # here

    build(kernel, array(256))
