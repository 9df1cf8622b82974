"""What processes of one GPU each do to meet, without GPUs: the exchange, the heap, the launch."""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
import sys
import textwrap

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acting import Acting, kernel_of
from hypothesis import given
from jax.sharding import PartitionSpec
from processes import FOLDER, run

import pallasite
import pallasite_multigpu
from pallasite import plugins
from pallasite.plugin import ExecutionError, InvalidValueError
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import (
    copy_table,
    heap,
    host_code,
    symmetric,
    table_launch,
    workspace,
    workspace_handler,
)

# Two processes ------------------------------------------------------------------------------------

EXCHANGE = """
    import ctypes
    from fake_driver import FakeDriver
    from pallasite import config
    from pallasite_multigpu.protocol import layout
    from pallasite_multigpu.runtime import copy_table, exchange, groups, heap, ipc
    from pallasite_multigpu.runtime import process_groups

    cuda = FakeDriver(RANK)
    for module in (groups, ipc, process_groups):
        module.driver = lambda: cuda
    groups._ordinal = lambda device: RANK
    config.update("symmetric_heap", "1M")
    config.update("peer_timeout", 5)
    devices = jax.devices()

    def word(address, kind=ctypes.c_uint64):
        return kind.from_address(address)
"""

FAILS = """
    from pallasite.plugin import PallasiteError

    def fails(order, what):
        try:
            groups.group_of(order)
        except PallasiteError as error:
            print(what, "-", " ".join(str(error).split()))

    def together(key):
        exchange.tell(f"{key}/{RANK}", 1)
        exchange.hear(f"{key}/{1 - RANK}", 30)
"""

LATE = """
    config.update("peer_timeout", 1)
    if RANK == 0:
        fails(devices, "late")
    together("late")
    config.update("peer_timeout", 5)
"""

TABLES = """
    group = groups.group_of(devices)
    assert group is groups.group_of(devices)
    words = [word(address).value for address in range(
        *(lambda at: (at, at + 8 * layout.table_words(2), 8))(copy_table.TABLES._words[3])
    )]
    other = 1 - RANK
    assert (words[layout.RANK], words[layout.COUNT]) == (RANK, 2), words
    assert words[layout.TIMEOUT] == 5 * 10**9 and words[layout.RECORD] == group.records[0]
    boxes = words[layout.MAILBOXES:layout.elements(2):2]
    assert words[layout.MAILBOX] == boxes[RANK] and tuple(boxes) == group.mailboxes
    offsets = words[layout.MAILBOXES + 1:layout.elements(2):2]
    assert offsets[RANK] == 0

    # As kernels do it: an address of this process, as the other one has it, into its mailbox.
    shared = process_groups.heap()
    array = shared.allocate(8, "an array")
    word(array).value = 1000 + RANK
    word(boxes[other] + layout.SLOTS).value = (array + offsets[other]) % 2**64
    together("written")
    found = word(boxes[RANK] + layout.SLOTS).value
    assert found != array and word(found).value == 1000 + other
    assert exchange.heard("nothing") is None and exchange.heard(f"written/{RANK}") == 1
    print("met")
"""

APART = """
    process_groups._reached.clear()
    cuda.apart = (1,)
    fails(devices[::-1], "apart")
    together("apart")
"""

ON_CPU = """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from acting import Acting, kernel_of
    from pallasite import plugins

    plugins.register(Acting(), name="acting")
    mesh = Mesh(np.array(devices), ("x",))
    pull = jax.shard_map(kernel_of("pull", size=128), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
                         check_vma=False)
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    try:
        jax.jit(pull).lower(x)
    except Exception as error:
        print("simulator -", error)
"""


PARTS = (FAILS, LATE, TABLES, APART, ON_CPU)


