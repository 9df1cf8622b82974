"""Inlined code with our own values: what it gets, what it may return."""

from __future__ import annotations

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import python_processes

from kernels import array, compile_to_ptx, in_order, make
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite.ir import ops
from pallasite.language.kernel import kernel
from pallasite.language.memory import SMEM
from pallasite.language.transforms import SwizzleTransform, TilingTransform
from pallasite.lowering.arrays import RegisterArray, elementwise
from pallasite_std.memory.transfers import load_array
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives import inline
from pallasite_std.primitives.inline import RefType, ShapeDtypeStruct
from pallasite_std.primitives.layouts import Layout, layout_cast

inline_mgpu = functools.partial(inline.inline_mgpu, values="pallasite")
STRIDED = Layout.WG_STRIDED((256,), vec_size=2)
RESULT = ShapeDtypeStruct((256,), jnp.float32, STRIDED)
TRANSFORMS = (TilingTransform((8, 32)), SwizzleTransform(128))


def run(function):
    """Compiles a kernel that calls ``function`` on a reference and an array of 256 elements."""
    inlined = inline_mgpu(arg_types=(RefType(), STRIDED), return_type=RESULT)(function)

    @make((256,))
    def kernel(x, o):
        o[...] = inlined(x, x[...])

    return compile_to_ptx(kernel, array(256))


def sum_of_both(launch, ref, x):
    """The code that most tests inline."""
    loaded = load_array(launch, ref, x.layout)
    return elementwise(ops.arith.addf, [x, loaded], np.float32)


def test_references_and_arrays():
    # The declared layout is a hint for the load in the kernel.
    in_order(run(sum_of_both), r"ld\.global\.v2", r"add\.rn\.f32", r"st\.global\.v2")


def test_trees_and_scalars():
    @inline_mgpu(
        arg_types=({"a": STRIDED, "n": Layout.WG_SPLAT},),
        return_type=(RESULT, ShapeDtypeStruct((), jnp.int32, Layout.WG_SPLAT)),
    )
    def inlined(launch, args):
        a, n = args["a"], args["n"]
        assert a.shape == (256,) and n.shape == () and n.dtype == np.int32
        return a.map(lambda r: ops.arith.mulf(r, r)), RegisterArray.splat(launch.warp_id, np.int32)

    @make((256,))
    def kernel(x, n, o):
        y, warp = inlined({"a": x[...], "n": n[0]})
        o[...] = y + warp.astype(jnp.float32)

    compile_to_ptx(kernel, array(256), array(1, dtype=jnp.int32))


def test_splat_results_are_spread():
    run(lambda launch, ref, x: RegisterArray.constant(1.0, np.float32, (256,)))


def test_instructions_of_the_hardware():
    @inline_mgpu(arg_types=(), return_type=None)
    def fence(launch):
        ops.inline_assembly("fence.proxy.async;", "~{memory}")

    @make((256,))
    def kernel(x, o):
        fence()
        o[...] = x[...]

    in_order(compile_to_ptx(kernel, array(256)), r"fence\.proxy\.async;")


def slot_kernel(transforms):
    """Inlined code on one slot of a tiled and swizzled buffer."""

    @inline_mgpu(arg_types=(RefType(transforms),), return_type=None)
    def store_zero(launch, ref):
        assert ref.shape == (64, 64)
        pointer = ref.address()
        with ops.when(launch.warpgroup_leader):
            ops.store(ops.constant(0.0, ops.parse_type("f32")), pointer, alignment=4)

    @make((64, 64), scratch_types=[SMEM((2, 64, 64), jnp.float32, transforms=TRANSFORMS)])
    def kernel(x, n, o, s):
        store_zero(s.at[n[0]])
        o[...] = s[0]

    return compile_to_ptx(kernel, array(64, 64), array(1, dtype=jnp.int32))


def test_slot_of_a_tiled_buffer():
    in_order(slot_kernel(TRANSFORMS), r"st\.shared\.b32", r"ld\.shared")


@pytest.mark.parametrize(
    "transforms",
    [
        (),
        (TilingTransform((8, 32)),),
        (TilingTransform((8, 32)), SwizzleTransform(128), TilingTransform((2, 2))),
        (TilingTransform((16, 32)), SwizzleTransform(128)),
    ],
)
def test_transforms_must_match(transforms):
    with pytest.raises(InvalidValueError, match="lies in memory in another way") as error:
        slot_kernel(transforms)
    assert "test_inline.py" in str(error.value)


