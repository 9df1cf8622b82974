"""Atomic updates: every element once, in the widest form there is."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from kernels import array, compile_kernel, compile_to_ptx, in_order, make
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.language.memory import SMEM
from pallasite.language.params import CompilerParams
from pallasite.language.transforms import SwizzleTransform, TilingTransform, cluster_ref
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives import arrays
from pallasite_std.primitives.layouts import Layout, layout_cast
from pallasite_std.rules.atomics import updates

OPERATIONS = ("add", "max", "min", "and", "or", "xor")


def update(operation, shape, dtype, space="gmem", layout=None, **arguments):
    function = getattr(arrays, f"atomic_{operation}")

    def body(x, o, *scratch):
        value = x[...] if layout is None else layout_cast(x[...], layout)
        function(scratch[0] if space == "smem" else o, value)

    scratch = [SMEM(shape, dtype)] if space == "smem" else []
    kernel = make(shape, dtype, scratch_types=scratch, **arguments)(body)
    return compile_to_ptx(kernel, array(*shape, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "operation", "form"),
    [
        ("int32", "add", r"add\.s32 \[%rd\d+\], %r"),
        ("uint32", "add", r"add\.u32 \[%rd\d+\], %r"),
        ("int64", "add", r"add\.u64 \[%rd\d+\], %rd"),
        ("int64", "min", r"min\.s64"),
        ("uint64", "max", r"max\.u64"),
        ("int32", "max", r"max\.s32"),
        ("uint32", "min", r"min\.u32"),
        ("int32", "and", r"and\.b32"),
        ("uint64", "xor", r"xor\.b64"),
        ("float32", "add", r"add\.v4\.f32 \[%rd\d+\], \{%r\d+, %r\d+, %r\d+, %r\d+\}"),
        ("float64", "add", r"add\.f64"),
        ("float16", "add", r"add\.noftz\.v4\.f16x2 \[%rd\d+\], \{%r"),
        ("bfloat16", "add", r"add\.noftz\.v4\.bf16x2"),
        ("float16", "max", r"max\.noftz\.v4\.f16x2"),
        ("bfloat16", "min", r"min\.noftz\.v4\.bf16x2"),
    ],
)
def test_forms_in_global_memory(x64, dtype, operation, form):
    ptx = update(operation, (64, 64), dtype)
    in_order(ptx, r"bar\.sync", rf"red\.relaxed\.gpu\.global\.{form}", r"bar\.sync")


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        ("float32", r"add\.f32"),
        ("float64", r"add\.f64"),
        ("float16", r"add\.noftz\.f16x2"),
        ("bfloat16", r"add\.noftz\.bf16x2"),
        ("int32", r"add\.s32"),
    ],
)
def test_forms_in_shared_memory(x64, dtype, form):
    assert_form = rf"red\.relaxed\.gpu\.shared::cta\.{form} \[%r\d+\]"
    in_order(update("add", (64, 64), dtype, "smem"), assert_form)


@pytest.mark.parametrize("operation", ["max", "min"])
def test_float_order_by_integers(operation):
    opposite = {"max": "min", "min": "max"}[operation]
    ptx = update(operation, (256,), "float32")
    in_order(
        ptx,
        r"setp\.nan\.f32|setp\.num\.f32",
        rf"@positive red\.relaxed\.gpu\.global\.{operation}\.s32",
        rf"@!positive red\.relaxed\.gpu\.global\.{opposite}\.u32",
    )


def test_all_forms_assemble(x64):
    # The assembler runs in compile_to_ptx; here are the combinations that the others leave out.
    for dtype in (
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float32",
        "float64",
        "float16",
        "bfloat16",
    ):
        for operation in OPERATIONS:
            for space in ("gmem", "smem"):
                if "float" in dtype and operation in ("and", "or", "xor"):
                    continue
                if dtype.endswith("float16") or dtype == "float16":
                    if operation != "add" and space == "smem":
                        continue
                    shapes = [(64, 64), (256,)]
                else:
                    shapes = [(7,), ()]
                for shape in shapes:
                    update(operation, shape, dtype, space)


def test_every_element_once_where_the_layout_replicates():
    # 96 elements: 3 warps of 32 lanes hold them, the fourth warp holds copies.
    ptx = update("add", (96,), "int32")
    assert ptx.count("red.relaxed") == 1
    in_order(ptx, r"setp\.gt\.[us]32\s+%p\d+, %r\d+, 2|setp\.lt\.[us]32\s+%p\d+, %r\d+, 3", "red")


def test_replicated_rows():
    # Four lanes hold each element of a row layout; the first of them updates.
    ptx = update("add", (128,), "float32", layout=Layout.WGMMA.reduce(1))
    assert ptx.count("red.relaxed") == 4
    in_order(ptx, r"and\.b32\s+%r\d+, %r\d+, 3|lop3|and\.b32", "red.relaxed")


def test_scalar_by_one_lane():
    ptx = update("add", (), "float32")
    assert ptx.count("red.relaxed") == 1
    in_order(ptx, r"elect\.sync", r"@%p\d+ bra", "red.relaxed")


def test_splat_value():
    @make((256,), jnp.int32)
    def kernel(o):
        arrays.atomic_add(o, jnp.full((256,), 3, jnp.int32))

    ptx = compile_to_ptx(kernel)
    assert ptx.count("red.relaxed.gpu.global.add.s32") == 2


def test_swizzled_shared_memory():
    tiled = SMEM(
        (64, 64), jnp.float32, transforms=(TilingTransform((8, 32)), SwizzleTransform(128))
    )

    @make((64, 64), scratch_types=[tiled])
    def kernel(x, o, s):
        arrays.atomic_add(s, layout_cast(x[...], Layout.WGMMA))
        o[...] = s[...]

    assert compile_to_ptx(kernel, array(64, 64)).count("red.relaxed") == 64 * 64 // 128


def test_other_block_of_the_cluster():
    @make(
        (128,), jnp.int32, cluster=(2,), cluster_names=("c",), scratch_types=[SMEM((128,), "int32")]
    )
    def kernel(x, o, s):
        arrays.atomic_add(cluster_ref(s, {"c": 0}), x[...])
        o[...] = s[...]

    ptx = compile_to_ptx(kernel, array(128, dtype="int32"))
    in_order(
        ptx,
        r"mapa\.shared::cluster\.u32",
        r"red\.relaxed\.cluster\.shared::cluster\.add\.s32",
        r"barrier\.cluster\.arrive",
    )


def test_in_a_warp():
    @make((4,), jnp.int32)
    def kernel(o):
        warp_map(lambda warp: arrays.atomic_add(o.at[warp], jnp.int32(2)))

    in_order(compile_to_ptx(kernel), r"bar\.warp\.sync", "red.relaxed", r"bar\.warp\.sync")


def test_without_barriers():
    ptx = update(
        "add", (256,), "float32", compiler_params=CompilerParams(unsafe_no_auto_barriers=True)
    )
    assert "bar.sync" not in ptx


@pytest.mark.parametrize(
    ("operation", "dtype", "message"),
    [
        ("add", "int8", r"atomic_add of int8 in global memory"),
        ("add", "int16", r"32- and 64-bit integers"),
        ("add", "float8_e4m3fn", r"float8_e4m3fn"),
        ("xor", "uint8", r"integers of 32 or 64 bits"),
    ],
)
def test_missing_forms(operation, dtype, message):
    with pytest.raises(UnsupportedError, match=message) as error:
        update(operation, (256,), dtype)
    assert "test_atomics.py" in str(error.value)


def test_half_maximum_needs_pairs_in_global_memory():
    for shape, space in (((7,), "gmem"), ((256,), "smem")):
        with pytest.raises(UnsupportedError, match="pairs of float16"):
            update("max", shape, "float16", space)


def test_warp_needs_scalars():
    @make((32,), jnp.int32)
    def kernel(o):
        warp_map(lambda warp: arrays.atomic_add(o, jnp.full((32,), 1, jnp.int32)))

    with pytest.raises(InvalidValueError, match="a single warp updates an array"):
        compile_kernel(kernel)


def test_bits_of_floats_are_refused():
    with pytest.raises(InvalidValueError, match="works on bits"):
        update("or", (128,), "float32")


def test_table():
    assert [u.elements for u in updates("float32", "add", is_global=True, vectors=True)] == [
        4,
        2,
        1,
    ]
    assert [u.elements for u in updates("float32", "add", is_global=False, vectors=True)] == [1]
    assert [u.elements for u in updates("float16", "add", is_global=True, vectors=False)] == [2, 1]
    assert updates("bool", "add", is_global=True, vectors=True) == []
