"""The host's side: the call that copies tables, records of errors, options."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from acting import Acting, kernel_of
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import ConfigError, ExecutionError
from pallasite.plugin import LaunchRequest, UnsupportedError
from pallasite.plugin.lowering import DeviceMesh
from pallasite.plugin.runtime import LaunchDevice, find_executor
from pallasite_multigpu.ops import kernels
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.protocol.layout import Trap
from pallasite_multigpu.runtime import diagnoses, groups, process_life, warm_up, watcher
from pallasite_multigpu.runtime.provider import TABLES


@pytest.fixture(autouse=True)
def plugin():
    plugins.register(Acting(), name="acting")
    yield
    plugins.unregister("acting")


def pulling(size=4096):
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((2 * size,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    kernel = kernel_of("pull", size=size)
    return jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), x


def test_programs_hold_no_addresses():
    """Neither in this process nor in another one: a program is the same text everywhere."""
    called, x = pulling()
    text = jax.jit(called).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@pallasite_multigpu_table" in text and "group = 0" in text
    assert text == jax.jit(called).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    first, second = groups.number_of((0, 1), 120.0), groups.number_of((1, 0), 120.0)
    assert len({first, second, groups.number_of((0, 1), 5.0), groups.OTHER_MACHINE}) == 4
    assert first == groups.number_of([0, 1], 120.0) < 2**63


PROGRAM = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    from pallasite_multigpu.runtime import copy_table

    copy_table.register("cpu")
    tables = [np.arange(7, dtype=np.uint64) * 2**40 + rank for rank in range(3)]
    for rank in range(3):
        copy_table.TABLES.add(5, rank, tables[rank].ctypes.data)
    copy_table.TABLES.add(6, 0, tables[1].ctypes.data)

    def words(group):
        mesh = jax.make_mesh((3,), ("x",))
        def one(x):
            with jax.enable_x64(True):
                return copy_table.call(group, 7)[None] + 0 * x[0]
        with jax.enable_x64(True):
            x = jax.device_put(jnp.zeros(3, jnp.uint64), jax.NamedSharding(mesh, P("x")))
            return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)

    np.testing.assert_array_equal(np.asarray(words(5)), tables)
    try:
        words(6).block_until_ready()
    except Exception as error:
        print(error)
"""


