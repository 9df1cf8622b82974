"""Inlined code with arrays of ``jax.experimental.mosaic.gpu``."""

from __future__ import annotations

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from kernels import array, compile_to_ptx, in_order, make
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, PallasiteError
from pallasite.lowering.arrays import RegisterArray

Layout = plgpu.Layout
FragmentedArray = mgpu.FragmentedArray


def result(shape, dtype, layout):
    return plgpu.ShapeDtypeStruct(shape, dtype, layout)


def splat(value, shape, layout=None, signed=None):
    return FragmentedArray.splat(value, shape, layout, is_signed=signed)


def f32(value):
    return mgpu.c(value, ir.F32Type.get())


def i32(value):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def inputs(shape, dtype, seed=0):
    dtype = np.dtype(dtype)
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if dtype.kind == "u" else -7
        return generator.integers(low, 8, shape).astype(dtype)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    return generator.uniform(0.5, 2, shape).astype(dtype)


def mapped(function, x, layout, out_dtype=None, **arguments):
    """Runs inlined code on all of an array, in a kernel of one block."""
    out_dtype = out_dtype or x.dtype
    code = plgpu.inline_mgpu(
        arg_types=(layout,), return_type=result(x.shape, out_dtype, layout), **arguments
    )(lambda ctx, a: function(a))

    def body(x_ref, o_ref):
        o_ref[...] = code(plgpu.load(x_ref, layout=layout, optimized=False))

    out = jax.ShapeDtypeStruct(x.shape, out_dtype)
    return np.asarray(plgpu.kernel(body, out_type=out)(x))


LAYOUTS = {
    "WGMMA": (Layout.WGMMA, mgpu.WGMMA_LAYOUT, (128, 24)),
    "WGMMA_8BIT": (Layout.WGMMA_8BIT, mgpu.WGMMA_LAYOUT_8BIT, (64, 32)),
    "WGMMA_UPCAST_4X": (Layout.WGMMA_UPCAST_4X, mgpu.WGMMA_LAYOUT_UPCAST_4X, (64, 64)),
    "TCGEN05_TMEM_NATIVE": (Layout.TCGEN05_TMEM_NATIVE, mgpu.TMEM_NATIVE_LAYOUT, (128, 16)),
    "WGMMA_ROW": (Layout.WGMMA.reduce(1), mgpu.WGMMA_ROW_LAYOUT, (128,)),
    "WG_STRIDED": (
        Layout.WG_STRIDED((6, 128), vec_size=2),
        mgpu.WGStridedFragLayout((6, 128), 2),
        (6, 128),
    ),
    "WG_STRIDED_1": (
        Layout.WG_STRIDED((384,), vec_size=1),
        mgpu.WGStridedFragLayout((384,), 1),
        (384,),
    ),
}


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool"])
@pytest.mark.sampled
def test_arguments_and_results(semantics, name, dtype):
    """Every register arrives where the other side expects it, and comes back."""
    layout, theirs, shape = LAYOUTS[name]
    x = inputs(shape, dtype)

    def check(a):
        assert a.layout == theirs and a.shape == shape
        assert a.is_signed is mgpu.utils.is_signed(x.dtype)
        return a

    np.testing.assert_array_equal(mapped(check, x, layout), x)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(alone=("semantics", "name"))
def test_indices_of_elements(semantics, name):
    """What the other side takes an element's indices to be are its indices here."""
    layout, theirs, shape = LAYOUTS[name]
    signless = ir.IntegerType.get_signless

    def indices(a):
        def linear(*index):
            total = index[0]
            for i, extent in zip(index[1:], shape[1:], strict=True):
                size = mgpu.c(extent, ir.IndexType.get())
                total = arith.addi(arith.muli(total, size), i)
            return arith.index_cast(signless(32), total)

        return FragmentedArray.build(shape, theirs, linear, is_signed=True) + a

    zeros = np.zeros(shape, np.int32)
    expected = np.arange(zeros.size, dtype=np.int32).reshape(shape)
    np.testing.assert_array_equal(mapped(indices, zeros, layout), expected)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats(semantics, dtype):
    """They are integers in our registers, and floats in theirs."""
    x = inputs((64, 64), dtype)
    wide = mapped(
        lambda a: a.astype(ir.F16Type.get()), x, Layout.WGMMA_UPCAST_4X, out_dtype=jnp.float16
    )
    np.testing.assert_array_equal(wide, x.astype(np.float16))
    back = mapped(
        lambda a: a.astype(mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))),
        wide.astype(np.float32),
        Layout.WGMMA_UPCAST_4X,
        out_dtype=dtype,
    )
    np.testing.assert_array_equal(back.view(np.uint8), x.view(np.uint8))
    zeros = mapped(
        lambda a: splat(mgpu.c(1.5, a.mlir_dtype), a.shape, a.layout), x, Layout.WGMMA_UPCAST_4X
    )
    np.testing.assert_array_equal(zeros.astype(np.float32), 1.5)


