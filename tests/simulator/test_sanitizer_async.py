"""The sanitizer: mbarriers, bulk copies, cp.async, st.async and clusters, in PTX."""

from __future__ import annotations

import numpy as np
from sanitizer_support import kinds, sanitize

NOT_WAITED = "asynchronous operation not waited for, in shared memory"
FENCE = "missing fence.proxy.async in shared memory"
RACE = "data race in shared memory"
WITH_OPERATION = "data race with an asynchronous operation in shared memory"
OPEN = "thread ends before its asynchronous operation"
UNFINISHED = "kernel ends before its asynchronous operation"

# The first 1024 bytes of the dynamic shared memory hold mbarriers, buffers follow.
PROLOGUE = """
.reg .b32 %a, %b, %c, %d, %v, %w, %s, %t, %warp, %bar, %data, %i, %phase, %slot, %x;
.reg .b64 %p, %q, %state;
.reg .pred %k, %l, %done, %leader;
mov.u32 %t, %tid.x;
shr.u32 %warp, %t, 5;
setp.eq.u32 %leader, %t, 0;
mov.u32 %bar, dynamic;
add.u32 %data, %bar, 1024;
shl.b32 %a, %t, 2;
add.u32 %a, %a, %data;
sub.u32 %b, 127, %t;
shl.b32 %b, %b, 2;
add.u32 %b, %b, %data;
"""


def run(body: str, *arrays: np.ndarray, shared: int = 8192, **options) -> str:
    return sanitize(PROLOGUE + body, *arrays, shared=shared, **options)


