"""Asynchronous barriers in shared memory: phases, counts, waiting, and misuse."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_support import run_body

from pallasite_simulator.engine.grouping import Groups
from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError

SETUP = """
.shared .align 8 .b64 bars[4];
.reg .b64 %place, %state, %old;
.reg .b32 %bar, %warp, %lane, %far, %rank, %r<12>;
.reg .pred %p, %first, %done;
mov.u32 %bar, bars;
mov.u32 %rank, %cluster_ctarank;
shr.u32 %warp, %prologue2, 5;
and.b32 %lane, %prologue2, 31;
setp.eq.u32 %first, %prologue2, 0;
add.u64 %place, %array0, %offset4;
"""


def run(body, *arrays, **options):
    return run_body(SETUP + body, *arrays, **options)


def wait(barrier, parity, label, scope="cta"):
    return f"""{label}:
    mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 %done, [{barrier}], {parity};
    @!%done bra {label};
    """


# Values -------------------------------------------------------------------------------------------


def test_phases_of_a_ring_buffer():
    # Warp 0 hands numbers to the other warps through two slots.
    out = np.zeros((20, 128), np.uint32)
    rounds = 7
    body = f"""
    .shared .align 4 .b32 slots[2];
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    @%first mbarrier.init.shared::cta.b64 [bars+8], 1;
    @%first mbarrier.init.shared::cta.b64 [bars+16], 96;
    @%first mbarrier.init.shared::cta.b64 [bars+24], 96;
    bar.sync 0;
    mov.u32 %r0, 0;
    mov.u32 %r9, 0;
    setp.eq.u32 %p, %warp, 0;
    @%p bra PRODUCE;
    CONSUME:
    and.b32 %r1, %r0, 1;
    shr.u32 %r2, %r0, 1;
    and.b32 %r2, %r2, 1;
    mad.lo.u32 %r3, %r1, 8, %bar;
    {wait("%r3", "%r2", "FULL")}
    mov.u32 %r4, slots;
    mad.lo.u32 %r4, %r1, 4, %r4;
    ld.shared.u32 %r5, [%r4];
    mad.lo.u32 %r9, %r9, 3, %r5;
    mbarrier.arrive.shared::cta.b64 _, [%r3+16];
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, {rounds};
    @%p bra CONSUME;
    bra END;
    PRODUCE:
    and.b32 %r1, %r0, 1;
    shr.u32 %r2, %r0, 1;
    and.b32 %r2, %r2, 1;
    xor.b32 %r2, %r2, 1;
    mad.lo.u32 %r3, %r1, 8, %bar;
    {wait("%r3+16", "%r2", "EMPTY")}
    mov.u32 %r4, slots;
    mad.lo.u32 %r4, %r1, 4, %r4;
    mad.lo.u32 %r5, %r0, 10, %prologue0;
    @%first st.shared.u32 [%r4], %r5;
    @%first mbarrier.arrive.shared::cta.b64 _, [%r3];
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, {rounds};
    @%p bra PRODUCE;
    END:
    st.global.b32 [%place], %r9;
    """
    run(body, out, grid=20)
    expected = np.zeros((20, 128), np.uint32)
    for number in range(rounds):
        expected = expected * 3 + 10 * number + np.arange(20, dtype=np.uint32)[:, None]
    expected[:, :32] = 0
    np.testing.assert_array_equal(out, expected)


def test_states_are_those_before_each_arrival():
    out = np.zeros((3, 64), np.uint32)
    body = """
    @%first mbarrier.init.shared::cta.b64 [bars], 200;
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 %state, [bars], 2;
    mbarrier.pending_count.b64 %r0, %state;
    st.global.b32 [%place], %r0;
    """
    run(body, out, grid=3, block=64)
    np.testing.assert_array_equal(out, np.broadcast_to(200 - 2 * np.arange(64), (3, 64)))


def test_states_tell_whether_their_phase_is_complete():
    out = np.zeros((2, 32), np.uint32)
    body = """
    @!%first exit;
    mbarrier.init.shared::cta.b64 [bars], 1;
    mbarrier.init.shared::cta.b64 [bars+8], 2;
    mbarrier.arrive.shared::cta.b64 %old, [bars];
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %state, [bars+8], 1;
    mbarrier.test_wait.shared::cta.b64 %p, [bars], %old;
    selp.b32 %r0, 1, 0, %p;
    mbarrier.test_wait.shared::cta.b64 %p, [bars+8], %state;
    selp.b32 %r1, 2, 0, %p;
    mbarrier.arrive.shared::cta.b64 _, [bars+8];
    mbarrier.try_wait.shared::cta.b64 %p, [bars+8], %state, 100;
    selp.b32 %r2, 4, 0, %p;
    add.u32 %r0, %r0, %r1;
    add.u32 %r0, %r0, %r2;
    st.global.b32 [%place], %r0;
    """
    run(body, out, grid=2, block=32)
    np.testing.assert_array_equal(out[:, 0], [5, 5])


def test_arrivals_of_one_instruction_may_complete_several_phases():
    out = np.zeros(64, np.uint32)
    body = """
    @%first mbarrier.init.shared::cta.b64 [bars], 16;
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 %state, [bars];
    mbarrier.pending_count.b64 %r0, %state;
    st.global.b32 [%place], %r0;
    """
    run(body, out, block=64)
    np.testing.assert_array_equal(out, 16 - np.arange(64) % 16)


def test_lanes_of_several_barriers_in_any_order():
    out = np.zeros(128, np.uint32)
    body = """
    setp.lt.u32 %p, %prologue2, 4;
    mul.lo.u32 %r0, %prologue2, 8;
    add.u32 %r0, %r0, %bar;
    @%p mbarrier.init.shared::cta.b64 [%r0], 40;
    bar.sync 0;
    mul.lo.u32 %r1, %prologue2, 7;
    add.u32 %r1, %r1, 3;
    and.b32 %r1, %r1, 3;
    mad.lo.u32 %r1, %r1, 8, %bar;
    mbarrier.arrive.shared::cta.b64 %state, [%r1];
    mbarrier.pending_count.b64 %r0, %state;
    st.global.b32 [%place], %r0;
    """
    run(body, out)
    which = (np.arange(128) * 7 + 3) & 3
    expected = np.zeros(128)
    for barrier in range(4):
        mine = which == barrier
        expected[mine] = 40 - np.arange(mine.sum())
    np.testing.assert_array_equal(out, expected)


def test_bytes_may_come_before_they_are_expected():
    out = np.zeros(32, np.uint32)
    body = f"""
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    @%first mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%bar], 48;
    @%first mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 16;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars], 64;
    {wait("bars", 0, "W")}
    mov.u32 %r0, 9;
    st.global.b32 [%place], %r0;
    """
    run(body, out, block=32)
    np.testing.assert_array_equal(out, 9)


def test_dropping_out():
    # Threads leave one after the other; the last phase is completed by one alone.
    out = np.zeros(32, np.uint32)
    body = f"""
    @%first mbarrier.init.shared::cta.b64 [bars], 32;
    bar.sync 0;
    mov.u32 %r0, 0;
    AGAIN:
    setp.eq.u32 %p, %r0, %prologue2;
    @%p mbarrier.arrive_drop.shared::cta.b64 _, [bars];
    @%p bra END;
    mbarrier.arrive.shared::cta.b64 _, [bars];
    and.b32 %r1, %r0, 1;
    {wait("bars", "%r1", "W")}
    add.u32 %r0, %r0, 1;
    bra AGAIN;
    END:
    st.global.b32 [%place], %r0;
    """
    run(body, out, block=32)
    np.testing.assert_array_equal(out, np.arange(32))


def test_generic_addresses_and_invalidation():
    out = np.zeros((2, 32), np.uint32)
    body = """
    .reg .b64 %generic;
    cvt.u64.u32 %generic, %bar;
    cvta.shared.u64 %generic, %generic;
    @%first mbarrier.init.b64 [%generic+8], 32;
    bar.sync 0;
    mbarrier.arrive.b64 %state, [%generic+8];
    W: mbarrier.try_wait.b64 %done, [%generic+8], %state;
    @!%done bra W;
    bar.sync 0;
    @%first mbarrier.inval.b64 [%generic+8];
    @%first st.shared.b64 [bars+8], %place;
    bar.sync 0;
    @%first mbarrier.init.b64 [bars+8], 1;
    @%first mbarrier.arrive.b64 %state, [%generic+8];
    mov.u32 %r0, 3;
    st.global.b32 [%place], %r0;
    """
    run(body, out, grid=2, block=32)
    np.testing.assert_array_equal(out, 3)


@pytest.mark.parametrize("scope", ["cluster", "cta"])
def test_arrivals_from_other_blocks(scope):
    out = np.zeros((8, 32), np.uint32)
    body = f"""
    .shared .align 4 .b32 values[4];
    @%first mbarrier.init.shared::cta.b64 [bars], 4;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    setp.lt.u32 %p, %prologue2, 4;
    mapa.shared::cluster.u32 %far, %bar, %prologue2;
    mov.u32 %r0, values;
    mad.lo.u32 %r0, %rank, 4, %r0;
    mapa.shared::cluster.u32 %r1, %r0, %prologue2;
    mad.lo.u32 %r2, %prologue0, 10, %prologue2;
    @%p st.shared::cluster.u32 [%r1], %r2;
    @%p mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [%far];
    {wait("bars", 0, "W", "cluster")}
    and.b32 %r3, %prologue2, 3;
    mov.u32 %r0, values;
    mad.lo.u32 %r0, %r3, 4, %r0;
    ld.shared.u32 %r4, [%r0];
    st.global.b32 [%place], %r4;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    run(body, out, grid=8, block=32, cluster=4)
    block, thread = np.arange(8)[:, None], np.arange(32)[None] % 4
    np.testing.assert_array_equal(out, (block // 4 * 4 + thread) * 10 + block % 4)


def test_blocks_are_woken_one_by_one():
    # Warp 1 of each block arrives the later, the higher the block's number; warp 0 waits twice.
    out = np.zeros((6, 64), np.uint32)
    body = f"""
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    bar.sync 0;
    mov.u32 %r0, 0;
    setp.eq.u32 %p, %warp, 1;
    @%p bra LATE;
    {wait("bars", 0, "FIRST")}
    {wait("bars", 1, "SECOND")}
    mov.u32 %r0, 77;
    bra END;
    LATE:
    mul.lo.u32 %r1, %prologue0, 5;
    mov.u32 %r2, 0;
    DELAY:
    setp.ge.u32 %p, %r0, %r1;
    @%p bra ARRIVE;
    add.u32 %r0, %r0, 1;
    bra DELAY;
    ARRIVE:
    setp.eq.u32 %p, %lane, 0;
    @%p mbarrier.arrive.shared::cta.b64 _, [bars];
    add.u32 %r1, %r1, 3;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p, %r2, 2;
    @%p bra DELAY;
    END:
    st.global.b32 [%place], %r0;
    """
    run(body, out, grid=6, block=64)
    np.testing.assert_array_equal(out[:, :32], 77)
    np.testing.assert_array_equal(out[:, 32:], (5 * np.arange(6) + 3)[:, None].repeat(32, axis=1))


def test_polling_lets_others_go_on():
    out = np.zeros((4, 64), np.uint32)
    body = """
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    bar.sync 0;
    setp.eq.u32 %p, %warp, 1;
    @%p bra LATE;
    mov.u32 %r0, 0;
    POLL:
    add.u32 %r0, %r0, 1;
    mbarrier.test_wait.parity.shared::cta.b64 %done, [bars], 0;
    @!%done bra POLL;
    setp.gt.u32 %p, %r0, 0;
    selp.b32 %r1, 1, 0, %p;
    bra END;
    LATE:
    setp.eq.u32 %p, %lane, 0;
    @%p mbarrier.arrive.shared::cta.b64 _, [bars];
    mov.u32 %r1, 2;
    END:
    st.global.b32 [%place], %r1;
    """
    run(body, out, grid=4, block=64)
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 32, 1, 2)[None].repeat(4, axis=0))