@pytest.fixture
def two(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_GPUS", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FOLDER), *(one for one in sys.path if one)]))

    found = run(textwrap.dedent(EXCHANGE) + "".join(map(textwrap.dedent, PARTS)), timeout=60)
    assert [code for code, *_ in found] == [0, 0], [told[-2000:] for *_, told in found]
    return [out for _, out, _ in found]


def test_two_processes_meet(two):
    """One comes too late at first; then both know where their memory is."""
    first, second = two
    late = (
        "late - a kernel communicates with devices of processes that do not come got: nothing from"
    )
    assert late + " process 1 in 1 seconds" in first and "late" not in second
    assert "met" in first and "met" in second
    # GPUs that cannot reach each other: both say so, and neither waits.
    assert "GPU 0 of this process and GPU 1 of process 1: 217: no peer access" in first
    assert "apart - process 0 cannot share memory with others" in second and "217" in second
    for told in two:
        simulated = "kernel 'acting' communicates with devices of other processes, on cpu"
        assert simulated in told.partition("simulator - ")[2]


class Device:
    local_hardware_id = None

    def __init__(self, id, process_index):
        self.id, self.process_index = id, process_index


def test_what_several_processes_must_have(monkeypatch):
    from pallasite_multigpu.runtime import groups, process_groups

    devices = [Device(0, 0), Device(1, 0), Device(2, 1)]
    with pytest.raises(pallasite.PallasiteError, match="of which one has several GPUs") as error:
        groups.group_of(devices)
    assert "2 devices of process 0 in the mesh" in str(error.value)
    with pytest.raises(ExecutionError, match=r"several processes without jax\.distributed"):
        groups.group_of([Device(0, 0), Device(1, 1)])
    places = [{"choice": "ipc", "machine": "a"}, {"choice": "ipc", "machine": "b"}]
    with pytest.raises(ExecutionError, match="different machines cannot share memory by CUDA IPC"):
        process_groups._kind([0, 1], places)
    for one in places:
        one["choice"] = "auto"
    assert process_groups._kind([0, 1], places) == "nvshmem"
    assert process_groups._kind([0], places[:1]) == "ipc"
    places[0]["choice"] = "nvshmem"
    with pytest.raises(ExecutionError, match="peer_memory is auto and nvshmem"):
        process_groups._kind([0, 1], places)


def test_nvshmem_begins_with_all_processes():
    from pallasite_multigpu.runtime import process_groups

    places = [{"heap": 1 << 30}, {"heap": 1 << 30}]
    process_groups._check_all_begin([0, 1], places, 2)
    with pytest.raises(ExecutionError, match="by some processes of the program only") as error:
        process_groups._check_all_begin([0, 1], places, 4)
    assert "a kernel of processes [0, 1], of 4" in str(error.value)
    places[1]["heap"] = 1 << 20
    with pytest.raises(ExecutionError, match="symmetric_heap is 1048576 and 1073741824 bytes"):
        process_groups._check_all_begin([0, 1], places, 2)


def test_sizes_of_the_heap():
    for text, nbytes in (("512M", 512 << 20), ("4g", 4 << 30), ("1000", 1000), (4096, 4096)):
        with pallasite.config.scoped(symmetric_heap=text):
            assert pallasite.config.get("symmetric_heap") == nbytes
    for wrong in ("much", "0", -1, "1T"):
        with pytest.raises(pallasite.PallasiteError, match="expected: bytes, also as 512M or 4G"):
            pallasite.config.update("symmetric_heap", wrong)
    with pytest.raises(pallasite.PallasiteError, match="expected: auto, ipc or nvshmem"):
        pallasite.config.update("peer_memory", "mpi")


def test_nvshmem_is_missing(monkeypatch):
    from pallasite_multigpu.runtime import nvshmem

    monkeypatch.setattr(nvshmem, "_path", lambda: None)
    monkeypatch.setattr(nvshmem, "LIBRARY", "libnothing.so")
    with pytest.raises(ExecutionError, match="need NVSHMEM here, which is not there") as error:
        nvshmem.library.__wrapped__()
    assert "pip install nvidia-nvshmem-cu13" in str(error.value)


# The heap -----------------------------------------------------------------------------------------


class Memory:
    name = "test"

    def allocate(self, ordinal, nbytes):
        return 1 << 20


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans(), st.integers(0, 99)), max_size=40))
def test_arrays_of_the_heap_do_not_overlap(steps):
    shared = heap.Heap(Memory(), 0, 32 * 1024)
    live, room = {}, 0
    for size, frees, number in steps:
        if frees and live:
            address = sorted(live)[number % len(live)]
            shared.free(address)
            del live[address]
        elif number < 10:
            try:
                shared.reserve(size, "a kernel")
                room = max(room, size)
            except ExecutionError:
                assert max(at + length for at, length in live.items()) > shared.end - size - 512
        else:
            try:
                address = shared.allocate(size, "an array")
            except ExecutionError as error:
                assert "PALLASITE_SYMMETRIC_HEAP" in str(error)
                continue
            live[address] = size
        places = sorted(live.items())
        pairs = itertools.pairwise(places)
        assert all(at % 512 == 0 and at >= shared.begin for at, _ in places)
        assert all(at + length <= later for (at, length), (later, _) in pairs)
        assert all(at + length <= shared.end - room for at, length in places)


