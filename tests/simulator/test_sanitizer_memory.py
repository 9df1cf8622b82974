"""The sanitizer: bounds of shared allocations, uninitialized memory and registers, data races."""

from __future__ import annotations

import numpy as np
import pytest
from sanitizer_support import kinds, sanitize, sanitize_ptx
from simulator_support import module, run_ptx

from pallasite.errors import ConfigError, SourceLocation
from pallasite.launch import Allocation
from pallasite_simulator.errors import SanitizerError, SimulationError
from pallasite_simulator.sanitizer import GROUPS, LaunchState, parse_groups

REGISTERS = """
.reg .b32 %a, %b, %c, %d, %v, %w, %s, %t, %warp;
.reg .b16 %h;
.reg .b64 %p, %q, %wide;
.reg .pred %k, %l;
mov.u32 %t, %tid.x;
shr.u32 %warp, %t, 5;
mov.u32 %s, dynamic;
shl.b32 %a, %t, 2;
add.u32 %a, %a, %s;
sub.u32 %b, 127, %t;
shl.b32 %b, %b, 2;
add.u32 %b, %b, %s;
"""

REVERSE = """
st.shared.b32 [%a], %t;
{barrier}
ld.shared.b32 %v, [%b];
add.s64 %p, %array0, %offset4;
st.global.b32 [%p], %v;
"""


def output(blocks: int = 1) -> np.ndarray:
    return np.zeros(128 * blocks, np.uint32)


def run(body: str, *arrays: np.ndarray, shared: int = 1024, **options) -> str:
    return sanitize(REGISTERS + body, *arrays, shared=shared, **options)


# Races in shared memory ---------------------------------------------------------------------------


def test_exchange_with_a_barrier_is_clean():
    y = output(3)
    assert run(REVERSE.format(barrier="bar.sync 0;"), y, grid=3) == ""
    np.testing.assert_array_equal(y, np.tile(np.arange(127, -1, -1), 3))


def test_exchange_without_a_barrier():
    message = run(REVERSE.format(barrier=""), output(3), grid=3)
    assert kinds(message) == ["data race in shared memory"]
    assert "(384 times)" in message
    assert (
        "thread 0 of block (0, 0, 0) reads byte 508 of 'dynamic shared memory' (1024 bytes) in"
        " shared memory of block (0, 0, 0)"
    ) in message
    assert "nothing orders it after thread 127 of block (0, 0, 0), which wrote it" in message
    assert "in: ld.shared.b32 %v, [%b]" in message
    assert "in: st.shared.b32 [%a], %t" in message


def test_barrier_of_the_warp_is_not_enough_between_warps():
    message = run(REVERSE.format(barrier="bar.warp.sync 0xffffffff;"), output())
    assert kinds(message) == ["data race in shared memory"]


WARP_REVERSE = """
xor.b32 %b, %t, 31;
shl.b32 %b, %b, 2;
add.u32 %b, %b, %s;
"""


def test_barrier_of_the_warp_orders_its_lanes():
    body = WARP_REVERSE + REVERSE
    assert run(body.format(barrier="bar.warp.sync 0xffffffff;"), output(2), grid=2) == ""
    message = run(body.format(barrier=""), output(2), grid=2)
    assert kinds(message) == ["data race in shared memory"]


def test_barrier_of_a_part_of_the_warp():
    """Lanes exchange values in pairs; the masks have to name both."""
    body = (
        """
        xor.b32 %b, %t, {step};
        shl.b32 %b, %b, 2;
        add.u32 %b, %b, %s;
        and.b32 %c, %t, 16;
        shl.b32 %d, 0xffff, %c;
        """
        + REVERSE
    )
    barrier = "bar.warp.sync %d;"
    assert run(body.format(step=15, barrier=barrier), output()) == ""
    message = run(body.format(step=31, barrier=barrier), output())
    assert kinds(message) == ["data race in shared memory"]


def test_shuffles_order_nothing():
    body = WARP_REVERSE + REVERSE
    message = run(body.format(barrier="shfl.sync.idx.b32 %w, %t, 0, 31, 0xffffffff;"), output())
    assert kinds(message) == ["data race in shared memory"]