def test_waiting_in_vain_ends_if_nobody_can_go_on():
    out = np.zeros((2, 32), np.uint32)
    body = """
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    bar.sync 0;
    mov.u32 %r0, 7;
    mbarrier.try_wait.parity.shared::cta.b64 %done, [bars], 0, 1000;
    selp.b32 %r1, 1, %r0, %done;
    @%first mbarrier.arrive.shared::cta.b64 _, [bars];
    mbarrier.try_wait.parity.shared::cta.b64 %done, [bars], 0, 1000;
    @%done add.u32 %r1, %r1, 100;
    st.global.b32 [%place], %r1;
    """
    run(body, out, grid=2, block=32)
    np.testing.assert_array_equal(out, 107)


@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_lanes_that_wait_are_not_overtaken_by_two_phases(form):
    # One lane produces and one consumes; all others only watch each phase go by.
    out = np.zeros((2, 96), np.uint32)
    watch = wait("%bar", "%parity", "SEE").replace("try_wait", form)
    body = f"""
    .reg .b32 %parity;
    @%first mbarrier.init.shared::cta.b64 [bars], 1;
    @%first mbarrier.init.shared::cta.b64 [bars+8], 1;
    bar.sync 0;
    mov.u32 %r0, 0;
    @%first bra PRODUCE;
    setp.eq.u32 %p, %prologue2, 32;
    @%p bra CONSUME;
    bra WATCH;
    PRODUCE:
    mbarrier.arrive.shared::cta.b64 _, [bars];
    and.b32 %parity, %r0, 1;
    {wait("bars+8", "%parity", "EMPTY")}
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, 9;
    @%p bra PRODUCE;
    bra END;
    CONSUME:
    and.b32 %parity, %r0, 1;
    {wait("bars", "%parity", "FULL")}
    mbarrier.arrive.shared::cta.b64 _, [bars+8];
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, 9;
    @%p bra CONSUME;
    bra END;
    WATCH:
    // The parity is the lowest bit, so that -1 means 1.
    and.b32 %parity, %r0, 1;
    neg.s32 %parity, %parity;
    {watch}
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, 9;
    @%p bra WATCH;
    END:
    st.global.b32 [%place], %r0;
    """
    run(body, out, grid=2, block=96)
    np.testing.assert_array_equal(out, 9)


