"""Kernels that give up: device ids that are found to be wrong, kernels that meet others."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from devices_support import SEMAPHORE, like, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import ExecutionError
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.simulation.memory import SimulatedTables
from pallasite_simulator.devices import execution
from pallasite_simulator.devices.joint import run_devices


def _compiled(body, count, **options):
    mesh = mesh_of(x=count)
    x = rows(mesh, (128,), np.int32)
    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE], **options)
    spec = PartitionSpec("x")
    call = jax.shard_map(
        lambda row: kernel(row[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return pallasite.compile(call, x, target="sm_90a"), x


def _to(device):
    """A kernel that writes to a device and tells it so."""

    def body(x_ref, out_ref, semaphore):
        there = device(x_ref)
        plgpu.remote_ref(out_ref, there)[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=there)
        pl.semaphore_wait(semaphore)

    return body


@pytest.mark.parametrize("wrong", [2, -1, 2**30])
def test_device_ids_from_memory(wrong):
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)
    x[:, 0] = [1, 0]
    body = _to(lambda x_ref: x_ref[0])
    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    np.testing.assert_array_equal(run(kernel, mesh, x), x[::-1])
    x[1, 0] = wrong
    with pytest.raises(ExecutionError) as caught:
        run(kernel, mesh, x)
    text = f"kernel 'body': device 1 was given the device id {wrong}, which is out of range"
    assert text in str(caught.value) and "traps_cases.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "checked"),
    [
        (lambda _: lax.rem(lax.axis_index("x") + 3, 4), False),
        (lambda _: lax.rem(lax.axis_index("x") * 7 + 1, 3), False),
        (lambda _: 3 - lax.axis_index("x"), False),
        (lambda _: lax.div(lax.axis_index("x"), 2), False),
        (lambda x_ref: lax.min(lax.max(x_ref[0], 0), 3), False),
        (lambda _: lax.select(lax.axis_index("x") > 1, np.int32(0), np.int32(3)), False),
        (lambda x_ref: x_ref[0], True),
        (lambda x_ref: lax.rem(x_ref[0], 4), True),
        (lambda _: lax.axis_index("x") + 1, True),
        (lambda _: lax.axis_index("x") - 1, True),
        (lambda _: {"x": 4 - lax.axis_index("x")}, True),
    ],
)
def test_ids_that_are_surely_in_range_are_not_checked(device, checked):
    compiled, _ = _compiled(_to(device), 4)
    assert ("GIVE_UP" in compiled.ptx) == checked


def test_devices_that_run_other_kernels():
    one, x = _compiled(_to(lambda _: 1 - lax.axis_index("x")), 2)

    def body(x_ref, out_ref, semaphore):
        _to(lambda _: 1 - lax.axis_index("x"))(x_ref, out_ref, semaphore)
        out_ref[0] = 3

    other, _ = _compiled(body, 2)
    inputs = {rank: [row] for rank, row in enumerate(x)}
    (_, launches, state), (_, others, _) = (execution.prepare(k, inputs, 2) for k in (one, other))
    launches[1] = dataclasses.replace(launches[1], program=others[1].program)
    with pytest.raises(ExecutionError) as caught:
        run_devices(launches, state)
    assert "met another kernel on another device of its mesh" in str(caught.value)


class _Busy(SimulatedTables):
    """Mailboxes of devices where one block of another kernel has begun."""

    def _mailbox(self, epoch):
        contents = super()._mailbox(epoch)
        contents[layout.TICKETS] = 1
        return contents


@pytest.mark.parametrize("blocks", [1, 4])
def test_two_kernels_on_a_device_at_once(monkeypatch, blocks):
    """A block of another kernel has taken a ticket: then one of this kernel gets one too many, or
    finds that others have announced another launch."""
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        @pl.when(lax.axis_index("block") == 0)
        def _():
            _to(lambda _: 1 - lax.axis_index("x"))(x_ref, out_ref, semaphore)

    kernel = plgpu.kernel(
        body,
        out_type=like(x),
        scratch_types=[SEMAPHORE],
        grid=(blocks,),
        grid_names=("block",),
    )
    np.testing.assert_array_equal(run(kernel, mesh, x), x[::-1])
    monkeypatch.setattr(execution, "provider_of", lambda one: _Provider())
    with pytest.raises(ExecutionError) as caught:
        run(kernel, mesh, x)
    text = "device 0 met another communicating kernel on its device at the same time"
    assert f"kernel 'body': {text}" in str(caught.value)


class _Provider:
    def simulated(self, compiled, count, *, communicates, **_):
        return _Busy(count, communicates)
