"""Loads, stores and what is said about caches."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_support import module, run_body, run_ptx

from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.launch import Pointer

THREADS = 64

REGISTERS = """
.reg .b16 %h<10>; .reg .b32 %r<10>; .reg .b64 %rd<12>; .reg .f32 %f<10>; .reg .f64 %fd<6>;
.reg .b128 %q<4>; .reg .pred %p<4>;
"""

NAMES = {8: "%h", 16: "%h", 32: "%r", 64: "%rd", 128: "%q"}


def run(body, *arrays, block=THREADS, **options):
    return run_body(REGISTERS + body, *arrays, block=block, **options)


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def error_of(body, *arrays, **options):
    """The message of the error that a body raises."""
    with pytest.raises((SimulationError, PtxError)) as error:
        run(body, *arrays, **options)
    return str(error.value)


# Widths, vectors and spaces -----------------------------------------------------------------------

WIDTHS = [
    (bits, count)
    for bits in (8, 16, 32, 64, 128)
    for count in (1, 2, 4, 8)
    if bits * count <= 128 and count <= 4
] + [(32, 8), (64, 4)]


def listed(bits, count):
    names = [f"{NAMES[bits]}{number + 1}" for number in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "generic", "none")

COPIES = [
    (space, bits, count)
    for space in SPACES
    for bits, count in WIDTHS
    # Vectors of 32 bytes are only in global memory.
    if bits * count <= 128 or space in ("global", "generic")
]


@pytest.mark.parametrize(("space", "bits", "count"), COPIES)
def test_copies_of_every_width(space, bits, count):
    size = bits // 8 * count
    vector = "" if count == 1 else f".v{count}"
    suffix = f"{vector}.b{bits}"
    target = "sm_100a" if size == 32 else "sm_90a"
    given = random_bytes(THREADS * size)
    result = np.zeros_like(given)
    code = f"""
        .local .align 32 .b8 frame[64];
        mul.wide.u32 %rd9, %thread, {size};
        add.s64 %rd10, %array0, %rd9;
        add.s64 %rd11, %array1, %rd9;
        ld.global{suffix} {listed(bits, count)}, [%rd10];
    """
    if space in ("shared", "shared::cta", "shared::cluster"):
        code += f"""
            mov.u32 %r9, dynamic;
            mad.lo.u32 %r9, %thread, {size}, %r9;
            st.{space}{suffix} [%r9+{size}], {listed(bits, count)};
            ld.{space}{suffix} {listed(bits, count)}, [%r9+{size}];
        """
    elif space == "local":
        code += f"""
            mov.u64 %rd9, frame;
            st.local{suffix} [%rd9+32], {listed(bits, count)};
            ld.local{suffix} {listed(bits, count)}, [frame+32];
        """
    elif space == "none":
        code += f"""
            mov.u32 %r9, dynamic;
            mad.lo.u32 %r9, %thread, {size}, %r9;
            cvt.u64.u32 %rd9, %r9;
            cvta.shared.u64 %rd9, %rd9;
            st{suffix} [%rd9], {listed(bits, count)};
            ld{suffix} {listed(bits, count)}, [%rd9];
        """
    code += f"st{'' if space == 'generic' else '.global'}{suffix} [%rd11], {listed(bits, count)};"
    run(code, given, result, target=target, shared=THREADS * size + size)
    np.testing.assert_array_equal(result, given)


@pytest.mark.parametrize(
    ("bits", "register"), [(8, 16), (8, 32), (8, 64), (16, 16), (16, 32), (16, 64), (32, 64)]
)
@pytest.mark.parametrize("letter", ["u", "s", "b"])
def test_narrow_types_in_wider_registers(bits, letter, register):
    """Loads extend, by sign for signed types; stores cut."""
    given = random_bytes(THREADS * 8).view(f"u{bits // 8}")[:THREADS].copy()
    wide = np.zeros(THREADS, f"u{register // 8}")
    cut = np.zeros(THREADS, f"u{bits // 8}")
    name = f"{NAMES[register]}1"
    run(
        f"""
        mul.wide.u32 %rd8, %thread, {bits // 8};
        mul.wide.u32 %rd9, %thread, {register // 8};
        add.s64 %rd10, %array0, %rd8;
        ld.global.{letter}{bits} {name}, [%rd10];
        add.s64 %rd10, %array1, %rd9;
        st.global.b{register} [%rd10], {name};
        add.s64 %rd10, %array2, %rd8;
        st.global.{letter}{bits} [%rd10], {name};
        """,
        given,
        wide,
        cut,
    )
    signed = given.view(f"i{bits // 8}").astype(f"i{register // 8}").view(wide.dtype)
    np.testing.assert_array_equal(wide, signed if letter == "s" else given.astype(wide.dtype))
    np.testing.assert_array_equal(cut, given)


def test_floats_in_wider_registers_are_their_bits():
    given = random_bytes(THREADS * 4).view(np.float32)
    wide, narrow = np.zeros(THREADS, np.uint64), np.zeros(THREADS, np.uint32)
    run(
        """
        add.s64 %rd1, %array0, %offset4;
        ld.global.f32 %rd2, [%rd1];
        add.s64 %rd1, %array1, %offset8;
        st.global.b64 [%rd1], %rd2;
        add.s64 %rd1, %array2, %offset4;
        st.global.f32 [%rd1], %rd2;
        """,
        given,
        wide,
        narrow,
    )
    np.testing.assert_array_equal(wide, given.view(np.uint32))
    np.testing.assert_array_equal(narrow, given.view(np.uint32))


def test_constants_are_stored_as_the_type():
    result = np.zeros(12, np.uint32)
    run(
        """
        st.global.f32 [%array0], 1.5;
        st.global.v2.f32 [%array0+8], {0f3F800000, 2.0};
        st.global.f64 [%array0+16], -0.25;
        st.global.b8 [%array0+24], 0x1ff;
        st.global.v4.s16 [%array0+32], {-1, 2, -3, 4};
        st.global.u64 [%array0+40], -2;
        """,
        result,
        block=1,
    )
    assert result[:4].view(np.float32).tolist() == [1.5, 0.0, 1.0, 2.0]
    assert result[4:6].view(np.float64)[0] == -0.25
    assert result[6] == 0xFF
    assert result[8:10].view(np.int16).tolist() == [-1, 2, -3, 4]
    assert result[10:].view(np.int64)[0] == -2


def test_elements_that_are_left_out():
    given = random_bytes(THREADS * 32).view(np.uint32).reshape(THREADS, 8)
    result = np.full((THREADS, 8), 7, np.uint32)
    execution = run(
        """
        mul.wide.u32 %rd9, %thread, 32;
        add.s64 %rd10, %array0, %rd9;
        add.s64 %rd11, %array1, %rd9;
        ld.global.v4.b32 {%r1, _, %r3, _}, [%rd10];
        ld.global.v2.b64 {_, %rd4}, [%rd10+16];
        st.global.v8.b32 [%rd11], {%r1, _, %r3, _, _, _, 5, 6};
        st.global.b64 [%rd11+32+-16], %rd4;
        """,
        given,
        result,
        target="sm_100a",
    )
    np.testing.assert_array_equal(result[:, [0, 2]], given[:, [0, 2]])
    np.testing.assert_array_equal(result[:, [4, 5]], given[:, [6, 7]])
    assert (result[:, [1, 3]] == 7).all()
    assert (result[:, 6] == 5).all()
    assert (result[:, 7] == 6).all()
    assert execution.bytes_moved["global", "write"] == THREADS * (4 * 4 + 8)


# Parameters ---------------------------------------------------------------------------------------


def test_kernel_parameters():
    result = np.zeros((THREADS, 8), np.uint32)
    structure = np.arange(20, dtype=np.uint8)
    ptx = module(
        REGISTERS
        + """
        ld.param.u64 %rd1, [out];
        mov.u32 %r9, %tid.x;
        mad.wide.u32 %rd1, %r9, 32, %rd1;
        ld.param.s8 %r1, [small];
        ld.param::entry.f32 %f1, [number];
        mov.u64 %rd2, structure;
        ld.param.b32 %r2, [%rd2+8];
        ld.param.v2.u16 {%h1, %h2}, [structure+4];
        ld.param.v4.b32 {%r3, %r4, %r5, %r6}, [structure];
        mov.b32 %r7, {%h1, %h2};
        st.global.v4.b32 [%rd1], {%r1, %f1, %r2, %r7};
        st.global.v4.b32 [%rd1+16], {%r3, %r4, %r5, %r6};
        """,
        [".u64 out", ".s8 small", ".f32 number", ".align 16 .b8 structure[20]"],
    )
    run_ptx(ptx, result, np.int8(-3), np.float32(2.5), structure.tobytes(), block=THREADS)
    words = structure.view(np.uint32)
    expected = [2**32 - 3, np.float32(2.5).view(np.uint32), words[2], words[1], *words[:4]]
    np.testing.assert_array_equal(result, np.tile(np.array(expected, np.uint32), (THREADS, 1)))


def test_parameters_of_128_bits():
    result = np.zeros((THREADS, 2), np.uint64)
    value = random_bytes(16)
    ptx = module(
        REGISTERS
        + """
        ld.param.u64 %rd1, [out];
        mov.u32 %r9, %tid.x;
        mad.wide.u32 %rd1, %r9, 16, %rd1;
        ld.param.b128 %q1, [wide];
        st.global.b128 [%rd1], %q1;
        """,
        [".u64 out", ".align 16 .b8 wide[16]"],
    )
    run_ptx(ptx, result, value.tobytes(), block=THREADS)
    np.testing.assert_array_equal(result, np.tile(value.view(np.uint64), (THREADS, 1)))


def test_variables_of_parameter_space_belong_to_each_thread():
    result = np.zeros(THREADS, np.uint32)
    run(
        """
        { .param .b32 one; .param .align 8 .b8 many[16];
        st.param.b32 [one], %thread;
        st.param::func.v2.b32 [many+8], {%thread, 5};
        ld.param.b32 %r1, [one];
        ld.param::func.b32 %r2, [many+8];
        ld.param.b32 %r3, [many+12];
        mad.lo.u32 %r1, %r1, %r3, %r2; }
        add.s64 %rd1, %array0, %offset4;
        st.global.b32 [%rd1], %r1;
        """,
        result,
    )
    np.testing.assert_array_equal(result, np.arange(THREADS) * 6)


# Other spaces -------------------------------------------------------------------------------------


def test_constants_and_variables():
    result = np.zeros((THREADS, 4), np.uint32)
    run(
        """
        mul.wide.u32 %rd9, %thread, 16;
        add.s64 %rd1, %array0, %rd9;
        ld.const.b32 %r1, [table+4];
        ld.global.b32 %r2, [counter];
        mov.u64 %rd2, table;
        cvta.const.u64 %rd2, %rd2;
        ld.b32 %r3, [%rd2+8];
        ld.b32 %r4, [counter];
        st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
        """,
        result,
        variables=".const .align 4 .b32 table[3] = {10, 11, 12};\n.global .b32 counter = 77;",
    )
    np.testing.assert_array_equal(result, np.tile([11, 77, 12, 77], (THREADS, 1)))


def test_generic_addresses_that_differ_from_lane_to_lane():
    """A third of the lanes each reads and writes shared, local and global memory."""
    given = random_bytes(THREADS * 4).view(np.uint32)
    scratch, result = np.zeros(THREADS, np.uint32), np.zeros(THREADS, np.uint32)
    run(
        """
        .local .align 8 .b8 frame[8];
        add.s64 %rd1, %array0, %offset4;
        ld.b32 %r1, [%rd1];
        mov.u32 %r2, dynamic;
        cvt.u64.u32 %rd2, %r2;
        add.u64 %rd2, %rd2, %offset4;
        cvta.shared.u64 %rd2, %rd2;
        mov.u64 %rd3, frame;
        cvta.local.u64 %rd3, %rd3;
        add.s64 %rd4, %array1, %offset4;
        rem.u32 %r3, %thread, 3;
        setp.eq.u32 %p1, %r3, 0;
        setp.eq.u32 %p2, %r3, 1;
        selp.b64 %rd5, %rd2, %rd3, %p1;
        selp.b64 %rd5, %rd4, %rd5, %p2;
        st.b32 [%rd5], %r1;
        ld.b32 %r4, [%rd5];
        add.s64 %rd6, %array2, %offset4;
        st.b32 [%rd6], %r4;
        """,
        given,
        scratch,
        result,
        shared=THREADS * 4,
    )
    np.testing.assert_array_equal(result, given)
    middle = np.arange(THREADS) % 3 == 1
    np.testing.assert_array_equal(scratch, np.where(middle, given, 0))


def test_shared_memory_of_another_block_of_the_cluster():
    result = np.zeros(4 * THREADS, np.uint32)
    run(
        """
        mov.u32 %r1, dynamic;
        shl.b32 %r2, %tid.x, 2;
        add.u32 %r1, %r1, %r2;
        st.shared.b32 [%r1], %thread;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mov.u32 %r3, %cluster_ctarank;
        xor.b32 %r3, %r3, 1;
        mapa.shared::cluster.u32 %r4, %r1, %r3;
        ld.shared::cluster.b32 %r5, [%r4];
        add.s64 %rd1, %array0, %offset4;
        st.global.b32 [%rd1], %r5;
        """,
        result,
        grid=4,
        cluster=2,
        shared=THREADS * 4,
    )
    blocks = np.arange(4 * THREADS).reshape(4, THREADS)
    np.testing.assert_array_equal(result.reshape(4, THREADS), blocks[[1, 0, 3, 2]])


@pytest.mark.parametrize(
    ("load", "store"),
    [
        ("ld.weak.global.ca", "st.weak.global.wb"),
        ("ld.global.cg", "st.global.cg"),
        ("ld.global.cs", "st.global.cs"),
        ("ld.global.lu", "st.global.wt"),
        ("ld.global.cv", "st.wt"),
        ("ld.global.nc", "st"),
        ("ld.global.ca.nc", "st"),
        ("ld.global.nc.L1::no_allocate.L2::128B", "st.global.L1::evict_last"),
        ("ld.global.L1::evict_last.L2::64B", "st.global.L1::no_allocate"),
        ("ld.volatile.global", "st.volatile.global"),
        ("ld.volatile", "st.volatile"),
        ("ld.relaxed.cta.global", "st.relaxed.gpu"),
        ("ld.relaxed.sys.global.L1::no_allocate", "st.relaxed.cluster.global"),
        ("ld.acquire.gpu.global.L2::256B", "st.release.gpu.global"),
        ("ld.acquire.sys", "st.release.cta"),
        ("ld.mmio.relaxed.sys.global", "st.mmio.relaxed.sys.global"),
        ("ldu.global", "st"),
        ("ldu", "st"),
    ],
)
def test_modifiers_that_change_no_value(load, store):
    given = random_bytes(THREADS * 4).view(np.uint32)
    result = np.zeros_like(given)
    run(
        f"""
        add.s64 %rd1, %array0, %offset4;
        add.s64 %rd2, %array1, %offset4;
        {load}.b32 %r1, [%rd1];
        {store}.b32 [%rd2], %r1;
        """,
        given,
        result,
    )
    np.testing.assert_array_equal(result, given)


def test_cache_policies():
    given = random_bytes(THREADS * 16).view(np.uint32)
    result = np.zeros_like(given)
    run(
        """
        mul.wide.u32 %rd9, %thread, 16;
        add.s64 %rd1, %array0, %rd9;
        add.s64 %rd2, %array1, %rd9;
        createpolicy.fractional.L2::evict_last.b64 %rd3, 0.5;
        createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd3;
        createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %rd4, [%rd1], 4096, 8192;
        createpolicy.cvt.L2.b64 %rd5, %rd4;
        prefetch.global.L1 [%rd1];
        prefetch.L2 [%rd1];
        prefetch.global.L2::evict_last [%rd1];
        prefetchu.L1 [%rd1];
        ld.global.L2::cache_hint.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1], %rd3;
        st.global.L1::no_allocate.L2::cache_hint.v4.b32 [%rd2], {%r1, %r2, %r3, %r4}, %rd5;
        and.b64 %rd2, %rd2, -128;
        applypriority.global.L2::evict_normal [%rd2], 128;
        discard.global.L2 [%rd2], 128;
        """,
        given,
        result,
    )
    np.testing.assert_array_equal(result, given)


# Errors at run time -------------------------------------------------------------------------------


def array_of(size, name="x", writable=True):
    return Pointer(np.zeros(size, np.uint8), name, writable)


POINTER = module(
    REGISTERS
    + """
    ld.param.u64 %rd1, [p];
    mov.u32 %r9, %tid.x;
    mul.wide.u32 %rd2, %r9, 4;
    add.s64 %rd1, %rd1, %rd2;
    ACCESS
    """,
    [".u64 p", ".u64 q"],
)


def pointer_error(access, x=None):
    ptx = POINTER.replace("ACCESS", access)
    with pytest.raises(SimulationError) as error:
        run_ptx(ptx, x or array_of(256), array_of(512, "y"), block=THREADS)
    return str(error.value)


def test_out_of_bounds_of_an_array():
    text = pointer_error("ld.global.b32 %r1, [%rd1+4];")
    assert text == (
        "thread 63 of block (0, 0, 0) accesses memory out of bounds,"
        " in: ld.global.b32 %r1, [%rd1+4]\n"
        "  got: 4 bytes at global address 0x7f0000000200: 0 bytes behind x (256 bytes)"
        " (1 of 64 lanes)"
    )
    text = pointer_error("st.global.b64 [%rd1+-8], %rd1;")
    assert text == (
        "thread 0 of block (0, 0, 0) accesses memory out of bounds,"
        " in: st.global.b64 [%rd1+-8], %rd1\n"
        "  got: 8 bytes at global address 0x7f00000000f8: 8 bytes before x (256 bytes)"
        " (2 of 64 lanes)"
    )
    text = pointer_error("ld.global.v2.b64 {%rd3, %rd4}, [%rd1];")
    assert "63 of block" in text or "thread 61 of block (0, 0, 0)" in text


def test_null_pointers_and_nonsense():
    text = pointer_error("ld.b32 %r1, [0];")
    assert text == (
        "thread 0 of block (0, 0, 0) accesses memory out of bounds, in: ld.b32 %r1, [0]\n"
        "  got: 4 bytes at global address 0x0: nowhere near any array (64 of 64 lanes)"
    )
    for address in (
        "0xfffffffffffffffc",
        "0x7fff_ffff_ffff_fffc".replace("_", ""),
        "0x8000000000000000",
    ):
        for access in (
            "ld.global.b64 %rd2, [%rd3];",
            "ld.b64 %rd2, [%rd3];",
            "ld.local.b64 %rd2, [%rd3];",
            "ld.shared.b64 %rd2, [%rd3];",
            "ld.param.b64 %rd2, [%rd3];",
            "ld.const.b64 %rd2, [%rd3];",
        ):
            text = pointer_error(f"mov.u64 %rd3, {address}; {access}")
            assert "thread 0 of block (0, 0, 0) accesses memory out of bounds" in text
            assert "(64 of 64 lanes)" in text


def test_misaligned_addresses():
    text = pointer_error("ld.global.v2.b32 {%r1, %r2}, [%rd1];", array_of(512))
    assert text == (
        "thread 1 of block (0, 0, 0) accesses memory misaligned,"
        " in: ld.global.v2.b32 {%r1, %r2}, [%rd1]\n"
        "  got: 8 bytes at global address 0x7f0000000104: byte 4 of x (512 bytes)"
        " (32 of 64 lanes)\n"
        "  try: the address must be a multiple of 8"
    )


def test_arrays_that_cannot_be_written():
    constant = array_of(256, "weights", writable=False)
    text = pointer_error("st.global.b32 [%rd1], 1;", constant)
    assert text == (
        "thread 0 of block (0, 0, 0) accesses memory read-only,"
        " in: st.global.b32 [%rd1], 1\n"
        "  got: 4 bytes at global address 0x7f0000000100: byte 0 of weights (256 bytes)"
        " (64 of 64 lanes)"
    )
    # Only one lane writes to it, and the others elsewhere.
    text = pointer_error(
        """
        ld.param.u64 %rd3, [q];
        setp.eq.u32 %p1, %r9, 7;
        selp.b64 %rd4, %rd1, %rd3, %p1;
        st.global.b32 [%rd4], 1;
        """,
        constant,
    )
    assert "thread 7 of block (0, 0, 0) accesses memory read-only" in text
    assert "byte 28 of weights (256 bytes) (1 of 64 lanes)" in text
    # Strong loads read.
    ptx = POINTER.replace("ACCESS", "ld.acquire.gpu.global.b32 %r1, [%rd1];")
    run_ptx(ptx, constant, array_of(16), block=THREADS)


def test_out_of_bounds_of_shared_and_local_memory():
    text = error_of("ld.shared.b32 %r1, [dynamic+128];", shared=128)
    assert text == (
        "thread 0 of block (0, 0, 0) accesses memory out of bounds,"
        " in: ld.shared.b32 %r1, [dynamic+128]\n"
        "  got: 4 bytes at shared address 0x480: byte 128 of 128 bytes of shared memory"
        " (64 of 64 lanes)"
    )
    text = error_of("ld.shared.b32 %r1, [1020];", shared=128)
    assert "byte -4 of 128 bytes of shared memory" in text
    text = error_of(".local .b8 frame[16]; ld.local.b64 %rd1, [frame+12];")
    assert text == (
        "thread 0 of block (0, 0, 0) accesses memory out of bounds,"
        " in: ld.local.b64 %rd1, [frame+12]\n"
        "  got: 8 bytes at local address 0xc (64 of 64 lanes)"
    )
    text = error_of(
        "mov.u32 %r1, 0x2000000; ld.shared::cluster.b32 %r1, [%r1];", cluster=2, grid=2, shared=64
    )
    assert "accesses memory out of bounds" in text


def test_errors_tell_the_lane_among_many():
    text = error_of(
        """
        mov.u32 %r1, %ctaid.x;
        setp.eq.u32 %p1, %thread, 200;
        selp.b64 %rd1, %array0, 0, %p1;
        setp.gt.u32 %p2, %thread, 199;
        @%p2 ld.b32 %r2, [%rd1];
        """,
        np.zeros(4, np.uint32),
        grid=4,
    )
    assert "thread 9 of block (3, 0, 0) accesses memory out of bounds" in text
    assert "(55 of 56 lanes)" in text


def test_addresses_of_prefetches_are_checked():
    text = pointer_error("prefetch.global.L2 [%rd1+256];")
    assert (
        "thread 0 of block (0, 0, 0) accesses memory out of bounds, in: prefetch.global.L2" in text
    )
    assert "1 bytes at global address" in text
    text = pointer_error("prefetch.tensormap [%rd1];", array_of(1024))
    assert "the address must be a multiple of 64" in text
    text = pointer_error("discard.global.L2 [%rd1+64], 128;", array_of(1024))
    assert "the address must be a multiple of 128" in text


def test_partial_stores_are_aligned_as_a_whole():
    text = error_of(
        "st.global.v8.b32 [%array0+16], {%r1, _, _, _, _, _, _, _};",
        np.zeros(64, np.uint32),
        target="sm_100a",
    )
    assert "the address must be a multiple of 32" in text


# Errors of binding --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ld.global.b32 %r1, [%rd1], %rd2;", "wrong number of operands"),
        ("ld.global.frob.b32 %r1, [%rd1];", "unknown modifier .frob"),
        ("ld.global.shared.b32 %r1, [%rd1];", "two modifiers that exclude each other"),
        ("ld.global %r1, [%rd1];", "the instruction has no type"),
        ("ld.global.b32.v2 {%r1, %r2}, [%rd1];", "the type must be the last modifier"),
        ("ld.global.f16 %h1, [%rd1];", "unknown modifier .f16"),
        ("ld.global.b64 %r1, [%rd1];", "register %r1 of type .b32 cannot hold a .b64"),
        ("ld.global.b32 5, [%rd1];", "the destination must be a register"),
        ("ld.global.b8 %p1, [%rd1];", "register %p1 of type .pred cannot hold a .b8"),
        ("ld.global.v2.b32 %r1, [%rd1];", "wrong number of vector elements"),
        ("ld.global.v2.b32 {%r1, %r2, %r3}, [%rd1];", "wrong number of vector elements"),
        ("ld.global.v4.b128 {%q1, %q2, %q3, %q1}, [%rd1];", "there are no such vectors"),
        ("ld.global.v2.b128 {%q1, %q2}, [%rd1];", "there are no such vectors"),
        ("ld.global.v8.b16 {%h1, %h2, %h3, %h4, %h5, %h6, %h7, %h8}, [%rd1];", "no such vectors"),
        (
            "ld.shared.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1];",
            "vectors of 32 bytes are only in .global",
        ),
        ("ld.global.b32 %r1, %rd1;", "operand must be an address"),
        ("ld.global.b32 %r1, [%h1];", "addresses are in registers of 32 or 64 bits"),
        ("ld.relaxed.global.b32 %r1, [%rd1];", ".relaxed needs a scope"),
        ("ld.gpu.global.b32 %r1, [%rd1];", ".gpu needs .relaxed, .acquire or .release"),
        ("ld.release.gpu.global.b32 %r1, [%rd1];", "unknown modifier .release"),
        ("ld.volatile.global.ca.b32 %r1, [%rd1];", ".ca excludes a memory order"),
        ("ld.mmio.relaxed.gpu.global.b32 %r1, [%rd1];", ".mmio needs .relaxed.sys"),
        ("ld.volatile.const.b32 %r1, [%rd1];", ".const memory has no .volatile accesses"),
        ("ld.nc.b32 %r1, [%rd1];", ".nc needs .global"),
        ("ldu.shared.b32 %r1, [%rd1];", "unknown modifier .shared"),
        ("ld.global.b32 %r1, [variable];", "variable 'variable' is in another state space"),
        ("ld.b32 %r1, [p0];", "'p0' has no generic address"),
        ("ld.param.b64 %rd1, [p0+4];", "out of bounds of the parameter"),
        ("ld.param.b32 %r1, [p0+2];", "an access of 4 bytes is misaligned"),
        ("ld.param::func.b64 %rd1, [p0];", "variable 'p0' is in another state space"),
        ("st.param.b64 [p0], %rd1;", ".param memory cannot be written"),
        ("st.const.b32 [%rd1], %r1;", ".const memory cannot be written"),
        ("st.global.b64 [%rd1], %r1;", "register %r1 of type .b32 cannot be read as .b64"),
        ("st.global.v4.b32 [%rd1], {%r1, _, %r2, %r3};", "only vectors of 32 bytes are stored"),
        ("st.acquire.gpu.global.b32 [%rd1], %r1;", "unknown modifier .acquire"),
        ("prefetch.shared.L1 [%rd1];", "unknown modifier"),
        ("prefetch.global.L3 [%rd1];", "unknown prefetch"),
        ("prefetchu.L2 [%rd1];", "unknown prefetch"),
        ("discard.global.L2 [%rd1], 64;", "the size must be that of a cache line"),
        ("applypriority.global.L2::evict_last [%rd1], 128;", "unknown applypriority"),
        ("createpolicy.fractional.L2::evict_often.b64 %rd1;", "unknown priorities"),
        ("createpolicy.frob.b64 %rd1;", "unknown policy"),
    ],
)
def test_malformed_instructions(code, message):
    variables = ".shared .b32 variable;"
    with pytest.raises(PtxError, match=r"PTX line \d+, column \d+: ") as error:
        run(code, np.zeros(1, np.uint64), variables=variables)
    assert message in str(error.value)
    assert code.rstrip(";") in str(error.value)
