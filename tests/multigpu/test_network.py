"""Devices of several hosts: NVSHMEM's library, what processes tell each other, what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from acting import Acting, kernel_of
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.codegen.assembler import assemble
from pallasite.errors import ExecutionError, UnsupportedError
from pallasite_multigpu.network import library
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import diagnoses, groups, nvshmem, process_groups

IR = """
%state = type { i32, i64 }
@nvshmemi_device_state_d = addrspace(4) externally_initialized global %state zeroinitializer, align 8
@nvshmemi_device_lib_version_d = addrspace(4) global [1 x i32] [i32 3], align 4

define i64 @rank() alwaysinline {
  %rank = load i64, ptr addrspace(4) getelementptr (%state, ptr addrspace(4) @nvshmemi_device_state_d, i64 0, i32 1)
  ret i64 %rank
}
"""  # noqa: E501


def compiled(body, *scratch, devices=2, size=512):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(exit_barrier=True),
    )
    mesh, spec = AbstractMesh((devices,), ("x",)), PartitionSpec("x")
    call = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((devices * size,), jnp.float32, sharding=NamedSharding(mesh, spec))
    with config.scoped(peer_network="nvshmem", cache=False):
        return pallasite.compile(call, x, target="sm_90a")


def send(x_ref, out_ref, buffer, loaded, arrived):
    there = 1 - lax.axis_index("x")
    plgpu.copy_gmem_to_smem(x_ref, buffer, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(out_ref, there))
    plgpu.wait_smem_to_gmem(0)
    pl.semaphore_signal(arrived, device_id=there)
    pl.semaphore_wait(arrived)


SCRATCH = (plgpu.SMEM((512,), jnp.float32), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR)


def test_the_state_is_copied_to_each_module(monkeypatch):
    monkeypatch.setattr(library, "original", lambda: IR)
    text = library.for_kernels()
    assert "addrspace(4)" not in text and "lib_version" not in text
    assert "@nvshmemi_device_state_d = internal addrspace(1) global %state" in text
    assert f"define void @{library.BEGIN}(" in text
    ptx = library.state_module("sm_90")
    assert ".visible .const .align 8 .b8 nvshmemi_device_state_d[16];" in ptx
    assert "lib_version_d" in ptx and ".func" not in ptx
    assert library.state_words(ptx) == 2


def test_kernels_without_the_option_are_unchanged():
    plugins.register(Acting(), name="acting")
    try:
        mesh, spec = AbstractMesh((2,), ("x",)), PartitionSpec("x")
        x = jax.ShapeDtypeStruct((8192,), jnp.float32, sharding=NamedSharding(mesh, spec))
        call = jax.shard_map(
            kernel_of("pull", size=4096), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        ptx = pallasite.compile(call, x, target="sm_90a").ptx
    finally:
        plugins.unregister("acting")
    assert "nvshmem" not in ptx and ptx.count("bar.warp.sync") <= 3


@pytest.mark.skipif(library.path() is None, reason="needs the package nvidia-nvshmem-cu13")
def test_the_library_is_linked_and_assembled():
    found = compiled(send, *SCRATCH)
    assert re.search(r"\.global \.align 8 \.b8 nvshmemi_device_state_d\[\d+\]", found.ptx)
    assert "call" not in found.ptx.replace("call_", "") and found.ptx.count(".entry") == 1
    assert assemble(found.ptx, found.name).cubin


def test_the_library_is_missing(monkeypatch):
    monkeypatch.setattr(library, "path", lambda: None)
    with pytest.raises(
        UnsupportedError, match=r"NVSHMEM's device library, which is not there"
    ) as e:
        compiled(send, *SCRATCH)
    assert "pip install nvidia-nvshmem-cu13" in str(e.value)
    assert re.search(r"test_network\.py:\d+ \(send\)", str(e.value))
    line = diagnoses.diagnoses()[3]
    assert "libnvshmem_device.bc" in line.text and not line.remedy
    with config.scoped(peer_network="nvshmem"):
        assert "pip install" in diagnoses.diagnoses()[3].remedy


def test_values_of_the_option():
    with config.scoped(peer_network="off"):
        assert config.get("peer_network") == "off"
    with config.scoped(peer_network="nvshmem"):
        first = config.get("peer_network")
        assert first.split()[0] == "nvshmem"
        with config.scoped(peer_network=first):
            assert config.get("peer_network") == first
    with pytest.raises(pallasite.PallasiteError, match="expected: off or nvshmem"):
        config.update("peer_network", "mpi")


class Memory:
    """Of another host, to which nothing leads but the network."""

    name = "nvshmem"

    def allocate(self, ordinal, nbytes):
        return 1 << 30

    def tell(self):
        return {"element": 1}

    def reach(self, process, told):
        return 0

    def network(self, ordinal):
        return 0x5000


class Driver:
    def fill(self, *arguments):
        pass

    def allocate_pinned(self, nbytes):
        return 0x9000


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "gpu"


def test_what_hosts_tell_each_other(monkeypatch):
    """The other one is at a place of its own, with its mailbox at another distance."""
    begin = 7 << 30

    def meet(key, rank, processes, make):
        mine = make()
        other = {
            "place": {**mine, "machine": "other"},
            "share": {"memory": {"element": 0}, "mailbox": 1024},
            "reach": {"begins": [begin, 0]},
        }[key.rsplit("/", 1)[1]]
        return [other, mine]

    monkeypatch.setattr(process_groups.exchange, "meet", meet)
    monkeypatch.setattr(process_groups.jax, "process_index", lambda: 1)
    monkeypatch.setattr(process_groups.jax, "process_count", lambda: 2)
    monkeypatch.setattr(process_groups, "driver", Driver)
    monkeypatch.setattr(process_groups, "_memory", lambda kind: Memory())
    monkeypatch.setattr(process_groups.watcher, "watch", lambda *arguments: None)
    for name, value in {"_heap": None, "_reached": {}, "_mailboxes": {}, "_meetings": {}}.items():
        monkeypatch.setattr(process_groups, name, value)
    tables = {}
    monkeypatch.setattr(
        groups, "_add_table", lambda number, ordinal, words: tables.update({number: words})
    )
    monkeypatch.setattr(groups, "_ordinal", lambda device: 0)
    group = groups._of_processes(3, [Device(0, 0), Device(5, 1)], 0)
    assert group.far
    words, own = tables[3], 1 << 30
    box, offset, near, none = (int(one) for one in words[layout.MAILBOXES : layout.elements(2)])
    assert box == own + 1024 + layout.FAR  # As this process calls what is there.
    assert (own + 4096 + offset) % 2**64 == begin + 4096  # As that one calls what is here.
    assert near == words[layout.MAILBOX] and near % 2 == 0 and none == 0
    assert words[layout.NETWORK] == 0x5000 and words[layout.elements(2) :].tolist() == [0, 1]


def test_gpus_that_nothing_connects(monkeypatch):
    class Library:
        nvshmem_ptr = staticmethod(lambda *arguments: None)

    monkeypatch.setattr(nvshmem, "library", Library)
    memory = nvshmem.NvshmemMemory()
    with pytest.raises(ExecutionError, match="cannot access each other's memory") as caught:
        memory.reach(1, {"element": 1})
    assert "PALLASITE_PEER_NETWORK=nvshmem" in str(caught.value) and memory.network(0) == 0
    with config.scoped(peer_network="nvshmem"):
        assert memory.reach(1, {"element": 1}) == 0


def test_the_state_is_filled_in_by_nvshmem(monkeypatch):
    """NVSHMEM gets a module with the state alone, and kernels a copy of what it writes there."""
    done = []

    class Filling:
        @contextlib.contextmanager
        def on(self, ordinal):
            yield

        def load(self, ptx):
            done.append(("load", "nvshmemi_device_state_d[16]" in ptx))
            return "module"

        def symbol(self, module, name):
            return {("module", "nvshmemi_device_state_d"): 0x700}[module, name]

        def allocate(self, ordinal, nbytes):
            return 0x9000 + nbytes

        def copy(self, *arguments):
            done.append(arguments)

    class Library:
        nvshmemx_cumodule_init = staticmethod(lambda module: done.append(module) or Library.code)
        code = 0

    monkeypatch.setattr(library, "original", lambda: IR)
    monkeypatch.setattr(nvshmem, "library", Library)
    monkeypatch.setattr(nvshmem, "driver", Filling)
    memory = nvshmem.NvshmemMemory()
    with config.scoped(peer_network="nvshmem"):
        assert memory.network(1) == memory.network(1) == 0x9010
        assert done == [("load", True), "module", (1, 0x9010, 0x700, 16)]
        Library.code = 7
        with pytest.raises(ExecutionError, match="NVSHMEM cannot be started") as caught:
            nvshmem.NvshmemMemory().network(1)
    assert "nvshmemx_cumodule_init returns 7" in str(caught.value)