def test_each_device_gets_its_table():
    """The handler for the host is that for GPUs but for the function that copies."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "pallasite: this device has no mailboxes in the mesh" in done.stdout


def test_a_warm_up_needs_no_memory():
    called, x = pulling()
    compiled = pallasite.compile(called, x, target="sm_90a")
    small = dataclasses.replace(compiled, launch=warm_up.small_launch(compiled.launch, 1))
    assert [one.shape for one in small.launch.inputs] == [(1,), (layout.table_words(2),)]
    assert [one.shape for one in small.launch.outputs] == [(1,)]
    assert compiled.launch.grid == (32, 1, 1) and small.launch.grid == (1, 1, 1)
    run = find_executor("cuda", compiled.name)
    with jax.enable_x64(True):
        given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in small.launch.inputs]
        traced = jax.jit(lambda *operands: run(small, *operands)).trace(*given)
        assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_warm_up_of_a_kernel_with_tensor_maps_and_semaphores():
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((8192,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    def gather(x):
        return kernels.gather_in_bulk(x, "x", 2, 256, 4).reshape(-1)

    called = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = pallasite.compile(called, x, target="sm_90a")
    (table,) = compiled.launch.hidden_operands
    small = dataclasses.replace(compiled, launch=warm_up.small_launch(compiled.launch, table.input))
    assert all(math.prod(one.shape) <= 1 for one in (*small.launch.outputs, *small.launch.scratch))
    run = find_executor("cuda", compiled.name)
    with jax.enable_x64(True):
        given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in small.launch.inputs]
        traced = jax.jit(lambda *operands: run(small, *operands)).trace(*given)
        assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_launch_on_one_gpu_alone_is_refused():
    called, x = pulling()
    compiled = pallasite.compile(called, x, target="sm_90a")
    (operand,) = compiled.launch.hidden_operands
    given = {
        "communicates": True,
        "fingerprint": 1,
        "location": "here.py:3",
        "multicasts": False,
        "clears": False,
        "network": False,
        "reached": [],
    }
    with pytest.raises(
        UnsupportedError, match=r"here\.py:3: kernel 'acting' communicates"
    ) as error:
        TABLES.on_device(compiled, LaunchDevice("cuda", 0, 0), **given)
    assert "expected: a call from JAX, inside jax.shard_map" in str(error.value)
    table = TABLES.on_device(compiled, LaunchDevice("cpu", 0, 0), **given)
    assert table.shape == compiled.launch.inputs[operand.input].shape
    assert table[layout.RANK] == 0 and table[layout.COUNT] == 2


def test_multicast_is_refused_on_gpus(monkeypatch):
    """It is not set up there; a kernel that used it would write anywhere."""

    def body(x, o, arrived):
        plgpu.semaphore_signal_multicast(arrived, collective_axes="x")
        pl.semaphore_wait(arrived, 2)
        o[...] = x[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
    )
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    called = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = pallasite.compile(called, x, target="sm_90a")
    (operand,) = compiled.launch.hidden_operands
    gpus = tuple(LaunchDevice("gpu", one, one) for one in range(2))
    request = LaunchRequest(
        platform="cuda", device_mesh=DeviceMesh((("x", 2),), ("x",)), devices=gpus
    )
    with pytest.raises(UnsupportedError, match="uses multicast over NVLink, which is not set") as e:
        TABLES.in_jax(compiled, request, **json.loads(operand.arguments))
    assert "test_runtime.py" in str(e.value)


# Errors of kernels --------------------------------------------------------------------------------


def record(code, value, rank=1, fingerprint=0xABC):
    words = (ctypes.c_uint64 * layout.RECORD_WORDS)()
    words[layout.RECORD_CODE], words[layout.RECORD_VALUE] = int(code), value % 2**64
    words[layout.RECORD_RANK], words[layout.RECORD_FINGERPRINT] = rank, fingerprint
    words[layout.RECORD_STATE] = 1
    return words


@pytest.mark.parametrize(
    ("code", "value", "text"),
    [
        (Trap.NOT_BEGUN, 0b1001, "waited in vain for the kernel to begin on device 0 (GPU 4), de"),
        (Trap.NOT_ENDED, 0b1000, "waited in vain for the kernel to end on device 3"),
        (Trap.OTHER_KERNEL, 0xBEEF, "met another kernel on another device of its mesh"),
        (Trap.OVERLAP, 0, "met another communicating kernel on its device at the same time"),
        (Trap.DEVICE_ID, -3, "was given the device id -3, which is out of range"),
        (77, 5, "gave up with code 77, value 0x5"),
    ],
)
def test_what_is_told_of_a_kernel_that_gave_up(code, value, text):
    watcher.know(0xABC, watcher.KernelName("ring", "user.py:12"))
    found = layout.read_record(record(code, value))
    told = watcher.text_of(found, {0: "GPU 4", 1: "GPU 5"})
    assert told.startswith(f"user.py:12: kernel 'ring': device 1 (GPU 5) {text}"), told
    assert ("peer_timeout" in told) == (code in (Trap.NOT_BEGUN, Trap.NOT_ENDED))


def test_the_others_are_told_to_give_up(monkeypatch):
    monkeypatch.setattr(watcher, "_watched", [])
    monkeypatch.setattr(watcher, "_thread", object())  # Nobody looks but this test.
    memory = [record(Trap.OVERLAP, 0, rank=0), (ctypes.c_uint64 * layout.RECORD_WORDS)()]
    watcher.watch([ctypes.addressof(one) for one in memory], {})
    memory[0][layout.RECORD_STATE] = 0
    assert watcher.look() == []
    memory[0][layout.RECORD_STATE] = 1
    (told,) = watcher.look()
    assert "device 0 met another communicating kernel" in told
    assert [one[layout.RECORD_ABORT] for one in memory] == [1, 1]
    assert watcher.look() == []


def test_the_time_to_wait_is_an_option(monkeypatch):
    assert config.get("peer_timeout") == 120.0
    with config.scoped(peer_timeout=2.5):
        assert config.get("peer_timeout") == 2.5
    monkeypatch.setenv("PALLASITE_PEER_TIMEOUT", "0")
    assert config.get("peer_timeout") == 0.0
    for wrong in (-1, "soon", float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="expected: seconds, 0 for ever"):
            config.update("peer_timeout", wrong)


def test_errors_go_to_standard_error(monkeypatch):
    """What the thread prints begins with the package's name."""
    texts = iter([["kernel 'a': gave up"]])
    monkeypatch.setattr(watcher, "look", lambda: next(texts))
    out = io.StringIO()
    with contextlib.redirect_stderr(out), pytest.raises(StopIteration):
        monkeypatch.setattr(watcher, "INTERVAL", 0)
        watcher._run()
    assert out.getvalue() == "pallasite: kernel 'a': gave up\n"


