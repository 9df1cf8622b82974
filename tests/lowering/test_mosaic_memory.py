"""Inlined code with memrefs."""

from __future__ import annotations

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm

from kernels import array, compile_to_ptx, in_order, make
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, PallasiteError, UnsupportedError

FragmentedArray = mgpu.FragmentedArray
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def index(value):
    return arith.index_cast(ir.IndexType.get(), mgpu.c(value, ir.IntegerType.get_signless(32)))


def inputs(shape, dtype="float32"):
    dtype = np.dtype(dtype)
    generator = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return generator.integers(-7, 8, shape).astype(dtype)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    return generator.standard_normal(shape).astype(dtype)


def run(code, x, out, scratch=(), transforms=(), **launch):
    """Runs ``code(context, x, out, *scratch)`` in a kernel of one block."""
    types = [plgpu.RefType(), plgpu.RefType()]
    inlined = plgpu.inline_mgpu(arg_types=(*types, *map(plgpu.RefType, transforms)))(code)

    def body(x_ref, o_ref, *refs):
        inlined(x_ref, o_ref, *refs)

    return np.asarray(
        plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(*out), scratch_types=list(scratch), **launch
        )(x)
    )


def signed(x):
    return mgpu.utils.is_signed(x.dtype)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "int64"])
@pytest.mark.sampled(alone=("semantics", "dtype"))
def test_strided(semantics, dtype, request):
    if dtype == "int64":
        request.getfixturevalue("x64")
    x = inputs((32, 64), jnp.dtype(dtype))

    def code(ctx, x_ref, o_ref):
        assert x_ref.type.shape == [32, 64] and x_ref.type.memory_space is None
        FragmentedArray.load_strided(x_ref, is_signed=signed(x)).store_untiled(o_ref)

    np.testing.assert_array_equal(run(code, x, (x.shape, x.dtype)), x)


def test_accesses_are_wide(lane_semantics):
    """What is known of addresses is enough to move vectors at once."""

    def code(ctx, x_ref, o_ref):
        part = mgpu.memref_slice(x_ref, (mgpu.ds(gpu.block_id(gpu.Dimension.x), 32),))
        FragmentedArray.load_strided(part, vec_size=4).store_untiled(o_ref)

    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(code)
    kernel = make((32, 64))(lambda x, o: inlined(x, o))
    in_order(compile_to_ptx(kernel, array(64, 64)), r"ld\.global\.v4", r"st\.global\.v4")


@pytest.mark.runs_kernels
def test_unaligned_views(semantics):
    """Where vectors are not aligned, their elements are moved one by one."""

    def code(ctx, x_ref, o_ref):
        FragmentedArray.load_strided(mgpu.memref_slice(x_ref, (slice(1, 257),))).store_untiled(
            o_ref
        )

    x = inputs((512,))
    np.testing.assert_array_equal(run(code, x, ((256,), x.dtype)), x[1:257])


@pytest.mark.runs_kernels
def test_views(semantics):
    """Slices with known and unknown starts, reshapes, folds, and transpositions."""

    def code(ctx, x_ref, o_ref):
        low = mgpu.memref_slice(x_ref, (slice(0, 32),))
        high = mgpu.memref_slice(x_ref, (mgpu.ds(index(32), 32), slice(None)))
        flat = mgpu.memref_fold(mgpu.memref_unsqueeze(low, 0), 0, 3)
        shaped = mgpu.memref_reshape(high, (4, 8, 2, 64))
        FragmentedArray.load_strided(flat).store_untiled(mgpu.memref_slice(o_ref, (1,)))
        FragmentedArray.load_strided(shaped).store_untiled(
            mgpu.memref_reshape(mgpu.memref_slice(o_ref, (index(0),)), (4, 8, 2, 64))
        )

    x = inputs((64, 128))
    out = run(code, x, ((2, 4096), x.dtype))
    np.testing.assert_array_equal(out, x.reshape(2, 4096)[::-1])


