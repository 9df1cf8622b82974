"""The shape of the PTX of products: what is there, how often, and what is not."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_support import check
from jax import lax
from jax.experimental import pallas as pl
from products_support import (
    BF16,
    E4M3,
    F16,
    F32,
    I8,
    I32,
    LEFT_LAYOUTS,
    Operand,
    compiled,
    multiply,
)

from pallasite import gpu as plgpu

LEFT = Operand(64, 32, BF16, 64)
RIGHT = Operand(32, 16, BF16, 32)


def array(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ptx(function, left=LEFT, right=RIGHT, m=64, n=16, dtype=F32, further=()) -> str:
    """Of a kernel whose scope is ``function(acc, a, b, *further)`` in memory; it reads acc."""

    def body(a_ref, b_ref, *refs):
        *rest, out_ref, a_smem, b_smem = refs

        def scope(acc):
            function(acc, left.view(a_smem), right.view(b_smem), *rest)
            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((m, n), dtype))

    kernel = plgpu.kernel(
        body, out_type=array((m, n), dtype), scratch_types=[left.scratch, right.scratch]
    )
    arrays = [array(left.stored_shape, left.dtype), array(right.stored_shape, right.dtype)]
    return compiled(kernel, *arrays, *further)


def lines(text: str, pattern: str) -> list[str]:
    """The instructions that match."""
    return re.findall(rf"^\t({pattern}.*);$", text, re.MULTILINE)


def between(text: str) -> str:
    """From the first fence to the last wait."""
    return text[text.index("wgmma.fence") : text.rindex("wgmma.wait_group")]


def test_one_product():
    """Nothing is added to zero: the registers are results only, and nobody sets them."""
    text = ptx(lambda acc, a, b: plgpu.wgmma(acc, a, b))
    check(
        text,
        """
        CHECK-NOT: 0f00000000
        CHECK: wgmma.fence.sync.aligned;
        CHECK: setp.ne.b32 p, 0, 0;
        CHECK-NEXT: add.s64 a, %[[A:rd[0-9]+]], 0;
        CHECK-NEXT: add.s64 b, %[[B:rd[0-9]+]], 0;
        CHECK-NEXT: wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 \
{[[D:%r[0-9]+, %r[0-9]+, %r[0-9]+, %r[0-9]+, %r[0-9]+, %r[0-9]+, %r[0-9]+, %r[0-9]+]]}, \
a, b, p, 1, 1, 0, 1;
        CHECK-NEXT: add.s64 a, %[[A]], 2;
        CHECK-NEXT: add.s64 b, %[[B]], 32;
        CHECK-NEXT: wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {[[D]]}, \
