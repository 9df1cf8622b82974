"""The sanitizer's view of asynchronous operations, told by hand: what may be left out, and what
then goes wrong. (Tests of real instructions are with the instructions.)"""

from __future__ import annotations

import numpy as np
import pytest
from sanitizer_support import Driver

from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.sanitizer import LaunchState

BASE = 1024


class Machine(Driver):
    """A driver with the verbs of asynchronous copies and products."""

    def begin(self, engine, lanes, *modifiers, proxy="async", together=1):
        name = {"tma": "cp", "cp.async": "cp"}.get(engine, engine)
        instruction = self.instruction(name, *modifiers)
        operation = AsyncOperation(engine, np.array(lanes), instruction, proxy, together)
        self.sanitizer.begin(operation)
        return operation

    def load(self, lane, offsets, size, key, block=0):
        """A bulk copy to shared memory."""
        operation = self.begin("tma", [lane], "async", "bulk")
        self.move(operation, "write", offsets, size, block=block)
        self.sanitizer.complete_on(operation, key)
        return operation

    def store(self, lane, offsets, size, target=()):
        """A bulk copy from shared memory, and to global memory."""
        operation = self.begin("tma", [lane], "async", "bulk", "bulk_group")
        self.move(operation, "read", offsets, size)
        if len(target):
            self.move(operation, "write", target, size, "global")
        return operation

    def move(self, operation, kind, offsets, size, space="shared", block=0, owners=None):
        base = self.global_offset
        if space == "shared":
            base = BASE + block * self.wave.memory.shared_stride
        places = base + np.array(offsets)
        owners = None if owners is None else np.array(owners)
        self.sanitizer.async_access(operation, kind, space, places, size, owners)

    def wait(self, operations, lanes, reads_only=False):
        self.sanitizer.complete_for(operations, np.array(lanes), reads_only)

    def barrier(self, lanes=range(32)):
        group = np.array(lanes)
        self.sanitizer.barrier(group, group)

    def acquire(self, lanes, key):
        self.sanitizer.acquire(np.array(lanes), key)

    def release(self, lanes, key):
        self.sanitizer.release(np.array(lanes), key)

    def fence(self, lanes):
        self.sanitizer.proxy_fence(np.array(lanes), "async.shared::cta")

    def end(self):
        lanes = np.arange(self.wave.lane_count)
        self.wave.exited[:] = True
        self.sanitizer.exit(lanes)
        self.sanitizer.finish()


NOT_WAITED = "asynchronous operation not waited for, in shared memory"
FENCE = "missing fence.proxy.async in shared memory"
RACE = "data race in shared memory"
WITH_OPERATION = "data race with an asynchronous operation in shared memory"


# Bulk copies to shared memory ---------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_load_is_read_after_its_mbarrier(waits):
    machine = Machine()
    machine.load(0, [0, 128], 64, "full")
    if waits:
        machine.acquire(range(32), "full")
    machine.access("read", [3], [128])
    machine.access("read", [3], [0])
    assert machine.found == ([] if waits else [NOT_WAITED] * 2)
    if not waits:
        (finding, _) = machine.findings
        assert "nothing says that it is over: an asynchronous operation of block" in str(finding)
        assert "plgpu.barrier_wait" in finding.hint


def test_some_lanes_waited():
    machine = Machine()
    machine.load(0, [0], 64, "full")
    machine.acquire([0, 1], "full")
    machine.access("read", [0, 1], [0, 4])
    assert machine.found == []
    machine.access("read", [2], [0])
    assert machine.found == [NOT_WAITED]


def test_lane_that_waited_passes_it_on_at_a_barrier():
    machine = Machine()
    machine.load(0, [0], 64, "full")
    machine.acquire([0], "full")
    machine.barrier()
    machine.access("read", [9], [8])
    assert machine.found == []


def test_the_other_of_two_barriers():
    machine = Machine()
    machine.load(0, [0], 64, "one")
    machine.load(0, [64], 64, "two")
    machine.acquire([5], "one")
    machine.access("read", [5], [0])
    assert machine.found == []
    machine.access("read", [5], [64])
    assert machine.found == [NOT_WAITED]


