"""Warpgroup semantics: uses of shared memory, or of an array, that no layout suits."""

from __future__ import annotations

import textwrap

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from refusals import array, build, make, refused

from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, SourceLocation
from pallasite.layouts import named, strided
from pallasite.lowering.inference.problem import Fixed, Place, Problem, Variable
from pallasite.lowering.inference.solver import Solver
from pallasite_std.inference.conflicts import check_solution

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
INPUTS = (array(64, 64, dtype=jnp.bfloat16), array(64, 128, dtype=jnp.bfloat16))
A = plgpu.SMEM((64, 64), jnp.bfloat16)
B = plgpu.SMEM((64, 128), jnp.bfloat16)
ACC = plgpu.ACC((64, 128), jnp.float32)


@refused(
    InvalidValueError,
    r"""
    HEREproduct: b is used in ways that no layout of shared memory suits
      got: bfloat16[64, 128], allocated at HEREkernel
        HEREcopy: an asynchronous copy writes it
          needs row-major
          not TilingTransform((8, 64)), SwizzleTransform(128): the slice of 4 elements from \
              6 of dimension 0 cuts through a tile of shape (64, 128), which lies in memory as \
              [(8:1024 8:64), (2:512 64:1)] swizzle 128
        HEREproduct: wgmma reads it as b
          needs TilingTransform((8, 64)), SwizzleTransform(128), or one of 3 others
          not row-major: the tensor cores cannot read b from shared memory as it lies there
      expected: uses that can do with one layout
      try: give one of them an allocation of its own, and copy: other[...] = b[...]; or say \
          how it lies with transforms=, and change the use that this does not suit
    """,
)
def test_copy_of_rows_that_are_no_tiles():
    scratch = [A, B, plgpu.Barrier()]

    @make((64, 128), scratch_types=scratch, compiler_params=PARAMS)  # here kernel
    def kernel(a_ref, b_ref, o_ref, a, b, barrier):
        a[...] = a_ref[...]
        plgpu.copy_gmem_to_smem(b_ref.at[:4], b.at[6:10], barrier)  # here copy
        plgpu.barrier_wait(barrier)

        def scope(acc):
            plgpu.wgmma(acc, a, b)  # here product
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, ACC)

    build(kernel, *INPUTS)


@refused(
    InvalidValueError,
    r"""
    HEREstore: b is used in ways that no layout of shared memory suits
      got: bfloat16[64, 128], allocated at HEREscope
        HEREproduct: wgmma reads it as b
          needs TilingTransform((8, 64)), SwizzleTransform(128), or one of 3 others
          not row-major: the tensor cores cannot read b from shared memory as it lies there
        HEREstore: the store of a part of it
          needs row-major
          not TilingTransform((8, 64)), SwizzleTransform(128): the slice of 8 elements from \
              20 of dimension 0 cuts through a tile of shape (64, 128), which lies in memory as \
              [(8:1024 8:64), (2:512 64:1)] swizzle 128
      expected: uses that can do with one layout
      try: give one of them an allocation of its own, and copy: other[...] = b[...]; or say \
          how it lies with transforms=, and change the use that this does not suit
    """,
)
def test_store_of_rows_that_are_no_tiles():
    @make((64, 128), scratch_types=[A], compiler_params=PARAMS)
    def kernel(a_ref, b_ref, o_ref, a):
        def scope(acc, b):
            a[...] = a_ref[...]
            b[...] = b_ref[...]
            plgpu.wgmma(acc, a, b)  # here product
            plgpu.wgmma_wait(0)
            b[20:28] = b_ref[:8]  # here store
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, ACC, B)  # here scope

    build(kernel, *INPUTS)


@refused(
    InvalidValueError,
    r"""
    HEREproduct: b is used in ways that no layout of shared memory suits
      got: bfloat16[64, 128], allocated at HEREkernel
        HEREinline: inlined code declares RefType(transforms=())
          needs row-major
          not TilingTransform((8, 64)), SwizzleTransform(128): inlined code declares another \
              memory layout
        HEREproduct: wgmma reads it as b
          needs TilingTransform((8, 64)), SwizzleTransform(128), or one of 3 others
          not row-major: the tensor cores cannot read b from shared memory as it lies there
      expected: uses that can do with one layout
      try: give one of them an allocation of its own, and copy: other[...] = b[...]; or say \
          how it lies with transforms=, and change the use that this does not suit
    """,
)
def test_inlined_code_that_declares_no_transforms():
    @make((64, 128), scratch_types=[A, B], compiler_params=PARAMS)  # here kernel
    def kernel(a_ref, b_ref, o_ref, a, b):
        a[...] = a_ref[...]
        b[...] = b_ref[...]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def inlined(ctx, ref):
            raise AssertionError("it is not called")

        inlined(b)  # here inline

        def scope(acc):
            plgpu.wgmma(acc, a, b)  # here product
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, ACC)

    build(kernel, *INPUTS)