# What is reported ---------------------------------------------------------------------------------


def message(error, body, **options):
    with pytest.raises(error) as caught:
        run(body, np.zeros(1024, np.uint32), **options)
    return str(caught.value)


def test_deadlock_says_what_is_missing():
    text = message(
        DeadlockError,
        f"""
        @%first mbarrier.init.shared::cta.b64 [bars+16], 3;
        bar.sync 0;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars+16], 4096;
        {wait("bars+16", 0, "W")}
        """,
        grid=3,
        block=64,
    )
    assert "threads 0-63 of block (0, 0, 0) and of 2 more blocks wait for" in text
    assert "the mbarrier at byte 16 of shared memory, whose phase 0 (parity 0)" in text
    assert "lacks 2 of 3 arrivals and 4096 bytes, at mbarrier.try_wait" in text


def test_deadlock_after_too_many_bytes():
    text = message(
        DeadlockError,
        f"""
        @%first mbarrier.init.shared::cta.b64 [bars], 1;
        bar.sync 0;
        @%first mbarrier.arrive.shared::cta.b64 _, [bars];
        @%first mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 128;
        @%first mbarrier.arrive.shared::cta.b64 _, [bars];
        {wait("bars", 1, "W")}
        """,
        block=32,
    )
    assert "phase 1 (parity 1) lacks 0 of 1 arrivals and has got 128 bytes more" in text


