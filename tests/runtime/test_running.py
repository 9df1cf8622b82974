"""Running kernels: buffers, clusters, programs, caches. A GPU needs compute capability 9.0."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_kernels import add_kernel, element, inputs, kernel, outputs, scratch, tensor_map
from jax.sharding import AxisType, PartitionSpec
from sample_kernels import CASES, by_pallas_call, pipelined, scaled

from pallasite import config
from pallasite import gpu as plgpu
from pallasite.launch import ArrayParameter
from pallasite.runtime import clear_memory
from pallasite.runtime.executors import find_executor

pytestmark = pytest.mark.runs_kernels


def launch(compiled, *operands):
    """Runs a compiled kernel on JAX's default platform."""
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return find_executor(platform, compiled.name)(compiled, *operands)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    clear_memory()
    with config.scoped(cache_dir=tmp_path):
        yield


def store(pointer, value, index="%tid"):
    name = pointer.strip("%")
    return element(pointer, f"%a{name}", index) + (
        f"  store float {value}, ptr addrspace(1) %a{name}\n"
    )


def load(pointer, result, index="%tid"):
    name = pointer.strip("%")
    return element(pointer, f"%l{name}", index) + (
        f"  {result} = load float, ptr addrspace(1) %l{name}\n"
    )


def test_add():
    x = jnp.arange(128.0)
    np.testing.assert_array_equal(launch(add_kernel(), x)[0], x + 1)
    jitted = jax.jit(lambda x: launch(add_kernel(), x)[0])
    for _ in range(3):
        np.testing.assert_array_equal(jitted(x), x + 1)


def test_inputs_passed_several_times_and_not_at_all():
    a, b, c = inputs((128,), (128,), (128,))
    (out,) = outputs((128,))
    body = load("%p0", "%x") + load("%p1", "%y") + load("%p2", "%z")
    body += "  %s = fadd float %x, %y\n  %t = fadd float %s, %z\n" + store("%p3", "%t")
    parameters = [ArrayParameter(buffer) for buffer in (c, a, a, out)]
    compiled = kernel(body, parameters, [a, b, c], [out])
    x, y, z = jnp.full(128, 1.0), jnp.full(128, 10.0), jnp.full(128, 100.0)
    np.testing.assert_array_equal(launch(compiled, x, y, z)[0], np.full(128, 102.0))


def test_two_parameters_of_one_output_share_its_memory():
    """Lanes below 64 write through the one pointer, the others through the other."""
    (out, other) = outputs((128,), (128,))
    body = (
        store("%p2", "7.0")
        + "  %low = icmp ult i32 %tid, 64\n"
        + "  %p = select i1 %low, ptr addrspace(1) %p0, ptr addrspace(1) %p1\n"
        + "  %f = uitofp i32 %tid to float\n"
        + store("%p", "%f")
    )
    parameters = [ArrayParameter(out), ArrayParameter(out, slot=1), ArrayParameter(other)]
    compiled = kernel(body, parameters, [], [out, other])
    first, second = jax.jit(lambda: launch(compiled))()
    np.testing.assert_array_equal(first, np.arange(128.0))
    np.testing.assert_array_equal(second, np.full(128, 7.0))


@pytest.mark.parametrize("through", ["input", "output", "both"])
def test_aliased_arrays(through, pallasite_executor):
    (x, y), (other, out) = inputs((128,), (128,)), outputs((128,), (128,))
    shared = {"input": [y], "output": [out], "both": [y, out]}[through]
    target = f"%p{1 + len(shared)}"
    body = load("%p0", "%a") + load("%p2", "%b")
    body += "  %s = fadd float %a, %b\n" + store(target, "%s") + store("%p1", "%a")
    parameters = [ArrayParameter(buffer) for buffer in (x, other, *shared)]
    compiled = kernel(body, parameters, [x, y], [other, out], aliases=((1, 1),))
    a, b = jnp.full(128, 1.0), jnp.arange(128.0)
    fn = jax.jit(lambda a, b: launch(compiled, a, b))
    first, second = fn(a, b)
    np.testing.assert_array_equal(first, a)
    np.testing.assert_array_equal(second, np.arange(128.0) + 1)
    np.testing.assert_array_equal(b, np.arange(128.0))  # Not donated: JAX made a copy.
    donated = jax.jit(lambda a, b: launch(compiled, a, b)[1], donate_argnums=1)
    pointer = b.unsafe_buffer_pointer()
    result = donated(a, b)
    assert pallasite_executor != "gpu" or result.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(result, np.arange(128.0) + 1)


