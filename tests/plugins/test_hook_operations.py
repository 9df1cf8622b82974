"""Operations from a plugin of another author, which imports nothing but the door."""

from __future__ import annotations

import contextlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import pallasite.ops
from pallasite import plugin


def halved(a, b):
    """What the plugin computes instead of a product, so that it can be told apart."""
    return jnp.full((a.shape[0], b.shape[1]), 0.5)


def doubled(a, b):
    """The same of another implementation."""
    return jnp.full((a.shape[0], b.shape[1]), 2.0)


def only_small(a, b):
    """Why large products are refused."""
    del b
    return f"{a.shape[0]} rows, it takes 8" if a.shape[0] > 8 else None


def broken(a, b):
    """A function of a plugin that fails."""
    return a.size_of_rows + b


MODULE = types.ModuleType("operations_of_somebody")
vars(MODULE).update(halved=halved, doubled=doubled, only_small=only_small, broken=broken)


def operation(implementation="halved", name="matmul", **options):
    path = f"operations_of_somebody:{implementation}"
    return plugin.Operation(name=name, implementation=path, **options)


@contextlib.contextmanager
def registered(*operations, name="somebody"):
    class Somebody:
        @plugin.hookimpl
        def pallasite_operations(self):
            return operations

    plugin.plugins.register(Somebody(), name=name)
    try:
        yield
    finally:
        plugin.plugins.unregister(name)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)


def small(rows=8):
    return jnp.ones((rows, 8), jnp.float16), jnp.ones((8, 8), jnp.float16)


OTHER_CHIPS = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="runs kernels for chips that are not there"
)
FOR_BLACKWELL = plugin.TargetPredicate(names=frozenset({"sm_120a"}))


def names_of(operations):
    return [one.plugin for one in operations]


def test_order_of_implementations():
    """The more specific one comes first; what asks nothing of the target is last."""
    assert names_of(pallasite.ops.implementations("matmul", plugin.find_target("sm_90a"))) == [
        "hopper",
        "standard",
    ]
    for target in ("sm_90", "sm_100", "sm_120a"):
        found = pallasite.ops.implementations("matmul", plugin.find_target(target))
        assert names_of(found) == ["standard"]
    names = plugin.TargetPredicate(names=frozenset({"sm_90a"}))
    with registered(operation(target=names)):
        found = pallasite.ops.implementations("matmul", plugin.find_target("sm_90a"))
        assert names_of(found) == ["somebody", "hopper", "standard"]


@OTHER_CHIPS
@pytest.mark.runs_kernels
def test_the_most_specific_serves_its_targets():
    with registered(operation(target=FOR_BLACKWELL)):
        with pallasite.target("sm_120a"):
            assert pallasite.ops.matmul(*small())[0, 0] == 0.5
        with pallasite.target("sm_100"):
            assert pallasite.ops.matmul(*small())[0, 0] == 8
    with pallasite.target("sm_120a"):
        assert pallasite.ops.matmul(*small())[0, 0] == 8


@OTHER_CHIPS
@pytest.mark.runs_kernels
def test_what_it_refuses_goes_to_the_next():
    refuses = "operations_of_somebody:only_small"
    with (
        registered(operation(target=FOR_BLACKWELL, refuses=refuses)),
        pallasite.target("sm_120a"),
    ):
        assert pallasite.ops.matmul(*small(8))[0, 0] == 0.5
        assert pallasite.ops.matmul(*small(9))[0, 0] == 8


def test_nobody_takes_it():
    refuses = "operations_of_somebody:only_small"
    with (
        registered(operation(name="merge", refuses=refuses)),
        pytest.raises(pallasite.UnsupportedError) as caught,
    ):
        pallasite.ops.merge(*small(9))
    assert "no implementation of merge on sm_90a takes these arguments" in str(caught.value)
    assert "got: somebody: 9 rows, it takes 8" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (small(8)[:1], "somebody: missing a required argument: 'b'"),
        ((*small(8), 1), "somebody: too many positional arguments"),
    ],
)
def test_arguments_that_it_does_not_have(arguments, text):
    with (
        registered(operation(name="merge", refuses="operations_of_somebody:only_small")),
        pytest.raises(pallasite.UnsupportedError) as caught,
    ):
        pallasite.ops.merge(*arguments)
    assert f"got: {text}" in str(caught.value)


def test_it_fails_to_refuse():
    with (
        registered(operation(name="merge", refuses="operations_of_somebody:broken")),
        pytest.raises(plugin.PluginError) as caught,
    ):
        pallasite.ops.merge(*small())
    assert "plugin 'somebody' (in process): operations_of_somebody:broken failed" in str(
        caught.value
    )
    assert "AttributeError" in str(caught.value) and __file__ in str(caught.value)


def test_two_that_are_equally_specific():
    """An error that names both, unless one says that it overrides the other."""
    with registered(operation()), pallasite.target("sm_120a"):
        with pytest.raises(plugin.PluginError, match="somebody") as caught:
            pallasite.ops.matmul(*small())
        assert "standard" in str(caught.value)
    with registered(operation(overrides=("standard",))), pallasite.target("sm_120a"):
        assert pallasite.ops.matmul(*small())[0, 0] == 0.5


@OTHER_CHIPS
@pytest.mark.runs_kernels
def test_one_function_under_two_targets():
    """A jitted function is traced for each target, and has the implementation for it."""
    product = jax.jit(lambda a, b: pallasite.ops.matmul(a, b))
    with registered(operation(target=FOR_BLACKWELL)):
        for _ in range(2):
            for target, expected in (("sm_120a", 0.5), ("sm_90", 8)):
                with pallasite.target(target):
                    assert product(*small())[0, 0] == expected


def test_new_operations():
    """A plugin may bring operations of its own; without it, the name is gone."""
    with registered(operation("doubled", name="double")):
        assert "double" in dir(pallasite.ops)
        assert pallasite.ops.double.__doc__ == doubled.__doc__
        assert pallasite.ops.double(*small())[0, 0] == 2
    with pytest.raises(AttributeError, match="pallasite.ops has no operation 'double'"):
        _ = pallasite.ops.double


def test_an_implementation_that_does_not_exist():
    with (
        registered(operation("missing", target=FOR_BLACKWELL)),
        pallasite.target("sm_120a"),
        pytest.raises(plugin.PluginError, match="plugin 'somebody' .*:missing, of operation"),
    ):
        pallasite.ops.matmul(*small())