@pytest.mark.runs_kernels
def test_transposed(semantics):
    def code(ctx, x_ref, o_ref):
        loaded = FragmentedArray.load_untiled(x_ref, layout=mgpu.WGMMA_LAYOUT, optimized=False)
        other = mgpu.memref_transpose(o_ref, (1, 0))
        moved = loaded.to_layout(mgpu.WGMMA_TRANSPOSED_LAYOUT)
        moved.store_untiled(other, optimized=False)

    x = inputs((64, 64))
    np.testing.assert_array_equal(run(code, x, (x.shape, x.dtype)), x.T)


@pytest.mark.runs_kernels
def test_scalars(semantics):
    """Single elements, also of booleans, which take a byte."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def code(ctx, numbers, flags, number):
        zero, two = index(0), index(2)
        value = memref.load(numbers, [zero, two])
        flag = memref.load(flags, [two])
        mgpu.warpgroup_barrier()
        chosen = arith.select(flag, value, mgpu.c(0.0, value.type))
        memref.store(chosen, number, [])
        no = arith.xori(flag, arith.constant(flag.type, 1))
        memref.store(no, flags, [two])
        mgpu.warpgroup_barrier()

    def body(x_ref, f_ref, o_ref, g_ref, flags):
        flags[...] = f_ref[...]
        code(x_ref, flags, o_ref)
        g_ref[...] = flags[...]

    x = inputs((3, 3))
    flags = np.resize([True, False, True, True], 128)
    out = (jax.ShapeDtypeStruct((), x.dtype), jax.ShapeDtypeStruct((128,), np.bool_))
    kernel = plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SMEM((128,), np.bool_)])
    number, left = kernel(x, flags)
    assert number == x[0, 2]
    flags[2] = False
    np.testing.assert_array_equal(left, flags)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("swizzle", [128, 64, 16])
@pytest.mark.sampled
def test_tiles(semantics, dtype, swizzle):
    """Code sees the shape that tiles give to shared memory, and knows the swizzle."""
    dtype = jnp.dtype(dtype)
    columns = 16 if swizzle == 16 and dtype.itemsize == 1 else swizzle // dtype.itemsize
    tiling = (8, columns)
    transforms = (plgpu.TilingTransform(tiling),)
    if swizzle > 16:
        transforms += (plgpu.SwizzleTransform(swizzle),)
    x = inputs((64, 128), dtype)
    # The other side knows no way around bank conflicts in tiles without a swizzle.
    load = dict(swizzle=swizzle, is_signed=signed(x), optimized=swizzle > 16)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, plgpu.Layout.WGMMA),
    )
    def code(ctx, ref):
        assert ref.type.shape == [8, 128 // columns, *tiling]
        assert mgpu.utils.is_smem_ref(ref)
        loaded = FragmentedArray.load_tiled(ref, **load)
        mgpu.warpgroup_barrier()
        loaded.store_tiled(ref, swizzle=swizzle, optimized=swizzle > 16)
        mgpu.warpgroup_barrier()
        return FragmentedArray.load_tiled(ref, **load)

    def body(x_ref, o_ref, slots, barrier):
        plgpu.copy_gmem_to_smem(x_ref, slots.at[1], barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = code(slots.at[1])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, dtype),
        scratch_types=[
            plgpu.SMEM((2, *x.shape), dtype, transforms=transforms),
            plgpu.Barrier(),
        ],
    )
    np.testing.assert_array_equal(np.asarray(kernel(x)).view(np.uint8), x.view(np.uint8))


@pytest.mark.runs_kernels
def test_reductions_through_shared_memory(semantics):
    def code(ctx, x_ref, o_ref, scratch):
        x = FragmentedArray.load_untiled(x_ref, layout=mgpu.WGMMA_LAYOUT, optimized=False)
        x.reduce("max", 0, scratch).store_untiled(o_ref, optimized=False)

    x = inputs((64, 128))
    out = run(code, x, ((128,), x.dtype), [plgpu.SMEM((512,), x.dtype)], [()])
    np.testing.assert_array_equal(out, x.max(0))


def stage(x_ref, shared):
    """Brings an array to tiles in shared memory, for copies."""
    loaded = FragmentedArray.load_untiled(x_ref, layout=mgpu.WGMMA_LAYOUT, optimized=False)
    loaded.store_tiled(shared, swizzle=128)
    mgpu.commit_shared()


TILES = mgpu.TileTransform((8, 32))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("part", ["all", "slice", "view", "unknown", "single", "turned"])
@pytest.mark.sampled(alone=("semantics", "part"))
def test_copies(semantics, part):
    """``async_copy`` writes an argument, or a part of one given in either way."""
    x = inputs((64, 64))

    def code(ctx, x_ref, o_ref, shared):
        stage(x_ref, shared)
        copy = dict(swizzle=128, gmem_transform=TILES)
        if part == "all":
            whole = mgpu.memref_slice(o_ref, (0,))
            ctx.async_copy(src_ref=shared, dst_ref=whole, **copy)
        elif part == "slice":
            ctx.async_copy(src_ref=shared, dst_ref=o_ref, gmem_slice=(index(1),), **copy)
        elif part == "view":
            rows = mgpu.memref_slice(shared, (slice(2, 4),))
            half = mgpu.memref_slice(o_ref, (1, slice(16, 32)))
            ctx.async_copy(src_ref=rows, dst_ref=half, **copy)
        elif part == "unknown":
            half = mgpu.memref_slice(o_ref, (index(1), mgpu.ds(index(16), 16)))
            rows = mgpu.memref_slice(shared, (mgpu.ds(index(2), 2),))
            ctx.async_copy(src_ref=rows, dst_ref=half, predicate=ctx.warpgroup_leader, **copy)
        elif part == "single":
            with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
                whole = mgpu.memref_slice(o_ref, (1,))
                ctx.async_copy(
                    src_ref=shared, dst_ref=whole, predicate=None, reduction_op="add", **copy
                )
        else:
            turned = mgpu.memref_transpose(shared, (1, 0, 2, 3))
            copy["gmem_transform"] = (TILES, mgpu.TransposeTransform((1, 0, 2, 3)))
            ctx.async_copy(src_ref=turned, dst_ref=o_ref, gmem_slice=(1,), **copy)
        if part == "single":
            nvvm.cp_async_bulk_wait_group(0)
        ctx.await_async_copy(0, await_read_only=part == "view")

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear(ctx, o_ref):
        zero = mgpu.c(0.0, ir.F32Type.get())
        FragmentedArray.splat(zero, (2, 64, 64)).store_untiled(o_ref)
        nvvm.fence_proxy(nvvm.ProxyKind.async_)
        mgpu.warpgroup_barrier()

    inlined = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(SWIZZLED))
    )(code)

    def body(x_ref, o_ref, shared):
        clear(o_ref)
        inlined(x_ref, o_ref, shared)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64, 64), x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype, transforms=SWIZZLED)],
    )
    expected = np.zeros((2, 64, 64), x.dtype)
    if part in ("view", "unknown"):
        expected[1, 16:32] = x[16:32]
    else:
        expected[0 if part == "all" else 1] = x
    np.testing.assert_array_equal(kernel(x), expected)


@pytest.mark.runs_kernels
def test_other_blocks(semantics):
    """Shared memory of another block of the cluster, through ``get_cluster_ref``."""

    def code(ctx, x_ref, o_ref, shared):
        FragmentedArray.load_strided(x_ref).store_untiled(shared)
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)
        own = gpu.cluster_block_id(gpu.Dimension.x)
        other = arith.subi(index(1), own)
        there = mgpu.get_cluster_ref(shared, gpu.Dimension.x, other)
        number = arith.index_cast(ir.IntegerType.get_signless(32), own)
        value = FragmentedArray.load_strided(there) + arith.sitofp(ir.F32Type.get(), number)
        value.store_untiled(mgpu.memref_slice(o_ref, (own,)))

    x = inputs((256,))
    out = run(
        code,
        x,
        ((2, 256), x.dtype),
        [plgpu.SMEM((256,), x.dtype)],
        [()],
        cluster=(2,),
        cluster_names=("c",),
    )
    np.testing.assert_array_equal(out, np.stack([x, x + np.float32(1)]))


def allocate():
    memref.alloca(ir.MemRefType.get((4,), ir.F32Type.get()), [], [])


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (
            lambda ctx, x, o, s: ctx.async_copy(src_ref=x, dst_ref=s),
            UnsupportedError,
            r"copies from shared to global memory(.|\n)*copy_gmem_to_smem",
        ),
        (
            lambda ctx, x, o, s: ctx.async_copy(src_ref=s, dst_ref=o, collective=(0,)),
            UnsupportedError,
            "does not take collective",
        ),
        (
            lambda ctx, x, o, s: ctx.async_copy(src_ref=s, dst_ref=o, swizzle=128),
            InvalidValueError,
            r"got: \[8, 2, 8, 32\](.|\n)*expected: \[64, 64\], which is \[64, 64\] after",
        ),
        (
            lambda ctx, x, o, s: ctx.async_copy(
                src_ref=s, dst_ref=mgpu.memref_transpose(o, (1, 0)), gmem_transform=TILES
            ),
            UnsupportedError,
            "no window of an argument",
        ),
        (
            lambda ctx, x, o, s: ctx.async_copy(
                src_ref=s, dst_ref=o, gmem_transform=mgpu.fragmented_array.Tiling(((8, 32),))
            ),
            UnsupportedError,
            r"a copy by a Tiling",
        ),
        (
            lambda ctx, x, o, s: allocate(),
            PallasiteError,
            r"'memref.alloca' has no translation",
        ),
    ],
)  # fmt: skip
def test_messages(code, kind, message):
    inlined = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(SWIZZLED))
    )(code)

    @make((64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32, transforms=SWIZZLED)])
    def kernel(x, o, s):
        inlined(x, o, s)

    with pytest.raises(kind, match=message) as error:
        compile_to_ptx(kernel, array(64, 64), target="sm_90a")
    assert "test_mosaic_memory.py" in str(error.value)


def test_addresses_of_booleans():
    def code(ctx, ref):
        FragmentedArray.load_strided(ref, is_signed=False, vec_size=8)

    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)

    @make((1024,))
    def kernel(x, o):
        inlined(x)

    with pytest.raises(UnsupportedError, match=r"address of booleans(.|\n)*integers of 8 bits"):
        compile_to_ptx(kernel, array(1024, dtype=jnp.bool_))


def test_memory_of_other_blocks_is_no_memref():
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda ctx, ref: None)

    @make(
        (256,), scratch_types=[plgpu.SMEM((256,), jnp.float32)], cluster=(2,), cluster_names=("c",)
    )
    def kernel(x, o, s):
        inlined(plgpu.cluster_ref(s, {"c": 0}))

    with pytest.raises(UnsupportedError, match=r"another block(.|\n)*get_cluster_ref"):
        compile_to_ptx(kernel, array(256))


def test_views_that_begin_inside_of_a_swizzle():
    transforms = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(128))
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),))(lambda ctx, ref: None)

    @make((8, 64), scratch_types=[plgpu.SMEM((16, 64), jnp.float32, transforms=transforms)])
    def kernel(x, o, s):
        inlined(s.at[1:9])

    with pytest.raises(InvalidValueError, match=r"inside of a pattern(.|\n)*multiple of 1024"):
        compile_to_ptx(kernel, array(8, 64))
