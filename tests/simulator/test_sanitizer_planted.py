"""Planted errors of synchronization, each with its correct twin: PTX and what is found in it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sanitizer_support import kinds, sanitize

REGISTERS = """
.reg .b32 %t, %v, %w, %a, %b, %far, %rank, %peer, %i;
.reg .b64 %p, %q, %flag;
.reg .pred %first, %half, %done, %other;
mov.u32 %t, %tid.x;
setp.eq.u32 %first, %t, 0;
mov.u32 %a, dynamic;
mov.u32 %rank, %ctaid.x;
add.s64 %p, %array0, %offset4;
add.s64 %flag, %array0, 2048;
"""

INIT = """
@%first mbarrier.init.shared::cta.b64 [dynamic], {count};
@%first fence.mbarrier_init.release.cluster;
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [dynamic], 0;
@!%done bra WAIT;
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [dynamic];\n"
LOAD = """
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [dynamic], 256;
setp.eq.u32 %other, %t, 32;
{meet}
@%other cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [dynamic+1024], [%array0], 256, [dynamic];
"""
REMOTE = """
xor.b32 %peer, %rank, 1;
mapa.shared::cluster.u32 %far, %a, %peer;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far];
"""
MEET = "bar.sync 0;\n"
RELAXED = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
CLUSTER = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"

# Block 0 hands a number to block 1, whose first thread waits for a flag.
PASS = """
setp.eq.u32 %other, %rank, 1;
@%other bra READ;
@!%first bra END;
st.global.b32 [%array0], 7;
{before}
{store} [%flag], 1;
bra END;
READ:
@!%first bra END;
POLL:
{load} %v, [%flag];
setp.eq.u32 %done, %v, 1;
@!%done bra POLL;
{after}
ld.global.b32 %w, [%array0];
st.global.b32 [%array0+1024], %w;
END:
"""


def by_fences(scope):
    return PASS.format(
        before=f"fence.acq_rel.{scope};",
        store="st.relaxed.gpu.global.b32",
        load="ld.relaxed.gpu.global.b32",
        after=f"fence.acq_rel.{scope};",
    )


def by_order(scope):
    return PASS.format(
        before="",
        store=f"st.release.{scope}.global.b32",
        load=f"ld.acquire.{scope}.global.b32",
        after="",
    )


SHUFFLE = """
and.b32 %b, %t, 31;
setp.lt.u32 %half, %b, 16;
mov.u32 %v, %t;
@!%half bra JOIN;
shfl.sync.bfly.b32 %v, %v, 8, 31, {mask};
JOIN:
st.global.b32 [%p], %v;
"""

# Lanes that go around it access local memory last, of which no events are kept.
LOCAL = """
.local .align 4 .b32 own[1];
st.global.b32 [%p], %t;
and.b32 %b, %t, 31;
setp.lt.u32 %half, %b, 16;
@!%half bra JOIN;
shfl.sync.bfly.b32 %v, %t, 8, 31, {mask};
JOIN:
st.local.b32 [own], %t;
"""

# The threads of the first two warps swap numbers, with the barrier inside or behind the branch.
SWAP = """
.shared .align 4 .b32 cells[64];
mov.u32 %b, cells;
mad.lo.u32 %b, %t, 4, %b;
st.shared.u32 [%b], %t;
setp.lt.u32 %half, %t, 48;
@!%half bra JOIN;
{inside}
JOIN:
{behind}
ld.shared.u32 %v, [%b];
st.global.b32 [%p], %v;
"""

TWO_ARRAYS = """
.shared .align 16 .b32 one[32];
.shared .align 16 .b32 other[32];
mov.u32 %b, one;
mad.lo.u32 %b, %t, 4, %b;
st.shared.u32 [%b+{offset}], %t;
ld.shared.u32 %v, [%b+{offset}];
st.global.b32 [%p], %v;
"""

# The first of the three arrays is none of the two.
CHOSEN = """
.shared .align 16 .b32 one[32];
.shared .align 16 .b32 other[32];
.shared .align 16 .b32 third[32];
setp.lt.u32 %half, %t, 16;
mov.u32 %v, other;
mov.u32 %w, third;
selp.b32 %b, %v, %w, %half;
cvt.u64.u32 %q, %b;
mad.wide.u32 %q, %t, 4, %q;
cvt.u32.u64 %b, %q;
st.shared.u32 [%b+{offset}], %t;
ld.shared.u32 %v, [%b+{offset}];
st.global.b32 [%p], %v;
"""

REUSED = """
@%first mbarrier.init.shared::cta.b64 [dynamic], 64;
bar.sync 0;
mbarrier.arrive.shared::cta.b64 _, [dynamic];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [dynamic], 0;
@!%done bra WAIT;
bar.sync 0;
{inval}
bar.sync 0;
mad.lo.u32 %b, %t, 4, %a;
st.shared.u32 [%b], %t;
ld.shared.u32 %v, [%b];
st.global.b32 [%p], %v;
"""

CONSTANT = "st.global.b32 [%p], %t;\nld.global{nc}.b32 %v, [%p];\nst.global.b32 [%p+1024], %v;\n"

COUNTER = "@%first atom.relaxed.{scope}.global.add.u32 %v, [%flag], 1;\n"

GUESS = """
{load} %v, [%flag];
AGAIN:
mov.u32 %w, %v;
add.u32 %b, %w, 1;
atom.relaxed.gpu.global.cas.b32 %v, [%flag], %w, %b;
setp.ne.u32 %done, %v, %w;
@%done bra AGAIN;
{store}
"""

UNORDERED = "data race in shared memory"
ACROSS = "data race in global memory between blocks"