@pytest.mark.runs_kernels
def test_narrow_integers(semantics):
    x = inputs((64, 64), jnp.int4)
    wide = mapped(
        lambda a: a.astype(ir.IntegerType.get_signless(8), is_signed=True),
        x,
        Layout.WGMMA_UPCAST_4X,
        out_dtype=jnp.int8,
    )
    np.testing.assert_array_equal(wide, x.astype(np.int8))
    narrow = mapped(
        lambda a: a.astype(mgpu.utils.dtype_to_ir_type(jnp.float8_e4m3fn)),
        x,
        Layout.WGMMA_UPCAST_4X,
        out_dtype=jnp.float8_e4m3fn,
    )
    np.testing.assert_array_equal(narrow.astype(np.float32), x.astype(np.float32))


FUNCTIONS = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": jnp.log,
    "log2": jnp.log2,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "sqrt": jnp.sqrt,
    "rsqrt": jax.lax.rsqrt,
    "erf": jax.scipy.special.erf,
    "abs": jnp.abs,
    "round": jnp.round,
}


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.WG_STRIDED((64, 16), vec_size=1)], ids=str)
@pytest.mark.sampled(alone=("layout",))
def test_functions(name, layout):
    """Functions without an accurate instruction are those of our own arrays."""
    x = inputs((64, 16), "float32") + np.float32(0.01)
    out = mapped(lambda a: getattr(a, name)(), x, layout)
    np.testing.assert_allclose(out, FUNCTIONS[name](x), rtol=3e-7, atol=1e-7)


@pytest.mark.runs_kernels
def test_functions_inside_of_branches():
    def code(a):
        squared = a * a

        @mgpu.fori(i32(3), squared)
        def looped(i, carried):
            return (-carried).exp() + a**1.5

        return looped.result

    x = inputs((64, 16), "float32")
    expected = x * x
    for _ in range(3):
        expected = np.exp(-expected) + x**1.5
    np.testing.assert_allclose(mapped(code, x, Layout.WGMMA), expected, rtol=1e-5)


@pytest.mark.runs_kernels
def test_approximate_functions():
    x = inputs((64, 16), "float32")
    out = mapped(lambda a: a.exp(approx=True) + a.tanh(approx=True), x, Layout.WGMMA)
    np.testing.assert_allclose(out, np.exp(x) + np.tanh(x), rtol=1e-3)


@pytest.mark.runs_kernels
def test_scalars_and_trees(semantics):
    """Scalars are splats; arguments and results may be trees."""

    @plgpu.inline_mgpu(
        arg_types=({"a": Layout.WGMMA, "n": Layout.WG_SPLAT},),
        return_type=(
            result((64, 8), jnp.float32, Layout.WGMMA),
            {"n": result((), jnp.uint32, Layout.WG_SPLAT)},
        ),
    )
    def code(ctx, args):
        a, n = args["a"], args["n"]
        assert n.layout == mgpu.WGSplatFragLayout(()) and n.is_signed
        scaled = a * splat(arith.sitofp(ir.F32Type.get(), n.registers.item()), a.shape)
        return scaled, {"n": n + 1}

    def body(x_ref, n_ref, o_ref, m_ref):
        x = plgpu.load(x_ref, layout=Layout.WGMMA, optimized=False)
        scaled, more = code({"a": x, "n": n_ref[0]})
        o_ref[...] = scaled
        m_ref[0] = more["n"]

    out = (jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.uint32))
    x = inputs((64, 8), "float32")
    scaled, more = plgpu.kernel(body, out_type=out)(x, np.array([3], np.int32))
    np.testing.assert_array_equal(scaled, x * 3)
    assert more[0] == 4