LOOP = """
mov.u32 %c, 0;
mov.u32 %v, %t;
LOOP:
st.shared.b32 [%a], %v;
bar.sync 0;
ld.shared.b32 %w, [%b];
{second}
add.u32 %v, %v, %w;
add.u32 %c, %c, 1;
setp.lt.u32 %k, %c, 4;
@%k bra LOOP;
"""


def test_write_after_read_in_a_loop():
    assert run(LOOP.format(second="bar.sync 0;")) == ""
    message = run(LOOP.format(second=""))
    assert kinds(message) == ["data race in shared memory"]
    assert "writes byte" in message
    assert "which read it" in message


def test_named_barriers_order_only_those_who_meet():
    """The first two warps and the last two have a barrier each."""
    body = """
    shr.u32 %c, %t, 6;
    add.u32 %c, %c, 1;
    xor.b32 %b, %t, {step};
    shl.b32 %b, %b, 2;
    add.u32 %b, %b, %s;
    """
    barrier = "bar.sync %c, 64;"
    assert run((body + REVERSE).format(step=63, barrier=barrier), output(2), grid=2) == ""
    message = run((body + REVERSE).format(step=127, barrier=barrier), output(2), grid=2)
    assert kinds(message) == ["data race in shared memory"]


SPLIT = """
setp.lt.u32 %k, %t, 64;
@%k bra PRODUCE;
{consume}
sub.u32 %b, %t, 64;
shl.b32 %b, %b, 2;
add.u32 %b, %b, %s;
ld.shared.b32 %v, [%b];
add.s64 %p, %array0, %offset4;
st.global.b32 [%p], %v;
bra.uni DONE;
PRODUCE:
st.shared.b32 [%a], %t;
bar.arrive 1, 128;
DONE:
"""


def test_split_barrier():
    y = output()
    assert run(SPLIT.format(consume="bar.sync 1, 128;"), y) == ""
    np.testing.assert_array_equal(y[64:], np.arange(64))


def test_split_barrier_at_which_the_consumer_does_not_wait():
    message = run(SPLIT.format(consume="bar.arrive 1, 128;"), output())
    assert "data race in shared memory" in kinds(message)


def test_threads_that_end_are_ordered_by_barriers_of_the_rest():
    body = """
    st.shared.b32 [%a], %t;
    setp.ge.u32 %k, %t, 64;
    @%k exit;
    {barrier}
    ld.shared.b32 %v, [%b];
    """
    assert run(body.format(barrier="bar.sync 0;")) == ""
    assert kinds(run(body.format(barrier=""))) == ["data race in shared memory"]


def test_one_instruction_writes_different_values_to_one_place():
    message = run("st.shared.b32 [%s], %t;")
    assert kinds(message) == ["data race in shared memory"]
    assert "(value 0x" in message
    assert run("st.shared.b32 [%s], 5;") == ""


def test_two_warps_write_the_same_value():
    body = """
    setp.eq.u32 %k, %warp, 0;
    @%k bra FIRST;
    st.shared.b32 [%s], {second};
    bra.uni DONE;
    FIRST:
    st.shared.b32 [%s], 5;
    DONE:
    """
    assert run(body.format(second=5)) == ""
    assert kinds(run(body.format(second=6))) == ["data race in shared memory"]


def test_parts_of_vectors():
    """Accesses of 4 bytes meet vectors of 16 bytes."""
    body = """
    shl.b32 %c, %t, 4;
    add.u32 %c, %c, %s;
    st.shared.v4.b32 [%c], {{%t, %t, %t, %t}};
    bar.sync 0;
    setp.lt.u32 %k, %t, 127;
    @%k st.shared.b32 [%c+{offset}], %t;
    @%k ld.shared.v4.b32 {{%v, %w, %c, %d}}, [%c];
    """
    assert run(body.format(offset=12), shared=2048) == ""
    message = run(body.format(offset=20), shared=2048)
    assert kinds(message) == ["data race in shared memory"]
    assert "reads byte 20 of" in message


def test_bytes_next_to_each_other_do_not_race():
    body = """
    add.u32 %c, %s, %t;
    cvt.u16.u32 %h, %t;
    st.shared.b8 [%c], %h;
    bar.warp.sync 0xffffffff;
    ld.shared.b8 %h, [%c];
    """
    assert run(body) == ""


