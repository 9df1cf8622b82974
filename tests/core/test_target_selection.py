"""Which target is chosen, and what is said about one that is not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import config, target_selection
from pallasite.errors import TargetError
from pallasite.target_selection import find_target, select_target
from pallasite.targets import Target


def no_gpu():
    return None


def gpu_must_not_be_asked():
    raise AssertionError("the local GPU was asked for")


@pytest.fixture
def only_core():
    config.update("disabled_plugins", "hopper,blackwell")


def test_order_of_sources(monkeypatch):
    assert select_target(local=no_gpu).name == "sm_90a"
    assert select_target(local=lambda: (10, 0)).name == "sm_100a"
    config.update("target", "sm_103a")
    assert select_target(local=gpu_must_not_be_asked).name == "sm_103a"
    monkeypatch.setenv("PALLASITE_TARGET", "sm_120a")
    assert select_target(local=gpu_must_not_be_asked).name == "sm_120a"
    with pallasite.target("sm_100"):
        assert select_target(local=gpu_must_not_be_asked).name == "sm_100"
        assert select_target("sm_90", local=gpu_must_not_be_asked).name == "sm_90"
    assert select_target(local=gpu_must_not_be_asked).name == "sm_120a"
    own = Target(name="own", ptx_version=80, compute_capability=(8, 0))
    assert select_target(own) is own


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_100"),  # no target of its own: the newest portable one
    ],
)
def test_target_of_the_local_gpu(capability, name):
    assert select_target(local=lambda: capability).name == name


@pytest.mark.usefixtures("only_core")
@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "sm_90"), ((10, 3), "sm_100"), (None, "sm_90")]
)
def test_portable_targets_without_plugins(capability, name):
    assert select_target(local=lambda: capability).name == name


def test_variants_of_a_chip_are_chosen_by_name_only():
    variant = Target(
        name="chip_2", architecture="sm_120", ptx_version=87, compute_capability=(12, 0)
    )

    class Plugin:
        @pallasite.hookimpl
        def pallasite_targets(self):
            return [variant]

    pallasite.plugins.register(Plugin(), name="variants")
    try:
        assert select_target(local=lambda: (12, 1)).name == "sm_100"
        assert select_target("chip_2") is variant
    finally:
        pallasite.plugins.unregister("variants")


def test_local_gpu_that_is_too_old():
    with pytest.raises(TargetError) as error:
        select_target(local=lambda: (8, 9))
    message = str(error.value)
    assert message.startswith("no target runs on the local GPU, which has compute capability 8.9")
    assert "PALLASITE_TARGET" in message


def test_jax_without_a_gpu_has_no_compute_capability(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    target_selection.local_compute_capability.cache_clear()
    assert target_selection.local_compute_capability() is None
    target_selection.local_compute_capability.cache_clear()


def test_compute_capability_comes_from_jax(monkeypatch):
    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    target_selection.local_compute_capability.cache_clear()
    assert target_selection.local_compute_capability() == (9, 0)
    target_selection.local_compute_capability.cache_clear()


def test_unknown_target_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "sm_13")
    with pytest.raises(TargetError) as error:
        select_target()
    assert str(error.value).splitlines() == [
        "no target named 'sm_13' (from PALLASITE_TARGET)",
        "  expected: one of sm_100, sm_100a, sm_103a, sm_110a, sm_120a, sm_90, sm_90a",
    ]


def test_with_statement_checks_the_name_at_once():
    with pytest.raises(TargetError, match="no target named 'sm_13'"):
        pallasite.target("sm_13")


def test_target_of_a_disabled_plugin(only_core):
    with pytest.raises(TargetError) as error:
        find_target("sm_100a")
    assert str(error.value).splitlines() == [
        "no target named 'sm_100a'",
        "  expected: one of sm_100, sm_90",
        "  try: enable plugin 'blackwell', which provides it: it is listed in"
        " PALLASITE_DISABLE_PLUGINS or config disabled_plugins",
    ]


def test_target_of_a_missing_plugin(monkeypatch):
    from core_support import manager

    empty = manager()
    monkeypatch.setattr(target_selection, "manager", lambda: empty)
    with pytest.raises(TargetError) as error:
        find_target("sm_90a")
    assert str(error.value).splitlines()[-1] == (
        "  try: pip install pallasite[hopper] (plugin 'hopper' provides it and is not installed)"
    )


def test_programs_are_traced_again_for_another_target():
    traced: list[str] = []

    @pallasite.gpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    @jax.jit
    def program(x):
        traced.append(select_target(None).name)
        return x * jax.eval_shape(kernel, jnp.zeros(128)).size

    def call():
        program(jnp.zeros(3))

    with config.scoped(target="sm_90a"):
        call()
    config.update("target", "sm_100a")
    try:
        call()
        call()
        config.update("target", "sm_90")
        call()
        with pallasite.target("sm_90a"):
            call()
        with config.scoped(target="sm_100a"):
            call()
    finally:
        config.reset("target")
    assert traced == ["sm_90a", "sm_100a", "sm_90", "sm_90a", "sm_100a"]