def input_and_output(blocks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(128 * blocks, dtype=np.uint32) * 3 + 1
    return x, np.zeros(128 * blocks, np.uint32)


def replaced(body: str, *parts: str) -> str:
    """A kernel without some of its lines."""
    for part in parts:
        assert part in body
        body = body.replace(part, "")
    return body


WAIT = """
WAIT{name}:
mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity};
@!%done bra WAIT{name};
"""


def wait(barrier: str = "%bar", parity: object = 0, name: str = "") -> str:
    return WAIT.format(barrier=barrier, parity=parity, name=name)


STORE = """
add.s64 %q, %array1, %offset4;
st.global.b32 [%q], %v;
"""


# Bulk copies to shared memory ---------------------------------------------------------------------

INIT = "@%leader mbarrier.init.shared::cta.b64 [%bar], 1;\n"
FENCE_INIT = "@%leader fence.mbarrier_init.release.cluster;\n"
MEET = "bar.sync 0;\n"
EXPECT = "@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;\n"
LOAD = """
mul.wide.u32 %p, %x, 512;
add.s64 %p, %array0, %p;
@%leader cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%data], [%p], 512, [%bar];
"""
READ = "ld.shared.b32 %v, [%b];\n"
LOADED = (
    "mov.u32 %x, %ctaid.x;\n" + INIT + FENCE_INIT + MEET + EXPECT + LOAD + wait() + READ + STORE
)


def test_bulk_load():
    x, y = input_and_output(3)
    assert run(LOADED, x, y, grid=3) == ""
    np.testing.assert_array_equal(y.reshape(3, -1), x.reshape(3, -1)[:, ::-1])


def test_bulk_load_is_not_waited_for():
    message = run(replaced(LOADED, wait()), *input_and_output(2), grid=2)
    assert kinds(message) == [NOT_WAITED, UNFINISHED]
    assert "nothing says that it is over: an asynchronous operation of block (0, 0, 0)" in message
    assert "in: cp.async.bulk.shared::cluster.global" in message
    assert "wait for the mbarrier that the copy completes on" in message


def test_only_the_leader_waits():
    only = wait().replace("mbarrier.try", "@%leader mbarrier.try").replace("@!%done", "@!%k")
    only = "setp.ne.u32 %k, %t, 0;\n@%k bra READ;\n" + wait() + "READ:\n{barrier}"
    body = LOADED.replace(wait(), only)
    assert run(body.format(barrier="bar.sync 0;"), *input_and_output()) == ""
    message = run(body.format(barrier=""), *input_and_output())
    assert kinds(message) == [NOT_WAITED]


def test_mbarrier_is_used_before_it_is_ready():
    """All threads wait; the leader makes the mbarrier without a barrier of the block."""
    message = run(replaced(LOADED, FENCE_INIT, MEET), *input_and_output())
    assert RACE in kinds(message)
    assert "uses byte 0 of" in message
    assert "which initialized it" in message
    assert "mbarrier.init" in message
    message = run(replaced(LOADED, FENCE_INIT), *input_and_output())
    assert kinds(message) == ["missing fence after mbarrier.init"]
    assert "fence.mbarrier_init.release.cluster (or fence.proxy.async) by the thread" in message
    with_proxy_fence = LOADED.replace("fence.mbarrier_init.release.cluster", "fence.proxy.async")
    assert run(with_proxy_fence, *input_and_output()) == ""


RING = """
mov.u32 %x, %ctaid.x;
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader mbarrier.init.shared::cta.b64 [%bar+8], 1;
@%leader mbarrier.init.shared::cta.b64 [%bar+16], {consumers};
@%leader mbarrier.init.shared::cta.b64 [%bar+24], {consumers};
@%leader fence.mbarrier_init.release.cluster;
bar.sync 0;
mov.u32 %i, 0;
setp.ge.u32 %k, %t, 96;
@%k bra PRODUCER;

CONSUME:
and.b32 %slot, %i, 1;
shr.u32 %phase, %i, 1;
and.b32 %phase, %phase, 1;
shl.b32 %c, %slot, 3;
add.u32 %c, %c, %bar;
{wait_full}
shl.b32 %d, %slot, 9;
add.u32 %d, %a, %d;
ld.shared.b32 %w, [%d];
add.u32 %v, %v, %w;
{release}
add.u32 %i, %i, 1;
setp.lt.u32 %k, %i, 8;
@%k bra CONSUME;
bra.uni END;

PRODUCER:
setp.ne.u32 %k, %t, 96;
@%k bra END;
PRODUCE:
and.b32 %slot, %i, 1;
shr.u32 %phase, %i, 1;
and.b32 %phase, %phase, 1;
xor.b32 %phase, %phase, 1;
shl.b32 %c, %slot, 3;
add.u32 %c, %c, %bar;
{wait_empty}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%c], 512;
shl.b32 %d, %slot, 9;
add.u32 %d, %data, %d;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d], [%array0], 512, [%c];
add.u32 %i, %i, 1;
setp.lt.u32 %k, %i, 8;
@%k bra PRODUCE;
END:
"""


def ring(
    consumers: object = 96,
    wait_full: str = wait("%c", "%phase", "FULL"),
    release: str = "mbarrier.arrive.shared::cta.b64 _, [%c+16];",
    wait_empty: str = wait("%c+16", "%phase", "EMPTY"),
) -> str:
    body = RING.format(
        consumers=consumers, wait_full=wait_full, release=release, wait_empty=wait_empty
    )
    return run("mov.u32 %v, 0;\n" + body, *input_and_output(), grid=3)


def test_producer_and_consumers():
    assert ring() == ""


def test_one_lane_of_each_warp_releases_the_buffer():
    lane = """
    {sync}
    and.b32 %w, %t, 31;
    setp.eq.u32 %k, %w, 0;
    @%k mbarrier.arrive.shared::cta.b64 _, [%c+16];
    """
    sync = "bar.warp.sync 0xffffffff;"
    assert ring(3, release=lane.format(sync=sync)) == ""
    assert set(kinds(ring(3, release=lane.format(sync="")))) == {WITH_OPERATION}


def test_buffer_is_released_before_it_is_read():
    early = "mbarrier.arrive.shared::cta.b64 _, [%c+16];"
    found = kinds(ring(wait_full=wait("%c", "%phase", "FULL") + early, release=""))
    assert WITH_OPERATION in found


def test_relaxed_arrival_releases_nothing():
    release = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%c+16];"
    assert WITH_OPERATION in kinds(ring(release=release))
    assert ring(release="fence.acq_rel.cta;\n" + release) == ""


def test_bytes_completed_by_hand_behind_a_fence():
    """A thread that plays the copy engine: complete_tx is relaxed, so it takes a fence before."""
    body = f"""
    setp.eq.u32 %k, %t, 32;
    @%leader mbarrier.init.shared::cta.b64 [%bar], 1;
    bar.sync 0;
    @%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 4;
    @%k st.shared.b32 [%data], 7;
    @%k fence.acq_rel.cta;
    @%k mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 4;
    {wait()}
    ld.shared.b32 %w, [%data];
    """
    assert run(body, *input_and_output()) == ""
    assert kinds(run(replaced(body, "@%k fence.acq_rel.cta;"), *input_and_output())) == [RACE]