REDUCTION = """
st.shared.b32 [%a], %t;
mov.u32 %c, 64;
STEP:
bar.sync 0;
setp.ge.u32 %k, %t, %c;
@%k bra NEXT;
shl.b32 %d, %c, 2;
add.u32 %d, %a, %d;
ld.shared.b32 %v, [%a];
ld.shared.b32 %w, [%d];
add.u32 %v, %v, %w;
st.shared.b32 [%a], %v;
NEXT:
{second}
shr.u32 %c, %c, 1;
setp.ne.u32 %k, %c, {last};
@%k bra STEP;
bar.sync 0;
ld.shared.b32 %v, [%s];
add.s64 %p, %array0, %offset4;
st.global.b32 [%p], %v;
"""


def test_tree_reduction():
    y = output(2)
    assert run(REDUCTION.format(second="", last=0), y, grid=2) == ""
    assert (y == 127 * 64).all()
    without = REDUCTION.format(second="", last=0).replace(
        "STEP:\nbar.sync 0;", "bar.sync 0;\nSTEP:"
    )
    assert kinds(run(without, output(2), grid=2)) == ["data race in shared memory"]


# Atomic operations and fences ---------------------------------------------------------------------


def test_atomics_do_not_race_with_atomics():
    body = """
    st.shared.b32 [%a], 0;
    bar.sync 0;
    red.shared.add.u32 [%s], 1;
    {barrier}
    ld.shared.b32 %v, [%s];
    """
    assert run(body.format(barrier="bar.sync 0;")) == ""
    message = run(body.format(barrier=""))
    assert kinds(message) == ["data race in shared memory"]
    assert "which changed it" in message


def test_initialization_without_a_barrier_before_atomics():
    body = """
    setp.eq.u32 %k, %t, 0;
    @%k st.shared.b32 [%s], 0;
    {barrier}
    atom.shared.add.u32 %v, [%s], 1;
    """
    assert run(body.format(barrier="bar.sync 0;")) == ""
    message = run(body.format(barrier=""))
    assert kinds(message) == ["data race in shared memory"]
    assert "changes byte 0" in message


FLAG = """
setp.eq.u32 %k, %t, 0;
@%k st.shared.b32 [%s], 0;
bar.sync 0;
setp.ne.u32 %k, %t, {reader};
@%k bra WRITER;
WAIT:
{load}
setp.eq.u32 %l, %v, 0;
@%l bra WAIT;
{after}
ld.shared.b32 %w, [%s+64];
bra.uni DONE;
WRITER:
setp.ne.u32 %k, %t, 0;
@%k bra DONE;
st.shared.b32 [%s+64], 7;
{before}
{store}
DONE:
"""
ACQUIRE = "ld.acquire.cta.shared.b32 %v, [%s];"
RELEASE = "st.release.cta.shared.b32 [%s], 1;"
RELAXED_LOAD = "ld.relaxed.cta.shared.b32 %v, [%s];"
RELAXED_STORE = "st.relaxed.cta.shared.b32 [%s], 1;"
FENCE = "fence.acq_rel.cta;"


@pytest.mark.parametrize(
    ("load", "after", "before", "store", "clean"),
    [
        (ACQUIRE, "", "", RELEASE, True),
        (RELAXED_LOAD, "", "", RELEASE, False),
        (ACQUIRE, "", "", RELAXED_STORE, False),
        (RELAXED_LOAD, FENCE, FENCE, RELAXED_STORE, True),
        (RELAXED_LOAD, FENCE, "", RELAXED_STORE, False),
        (RELAXED_LOAD, "", FENCE, RELAXED_STORE, False),
        (RELAXED_LOAD, FENCE, "", RELEASE, True),
        (ACQUIRE, "", FENCE, RELAXED_STORE, True),
    ],
)
@pytest.mark.parametrize("reader", [33, 5])
def test_flag_in_shared_memory(load, after, before, store, clean, reader):
    body = FLAG.format(load=load, after=after, before=before, store=store, reader=reader)
    message = run(body, grid=2)
    assert kinds(message) == ([] if clean else ["data race in shared memory"])


