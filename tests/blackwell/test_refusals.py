"""Misuses of tensor memory and of the tensor core are errors at the user's line."""

from __future__ import annotations

import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tcgen05_support import F4, F16, F32, I8, I32, LANE, U2, WARPGROUP, smem

import pallasite
from pallasite import (
    InvalidTypeError,
    InvalidValueError,
    PallasiteError,
    ResourceError,
    UnsupportedError,
)
from pallasite import gpu as plgpu

BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])
A, B, ACC = smem((128, 64), F16), smem((64, 64), F16), plgpu.TMEM((128, 64), F32)
DONE = plgpu.Barrier(orders_tensor_core=True)


def refusal(error, body, scratch, *, semantics=LANE, target="sm_100a", **options):
    """The message of the error that compiling a kernel raises, at a line of this file."""
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )
    with pytest.raises(PallasiteError) as caught:
        pallasite.compile(kernel, target=target)
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert f"{pathlib.Path(__file__).name}:" in text
    return text


def multiply(o, a, b, acc, done):
    plgpu.tcgen05_mma(acc, a, b, done)


def line_of_multiply():
    return f"test_refusals.py:{inspect.getsourcelines(multiply)[1] + 1} (multiply)"


@BOTH
@pytest.mark.parametrize(
    ("operands", "error", "words"),
    [
        (
            (A, B, ACC, plgpu.Barrier()),
            InvalidValueError,
            ["does not order the tensor core's work", "plgpu.Barrier(orders_tensor_core=True)"],
        ),
        (
            (A, B, plgpu.TMEM((128, 64), F16, packed=True), DONE),
            InvalidValueError,
            ["got: TMEM_DEFAULT(packing=2)", "expected: TMEM_DEFAULT(packing=1)"],
        ),
        (
            (A, plgpu.SMEM((64, 68), F16), plgpu.TMEM((128, 68), F32), DONE),
            InvalidValueError,
            ["no instructions make so many columns", "n=68", "a multiple of 8"],
        ),
        (
            (smem((128, 64), I8, 64), plgpu.SMEM((64, 72), I8), plgpu.TMEM((128, 72), I32), DONE),
            InvalidValueError,
            ["no instructions make so many columns", "n=72", "a multiple of 16"],
        ),
        (
            (smem((128, 8), F16, 16), smem((8, 64), F16), ACC, DONE),
            InvalidValueError,
            ["k is no multiple", "k=8", "a multiple of 16"],
        ),
        (
            (smem((128, 64), F32), smem((64, 64), F32), ACC, DONE),
            InvalidValueError,
            ["32 bits are not contiguous along k in b", "plgpu.transpose_ref(b, (1, 0))"],
        ),
        (
            (smem((128, 64), jnp.bfloat16), B, ACC, DONE),
            InvalidTypeError,
            ["does not multiply these dtypes", "a: bfloat16, b: float16"],
        ),
        (
            (A, B, plgpu.TMEM((128, 64), I32), DONE),
            InvalidTypeError,
            ["not accumulated in int32", "float32 or float16"],
        ),
        (
            (A, B, plgpu.TMEM((128, 32), F32), DONE),
            InvalidValueError,
            ["the shapes do not fit together", "acc (128, 32), a (128, 64), b (64, 64)"],
        ),
        (
            (plgpu.TMEM((128, 64), F16, packed=False), B, ACC, DONE),
            InvalidValueError,
            ["a lies in tensor memory in another way", "packed=True"],
        ),
        (
            (A, B, plgpu.TMEM((128, 64), F32, collective=True), DONE),
            InvalidValueError,
            ["acc is collective, but the product is one block's own", "collective_axis="],
        ),
    ],
    ids=lambda value: value[0][:24] if isinstance(value, list) else None,
)
def test_operands(operands, error, words, semantics):
    text = refusal(error, multiply, operands, semantics=semantics)
    assert line_of_multiply() in text
    for word in words:
        assert word in text


def test_shared_memory_without_tiles():
    """Under warpgroup semantics, its layout would be inferred."""
    text = refusal(InvalidValueError, multiply, [plgpu.SMEM((128, 64), F16), B, ACC, DONE])
    assert "cannot read a from shared memory" in text
    assert "plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)" in text


@BOTH
@pytest.mark.parametrize(("tile", "swizzle"), [((16, 32), 64), ((16, 16), 32)])
def test_tiles_that_are_not_read(tile, swizzle, semantics):
    tiles = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
    operands = [plgpu.SMEM((128, 64), F16, transforms=tiles), B, ACC, DONE]
    text = refusal(InvalidValueError, multiply, operands, semantics=semantics)
    assert line_of_multiply() in text and f"swizzle {swizzle}" in text
    assert "expected: tiles of 8 rows as wide as the swizzle" in text