def test_zeroed_scratch_is_zero_at_every_launch():
    (out,), (s,) = outputs((128,)), scratch((128,), zeroed=True)
    body = (
        load("%p0", "%x") + "  %y = fadd float %x, 1.0\n" + store("%p0", "%y") + store("%p1", "%y")
    )
    compiled = kernel(body, [ArrayParameter(s), ArrayParameter(out)], [], [out], [s])
    fn = jax.jit(lambda: launch(compiled)[0])
    for _ in range(5):
        np.testing.assert_array_equal(fn(), np.ones(128))


def test_clusters():
    (out,) = outputs((128,))
    body = (
        "  %n = call i32 @llvm.nvvm.read.ptx.sreg.cluster.nctaid.x()\n"
        "  %f = uitofp i32 %n to float\n" + store("%p0", "%f")
    )
    compiled = kernel(body, [ArrayParameter(out)], [], [out], grid=(8, 1, 1), cluster=(4, 1, 1))
    np.testing.assert_array_equal(launch(compiled)[0], np.full(128, 4.0))


def test_descriptors_are_accepted():
    """The launcher encodes a descriptor for each combination; the kernel ignores them."""
    (x,), (out,) = inputs((256, 256)), outputs((256, 256))
    maps = [tensor_map(x, (64, 32), 16), tensor_map(x, (64, 32), 128), tensor_map(out, (64, 32))]
    bfloat16 = dataclasses.replace(maps[0], element_type=7, strides=(512, 1))
    body = store("%p5", "3.0")
    parameters = [maps[0], maps[1], bfloat16, maps[2]]
    compiled = kernel(body.replace("%p5", "%p4"), [*parameters, ArrayParameter(out)], [x], [out])
    result = launch(compiled, jnp.zeros((256, 256)))[0]
    np.testing.assert_array_equal(result.reshape(-1)[:128], np.full(128, 3.0))


def test_several_kernels_in_one_program():
    first, second = add_kernel(name="first"), add_kernel(name="second", constant=2.0)

    @jax.jit
    def program(x):
        def step(_, v):
            return launch(second, launch(first, v)[0])[0] * 2

        return jax.lax.fori_loop(0, 3, step, x)

    expected = np.arange(128.0)
    for _ in range(3):
        expected = (expected + 3) * 2
    np.testing.assert_array_equal(program(jnp.arange(128.0)), expected)


def test_empty_launches():
    compiled = add_kernel()
    empty = dataclasses.replace(
        compiled, launch=dataclasses.replace(compiled.launch, grid=(0, 1, 1))
    )
    np.testing.assert_array_equal(launch(empty, jnp.ones(128))[0], np.zeros(128))


def test_transposed_operands_arrive_row_major():
    (x,), (out,) = inputs((8, 16)), outputs((8, 16))
    body = load("%p0", "%v") + store("%p1", "%v")
    compiled = kernel(body, [ArrayParameter(x), ArrayParameter(out)], [x], [out])
    value = jnp.arange(128.0).reshape(16, 8)
    result = jax.jit(lambda v: launch(compiled, v.T)[0] + 0)(value)
    np.testing.assert_array_equal(result, np.asarray(value).T)


# Through the whole compiler.


def test_kernel():
    x = jnp.arange(128.0)
    np.testing.assert_array_equal(scaled()(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: scaled(3.0)(scaled()(x)))(x), 6 * x)


