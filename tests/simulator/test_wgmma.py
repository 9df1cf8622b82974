"""``wgmma.mma_async`` against double precision and integers."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
from simulator_support import module, run_ptx
from wgmma_forms import FORMS, LAYOUTS, initial, plain, register_kind, suffix, tail
from wgmma_programs import (
    DEPTH,
    RESULTS,
    WAIT,
    Matrix,
    accumulator_values,
    accumulator_words,
    descriptor_code,
    listed,
    load_words,
    multiplicand_words,
    program,
    random_values,
    store,
    store_words,
    widened,
)

from pallasite_hopper import plugin
from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError
from pallasite_simulator.programs import load

TOLERANCE = {"f16": 2e-3, "f32": 2e-6}


def run(one, **options):
    run_ptx(one.ptx, *one.arrays, grid=one.grid, block=one.block, shared=one.shared, **options)
    return one.arrays[2]


def expected(a, b, kinds, held=None, negate=False):
    """D of one instruction, in double precision."""
    product = widened(a, kinds[1]) @ widened(b, kinds[2]).T
    product = -product if negate else product
    return product if held is None else product + held.astype(np.float64)


def check(got, reference, kind, terms=1):
    if kind == "s32":
        wrapped = (reference.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        np.testing.assert_array_equal(got, wrapped)
        return
    scale = np.abs(reference).max()
    error = np.abs(got.astype(np.float64) - reference).max()
    assert error <= TOLERANCE[kind] * scale * terms, (error, scale)


@pytest.mark.parametrize("in_registers", [False, True], ids=["descriptor", "registers"])
@pytest.mark.parametrize("kinds", FORMS, ids=".".join)
def test_all_shapes(kinds, in_registers):
    d, a_kind, b_kind = kinds
    random = np.random.default_rng(1)
    sizes = [n for n in range(8, 257, 8) if d != "s32" or n <= 32 or n % 16 == 0]
    a, b = random_values(random, a_kind, 64), random_values(random, b_kind, 256)
    matrix_a, matrix_b = plain(64, 0), plain(256, 2048)
    image = np.zeros((1, 2048 + 8192), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    words, code, held = [multiplicand_words(a, a_kind)], [], {}
    code += descriptor_code("a", matrix_a) + descriptor_code("b", matrix_b)
    code += load_words("ra", 4, 0)
    first, places = 4, {}
    for n in sizes:
        held[n] = initial(random, d, n)
        words.append(accumulator_words(held[n]))
        count = words[-1].shape[1]
        places[n] = first - 4
        code += load_words(f"d{n}_", count, first, register_kind(d))
        first += count
    code.append("wgmma.fence.sync.aligned;")
    for n in sizes:
        count = words[1 + sizes.index(n)].shape[1]
        operand = listed("ra", 4) if in_registers else "%a"
        code.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{DEPTH[a_kind]}.{'.'.join(kinds)}"
            f"{suffix(kinds)} {listed(f'd{n}_', count)}, {operand}, %b,"
            f" {tail(kinds, in_registers=in_registers)};"
        )
    code += WAIT
    for n in sizes:
        code += store_words(f"d{n}_", words[1 + sizes.index(n)].shape[1], places[n])
    results = run(program(code, image, np.concatenate(words, axis=1), first - 4))
    for n in sizes:
        count = words[1 + sizes.index(n)].shape[1]
        got = accumulator_values(results[:, places[n] : places[n] + count], d)
        check(got, expected(a, b[:n], kinds, held[n]), d)


@pytest.mark.parametrize("which", ["a", "b", "both"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_16_bits(name, which):
    kinds, n = ("f32", "f16", "f16"), 128
    random = np.random.default_rng(2)
    a, b = random_values(random, "f16", 64), random_values(random, "f16", n)
    matrix_a = LAYOUTS[name](64, 0) if which != "b" else plain(64, 0)
    matrix_b = LAYOUTS[name](n, 32768) if which != "a" else plain(n, 32768)
    image = np.random.default_rng(3).integers(0, 60, (1, 98304), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    code = descriptor_code("a", matrix_a) + descriptor_code("b", matrix_b)
    code += [
        ".reg .f32 %d<64>;",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {listed('d', 64)}, %a, %b,"
        f" {tail(kinds, '0', transposed=(int(matrix_a.transposed), int(matrix_b.transposed)))};",
        *WAIT,
        *store_words("d", 64, 0),
    ]
    results = run(program(code, image, np.zeros((128, 1), np.uint32), 64))
    check(accumulator_values(results, "f32"), expected(a, b, kinds), "f32")


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    "kinds", [("f32", "tf32", "tf32"), ("f32", "e4m3", "e5m2"), ("s32", "s8", "u8")], ids=".".join
)
def test_layouts_of_other_sizes(kinds, swizzle):
    d, a_kind, b_kind = kinds
    random = np.random.default_rng(4)
    a, b = random_values(random, a_kind, 64), random_values(random, b_kind, 64)
    if swizzle:
        matrix_a = Matrix(swizzle, False, 16, 8 * swizzle, 0, swizzle - 32)
        matrix_b = Matrix(swizzle, False, 16, 8 * swizzle, 16384, 0)
    else:
        matrix_a, matrix_b = plain(64, 0), plain(64, 16384)
    image = np.zeros((1, 32768), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    code = descriptor_code("a", matrix_a) + descriptor_code("b", matrix_b)
    code += [
        f".reg .{register_kind(d)} %d<32>;",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n64k{DEPTH[a_kind]}.{'.'.join(kinds)}"
        f" {listed('d', 32)}, %a, %b, {tail(kinds, '0')};",
        *WAIT,
        *store_words("d", 32, 0),
    ]
    results = run(program(code, image, np.zeros((128, 1), np.uint32), 32))
    check(accumulator_values(results, d), expected(a, b, kinds), d)


@dataclasses.dataclass
class Small:
    """A program with one instruction of f16, of which parts are varied."""

    kinds: tuple[str, str, str] = ("f32", "f16", "f16")
    scale: str = "%yes"
    signs: tuple[int, int] = (1, 1)
    setup: str = ""
    types: str = ""
    a: np.ndarray | None = None

    def run(self, held, n=16, block=128):
        random = np.random.default_rng(5)
        d, a_kind, b_kind = self.kinds
        a, b = random_values(random, a_kind, 64), random_values(random, b_kind, n)
        a = a if self.a is None else self.a
        matrix_a, matrix_b = plain(64, 0), plain(n, 2048)
        image = np.zeros((1, 4096), np.uint8)
        store(image[0], matrix_a, a)
        store(image[0], matrix_b, b)
        words = np.tile(accumulator_words(held), (block // 128, 1))
        count = words.shape[1]
        types = self.types or ".".join(self.kinds)
        code = descriptor_code("a", matrix_a) + descriptor_code("b", matrix_b)
        code += load_words("d", count, 0, register_kind(d))
        code += [
            self.setup,
            "wgmma.fence.sync.aligned;",
            f"wgmma.mma_async.sync.aligned.m64n{n}k{DEPTH[a_kind]}.{types}"
            f" {listed('d', count)}, %a, %b, {tail(self.kinds, self.scale, self.signs)};",
            *WAIT,
            *store_words("d", count, 0),
        ]
        results = run(program(code, image, words, count, block))
        return a, b, results


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_negation(signs):
    held = np.arange(64 * 16, dtype=np.float32).reshape(64, 16) / 64
    a, b, results = Small(signs=signs).run(held)
    reference = expected(a, b, ("f32", "f16", "f16"), held, negate=signs[0] * signs[1] < 0)
    check(accumulator_values(results, "f32"), reference, "f32")


@pytest.mark.parametrize("scale", ["%yes", "%no", "!%no", "!%yes", "0", "1"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_scale(scale, kind):
    held = np.full((64, 16), np.nan if scale in ("%no", "!%yes", "0") else 2.0, RESULTS[kind])
    a, b, results = Small((kind, "f16", "f16"), scale=scale).run(held)
    keep = scale in ("%yes", "!%no", "1")
    reference = expected(a, b, (kind, "f16", "f16"), held if keep else None)
    check(accumulator_values(results, kind), reference, kind)


def test_scale_differs_between_warpgroups():
    held = np.full((64, 16), 5.0, np.float32)
    setup = "mov.u32 %s0, %tid.x; setp.ge.u32 %yes, %s0, 128;"
    a, b, results = Small(setup=setup).run(held, block=256)
    for group, keep in enumerate((None, held)):
        got = accumulator_values(results[128 * group : 128 * group + 128], "f32")
        check(got, expected(a, b, ("f32", "f16", "f16"), keep), "f32")


TYPES_WITH_SATURATION = ["satfinite.s32.s8.u8", "s32.satfinite.s8.u8", "s32.s8.u8.satfinite"]


@pytest.mark.parametrize("types", ["s32.s8.u8", *TYPES_WITH_SATURATION])
def test_integers_at_the_bounds(types):
    held = np.full((64, 16), 2**31 - 100, np.int32)
    held[:, ::2] = -(2**31) + 100
    kinds = ("s32", "s8", "u8")
    a, b, results = Small(kinds, types=types).run(held)
    exact = expected(a, b, kinds, held).astype(np.int64)
    assert (exact > 2**31 - 1).any() and (exact < -(2**31)).any()
    if "satfinite" in types:
        exact = exact.clip(-(2**31), 2**31 - 1)
    check(accumulator_values(results, "s32"), exact, "s32")


def test_low_bits_of_tf32_are_ignored():
    small = Small(("f32", "tf32", "tf32"), scale="0")
    held = np.zeros((64, 16), np.float32)
    a, _, results = small.run(held)
    assert (a.view(np.uint32) & 0x1FFF).any()
    small.a = (a.view(np.uint32) & 0xFFFFE000).view(np.float32)
    _, _, others = small.run(held)
    np.testing.assert_array_equal(results, others)


# Programs of several instructions and warpgroups --------------------------------------------------


def test_a_product_of_several_instructions():
    """Two blocks of two warpgroups multiply tiles of 64 along K in four steps, as CUTLASS does."""
    random = np.random.default_rng(7)
    n, deep = 64, 64
    a = random.standard_normal((2, 2, 64, deep)).astype(np.float16)
    b = random.standard_normal((2, n, deep)).astype(np.float16)
    images = np.zeros((2, 2 * 8192 + 8192), np.uint8)
    whole = lambda start: Matrix(128, False, 16, 1024, start)  # noqa: E731
    for block in range(2):
        for group in range(2):
            store(images[block], whole(8192 * group), a[block, group])
        store(images[block], whole(16384), b[block])
    words = np.zeros((512, 1), np.uint32)
    code = descriptor_code("a", whole(0)) + descriptor_code("b", whole(16384))
    code += [
        ".reg .b64 %skip; mov.u32 %s0, %tid.x; shr.u32 %s0, %s0, 7;",
        "mul.wide.u32 %skip, %s0, 512; add.s64 %a, %a, %skip;",
        ".reg .f32 %d<32>;",
        *[f"mov.f32 %d{i}, 0f3F800000;" for i in range(32)],
        "wgmma.fence.sync.aligned;",
    ]
    for _ in range(deep // 16):
        code += [
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {listed('d', 32)}, %a, %b,"
            " %yes, 1, 1, 0, 0;",
            "add.s64 %a, %a, 2; add.s64 %b, %b, 2;",
        ]
    code += [*WAIT, *store_words("d", 32, 0)]
    execution, results = run_counted(program(code, images, words, 32, 256))
    for block in range(2):
        for group in range(2):
            start = 256 * block + 128 * group
            got = accumulator_values(results[start : start + 128], "f32")
            check(got, 1 + a[block, group].astype(float) @ b[block].astype(float).T, "f32")
    assert execution.counters["tensor operations"] == 4 * 2 * 64 * n * deep


def run_counted(one):
    execution = run_ptx(one.ptx, *one.arrays, grid=one.grid, block=one.block, shared=one.shared)
    return execution, one.arrays[2]


@pytest.mark.parametrize("block", [128, 256, 384])
@pytest.mark.parametrize("order", ["by warp", "by group", "some groups", "alone"])
def test_warps_that_arrive_apart(order, block):
    """Warps take different ways to the instruction, or some warpgroups do not get there."""
    conditions = {
        "by warp": "and.b32 %s2, %s1, 1; setp.eq.u32 %p, %s2, 0;",
        "by group": "shr.u32 %s2, %s1, 2; setp.eq.u32 %p, %s2, 1;",
        "some groups": "shr.u32 %s2, %s1, 2; setp.eq.u32 %p, %s2, 1;",
        "alone": "setp.eq.u32 %p, %s1, 3;",
    }
    setup = (
        ".reg .pred %p; .reg .b32 %lost;"
        " mov.u32 %s1, %tid.x; shr.u32 %s1, %s1, 5;" + conditions[order] + " @%p bra $slow;"
        " bra.uni $join; $slow: mov.u32 %lost, 5; $slower: sub.u32 %lost, %lost, 1;"
        " setp.ne.u32 %more, %lost, 0; @%more bra $slower;"
        + (" exit;" if order == "some groups" else " bar.warp.sync 0xffffffff;")
        + " $join:"
    )
    held = np.full((64, 16), 2.0, np.float32)
    a, b, results = Small(setup=setup).run(held, block=block)
    for group in range(block // 128):
        words = results[128 * group : 128 * group + 128]
        if order == "some groups" and group == 1:
            assert (words == 0xCDCDCDCD).all()
            continue
        check(accumulator_values(words, "f32"), expected(a, b, Small().kinds, held), "f32")


def test_instructions_in_both_branches():
    """Each warpgroup takes its own branch with its own instruction."""
    random = np.random.default_rng(8)
    a, b = random_values(random, "f16", 64), random_values(random, "f16", 16)
    matrix_a, matrix_b = plain(64, 0), plain(16, 2048)
    image = np.zeros((1, 4096), np.uint8)
    store(image[0], matrix_a, a)
    store(image[0], matrix_b, b)
    product = (
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {listed('d', 8)}, %a, %b,"
        " 0, SIGN, 1, 0, 0;"
    )
    code = descriptor_code("a", matrix_a) + descriptor_code("b", matrix_b)
    code += [
        ".reg .f32 %d<8>; .reg .pred %p;",
        "mov.u32 %s0, %tid.x; setp.ge.u32 %p, %s0, 128;",
        "@%p bra $second;",
        "wgmma.fence.sync.aligned;",
        product.replace("SIGN", "1"),
        "bra.uni $done;",
        "$second:",
        "wgmma.fence.sync.aligned;",
        product.replace("SIGN", "-1"),
        "$done:",
        *WAIT,
        *store_words("d", 8, 0),
    ]
    results = run(program(code, image, np.zeros((256, 1), np.uint32), 8, 256))
    for group, sign in enumerate((1, -1)):
        got = accumulator_values(results[128 * group : 128 * group + 128], "f32")
        check(got, sign * expected(a, b, Small().kinds), "f32")


# Errors -------------------------------------------------------------------------------------------


def test_a_warp_that_never_comes():
    setup = ".reg .pred %p; mov.u32 %s1, %tid.x; setp.ge.u32 %p, %s1, 96; @%p exit;"
    with pytest.raises(DeadlockError, match="the other warps of its warpgroup"):
        Small(setup=setup).run(np.zeros((64, 16), np.float32))


def test_a_thread_that_has_ended():
    setup = ".reg .pred %p; mov.u32 %s1, %tid.x; setp.eq.u32 %p, %s1, 37; @%p exit;"
    with pytest.raises(SimulationError, match="all 32 threads of a warp must execute") as caught:
        Small(setup=setup).run(np.zeros((64, 16), np.float32))
    assert "31 threads of the warp of thread 32" in str(caught.value)


def test_a_block_without_whole_warpgroups():
    one = program(
        ["wgmma.fence.sync.aligned;", ".reg .f32 %d<4>; .reg .b64 %a;", "mov.u64 %a, 64;"]
        + [f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {listed('d', 4)}, %a, %a,"]
        + ["0, 1, 1, 0, 0;"],
        np.zeros((1, 1024), np.uint8),
        np.zeros((192, 1), np.uint32),
        1,
        192,
    )
    with pytest.raises(SimulationError, match="all 128 threads of a warpgroup") as caught:
        run(one)
    assert "in a block of 192 threads" in str(caught.value)


@pytest.mark.parametrize("advance", [0, 80])
def test_a_matrix_beyond_shared_memory(advance):
    setup = f"add.s64 %b, %b, {advance + 100};"
    with pytest.raises(SimulationError, match="beyond the block's shared memory") as caught:
        Small(setup=setup).run(np.zeros((64, 16), np.float32))
    assert "thread 0 of block (0, 0, 0)" in str(caught.value)
    assert "swizzle none" in str(caught.value)


def test_a_matrix_below_shared_memory():
    with pytest.raises(SimulationError, match="beyond the block's shared memory"):
        Small(setup="mov.u64 %b, 0;").run(np.zeros((64, 16), np.float32))


def test_threads_that_do_not_agree():
    setup = ".reg .pred %p; mov.u32 %s1, %tid.x; setp.eq.u32 %p, %s1, 70; @%p add.s64 %b, %b, 1;"
    with pytest.raises(SimulationError, match="have different matrix descriptors"):
        Small(setup=setup).run(np.zeros((64, 16), np.float32))


D = "{%f0, %f1, %f2, %f3}"
WRONG = [
    (f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {D}, %a, %b, %r0, 0, %p, 1, 1, 0, 0;",
     "sparse"),
    (f"wgmma.mma_async.sync.aligned.m64n8k8.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 0, 0;", "shape"),
    (f"wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 0, 0;", "shape"),
    (f"wgmma.mma_async.sync.aligned.m64n264k16.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 0, 0;", "shape"),
    (f"wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 {D}, %a, %b, %p;", "shape"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.bf16 {D}, %a, %b, %p, 1, 1, 0, 0;", "types"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f16.bf16.bf16 {D}, %a, %b, %p, 1, 1, 0, 0;", "types"),
    (f"wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1 {D}, %a, %b, %p;", "types"),
    (f"wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.xor.popc {D}, %a, %b, %p;", "popc"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.satfinite.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 0, 0;",
     "satfinite"),
    (f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 0, 0;",
     "registers of the accumulator"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f0, %f2, %f3}, %a, %b, %p, 1, 1, 0,"
     " 0;", "different ones"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, {{%r0, %r1}}, %b, %p, 1, 1, 0;",
     "four registers"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, {{%r0, %r1, %r2, %r3}}, %p, 1,"
     " 1, 0, 0;", "descriptor"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, %b, %p, 1, 1;", "operands"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, %b, %p, 0, 1, 0, 0;", "-1 or 1"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, %b, %p, 1, 1, 2, 0;", "0 or 1"),
    (f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, %b, 2, 1, 1, 0, 0;", "scale-d"),
    (f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {D}, %a, %b, %p, 1, 1;", "operands"),
    ("wgmma.fence.aligned;", "unknown form"),
    ("wgmma.wait_group.sync.aligned %r0;", "constant"),
    ("setmaxnreg.inc.sync.aligned.u32 20;", "24 to 256"),
    ("setmaxnreg.dec.sync.aligned.u32 16;", "24 to 256"),
    ("setmaxnreg.dec.sync.aligned.u32 264;", "24 to 256"),
    ("setmaxnreg.sync.aligned.u32 24;", "unknown form"),
    ("setmaxnreg.dec.sync.aligned.u32 %r0;", "constant"),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "message"), WRONG)
def test_wrong_instructions(instruction, message):
    body = ".reg .f32 %f<8>; .reg .b32 %r<8>; .reg .b64 %a, %b; .reg .pred %p;\n" + instruction
    with pytest.raises(PtxError, match=message) as caught:
        load(module(body))
    assert caught.value.position.line > 1


def test_other_targets_have_no_wgmma():
    with pytest.raises(PtxError, match="sm_90a"):
        load(
            module(
                ".reg .f32 %f<4>; .reg .b64 %a;"
                f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %a, %a, 1, 1, 1, 0, 0;",
                target="sm_100a",
            )
        )


def test_rules_without_the_simulator(monkeypatch):
    assert {rule.name for rule in plugin.pallasite_instructions()} >= {"wgmma.mma_async"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plugin.pallasite_instructions() == []


def test_register_counts():
    one = program(
        [
            ".reg .pred %p; mov.u32 %s0, %tid.x; setp.lt.u32 %p, %s0, 128;",
            "@%p bra $less;",
            "setmaxnreg.inc.sync.aligned.u32 232;",
            "bra.uni $done;",
            "$less:",
            "setmaxnreg.dec.sync.aligned.u32 24;",
            "$done: st.global.b32 [%results], %s0;",
        ],
        np.zeros((1, 16), np.uint8),
        np.zeros((256, 1), np.uint32),
        1,
        256,
    )
    np.testing.assert_array_equal(run(one)[:, 0], np.arange(256))


# Events -------------------------------------------------------------------------------------------


class Recorder(Observer):
    """Keeps what it is told of asynchronous operations."""

    def __init__(self):
        self.events = []

    def begin(self, operation):
        self.events.append(("begin", operation))

    def async_access(self, operation, kind, space, offsets, size, owners=None):
        self.events.append(("access", operation, kind, space, offsets, size, owners))

    def registers_in_flight(self, operation, registers):
        self.events.append(("registers", operation, tuple(registers)))

    def complete_for(self, operations, lanes, reads_only=False):
        self.events.append(("complete", tuple(operations), lanes.copy()))

    def misuse(self, lanes, message, instruction):
        self.events.append(("misuse", lanes.copy(), message))

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


def observed(code, image, threads):
    recorder = Recorder()
    one = program(code, image, np.zeros((threads, 1), np.uint32), 1, threads)
    run(one, make_observer=lambda: recorder)
    return recorder


def test_what_an_observer_hears():
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %a, %b, 0, 1, 1,"
        " 0, 0;"
    )
    commit = "wgmma.commit_group.sync.aligned;"
    code = [
        *descriptor_code("a", plain(64, 0)),
        *descriptor_code("b", plain(8, 2048)),
        ".reg .f32 %f<4>;",
        "wgmma.fence.sync.aligned;",
        product, commit, product, product, commit,
        "wgmma.wait_group.sync.aligned 1;",
        product,
        "wgmma.wait_group.sync.aligned 0;",
        commit,
        "wgmma.wait_group.sync.aligned 0;",
    ]  # fmt: skip
    recorder = observed(code, np.zeros((1, 4096), np.uint8), 256)
    operations = [one for (one,) in recorder.of("begin")]
    assert len(operations) == 4
    assert not recorder.of("misuse")
    for operation in operations:
        assert (operation.engine, operation.proxy, operation.together) == ("wgmma", "async", 128)
        np.testing.assert_array_equal(operation.lanes, np.arange(256))
    first, *_ = operations
    reads = [event for event in recorder.of("access") if event[0] is first]
    assert {(kind, space, size) for _, kind, space, _, size, _ in reads} == {("read", "shared", 16)}
    for group in (0, 1):
        mine = np.concatenate([offsets[owners // 128 == group] for *_, offsets, _, owners in reads])
        np.testing.assert_array_equal(
            np.unique(mine), 1024 + np.r_[np.arange(0, 2048, 16), np.arange(2048, 2304, 16)]
        )
    assert {len(registers) for _, registers in recorder.of("registers")} == {4}
    done = [[operations.index(one) for one in finished] for finished, _ in recorder.of("complete")]
    assert done == [[0], [1, 2], [3]]
    assert all(len(lanes) == 256 for _, lanes in recorder.of("complete"))


def test_groups_of_warps_are_their_own():
    """One warpgroup waits, the other one does not."""
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2,"
        " %r3}, %b, 0, 1, 1, 0;"
    )
    code = [
        *descriptor_code("b", plain(8, 2048)),
        ".reg .f32 %f<4>; .reg .b32 %r<4>; .reg .pred %p;",
        *[f"mov.b32 %r{i}, 0;" for i in range(4)],
        "mov.u32 %s0, %tid.x; setp.lt.u32 %p, %s0, 128;",
        "wgmma.fence.sync.aligned;",
        product,
        "wgmma.commit_group.sync.aligned;",
        "@%p wgmma.wait_group.sync.aligned 0;",
    ]
    recorder = observed(code, np.zeros((1, 4096), np.uint8), 256)
    ((_, lanes),) = recorder.of("complete")
    np.testing.assert_array_equal(lanes, np.arange(128))
    ((_, registers),) = recorder.of("registers")
    assert len(set(registers)) == 8


def test_a_missing_fence():
    code = [
        *descriptor_code("a", plain(64, 0)),
        *descriptor_code("b", plain(8, 2048)),
        ".reg .f32 %f<4>; .reg .pred %p;",
        "mov.u32 %s0, %tid.x; setp.lt.u32 %p, %s0, 128;",
        "@%p wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %a, %b, 0, 1, 1,"
        " 0, 0;",
        *WAIT,
    ]
    recorder = observed(code, np.zeros((1, 4096), np.uint8), 256)
    ((lanes, message),) = recorder.of("misuse")
    np.testing.assert_array_equal(lanes, np.arange(128, 256))
    assert "wgmma.fence" in message
