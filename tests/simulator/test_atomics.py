"""Atomic operations against a sequential reference, in the order of lanes."""

from __future__ import annotations

import struct
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from simulator_support import run_body

from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError
from pallasite_simulator.instructions.contention import (
    accumulate,
    group_by_place,
    scan,
    scan_invertible,
    stable_order,
    stepwise,
)
from pallasite_simulator.instructions.updates import compare_and_swap, update, update_of
from pallasite_simulator.launch import Pointer
from pallasite_simulator.types import TYPES

REGISTERS = """
.reg .b16 %h<10>; .reg .b32 %r<10>; .reg .b64 %rd<12>; .reg .f32 %f<10>; .reg .f64 %fd<6>;
.reg .b128 %q<4>; .reg .pred %p<4>;
"""


def run(body, *arrays, **options):
    return run_body(REGISTERS + body, *arrays, **options)


def error_of(body, *arrays, **options):
    with pytest.raises((SimulationError, PtxError)) as error:
        run(body, *arrays, **options)
    return str(error.value)


# The sequential reference: integers of Python, and scalars of NumPy for floats -------------------


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) else value


INTEGERS = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


def sequence(operation, kind, memory, places, values):
    """Memory after, and what each operation found; all as unsigned integers."""
    bits = int(kind[1:])
    memory, found = [int(one) for one in memory], []
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        old = memory[place]
        found.append(old)
        operands = (old, value)
        if kind[0] == "s":
            operands = (signed(old, bits), signed(value, bits))
        memory[place] = INTEGERS[operation](*operands) % (1 << bits)
    dtype = f"u{bits // 8}"
    return np.array(memory, dtype), np.array(found, dtype)


def float_sequence(memory, places, values):
    memory, found = memory.copy(), np.empty_like(values)
    for number, place in enumerate(places):
        found[number] = memory[place]
        memory[place] = memory[place] + values[number]
    return memory, found


OPERATIONS = [
    (operation, kind)
    for operation, kinds in {
        "add": ("u32", "s32", "u64"),
        "min": ("u32", "s32", "u64", "s64"),
        "max": ("u32", "s32", "u64", "s64"),
        "inc": ("u32",),
        "dec": ("u32",),
        "and": ("b32", "b64"),
        "or": ("b32", "b64"),
        "xor": ("b32", "b64"),
        "exch": ("b32", "b64"),
    }.items()
    for kind in kinds
]

LANES = 192


def contended(count, places, seed=0, bits=32):
    """Contents, the places of the lanes (some far more popular than others), and values."""
    random = np.random.default_rng(seed)
    chosen = (random.random(count) ** 3 * places).astype(np.uint32)
    dtype = f"u{bits // 8}"
    contents = random.integers(0, 2**bits, places, np.uint64).astype(dtype)
    values = random.integers(0, 2**bits, count, np.uint64).astype(dtype)
    small = random.random(count) < 0.5
    return contents, chosen, np.where(small, values % 50, values).astype(dtype)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize(("operation", "kind"), OPERATIONS)
def test_contention(operation, kind, space):
    bits = int(kind[1:])
    contents, places, values = contended(LANES, 12, bits=bits)
    memory, found = contents.copy(), np.zeros_like(values)
    width = bits // 8
    register = "%r" if bits == 32 else "%rd"
    name = "" if space == "generic" else f".{space}"
    local = "shared" if space == "shared" else "global"
    run(
        f"""
        add.s64 %rd1, %array1, %offset4;
        ld.global.b32 %r1, [%rd1];
        mul.wide.u32 %rd2, %thread, {width};
        add.s64 %rd3, %array2, %rd2;
        ld.global.b{bits} {register}5, [%rd3];
        mul.wide.u32 %rd7, %r1, {width};
        add.s64 %rd8, %array0, %rd7;
        .shared .align 8 .b8 there[96];
        mov.u64 %rd9, %rd8;
        """
        + (
            f"""
            mov.u64 %rd9, there;
            setp.ge.u32 %p1, %thread, 12;
            @%p1 bra FILLED;
            add.s64 %rd10, %array0, %rd2;
            add.s64 %rd11, %rd9, %rd2;
            ld.global.b{bits} {register}6, [%rd10];
            st.shared.b{bits} [%rd11], {register}6;
            FILLED: bar.sync 0;
            add.s64 %rd9, %rd9, %rd7;
            """
            if space == "shared"
            else ""
        )
        + f"""
        atom{name}.{operation}.{kind} {register}6, [%rd9], {register}5;
        add.s64 %rd3, %array3, %rd2;
        st.global.b{bits} [%rd3], {register}6;
        bar.sync 0;
        ld.{local}.b{bits} {register}6, [%rd9];
        st.global.b{bits} [%rd8], {register}6;
        """,
        memory,
        places,
        values,
        found,
        block=LANES,
    )
    expected, expected_found = sequence(operation, kind, contents, places, values)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(found, expected_found)