a, b, 1, 1, 1, 0, 1;
        CHECK-NEXT: }
        CHECK: wgmma.commit_group.sync.aligned;
        CHECK: wgmma.wait_group.sync.aligned 0;
        CHECK: st.global
        """.replace("\\\n", ""),
    )
    for name in ("fence", "commit_group", "wait_group"):
        assert len(lines(text, f"wgmma.{name}")) == 1
    assert not lines(between(text), "mov")
    assert not lines(text, "mov.b32 .*, 0")


def test_second_product_adds():
    text = ptx(lambda acc, a, b: [plgpu.wgmma(acc, a, b) for _ in range(3)])
    assert len(lines(text, "wgmma.fence")) == len(lines(text, "wgmma.commit_group")) == 3
    assert len(lines(text, "wgmma.wait_group")) == 1
    assert lines(text, "setp.[a-z]*.b32 p") == ["setp.ne.b32 p, 0, 0"] + 2 * ["setp.eq.b32 p, 0, 0"]
    products = lines(text, "wgmma.mma_async")
    assert len(products) == 6
    assert len({re.search(r"{.*}", one)[0] for one in products}) == 1
    assert not lines(between(text), "mov")


@pytest.mark.parametrize(
    ("flag", "condition"), [(True, "eq"), (False, "ne"), (np.True_, "eq"), (np.False_, "ne")]
)
def test_known_flags(flag, condition):
    def function(acc, a, b):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma(acc, a, b, accumulate=flag)

    assert lines(ptx(function), "setp.[a-z]*.b32 p")[1] == f"setp.{condition}.b32 p, 0, 0"


def test_computed_flag():
    def function(acc, a, b, flag_ref):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma(acc, a, b, accumulate=flag_ref[0] > 3)

    text = ptx(function, further=(array((1,), jnp.int32),))
    assert re.fullmatch(r"setp.ne.b32 p, %r\d+, 0", lines(text, "setp.[a-z]*.b32 p")[1])
    assert not lines(between(text), "mov")


@pytest.mark.parametrize(
    ("a", "b", "accumulator", "name", "tail"),
    [
        (BF16, BF16, F32, "m64n16k16.f32.bf16.bf16", "1, 1, 0, 0"),
        (F16, F16, F16, "m64n16k16.f16.f16.f16", "1, 1, 0, 0"),
        (F32, F32, F32, "m64n16k8.f32.tf32.tf32", "1, 1"),
        (E4M3, E4M3, F16, "m64n16k32.f16.e4m3.e4m3", "1, 1"),
        (I8, I8, I32, "m64n16k32.s32.s8.s8", ""),
    ],
)
def test_names_and_constant_operands(a, b, accumulator, name, tail):
    k = 32 // a.itemsize
    left, right = Operand(64, k, a, 32), Operand(k, 16, b, 32, True)
    arrays = [array(left.stored_shape, a), array(right.stored_shape, b)]
    text = compiled(multiply(left, right, accumulator), *arrays)
    (product,) = lines(text, "wgmma.mma_async")
    registers = 4 if accumulator == F16 else 8
    pattern = rf"wgmma.mma_async.sync.aligned.{name} {{(%r\d+(, )?){{{registers}}}}}, a, b, p"
    assert re.fullmatch(pattern + (f", {tail}" if tail else ""), product)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_majors(left, right):
    a, b = Operand(64, 16, BF16, 32, left), Operand(16, 16, BF16, 32, right)
    text = ptx(lambda acc, a, b: plgpu.wgmma(acc, a, b), a, b)
    (product,) = lines(text, "wgmma.mma_async")
    assert product.endswith(f"a, b, p, 1, 1, {int(left)}, {int(not right)}")


def test_left_operand_in_registers():
    """Its registers go through the fence, and each step along K takes four of them."""
    function = multiply(None, RIGHT, F32, shape=(64, 32), left_dtype=BF16)
    text = compiled(function, array((64, 32)), array((32, 16)))
    products = lines(text, "wgmma.mma_async")
    operands = [re.findall(r"{([^}]*)}", one)[1].split(", ") for one in products]
    assert [len(one) for one in operands] == [4, 4]
    assert len({*operands[0], *operands[1]}) == 8
    assert products[0].endswith("}, b, p, 1, 1, 1")
    before = text[: text.index("wgmma.fence")]
    assert all(register in before for one in operands for register in one)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_left_operand_that_a_loop_keeps(dtype):
    """It is not copied for each product."""
    right = Operand(32, 16, dtype, 32, True)
    layout = getattr(plgpu.Layout, LEFT_LAYOUTS[dtype.itemsize])

    def body(a_ref, b_ref, count_ref, out_ref, b_smem):
        a = plgpu.load(a_ref, (), layout=layout) * 2

        def scope(acc):
            @pl.loop(0, count_ref[0])
            def _(_):
                plgpu.wgmma(acc, a, right.view(b_smem))
                plgpu.wgmma_wait(0)

            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 16)))

    kernel = plgpu.kernel(body, out_type=array((64, 16), F32), scratch_types=[right.scratch])
    shapes = [array((64, 32), dtype), array((16, 32), dtype), array((1,), jnp.int32)]
    text = compiled(kernel, *shapes)
    inside = text[text.index("wgmma.fence") : text.index("wgmma.wait_group")]
    assert len(lines(inside, "wgmma.mma_async")) == 32 * dtype.itemsize // 32
    assert not lines(inside, "mov")
    loop = text[text.rindex("$L__BB", 0, text.index("wgmma.fence")) : text.index("wgmma.fence")]
    assert not lines(loop, "(mov|mul|cvt)")


@pytest.mark.parametrize(
    ("m", "n", "dtype", "counts"),
    [
        (64, 256, BF16, [256]),
        (64, 264, BF16, [256, 8]),
        (128, 40, BF16, [40, 40]),
        (64, 40, I8, [32, 8]),
        (64, 24, I8, [24]),
        (64, 280, I8, [256, 24]),
    ],
)
def test_instructions_of_one_product(m, n, dtype, counts):
    """As wide as they can be; one fence and one group for all of them."""
    k = 32 // dtype.itemsize
    left, right = Operand(m, k, dtype, 32), Operand(k, n, dtype, 32, True)
    accumulator = I32 if dtype == I8 else F32
    arrays = [array(left.stored_shape, dtype), array(right.stored_shape, dtype)]
    text = compiled(multiply(left, right, accumulator), *arrays)
    found = re.findall(r"m64n(\d+)k", "".join(lines(text, "wgmma.mma_async")))
    assert [int(one) for one in found] == counts
    assert len(lines(text, "wgmma.fence")) == len(lines(text, "wgmma.commit_group")) == 1


@pytest.mark.parametrize("kind", ["traced", "known", "short"])
def test_loop(kind):
    """Accumulators stay where they are: nothing in a loop moves registers."""

    def function(acc, a, b, count_ref):
        count = {"traced": count_ref[0], "known": 100, "short": 2}[kind]
        pl.loop(0, count)(lambda _: plgpu.wgmma(acc, a, b))

    text = ptx(function, further=(array((1,), jnp.int32),))
    inside = between(text)
    assert not lines(inside, "mov")
    if kind != "short":
        assert len(lines(text, "wgmma.fence")) == 1


def test_two_accumulators_in_a_loop():
    """Each waits for its own products; the loop moves nothing."""

    def body(a_ref, b_ref, count_ref, out_ref, a_smem, b_smem):
        def scope(first, second):
            @pl.loop(0, count_ref[0])
            def _(_):
                plgpu.wgmma(first, a_smem, b_smem)
                plgpu.wgmma(second, a_smem, b_smem)
                plgpu.wgmma_wait(1)

            return first[...] + second[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 16)), plgpu.ACC((64, 16)))

    kernel = plgpu.kernel(
        body, out_type=array((64, 16), F32), scratch_types=[LEFT.scratch, RIGHT.scratch]
    )
    text = compiled(kernel, array((64, 32)), array((32, 16)), array((1,), jnp.int32))
    inside = text[text.index("wgmma.fence") : text.index("wgmma.wait_group.sync.aligned 1")]
    assert not lines(inside, "mov")
    assert len(lines(text, "wgmma.wait_group")) <= 3


def test_read_does_not_copy():
    """Registers that are used again after a read are not copied before its wait."""

    def function(acc, a, b, out_ref):
        plgpu.wgmma(acc, a, b)
        out_ref[...] = acc[...]
        plgpu.wgmma(acc, a, b)

    def body(a_ref, b_ref, first_ref, out_ref, a_smem, b_smem):
        def scope(acc):
            function(acc, a_smem, b_smem, first_ref)
            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 16)))

    kernel = plgpu.kernel(
        body, out_type=[array((64, 16), F32)] * 2, scratch_types=[LEFT.scratch, RIGHT.scratch]
    )
    text = compiled(kernel, array((64, 32)), array((32, 16)))
    assert not lines(between(text), "mov")


@pytest.mark.parametrize("n", [0, 3, 7])
def test_wait(n):
    def function(acc, a, b):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(n)
        plgpu.wgmma(acc, a, b)

    waits = lines(ptx(function), "wgmma.wait_group")
    assert waits == [f"wgmma.wait_group.sync.aligned {n}", "wgmma.wait_group.sync.aligned 0"]


def test_load_without_a_wait():
    """The wait that was before is the only one."""

    def body(a_ref, b_ref, out_ref, a_smem, b_smem):
        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            return plgpu.wgmma_accumulator_load(acc, wait_n=None) * 2

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 16)))

    kernel = plgpu.kernel(
        body, out_type=array((64, 16), F32), scratch_types=[LEFT.scratch, RIGHT.scratch]
    )
    text = compiled(kernel, array((64, 32)), array((32, 16)))
    assert len(lines(text, "wgmma.wait_group")) == 1
    after = text[text.index("wgmma.wait_group") :]
    assert len(lines(after, "(add|mul)\\.(rn\\.)?f32")) == 8


def test_contents_are_set_before_the_fence():
    """What ordinary code puts in an accumulator is done when the fence comes."""

    def function(acc, a, b, c_ref):
        acc[...] = plgpu.load(c_ref, (), layout=plgpu.Layout.WGMMA) * 3
        plgpu.wgmma(acc, a, b)

    text = ptx(function, further=(array((64, 16), F32),))
    before, inside = text[: text.index("wgmma.fence")], between(text)
    assert len(lines(before, "(add|mul|fma)\\.(rn\\.)?f32")) == 8
    assert not lines(inside, "(add|mul|fma)\\.(rn\\.)?f32|mov")


def test_branch_before_the_fence():
    """Registers chosen by a branch are there when the fence comes."""

    def function(acc, a, b, c_ref):
        def replace():
            acc[...] = plgpu.load(c_ref, (), layout=plgpu.Layout.WGMMA)

        lax.cond(c_ref[0, 0] > 0, replace, lambda: None)
        plgpu.wgmma(acc, a, b)

    text = ptx(function, further=(array((64, 16), F32),))
    assert not lines(between(text), "(mov|selp)")


def test_zeros_of_a_branch_and_its_loop_are_made_once():
    def function(acc, a, b, times):
        count = times[0]

        @pl.when(count > 0)
        def _():
            def step(_, carry):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(0, count, step, None)

    right = Operand(32, 128, BF16, 128)
    text = ptx(function, right=right, n=128, further=[array((1,), I32)])
    # 64 registers of each lane.
    assert 64 <= len(lines(text, r"mov\.b32 ")) < 64 + 16