# The launch ---------------------------------------------------------------------------------------


def compiled_pull(size=4096):
    plugins.register(Acting(), name="acting")
    try:
        mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
        x = jax.ShapeDtypeStruct((2 * size,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        called = jax.shard_map(
            kernel_of("pull", size=size), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return pallasite.compile(called, x, target="sm_90a")
    finally:
        plugins.unregister("acting")


def test_what_peers_reach_is_in_the_workspace():
    compiled = compiled_pull()
    (operand,) = compiled.launch.hidden_operands
    assert json.loads(operand.arguments)["reached"] == [["input", 0]]
    needed = workspace.workspace_of(compiled, {("input", 0)})
    assert needed.nbytes == 16384 and needed.array_of.count(0) == 1
    (array,) = needed.arrays
    assert array.filled and not array.returned and needed.array_of[array.buffer] == 0
    both = workspace.workspace_of(compiled, {("input", 0), ("output", 0)})
    assert both.nbytes == 32768
    assert [(one.filled, one.returned, one.offset) for one in both.arrays] == [
        (True, False, 0),
        (False, True, 16384),
    ]


class Frame(ctypes.Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("struct_size", "extension", "api", "context", "stage"),
            *("args_size", "args_extension", "args", "args_types", "args_list"),
            *("rets_size", "rets_extension", "rets", "rets_types", "rets_list"),
            *("attrs_size", "attrs_extension", "attrs", "attrs_types", "attrs_names", "attrs_list"),
        )
    )


class Launcher:
    """Stands for JAX's: notes what it gets, and doubles the first operand into each result."""

    def __init__(self):
        self.seen = []
        self.handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self._run)
        self.address = ctypes.cast(self.handler, ctypes.c_void_p).value

    def _run(self, where):
        frame = Frame.from_address(where)
        if frame.extension:
            about = ctypes.c_uint64.from_address(frame.extension + 24).value
            ctypes.c_uint32.from_address(about + 28).value = 4
            return None
        operands, results = (
            [
                ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(at + 8 * i).value + 24)
                for i in range(count)
            ]
            for at, count in (
                (frame.args_list, frame.args),
                (frame.rets_list, frame.rets),
            )
        )
        self.seen.append(([o.value for o in operands], [r.value for r in results], frame.attrs))
        given = (ctypes.c_float * 256).from_address(operands[0].value)
        for result in results:
            made = (ctypes.c_float * 256).from_address(result.value)
            for i in range(256):
                made[i] = 2 * given[i]
        return None