@refused(
    InvalidValueError,
    r"""
    HERE: b is used in ways that no layout of shared memory suits
      got: bfloat16[64, 128], allocated at HEREkernel
        HERE: inlined code declares RefType(transforms=(TilingTransform(tiling=(8, 32)), \
            SwizzleTransform(swizzle=64)))
          needs TilingTransform((8, 32)), SwizzleTransform(64)
          not TilingTransform((8, 64)), SwizzleTransform(128): inlined code declares another \
              memory layout
        HERE: inlined code declares RefType(transforms=(TilingTransform(tiling=(8, 64)), \
            SwizzleTransform(swizzle=128)))
          needs TilingTransform((8, 64)), SwizzleTransform(128)
          not TilingTransform((8, 32)), SwizzleTransform(64): inlined code declares another \
              memory layout
      expected: uses that can do with one layout
      try: give one of them an allocation of its own, and copy: other[...] = b[...]; or say \
          how it lies with transforms=, and change the use that this does not suit
    """,
)
def test_inlined_code_that_declares_other_transforms():
    @make((64, 128), scratch_types=[B], compiler_params=PARAMS)  # here kernel
    def kernel(a_ref, b_ref, o_ref, b):
        b[...] = b_ref[...]
        for swizzle in (64, 128):
            tiles = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiles),))
            def inlined(ctx, ref):
                raise AssertionError("it is not called")

            inlined(b)  # here

        o_ref[...] = b[...].astype(jnp.float32)

    build(kernel, *INPUTS)


@refused(
    InvalidValueError,
    r"""
    HERE: the tensor cores cannot read b from shared memory as it lies there
      got: (64, 128) laid out as [(8:1024 8:32), (4:256 32:1)]
      expected: tiles of 8 rows as wide as the swizzle, or of 16 bytes without swizzle
      try: plgpu.SMEM(..., transforms=(plgpu.TilingTransform((8, 64)), \
          plgpu.SwizzleTransform(128)))
    """,
)
def test_declared_transforms_are_kept():
    """The message is that of lane semantics: inference has no choice."""
    tiles = (plgpu.TilingTransform((8, 32)),)
    b_type = plgpu.SMEM((64, 128), jnp.bfloat16, transforms=tiles)

    @make((64, 128), scratch_types=[A, b_type], compiler_params=PARAMS)
    def kernel(a_ref, b_ref, o_ref, a, b):
        a[...] = a_ref[...]
        b[...] = b_ref[...]

        def scope(acc):
            plgpu.wgmma(acc, a, b)  # here
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, ACC)

    build(kernel, *INPUTS)


@refused(
    InvalidValueError,
    r"""
    HERE: the shapes do not fit together as acc (m, n) += a (m, k) @ b (k, n)
      got: acc (64, 128), a (60, 64), b (64, 128)
      expected: a (64, k) and b (k, 128)
    """,
)
def test_what_no_layout_suits():
    """One use alone: the rule of lane semantics says more about it."""

    @make((64, 128), scratch_types=[plgpu.SMEM((60, 64), jnp.bfloat16), B], compiler_params=PARAMS)
    def kernel(a_ref, b_ref, o_ref, a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)  # here
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, ACC)

    build(kernel, *INPUTS)


def test_two_pinned_layouts():
    """Only the rules of a plugin can ask for this."""
    lines = [SourceLocation("kernel.py", number, 0, "body") for number in (1, 2, 3)]
    problem = Problem()
    layouts = (named.resolve("WGMMA", (), {}, (64, 64), 32), strided((64, 64), 4))
    array = problem.variable(
        Variable((64, 64), 32, [], True, Place(lines[0], "load"), dtype="float32")
    )
    for line, layout, why in zip(lines[1:], layouts, ("one reads it", "two reads it"), strict=True):
        problem.factors.append(Fixed(Place(line, why), 1.0, array, layout, 32, True, why=why))
    solver = Solver(problem)
    solver.solve()
    with pytest.raises(InvalidValueError) as caught:
        check_solution(problem, solver)
    assert (
        str(caught.value)
        == textwrap.dedent(
            """
        kernel.py:3 (body): an array is needed in two layouts, and cannot be converted in between
          got: float32[64, 64], made at kernel.py:1 (body)
            kernel.py:2 (body): one reads it
              needs WGMMA
            kernel.py:3 (body): two reads it
              needs strided(vector 4)
          expected: one layout
          try: make the array twice, once for each use
        """
        ).strip()
    )