@pytest.mark.parametrize(("operation", "kind"), [pair for pair in OPERATIONS if pair[0] != "exch"])
def test_reductions(operation, kind):
    bits = int(kind[1:])
    contents, places, values = contended(LANES, 12, seed=1, bits=bits)
    memory = contents.copy()
    register = "%r" if bits == 32 else "%rd"
    run(
        f"""
        add.s64 %rd1, %array1, %offset4;
        ld.global.b32 %r1, [%rd1];
        mul.wide.u32 %rd2, %thread, {bits // 8};
        add.s64 %rd3, %array2, %rd2;
        ld.global.b{bits} {register}5, [%rd3];
        mul.wide.u32 %rd2, %r1, {bits // 8};
        add.s64 %rd3, %array0, %rd2;
        red.global.{operation}.{kind} [%rd3], {register}5;
        """,
        memory,
        places,
        values,
        block=LANES,
    )
    np.testing.assert_array_equal(memory, sequence(operation, kind, contents, places, values)[0])


FLOATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(("count", "width"), [(500, 7), (500, 300), (700, 1), (5, 5)])
def test_sums_of_floats_are_rounded_in_order(kind, space, count, width):
    random = np.random.default_rng(count + width)
    dtype = np.dtype(FLOATS[kind])
    memory = random.normal(size=width).astype(dtype)
    places = (random.random(count) ** 2 * width).astype(np.int64)
    values = (random.normal(size=count) * 3.0 ** random.integers(-9, 3, count)).astype(dtype)
    expected, expected_found = float_sequence(memory, places, values)
    found, changed = update(memory, places, values, update_of("add", TYPES[kind], space))
    assert changed
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(found, expected_found)


def test_sums_that_become_subnormal_or_nan_on_the_way():
    tiny = np.float32(2**-126)
    values = np.array([1.5, -1.25, 3, 2**-3, -(2**-4), 4, 0], np.float32) * tiny
    places = np.zeros(7, np.int64)
    memory = np.array([-tiny], np.float32)
    found, _ = update(memory, places, values, update_of("add", TYPES["f32"], "global"))
    # -1 + 1.5 = 0.5, flushed; 0 - 1.25 = -1.25; + 3 = 1.75; the next two are subnormal; + 4 = 5.75
    expected = np.array([-1, 0, -1.25, 1.75, 1.75, 1.75, 5.75]) * tiny
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert memory[0] == np.float32(5.75) * tiny
    memory = np.array([-tiny], np.float32)
    update(memory, places, values, update_of("add", TYPES["f32"], "shared"))
    np.testing.assert_array_equal(
        memory, (np.float32(-1) + values[:2].sum() / tiny + 7.0625) * tiny
    )
    values[3] = np.nan
    for space in ("global", "shared"):
        memory = np.array([-tiny], np.float32)
        found, _ = update(memory, places, values, update_of("add", TYPES["f32"], space))
        assert np.isnan(found[4:]).all()
        assert not np.isnan(found[:4]).any()
        assert memory.view(np.uint32)[0] == 0x7FFFFFFF


