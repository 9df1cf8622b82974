"""Printing from the device, checks, delays, printing of layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.experimental import pallas as pl

from kernels import array, compile_kernel, compile_to_ptx, in_order, make, strings_of
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.language.memory import SMEM
from pallasite.language.transforms import SwizzleTransform, TilingTransform
from pallasite_std.primitives.arrays import print_layout
from pallasite_std.primitives.layouts import Layout, layout_cast


def printing(fmt, *select, shape=(128,), dtype=jnp.float32):
    @make(shape, dtype)
    def kernel(x, o):
        pl.debug_print(fmt, *[one(x) for one in select])
        o[...] = x[...]

    return compile_to_ptx(kernel, array(*shape, dtype=dtype))


def test_scalars_print_once_per_thread():
    ptx = printing("x: {}, {} 100% {{}}", lambda x: x[0], lambda x: x[1])
    assert "x: %.9g, %.9g 100%% {}\n" in strings_of(ptx)
    in_order(ptx, r"elect\.sync", r"@%p\d+ bra", r"st\.local\.b64", r"st\.local\.b64", "vprintf")


@pytest.mark.parametrize(
    ("dtype", "directive", "store"),
    [
        (jnp.int32, "%d", r"st\.local\.b32"),
        (jnp.uint32, "%u", r"st\.local\.b32"),
        (jnp.int8, "%d", r"cvt\.s32\.s8|ld\.global\.nc\.[sb]8"),
        (jnp.uint16, "%u", r"st\.local\.b32"),
        (jnp.int64, "%lld", r"st\.local\.b64"),
        (jnp.uint64, "%llu", r"st\.local\.b64"),
        (jnp.float64, "%.17g", r"st\.local\.b64"),
        (jnp.float16, "%.5g", r"cvt\.f64"),
        (jnp.bfloat16, "%.5g", r"cvt\.f64"),
        (jnp.bool_, "%s", r"selp\.b64"),
    ],
)
def test_promotions(x64, dtype, directive, store):
    ptx = printing("{}", lambda x: x[3], dtype=dtype)
    assert directive + "\n" in strings_of(ptx)
    in_order(ptx, store, "vprintf")


def test_mixed_sizes_are_aligned():
    @make((2,), jnp.float32)
    def kernel(x, n, o):
        pl.debug_print("{} {} {}", n[0], x[0], n[1])
        o[...] = x[...]

    ptx = compile_to_ptx(kernel, array(2), array(2, dtype=jnp.int32))
    in_order(ptx, r"st\.local\.b32 .*%rd\d+\]", r"st\.local\.b64 .*\+8\]", r"\+16\]", "vprintf")


def test_array_prints_every_element_with_its_index():
    ptx = printing("a {}!", lambda x: x[...], shape=(8, 64))
    assert "a [%d, %d]: %.9g!\n" in strings_of(ptx)
    assert ptx.count("vprintf,") == 8 * 64 // 128


def test_replicated_elements_print_once():
    # 7 elements: lanes 0 to 6 of warp 0 print.
    ptx = printing("{}", lambda x: x[...], shape=(7,))
    in_order(ptx, r"setp\.gt\.u32|setp\.lt\.u32|setp\.ne", "vprintf")
    assert ptx.count("vprintf,") == 1


def test_splat_array():
    ptx = printing("{}", lambda x: jnp.full((256,), x[0]), shape=(256,))
    assert "[%d]: %.9g\n" in strings_of(ptx)


@pytest.mark.parametrize(
    ("fmt", "count", "message"),
    [
        ("{} {}", 1, "2 placeholders for 1 values"),
        ("none", 1, "0 placeholders for 1 values"),
        ("{:.3f}", 1, "says more than {}"),
        ("{0}", 1, "says more than {}"),
        ("{!r}", 1, "says more than {}"),
        ("{} {", 1, "wrong format string"),
    ],
)
def test_wrong_formats(fmt, count, message):
    @make((128,))
    def kernel(x, o):
        pl.debug_print(fmt, *[x[0]] * count)  # the line of the error
        o[...] = x[...]

    with pytest.raises(InvalidValueError, match=message) as error:
        compile_to_ptx(kernel, array(128))
    assert "test_debug.py" in str(error.value)


def test_array_with_others_is_refused():
    with pytest.raises(UnsupportedError, match="array together with other values"):
        printing("{} {}", lambda x: x[...], lambda x: x[0])


def test_ordered_and_keywords_are_refused():
    @make((128,))
    def ordered(x, o):
        jax.debug.print("{}", x[0], ordered=True)
        o[...] = x[...]

    @make((128,))
    def keywords(x, o):
        jax.debug.print("{a}", a=x[0])
        o[...] = x[...]

    with pytest.raises(UnsupportedError, match="ordered"):
        compile_to_ptx(ordered, array(128))
    with pytest.raises(UnsupportedError, match=r"keyword arguments(.|\n)*got: a"):
        compile_to_ptx(keywords, array(128))


# Checks -------------------------------------------------------------------------------------------


@make((128,))
def checked(x, o):
    """A kernel with a check that has a value in its message."""
    checkify.debug_check(x[0] > 0, "not positive: {}", x[0])
    o[...] = x[...]


def test_checks_are_off_by_default():
    assert "__assertfail" not in compile_to_ptx(checked, array(128))


def test_failed_check_reports_and_stops():
    with pl.enable_debug_checks(True):
        compiled = compile_kernel(checked, array(128))
    texts = strings_of(compiled.ptx)
    assert "not positive: {}" in texts
    assert any(t.endswith("check failed: not positive: %.9g\n") for t in texts)
    assert any(t.endswith("test_debug.py") for t in texts)
    in_order(compiled.llvm, "@vprintf", "@__assertfail", "@llvm.trap", r"bar\.sync")


def test_other_checks_are_refused():
    @make((128,))
    def kernel(x, o):
        checkify.check(x[0] > 0, "bad")
        o[...] = x[...]

    with pytest.raises(UnsupportedError, match=r"pl\.debug_check"):
        compile_to_ptx(kernel, array(128))


# Delays -------------------------------------------------------------------------------------------


def test_delays():
    @make((128,))
    def kernel(x, n, o):
        pl.delay(100)
        pl.delay(3_000_000)
        pl.delay(n[0])
        o[...] = x[...]

    ptx = compile_to_ptx(kernel, array(128), array(1, dtype=jnp.int32))
    in_order(ptx, r"nanosleep\.u32 100;", r"nanosleep\.u32 1000000;", r"nanosleep\.u32 %r")


# Layouts ------------------------------------------------------------------------------------------


def test_print_layout(capsys):
    tiled = SMEM(
        (64, 64), jnp.float32, transforms=(TilingTransform((8, 32)), SwizzleTransform(128))
    )

    compile_to_ptx(make((64, 64), scratch_types=[tiled])(_layouts), array(64, 64))
    out = capsys.readouterr().out
    assert "x: WGMMA\n" in out
    assert "plain: strided(vector 4)\n" in out
    assert "s: float32[64, 64] in smem" in out
    assert "swizzle 128" in out
    assert "row: float32[64] in smem" in out


def _layouts(x, o, s):
    print_layout("x: {}", layout_cast(x[...], Layout.WGMMA))
    print_layout("plain: {}", x[...])
    print_layout("s: {}", s)
    print_layout("row: {}", s.at[3])
    o[...] = x[...]


def test_layout_in_a_loop_is_printed_once(capsys):
    @make((128,))
    def kernel(x, o):
        def step(_, carry):
            print_layout("layout {}", carry)
            return carry + x[...]

        o[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros((128,), jnp.float32))

    compile_to_ptx(kernel, array(128))
    assert capsys.readouterr().out == "layout strided(vector 1)\n"