def test_a_swizzle_that_does_not_fit_its_tiles():
    with pytest.raises(InvalidValueError) as caught:
        plgpu.SMEM(
            (128, 64),
            F16,
            transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64)),
        )
    text = str(caught.value)
    assert "test_refusals.py:" in text and "swizzle 64 does not fit" in text
    assert "TilingTransform((8, 32))" in text


@BOTH
def test_few_columns_of_bytes(semantics):
    def body(o, a, b, acc, done):
        plgpu.tcgen05_mma(acc, a, b.at[:, :24], done)

    dtype = jnp.float8_e5m2
    operands = [smem((128, 64), dtype, 64), smem((64, 64), dtype, 64), plgpu.TMEM((128, 24), F32)]
    text = refusal(InvalidValueError, body, [*operands, DONE], semantics=semantics)
    assert "contiguous along n in b" in text and "a part of 24 columns" in text


@pytest.mark.parametrize(("m", "n", "part"), [(128, 152, 152), (64, 112, 56)])
def test_bytes_along_n_of_which_layouts_are_inferred(m, n, part):
    dtype = jnp.float8_e4m3fn
    scratch = [plgpu.SMEM((m, 64), dtype), plgpu.SMEM((64, n), dtype), plgpu.TMEM((m, n), F32)]
    text = refusal(InvalidValueError, multiply, [*scratch, DONE], semantics=WARPGROUP)
    assert line_of_multiply() in text and f"a part of {part} columns" in text
    assert "a multiple of 16" in text and "plgpu.transpose_ref(b, (1, 0))" in text
    assert "TilingTransform" not in text


def test_memory_without_tiles_is_told_tiles_that_divide_it():
    scratch = [A, plgpu.SMEM((64, 24), F16), plgpu.TMEM((128, 24), F32), DONE]
    text = refusal(InvalidValueError, multiply, scratch)
    assert "try: plgpu.SMEM(..., transforms=(plgpu.TilingTransform((8, 8)),))" in text
    tiled = plgpu.SMEM((64, 24), F16, transforms=(plgpu.TilingTransform((8, 8)),))
    kernel = plgpu.kernel(
        multiply,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[A, tiled, *scratch[2:]],
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    )
    assert "tcgen05.mma" in pallasite.compile(kernel, target="sm_100a").ptx


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ((128, 64), (32, 64), "plgpu.transpose_ref(b, (1, 0))"),
        ((64, 128), (64, 32), "plgpu.transpose_ref(a, (1, 0))"),
        ((64, 128), (32, 64), "plgpu.transpose_ref(a, (1, 0)) and plgpu.transpose_ref(b, (1, 0))"),
        ((128, 64), (64, 40), None),
    ],
)
def test_operands_that_would_fit_if_they_were_transposed(a, b, what):
    scratch = [plgpu.SMEM(a, F16), plgpu.SMEM(b, F16), plgpu.TMEM((128, 32), F32), DONE]
    text = refusal(InvalidValueError, multiply, scratch)
    assert line_of_multiply() in text and "shapes do not fit together" in text
    assert f"try: pass {what}" in text if what else "try:" not in text


@pytest.mark.parametrize(
    ("meta", "dtype", "words"),
    [
        ("x", F16, ["metadata is no array", "got: 'x'", "an array of uint2"]),
        (jnp.zeros((128, 32, 2), jnp.int8), F16, ["got: int8", "try: meta.astype(jnp.uint2)"]),
        (jnp.zeros((128, 16, 4), U2), F16, ["got: (128, 16, 4)", "expected: (m, k / 4, 2)"]),
        (jnp.zeros((128, 16, 4), U2), F4, ["got: (128, 16, 4)", "expected: (m, k / 8, 2)"]),
        (jnp.zeros((128, 32, 2), U2), "half?", ["got: 'half?'", "expected: 4, 8 or 16 bits"]),
    ],
)
def test_sparse_metadata_of_another_form(meta, dtype, words):
    with pytest.raises(PallasiteError) as caught:
        plgpu.format_tcgen05_sparse_metadata(meta, dtype)
    text = str(caught.value)
    assert "test_refusals.py:" in text and all(word in text for word in words), text


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (
            lambda acc, a, b: plgpu.async_store_tmem(acc, 0.0),
            InvalidValueError,
            ["got: ref: (128, 64), value: ()", "expected: the same shape"],
        ),
        (
            lambda acc, a, b: plgpu.tcgen05_mma(acc, a, b, accumulate="no"),
            InvalidTypeError,
            ["accumulate is not a boolean scalar", "got: 'no'", "expected: a bool"],
        ),
    ],
)
def test_values_that_are_no_arrays(use, error, words):
    text = refusal(error, lambda o, a, b, acc: use(acc, a, b), [A, B, ACC])
    assert all(word in text for word in words), text