class FakeDriver:
    """Three GPUs, of which the last two are not connected."""

    def count(self):
        return 3

    def reaches(self, one, other):
        return {one, other} != {1, 2}


def test_doctor_says_which_gpus_are_apart(monkeypatch):
    monkeypatch.setattr(diagnoses, "driver", FakeDriver)
    monkeypatch.setattr(diagnoses.nvshmem, "is_installed", lambda: False)
    local, processes, between, hosts = diagnoses.diagnoses()
    assert local.text == "GPUs without access to each other's memory: 1-2, 2-1"
    assert "nvidia-smi topo" in local.remedy
    assert processes.text.startswith("on one machine") and "1024 MiB" in processes.text
    assert between.text.startswith("not installed (nvidia-nvshmem-cu13)")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    apart = diagnoses.diagnoses()[1]
    assert apart.text.startswith("one of 4 tasks") and "jax.distributed.init" in apart.remedy
    monkeypatch.delenv("SLURM_NTASKS")

    def missing():
        raise ExecutionError("no driver", got="libcuda.so.1: not found")

    monkeypatch.setattr(diagnoses, "driver", missing)
    assert diagnoses.diagnoses()[0].text == "on the simulator only: libcuda.so.1: not found"


def test_nothing_here_makes_multicast_objects():
    """They can put GPUs out of service that others share; the driver is called in one module."""
    folder = pathlib.Path(groups.__file__).parents[1]
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    assert [path.name for path, text in texts.items() if "libcuda" in text] == ["cuda.py"]
    called = re.findall(r'"(cu[A-Z]\w+)"', "".join(texts.values()))
    assert "cuMemAlloc_v2" in called
    assert not [name for name in called if "Multicast" in name]


def test_kernels_do_not_wait_for_processes_that_have_ended(monkeypatch):
    monkeypatch.setattr(watcher, "_watched", [])
    monkeypatch.setattr(watcher, "_thread", object())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = process_life._state(child.pid)[process_life._BEGAN]
    here = process_life.identity()
    assert not process_life.has_ended(here) and not process_life.has_ended({})
    told = {**here, "number": child.pid, "began": began}
    memory = record(Trap.NOT_SIGNALLED, 3 << 32 | 5, rank=0)
    memory[layout.RECORD_STATE] = 0
    watcher.watch([ctypes.addressof(memory)], {0: "GPU 0", 1: "process 1"}, {1: told})
    assert watcher.look() == [] and memory[layout.RECORD_ABORT] == 0
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It stays as a zombie.
    assert process_life.has_ended(told)
    child.wait()
    assert process_life.has_ended(told) and process_life.has_ended({**here, "began": "1"})
    assert not process_life.has_ended({**here, "namespace": "other"})
    assert watcher.look() == [] and memory[layout.RECORD_ABORT] == layout.ABORT_SOON
    memory[layout.RECORD_STATE] = 1
    (text,) = watcher.look()
    assert "waited in vain for signals of other devices: a semaphore has 3 of 5" in text
    assert text.endswith("; device 1 (process 1, which has ended)")
    assert memory[layout.RECORD_ABORT] == layout.ABORT_NOW
