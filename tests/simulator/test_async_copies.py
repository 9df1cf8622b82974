"""cp.async, bulk copies of bytes, and asynchronous stores: values, groups, events, misuse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from copies_support import SETUP, Listener, barrier, move, shared, wait
from simulator_support import run_body

from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError

COMPLETE = "mbarrier::complete_tx::bytes"


def run(body, *arrays, tile=4096, **options):
    return run_body(SETUP + body, *arrays, variables=shared(tile), **options)


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# cp.async -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("form", ["whole", "part", "ignored", "constant"])
def test_copies_of_lanes(size, form):
    blocks = 3
    data = random_bytes(size, blocks, 128, size)
    counts = np.random.default_rng(1).integers(0, size + 1, (blocks, 128)).astype(np.uint32)
    out = np.zeros((blocks, 128, size), np.uint8)
    last = {"whole": "", "part": ", %r5", "ignored": ", %q", "constant": ", 3"}[form]
    body = f"""
    add.u64 %p1, %array1, %offset4;
    ld.global.b32 %r5, [%p1];
    setp.gt.u32 %q, %r5, {size // 2};
    mul.wide.u32 %p2, %thread, {size};
    add.u64 %p2, %p2, %array0;
    mad.lo.u32 %r6, %prologue2, {size}, %tile;
    cp.async.ca.shared.global.L2::128B [%r6], [%p2], {size}{last};
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    {move("OUT", 2, 128 * size, load=False)}
    """
    run(body, data, counts, out, grid=blocks)
    kept = {
        "whole": np.full(counts.shape, size),
        "part": counts,
        "ignored": np.where(counts > size // 2, 0, size),
        "constant": np.full(counts.shape, 3),
    }[form]
    expected = np.where(np.arange(size) < kept[:, :, None], data, 0)
    np.testing.assert_array_equal(out, expected)


def test_part_of_a_copy_may_end_with_the_array():
    data = random_bytes(0, 22)
    out = np.zeros(16, np.uint8)
    body = f"""
    @%first cp.async.cg.shared::cta.global [%tile], [%array0+16], 16, 6;
    cp.async.wait_all;
    bar.sync 0;
    {move("OUT", 1, 16, load=False)}
    """
    run(body, data, out)
    np.testing.assert_array_equal(out, np.append(data[16:], np.zeros(10, np.uint8)))


@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_an_mbarrier_waits_for_copies(noinc):
    data = random_bytes(3, 4, 64 * 4)
    out = np.zeros_like(data)
    body = f"""
    {barrier(65 if noinc else 64)}
    mul.wide.u32 %p2, %thread, 4;
    add.u64 %p2, %p2, %array0;
    mad.lo.u32 %r6, %prologue2, 4, %tile;
    cp.async.ca.shared.global [%r6], [%p2], 4;
    cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [bar];
    {"@%first" if noinc else ""} mbarrier.arrive.shared::cta.b64 _, [bar];
    {wait()}
    {move("OUT", 1, 256, load=False)}
    """
    run(body, data, out, grid=4, block=64)
    np.testing.assert_array_equal(out, data)


def test_groups_of_copies_in_the_eyes_of_the_observer():
    listener = Listener()
    body = """
    mul.wide.u32 %p2, %thread, 4;
    add.u64 %p2, %p2, %array0;
    mad.lo.u32 %r6, %prologue2, 4, %tile;
    setp.lt.u32 %q, %prologue2, 8;
    cp.async.ca.shared.global [%r6], [%p2], 4;
    cp.async.commit_group;
    @%q cp.async.ca.shared.global [%r6+256], [%p2], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r6+512], [%p2], 4;
    cp.async.wait_group 1;
    @%q cp.async.wait_group 0;
    cp.async.wait_all;
    """
    run(body, random_bytes(0, 128), block=32, make_observer=lambda: listener)
    first, second, third = [event[1] for event in listener.named("begin")]
    assert (first.engine, first.proxy, first.lanes.tolist()) == (
        "cp.async",
        "generic",
        list(range(32)),
    )
    assert second.lanes.tolist() == list(range(8))
    everybody, some = list(range(32)), list(range(8))
    assert listener.named("complete_for") == [
        ("complete_for", first, everybody, False),
        ("complete_for", second, some, False),
        ("complete_for", third, everybody, False),
    ]
    reads = [event for event in listener.named("read") if event[1] is first]
    assert [(event[2], event[4]) for event in reads] == [("global", 4)]
    (write,) = [event for event in listener.named("write") if event[1] is first]
    assert (write[2], write[4]) == ("shared", 4)
    np.testing.assert_array_equal(np.diff(write[3]), 4)


# Bulk copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_bulk_loads_of_different_sizes(space):
    blocks = 5
    data = random_bytes(4, blocks, 1024)
    out = np.zeros_like(data)
    # Block n copies 16 * (n + 1) bytes from byte 16 on to byte 32 of its memory.
    body = f"""
    {move("CLEAR", 1, 1024, load=True)}
    {barrier()}
    add.u32 %r2, %prologue0, 1;
    shl.b32 %r2, %r2, 4;
    mul.wide.u32 %p1, %prologue0, 1024;
    add.u64 %p1, %p1, %array0;
    add.u32 %r3, %tile, 32;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %r2;
    @%first cp.async.bulk.{space}.global.{COMPLETE}.L2::cache_hint
        [%r3], [%p1+16], %r2, [%bar], %p1;
    {wait()}
    {move("OUT", 1, 1024, load=False)}
    """
    execution = run(body, data, out, grid=blocks)
    expected = np.zeros_like(data)
    for block in range(blocks):
        size = 16 * (block + 1)
        expected[block, 32 : 32 + size] = data[block, 16 : 16 + size]
    np.testing.assert_array_equal(out, expected)
    assert execution.counters["tma bytes"] == sum(16 * (n + 1) for n in range(blocks))


@pytest.mark.parametrize("mask", [None, 0x0F35, 0xFFFF, 0])
def test_bulk_stores(mask):
    blocks = 3
    data, out = random_bytes(5, blocks, 512), random_bytes(6, blocks, 512)
    before = out.copy()
    masked = "" if mask is None else ".cp_mask"
    body = f"""
    {move("IN", 0, 512, load=True)}
    fence.proxy.async;
    bar.sync 0;
    mul.wide.u32 %p1, %prologue0, 512;
    add.u64 %p1, %p1, %array1;
    mov.b16 %h, {mask or 0};
    @%first cp.async.bulk.global.shared::cta.bulk_group{masked}
        [%p1+64], [%tile], 208{", %h" if masked else ""};
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group.read 0;
    """
    run(body, data, out, grid=blocks, target="sm_100a")
    bits = 0xFFFF if mask is None else mask
    chosen = np.tile([bool(bits >> n & 1) for n in range(16)], 13)
    before[:, 64:272][:, chosen] = data[:, :208][:, chosen]
    np.testing.assert_array_equal(out, before)


def test_multicast_of_bytes():
    # Block r of a cluster of 4 sends 48 bytes to the blocks of bits (r+1) and (r+2) (mod 4).
    data = random_bytes(7, 8, 256)
    out = np.zeros_like(data)
    body = f"""
    {move("CLEAR", 1, 256, load=True)}
    {barrier()}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 96;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mul.wide.u32 %p1, %prologue0, 256;
    add.u64 %p1, %p1, %array0;
    add.u32 %r2, %rank, 1;
    and.b32 %r2, %r2, 3;
    mov.u32 %r4, 1;
    shl.b32 %r5, %r4, %r2;
    add.u32 %r2, %rank, 2;
    and.b32 %r2, %r2, 3;
    shl.b32 %r6, %r4, %r2;
    or.b32 %r5, %r5, %r6;
    cvt.u16.u32 %h, %r5;
    mad.lo.u32 %r7, %rank, 64, %tile;
    @%first cp.async.bulk.shared::cluster.global.{COMPLETE}.multicast::cluster
        [%r7], [%p1+16], 48, [%bar], %h;
    {wait()}
    {move("OUT", 1, 256, load=False)}
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    run(body, data, out, grid=8, cluster=4)
    expected = np.zeros_like(data)
    for block in range(8):
        first, rank = block // 4 * 4, block % 4
        for target in ((rank + 1) % 4, (rank + 2) % 4):
            place = slice(64 * rank, 64 * rank + 48)
            expected[first + target, place] = data[block, 16:64]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("operation", "name", "dtype"),
    [
        ("add", "u32", np.uint32),
        ("add", "s32", np.int32),
        ("add", "u64", np.uint64),
        ("add", "f32", np.float32),
        ("add", "f64", np.float64),
        ("add.noftz", "f16", np.float16),
        ("add.noftz", "bf16", ml_dtypes.bfloat16),
        ("min", "s64", np.int64),
        ("max", "u64", np.uint64),
        ("min", "bf16", ml_dtypes.bfloat16),
        ("max", "f16", np.float16),
        ("and", "b32", np.uint32),
        ("or", "b64", np.uint64),
        ("xor", "b32", np.uint32),
        ("inc", "u32", np.uint32),
        ("dec", "u32", np.uint32),
    ],
)
def test_bulk_reductions(operation, name, dtype):
    # All blocks reduce into the same array, one after the other.
    blocks, count = 4, 320
    random = np.random.default_rng(8)
    if np.issubdtype(dtype, np.integer):
        data = random.integers(0, 20, (blocks, count)).astype(dtype)
        out = random.integers(0, 20, count).astype(dtype)
    else:
        data = random.standard_normal((blocks, count)).astype(dtype)
        out = random.standard_normal(count).astype(dtype)
    expected = out.copy()
    size = count * np.dtype(dtype).itemsize
    body = f"""
    {move("IN", 0, size, load=True)}
    fence.proxy.async;
    bar.sync 0;
    @%first cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{name}
        [%array1], [%tile], {size};
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
    """
    run(body, data, out, grid=blocks)
    for row in data:
        expected = {
            "add": lambda a, b: a + b,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "inc": lambda a, b: np.where(a >= b, 0, a + 1),
            "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
        }[operation.split(".")[0]](expected, row).astype(dtype)
    np.testing.assert_array_equal(out, expected)