@pytest.mark.runs_kernels
def test_splats(semantics):
    """A splat is a result for every layout, and the value of another sign too."""

    @plgpu.inline_mgpu(
        return_type=(
            result((64, 16), jnp.float32, Layout.WGMMA),
            result((64, 16), jnp.int32, Layout.WG_SPLAT((64, 16))),
            result((64, 16), jnp.bool_, Layout.WG_SPLAT((64, 16))),
        )
    )
    def code(ctx):
        yes = arith.constant(ir.IntegerType.get_signless(1), 1)
        return (
            splat(f32(2.5), (64, 16)),
            splat(i32(-3), (64, 16), signed=False),
            splat(yes, (64, 16), signed=False),
        )

    def body(o_ref):
        x, n, yes = code()
        o_ref[...] = jnp.where(yes, x + n.astype(jnp.float32), 0.0)

    out = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 16), jnp.float32))()
    np.testing.assert_array_equal(out, -0.5)


@pytest.mark.runs_kernels
def test_own_arrays_are_results_too():
    def code(a):
        assert isinstance(a, FragmentedArray)
        return RegisterArray.constant(7.0, np.float32, (64, 8))

    np.testing.assert_array_equal(mapped(code, inputs((64, 8), "float32"), Layout.WGMMA), 7)


@pytest.mark.runs_kernels
def test_their_arrays_are_results_of_code_with_ours():
    def code(a):
        assert isinstance(a, RegisterArray)
        return splat(f32(2.0), (64, 8), mgpu.WGMMA_LAYOUT)

    x = inputs((64, 8), "float32")
    np.testing.assert_array_equal(mapped(code, x, Layout.WGMMA, values="pallasite"), 2)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("cluster", [(), (2,)])
def test_ids(semantics, cluster):
    """Blocks, clusters and threads are those of the launch."""
    dimension = gpu.Dimension

    @plgpu.inline_mgpu(return_type=result((4,), jnp.int32, Layout.WG_SPLAT((4,))))
    def code(ctx):
        assert ctx.cluster_size == ((2, 1, 1) if cluster else (1, 1, 1))
        number = arith.addi(gpu.block_id(dimension.x), mgpu.utils.cluster_idx())
        sizes = arith.muli(gpu.grid_dim(dimension.x), gpu.block_dim(dimension.x))
        total = arith.addi(arith.muli(sizes, mgpu.c(100, sizes.type)), number)
        word = arith.index_cast(ir.IntegerType.get_signless(32), total)
        word = arith.addi(word, mgpu.warpgroup_idx())
        return splat(word, (4,), signed=True)

    def body(o_ref):
        block = jax.lax.axis_index("b")
        place = (block, jax.lax.axis_index("c")) if cluster else (block, 0)
        o_ref[place] = code()

    count = 2 if cluster else 1
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3, count, 4), jnp.int32),
        grid=(3,),
        grid_names=("b",),
        cluster=cluster,
        cluster_names=("c",) if cluster else (),
    )
    blocks = np.arange(3 * count).reshape(3, count)
    expected = 3 * count * 128 * 100 + blocks + np.arange(count)
    np.testing.assert_array_equal(kernel()[..., 0], expected)


@pytest.mark.runs_kernels
def test_two_warpgroups(semantics):
    """Barriers of a warpgroup do not meet those of the other one."""

    @plgpu.inline_mgpu(
        arg_types=(Layout.WGMMA, plgpu.RefType()),
        return_type=result((64,), jnp.float32, Layout.WGMMA.reduce(1)),
    )
    def rows(ctx, a, scratch):
        del scratch
        mgpu.warpgroup_barrier()
        number = mgpu.warpgroup_idx()
        shift = arith.uitofp(ir.F32Type.get(), number)
        return a.reduce("add", 1) + shift

    def body(x_ref, o_ref, scratch):
        wg = jax.lax.axis_index("wg")
        x = plgpu.load(x_ref.at[wg], layout=Layout.WGMMA, optimized=False)
        o_ref[wg] = rows(x, scratch)

    x = inputs((2, 64, 32), "float32")
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="wg",
    )
    np.testing.assert_allclose(kernel(x), x.sum(2) + np.arange(2)[:, None], rtol=1e-5)