@pytest.mark.parametrize("limits", ["same", "different"])
@pytest.mark.parametrize("operation", ["inc", "dec"])
def test_counters_that_wrap(operation, limits):
    random = np.random.default_rng(3)
    memory = np.array([0, 3, 5, 9, 2**32 - 1, 7], np.uint32)
    places = random.integers(0, len(memory), 300)
    bound = np.array([3, 3, 5, 4, 2**32 - 1, 0], np.uint32)
    values = bound[places]
    if limits == "different":
        values = np.where(random.random(300) < 0.3, random.integers(0, 9, 300), values)
    values = values.astype(np.uint32)
    expected, expected_found = sequence(operation, "u32", memory, places, values)
    found, _ = update(memory, places, values, update_of(operation, TYPES["u32"], "global"))
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(found, expected_found)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
@pytest.mark.parametrize("variety", [2, 6, 1000])
def test_compare_and_swap(kind, variety):
    """Many lanes want what is there, or what another lane stores there."""
    random = np.random.default_rng(variety)
    dtype = TYPES[kind].storage
    memory = random.integers(0, variety, 9).astype(dtype)
    places = (random.random(400) ** 2 * 9).astype(np.int64)
    wanted = random.integers(0, variety, 400).astype(dtype)
    values = random.integers(0, variety, 400).astype(dtype)
    expected, found, changed = memory.copy(), [], []
    for place, want, value in zip(places, wanted, values, strict=True):
        found.append(expected[place])
        changed.append(bool(expected[place] == want != value))
        if expected[place] == want:
            expected[place] = value
    ours, different = compare_and_swap(memory, places, wanted, values)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(ours, found)
    np.testing.assert_array_equal(different, changed)


def test_compare_and_swap_in_a_kernel():
    """Each thread's turn comes when it finds its own number."""
    found = np.zeros(128, np.uint32)
    counter = np.zeros(4, np.uint32)
    run(
        """
        add.u32 %r1, %thread, 1;
        atom.global.cas.b32 %r2, [%array0], %thread, %r1;
        add.s64 %rd1, %array1, %offset4;
        st.global.b32 [%rd1], %r2;
        and.b32 %r1, %thread, 1;
        cvt.u16.u32 %h1, %r1;
        xor.b16 %h2, %h1, 1;
        atom.global.cas.b16 %h3, [%array0+4], %h1, %h2;
        atom.global.cas.b64 %rd2, [%array0+8], 0, 5;
        """,
        counter,
        found,
    )
    assert counter.tolist() == [128, 0, 5, 0]
    np.testing.assert_array_equal(found, np.arange(128))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_accesses_of_128_bits(space):
    memory = np.array([1, 2], np.uint64)
    found = np.zeros((64, 4), np.uint64)
    place = "%array0"
    code = ".shared .align 16 .b8 there[16];\n"
    if space == "shared":
        place = "there"
        code += "ld.global.b128 %q1, [%array0]; st.shared.b128 [there], %q1; bar.sync 0;"
    run(
        code
        + f"""
        cvt.u64.u32 %rd1, %thread;
        add.u64 %rd2, %rd1, 1;
        mov.b128 %q1, {{%rd1, %rd2}};
        atom.{space}.exch.b128 %q2, [{place}], %q1;
        mov.b128 %q3, {{7, 9}};
        mov.b128 %q1, {{63, 64}};
        atom.{space}.cas.b128 %q3, [{place}], %q1, %q3;
        mul.wide.u32 %rd1, %thread, 32;
        add.s64 %rd1, %array1, %rd1;
        st.global.b128 [%rd1], %q2;
        st.global.b128 [%rd1+16], %q3;
        ld.{space}.b128 %q3, [{place}];
        st.global.b128 [%array0], %q3;
        """,
        memory,
        found,
        block=64,
    )
    numbers = np.arange(64)
    before = np.stack([numbers - 1, numbers], axis=1)
    before[0] = (1, 2)
    np.testing.assert_array_equal(found[:, :2], before)
    assert found[0, 2:].tolist() == [63, 64]
    assert (found[1:, 2:] == (7, 9)).all()
    assert memory.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("kind", "count", "dtype"),
    [
        ("f32", 2, np.float32),
        ("f32", 4, np.float32),
        ("f16", 8, np.float16),
        ("bf16", 4, ml_dtypes.bfloat16),
        ("f16x2", 4, np.float16),
        ("bf16x2", 2, ml_dtypes.bfloat16),
        ("f16x2", 1, np.float16),
    ],
)
@pytest.mark.parametrize("opcode", ["atom", "red"])
def test_vectors(opcode, kind, count, dtype):
    """Every element is updated on its own; lanes contend for vectors."""
    bits = TYPES[kind].bits
    each = bits // 8 // np.dtype(dtype).itemsize
    wide = count * each
    random = np.random.default_rng(count)
    contents = random.normal(size=(6, wide)).astype(dtype)
    values = random.normal(size=(96, wide)).astype(dtype)
    places = random.integers(0, 6, 96).astype(np.uint32)
    names = {16: "%h", 32: "%r"}[bits]
    parts = range(0, count, 4)

    def listed(first, letter=0):
        chosen = [f"{names}{letter + n}" for n in range(first, min(count, first + 4))]
        return chosen[0] if count == 1 else "{" + ", ".join(chosen) + "}"

    every = [f"{names}{number}" for number in range(count)]
    all_names = every[0] if count == 1 else "{" + ", ".join(every) + "}"
    vector = "" if count == 1 else f".v{min(count, 4)}"
    size = bits // 8
    memory, found = contents.copy(), np.zeros_like(values)
    noftz = "" if kind == "f32" else ".noftz"
    full = "" if count == 1 else f".v{count}"
    run(
        "\n".join(
            [
                "add.s64 %rd1, %array1, %offset4; ld.global.b32 %r9, [%rd1];",
                f"mul.wide.u32 %rd1, %r9, {size * count}; add.s64 %rd1, %array0, %rd1;",
                f"mul.wide.u32 %rd2, %thread, {size * count}; add.s64 %rd3, %array2, %rd2;",
                "add.s64 %rd4, %array3, %rd2;",
                *[f"ld.global{vector}.b{bits} {listed(n)}, [%rd3+{n * size}];" for n in parts],
                f"atom.global.add{noftz}{full}.{kind} {all_names}, [%rd1], {all_names};"
                if opcode == "atom"
                else f"red.global.add{noftz}{full}.{kind} [%rd1], {all_names};",
                *[f"st.global{vector}.b{bits} [%rd4+{n * size}], {listed(n)};" for n in parts],
            ]
        ),
        memory,
        places,
        values,
        found,
        block=96,
    )
    expected, before = contents.copy(), np.zeros_like(values)
    for lane, place in enumerate(places):
        before[lane] = expected[place]
        expected[place] += values[lane]
    np.testing.assert_array_equal(memory, expected)
    if opcode == "atom":
        np.testing.assert_array_equal(found, before)