@dataclasses.dataclass(frozen=True)
class Plant:
    """A kernel with an error, the same without it, and the kinds of what is found."""

    wrong: str
    right: str
    found: set[str]
    options: dict[str, int] = dataclasses.field(default_factory=dict)


PLANTS = {
    "arrivals at an mbarrier that may not be ready": Plant(
        INIT.format(count=64) + ARRIVE + MEET,
        INIT.format(count=64) + MEET + ARRIVE,
        {UNORDERED},
    ),
    "a wait at an mbarrier that may not be ready": Plant(
        INIT.format(count=1) + "@%first " + ARRIVE + WAIT,
        INIT.format(count=1) + "@%first " + ARRIVE + MEET + WAIT,
        {UNORDERED},
    ),
    "a copy that completes on an mbarrier that may not be ready": Plant(
        INIT.format(count=1) + LOAD.format(meet="") + MEET + WAIT,
        INIT.format(count=1) + LOAD.format(meet=MEET) + WAIT,
        {"data race with an asynchronous operation in shared memory", UNORDERED},
    ),
    "another block's mbarrier without a barrier of the cluster": Plant(
        INIT.format(count=64) + REMOTE + MEET + WAIT + CLUSTER,
        INIT.format(count=64) + RELAXED + REMOTE + MEET + WAIT + CLUSTER,
        {UNORDERED},
        {"grid": 2, "cluster": 2},
    ),
    "a relaxed barrier of the cluster without a fence": Plant(
        INIT.format(count=64).replace("@%first fence.mbarrier_init.release.cluster;", "")
        + RELAXED
        + REMOTE
        + MEET
        + WAIT
        + CLUSTER,
        INIT.format(count=64) + RELAXED + REMOTE + MEET + WAIT + CLUSTER,
        {UNORDERED},
        {"grid": 2, "cluster": 2},
    ),
    "fences of the scope of a block": Plant(
        by_fences("cta"), by_fences("gpu"), {ACROSS}, {"grid": 2}
    ),
    "fences of the scope of a cluster": Plant(
        by_fences("cluster"), by_fences("sys"), {ACROSS}, {"grid": 2}
    ),
    "release and acquire of the scope of a block": Plant(
        by_order("cta"), by_order("gpu"), {ACROSS}, {"grid": 2}
    ),
    "release and acquire of the scope of a block in a cluster": Plant(
        by_order("cta"),
        by_order("cluster"),
        {"data race in global memory"},
        {"grid": 2, "cluster": 2},
    ),
    "a counter of the scope of a block": Plant(
        COUNTER.format(scope="cta"), COUNTER.format(scope="gpu"), {ACROSS}, {"grid": 3}
    ),
    "a constant load of what the kernel writes": Plant(
        CONSTANT.format(nc=".nc"),
        CONSTANT.format(nc=""),
        {"ld.global.nc of memory that the kernel writes"},
    ),
    "an index beyond a static array": Plant(
        TWO_ARRAYS.format(offset=4),
        TWO_ARRAYS.format(offset=0),
        {"access of shared memory out of bounds"},
        {"block": 32},
    ),
    "an index far beyond a static array": Plant(
        TWO_ARRAYS.format(offset=176),
        TWO_ARRAYS.format(offset=0),
        {"access of shared memory out of bounds"},
        {"block": 16},
    ),
    "an index before a static array, by a choice of two pointers": Plant(
        CHOSEN.format(offset=-160),
        CHOSEN.format(offset=0),
        {"access of shared memory out of bounds"},
        {"block": 32},
    ),
    "a shuffle of all lanes in a divergent branch": Plant(
        SHUFFLE.format(mask="0xffffffff"),
        SHUFFLE.format(mask="0x0000ffff"),
        {"shfl in a divergent branch"},
    ),
    "a shuffle around which lanes go to local memory": Plant(
        LOCAL.format(mask="0xffffffff"),
        LOCAL.format(mask="0x0000ffff"),
        {"shfl in a divergent branch"},
    ),
    "a barrier in a divergent branch": Plant(
        SWAP.format(inside=MEET, behind=""),
        SWAP.format(inside="", behind=MEET),
        {"bar in a divergent branch"},
    ),
    "memory of an mbarrier that was not invalidated": Plant(
        REUSED.format(inval=""),
        REUSED.format(inval="@%first mbarrier.inval.shared::cta.b64 [dynamic];"),
        {"memory of an mbarrier used for something else"},
    ),
    "a plain store beside compare-and-swap": Plant(
        GUESS.format(load="ld.global.b32", store="st.global.b32 [%flag], %b;"),
        GUESS.format(load="ld.global.b32", store=""),
        {ACROSS, "data race in global memory"},
        {"grid": 2},
    ),
}


def run(body: str, **options: int) -> str:
    x = np.zeros(1024, np.uint32)
    return sanitize(REGISTERS + body, x, **{"shared": 4096, "block": 64, **options})


@pytest.mark.parametrize("name", PLANTS)
def test_planted_error(name):
    plant = PLANTS[name]
    message = run(plant.wrong, **plant.options)
    assert message and set(kinds(message)) <= plant.found, message
    assert run(plant.right, **plant.options) == ""


# Right programs that look like wrong ones ---------------------------------------------------------


def test_threads_that_end_early_are_not_waited_for():
    body = """
    setp.ge.u32 %half, %t, 40;
    @%half st.global.b32 [%p], %t;
    @%half bra END;
    bar.sync 0;
    and.b32 %b, %t, 32;
    shfl.sync.idx.b32 %v, %t, 3, 31, 0xffffffff;
    st.global.b32 [%p], %v;
    END:
    """
    assert run(body) == ""