@BOTH
def test_targets_that_lack_an_instruction(semantics):
    integers = [smem((128, 64), I8, 64), smem((64, 64), I8, 64), plgpu.TMEM((128, 64), I32), DONE]
    text = refusal(UnsupportedError, multiply, integers, semantics=semantics, target="sm_103a")
    assert "on sm_103a" in text and "sm_100a or sm_110a" in text

    def reduce(o, acc):
        o[...] = plgpu.async_load_tmem(acc, reduce="max")[1]

    text = refusal(UnsupportedError, reduce, [ACC], semantics=semantics)
    assert "on sm_100a" in text and "sm_103a or sm_110a" in text
    text = refusal(ResourceError, multiply, [A, B, ACC, DONE], target="sm_120a")
    assert "sm_120a has none" in text and "sm_100a or sm_103a or sm_110a" in text


@BOTH
def test_more_columns_than_there_are(semantics):
    def body(o, one, two):
        del o, one, two

    scratch = [plgpu.TMEM((128, 512), F32), plgpu.TMEM((128, 24), F16, packed=True)]
    text = refusal(ResourceError, body, scratch, semantics=semantics)
    assert "exceeds available tensor memory: tmem_columns=1024" in text
    assert "512 columns  one: float32[128, 512]" in text
    assert "12 columns  two: float16[128, 24]" in text
    assert "at most 512 columns per block" in text


def test_blocks_and_pairs_of_blocks_do_not_mix():
    def body(o, one, two):
        del o, one, two

    pair = dict(cluster=(2,), cluster_names=("c",))
    scratch = [ACC, plgpu.TMEM((128, 64), F32, collective=True)]
    assert "Can't mix" in refusal(InvalidValueError, body, scratch, **pair)
    union = [plgpu.RefUnion(*scratch)]
    text = refusal(InvalidValueError, lambda o, union: None, union, **pair)
    assert "Some aliased TMEM references are collective" in text
    text = refusal(InvalidValueError, lambda o, one: None, scratch[1:])
    assert "no pairs" in text

    def collective(o, a, b, acc, done):
        plgpu.tcgen05_mma(acc, a, b, done, collective_axis="c")

    text = refusal(InvalidValueError, collective, [A, smem((64, 32), F16, 64), ACC, DONE], **pair)
    assert "acc is not collective" in text
    wrong = dict(cluster=(2, 2), cluster_names=("c", "d"))
    operands = [A, smem((64, 32), F16, 64), scratch[1], DONE]
    text = refusal(InvalidValueError, collective, operands, **wrong)
    assert "another axis than the minormost" in text and "expected: 'd'" in text


@BOTH
@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda acc: acc[...], InvalidValueError, "plgpu.async_load_tmem(ref)"),
        (
            lambda acc: acc.set(jnp.ones((128, 64))),
            InvalidValueError,
            "plgpu.async_store_tmem(ref, value)",
        ),
        (
            lambda acc: plgpu.async_load_tmem(acc.at[0]),
            InvalidValueError,
            "ref.at[:, pl.ds(start, size)]",
        ),
        (
            lambda acc: plgpu.async_load_tmem(acc.at[32:64]),
            UnsupportedError,
            "rows of tensor memory are sliced",
        ),
        (
            lambda acc: plgpu.async_load_tmem(acc, reduce="sum"),
            InvalidValueError,
            "loads reduce in other ways",
        ),
        (
            lambda acc: plgpu.async_store_tmem(acc, jnp.zeros((128, 32))),
            InvalidValueError,
            "different shapes",
        ),
        (lambda acc: plgpu.transpose_ref(acc, (1, 0)), InvalidValueError, "Can't transpose"),
        (
            lambda acc: plgpu.warp_map(lambda warp: (plgpu.async_load_tmem(acc), None)[1]),
            UnsupportedError,
            "in code that runs per warp",
        ),
    ],
    ids=range(8),
)
def test_uses_of_tensor_memory(use, error, words, semantics):
    def body(o, acc):
        use(acc)

    assert words in refusal(error, body, [ACC], semantics=semantics)


