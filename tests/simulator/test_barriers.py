"""Barriers of blocks and clusters."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_support import run_body

from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError

ADDRESS = """
.reg .b64 %place;
.reg .b32 %warp, %r<8>;
.reg .pred %p, %q;
add.u64 %place, %array0, %offset4;
shr.u32 %warp, %prologue2, 5;
"""

RESULT = "add.u64 %place, %array1, %offset4;\nst.global.b32 [%place], %r7;"

FORMS = ("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")


def flags(random, blocks, threads, chance=0.5):
    return (random.random((blocks, threads)) < chance).astype(np.uint32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation", ["popc", "and", "or"])
@pytest.mark.parametrize("threads", [32, 96, 100])
def test_reduction(form, operation, threads):
    random = np.random.default_rng(threads)
    blocks = 7
    given = flags(random, blocks, threads)
    given[1], given[2] = 0, 1
    out = np.zeros((blocks, threads), np.uint32)
    aligned = ".aligned" if form.startswith("barrier") and threads == 96 else ""
    kind = "u32 %r7, 0" if operation == "popc" else "pred %q, 0"
    body = f"""{ADDRESS}
    ld.global.b32 %r0, [%place];
    setp.ne.b32 %p, %r0, 0;
    {form}.{operation}{aligned}.{kind}, %p;
    {"" if operation == "popc" else "selp.b32 %r7, 1, 0, %q;"}
    {RESULT}
    """
    run_body(body, given, out, grid=blocks, block=threads)
    reduce = {"popc": np.sum, "and": np.min, "or": np.max}[operation]
    np.testing.assert_array_equal(out, np.broadcast_to(reduce(given, axis=1)[:, None], out.shape))


def test_reductions_of_parts_of_a_block_that_come_at_different_times():
    random = np.random.default_rng(0)
    given = flags(random, 5, 128)
    out = np.zeros((5, 128), np.uint32)
    # Warps 0 and 3, and 1 and 2, meet; of each pair, one is later than the other.
    body = f"""{ADDRESS}
    ld.global.b32 %r0, [%place];
    setp.ne.b32 %p, %r0, 0;
    add.u32 %r1, %warp, 1;
    shr.u32 %r1, %r1, 1;
    and.b32 %r1, %r1, 1;
    setp.gt.u32 %q, %warp, 1;
    @%q bra LATE;
    barrier.red.popc.u32 %r7, %r1, 64, !%p;
    bra END;
    LATE:
    barrier.cta.red.popc.aligned.u32 %r7, %r1, 64, !%p;
    END:
    {RESULT}
    """
    run_body(body, given, out, grid=5)
    off = 1 - given.reshape(5, 4, 32)
    counts = off.sum(axis=2)
    outer, inner = counts[:, 0] + counts[:, 3], counts[:, 1] + counts[:, 2]
    expected = np.stack([outer, inner, inner, outer], axis=1)
    np.testing.assert_array_equal(out.reshape(5, 4, 32), expected[:, :, None].repeat(32, axis=2))


def test_who_arrives_goes_on_and_who_waits_sees_what_was_written():
    out = np.zeros(128, np.uint32)
    body = """
    .shared .align 4 .b32 value;
    .reg .b32 %r<4>;
    .reg .pred %p;
    .reg .b64 %place;
    setp.lt.u32 %p, %prologue2, 64;
    @%p bra WAIT;
    setp.eq.u32 %p, %prologue2, 100;
    mov.u32 %r0, 4711;
    @%p st.shared.u32 [value], %r0;
    barrier.arrive 3, 128;
    mov.u32 %r1, 0;
    bra END;
    WAIT:
    bar.sync 3, 128;
    ld.shared.u32 %r1, [value];
    END:
    add.u64 %place, %array0, %offset4;
    st.global.b32 [%place], %r1;
    """
    run_body(body, out)
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 64, 4711, 0))


def test_barrier_of_a_block_that_is_not_whole_warps():
    # 100 threads are 4 warps, and count as 128.
    out = np.zeros(100, np.uint32)
    body = f"""{ADDRESS}
    bar.sync 1, 128;
    mov.u32 %r7, 5;
    st.global.b32 [%place], %r7;
    """
    run_body(body, out, block=100)
    np.testing.assert_array_equal(out, 5)


def test_ended_threads_do_not_count():
    out = np.zeros(128, np.uint32)
    body = f"""{ADDRESS}
    setp.ge.u32 %p, %prologue2, 32;
    @%p exit;
    bar.sync 0;
    mov.u32 %r7, 1;
    st.global.b32 [%place], %r7;
    """
    run_body(body, out)
    np.testing.assert_array_equal(out, np.arange(128) < 32)


@pytest.mark.parametrize("aligned", ["", ".aligned"])
@pytest.mark.parametrize("order", ["", ".release", ".relaxed"])
def test_cluster_barrier(order, aligned):
    out = np.zeros((8, 64), np.uint32)
    body = f"""
    .shared .align 4 .b32 value;
    .reg .b32 %r<6>;
    .reg .pred %p;
    .reg .b64 %place;
    mov.u32 %r0, %cluster_ctarank;
    setp.eq.u32 %p, %prologue2, 0;
    add.u32 %r1, %prologue0, 100;
    @%p st.shared.u32 [value], %r1;
    barrier.cluster.arrive{order}{aligned};
    barrier.cluster.wait.acquire{aligned};
    mov.u32 %r2, value;
    xor.b32 %r3, %r0, 1;
    mapa.shared::cluster.u32 %r4, %r2, %r3;
    ld.shared::cluster.u32 %r5, [%r4];
    barrier.cluster.arrive;
    barrier.cluster.wait;
    add.u64 %place, %array0, %offset4;
    st.global.b32 [%place], %r5;
    """
    run_body(body, out, grid=8, block=64, cluster=4)
    np.testing.assert_array_equal(out, (100 + (np.arange(8) ^ 1))[:, None].repeat(64, axis=1))


def message(error, body, **options):
    with pytest.raises(error) as caught:
        run_body(body, np.zeros(1024, np.uint32), **options)
    return str(caught.value)


def test_deadlock_says_who_waits_where():
    text = message(
        DeadlockError,
        f"{ADDRESS} setp.lt.u32 %p, %prologue2, 64;\n@%p bar.sync 2, 128;",
        grid=3,
    )
    assert "no thread can go on" in text
    assert "threads 0-63 of block (0, 0, 0) and of 2 more blocks wait for barrier 2" in text
    assert "64 of 128 threads have arrived" in text


def test_deadlock_of_a_warp_that_parts_before_an_aligned_barrier():
    text = message(
        DeadlockError,
        f"""{ADDRESS} setp.lt.u32 %p, %prologue2, 16;
        @%p bra OTHER;
        bar.sync 1, 32;
        bra END;
        OTHER:
        bar.sync 2, 32;
        END:""",
        block=32,
    )
    assert "threads 0-15" in text
    assert "threads 16-31" in text
    assert "other lanes of the warp" in text


def test_deadlock_of_a_cluster():
    text = message(
        DeadlockError,
        """.reg .pred %p;
        setp.eq.u32 %p, %prologue0, 1;
        @%p bar.sync 1, 64;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        """,
        grid=2,
        block=32,
        cluster=2,
    )
    assert "wait for the barrier of its cluster, where 32 of 64 threads have arrived" in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("bar.sync 16;", ("no such barrier", "got: 16", "0 to 15")),
        ("bar.sync 1, 33;", ("whole warps", "33 threads")),
        ("bar.sync 1, 0;", ("whole warps", "0 threads")),
        ("bar.arrive 1, 96;", ("too many threads arrive at barrier 1", "got: 128")),
        (
            ADDRESS
            + """setp.lt.u32 %p, %prologue2, 32;
            @%p bra A;
            bar.sync 1, 128;
            A: bar.sync 1, 64;""",
            ("different numbers of threads", "got: 64 threads", "expected: 128"),
        ),
        ("barrier.cluster.wait;", ("without having arrived", "barrier.cluster.arrive before")),
        (
            "barrier.cluster.arrive; barrier.cluster.arrive;",
            ("arrives twice", "barrier.cluster.wait between"),
        ),
    ],
)
def test_misuse(body, words):
    text = message(SimulationError, body)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    "body",
    [
        "bar.sync;",
        "bar.sync 0, 1, 2;",
        "bar.arrive 0;",
        "bar.sync.popc 0;",
        "barrier.cta.red.aligned.u32 %r0, 0, %p;",
        "barrier.red.popc.and.u32 %r0, 0, %p;",
        "barrier.red.popc.s32 %r0, 0, %p;",
        "barrier.red.and.u32 %r0, 0, %p;",
        "bar.red.popc.u32 %r0, %p;",
        "barrier.cluster.arrive.acquire;",
        "barrier.cluster.arrive.release.relaxed;",
        "barrier.cluster.wait.release;",
        "barrier.cluster.wait 0;",
        "barrier.cluster;",
    ],
)
def test_unknown_forms(body):
    with pytest.raises(PtxError) as caught:
        run_body(".reg .b32 %r<4>;\n.reg .pred %p;\n" + body, np.zeros(4, np.uint32))
    assert "line" in str(caught.value)
