"""Several devices without JAX: compiled for an abstract mesh, run by ``simulate_devices``."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import pallasite
import pallasite_simulator
from pallasite import gpu as plgpu

COUNT = 3
SIZE = 512


def _compiled(body, scratch=(plgpu.SemaphoreType.REGULAR,)):
    mesh = AbstractMesh((COUNT,), ("x",))
    spec = PartitionSpec("x")
    out = jax.ShapeDtypeStruct((SIZE,), np.float32)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=list(scratch))
    call = jax.shard_map(
        lambda rows: kernel(rows[0])[None], mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((COUNT, SIZE), np.float32, sharding=sharding)
    return pallasite.compile(call, x, target="sm_90a")


def _push(x_ref, out_ref, semaphore):
    device = lax.rem(lax.axis_index("x") + 1, COUNT)
    plgpu.remote_ref(out_ref, device)[...] = x_ref[...]
    pl.semaphore_signal(semaphore, 1, device_id=device)
    pl.semaphore_wait(semaphore)


def _pull(x_ref, out_ref):
    device = lax.rem(lax.axis_index("x") + 1, COUNT)
    out_ref[...] = plgpu.remote_ref(x_ref, device)[...]


def test_outputs_and_bytes_between_devices():
    x = np.random.default_rng(0).standard_normal((COUNT, SIZE)).astype(np.float32)
    for body, scratch, shift in ((_push, [plgpu.SemaphoreType.REGULAR], 1), (_pull, [], -1)):
        compiled = _compiled(body, scratch)
        runs = pallasite_simulator.simulate_devices(compiled, [[row] for row in x], sanitize=True)
        found = [one.outputs[0] for one in runs]
        np.testing.assert_array_equal(found, np.roll(x, shift, axis=0))
        assert not runs[0].findings and not any(one.unwritten for one in runs)
        for device, one in enumerate(runs):
            links = one.statistics.links
            pair = (device, (device + 1) % COUNT) if shift == 1 else ((device + 1) % COUNT, device)
            # Besides the array: addresses, flags and signals.
            assert 4 * SIZE <= links[pair] < 4 * SIZE + 256
            assert one.statistics.link_bytes >= 4 * SIZE
            bound = {one.resource: one for one in one.statistics.estimate.bounds}
            assert bound["links to other devices"].seconds == one.statistics.link_bytes / 450e9
            assert "device 0 to device 1" in str(one.statistics)
            assert {"from", "to", "bytes"} <= set(one.statistics.as_json()["links"][0])


def test_findings_are_with_the_first():
    def body(x_ref, out_ref, semaphore):
        _push(x_ref, out_ref, semaphore)
        pl.semaphore_signal(semaphore)

    compiled = _compiled(body)
    inputs = [[np.zeros(SIZE, np.float32)]] * COUNT
    runs = pallasite_simulator.simulate_devices(compiled, inputs, sanitize=True)
    assert [len(one.findings) for one in runs] == [1, 0, 0]
    assert "not at zero" in str(runs[0].findings[0])


def test_outputs_are_checked_fast():
    """What a device leaves out, and what it adds to before anybody has written it."""

    def part(x_ref, out_ref, semaphore):
        device = lax.rem(lax.axis_index("x") + 1, COUNT)
        half = pl.ds(0, SIZE // 2)
        plgpu.remote_ref(out_ref, device)[half] = x_ref[half]
        pl.semaphore_signal(semaphore, 1, device_id=device)
        pl.semaphore_wait(semaphore)

    def adds(x_ref, out_ref, semaphore):
        device = lax.rem(lax.axis_index("x") + 1, COUNT)
        plgpu.atomic_add(plgpu.remote_ref(out_ref, device), x_ref[...])
        pl.semaphore_signal(semaphore, 1, device_id=device)
        pl.semaphore_wait(semaphore)

    def after(x_ref, out_ref, semaphore):
        _push(x_ref, out_ref, semaphore)
        out_ref[...] += x_ref[...]

    inputs = [[np.full(SIZE, device, np.float32)] for device in range(COUNT)]

    def found(body):
        runs = pallasite_simulator.simulate_devices(_compiled(body), inputs, sanitize="fast")
        return [one.kind for run in runs for one in run.findings]

    assert found(part) == ["output written in part"] * COUNT
    assert found(adds) == ["read of uninitialized global memory"] * COUNT
    assert not found(after)