@pytest.mark.parametrize("inside", [False, True])
def test_the_launcher_finds_arrays_in_shared_memory(inside, monkeypatch):
    launcher = Launcher()
    target = f"{workspace_handler.TARGET}_{launcher.address:x}"
    made = host_code.handlers_before(
        workspace_handler.TARGET, {"execute": launcher.address}, workspace_handler.handler(None)
    )
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(made["execute"])
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    memory = np.zeros(1 << 14, np.uint8)
    begin = -(-memory.ctypes.data // 512) * 512
    end = begin + 8192
    needed = workspace.Workspace(
        2048,
        (
            workspace.SharedArray(0, 0, 1024, filled=True, returned=False),
            workspace.SharedArray(3, 1024, 1024, filled=False, returned=True),
        ),
        (0, -1, -1, 1),
    )
    monkeypatch.setattr(workspace_handler, "_heap", workspace_handler._heap)
    kept = list(workspace_handler._heap)
    workspace_handler.share(begin, end)
    types = [jax.ShapeDtypeStruct((256,), np.float32)] * 2

    @jax.jit
    def called(x, y):
        call = jax.ffi.ffi_call(target, types)
        return call(x, y, opaque=b"\0kernel", workspace=needed.attribute)

    try:
        x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
        given = jnp.asarray(x)
        if inside:
            ctypes.memmove(begin, x.ctypes.data, 1024)
            own = symmetric.DeviceMemory(
                begin, (256,), np.dtype(np.float32), 0, lambda: None, device_type=1
            )
            given = jax.dlpack.from_dlpack(own)
        for _ in range(2):
            results = [np.asarray(one) for one in called(given, given + 1)]
            np.testing.assert_array_equal(results, [2 * x, 2 * x])
    finally:
        workspace_handler.share(*kept)
    for operands, results, attributes in launcher.seen:
        assert operands[0] == (begin if inside else end - 2048) and attributes == 1
        assert results[1] == end - 1024
        assert not begin <= operands[1] < end and not begin <= results[0] < end
    assert len(launcher.seen) == 2


@pytest.mark.parametrize("known", [True, False])
def test_the_launcher_gets_the_table_of_the_device(known):
    launcher = Launcher()
    target = f"{table_launch.TARGET}_{launcher.address:x}"
    made = host_code.handlers_before(
        table_launch.TARGET, {"execute": launcher.address}, table_launch.handler()
    )
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(made["execute"])
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    table = np.arange(7, dtype=np.uint64)
    group = 2**40 + launcher.address % 1000
    if known:
        copy_table.TABLES.add(group, 0, table.ctypes.data)

    @jax.jit
    def called(x, unused):
        call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct((256,), np.float32)])
        return call(x, unused, x, opaque=b"\0kernel", table=struct.pack("<2q", group, 1))[0]

    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    unused = jnp.zeros(7, jnp.uint32)
    if not known:
        with pytest.raises(Exception, match="pallasite: this device has no mailboxes in the mesh"):
            called(x, unused).block_until_ready()
        assert not launcher.seen
        return
    for _ in range(2):
        np.testing.assert_array_equal(called(x, unused), 2 * x)
    for operands, _, attributes in launcher.seen:
        assert operands[1] == table.ctypes.data and attributes == 1
        assert table.ctypes.data not in (operands[0], operands[2])
    assert len(launcher.seen) == 2


# Symmetric arrays ---------------------------------------------------------------------------------


def test_a_symmetric_array_of_one_process_is_as_any_other():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.NamedSharding(mesh, PartitionSpec("x"))
    made = pallasite_multigpu.symmetric_empty((4, 3), jnp.bfloat16, sharding)
    assert made.shape == (4, 3) and made.dtype == jnp.bfloat16 and made.sharding == sharding
    assert pallasite_multigpu.is_symmetric(made)
    assert pallasite_multigpu.symmetric_empty(8, "int32", sharding).shape == (8,)
    with pytest.raises(InvalidValueError, match="symmetric_empty of something that JAX has no"):
        pallasite_multigpu.symmetric_empty((4,), jnp.float32, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool"])
def test_memory_as_an_array(dtype):
    """An array lives in memory of our own until nobody uses it."""
    values = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(jnp.dtype(dtype))
    memory = np.zeros(1024, np.uint8)
    address = -(-memory.ctypes.data // 256) * 256
    ctypes.memmove(address, values.ctypes.data, values.nbytes)
    released = []
    own = symmetric.DeviceMemory(
        address, (3, 5), values.dtype, 0, lambda: released.append(1), device_type=1
    )
    array = jax.dlpack.from_dlpack(own)
    assert array.unsafe_buffer_pointer() == address and array.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(array + array), np.asarray(values + values))
    assert not released
    array.delete()
    assert released == [1]


def test_the_table_of_one_process_has_no_offsets():
    table = layout.table(1, [10, 20], timeout=7)
    assert layout.devices_of(len(table)) == 2
    assert table[layout.MAILBOXES :].tolist() == [10, 0, 20, 0, 0, 1]
    moved = layout.table(1, [10, 20], [-8, 0])
    assert moved[layout.MAILBOXES :].tolist() == [10, 2**64 - 8, 20, 0, 0, 1]


def test_elements_that_dlpack_does_not_know():
    shared = heap.Heap(Memory(), 0, 4096)
    try:
        with pytest.raises(InvalidValueError, match="elements that DLPack does not know"):
            symmetric._array(shared, (4,), np.dtype(jnp.float8_e4m3fn))
        assert shared._used == {}
    finally:
        workspace_handler.share(0, 0)