def test_flag_that_is_written_like_data():
    body = FLAG.format(load=ACQUIRE, after="", before="", store="st.shared.b32 [%s], 1;", reader=33)
    assert set(kinds(run(body))) == {"data race in shared memory"}


# Races in global memory ---------------------------------------------------------------------------


def test_blocks_write_to_one_place():
    body = "mov.u32 %c, %ctaid.x;\nst.global.b32 [%array0], {value};"
    message = run(body.format(value="%c"), output(), grid=4)
    assert kinds(message) == ["data race in global memory between blocks"]
    assert "byte 0 of array 0 (512 bytes) (value 0x" in message
    assert run(body.format(value=3), output(), grid=4) == ""


def test_block_reads_what_another_wrote():
    body = """
    mov.u32 %c, %ctaid.x;
    setp.ne.u32 %k, %c, 0;
    @%k bra READ;
    st.global.b32 [%array0], 1;
    bra.uni DONE;
    READ:
    ld.global.b32 %v, [%array0];
    DONE:
    """
    message = run(body, output(), grid=2)
    assert kinds(message) == ["data race in global memory between blocks"]


def test_threads_of_a_block_in_global_memory():
    body = """
    add.s64 %p, %array0, %offset4;
    st.global.b32 [%p], %t;
    {barrier}
    ld.global.b32 %v, [%array0+4];
    """
    assert run(body.format(barrier="bar.sync 0;"), output()) == ""
    assert kinds(run(body.format(barrier=""), output())) == ["data race in global memory"]


SEMAPHORE = """
mov.u32 %c, %ctaid.x;
setp.ne.u32 %l, %t, 0;
@%l bra MEET;
SPIN:
{load}
setp.ne.u32 %k, %v, %c;
@%k bra SPIN;
{acquire}
MEET:
bar.sync 0;
add.s64 %p, %array0, {place};
ld.global.b32 %w, [%p];
add.u32 %w, %w, 1;
st.global.b32 [%p], %w;
bar.sync 0;
@%l bra DONE;
{release}
{store}
DONE:
"""
GLOBAL_ACQUIRE = "ld.acquire.gpu.global.b32 %v, [%array1];"
GLOBAL_RELEASE = "red.release.gpu.global.add.u32 [%array1], 1;"
GLOBAL_LOAD = "ld.relaxed.gpu.global.b32 %v, [%array1];"
GLOBAL_RED = "red.relaxed.gpu.global.add.u32 [%array1], 1;"


def semaphore(load: str, store: str, acquire: str = "", release: str = "", blocks: int = 5) -> str:
    body = "mul.wide.u32 %wide, %t, 4;\n" + SEMAPHORE.format(
        load=load, acquire=acquire, release=release, store=store, place="%wide"
    )
    y, flag = output(), np.zeros(1, np.uint32)
    message = run(body, y, flag, grid=blocks)
    assert (y == blocks).all()
    return message


def test_blocks_in_turn():
    assert semaphore(GLOBAL_ACQUIRE, GLOBAL_RELEASE) == ""
    assert semaphore(GLOBAL_ACQUIRE, GLOBAL_RELEASE, blocks=130) == ""


def test_blocks_in_turn_with_fences():
    fence = "fence.acq_rel.gpu;"
    assert semaphore(GLOBAL_LOAD, GLOBAL_RED, fence, fence) == ""
    assert semaphore(GLOBAL_LOAD, GLOBAL_RED, "membar.gl;", "membar.gl;") == ""


@pytest.mark.parametrize(
    ("load", "store"),
    [
        (GLOBAL_LOAD, GLOBAL_RELEASE),
        (GLOBAL_ACQUIRE, GLOBAL_RED),
        (GLOBAL_ACQUIRE.replace(".gpu", ".cta"), GLOBAL_RELEASE),
        (GLOBAL_ACQUIRE, GLOBAL_RELEASE.replace(".gpu", ".cta")),
    ],
)
def test_blocks_in_turn_without_order(load, store):
    found = kinds(semaphore(load, store))
    assert found
    assert set(found) == {"data race in global memory between blocks"}