@BOTH
def test_columns_from_a_start_of_which_nothing_is_known(semantics):
    def body(o, x):
        plgpu.async_load_tmem(x.at[:, pl.ds(pl.program_id(0), 32)])

    packed = [plgpu.TMEM((128, 64), F16, packed=True)]
    text = refusal(
        InvalidValueError, body, packed, semantics=semantics, grid=(2,), grid_names=("i",)
    )
    assert "pl.multiple_of(start, 2)" in text


def test_metadata_is_neither_loaded_nor_stored():
    def body(o, meta):
        plgpu.async_load_tmem(meta)

    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    text = refusal(InvalidValueError, body, [plgpu.TMEM((128, 128), U2, layout=layout)])
    assert "plgpu.async_copy_sparse_metadata_to_tmem" in text


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (((128,), F32), {}, "tensor memory holds matrices"),
        (((96, 32), F32), {}, "no matrix of 96 rows"),
        (((128, 32), F16), {}, "packed=True for operands, packed=False for accumulators"),
        (((128, 32), np.float64), {}, "at most 32 bits"),
        (((128, 31), F16), {"packed": True}, "do not fill cells"),
        (((64, 24), F32), {}, "a multiple of 16"),
        (
            ((128, 4), F16),
            {"packed": True, "layout": plgpu.TMEMLayout.SCALES_LAYOUT},
            "both packed= and layout=",
        ),
        (((128, 6), np.int8), {"layout": plgpu.TMEMLayout.SCALES_LAYOUT}, "128 rows and 4 columns"),
        (((64, 32), F32), {"layout": plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT}, "needs the number"),
    ],
    ids=str,
)
def test_allocations(arguments, options, words):
    with pytest.raises(PallasiteError) as caught:
        plgpu.TMEM(*arguments, **options)
    assert words in str(caught.value) and "test_refusals.py" in str(caught.value)


def test_scales():
    count = 4

    def body(o, a, b, acc, done, a_scale, b_scale):
        plgpu.tcgen05_mma(acc, a, b, done, a_scale=a_scale, b_scale=b_scale)

    def scales(rows, dtype=jnp.float8_e8m0fnu, columns=count):
        return plgpu.TMEM((rows, columns), dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT)

    dtype = jnp.float8_e4m3fn
    wide = [smem((128, 128), dtype), smem((128, 256), dtype), plgpu.TMEM((128, 256), F32), DONE]
    text = refusal(InvalidValueError, body, [*wide, scales(128), scales(128)])
    assert "b_scale has too few rows" in text and "at least 256 rows" in text
    text = refusal(InvalidTypeError, body, [*wide, scales(128, dtype), scales(256, dtype)])
    assert "float8_e8m0fnu" in text
    text = refusal(InvalidValueError, body, [*wide, scales(128), scales(256, columns=8)])
    assert "the scales do not fit k" in text
    four = [smem((128, 256), F4), smem((64, 256), F4), plgpu.TMEM((128, 64), F32), DONE]
    text = refusal(InvalidTypeError, multiply, [four[0], smem((256, 64), F4, 32), *four[2:]])
    assert "float4_e2m1fn needs a_scale= and b_scale=" in text


def overwrite_at_once(acc, other, a, b, done):
    plgpu.async_load_tmem(acc)
    plgpu.async_store_tmem(other, jnp.zeros((128, 64)))
    plgpu.tcgen05_mma(acc, a, b, done)


def overwrite_columns(acc, other, a, b, done):
    plgpu.async_load_tmem(acc.at[:, :32])
    plgpu.async_store_tmem(acc.at[:, 32:], jnp.zeros((128, 32)))
    plgpu.async_load_tmem(other)
    plgpu.async_store_tmem(acc.at[:, 16:48], jnp.zeros((128, 32)))


def overwrite_in_the_next_iteration(acc, other, a, b, done):
    def step(i, carry):
        pl.when(i > 0)(lambda: plgpu.wait_load_tmem())
        plgpu.tcgen05_mma(acc, a, b, done)
        plgpu.barrier_wait(done)
        plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        plgpu.async_load_tmem(other)
        return carry

    jax.lax.fori_loop(0, 3, step, None)

    def missing(i, carry):
        plgpu.async_store_tmem(other, jnp.zeros((128, 64)))
        return carry

    jax.lax.fori_loop(0, 3, missing, None)


def overwrite_in_a_warp(acc, other, a, b, done):
    plgpu.async_load_tmem(acc)

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 1)
        def _():
            plgpu.tcgen05_mma(acc, a, b, done)