def test_minimum_and_maximum_of_halves():
    nan = 0x7E01
    memory = np.array([0x8000, 0, nan, 0x3C00, nan, 0xFC00, 1, 0x8001], np.uint16)
    values = np.array([0, 0x8000, 0x3C00, nan, nan, 0x7C00, 2, 1], np.uint16)
    smallest, largest = memory.copy(), memory.copy()
    for code, array in (("min", smallest), ("max", largest)):
        run(
            f"""
            ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%array1];
            red.global.{code}.noftz.v4.f16x2 [%array0], {{%r1, %r2, %r3, %r4}};
            """,
            array,
            values,
            block=1,
        )
    assert smallest.tolist() == [0x8000, 0x8000, 0x3C00, 0x3C00, 0x7FFF, 0xFC00, 1, 0x8001]
    assert largest.tolist() == [0, 0, 0x3C00, 0x3C00, 0x7FFF, 0x7C00, 2, 1]


def test_generic_addresses_in_several_spaces():
    """Even lanes count in global memory, odd ones in shared memory."""
    counters, found = np.zeros(2, np.uint32), np.zeros(128, np.uint32)
    run(
        """
        .shared .b32 counter;
        st.shared.b32 [counter], 1000;
        bar.sync 0;
        mov.u32 %r1, counter;
        cvt.u64.u32 %rd1, %r1;
        cvta.shared.u64 %rd1, %rd1;
        and.b32 %r2, %thread, 1;
        setp.eq.u32 %p1, %r2, 0;
        selp.b64 %rd2, %array0, %rd1, %p1;
        atom.add.u32 %r3, [%rd2], 1;
        add.s64 %rd3, %array1, %offset4;
        st.global.b32 [%rd3], %r3;
        bar.sync 0;
        ld.shared.b32 %r3, [counter];
        st.global.b32 [%array0+4], %r3;
        """,
        counters,
        found,
    )
    assert counters.tolist() == [64, 1064]
    half = np.arange(64)
    np.testing.assert_array_equal(found[::2], half)
    np.testing.assert_array_equal(found[1::2], 1000 + half)