def test_relaxed_wait_acquires_nothing():
    relaxed = wait("%c", "%phase", "FULL").replace("parity.", "parity.relaxed.cta.")
    assert NOT_WAITED in kinds(ring(wait_full=relaxed))
    assert ring(wait_full=relaxed + "fence.acq_rel.cta;\n") == ""


def test_producer_does_not_wait():
    message = ring(wait_empty="")
    assert set(kinds(message)) >= {WITH_OPERATION}
    assert "which read it" in message


# Warps 1 and 2 read what warp 3 overwrites; between them there is only the copy of warp 0, which
# does not arrive itself.
CHAIN = (
    INIT
    + """
@%leader mbarrier.init.shared::cta.b64 [%bar+8], 64;
setp.eq.u32 %l, %warp, 3;
add.u32 %w, %data, 512;
mov.u32 %x, 0;
"""
    + FENCE_INIT
    + MEET
    + """
@%leader bra COPY;
@%l bra OVERWRITE;
setp.eq.u32 %k, %warp, 0;
@%k bra END;
ld.shared.b32 %v, [%w];
mbarrier.arrive.shared::cta.b64 _, [%bar+8];
bra.uni END;
COPY:
"""
    + wait("%bar+8", 0, "READ")
    + LOAD
    + "bra.uni END;\nOVERWRITE:\n"
    + wait(name="COPIED")
    + """
st.shared.b32 [%w], 7;
END:
"""
)
MADE = "st.shared.b32 [%w], 0;\n"
CHAIN = CHAIN.replace(MEET, "@%leader " + MADE + EXPECT + MEET)


def test_a_copy_comes_after_reads_that_were_waited_for():
    assert run(CHAIN, *input_and_output()) == ""
    early = replaced(CHAIN, wait("%bar+8", 0, "READ"))
    assert kinds(run(early, *input_and_output())) == [RACE]
    # Its own reads may still be going on when a thread begins a copy.
    own = CHAIN.replace(LOAD, "ld.shared.b32 %v, [%w];\n" + LOAD)
    assert kinds(run(own, *input_and_output())) == [RACE]


def test_a_copy_does_not_make_writes_visible():
    swapped = CHAIN.replace("ld.shared.b32 %v, [%w];", "st.shared.b32 [%w], 1;")
    swapped = swapped.replace("st.shared.b32 [%w], 7;", "ld.shared.b32 %v, [%w];")
    assert kinds(run(swapped, *input_and_output())) == [RACE]


# Bulk copies from shared memory -------------------------------------------------------------------

PUT = "st.shared.b32 [%a], %t;\n"
PROXY = "fence.proxy.async.shared::cta;\n"
BULK_STORE = """
@%leader cp.async.bulk.global.shared::cta.bulk_group [%array0], [%data], 512;
"""
COMMIT = "@%leader cp.async.bulk.commit_group;\n"
BULK_WAIT = "@%leader cp.async.bulk.wait_group.read 0;\n"
AGAIN = "add.u32 %v, %t, 1;\nst.shared.b32 [%a], %v;\n"
STORED = PUT + PROXY + MEET + BULK_STORE + COMMIT + BULK_WAIT + "bar.sync 1;\n" + AGAIN


def test_bulk_store():
    _, y = input_and_output()
    assert run(STORED, y) == ""
    np.testing.assert_array_equal(y, np.arange(128))


def test_bulk_store_without_a_proxy_fence():
    message = run(replaced(STORED, PROXY), input_and_output()[1])
    assert kinds(message) == [FENCE]
    assert "the asynchronous proxy does not see thread 0 of block (0, 0, 0), which wrote" in message
    assert "plgpu.commit_smem()" in message


def test_bulk_store_with_the_fence_behind_the_barrier():
    """Each thread fences what it knows of, so the leader may fence for all."""
    assert run(STORED.replace(PROXY + MEET, MEET + PROXY), input_and_output()[1]) == ""


def test_bulk_store_without_a_barrier():
    message = run(replaced(STORED, MEET), input_and_output()[1])
    assert kinds(message) == [WITH_OPERATION]
    assert "which wrote it" in message