@BOTH
@pytest.mark.parametrize(
    ("use", "columns"),
    [
        (overwrite_at_once, "columns 0 to 63"),
        (overwrite_columns, "columns 16 to 47"),
        (overwrite_in_the_next_iteration, "columns 0 to 63"),
        (overwrite_in_a_warp, "columns 0 to 63"),
    ],
)
def test_loads_that_are_not_waited_for(use, columns, semantics):
    def body(o, a, b, acc, other, done):
        use(acc, other, a, b, done)

    def waits(o, a, b, acc, other, done):
        wait = plgpu.wait_load_tmem
        with pytest.MonkeyPatch.context() as patch:
            for name in ("async_store_tmem", "tcgen05_mma"):
                start = getattr(plgpu, name)
                patch.setattr(plgpu, name, lambda *args, start=start: (wait(), start(*args))[1])
            if use is not overwrite_in_a_warp:
                use(acc, other, a, b, done)

    scratch = [A, B, ACC, ACC, DONE]
    text = refusal(InvalidValueError, body, scratch, semantics=semantics)
    assert "overwritten while a load from them may not be complete" in text
    assert columns in text and "plgpu.wait_load_tmem()" in text
    assert text.count("test_refusals.py:") >= 2  # Where it is overwritten, where it was loaded.
    kernel = plgpu.kernel(
        waits,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    pallasite.compile(kernel, target="sm_100a")


def test_layouts_of_scales_and_metadata():
    dtype, e8m0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu

    def scaled(o, a, b, acc, done, a_scale, b_scale):
        plgpu.tcgen05_mma(acc, a, b, done, a_scale=a_scale, b_scale=b_scale)

    def alone(o, a, b, acc, done, a_scale):
        plgpu.tcgen05_mma(acc, a, b, done, a_scale=a_scale)

    operands = [smem((128, 128), dtype), smem((128, 128), dtype), plgpu.TMEM((128, 128), F32), DONE]
    scales = plgpu.TMEM((128, 4), e8m0, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
    packed = plgpu.TMEM((128, 4), e8m0, packed=True)
    text = refusal(InvalidValueError, scaled, [*operands, packed, scales])
    assert "a_scale lies in tensor memory in another way" in text and "TMEMLayout" in text
    text = refusal(InvalidValueError, alone, [*operands, scales])
    assert "only one of a and b has scales" in text and "both a_scale= and b_scale=" in text

    def sparse(o, a, b, acc, done, metadata):
        plgpu.tcgen05_mma(acc, a, b, done, a_sparse_metadata=metadata)

    halved = [smem((128, 64), F16), smem((128, 64), F16), ACC, DONE]
    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    short = plgpu.TMEM((128, 128), U2, layout=layout)
    text = refusal(InvalidValueError, sparse, [*halved, short])
    assert "a_sparse_metadata does not fit a" in text and "shape (128, 64)" in text


@BOTH
def test_pairs_that_are_none(semantics):
    def body(o, a, b, acc, done):
        plgpu.tcgen05_mma(acc, a, b, done, collective_axis="c")

    pair = plgpu.TMEM((128, 64), F32, collective=True)
    odd = dict(cluster=(3,), cluster_names=("c",), semantics=semantics)
    text = refusal(InvalidValueError, body, [A, smem((64, 32), F16, 64), pair, DONE], **odd)
    assert "no pairs" in text and "(3,)" in text
    four = dict(cluster=(4,), cluster_names=("c",), semantics=semantics)
    text = refusal(InvalidValueError, body, [A, smem((64, 32), F16, 64), pair, DONE], **four)
    assert "no pair" in text and "4 blocks along 'c'" in text and "further axes" in text
    two = dict(cluster=(2,), cluster_names=("c",), semantics=semantics)
    left = plgpu.TMEM((128, 64), F16, packed=True)
    operands = [left, smem((64, 32), F16, 64), pair, DONE]
    assert "a is not collective" in refusal(InvalidValueError, body, operands, **two)
    wide = [A, smem((64, 272), F16, 32), plgpu.TMEM((128, 544), F32, collective=True), DONE]
    assert "tensor memory" in refusal(ResourceError, body, wide, **two)


@BOTH
def test_reshaped_tensor_memory(semantics):
    def body(o, acc):
        plgpu.async_load_tmem(acc.reshape(64, 128))

    text = refusal(UnsupportedError, body, [ACC], semantics=semantics)
    assert "matrices of a batch, and slices of columns" in text