def test_deadlock_of_polling():
    text = message(
        DeadlockError,
        """
        @%first mbarrier.init.shared::cta.b64 [bars], 1;
        bar.sync 0;
        W: mbarrier.test_wait.parity.shared::cta.b64 %done, [bars], 0;
        @!%done bra W;
        """,
        block=32,
    )
    assert "threads 0-31 of block (0, 0, 0) poll for something that no thread does" in text


INIT = "@%first mbarrier.init.shared::cta.b64 [bars], 4;\nbar.sync 0;\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "mbarrier.arrive.shared::cta.b64 _, [bars+8];",
            ("thread 0 of block (0, 0, 0) arrives at an mbarrier that is not initialized",)
            + ("byte 8 of shared memory, which is not", "try: mbarrier.init"),
        ),
        (
            "mbarrier.try_wait.parity.shared::cta.b64 %p, [bars], 0;",
            ("waits at an mbarrier that is not initialized",),
        ),
        (
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 1;",
            ("expects bytes on an mbarrier that is not initialized",),
        ),
        ("mbarrier.inval.shared::cta.b64 [bars];", ("invalidates an mbarrier that is not",)),
        (
            INIT + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 8;\n"
            "mbarrier.arrive.shared::cta.b64 _, [bars];",
            ("thread 4 of block (0, 0, 0) arrives more often at an mbarrier than it expects",)
            + ("lacks 0 of 4 arrivals and 256 bytes", "at most the 0 that are pending, of 4"),
        ),
        (
            INIT + "@%first mbarrier.arrive.shared::cta.b64 _, [bars], 5;",
            ("got: 5 more", "at most the 4 that are pending"),
        ),
        (
            INIT + "mov.u32 %r0, 0;\n@%first mbarrier.arrive.shared::cta.b64 _, [bars], %r0;",
            ("arrives at an mbarrier with a wrong count", "got: 0"),
        ),
        (
            INIT + "mbarrier.arrive.noComplete.shared::cta.b64 _, [bars], 1;",
            ("completes a phase of an mbarrier with .noComplete",),
        ),
        (
            INIT + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 40000;",
            ("out of its range", "got: 1280000", "-1048575 to 1048575"),
        ),
        (
            "@%first mbarrier.init.shared::cta.b64 [bars], 0;",
            ("initializes an mbarrier with a wrong count", "1 to 1048575"),
        ),
        (
            "@%first mbarrier.init.shared::cta.b64 [bars], 1048576;",
            ("initializes an mbarrier with a wrong count", "got: 1048576"),
        ),
        (
            INIT + "@!%first mbarrier.try_wait.parity.shared::cta.b64 %p, [bars], 0;\n"
            "@%first mbarrier.inval.shared::cta.b64 [bars];",
            ("invalidates an mbarrier for which 31 threads wait",),
        ),
        (
            INIT + "@!%first mbarrier.try_wait.parity.shared::cta.b64 %p, [bars], 0;\n"
            "@%first mbarrier.init.shared::cta.b64 [bars], 4;",
            ("initializes an mbarrier for which 31 threads wait",),
        ),
        (
            INIT + "@%first st.shared.u32 [bars+4], 7;\n"
            "@%first mbarrier.arrive.shared::cta.b64 _, [bars];",
            ("was overwritten by an access of memory",),
        ),
        (
            "mbarrier.init.shared::cta.b64 [bars+4], 1;",
            ("accesses memory misaligned", "multiple of 8"),
        ),
        (
            "mbarrier.init.b64 [%array0], 1;",
            ("uses an mbarrier that is not in shared memory", "an address of global memory"),
        ),
    ],
)
def test_misuse(body, words):
    text = message(SimulationError, body, block=32)
    for word in words:
        assert word in text, text


