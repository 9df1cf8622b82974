"""Lanes part, meet, wait and end: the order of execution, and what is said when there is none."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_support import module, run_body, run_ptx

from pallasite_simulator import launch as launching
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError, WatchdogError

STORE = "add.s64 %at, %array0, %offset4; st.global.b32 [%at], %d;"
REGISTERS = ".reg .b32 %a, %b, %c, %d; .reg .b64 %at, %wide; .reg .pred %p, %q;"


def results(body, *, blocks=1, threads=128, **options):
    out = np.full(blocks * threads, 0xCDCDCDCD, np.uint32)
    run_body(REGISTERS + body, out, grid=blocks, block=threads, **options)
    return out


COUNT = """
    and.b32 %b, %thread, 7;
    mov.u32 %d, 0;
LOOP:
    setp.eq.u32 %p, %b, 0;
    @%p bra DONE;
    add.u32 %d, %d, %b;
    sub.u32 %b, %b, 1;
    bra LOOP;
DONE:
"""


@pytest.mark.parametrize("threads", [1, 31, 32, 100, 128, 1024])
@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_loops_of_differing_length(threads, blocks):
    count = np.arange(blocks * threads) & 7
    out = results(COUNT + STORE, blocks=blocks, threads=threads)
    np.testing.assert_array_equal(out, count * (count + 1) // 2)


def test_lanes_meet_behind_a_loop():
    # All lanes take part in the shuffle, whatever they did before.
    body = COUNT + "shfl.sync.bfly.b32 %d, %d, 1, 31, -1;" + STORE
    count = np.arange(128) & 7
    np.testing.assert_array_equal(results(body), (count * (count + 1) // 2)[np.arange(128) ^ 1])


def test_lanes_at_different_places_meet_by_their_masks():
    body = """
        and.b32 %b, %thread, 31;
        setp.lt.u32 %p, %b, 12;
        @%p bra FEW;
        shfl.sync.idx.b32 %d, %thread, 20, 31, 0xfffff000;
        bra JOIN;
    FEW:
        shfl.sync.idx.b32 %d, %thread, 3, 31, 0x00000fff;
    JOIN:
    """
    lane = np.arange(128)
    expected = lane // 32 * 32 + np.where(lane % 32 < 12, 3, 20)
    np.testing.assert_array_equal(results(body + STORE), expected)


def test_a_warp_barrier_is_met_from_different_instructions():
    # Each half stores, waits at a barrier of its own branch, and reads what the other half stored.
    half = """
        mad.lo.u32 %c, %thread, 3, {add};
        st.shared.u32 [%a], %c;
        bar.warp.sync {mask};
        xor.b32 %a, %a, 64;
        ld.shared.u32 %d, [%a];
    """
    body = f"""
        mov.u32 %a, dynamic;
        shl.b32 %b, %thread, 2;
        add.u32 %a, %a, %b;
        and.b32 %b, %thread, 31;
        setp.lt.u32 %p, %b, 16;
        @%p bra LOW;
        {half.format(add=7, mask="-1")}
        bra JOIN;
    LOW:
        setp.lt.u32 %q, %b, 4;
        @%q exit;
        {half.format(add=1, mask="-1")}
    JOIN:
    """
    out = results(body + STORE, shared=512)
    lane = np.arange(128)
    other = lane ^ 16
    expected = np.where(lane % 32 < 16, 3 * other + 7, 3 * other + 1)
    for first in range(4):
        # Lanes 0 to 3 have ended; nobody has stored for lanes 16 to 19.
        expected[first::32] = 0xCDCDCDCD
    mask = (lane % 32 < 16) | (lane % 32 >= 20)
    np.testing.assert_array_equal(out[mask], expected[mask])


def test_a_lane_that_its_mask_does_not_name():
    with pytest.raises(SimulationError, match="member mask does not name it") as error:
        results("shfl.sync.idx.b32 %d, %thread, 0, 31, 0x0000ffff;" + STORE)
    assert "thread 16 of block (0, 0, 0)" in str(error.value)


def test_ended_lanes_are_not_waited_for():
    body = """
        mov.u32 %d, %thread;
        and.b32 %b, %thread, 31;
        setp.ge.u32 %p, %b, 20;
        @%p exit;
        shfl.sync.bfly.b32 %d, %d, 1, 31, -1;
        bar.sync 0;
    """
    out = results(body + STORE)
    lane = np.arange(128)
    expected = np.where(lane % 32 < 20, lane ^ 1, 0xCDCDCDCD)
    np.testing.assert_array_equal(out, expected)


def test_threads_that_end_complete_a_barrier_that_others_wait_at():
    body = """
        setp.lt.u32 %p, %thread, 64;
        @%p bra WAIT;
        mov.u32 %d, 0;
    SPIN:
        add.u32 %d, %d, 1;
        setp.lt.u32 %q, %d, 50;
        @%q bra SPIN;
        exit;
    WAIT:
        bar.sync 0;
        mov.u32 %d, 7;
    """
    out = results(body + STORE)
    assert (out[:64] == 7).all() and (out[64:] == 0xCDCDCDCD).all()


def test_deadlock_says_who_waits_for_what():
    body = """
        setp.lt.u32 %p, %thread, 32;
        @%p bra ONE;
        bar.sync 1;
        bra JOIN;
    ONE:
        bar.sync 2;
    JOIN:
        mov.u32 %d, 0;
    """
    with pytest.raises(DeadlockError) as error:
        results(body + STORE, blocks=3)
    text = str(error.value)
    assert "no thread can go on" in text
    assert "threads 32-127 of block (0, 0, 0) wait for barrier 1" in text
    assert "threads 0-31 of block (0, 0, 0) wait for barrier 2" in text
    assert "32 of 128 threads have arrived" in text


CHAIN = """
    mov.u32 %a, %ctaid.x;
    mov.u32 %b, %nctaid.x;
    sub.u32 %b, %b, 1;
    setp.eq.u32 %p, %a, {first};
    @%p bra GO;
    {neighbour} %c, %a, 1;
    mul.wide.u32 %wide, %c, 4;
    add.s64 %at, %array1, %wide;