def test_shared_memory_of_the_cluster():
    """All blocks of a cluster count in the memory of the first."""
    result = np.zeros(4, np.uint32)
    run(
        """
        .shared .b32 counter;
        mov.u32 %r1, counter;
        mapa.shared::cluster.u32 %r2, %r1, 0;
        st.shared.b32 [counter], 0;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        red.relaxed.cluster.shared::cluster.add.u32 [%r2], 1;
        atom.shared::cluster.add.u32 %r3, [%r2], 2;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        ld.shared.b32 %r4, [counter];
        mov.u32 %r5, %ctaid.x;
        mul.wide.u32 %rd1, %r5, 4;
        add.s64 %rd1, %array0, %rd1;
        st.global.b32 [%rd1], %r4;
        """,
        result,
        grid=4,
        cluster=2,
        block=32,
    )
    assert result.tolist() == [192, 0, 192, 0]


def test_a_spin_lock():
    """Blocks take a lock in turn; a thread that does not get it lets others go on."""
    memory = np.zeros(2, np.uint32)
    run(
        """
        and.b32 %r1, %thread, 31;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra END;
        AGAIN:
        atom.acquire.gpu.global.cas.b32 %r2, [%array0], 0, 1;
        setp.ne.u32 %p2, %r2, 0;
        @%p2 bra AGAIN;
        ld.global.b32 %r3, [%array0+4];
        add.u32 %r3, %r3, 3;
        st.global.b32 [%array0+4], %r3;
        atom.release.gpu.global.exch.b32 %r2, [%array0], 0;
        END:
        """,
        memory,
        grid=40,
        block=128,
    )
    assert memory.tolist() == [0, 3 * 160]


def test_a_lock_that_nobody_gives_back():
    with pytest.raises(DeadlockError, match="poll for something that no thread does"):
        run(
            """
            AGAIN:
            atom.global.exch.b32 %r2, [%array0], 1;
            setp.ne.u32 %p2, %r2, 0;
            @%p2 bra AGAIN;
            """,
            np.zeros(1, np.uint32),
            block=32,
        )


def test_orders_scopes_and_cache_policies():
    memory = np.zeros(4, np.uint32)
    run(
        """
        atom.relaxed.cta.global.add.u32 %r1, [%array0], 1;
        atom.global.acquire.cluster.add.u32 %r1, [%array0], 1;
        atom.add.release.gpu.u32 %r1, [%array0], 1;
        atom.acq_rel.sys.global.add.u32 _, [%array0], 1;
        atom.gpu.global.add.L2::cache_hint.u32 %r1, [%array0], 1, 0;
        red.release.gpu.global.add.u32 [%array0], 1;
        red.relaxed.sys.add.L2::cache_hint.u32 [%array0], 1, %rd1;
        red.global.v2.f32.add [%array0+8], {0.0, 2.0};
        """,
        memory,
        block=32,
    )
    assert memory[0] == 32 * 7
    assert struct.unpack("f", memory[3].tobytes())[0] == 64.0


def test_no_update_of_arrays_that_cannot_be_written():
    constant = Pointer(np.zeros(4, np.uint32), "weights", False)
    with pytest.raises(SimulationError, match=r"read-only.*\n.*byte 4 of weights"):
        run_pointer("atom.global.add.u32 %r1, [%rd1+4], 1;", constant)
    with pytest.raises(SimulationError, match="out of bounds"):
        run_pointer("red.global.add.u32 [%rd1+16], 1;", constant)
    with pytest.raises(SimulationError, match=r"misaligned(.|\n)*multiple of 8"):
        run_pointer("red.global.add.v2.f32 [%rd1+4], {1.0, 1.0};", constant)