@pytest.mark.runs_kernels
def test_warps(semantics):
    """Where code runs per warp, arrays are scalars."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), Layout.WG_SPLAT),
        return_type=result((), jnp.int32, Layout.WG_SPLAT),
    )
    def code(ctx, ref, warp):
        assert warp.shape == ()
        mgpu.utils.warp_barrier()
        with mgpu.single_thread(mgpu.ThreadSubset.WARP):
            place = arith.index_cast(ir.IndexType.get(), warp.registers.item())
            mgpu.utils.memref.store((warp * warp).registers.item(), ref, [place])
        return warp + splat(i32(10), (), signed=True)

    def body(squares, sums):
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp != 2)
            def _():
                sums[warp] = code(squares, warp)

            @pl.when(warp == 2)
            def _():
                squares[2] = sums[2] = jnp.int32(-1)

    out = (jax.ShapeDtypeStruct((4,), jnp.int32),) * 2
    squares, sums = plgpu.kernel(body, out_type=out)()
    np.testing.assert_array_equal(squares, [0, 1, -1, 9])
    np.testing.assert_array_equal(sums, [10, 11, -1, 13])


@pytest.mark.runs_kernels
def test_printing(capfd):
    def code(a):
        mgpu.debug_print("number {} and {}", i32(42), f32(0.5))
        return a

    mapped(code, inputs((64, 8), "float32"), Layout.WGMMA)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("number 42 and 0.500000") == 1


def compiled(function, return_type, arg_types=()):
    code = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(function)

    @make((64, 8))
    def kernel(x, o):
        o[...] = code(*([x[...]] if arg_types else []))

    return compile_to_ptx(kernel, array(64, 8))


WGMMA = result((64, 8), jnp.float32, Layout.WGMMA)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda ctx: f32(1.0), InvalidTypeError, r"not an array(.|\n)*FragmentedArray"),
        (
            lambda ctx: splat(i32(1), (64, 8), signed=True),
            InvalidTypeError,
            r"a FragmentedArray of i32, shape \[64, 8\](.|\n)*expected: float32, which is f32",
        ),
        (
            lambda ctx: splat(f32(1.0), (64,)),
            InvalidTypeError,
            r"float32\[64\](.|\n)*expected: float32\[64, 8\]",
        ),
        (
            lambda ctx: splat(f32(1.0), (64, 8), mgpu.WGStridedFragLayout((64, 8), 4)),
            InvalidValueError,
            r"strided\(vector 4\)(.|\n)*expected: WGMMA",
        ),
        (
            lambda ctx: ctx.to_remote(None, None),
            PallasiteError,
            r"has no 'to_remote'(.|\n)*async_copy",
        ),
        (
            lambda ctx: splat(i32(1), (64, 8)),
            InvalidValueError,
            r"test_mosaic_values.py(.|\n)*failed: TypeError: is_signed",
        ),
    ],
)
def test_wrong_results(lane_semantics, function, kind, message):
    with pytest.raises(kind, match=message) as error:
        compiled(function, WGMMA)
    assert "test_mosaic_values.py" in str(error.value)


def test_layout_of_an_argument(lane_semantics):
    code = plgpu.inline_mgpu(arg_types=(Layout.WGMMA,))(lambda ctx, x: None)

    @make((64, 64))
    def kernel(x, o):
        value = plgpu.layout_cast(x[...], Layout.WG_STRIDED((64, 64), vec_size=4))
        code(value + 1.0)
        o[...] = value

    with pytest.raises(InvalidValueError, match=r"another layout(.|\n)*strided(.|\n)*WGMMA"):
        compile_to_ptx(kernel, array(64, 64))


def test_layouts_that_no_fragmented_array_has():
    layout = Layout.WG_STRIDED((64,), vec_size=1)
    code = plgpu.inline_mgpu(arg_types=(layout,))(lambda ctx, x: None)

    @make((64,))
    def kernel(x, o):
        code(x[...])
        o[...] = x[...]

    with pytest.raises(InvalidValueError, match=r"of a multiple of 128 vectors"):
        compile_to_ptx(kernel, array(64))


def test_operations_without_translation():
    def code(ctx):
        i64 = ir.IntegerType.get_signless(64)
        ir.Operation.create("gpu.subgroup_id", results=[ir.IndexType.get()])
        del i64
        return splat(f32(1.0), (64, 8))

    with pytest.raises(PallasiteError, match=r"'gpu.subgroup_id' has no translation"):
        compiled(code, WGMMA)


def test_code_stays_where_it_is():
    """Inlined instructions come between what is before and after, and nothing else is emitted."""

    def code(ctx, x):
        mgpu.commit_shared()
        return x * x

    ptx = compiled(code, WGMMA, (Layout.WGMMA,))
    in_order(ptx, r"ld\.global\.v2", r"fence\.proxy\.async", r"bar\.sync", r"mul\.", r"st\.global")
    assert "%ntid" not in ptx and "%tid.y" not in ptx