def test_waiting_at_a_barrier_of_another_block():
    text = message(
        SimulationError,
        """
        @%first mbarrier.init.shared::cta.b64 [bars], 4;
        xor.b32 %r0, %rank, 1;
        mapa.shared::cluster.u32 %far, %bar, %r0;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mbarrier.try_wait.parity.shared::cta.b64 %p, [%far], 0;
        """,
        grid=2,
        block=32,
        cluster=2,
    )
    assert "thread 0 of block (0, 0, 0) uses an mbarrier of another block as one of its own" in text
    assert "shared memory of block (1, 0, 0)" in text


class Listener(Observer):
    """Notes releases, acquisitions and misuse."""

    def __init__(self):
        self.events = []

    def release(self, lanes, key, scope="cta", relaxed=False):
        self.events.append(("release", lanes.tolist(), key, "relaxed" if relaxed else scope))

    def acquire(self, lanes, key, scope="cta", relaxed=False):
        self.events.append(("acquire", lanes.tolist(), key, "relaxed" if relaxed else scope))

    def misuse(self, lanes, message, instruction):
        self.events.append(("misuse", lanes.tolist(), message))

    def access(self, access):
        if access.instruction.opcode == "mbarrier":
            self.events.append((access.kind, access.size))


def observed(body, **options):
    listener = Listener()
    run(body, np.zeros(1024, np.uint32), make_observer=lambda: listener, **options)
    return listener.events