def test_source_is_written_before_the_bulk_store_has_read_it():
    message = run(replaced(STORED, BULK_WAIT), input_and_output()[1])
    assert kinds(message) == [NOT_WAITED, OPEN]
    assert "writes byte 1024 of" in message
    assert "cp.async.bulk.wait_group" in message


def test_other_threads_do_not_wait_for_the_leader():
    message = run(replaced(STORED, "bar.sync 1;\n"), input_and_output()[1])
    assert kinds(message) == [NOT_WAITED]


def test_bulk_store_that_is_not_committed():
    message = run(replaced(STORED, COMMIT), input_and_output()[1])
    assert OPEN in kinds(message)


def test_bulk_store_of_memory_that_nobody_wrote():
    message = run(STORED.replace("[%data], 512", "[%data], 528"), np.zeros(256, np.uint32))
    assert kinds(message) == ["read of uninitialized shared memory"]
    assert "a bulk copy begun by thread 0 of block (0, 0, 0) reads byte 1536" in message


def test_bulk_stores_of_all_blocks_to_one_place():
    body = replaced(STORED, AGAIN)
    message = run(body, input_and_output()[1], grid=3)
    assert kinds(message) == ["asynchronous operation not waited for, in global memory"]
    reduction = body.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32",
    )
    _, y = input_and_output()
    assert run(reduction, y, grid=3) == ""
    np.testing.assert_array_equal(y, 3 * np.arange(128))


THROUGH_GLOBAL = """
mov.u32 %x, 0;
add.s64 %p, %array0, %offset4;
st.global.b32 [%p], %t;
{fence}
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader fence.mbarrier_init.release.cluster;
bar.sync 0;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
"""


def test_bulk_load_of_what_the_kernel_wrote():
    body = THROUGH_GLOBAL + LOAD + wait() + READ + STORE
    _, y = input_and_output()
    z = np.zeros_like(y)
    assert run(body.format(fence="fence.proxy.async.global;"), y, z) == ""
    np.testing.assert_array_equal(z, np.arange(127, -1, -1))
    for other in ("", "fence.proxy.async.shared::cta;"):
        message = run(body.format(fence=other), *input_and_output())
        assert kinds(message) == ["missing fence.proxy.async in global memory"]