POLL:
    ld.acquire.gpu.global.u32 %d, [%at];
    setp.eq.u32 %q, %d, 0;
    @%q bra POLL;
    bra SET;
GO:
    mov.u32 %d, 100;
SET:
    add.u32 %d, %d, 1;
    bar.sync 0;
    setp.ne.u32 %p, %tid.x, 0;
    @%p bra END;
    mul.wide.u32 %wide, %a, 4;
    add.s64 %at, %array1, %wide;
    st.release.gpu.global.u32 [%at], %d;
END:
"""


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("blocks", [5, 300])
def test_blocks_that_wait_for_one_another(forward, blocks):
    # More blocks than run together: the last ones have to begin while the first ones wait.
    body = CHAIN.format(
        first="0" if forward else "%b", neighbour="sub.u32" if forward else "add.u32"
    )
    out, flags = np.zeros(blocks * 128, np.uint32), np.zeros(blocks, np.uint32)
    body = body.replace("setp.ne.u32 %p, %tid.x, 0;", "mov.u32 %c, %tid.x; setp.ne.u32 %p, %c, 0;")
    run_body(REGISTERS + body + STORE, out, flags, grid=blocks)
    place = np.arange(blocks) if forward else np.arange(blocks)[::-1]
    np.testing.assert_array_equal(flags, 101 + place)
    np.testing.assert_array_equal(
        out.reshape(blocks, 128), np.repeat(101 + place, 128).reshape(-1, 128)
    )


def test_polling_for_what_never_happens():
    body = CHAIN.format(first="7777", neighbour="add.u32").replace("%tid.x", "%thread")
    with pytest.raises(DeadlockError, match="poll for something that no thread does"):
        run_body(REGISTERS + body, np.zeros(256, np.uint32), np.zeros(2, np.uint32))


def test_a_lane_that_spins_does_not_keep_its_warp_from_helping():
    # Lane 0 waits for what lane 1 of the same warp does behind the loop.
    body = """
        setp.ne.u32 %p, %thread, 0;
        @%p bra OTHERS;
    SPIN:
        ld.volatile.global.u32 %d, [%array1];
        setp.ne.u32 %q, %d, 5;
        @%q bra SPIN;
        bra JOIN;
    OTHERS:
        setp.ne.u32 %p, %thread, 1;
        @%p bra JOIN;
        st.volatile.global.u32 [%array1], 5;
    JOIN:
        mov.u32 %d, 1;
    """
    out, flag = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    run_body(REGISTERS + body + STORE, out, flag, block=32)
    assert (out == 1).all()


def test_plain_spinning_gets_no_more_than_its_share():
    # Nothing marks these loads as polls: patience has to run out.
    body = """
        setp.ne.u32 %p, %thread, 0;
        @%p bra OTHERS;
    SPIN:
        ld.global.u32 %d, [%array1];
        setp.ne.u32 %q, %d, 5;
        @%q bra SPIN;
        bra JOIN;
    OTHERS:
        st.global.u32 [%array1], 5;
    JOIN:
        mov.u32 %d, 1;
    """
    out, flag = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    run_body(REGISTERS + body + STORE, out, flag, block=64)
    assert (out == 1).all()


def test_special_registers():
    names = ("%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z")
    names += ("%cluster_ctarank", "%cluster_ctaid.x", "%cluster_ctaid.y", "%clusterid.x")
    names += ("%clusterid.y", "%laneid", "%warpid", "%nctaid.y", "%ntid.z", "%nclusterid.x")
    block, grid, cluster = (8, 3, 2), (4, 6, 2), (2, 3, 1)
    body = [
        ".reg .b32 %v, %w, %linear; .reg .b64 %place;",
        "mov.u32 %v, %ctaid.z; mov.u32 %w, %nctaid.y; mul.lo.u32 %linear, %v, %w;",
        "mov.u32 %v, %ctaid.y; add.u32 %linear, %linear, %v; mov.u32 %w, %nctaid.x;",
        "mul.lo.u32 %linear, %linear, %w; mov.u32 %v, %ctaid.x; add.u32 %linear, %linear, %v;",
        "mov.u32 %w, %ntid.z; mul.lo.u32 %linear, %linear, %w; mov.u32 %v, %tid.z;",
        "add.u32 %linear, %linear, %v; mov.u32 %w, %ntid.y; mul.lo.u32 %linear, %linear, %w;",
        "mov.u32 %v, %tid.y; add.u32 %linear, %linear, %v; mov.u32 %w, %ntid.x;",
        "mul.lo.u32 %linear, %linear, %w; mov.u32 %v, %tid.x; add.u32 %linear, %linear, %v;",
        f"mul.wide.u32 %place, %linear, {4 * len(names)}; add.s64 %place, %place, %array0;",
    ]
    for number, name in enumerate(names):
        body += [f"mov.u32 %v, {name};", f"st.global.b32 [%place+{4 * number}], %v;"]
    out = np.full((*grid[::-1], *block[::-1], len(names)), -1, np.int32)
    run_body("\n".join(body), out, grid=grid, block=block, cluster=cluster)
    cz, cy, cx, tz, ty, tx = np.indices((*grid[::-1], *block[::-1]))
    linear = tx + 8 * (ty + 3 * tz)
    expected = (tx, ty, tz, cx, cy, cz, cx % 2 + 2 * (cy % 3), cx % 2, cy % 3, cx // 2)
    expected += (cy // 3, linear % 32, linear // 32, *np.ones((3, *cx.shape)) * 1)
    for number, values in enumerate(expected[:13]):
        np.testing.assert_array_equal(out[..., number], values, err_msg=names[number])
    assert (out[..., 13] == 6).all() and (out[..., 14] == 2).all() and (out[..., 15] == 2).all()


def test_order_of_blocks_keeps_clusters_together():
    geometry = Geometry((4, 4, 1), (32, 1, 1), (2, 2, 1))
    assert geometry.order[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert geometry.block_index(6) == (2, 1, 0)


def test_trap():
    with pytest.raises(SimulationError, match=r"thread 3 of block \(0, 0, 0\) executes a trap"):
        results("setp.eq.u32 %p, %thread, 3; @%p trap; mov.u32 %d, 0;" + STORE)


def test_a_branch_beyond_its_table():
    body = "ts: .branchtargets A, B; and.b32 %a, %thread, 3; brx.idx %a, ts; A: B: mov.u32 %d, 0;"
    with pytest.raises(SimulationError, match="beyond its table") as error:
        results(body + STORE)
    assert "got: 3" in str(error.value)


def test_an_instruction_that_nothing_knows():
    with pytest.raises(PtxError) as error:
        results("frobnicate.b32 %a, %b;" + STORE)
    assert "does not know this instruction, in: frobnicate.b32 %a, %b" in str(error.value)
    assert error.value.position.line == 18


def test_chosen_blocks():
    ptx = module(
        ".reg .b32 %r; .reg .b64 %p, %o; ld.param.u64 %p, [p]; mov.u32 %r, %ctaid.x;"
        "mul.wide.u32 %o, %r, 4; add.s64 %p, %p, %o; st.global.u32 [%p], %r;",
        [".u64 p"],
    )
    out = np.full(10, 99, np.uint32)
    execution = run_ptx(ptx, out, grid=10, block=1, blocks=[2, 7])
    assert execution.blocks == 2
    assert out.tolist() == [99, 99, 2, 99, 99, 99, 99, 7, 99, 99]
    with pytest.raises(SimulationError, match="no such block"):
        run_ptx(ptx, out, grid=10, block=1, blocks=[10])


def test_wrong_arguments():
    ptx = module("", [".u64 p", ".u32 n"])
    with pytest.raises(SimulationError, match="wrong number of arguments"):
        run_ptx(ptx, np.zeros(1))
    with pytest.raises(SimulationError, match="argument 1 .* wrong size") as error:
        run_ptx(ptx, np.zeros(1), np.float64(1))
    assert "4 bytes for n" in str(error.value)


def test_waves_are_whole_clusters():
    geometry = Geometry((96, 1, 1), (1024, 1, 1), (6, 1, 1))
    size = launching.wave_size(geometry, 0)
    assert size % 6 == 0 and size > 0
    assert launching.wave_size(geometry, 1 << 20) % 6 == 0


def test_issued_instructions_are_counted():
    ptx = module(
        """
        .reg .b32 %r, %n; .reg .pred %p;
        mov.u32 %r, %tid.x;
        mov.u32 %n, 0;
    LOOP:
        add.u32 %n, %n, 1;
        setp.lt.u32 %p, %n, 10;
        @%p bra LOOP;
        """
    )
    execution = run_ptx(ptx, grid=5, block=64)
    assert execution.issued[:5].tolist() == [10, 10, 100, 100, 100]


# Time ---------------------------------------------------------------------------------------------

ENDLESS = """
    setp.lt.u32 %p, %thread, 40;
    @!%p bra MEET;
LOOP:
    {look}
    setp.ne.u32 %q, %c, 7;
    @%q bra LOOP;
MEET:
    bar.sync 0;
"""


@pytest.mark.parametrize(
    "look", ["add.u32 %c, %thread, 8;", "ld.volatile.global.b32 %c, [%array0];"]
)
def test_loops_without_an_end(look):
    body = "mov.u32 %c, 0;" + ENDLESS.format(look=look)
    with pytest.raises((WatchdogError, DeadlockError)) as caught:
        results(body, timeout=0.2)
    text = str(caught.value)
    assert "threads 0-39 of block (0, 0, 0) run near" in text or "poll for something" in text
    assert "threads 40-127 of block (0, 0, 0) wait for" in text or "threads 64-127" in text
    if isinstance(caught.value, WatchdogError):
        assert "kernel 'kernel' has not ended after 0.2 s" in text
        assert "PALLASITE_SIMULATOR_TIMEOUT" in text
    assert (results(COUNT + STORE, timeout=60) < 29).all()