def test_barrier_of_the_grid():
    """All blocks wait for all: each then reads what its neighbour wrote."""
    body = """
    mov.u32 %c, %ctaid.x;
    mov.u32 %d, %nctaid.x;
    add.s64 %p, %array0, %offset4;
    st.global.b32 [%p], %thread;
    bar.sync 0;
    setp.ne.u32 %l, %t, 0;
    @%l bra MEET;
    red.release.gpu.global.add.u32 [%array1], 1;
    SPIN:
    ld.acquire.gpu.global.b32 %v, [%array1];
    setp.ne.u32 %k, %v, %d;
    @%k bra SPIN;
    MEET:
    {barrier}
    add.u32 %w, %thread, 128;
    mul.lo.u32 %d, %d, 128;
    rem.u32 %w, %w, %d;
    mul.wide.u32 %q, %w, 4;
    add.s64 %q, %array0, %q;
    ld.global.b32 %v, [%q];
    """
    flag = np.zeros(1, np.uint32)
    assert run(body.format(barrier="bar.sync 0;"), output(8), flag, grid=8) == ""
    flag = np.zeros(1, np.uint32)
    message = run(body.format(barrier=""), output(8), flag, grid=8)
    assert kinds(message) == ["data race in global memory between blocks"]


def test_semaphore_between_waves():
    """The chain of blocks is longer than what runs at once."""
    body = "mul.wide.u32 %wide, %t, 4;\n" + SEMAPHORE.format(
        load=GLOBAL_ACQUIRE, acquire="", release="", store=GLOBAL_RELEASE, place="%wide"
    )
    y, flag = output(8), np.zeros(1, np.uint32)
    assert run(body, y, flag, grid=40, block=1024) == ""
    assert (y == 40).all()


# Initialization -----------------------------------------------------------------------------------


def test_uninitialized_shared_memory():
    message = run("ld.shared.b32 %v, [%a];", grid=2)
    assert kinds(message) == ["read of uninitialized shared memory"]
    assert "thread 0 of block (0, 0, 0) (and 255 more threads) reads byte 0" in message


def test_uninitialized_bytes():
    """One byte of each word was written."""
    body = """
    cvt.u16.u32 %h, %t;
    st.shared.b8 [%a+1], %h;
    ld.shared.{kind} {register}, [%a{offset}];
    """
    assert run(body.format(kind="b8", register="%h", offset="+1")) == ""
    message = run(body.format(kind="b32", register="%v", offset=""))
    assert kinds(message) == ["read of uninitialized shared memory"]
    message = run(body.format(kind="b8", register="%h", offset="+2"))
    assert "reads byte 2 of" in message


def test_uninitialized_local_memory():
    body = """
    .local .align 16 .b8 stack[32];
    .reg .b64 %local;
    mov.u64 %local, stack;
    st.local.b32 [%local+4], %t;
    ld.local.{kind} {register}, [%local+{offset}];
    """
    assert run(body.format(kind="b32", register="%v", offset=4)) == ""
    message = run(body.format(kind="b64", register="%q", offset=0))
    assert kinds(message) == ["read of uninitialized local memory"]
    loaded = body.format(kind="v4.b32", register="{%v, %w, %c, %d}", offset=0)
    assert run(loaded) == ""
    message = run(loaded + "setp.eq.u32 %k, %d, 1;\n@%k trap;")
    assert kinds(message) == ["read of uninitialized local memory"]


def test_register_without_a_value():
    body = """
    setp.lt.u32 %k, %t, 40;
    @%k mov.u32 %v, 1;
    add.u32 %w, %v, 1;
    setp.eq.u32 %k, %w, 7;
    @%k trap;
    """
    message = run(body, grid=2)
    assert kinds(message) == ["read of a register without a value"]
    assert "thread 40 of block (0, 0, 0) (and 175 more threads) reads %v" in message
    assert run(body.replace("@%k mov", "mov")) == ""


# Bounds -------------------------------------------------------------------------------------------

ALLOCATIONS = (
    Allocation("smem", "tile: float32[32]", 128, 0, SourceLocation("kernel.py", 3)),
    Allocation("smem", "sums: float32[16]", 64, 256, SourceLocation("kernel.py", 4)),
    Allocation("barrier", "barriers", 8, 320),
)


