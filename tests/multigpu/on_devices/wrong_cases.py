"""Messages about wrong uses of other devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import LANE, SEMAPHORE, like, mesh_of, rows
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import pallasite
from pallasite import gpu as plgpu

MESH = {"a": 2, "b": 2}


def _compiled(body, *, target="sm_90a", scratch=(SEMAPHORE,), axes=None, mesh=None, **options):
    """Compiles a kernel of a (128,) array that every device of a 2 x 2 mesh runs."""
    mesh = mesh_of(**MESH) if mesh is None else mesh
    x = rows(mesh, (128,), np.float32)
    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=list(scratch), **options)
    names = mesh.axis_names if axes is None else axes
    call = jax.shard_map(
        lambda row: kernel(row[0])[None],
        mesh=mesh,
        in_specs=PartitionSpec(names),
        out_specs=PartitionSpec(names),
        axis_names=set(names),
        check_vma=False,
    )
    return pallasite.compile(call, x, target=target)


def _store(device):
    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(out_ref, device() if callable(device) else device)[...] = x_ref[...]

    return body


def _signal(device, **options):
    def body(x_ref, out_ref, semaphore):
        out_ref[...] = x_ref[...]
        plgpu.semaphore_signal(semaphore, device_id=device, **options)

    return body


_IDS = {
    "an axis that is not of the mesh": (
        {"c": 0},
        ["remote_ref: device_id names 'c', which is no axis of the device mesh", "['a', 'b']"],
    ),
    "out of range": (4, ["the device_id is out of range", "got: 4", "expected: 0 to 3"]),
    "computed, and always the same": (
        lambda: jnp.int32(3) * 3,
        ["the device_id is out of range", "got: 9", "expected: 0 to 3"],
    ),
    "negative": (-1, ["the device_id is out of range", "got: -1"]),
    "coordinate out of range": ((0, 2), ["coordinate along 'b' is out of range", "2 devices"]),
    "out of range by name": ({"a": 5}, ["coordinate along 'a' is out of range", "got: 5"]),
    "too few coordinates": ((0,), ["another number of coordinates", "2: one for each of"]),
    "a float": (lambda: 1.5, ["device_id is no int32 scalar"]),
    "other integers": (
        lambda: lax.axis_index("a").astype(jnp.int16),
        ["device_id is no int32 scalar", "int16", "x.astype(jnp.int32)"],
    ),
    "arrays": (lambda: jnp.zeros((2,), jnp.int32), ["device_id is no int32 scalar"]),
    "none": (None, ["device_id says no device"]),
    "a coordinate by name that is no integer": (
        {"a": 0.5},
        ["device_id['a'] is no int32 scalar"],
    ),
}


@pytest.mark.parametrize("case", _IDS)
def test_device_ids(case):
    device, expected = _IDS[case]
    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(_store(device))
    _check(caught, expected)


def _check(caught, expected):
    message = str(caught.value)
    assert "wrong_cases.py:" in message
    for part in expected:
        assert part in message, message


def test_signals_with_wrong_ids():
    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(_signal(7))
    _check(caught, ["semaphore_signal: the device_id is out of range", "got: 7"])


def test_semaphores_of_others_are_named_by_their_device():
    """They can be read; JAX asks for the shape of what is signalled or waited for."""

    def signal(x_ref, out_ref, semaphore):
        pl.semaphore_signal(plgpu.remote_ref(semaphore, 1))

    def wait(x_ref, out_ref, semaphore):
        pl.semaphore_wait(plgpu.remote_ref(semaphore, 1))

    for body in (signal, wait):
        with pytest.raises(pallasite.PallasiteError) as caught:
            _compiled(body)
        _check(caught, ["the semaphore of a remote_ref", "pl.semaphore_signal(sem, device_id="])


def test_signals_of_the_device_alone_do_not_reach_others():
    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(_signal(1, memory_scope="gpu"))
    _check(caught, ['memory_scope="gpu" does not reach another device', 'use memory_scope="sys"'])


def test_shared_memory_has_no_remote_reference():
    def body(x_ref, out_ref, buffer):
        plgpu.remote_ref(buffer, 0)[...] = x_ref[...]

    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(body, scratch=[plgpu.SMEM((128,), np.float32)])
    _check(caught, ["remote_ref of something that is not in global memory", "copy to global"])


def test_one_device_or_all():
    def first(x_ref, out_ref, semaphore):
        plgpu.remote_ref(plgpu.multicast_ref(out_ref, ("a", "b")), 0)[...] = x_ref[...]

    def second(x_ref, out_ref, semaphore):
        plgpu.multicast_ref(plgpu.remote_ref(out_ref, 0), ("a", "b"))[...] = x_ref[...]

    def third(x_ref, out_ref, semaphore):
        plgpu.remote_ref(plgpu.remote_ref(out_ref, 0), 1)[...] = x_ref[...]

    for body, text in (
        (first, "remote_ref of a multicast reference, which stands for all devices"),
        (second, "multicast_ref of a reference to another device's array"),
        (third, "remote_ref of a reference to another device's array"),
    ):
        with pytest.raises(pallasite.PallasiteError) as caught:
            _compiled(body)
        _check(caught, [text, "this device's array"])


def test_constants_of_the_kernel_are_not_on_other_devices():
    constant = np.arange(128, dtype=np.float32)

    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(constant, 0)[...] = x_ref[...]

    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(body)
    _check(caught, ["is not a reference"])


def _alone(body):
    x = np.zeros((128,), np.float32)
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), np.float32), scratch_types=[SEMAPHORE]
    )
    return pallasite.compile(kernel, x, target="sm_90a")


@pytest.mark.parametrize("body", [_store(0), _signal(0)], ids=["remote_ref", "semaphore_signal"])
def test_outside_of_shard_map(body):
    with pytest.raises(pallasite.PallasiteError) as caught:
        _alone(body)
    _check(caught, ["outside of jax.shard_map", "over all axes of the mesh"])


@pytest.mark.parametrize("body", [_store(0), _signal(0)], ids=["remote_ref", "semaphore_signal"])
def test_axes_that_are_not_manual(body):
    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(body, axes=("a",))
    _check(caught, ["some axes of the device mesh are not manual", "over all axes of the mesh"])


def _multicast(use):
    def body(x_ref, out_ref, semaphore):
        use(x_ref, out_ref, semaphore)

    return body


_MULTICASTS = {
    "multimem_store": lambda axes: lambda x, out, sem: plgpu.multimem_store(x[...], out, axes),
    "semaphore_signal_multicast": lambda axes: (
        lambda x, out, sem: plgpu.semaphore_signal_multicast(sem, collective_axes=axes)
    ),
    "multimem_load_reduce": lambda axes: (
        lambda x, out, sem: out.__setitem__(
            ..., plgpu.multimem_load_reduce(x, collective_axes=axes, reduction_op="add")
        )
    ),
}


@pytest.mark.parametrize("name", _MULTICASTS)
def test_multicast_along_some_axes(name):
    with pytest.raises(NotImplementedError) as caught:
        _compiled(_multicast(_MULTICASTS[name]("a")), compiler_params=LANE)
    _check(caught, [f"{name} along some axes of the device mesh only", "all of ['a', 'b']"])
    with pytest.raises(pallasite.PallasiteError) as caught:
        _compiled(_multicast(_MULTICASTS[name](("a", "z"))), compiler_params=LANE)
    _check(caught, [f"{name} along 'z', which is no axis of the device mesh"])


def test_what_multicast_hardware_does_not_compute():
    x32 = jax.ShapeDtypeStruct((128,), np.float32)

    def load(operation, out, *arguments):
        def body(x_ref, out_ref):
            out_ref[...] = plgpu.multimem_load_reduce(
                x_ref, collective_axes=("a", "b"), reduction_op=operation
            )

        kernel = plgpu.kernel(body, out_type=out, compiler_params=LANE)
        mesh = mesh_of(**MESH)
        spec = PartitionSpec(("a", "b"))
        x = jax.ShapeDtypeStruct((4, *out.shape), out.dtype)
        call = jax.shard_map(
            lambda row: kernel(row[0])[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return pallasite.compile(call, x, target="sm_90a")

    for operation, out, expected in (
        ("min", x32, ["cannot compute 'min' of float32"]),
        ("mean", x32, ["reduction_op is unknown", "'mean'", "'add'"]),
        ("xor", x32, ["cannot compute 'xor' of float32", "int32"]),
        (
            "add",
            jax.ShapeDtypeStruct((128,), jnp.float8_e4m3fn),
            ["multimem_load_reduce of float8_e4m3fn on sm_90a", "sm_100a"],
        ),
        ("add", jax.ShapeDtypeStruct((3,), np.float16), ["one by one", "next to each other"]),
        ("add", jax.ShapeDtypeStruct((128,), np.int8), ["cannot compute 'add' of int8"]),
    ):
        with pytest.raises(pallasite.PallasiteError) as caught:
            load(operation, out)
        _check(caught, expected)


def test_multicast_references_are_only_copied_to():
    def read(x_ref, out_ref, semaphore):
        out_ref[...] = plgpu.multicast_ref(x_ref, ("a", "b"))[...]

    def write(x_ref, out_ref, semaphore):
        plgpu.multicast_ref(out_ref, ("a", "b"))[...] = x_ref[...]

    for body in (read, write):
        with pytest.raises(pallasite.PallasiteError) as caught:
            _compiled(body)
        _check(caught, ["cannot access the memory of all devices at once", "multimem_store"])


def test_windows_in_pieces_need_changed_descriptors():
    def rows_of_matrix(x_ref, out_ref, buffer, barrier):
        source = plgpu.remote_ref(x_ref.at[0:8, 0:16], 0)
        plgpu.copy_gmem_to_smem(source, buffer, barrier)

    mesh = mesh_of(**MESH)
    x = rows(mesh, (16, 64), np.float32)
    kernel = plgpu.kernel(
        rows_of_matrix,
        out_type=like(x),
        scratch_types=[plgpu.SMEM((8, 16), np.float32), plgpu.Barrier()],
    )
    spec = PartitionSpec(("a", "b"))
    call = jax.shard_map(
        lambda row: kernel(row[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with pytest.raises(pallasite.PallasiteError) as caught:
        pallasite.compile(call, x, target="sm_90")
    _check(caught, ["in several pieces to or from another device", "sm_90a"])


def test_meshes_with_too_many_devices():
    mesh = jax.sharding.AbstractMesh((40,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((40, 128), np.float32, sharding=sharding)
    kernel = plgpu.kernel(
        _store(0), out_type=jax.ShapeDtypeStruct((128,), np.float32), scratch_types=[SEMAPHORE]
    )
    spec = PartitionSpec("x")
    call = jax.shard_map(
        lambda row: kernel(row[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with pytest.raises(pallasite.PallasiteError) as caught:
        pallasite.compile(call, x, target="sm_90a")
    _check(caught, ["a mesh that has too many", "40 devices", "at most 32"])


def test_arguments_of_signals_and_stores():
    calls = {
        "takes signals": lambda x, out, sem: plgpu.semaphore_signal_parallel(sem),
        "is not a semaphore": lambda x, out, sem: plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(x, device_id=0)
        ),
        "is not an integer scalar": lambda x, out, sem: plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(sem, device_id=0, inc=1.5)
        ),
        "of another dtype": lambda x, out, sem: plgpu.multimem_store(
            x[...].astype(jnp.int32), out, ("a", "b")
        ),
        "of another shape": lambda x, out, sem: plgpu.multimem_store(x[0:64], out, ("a", "b")),
        "of a view of other devices' arrays": lambda x, out, sem: plgpu.multimem_store(
            x[...], plgpu.remote_ref(out, 0), ("a", "b")
        ),
    }
    for text, use in calls.items():
        with pytest.raises(pallasite.PallasiteError) as caught:
            _compiled(_multicast(use), compiler_params=LANE)
        _check(caught, [text])


def test_a_device_that_does_not_come(monkeypatch):
    from pallasite_simulator.devices import meeting

    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    mesh = mesh_of(x=3)
    x = rows(mesh, (128,), np.float32)

    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(out_ref, 0)[...] = x_ref[...]

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    spec = PartitionSpec("x")

    def program(row):
        take = lax.axis_index("x") != 1
        return lax.cond(take, lambda one: kernel(one[0])[None], lambda one: one, row)

    call = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(pallasite.PallasiteError) as caught, pallasite.kernel_errors():
        jax.block_until_ready(jax.jit(call)(x))
    expected = ("devices 0, 2 came, device 1 did not", "3 devices", "within 0.5 s")
    for part in ("wrong_cases.py:", *expected):
        assert part in str(caught.value)


def test_too_many_buffers():
    count = 64

    def body(x_ref, *refs):
        for ref in refs:
            plgpu.remote_ref(ref, 0)[...] = x_ref[...]

    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.float32)
    kernel = plgpu.kernel(body, out_type=(like(x),) * count)
    spec = PartitionSpec("x")
    call = jax.shard_map(
        lambda row: [one[None] for one in kernel(row[0])],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    with pytest.raises(pallasite.PallasiteError) as caught:
        pallasite.compile(call, x, target="sm_90a")
    _check(caught, ["too many of its buffers", "at most 63"])
