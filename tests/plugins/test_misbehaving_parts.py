"""Plugins whose functions return what cannot be: numbers below zero, and the parts of the core that
are left to a library."""

from __future__ import annotations

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite import plugins
from pallasite.errors import PluginError
from pallasite.hookspecs import hookimpl
from pallasite.lowering.inference.costs import layout_costs
from pallasite.plugin import (
    BarrierKind,
    BarrierPhase,
    BarrierRole,
    BarrierUse,
    Replacement,
    Target,
)
from pallasite.plugin_values import guarded
from pallasite_std.caching.keys import KEYS
from pallasite_std.interpret import INTERPRETATION
from pallasite_std.primitives.barriers import barrier_wait_p
from pallasite_std.primitives.copies import copy_gmem_to_smem_p

LAYOUT_COSTS = layout_costs()


def plugin(hook, function):
    """A plugin with one hook."""
    return types.SimpleNamespace(**{hook: hookimpl(function)})


def kernel():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    def twice(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + x_ref[...]

    return twice


def copying():
    def copied(x_ref, o_ref, s_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref, s_ref, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = s_ref[...]

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(copied, out_type=x, scratch_types=scratch)


def _raising(error):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("cache_keys", "canonical_parts"),
        ("cache_keys", "environment_text"),
        ("cache_keys", "loaded_code"),
        ("interpretation", "params"),
        ("layout_costs", "access"),
    ],
)
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        3,
        lambda *args, **kwargs: object(),
        _raising(AttributeError("oh")),
        _raising(ValueError),
    ],
    ids=["none", "number", "nonsense", "raises", "refuses"],
)
def test_functions_of_implementations_are_checked(registered, monkeypatch, part, function, wrong):
    """What the core asks a library for is checked where it comes in."""
    standard = {"cache_keys": KEYS, "interpretation": INTERPRETATION, "layout_costs": LAYOUT_COSTS}
    names = [one for one in dir(standard[part]) if not one.startswith("_")]
    hostile = types.SimpleNamespace(**{one: getattr(standard[part], one) for one in names})
    setattr(hostile, function, wrong)
    monkeypatch.setitem(sys.modules, "hostile", types.SimpleNamespace(PART=hostile))
    one = Replacement(path="hostile:PART", overrides=("standard",))
    registered(plugin("pallasite_implementations", lambda: {part: one}))
    with pytest.raises(PluginError) as error:
        jax.block_until_ready(kernel()(jnp.zeros(128)))
    text = f"pallasite_implementations of plugin 'bad' (in process): '{part}': {function}"
    assert text in error.value.message


@pytest.mark.parametrize("part", ["cache_keys", "interpretation", "layout_costs"])
@pytest.mark.parametrize("value", [None, 3, "text"])
def test_implementations_without_functions_are_named(registered, monkeypatch, part, value):
    monkeypatch.setitem(sys.modules, "hostile", types.SimpleNamespace(PART=value))
    one = Replacement(path="hostile:PART", overrides=("standard",))
    registered(plugin("pallasite_implementations", lambda: {part: one}))
    with pytest.raises(PluginError, match=rf"of plugin 'bad' \(in process\): '{part}'"):
        jax.block_until_ready(kernel()(jnp.zeros(128)))


KIND = BarrierKind(
    dtype=type("Dtype", (), {"title": "Toy"}), phase=lambda dtype, geometry: BarrierPhase(1)
)
USE = BarrierUse(primitive=barrier_wait_p, role=BarrierRole.WAIT)


@pytest.mark.parametrize(
    ("hook", "record", "field", "value"),
    [
        ("pallasite_barrier_kinds", KIND, "arrivals", -2),
        ("pallasite_barrier_uses", USE, "arrivals", -1),
        ("pallasite_barrier_uses", USE, "transfers", -16),
    ],
)
def test_counts_are_not_negative(hook, record, field, value):
    record = dataclasses.replace(record, **{field: lambda *args: value})
    function = getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)
    with pytest.raises(PluginError, match=rf"{hook} of plugin 'bad' \(bad-dist 1.7\): {field} of"):
        function()
    record = dataclasses.replace(record, **{field: lambda *args: -value})
    assert getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)() == -value


@pytest.mark.parametrize("arrivals", [-1, -128])
def test_negative_arrivals_are_the_plugins(registered, arrivals):
    """They are not what is wrong with the kernel, whichever check asks first."""
    one = BarrierUse(
        primitive=copy_gmem_to_smem_p,
        role=BarrierRole.COMPLETE,
        barrier=2,
        arrivals=lambda dtype, params: arrivals,
        overrides=("standard",),
    )
    registered(plugin("pallasite_barrier_uses", lambda: [one]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(copying(), jnp.zeros(128), target="sm_90")
    assert error.value.message.startswith("pallasite_barrier_uses of plugin 'bad' (in process)")


@pytest.mark.parametrize("field", ["max_shared_memory", "max_threads", "multiprocessors"])
def test_limits_of_targets_are_not_negative(registered, field):
    target = Target(name="toy", ptx_version=80, compute_capability=(9, 0), **{field: -1})
    registered(plugin("pallasite_targets", lambda: [target]))
    with pytest.warns(plugins.PluginWarning, match=r"plugin 'bad' \(in process\) is not used"):
        plugins.registry()
    (info,) = [one for one in plugins.plugins() if one.name == "bad"]
    assert f"{field}=-1" in info.error