def test_stores_and_reductions_in_other_blocks():
    out = np.zeros((4, 64), np.uint32)
    body = f"""
    {barrier()}
    shl.b32 %i, %prologue2, 2;
    add.u32 %r1, %tile, %i;
    st.shared.b32 [%r1], 0;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    xor.b32 %r2, %rank, 1;
    mapa.shared::cluster.u32 %r3, %tile, %r2;
    mapa.shared::cluster.u32 %r4, %bar, %r2;
    mul.lo.u32 %r5, %prologue0, 1000;
    add.u32 %r5, %r5, %prologue2;
    add.u32 %r6, %r3, %i;
    st.async.weak.shared::cluster.{COMPLETE}.b32 [%r6], %r5, [%r4];
    red.async.relaxed.cluster.shared::cluster.{COMPLETE}.add.u32 [%r3], %prologue2, [%r4];
    {wait()}
    {move("OUT", 0, 256, load=False)}
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    run(body, out, grid=4, block=64, cluster=2)
    sender = (np.arange(4) ^ 1)[:, None]
    expected = sender * 1000 + np.arange(64)
    expected[:, 0] += 64 * 63 // 2
    np.testing.assert_array_equal(out, expected)


def test_bulk_groups_in_the_eyes_of_the_observer():
    listener = Listener()
    out = np.zeros((2, 256), np.uint8)
    body = """
    fence.proxy.async;
    bar.sync 0;
    mul.wide.u32 %p1, %prologue0, 256;
    add.u64 %p1, %p1, %array0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%p1], [%tile], 32;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%p1+64], [%tile], 48;
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group.read 1;
    @%first cp.async.bulk.wait_group 0;
    """
    run(body, out, grid=2, block=64, make_observer=lambda: listener)
    first, second = [event[1] for event in listener.named("begin")]
    assert (first.engine, first.proxy, first.lanes.tolist()) == ("tma", "async", [0, 64])
    assert listener.named("complete_for") == [
        ("complete_for", first, [0, 64], True),
        ("complete_for", first, [0, 64], False),
        ("complete_for", second, [0, 64], False),
    ]
    (write,) = [event for event in listener.named("write") if event[1] is second]
    assert (write[2], write[4], write[5].tolist()) == ("global", 48, [0, 64])
    assert np.diff(write[3]).tolist() == [256]


def test_completion_in_the_eyes_of_the_observer():
    listener = Listener()
    body = f"""
    {barrier()}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;
    @%first cp.async.bulk.shared::cluster.global.{COMPLETE} [%tile], [%array0], 32, [%bar];
    {wait()}
    """
    run(body, random_bytes(0, 64), grid=2, block=32, make_observer=lambda: listener)
    found = listener.named("complete_on")
    assert [event[3].tolist() for event in found] == [[0], [32]]
    assert {event[2][0] for event in found} == {"mbarrier"}
    assert found[0][2] != found[1][2]
    names = [event[0] for event in listener.events]
    assert names.index("write") < names.index("complete_on")


def test_copies_of_nothing_where_arrays_end():
    data = random_bytes(0, 256)
    before = data.copy()
    body = f"""
    {barrier()}
    @%first mbarrier.arrive.shared::cta.b64 _, [bar];
    @%first cp.async.bulk.shared::cluster.global.{COMPLETE} [%tile], [%array0+256], 0, [%bar];
    @%first cp.async.bulk.global.shared::cta.bulk_group [%array0+256], [%tile], 0;
    {wait()}
    """
    run(body, data, block=32)
    np.testing.assert_array_equal(data, before)


# What is reported ---------------------------------------------------------------------------------

LOAD = f"cp.async.bulk.shared::cluster.global.{COMPLETE}"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "cp.async.ca.shared.global [%tile+4], [%array0], 8;",
            ("misaligned", "8 bytes at shared address", "multiple of 8"),
        ),
        ("cp.async.ca.shared.global [%tile], [%array0+4], 8;", ("misaligned", "global address")),
        (
            "cp.async.ca.shared.global [%tile], [%array0+256], 4;",
            ("out of bounds", "0 bytes behind array 0"),
        ),
        (
            "cp.async.ca.shared.global [%tile], [%array0], 4, 5;",
            ("copies more bytes than there is room for", "got: 5", "at most 4"),
        ),
        (
            "cp.async.mbarrier.arrive.shared.b64 [bar];",
            ("arrives at an mbarrier that is not initialized",),
        ),
        (f"{LOAD} [%tile], [%array0], 24, [%bar];", ("wrong number of bytes", "multiple of 16")),
        (f"{LOAD} [%tile+8], [%array0], 16, [%bar];", ("misaligned", "multiple of 16")),
        (f"{LOAD} [%tile], [%array0+8], 16, [%bar];", ("misaligned", "multiple of 16")),
        (f"{LOAD} [%tile], [%array0+16], 256, [%bar];", ("out of bounds", "256 bytes at global")),
        (f"{LOAD} [%tile], [%array0], 16, [%bar];", ("an mbarrier that is not initialized",)),
        (f"{STORE} [%array0+128], [%tile], 256;", ("out of bounds", "global address")),
        (f"{STORE} [%array0], [%tile+32768], 256;", ("out of bounds", "shared address")),
        (
            f"{barrier()} {LOAD}.multicast::cluster [%tile], [%array0], 16, [%bar], 2;",
            ("copies to blocks that the cluster does not have", "0x0002", "one of 1 bits"),
        ),
    ],
)
def test_misuse(body, words):
    with pytest.raises(SimulationError) as caught:
        run(body, random_bytes(0, 256), block=32)
    for word in ("thread ", *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            f"@%first {LOAD} [%r3], [%array0], 16, [%bar];",
            ("names an mbarrier of another block than the one that it copies to",)
            + ("expected: block (1, 0, 0)",),
        ),
        (
            f"cp.async.bulk.shared::cta.global.{COMPLETE} [%r3], [%array0], 16, [%r4];",
            ("another block's shared memory as .shared::cta",),
        ),
        (
            f"{STORE} [%array0], [%r3], 16;",
            ("another block's shared memory as .shared::cta",),
        ),
        (
            f"st.async.weak.shared::cluster.{COMPLETE}.b32 [%r3], %i, [%bar];",
            ("names an mbarrier of another block than the one that it stores to",),
        ),
        (
            f"st.async.{COMPLETE}.b32 [%array0], %i, [%array0];",
            ("uses an address that is not in shared memory", "an address of global memory"),
        ),
    ],
)
def test_misuse_in_clusters(body, words):
    prologue = f"""
    {barrier()}
    mov.u32 %i, 0;
    xor.b32 %r2, %rank, 1;
    mapa.shared::cluster.u32 %r3, %tile, %r2;
    mapa.shared::cluster.u32 %r4, %bar, %r2;
    """
    with pytest.raises(SimulationError) as caught:
        run(prologue + body, random_bytes(0, 256), grid=2, block=32, cluster=2)
    for word in ("thread 0 of block (0, 0, 0)", *words):
        assert word in str(caught.value), str(caught.value)


def test_waiting_for_more_than_was_copied():
    body = f"""
    {barrier()}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;
    @%first {LOAD} [%tile], [%array0], 48, [%bar];
    {wait()}
    """
    with pytest.raises(DeadlockError, match="lacks 0 of 1 arrivals and 16 bytes"):
        run(body, random_bytes(0, 256), block=32)


@pytest.mark.parametrize(
    "body",
    [
        "cp.async.ca.shared.global [%tile], [%array0], 5;",
        "cp.async.cg.shared.global [%tile], [%array0], 8;",
        "cp.async.ca.shared.global [%tile], [%array0], %r0;",
        "cp.async.ca.shared [%tile], [%array0], 4;",
        "cp.async.ca.global.shared.L3 [%tile], [%array0], 4;",
        "cp.async.ca.shared.global.L2::cache_hint [%tile], [%array0], 4;",
        "cp.async.shared.global [%tile], [%array0], 4;",
        "cp.async.wait_group;",
        "cp.async.wait_group %r0;",
        "cp.async.wait_all 0;",
        "cp.async.commit_group 0;",
        "cp.async.bulk.wait_group.write 0;",
        "cp.async.mbarrier.arrive.shared::cluster.b64 [%bar];",
        "cp.async.bulk.shared::cluster.global [%tile], [%array0], 16, [%bar];",
        f"cp.async.bulk.global.shared::cta.{COMPLETE} [%array0], [%tile], 16, [%bar];",
        f"cp.async.bulk.shared::cta.global.{COMPLETE}.multicast::cluster"
        " [%tile], [%array0], 16, [%bar], %h;",
        f"{LOAD} [%tile], [%array0], 16;",
        f"{LOAD}.cp_mask [%tile], [%array0], 16, [%bar], %h;",
        f"{STORE} [%array0], [%tile], 16, 16;",
        "cp.async.bulk.global.global.bulk_group [%array0], [%array0], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%array0], [%tile], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f32 [%array0], [%tile], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.and.u32 [%array0], [%tile], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f32 [%array0], [%tile], 16;",
        f"cp.reduce.async.bulk.shared::cluster.shared::cta.{COMPLETE}.add.f32"
        " [%tile], [%tile], 16, [%bar];",
        "cp.async.bulk.prefetch.L1.global [%array0], 16;",
        f"st.async.weak.shared::cluster.{COMPLETE}.v2.b32 [%tile], %r0, [%bar];",
        "st.async.weak.shared::cluster.b32 [%tile], %r0, [%bar];",
        f"st.async.weak.shared::cluster.{COMPLETE}.b16 [%tile], %h, [%bar];",
        f"red.async.relaxed.cluster.shared::cluster.{COMPLETE}.add.f32 [%tile], %r0, [%bar];",
        f"red.async.shared::cluster.{COMPLETE}.add.u32 [%tile], %r0, [%bar];",
    ],
)
def test_unknown_forms(body):
    with pytest.raises(PtxError) as caught:
        run("mov.u32 %r0, 4;\n" + body, random_bytes(0, 256))
    assert "line" in str(caught.value)


@pytest.mark.parametrize("size", [16, 160])
def test_prefetches_change_nothing(size):
    data = random_bytes(9, 256)
    before = data.copy()
    run(f"cp.async.bulk.prefetch.L2.global [%array0], {size};", data)
    np.testing.assert_array_equal(data, before)
    with pytest.raises(SimulationError, match="out of bounds"):
        run(f"cp.async.bulk.prefetch.L2.global [%array0+128], {size + 128};", data)