@pytest.mark.parametrize("empty", [True, False])
def test_ring_of_buffers(empty):
    """The producer may fill a buffer again when the consumers have read it."""
    machine = Machine()
    consumers = range(8, 16)
    for step in range(6):
        slot = step % 2
        if step >= 2 and empty:
            machine.acquire([0], ("mbarrier", 10 + slot, step // 2 - 1))
        machine.load(0, [64 * slot], 64, ("mbarrier", slot, step // 2))
        machine.acquire(consumers, ("mbarrier", slot, step // 2))
        machine.access("read", consumers, [64 * slot + 8 * n for n in range(8)])
        machine.release(consumers, ("mbarrier", 10 + slot, step // 2))
    # Without a wait, the new load also meets the old one.
    assert set(machine.found) == (set() if empty else {WITH_OPERATION, NOT_WAITED})


def test_one_of_two_consumers_is_forgotten():
    machine = Machine()
    machine.load(0, [0], 64, "full")
    for consumer in (1, 2):
        machine.acquire([consumer], "full")
        machine.access("read", [consumer], [0])
    machine.release([1], "empty")
    machine.acquire([0], "empty")
    machine.load(0, [0], 64, "full again")
    assert machine.found == [WITH_OPERATION]
    assert "thread 2 of block (0, 0, 0), which read it" in str(machine.findings[0])


def test_two_loads_to_one_place():
    machine = Machine()
    machine.load(0, [0], 64, "full")
    machine.load(0, [32], 64, "full")
    assert machine.found == [NOT_WAITED]


@pytest.mark.parametrize("fenced", [True, False])
def test_generic_write_before_a_load(fenced):
    machine = Machine()
    machine.access("write", [0], [0])
    if fenced:
        machine.fence([0])
    machine.load(0, [0], 64, "full")
    assert machine.found == ([] if fenced else [FENCE])


def test_generic_read_before_a_load_needs_no_fence():
    machine = Machine()
    machine.access("write", [0], [0])
    machine.fence([0])
    machine.barrier()
    machine.access("read", [7], [0])
    machine.release([7], "empty")
    machine.acquire([0], "empty")
    machine.load(0, [0], 64, "full")
    assert machine.found == []


def test_loaded_data_is_visible_to_other_copies_without_a_fence():
    machine = Machine()
    machine.load(0, [0], 64, "full")
    machine.acquire([4], "full")
    machine.store(4, [0], 64)
    assert machine.found == []


def test_load_into_another_block_of_the_cluster():
    machine = Machine(blocks=2, cluster=2)
    operation = machine.begin("tma", [0], "async", "bulk")
    for block in (0, 1):
        machine.move(operation, "write", [0], 64, block=block)
        machine.sanitizer.complete_on(operation, ("full", block))
    machine.acquire([33], ("full", 1))
    machine.access("read", [33], [0], block=1)
    assert machine.found == []
    machine.access("read", [2], [0], block=0)
    assert machine.found == [NOT_WAITED]


# Bulk copies from shared memory -------------------------------------------------------------------


@pytest.mark.parametrize(("fence", "barrier"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_store_of_what_threads_wrote(fence, barrier):
    machine = Machine()
    machine.access("write", range(32), range(0, 128, 4))
    if fence:
        machine.fence(range(32))
    if barrier:
        machine.barrier()
    machine.store(0, [0], 128)
    if fence and barrier:
        assert machine.found == []
    elif barrier:
        assert machine.found == [FENCE]
        assert "plgpu.commit_smem()" in machine.findings[0].hint
    else:
        # A thread's own writes only lack the fence.
        assert machine.found in ([WITH_OPERATION], [FENCE])


def test_fence_by_the_thread_that_stores():
    machine = Machine()
    machine.access("write", range(32), range(0, 128, 4))
    machine.barrier()
    machine.fence([0])
    machine.store(0, [0], 128)
    assert machine.found == []


def test_fence_before_the_write():
    machine = Machine()
    machine.fence(range(32))
    machine.access("write", range(32), range(0, 128, 4))
    machine.barrier()
    machine.store(0, [0], 128)
    assert machine.found == [FENCE]


@pytest.mark.parametrize("wait", ["all", "read", None])
def test_source_is_written_again(wait):
    machine = Machine()
    machine.access("write", [0], [0])
    machine.fence([0])
    operation = machine.store(0, [0], 4)
    if wait:
        machine.wait([operation], [0], reads_only=wait == "read")
    machine.access("write", [0], [0])
    assert machine.found == ([] if wait else [NOT_WAITED])
    if not wait:
        assert "wait_group" in machine.findings[0].hint


def test_other_threads_write_the_source_after_a_barrier():
    machine = Machine()
    machine.access("write", [5], [0])
    machine.fence([5])
    machine.barrier()
    operation = machine.store(0, [0], 4)
    machine.wait([operation], [0], reads_only=True)
    machine.access("write", [0], [0])
    assert machine.found == []
    machine.access("write", [6], [0])
    assert set(machine.found) == {NOT_WAITED, RACE} or set(machine.found) == {RACE}


def test_stores_are_over_in_order():
    machine = Machine()
    machine.access("write", [0] * 2, [0, 64])
    machine.fence([0])
    machine.store(0, [0], 4)
    second = machine.store(0, [64], 4)
    machine.wait([second], [0], reads_only=True)
    machine.access("write", [0], [0])
    assert machine.found == []


def test_global_memory_that_a_store_writes():
    machine = Machine()
    machine.access("write", [0], [0])
    machine.fence([0])
    operation = machine.store(0, [0], 4, target=[16])
    machine.wait([operation], [0], reads_only=True)
    machine.access("read", [0], [16], space="global")
    assert machine.found == ["asynchronous operation not waited for, in global memory"]
    other = Machine()
    other.access("write", [0], [0])
    other.fence([0])
    operation = other.store(0, [0], 4, target=[16])
    other.wait([operation], [0])
    other.access("read", [0], [16], space="global")
    assert other.found == []


def test_reductions_do_not_race_with_one_another():
    machine = Machine(blocks=2)
    for lane in (0, 1, 32):
        operation = machine.begin("tma", [lane], "reduce", "async", "bulk", "bulk_group")
        machine.move(operation, "atomic", [0], 64, "global")
    assert machine.found == []
    machine.access("read", [0], [0], space="global")
    assert machine.found == ["asynchronous operation not waited for, in global memory"]


def test_stores_of_two_blocks_to_one_place():
    machine = Machine(blocks=2)
    for lane in (0, 32):
        operation = machine.begin("tma", [lane], "async", "bulk", "bulk_group")
        machine.move(operation, "write", [0], 64, "global")
    (found,) = machine.found
    assert found == "asynchronous operation not waited for, in global memory"


# cp.async -----------------------------------------------------------------------------------------

COPY = "cp.async.shared.global [%r], [%rd], 4;"


@pytest.fixture
def copies(monkeypatch):
    """The sanitizer takes the program for one with ``cp.async``."""
    from pallasite_simulator.sanitizer import launch_state

    traits = launch_state.Traits(copies=True, fences=False, level=4)
    monkeypatch.setattr(launch_state.Traits, "of", lambda program: traits)


@pytest.mark.parametrize(("wait", "barrier"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_copy_is_read_by_all(copies, wait, barrier):
    machine = Machine()
    operation = machine.begin("cp.async", range(32), "async", proxy="generic")
    machine.move(operation, "write", range(0, 128, 4), 4)
    if wait:
        machine.wait([operation], range(32))
    if barrier:
        machine.barrier()
    machine.access("read", range(32), range(124, -4, -4))
    assert machine.found == ([] if wait and barrier else [NOT_WAITED])


def test_copy_is_read_by_its_thread(copies):
    machine = Machine()
    for wait in (True, False):
        operation = machine.begin("cp.async", range(32), "async", proxy="generic")
        machine.move(operation, "write", range(0, 128, 4), 4)
        if wait:
            machine.wait([operation], range(32))
        machine.access("read", range(32), range(0, 128, 4))
        assert machine.found == ([] if wait else [NOT_WAITED])


def test_copies_that_complete_on_an_mbarrier(copies):
    machine = Machine()
    operation = machine.begin("cp.async", range(16), "async", proxy="generic")
    machine.move(operation, "write", range(0, 64, 4), 4)
    machine.sanitizer.complete_on(operation, "full", np.arange(16))
    machine.acquire([20], "full")
    machine.access("read", [20], [32])
    assert machine.found == []
    machine.access("read", [21], [32])
    assert machine.found == [NOT_WAITED]


@pytest.mark.parametrize("fenced", [True, False])
def test_copies_are_of_the_generic_proxy(copies, fenced):
    machine = Machine()
    operation = machine.begin("cp.async", range(32), "async", proxy="generic")
    machine.move(operation, "write", range(0, 128, 4), 4)
    machine.wait([operation], range(32))
    if fenced:
        machine.fence(range(32))
    machine.barrier()
    machine.store(0, [0], 128)
    assert machine.found == ([] if fenced else [FENCE])


def test_copy_over_what_others_still_read(copies):
    machine = Machine()
    machine.access("write", range(32), range(0, 128, 4))
    machine.barrier()
    machine.access("read", range(32), range(124, -4, -4))
    operation = machine.begin("cp.async", range(32), "async", proxy="generic")
    machine.move(operation, "write", range(0, 128, 4), 4)
    assert machine.found == [WITH_OPERATION]


# wgmma --------------------------------------------------------------------------------------------


def product(machine, warpgroups=1, lanes=None):
    lanes = range(128 * warpgroups) if lanes is None else lanes
    operation = machine.begin("wgmma", lanes, "mma_async", together=128)
    machine.move(
        operation,
        "read",
        np.tile(np.arange(0, 1024, 16), warpgroups),
        16,
        owners=np.repeat(np.arange(warpgroups) * 128, 64),
    )
    return operation


def ready(threads=128, fenced=True, **options):
    machine = Machine(threads=threads, shared=2048, **options)
    machine.access("write", range(128), range(0, 1024, 8), 8)
    if fenced:
        machine.fence(range(128))
    machine.barrier(range(threads))
    return machine


def test_product_of_what_threads_wrote():
    machine = ready()
    product(machine)
    assert machine.found == []
    machine = ready(fenced=False)
    product(machine)
    assert machine.found == [FENCE]


@pytest.mark.parametrize("waits", [True, False])
def test_operand_is_written_again(waits):
    machine = ready()
    operation = product(machine)
    if waits:
        machine.wait([operation], range(128))
    machine.barrier(range(128))
    machine.access("write", range(128), range(0, 1024, 8), 8)
    assert machine.found == ([] if waits else [NOT_WAITED])
    if not waits:
        assert "wgmma.wait_group" in machine.findings[0].hint


@pytest.mark.parametrize("waiting", [128, 256])
def test_two_warpgroups_wait_for_themselves(waiting):
    machine = ready(threads=256)
    operation = product(machine, 2)
    machine.wait([operation], range(waiting))
    machine.release(range(0, waiting, 128), "empty")
    machine.acquire([5], "empty")
    machine.load(5, [0], 1024, "full")
    assert machine.found == ([] if waiting == 256 else [NOT_WAITED])


def test_registers_in_flight():
    machine = ready(body=".reg .b32 %v<4>;\nmov.b32 %v1, 1;")
    operation = product(machine)
    machine.sanitizer.registers_in_flight(operation, [1, 2])
    assert machine.wave.in_flight == {1, 2}
    add = machine.instruction("add")
    machine.sanitizer.registers_touched(np.arange(32), frozenset({1}), machine.instruction("wgmma"))
    assert machine.found == []
    machine.sanitizer.registers_touched(np.arange(32), frozenset({1}), add)
    assert machine.found == ["register of a wgmma in flight"]
    assert "%v1" in str(machine.findings[0])
    machine.wait([operation], range(128))
    # They are still watched, for a missing fence, but free to use.
    machine.sanitizer.registers_touched(np.arange(32), frozenset({1}), add)
    assert machine.found == ["register of a wgmma in flight"]


def test_registers_of_some_lanes_in_flight():
    machine = ready(threads=256, body=".reg .b32 %v<4>;")
    operation = product(machine, 2)
    machine.sanitizer.registers_in_flight(operation, [1])
    machine.wait([operation], range(128))
    add = machine.instruction("add")
    machine.sanitizer.registers_touched(np.arange(128), frozenset({1}), add)
    assert machine.found == []
    machine.sanitizer.registers_touched(np.arange(128, 256), frozenset({1}), add)
    assert machine.found == ["register of a wgmma in flight"]


# Ends ---------------------------------------------------------------------------------------------


def test_end_before_a_load_is_waited_for():
    for waits in (True, False):
        machine = Machine()
        machine.load(0, [0], 64, "full")
        if waits:
            machine.acquire([7], "full")
        machine.end()
        expected = [] if waits else ["kernel ends before its asynchronous operation"]
        assert machine.found == expected


def test_end_before_a_store_is_waited_for():
    for wait in ("read", "all", None):
        machine = Machine()
        machine.access("write", [0], [0])
        machine.fence([0])
        operation = machine.store(0, [0], 4)
        if wait:
            machine.wait([operation], [0], reads_only=wait == "read")
        machine.end()
        expected = [] if wait else ["thread ends before its asynchronous operation"]
        assert machine.found == expected


def test_end_before_a_copy_is_waited_for(copies):
    for wait in (True, False):
        machine = Machine()
        operation = machine.begin("cp.async", range(32), "async", proxy="generic")
        machine.move(operation, "write", range(0, 128, 4), 4)
        if wait:
            machine.wait([operation], range(32))
        machine.end()
        expected = [] if wait else ["thread ends before its asynchronous operation"]
        assert machine.found == expected


def test_end_before_a_product_is_waited_for():
    for waits in (True, False):
        machine = ready()
        operation = product(machine)
        if waits:
            machine.wait([operation], range(128))
        machine.end()
        expected = [] if waits else ["thread ends before its asynchronous operation"]
        assert machine.found == expected


# Bounds -------------------------------------------------------------------------------------------


def test_bulk_copy_across_allocations():
    from pallasite.launch import Allocation

    pieces = [Allocation("smem", "one", 64, 0), Allocation("smem", "two", 64, 64)]
    machine = Machine(allocations=pieces)
    machine.load(0, [0], 64, "full")
    machine.load(0, [64], 64, "full")
    assert machine.found == []
    machine.load(0, [32], 64, "full")
    assert machine.found[0] == "access of shared memory out of bounds"
    text = str(machine.findings[0])
    assert "writes 64 bytes at byte 32 of 'one' (64 bytes)" in text


def test_uninitialized_source():
    machine = Machine()
    machine.access("write", [0], [0])
    machine.fence([0])
    machine.store(0, [0], 8)
    assert machine.found == ["read of uninitialized shared memory"]
    assert "byte 4 of" in str(machine.findings[0])


# Many rows of clocks ------------------------------------------------------------------------------


def test_rows_of_clocks_are_freed(monkeypatch):
    from pallasite_simulator.sanitizer import clocks

    monkeypatch.setattr(clocks, "_ROWS_BEFORE_COLLECTION", 32)
    machine = Machine(state=LaunchState())
    for step in range(2000):
        slot = step % 4
        if step >= 4:
            machine.acquire([0], ("mbarrier", 10 + slot, step // 4 - 1))
        machine.load(0, [16 * slot], 16, ("mbarrier", slot, step // 4))
        machine.acquire([8, 9], ("mbarrier", slot, step // 4))
        machine.access("read", [8, 9], [16 * slot, 16 * slot + 4])
        machine.release([8, 9], ("mbarrier", 10 + slot, step // 4))
    assert machine.found == []
    rows = machine.state.clocks
    assert len(rows.generic) < 1000
    assert len(rows.names) < 10