def test_the_lane_that_copies_may_have_the_fence_for_global_memory():
    """It is none for shared memory, of which other lanes wrote what is stored."""
    start = "@%leader mbarrier.arrive.expect_tx"
    assert start in THROUGH_GLOBAL
    fenced = THROUGH_GLOBAL.replace(start, "@%leader fence.proxy.async.global;\n" + start)
    body = fenced.format(fence="") + LOAD + wait() + READ + STORE
    _, y = input_and_output()
    z = np.zeros_like(y)
    assert run(body, y, z) == ""
    np.testing.assert_array_equal(z, np.arange(127, -1, -1))
    only_shared = """
st.shared.b32 [%a], %t;
bar.sync 0;
@!%leader bra END;
fence.proxy.async.global;
cp.async.bulk.global.shared::cta.bulk_group [%array0], [%data], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
    assert kinds(run(only_shared, *input_and_output())) == [FENCE]


HAND_OVER = """
mov.u32 %x, %ctaid.x;
setp.ne.u32 %k, %x, 0;
@%k bra SECOND;
st.shared.b32 [%a], %t;
fence.proxy.async;
bar.sync 0;
@!%leader bra END;
cp.async.bulk.global.shared::cta.bulk_group [%array0], [%data], 512;
cp.async.bulk.commit_group;
{wait}
red.release.gpu.global.add.u32 [%array1], 1;
bra.uni END;
SECOND:
@!%leader bra MEET;
SPIN:
ld.acquire.gpu.global.b32 %v, [%array1];
setp.eq.u32 %k, %v, 0;
@%k bra SPIN;
MEET:
bar.sync 0;
add.s64 %p, %array0, %offset4;
ld.global.b32 %v, [%p+-512];
END:
"""


def test_block_reads_what_another_stored_by_bulk():
    """A bulk store has to be over, not only to have read its source, before it is announced."""
    flag = np.zeros(1, np.uint32)
    whole, reads = "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"
    _, y = input_and_output()
    assert run(HAND_OVER.format(wait=whole), y, flag, grid=2) == ""
    flag[:] = 0
    message = run(HAND_OVER.format(wait=reads), y, flag, grid=2)
    assert kinds(message) == ["asynchronous operation not waited for, in global memory"]
    assert "thread 0 of block (1, 0, 0) reads byte 0 of array 0" in message


# cp.async -----------------------------------------------------------------------------------------

COPY = """
add.s64 %p, %array0, %offset4;
cp.async.ca.shared.global [%a], [%p], 4;
"""
COPY_COMMIT = "cp.async.commit_group;\n"
COPY_WAIT = "cp.async.wait_group 0;\n"
COPIED = COPY + COPY_COMMIT + COPY_WAIT + MEET + READ + STORE


def test_cp_async():
    x, y = input_and_output(2)
    assert run(COPIED, x, y, grid=2) == ""
    np.testing.assert_array_equal(y.reshape(2, -1), x.reshape(2, -1)[:, ::-1])


def test_cp_async_without_a_wait():
    message = run(replaced(COPIED, COPY_WAIT), *input_and_output(2), grid=2)
    assert kinds(message) == [NOT_WAITED, OPEN]
    assert "a copy begun by thread 127 of block (0, 0, 0), which wrote it" in message
    assert "cp.async.wait_group" in message


def test_cp_async_without_a_barrier():
    message = run(replaced(COPIED, MEET), *input_and_output(2), grid=2)
    assert kinds(message) == [NOT_WAITED]


def test_cp_async_without_a_commit():
    message = run(replaced(COPIED, COPY_COMMIT), *input_and_output())
    assert kinds(message) == [NOT_WAITED, OPEN]
    waits_for_all = COPIED.replace(COPY_COMMIT, "").replace(COPY_WAIT, "cp.async.wait_all;\n")
    assert run(waits_for_all, *input_and_output()) == ""


PIPELINE = """
add.s64 %p, %array0, %offset4;
cp.async.ca.shared.global [%a], [%p], 4;
cp.async.commit_group;
mov.u32 %i, 0;
mov.u32 %v, 0;
STEP:
and.b32 %slot, %i, 1;
shl.b32 %slot, %slot, 9;
xor.b32 %c, %slot, 512;
add.u32 %c, %a, %c;
cp.async.ca.shared.global [%c], [%p], 4;
cp.async.commit_group;
cp.async.wait_group {left};
bar.sync 0;
add.u32 %d, %b, %slot;
ld.shared.b32 %w, [%d];
add.u32 %v, %v, %w;
{second}
add.u32 %i, %i, 1;
setp.lt.u32 %k, %i, 6;
@%k bra STEP;
cp.async.wait_all;
"""


def test_pipeline_of_cp_async():
    arrays = input_and_output()
    assert run(PIPELINE.format(left=1, second="bar.sync 1;"), *arrays) == ""
    assert set(kinds(run(PIPELINE.format(left=2, second="bar.sync 1;"), *arrays))) == {NOT_WAITED}
    assert set(kinds(run(PIPELINE.format(left=1, second=""), *arrays))) == {WITH_OPERATION}


def test_cp_async_with_an_mbarrier():
    body = """
    @%leader mbarrier.init.shared::cta.b64 [%bar], 128;
    bar.sync 0;
    add.s64 %p, %array0, %offset4;
    cp.async.ca.shared.global [%a], [%p], 4;
    {arrive}
    """
    body += wait() + READ + STORE
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar];"
    x, y = input_and_output()
    assert run(body.format(arrive=arrive), x, y) == ""
    np.testing.assert_array_equal(y, x[::-1])
    plain = "mbarrier.arrive.shared::cta.b64 _, [%bar];"
    assert kinds(run(body.format(arrive=plain), x, y)) == [NOT_WAITED, OPEN]


# Clusters -----------------------------------------------------------------------------------------

EXCHANGE = """
.reg .b32 %rank, %peer, %remote;
mov.u32 %rank, %cluster_ctarank;
xor.b32 %peer, %rank, 1;
st.shared.b32 [%a], %t;
{first}
mapa.shared::cluster.u32 %remote, %b, %peer;
ld.shared::cluster.b32 %v, [%remote];
{second}
add.s64 %q, %array0, %offset4;
st.global.b32 [%q], %v;
"""
CLUSTER_BARRIER = "barrier.cluster.arrive;\nbarrier.cluster.wait;"


def cluster(first: str = CLUSTER_BARRIER, second: str = CLUSTER_BARRIER) -> str:
    _, y = input_and_output(4)
    return run(EXCHANGE.format(first=first, second=second), y, grid=4, cluster=2)


def test_exchange_between_blocks_of_a_cluster():
    assert cluster() == ""
    assert kinds(cluster(first="bar.sync 0;")) == [RACE]
    relaxed = "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;"
    assert kinds(cluster(first=relaxed)) == [RACE]
    assert cluster(first="fence.acq_rel.cluster;\n" + relaxed) == ""


def test_block_ends_while_another_reads_its_memory():
    message = cluster(second="")
    assert kinds(message) == ["block ends while its shared memory is in use"]
    assert "read byte 1532 of" in message or "read byte 1024 of" in message
    assert "barrier.cluster.wait" in message
    relaxed = "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;"
    assert kinds(cluster(second=relaxed)) == ["block ends while its shared memory is in use"]
    one_way = "setp.eq.u32 %k, %rank, 0;\n@%k bra END;\n" + "END:\n"
    assert kinds(cluster(second=one_way)) == ["block ends while its shared memory is in use"]


MULTICAST = """
.reg .b32 %rank;
.reg .b16 %mask;
mov.u32 %rank, %cluster_ctarank;
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader fence.mbarrier_init.release.cluster;
{ready}
bar.sync 0;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
setp.eq.u32 %k, %rank, 0;
and.pred %k, %k, %leader;
mov.b16 %mask, 3;
@%k cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%data], [%array0], 512, [%bar], %mask;
{wait}
ld.shared.b32 %v, [%b];
add.s64 %q, %array1, %offset4;
st.global.b32 [%q], %v;
barrier.cluster.arrive;
barrier.cluster.wait;
"""


def test_multicast():
    ready = "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;"
    x, _ = input_and_output()
    _, y = input_and_output(4)
    assert run(MULTICAST.format(ready=ready, wait=wait()), x, y, grid=4, cluster=2) == ""
    np.testing.assert_array_equal(y.reshape(4, -1), np.tile(x[::-1], (4, 1)))
    only_first = "setp.eq.u32 %k, %rank, 1;\n@%k bra READ;\n" + wait() + "READ:\n"
    message = run(MULTICAST.format(ready=ready, wait=only_first), x, y, grid=4, cluster=2)
    assert kinds(message)[0] == NOT_WAITED
    assert "of block (1, 0, 0)" in message


STORE_ASYNC = """
.reg .b32 %rank, %peer, %remote, %remote_bar;
mov.u32 %rank, %cluster_ctarank;
xor.b32 %peer, %rank, 1;
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
barrier.cluster.arrive;
barrier.cluster.wait;
mapa.shared::cluster.u32 %remote, %a, %peer;
mapa.shared::cluster.u32 %remote_bar, %bar, %peer;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%remote], %thread, [%remote_bar];
{wait}
ld.shared.b32 %v, [%b];
add.s64 %q, %array0, %offset4;
st.global.b32 [%q], %v;
barrier.cluster.arrive;
barrier.cluster.wait;
"""


def test_asynchronous_stores_to_another_block():
    _, y = input_and_output(4)
    assert run(STORE_ASYNC.format(wait=wait()), y, grid=4, cluster=2) == ""
    expected = np.arange(512).reshape(2, 2, 128)[:, ::-1, ::-1].reshape(-1)
    np.testing.assert_array_equal(y, expected)
    found = kinds(run(STORE_ASYNC.format(wait=""), y, grid=4, cluster=2))
    assert found == [NOT_WAITED, "block ends while its shared memory is in use", UNFINISHED]


# Bounds -------------------------------------------------------------------------------------------


def test_bulk_copy_beyond_an_allocation():
    from pallasite.launch import Allocation

    pieces = (Allocation("barrier", "ready", 8, 0), Allocation("smem", "tile", 512, 1024))
    x, y = input_and_output()
    assert run(LOADED, x, y, allocations=pieces) == ""
    smaller = (pieces[0], Allocation("smem", "tile", 256, 1024))
    message = run(LOADED, x, y, allocations=smaller)
    assert kinds(message)[0] == "access of shared memory out of bounds"
    assert "writes 512 bytes at byte 0 of 'tile' (256 bytes)" in message