def test_vmap():
    x = jax.random.normal(jax.random.key(0), (3, 4, 128))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(scaled()))(x), 2 * x)


@pytest.mark.parametrize("dtype", [np.float64, np.uint64, np.int64])
@pytest.mark.parametrize("shape", [(), (128,), (3, 43)], ids=str)
def test_elements_of_64_bits_where_only_the_program_knows_of_them(dtype, shape):
    double = scaled(2)
    with jax.enable_x64(True):
        x = jnp.asarray(np.arange(np.prod(shape)).reshape(shape) + (1 << 40) + 1, dtype)
        compiled = jax.jit(lambda x: (double(x), double(x.astype(jnp.float32)))).lower(x).compile()
        expected = [np.asarray(x) * 2, np.asarray(x).astype(np.float32) * 2]
    for one, other in zip(compiled(x), expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), other)


def test_donated_kernel_argument(pallasite_executor):
    fn = jax.jit(scaled(aliases={0: 0}), donate_argnums=0)
    x = jnp.arange(128.0)
    pointer = x.unsafe_buffer_pointer()
    result = fn(x)
    np.testing.assert_array_equal(result, 2 * np.arange(128.0))
    assert pallasite_executor != "gpu" or result.unsafe_buffer_pointer() == pointer


def test_copies_and_pipelines():
    x = jax.random.normal(jax.random.key(0), (128, 128))
    np.testing.assert_array_equal(CASES["copy"][0]()(x), x)
    x = jax.random.normal(jax.random.key(0), (256, 256))
    np.testing.assert_array_equal(pipelined()(x), 2 * x)
    np.testing.assert_array_equal(by_pallas_call()(x), x + 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shard_map(count):
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
    spec = PartitionSpec("x")
    fn = jax.jit(jax.shard_map(scaled(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.arange(128.0 * count), jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(fn(x), 2 * np.arange(128.0 * count))


def test_explicit_sharding():
    """Under a mesh of explicit axes, ``jnp`` functions put equations about it into a kernel."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    spec = PartitionSpec("x")

    def body(x_ref, out_ref):
        value = x_ref[...]
        out_ref[...] = jnp.where(value > 0, value, 0)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    x = jax.random.normal(jax.random.key(0), (128,))
    with jax.set_mesh(mesh):
        fn = jax.jit(jax.shard_map(kernel, in_specs=spec, out_specs=spec, check_vma=False))
        result = fn(jax.device_put(x, spec))
    np.testing.assert_array_equal(result, np.maximum(x, 0))


def _logarithm(x_ref, out_ref):
    out_ref[...] = jnp.log(x_ref[...])


@pytest.mark.parametrize("through", [lambda kernel: kernel, jax.jit])
@pytest.mark.parametrize("check, value", [(jax.debug_nans, -1.0), (jax.debug_infs, 0.0)])
def test_checks_of_values_name_the_kernel(through, check, value):
    kernel = plgpu.kernel(_logarithm, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    with check(True):
        np.testing.assert_array_equal(through(kernel)(jnp.ones(128)), np.zeros(128))
        with pytest.raises(FloatingPointError, match="encountered in kernel _?logarithm"):
            through(kernel)(jnp.full(128, value))


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from sample_kernels import scaled
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
fn = jax.jit(lambda x: scaled()(x) + 1)
x = jnp.arange(128.0)
np.testing.assert_array_equal(fn(x), 2 * np.arange(128.0) + 1)
from pallasite.runtime import cache_info
hits = sum(name == "/jax/compilation_cache/cache_hits" for name in events)
print(cache_info().compiles, hits > 0)
"""


@pytest.mark.gpu
def test_second_process_uses_both_caches(tmp_path):
    """JAX does not keep programs that call back into Python, so only on a GPU."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PALLASITE_CACHE_DIR": str(tmp_path / "kernels"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }

    def run():
        return subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        ).stdout.splitlines()[-1]

    assert run() == "1 False"
    assert run() == "0 True"