def test_layout_of_an_argument(lane_semantics):
    @inline_mgpu(arg_types=(Layout.WGMMA,), return_type=None)
    def inlined(launch, x):
        del launch, x

    @make((64, 64))
    def kernel(x, o):
        value = layout_cast(x[...], Layout.WG_STRIDED((64, 64), vec_size=4))
        inlined(value + 1.0)
        o[...] = value

    with pytest.raises(InvalidValueError, match=r"another layout(.|\n)*strided(.|\n)*WGMMA"):
        compile_to_ptx(kernel, array(64, 64))


@pytest.mark.runs_kernels
def test_an_argument_is_converted():
    """Inference brings the argument into the layout that the inlined code takes."""
    result = ShapeDtypeStruct((64, 64), jnp.float32, Layout.WGMMA)

    @inline_mgpu(arg_types=(Layout.WGMMA,), return_type=result)
    def inlined(launch, x):
        return elementwise(ops.arith.mulf, [x, x], np.float32)

    def body(x, o):
        value = layout_cast(x[...], Layout.WG_STRIDED((64, 64), vec_size=4))
        o[...] = inlined(value + 1.0) + value

    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    out = kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))(x)
    np.testing.assert_allclose(out, (x + 1) ** 2 + x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda launch, ref, x: (x, x), InvalidTypeError, "another structure"),
        (lambda launch, ref, x: None, InvalidTypeError, "another structure"),
        (lambda launch, ref, x: x.registers[0], InvalidTypeError, "not an array in registers"),
        (
            lambda launch, ref, x: RegisterArray.constant(1, np.int32, (256,)),
            InvalidTypeError,
            r"int32\[256\](.|\n)*expected: float32\[256\]",
        ),
        (
            lambda launch, ref, x: RegisterArray.constant(1.0, np.float32, (128,)),
            InvalidTypeError,
            r"float32\[128\]",
        ),
        (
            lambda launch, ref, x: load_array(
                launch, ref, Layout.WG_STRIDED((256,), vec_size=1).resolve((256,), np.float32)
            ),
            InvalidValueError,
            "another layout than return_type",
        ),
    ],
)
def test_wrong_results(function, kind, message):
    with pytest.raises(kind, match=message):
        run(function)


def test_errors_of_the_users_code_pass_through():
    def broken(launch, ref, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(broken)


def test_traced_values_are_checked_when_called():
    with pytest.raises(InvalidTypeError, match="argument 0 is an array"):
        inlined = inline_mgpu(arg_types=(RefType(),))(lambda launch, ref: None)

        @make((256,))
        def kernel(x, o):
            inlined(x[...])

        jax.make_jaxpr(kernel)(jnp.zeros(256))


@pytest.mark.runs_kernels
def test_scalars_of_warps():
    """Where code runs per warp, inlined code takes and returns scalars."""
    scalar = ShapeDtypeStruct((), jnp.int32, Layout.WG_SPLAT)

    @inline_mgpu(arg_types=(Layout.WG_SPLAT,), return_type=scalar)
    def inlined(launch, x):
        return x.map(lambda r: ops.multiply(r, r))

    def body(out):
        @warp_map
        def _(warp):
            out[warp] = inlined(warp + 3)

    result = kernel(body, out_type=jax.ShapeDtypeStruct((4,), jnp.int32))()
    np.testing.assert_array_equal(result, [9, 16, 25, 36])


def test_arrays_of_warps():
    @inline_mgpu(return_type=RESULT)
    def inlined(launch):
        return RegisterArray.constant(1.0, np.float32, (256,))

    @make((256,))
    def wrong(x, o):
        @warp_map
        def _(warp):
            inlined()

    with pytest.raises(
        InvalidValueError, match="warp-mapped region takes or returns an array"
    ) as e:
        compile_to_ptx(wrong, array(256))
    assert "float32[256]" in str(e.value)


LAZY = """
import sys
import jax, jax.numpy as jnp
from jaxlib.mlir.dialects import nvvm
import pallasite
from pallasite import gpu as plgpu
from pallasite.ir import ops

@plgpu.inline_mgpu(values=VALUES)
def fence(ctx):
    ops.inline_assembly("fence.proxy.async;", "~{memory}")

def body(x, o):
    fence()
    o[...] = x[...]

x = jax.ShapeDtypeStruct((256,), jnp.float32)
compiled = pallasite.compile(plgpu.kernel(body, out_type=x), x, target="sm_90a")
assert "fence.proxy.async" in compiled.ptx
assert "jax.experimental.mosaic.gpu" not in sys.modules
"""


@pytest.mark.parametrize("values", inline.VALUES)
def test_the_other_values_are_imported_when_code_needs_them(values):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = LAZY.replace("VALUES", repr(values))
    done = python_processes.run(["-c", code], env=environment)
    assert done.returncode == 0, done.stderr
