"""Hidden operands that a plugin provides where programs run, by operations of JAX."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli.kernel_report import as_json, as_text
from pallasite.errors import ExecutionError, InvalidTypeError
from pallasite.plugin import RuleSet, Semantics, hookimpl, plugins
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import DeviceMesh, RegisterArray
from pallasite_simulator import simulate

X = jnp.arange(128, dtype=jnp.float32)
CALLS = []

factor_p = _jax.Primitive("factor")
_jax.abstract_eval(factor_p)(lambda *, provider, size: (_jax.ShapedArray((), np.float32), set()))
rules = RuleSet()


@rules.lowering(factor_p, Semantics.LANE)
def _factor(ctx, *, provider, size):
    operand = ctx.launch.hidden_operand(
        "factors.one", (1,), np.float32, provider=provider, arguments={"size": size}
    )
    pointer = ctx.launch.array_pointer(operand)
    return RegisterArray.splat(ops.load(types.parse_type("f32"), pointer), np.float32)


class Factors:
    """Numbers the calls of kernels at run time, by a callback; on a device alone it is ``size``."""

    def in_jax(self, compiled, request, *, size):
        CALLS.append((compiled.name, request.platform, request.device_mesh, request.devices))
        return jax.pure_callback(lambda: np.full(size, 3, np.float32), jax.typeof(jnp.zeros(size)))

    def on_device(self, compiled, device, *, size):
        CALLS.append((compiled.name, device.platform))
        return np.full(size, size, np.float32)


FACTORS = Factors()


class Launching:
    """Has the kernel launched by another call, which gets an attribute."""

    def in_jax(self, compiled, request, *, size):
        request.call.update(target="my_launch", clear=False, where=b"there")
        return jnp.ones(size, jnp.float32)


class Plain(Launching):
    def in_jax(self, compiled, request, *, size):
        return jnp.ones(size, jnp.float32)


LAUNCHING, PLAIN = Launching(), Plain()


class Plugin:
    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules


@pytest.fixture(autouse=True)
def plugin():
    CALLS.clear()
    plugins.register(Plugin(), name="factors")
    yield
    plugins.unregister("factors")


def scaled(provider="FACTORS", size=1):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * factor_p.bind(provider=f"{__name__}:{provider}", size=size)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(X.shape, X.dtype), kernel_name="scaled")


@pytest.mark.runs_kernels
def test_a_program_provides_the_operand():
    np.testing.assert_array_equal(jax.jit(scaled())(X), 3 * np.asarray(X))
    assert [("scaled", "cpu", DeviceMesh(), None)] == CALLS
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    called = jax.shard_map(scaled(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.device_put(X, jax.NamedSharding(mesh, spec))
    np.testing.assert_array_equal(jax.jit(called)(x), 3 * np.asarray(X))
    assert CALLS[1][2:] == (DeviceMesh((("x", 1),), ("x",)), tuple(jax.devices()[:1]))


def test_a_launch_without_jax_provides_it_too():
    compiled = pallasite.compile(scaled(), X, target="sm_90")
    np.testing.assert_array_equal(simulate(compiled, X).outputs[0], np.asarray(X))
    assert CALLS == [("scaled", "cpu")]


def test_it_is_kept_with_the_kernel_by_name():
    compiled = pallasite.compile(scaled(), X, target="sm_90")
    (record,) = compiled.launch.hidden_operands
    assert (record.value, record.initialiser, record.provider) == (None, "", f"{__name__}:FACTORS")
    assert json.loads(record.arguments) == {"size": 1}
    (listed,) = as_json(compiled)["launch"]["hidden_operands"]
    assert (listed["initialiser"], listed["provider"]) == (None, f"{__name__}:FACTORS")
    assert f"provided by {__name__}:FACTORS" in as_text(compiled, "")


@pytest.mark.runs_kernels
def test_a_provider_that_is_wrong():
    with pytest.raises(InvalidTypeError) as error:
        simulate(pallasite.compile(scaled(size=2), X, target="sm_90"), X)
    assert f"the provider {__name__}:FACTORS of hidden operand 'factors.one'" in str(error.value)
    with pytest.raises(ExecutionError, match="needs a function of the host that is not there"):
        simulate(pallasite.compile(scaled("NOBODY"), X, target="sm_90"), X)


def test_a_provider_changes_the_call_that_launches_a_kernel():
    def text(provider):
        kernel = jax.jit(scaled(provider))
        with pallasite.config.scoped(target="sm_90"):
            return kernel.trace(X).lower(lowering_platforms=("cuda",)).as_text()

    changed = text("LAUNCHING")
    assert "@my_launch" in changed and 'where = "there"' in changed and "opaque =" in changed
    assert "triton_kernel_call" not in changed
    assert "@triton_kernel_call_ffi" in text("PLAIN") and "where =" not in text("PLAIN")