def test_what_the_observer_hears():
    events = observed(
        """
        @%first mbarrier.init.shared::cta.b64 [bars], 2;
        @%first mbarrier.arrive.shared::cta.b64 _, [bars];
        @%first mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [bars];
        @%first mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [bars], 0;
        @%first mbarrier.arrive.release.cluster.shared::cta.b64 _, [bars], 2;
        @%first mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p, [bars], 1;
        """,
        block=32,
    )
    key = next(event[2] for event in events if event[0] == "release")
    _, slot, phase = key
    later = ("mbarrier", slot, phase + 1)
    assert [event for event in events if event[0] in ("release", "acquire")] == [
        ("release", [0], key, "cta"),
        ("release", [0], key, "relaxed"),
        ("acquire", [0], key, "cluster"),
        ("release", [0], later, "cluster"),
        ("acquire", [0], later, "relaxed"),
    ]
    assert events[0] == ("write", 8)
    assert [event for event in events if len(event) == 2][1:] == [("atomic", 8)] * 5


def test_making_a_barrier_of_one_is_misuse():
    events = observed(
        """
        @%first mbarrier.init.shared::cta.b64 [bars], 2;
        @%first mbarrier.init.shared::cta.b64 [bars], 3;
        @%first mbarrier.inval.shared::cta.b64 [bars];
        @%first mbarrier.init.shared::cta.b64 [bars], 3;
        """,
        block=32,
    )
    (found,) = [event for event in events if event[0] == "misuse"]
    assert "initializes an mbarrier that is one already" in found[2]
    assert "lacks 2 of 2 arrivals" in found[2]


@pytest.mark.parametrize(
    "body",
    [
        "mbarrier.init.shared::cta.b32 [bars], 1;",
        "mbarrier.init.shared::cluster.b64 [bars], 1;",
        "mbarrier.init.shared::cta.b64 [bars];",
        "mbarrier.inval.shared::cta.b64 [bars], 1;",
        "mbarrier.arrive.shared::cluster.b64 %state, [%r0];",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars];",
        "mbarrier.arrive.expect_tx.noComplete.shared::cta.b64 _, [bars], 1;",
        "mbarrier.arrive.acquire.cta.shared::cta.b64 _, [bars];",
        "mbarrier.arrive.release.shared::cta.b64 _, [bars];",
        "mbarrier.arrive.cta.shared::cta.b64 _, [bars];",
        "mbarrier.arrive.global.b64 _, [bars];",
        "mbarrier.expect_tx.release.cta.shared::cta.b64 [bars], 1;",
        "mbarrier.test_wait.shared::cta.b64 %p, [bars], %state, 5;",
        "mbarrier.try_wait.parity.release.cta.shared::cta.b64 %p, [bars], 0;",
        "mbarrier.try_wait.parity.shared::cluster.b64 %p, [bars], 0;",
        "mbarrier.try_wait.odd.shared::cta.b64 %p, [bars], 0;",
        "mbarrier.pending_count.b32 %r0, %state;",
        "mbarrier.arrive_on.b64 _, [bars];",
    ],
)
def test_unknown_forms(body):
    with pytest.raises(PtxError) as caught:
        run(body, np.zeros(4, np.uint32))
    assert "line" in str(caught.value)


# Grouping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("sort", [False, True])
def test_groups(count, sort):
    random = np.random.default_rng(count)
    values = random.integers(0, 9, count)
    if sort:
        values.sort()
    amounts = random.integers(0, 50, count)
    groups = Groups(values)
    distinct = sorted(set(values.tolist()))
    assert groups.distinct.tolist() == distinct
    assert groups.sizes.tolist() == [int((values == one).sum()) for one in distinct]
    assert groups.first.tolist() == [values.tolist().index(one) for one in distinct]
    sums = [int(amounts[values == one].sum()) for one in distinct]
    assert groups.sum(amounts).tolist() == sums
    assert groups.sum(np.array(3)).tolist() == [3 * one for one in groups.sizes]
    before = [int(amounts[:n][values[:n] == values[n]].sum()) for n in range(count)]
    assert groups.sum_before(amounts).tolist() == before
    parts = {value: numbers.tolist() for numbers, value in groups.split(np.arange(count))}
    assert parts == {one: np.flatnonzero(values == one).tolist() for one in distinct}
