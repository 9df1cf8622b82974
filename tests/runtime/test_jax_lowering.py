"""Kernels inside JAX programs: lowered for CUDA without a GPU, run by an executor on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_kernels import SM_90A, add_kernel, inputs, outputs
from jax.sharding import PartitionSpec
from sample_kernels import by_pallas_call, conditional, scaled, shape, specs

import pallasite
from pallasite import config, plugins
from pallasite.errors import ExecutionError, InvalidTypeError
from pallasite.language.kernel_call import kernel_call_p
from pallasite.launch import ArrayParameter, DeviceMesh
from pallasite.launch_plan import canonical_order
from pallasite.runtime import clear_memory, compiler
from pallasite.runtime.executors import check_device
from pallasite.runtime.override import override
from pallasite.target_selection import find_target
from pallasite.targets import Target
from pallasite_std.host_calls import run_on_host

GPU_WHEEL = pytest.mark.skipif(
    not pytest.importorskip("importlib.util").find_spec("jax_cuda13_plugin"),
    reason="building the call needs the CUDA plugin's wheel",
)


@pytest.fixture(autouse=True)
def _fake_compiler(monkeypatch, tmp_path):
    """Kernels compile to a launch of the right shape, with one pointer for each array."""

    def compile_(request):
        spec = request.spec
        ins = inputs(*[aval.shape for aval in spec.in_avals])
        outs = outputs(*[aval.shape for aval in spec.out_avals])
        aliases = tuple(spec.input_output_aliases)
        parameters = [ArrayParameter(b) for b in (*ins, *outs)]
        launch = dataclasses.replace(
            add_kernel().launch,
            inputs=ins,
            outputs=outs,
            aliases=aliases,
            parameters=canonical_order(parameters, aliases),
        )
        return dataclasses.replace(add_kernel(name=spec.name), launch=launch)

    monkeypatch.setattr(compiler, "_compile", compile_)
    clear_memory()
    with config.scoped(cache_dir=tmp_path, target="sm_90"):
        yield
    clear_memory()


class _Doubling:
    """A plugin whose executor doubles every input."""

    def __init__(self, execute=None):
        self.calls = []
        self.execute = execute or self.double

    def double(self, compiled, arrays):
        self.calls.append(compiled.name)
        assert all(type(array) is np.ndarray for array in arrays)
        return [2 * array for array in arrays]

    def run(self, compiled, *operands, request):
        return run_on_host(self.execute, compiled, *operands, request=request)

    @pallasite.hookimpl
    def pallasite_executors(self):
        return [
            pallasite.Executor(name="doubling", platforms=("cpu",), run=self.run, priority=1000)
        ]


@pytest.fixture
def doubling():
    plugin = _Doubling()
    plugins.register(plugin, "doubling")
    yield plugin
    plugins.unregister("doubling")


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text):
    return text.count("@triton_kernel_call_ffi")


@GPU_WHEEL
def test_kernel_becomes_the_custom_call():
    assert custom_calls(lowered(scaled(), shape(128))) == 1


@GPU_WHEEL
def test_several_kernels_in_one_program():
    text = lowered(lambda x: scaled(2.0)(scaled(3.0)(x)), shape(128))
    assert custom_calls(text) == 2


@GPU_WHEEL
def test_aliased_and_donated_input():
    fn = jax.jit(scaled(aliases={0: 0}), donate_argnums=0)
    text = fn.trace(shape(128)).lower(lowering_platforms=("cuda",)).as_text()
    assert "tf.aliasing_output = 0" in text
    assert "output_operand_alias" in text


@GPU_WHEEL
def test_pallas_call_with_our_parameters():
    assert custom_calls(lowered(by_pallas_call(), shape(256, 256))) == 1


@GPU_WHEEL
def test_kernels_that_print_are_kept():
    assert "has_side_effect = true" in lowered(lambda x: conditional()(x)[0], shape(128))
    assert "has_side_effect = true" not in lowered(lambda x: scaled()(x)[0], shape(128))


@GPU_WHEEL
def test_vmap():
    text = lowered(jax.vmap(scaled()), shape(4, 128))
    assert custom_calls(text) == 1
    assert "tensor<4x128xf32>" in text


@GPU_WHEEL
def test_shard_map_calls_the_kernel_on_the_part_of_a_device():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    requests = []
    compile_ = compiler._compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_compile", lambda r: (requests.append(r), compile_(r))[1])
        spec = PartitionSpec("x")
        fn = jax.shard_map(scaled(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        x = jax.ShapeDtypeStruct(
            (256,), jnp.float32, sharding=jax.NamedSharding(mesh, PartitionSpec("x"))
        )
        pallasite.compile(fn, x)
    assert requests[0].device_mesh == DeviceMesh((("x", 2),), ("x",))
    assert requests[0].spec.in_avals[0].shape == (128,)


SCRIPT = """
import hashlib, jax
from sample_kernels import scaled, shape
text = jax.jit(scaled()).trace(shape(128)).lower(lowering_platforms=("cuda",)).as_text()
assert "triton_kernel_call_ffi" in text
print(hashlib.sha256(text.encode()).hexdigest())
"""


@GPU_WHEEL
def test_programs_are_the_same_in_every_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env={
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": ":".join(sys.path),
                "JAX_PLATFORMS": "cpu",
                "PALLASITE_TARGET": "sm_90",
                "PALLASITE_CACHE": "off",
            },
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_without_an_executor():
    with (
        config.scoped(disabled_plugins="simulator"),
        pytest.raises(ExecutionError, match="'scaled' cannot run on the CPU") as error,
    ):
        scaled()(jnp.ones(128))
    assert "enable plugin 'simulator'" in str(error.value)
    assert "pallasite.compile" in str(error.value)


def test_other_platforms():
    with pytest.raises(ExecutionError, match="cannot run on platform 'rocm'"):
        jax.jit(scaled()).trace(shape(128)).lower(lowering_platforms=("rocm",))


def test_executor_eagerly_and_jitted(doubling):
    x = jnp.arange(128.0)
    np.testing.assert_array_equal(scaled()(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: scaled()(x) + 1)(x), 2 * x + 1)
    assert doubling.calls == ["scaled", "scaled"]


def test_executor_in_loops_and_with_donation(doubling):
    kernel = scaled(aliases={0: 0})

    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 5, lambda _, v: kernel(v), x)

    np.testing.assert_array_equal(program(jnp.ones(128)), 32 * np.ones(128))
    jitted = jax.jit(kernel, donate_argnums=0)
    np.testing.assert_array_equal(jitted(jnp.ones(128)), 2 * np.ones(128))


def test_executor_under_vmap(doubling):
    x = jnp.arange(512.0).reshape(4, 128)
    np.testing.assert_array_equal(jax.vmap(scaled())(x), 2 * x)
    assert doubling.calls == ["scaled"]


def test_executor_under_shard_map(doubling):
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    spec = PartitionSpec("x")
    fn = jax.shard_map(scaled(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jnp.arange(128.0 * len(devices))
    with jax.set_mesh(mesh):
        result = jax.jit(fn)(jax.device_put(x, jax.NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(result, 2 * x)


def test_large_arrays_do_not_hang(doubling):
    x = jnp.ones((2048, 2048))
    fn = jax.jit(lambda x: scaled()(scaled()(x)) + scaled(3.0)(x))
    np.testing.assert_array_equal(fn(x), 6 * np.ones((2048, 2048)))


def test_pallas_call_on_the_cpu(doubling):
    x = jnp.ones((256, 256))
    np.testing.assert_array_equal(by_pallas_call()(x), 2 * x)


def test_pallas_calls_that_are_not_ours_are_left_alone():
    from jax.experimental import pallas as pl

    def body(x, o):
        o[...] = x[...] + 1

    x = jnp.ones(128)
    ours = pl.pallas_call(body, out_shape=shape(128), interpret=True)
    np.testing.assert_array_equal(ours(x), x + 1)
    with pytest.raises(ValueError, match="Only interpret mode"):
        pl.pallas_call(body, out_shape=shape(128))(x)


@contextlib.contextmanager
def executor(execute):
    plugins.register(_Doubling(execute), "other")
    try:
        yield
    finally:
        plugins.unregister("other")


def test_executors_that_return_nonsense():
    nonsense = executor(lambda compiled, arrays: [np.zeros(3)])
    with nonsense, pytest.raises(ExecutionError, match="wrong outputs of kernel 'scaled'"):
        jax.block_until_ready(scaled()(jnp.ones(128)))


def fails_on_negative_numbers(compiled, arrays):
    if arrays[0][0] < 0:
        raise ExecutionError("a negative number", got=arrays[0][0], hint="try another")
    return [2 * array for array in arrays]


def test_errors_come_out_of_kernels_that_run_eagerly():
    with executor(fails_on_negative_numbers):
        np.testing.assert_array_equal(scaled()(jnp.ones(128)), np.full(128, 2.0))
        with pytest.raises(ExecutionError, match="a negative number") as caught:
            scaled()(jnp.full(128, -1.0))
    assert (caught.value.got, caught.value.hint) == (-1.0, "try another")


def test_errors_of_jitted_functions():
    """JAX raises an error of its own; the context gives the original one, again and again."""
    with executor(fails_on_negative_numbers):
        fn = jax.jit(lambda x: scaled()(x) + 1)
        for _ in range(2):
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
                jax.block_until_ready(fn(jnp.full(128, -3.0)))
            assert str(caught.value).endswith(
                "ExecutionError: a negative number\n  got: -3.0\n  try: try another"
            )
            with pytest.raises(ExecutionError, match="got: -2.0"), pallasite.kernel_errors():
                jax.block_until_ready(fn(jnp.full(128, -2.0)))
            np.testing.assert_array_equal(fn(jnp.ones(128)), np.full(128, 3.0))


def test_other_errors_pass_unchanged():
    with pytest.raises(ValueError, match="^mine$"), pallasite.kernel_errors():
        raise ValueError("mine")
    with executor(lambda compiled, arrays: 1 // 0):
        with pytest.raises(ZeroDivisionError) as caught, pallasite.kernel_errors():
            jax.block_until_ready(jax.jit(scaled())(jnp.ones(128)))
        assert "in <lambda>" in caught.value.__notes__[0]


def test_options_around_the_compilation_hold_when_the_program_runs():
    seen = []

    def note(compiled, arrays):
        seen.append(config.get("sanitize"))
        return arrays

    with executor(note):
        fn = jax.jit(lambda x: scaled()(jnp.sin(x @ x)))
        with config.scoped(sanitize=True):
            jax.block_until_ready(fn(jnp.ones((128, 128))[0:128]))
        jax.block_until_ready(fn(jnp.ones((128, 128))[0:128]))
    assert seen == [True, True]


def test_kernels_whose_outputs_are_equal_run_each():
    calls = []

    def note(compiled, arrays):
        calls.append(compiled.name)
        return arrays

    with executor(note):
        jax.block_until_ready(jax.jit(lambda x: scaled()(x) + scaled()(x))(jnp.ones(128)))
    assert len(calls) == 2


def test_override():
    seen = []

    def three(compiled, array):
        return [3 * array]

    with pytest.MonkeyPatch.context() as patch:
        compile_ = compiler._compile
        patch.setattr(
            compiler, "_compile", lambda request: (seen.append(request), compile_(request))[1]
        )
        with override(three, find_target("sm_100")):
            result = jax.jit(lambda x: scaled()(x))(jnp.ones(128))
    np.testing.assert_array_equal(result, np.full(128, 3.0))
    assert [request.target.name for request in seen] == ["sm_100"]


def test_host_call_outside_of_a_program():
    compiled = add_kernel()
    (result,) = run_on_host(lambda k, a: [a[0] + 1], compiled, jnp.zeros(128, jnp.float32))
    np.testing.assert_array_equal(result, np.ones(128))


def test_operands_of_the_wrong_type_are_named():
    (spec,) = specs(scaled(), shape(128))
    fn = jax.jit(lambda x: kernel_call_p.bind(x, spec=spec))
    with pytest.raises(InvalidTypeError, match="operand 0 of kernel 'scaled' has the wrong type"):
        fn.trace(shape(64)).lower(lowering_platforms=("cuda",))
    fn = jax.jit(lambda x: kernel_call_p.bind(x, x, spec=spec))
    with pytest.raises(InvalidTypeError, match="wrong number of operands"):
        fn.trace(shape(128)).lower(lowering_platforms=("cuda",))


def test_several_platforms_at_once():
    traced = jax.jit(scaled()).trace(shape(128))
    with pytest.raises(ExecutionError, match="'scaled' cannot run on platform 'tpu'"):
        traced.lower(lowering_platforms=("cuda", "tpu"))


PORTABLE = Target(name="sm_90", ptx_version=80, compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("target", "capability", "works"),
    [
        (SM_90A, None, True),
        (SM_90A, (9, 0), True),
        (SM_90A, (10, 0), False),
        (PORTABLE, (10, 0), True),
        (PORTABLE, (8, 0), False),
    ],
)
def test_target_and_device(target, capability, works):
    if works:
        check_device(target, capability, "k")
    else:
        with pytest.raises(ExecutionError, match="which the local GPU cannot run"):
            check_device(target, capability, "k")