def run_pointer(code, pointer):
    from simulator_support import module, run_ptx

    ptx = module(REGISTERS + "ld.param.u64 %rd1, [p];" + code, [".u64 p"])
    return run_ptx(ptx, pointer, block=32)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("atom.global.add.s64 %rd1, [%rd2], %rd3;", "wrong operation or type"),
        ("atom.global.min.f32 %f1, [%rd1], %f2;", "wrong operation or type"),
        ("atom.global.and.u32 %r1, [%rd1], %r2;", "wrong operation or type"),
        ("atom.global.u32 %r1, [%rd1], %r2;", "wrong operation or type"),
        ("atom.global.nand.b32 %r1, [%rd1], %r2;", "unknown modifier .nand"),
        ("atom.global.add.f16 %h1, [%rd1], %h2;", ".f16 needs .noftz"),
        ("atom.global.add.noftz.f32 %f1, [%rd1], %f2;", ".f32 excludes .noftz"),
        ("atom.global.max.noftz.f16 %h1, [%rd1], %h2;", ".max.f16 needs a vector"),
        ("atom.shared.add.v2.f32 {%f1, %f2}, [%rd1], {%f1, %f2};", "vectors are updated in"),
        ("atom.global.add.v8.f32 {%f1, %f2}, [%rd1], {%f1, %f2};", "no such vectors"),
        ("atom.global.add.v2.u32 {%r1, %r2}, [%rd1], {%r1, %r2};", "no such vectors"),
        ("atom.global.add.v2.f32 %f1, [%rd1], {%f1, %f2};", "wrong number of vector elements"),
        ("atom.local.add.u32 %r1, [%rd1], 1;", "unknown modifier .local"),
        ("atom.volatile.global.add.u32 %r1, [%rd1], 1;", "unknown modifier .volatile"),
        ("atom.acquire.global.add.u32 %r1, [%rd1], 1;", ".acquire needs a scope"),
        ("atom.global.add.u32 %r1, [%rd1];", "wrong number of operands"),
        ("atom.global.cas.b32 %r1, [%rd1], %r2;", "wrong number of operands"),
        ("atom.global.add.u32 %rd1, [%rd1], %rd2, %rd3;", "wrong number of operands"),
        ("red.global.exch.b32 [%rd1], %r1;", "unknown modifier .exch"),
        ("red.acquire.gpu.global.add.u32 [%rd1], %r1;", "unknown modifier .acquire"),
        ("red.global.add.u32 %r1, [%rd1], %r2;", "wrong number of operands"),
        ("red.global.add.u32 %r1, [%rd1];", "operand must be an address"),
        ("red.shared.add.u32 [constants], 1;", "another state space"),
    ],
)
def test_malformed_instructions(code, message):
    text = error_of(code, np.zeros(1), variables=".const .b32 constants = 1;")
    assert text.startswith("PTX line ")
    assert message in text


# The groups ---------------------------------------------------------------------------------------


def test_places_that_all_differ_need_no_groups():
    assert group_by_place(np.array([3, 5, 9])) is None
    assert group_by_place(np.array([9, 3, 5])) is None
    assert group_by_place(np.array([4])) is None
    groups = group_by_place(np.array([9, 3, 9, 9, 3, 1]))
    assert groups is not None
    assert groups.places.tolist() == [1, 3, 9]
    assert groups.lengths.tolist() == [1, 2, 3]
    assert groups.order.tolist() == [5, 1, 4, 0, 2, 3]
    assert groups.rank.tolist() == [0, 0, 1, 0, 1, 2]


def test_sequences_of_all_kinds_agree():
    random = np.random.default_rng(0)
    places = (random.random(1000) ** 4 * 100).astype(np.int64)
    groups = group_by_place(places)
    assert groups is not None
    held = random.integers(0, 9, len(groups.places))
    values = random.integers(0, 9, 1000)
    one = scan(np.add, groups, held, values)
    np.testing.assert_array_equal(one, scan_invertible(np.add, np.subtract, groups, held, values))
    np.testing.assert_array_equal(one, accumulate(partial(stepwise, np.add), groups, held, values))


@pytest.mark.parametrize("span", [1, 100, 2**16, 2**20, 2**40])
def test_stable_order(span):
    keys = np.random.default_rng(span).integers(-span, span, 3000)
    keys[::7] = keys[0]
    np.testing.assert_array_equal(stable_order(keys), np.argsort(keys, kind="stable"))