def test_gap_between_allocations():
    body = "setp.lt.u32 %k, %t, {threads};\n@%k st.shared.b32 [%a], %t;"
    assert run(body.format(threads=32), allocations=ALLOCATIONS) == ""
    message = run(body.format(threads=33), allocations=ALLOCATIONS)
    assert kinds(message) == ["access of shared memory out of bounds"]
    assert (
        "thread 32 of block (0, 0, 0) writes 4 bytes at 0 bytes behind the end of 'tile:"
        " float32[32]' (128 bytes, from kernel.py:3)" in message
    )


def test_access_across_the_end_of_an_allocation():
    body = "setp.eq.u32 %k, %t, 0;\n@%k st.shared.v4.b32 [%s+{offset}], {{%t, %t, %t, %t}};"
    assert run(body.format(offset=304), allocations=ALLOCATIONS) == ""
    message = run(body.format(offset=320), allocations=ALLOCATIONS)
    assert kinds(message) == ["access of shared memory out of bounds"]
    assert "writes 16 bytes at byte 0 of 'barriers' (8 bytes)" in message
    assert "goes on behind its end" in message


def test_static_variables():
    variables = ".shared .align 16 .b8 first[20];\n.shared .align 16 .b8 second[16];\n"
    body = """
    .reg .b32 %v;
    .reg .pred %k;
    mov.u32 %v, %tid.x;
    setp.eq.u32 %k, %v, 0;
    @%k st.shared.b32 [first+{offset}], %v;
    """
    assert sanitize(body.format(offset=16), variables=variables) == ""
    message = sanitize(body.format(offset=20), variables=variables)
    assert "0 bytes behind the end of 'first' (20 bytes)" in message


def test_behind_the_end_of_all_is_an_error_at_once():
    with pytest.raises(SimulationError, match="out of bounds"):
        run("st.shared.b32 [%a+1024], %t;")


# The list of findings -----------------------------------------------------------------------------


def test_groups_of_checks():
    body = REVERSE.format(barrier="") + "ld.shared.b32 %v, [%s+600];"
    assert len(kinds(run(body, output()))) == 2
    assert kinds(run(body, output(), groups=("races",))) == ["data race in shared memory"]
    found = kinds(run(body, output(), groups=("initialized",)))
    assert found == ["read of uninitialized shared memory"]
    assert run(body, output(), groups=()) == ""


def test_names_of_groups():
    everything = frozenset(GROUPS)
    assert parse_groups(True) == parse_groups("all") == parse_groups("on") == everything
    assert parse_groups(False) == parse_groups("none") == parse_groups("0") == frozenset()
    assert parse_groups("races, async") == parse_groups(["races", "async"]) == {"races", "async"}
    assert parse_groups("first") == everything | {"first"}
    assert parse_groups("first,races") == {"first", "races"}
    with pytest.raises(ConfigError, match="there is no such group of checks"):
        parse_groups("race")


def test_first_error_may_end_the_launch():
    state = LaunchState(parse_groups("first"))
    ptx = module(".reg .b32 %v;\nld.shared.b32 %v, [x];", variables=".shared .b32 x[2];\n")
    with pytest.raises(SanitizerError, match="found 1 error"):
        run_ptx(ptx, sanitizer=state)


def test_errors_that_end_the_launch_tell_what_was_found_before():
    body = "ld.shared.b32 %v, [%a];\nbar.sync 1, 64;\ntrap;"
    with pytest.raises(SimulationError) as caught:
        run(body)
    assert "before that, the sanitizer found:" in str(caught.value)
    assert "read of uninitialized shared memory" in str(caught.value)


def test_user_lines():
    ptx = module(
        """
        .reg .b32 %v;
        .loc 1 7 3
        ld.shared.b32 %v, [x];
        """,
        variables='.shared .b32 x[2];\n.file 1 "model.py"\n',
    )
    message = sanitize_ptx(ptx, block=32)
    assert message.startswith("model.py:7: the sanitizer found 1 error in kernel 'kernel'")
    assert "at model.py:7, in: ld.shared.b32 %v, [x]" in message


def test_there_is_a_limit_to_the_list():
    body = "\n".join(f"ld.shared.b32 %v, [%a+{4 * n}];" for n in range(30))
    message = run(body)
    assert len(kinds(message)) == 20
    assert message.rstrip().endswith("and 10 more")
    assert "found 30 errors" in message
