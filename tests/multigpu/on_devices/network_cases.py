"""Devices of two hosts: what is not reached by loads and stores goes through a network's functions.

The library is one of this file, whose addresses of far devices are beside theirs, so that no load
or store reaches them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import PARTIAL, SEMAPHORE, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite.errors import UnsupportedError
from pallasite_multigpu.network import library
from pallasite_multigpu.protocol import layout

BESIDE = 1 << 50
LIBRARY = f"""
define void @{library.BEGIN}(ptr addrspace(1) %state, i32 %thread, i32 %threads) alwaysinline {{
  ret void
}}

define ptr @there(ptr %address) alwaysinline {{
  %number = ptrtoint ptr %address to i64
  %moved = sub i64 %number, {BESIDE}
  %there = inttoptr i64 %moved to ptr
  ret ptr %there
}}

define void @nvshmem_putmem_nbi(ptr %to, ptr %from, i64 %size, i32 %device) alwaysinline {{
entry:
  %there = call ptr @there(ptr %to)
  br label %next
next:
  %at = phi i64 [ 0, %entry ], [ %after, %copy ]
  %more = icmp ult i64 %at, %size
  br i1 %more, label %copy, label %done
copy:
  %source = getelementptr i8, ptr %from, i64 %at
  %word = load i64, ptr %source, align 8
  %target = getelementptr i8, ptr %there, i64 %at
  store i64 %word, ptr %target, align 8
  %after = add i64 %at, 8
  br label %next
done:
  ret void
}}

define void @nvshmem_uint64_p(ptr %to, i64 %word, i32 %device) alwaysinline {{
  %there = call ptr @there(ptr %to)
  store i64 %word, ptr %there, align 8
  ret void
}}

define void @nvshmem_uint32_atomic_add(ptr %to, i32 %word, i32 %device) alwaysinline {{
  %there = call ptr @there(ptr %to)
  %old = atomicrmw add ptr %there, i32 %word monotonic
  ret void
}}

define i32 @nvshmem_uint32_test(ptr %at, i32 %compare, i32 %value) alwaysinline {{
  call void @llvm.nvvm.membar.sys()
  ret i32 1
}}

define void @nvshmem_quiet() alwaysinline {{
  call void @llvm.nvvm.membar.sys()
  ret void
}}

define void @nvshmemx_signal_op(ptr %to, i64 %word, i32 %kind, i32 %device) alwaysinline {{
  %there = call ptr @there(ptr %to)
  store atomic i64 %word, ptr %there release, align 8
  ret void
}}

declare void @llvm.nvvm.membar.sys()
"""


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """Each two devices are a host."""
    known = layout.table

    def table(rank, mailboxes, offsets=None, **options):
        far = [place // 2 != rank // 2 for place in range(len(mailboxes))]
        boxes = [box + one * (BESIDE + layout.FAR) for box, one in zip(mailboxes, far, strict=True)]
        return known(rank, boxes, [one * BESIDE for one in far], **options)

    monkeypatch.setattr(layout, "table", table)
    monkeypatch.setattr(library, "required", lambda: None)
    monkeypatch.setattr(library, "original", lambda: LIBRARY)
    with config.scoped(peer_network="nvshmem", cache=False), pallasite.target("sm_90a"):
        yield


@pytest.mark.parametrize(
    ("count", "blocks", "size", "exit_barrier"), [(4, 1, 512, True), (3, 2, 96, None)]
)
def test_copies_and_signals(count, blocks, size, exit_barrier):
    mesh = mesh_of(x=count)
    x = rows(mesh, (blocks, size), np.float32)

    def gather(x_ref, out_ref, buffer, loaded, arrived):
        own, block = lax.axis_index("x"), lax.axis_index("block")
        plgpu.copy_gmem_to_smem(x_ref.at[block], buffer, loaded)
        plgpu.barrier_wait(loaded)

        def send(step, _):
            device = lax.rem(own + step, count)
            plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(out_ref.at[own, block], device))
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(arrived, device_id=device)

        lax.fori_loop(0, count, send, None)
        pl.semaphore_wait(arrived, count)

    kernel = plgpu.kernel(
        gather,
        out_type=jax.ShapeDtypeStruct((count, blocks, size), np.float32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((size,), np.float32), plgpu.Barrier(), SEMAPHORE],
        compiler_params=plgpu.CompilerParams(
            exit_barrier=exit_barrier, plugin_options=PARTIAL.plugin_options
        ),
    )
    for found in run(kernel, mesh, x):
        np.testing.assert_array_equal(found, x)


def test_signals_in_parallel():
    mesh = mesh_of(x=4)
    x = rows(mesh, (4,), np.int32)

    def meet(x_ref, out_ref, arrived):
        plgpu.semaphore_signal_parallel(
            *[plgpu.SemaphoreSignal(arrived, device_id=one, inc=one + 1) for one in range(4)]
        )
        pl.semaphore_wait(arrived, 4 * (lax.axis_index("x") + 1))
        out_ref[...] = x_ref[...]

    kernel = plgpu.kernel(
        meet, out_type=jax.ShapeDtypeStruct((4,), np.int32), scratch_types=[SEMAPHORE]
    )
    np.testing.assert_array_equal(run(kernel, mesh, x), x)


def _store(x_ref, out_ref, buffer):
    plgpu.remote_ref(out_ref, 0)[...] = x_ref[...]


def _load(x_ref, out_ref, buffer):
    out_ref[...] = plgpu.remote_ref(x_ref, 0)[...]


def _pieces(x_ref, out_ref, buffer):
    plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(out_ref, 0).at[:, 0:32])


def _reduction(x_ref, out_ref, buffer):
    plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(out_ref, 0).at[:, 0:32], reduction_op="add")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (_store, "swap of another device's array"),
        (_load, "get of another device's array"),
        (_pieces, "copy_smem_to_gmem of a window in several pieces of another device's array"),
        (_reduction, "copy_smem_to_gmem of a window in several pieces of another device's array"),
    ],
)
def test_what_no_network_does(body, what):
    mesh = mesh_of(x=2)
    x = rows(mesh, (8, 64), np.float32)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((8, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((8, 32), np.float32)],
    )
    with pytest.raises(UnsupportedError) as caught:
        run(kernel, mesh, x)
    told = str(caught.value)
    assert what in told and "network_cases.py" in told and "peer_network" in told
    assert "copy" in told.split("try:")[1]
