"""The hook ``pallasite_implementations``: parts of which there is one implementation at a time."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

import pallasite
import pallasite.gpu as plgpu
from pallasite import config, plugins
from pallasite.plugin import MissingNameError, PluginError, hookimpl
from pallasite.plugins import PluginWarning

VECTOR = jax.ShapeDtypeStruct((256,), jnp.float32)


class Library:
    """A plugin that contributes the implementations that it is made with."""

    def __init__(self, **implementations):
        self.implementations = implementations

    @hookimpl
    def pallasite_implementations(self):
        return self.implementations


@pytest.fixture
def use():
    names = []

    def register(**implementations):
        library = Library(**implementations)
        names.append(plugins.register(library, f"Library{len(names) or ''}"))
        return names[-1]

    yield register
    for name in names:
        plugins.unregister(name)


def test_the_attribute_is_found_when_it_is_asked_for(use, monkeypatch):
    use(cooling="a_library_of_ours:fan")
    monkeypatch.setitem(sys.modules, "a_library_of_ours", types.SimpleNamespace(fan="a fan"))
    assert plugins.manager().implementation("cooling") == "a fan"
    assert plugins.manager().paths("implementations")["cooling"] == "a_library_of_ours:fan"


def test_nobody_has_it():
    with pytest.raises(MissingNameError, match="no plugin has the implementation 'cooling'"):
        plugins.manager().implementation("cooling")


def test_two_plugins_with_one_name(use):
    name = use(memory_access="a_library_of_ours:ACCESS")
    with pytest.raises(PluginError, match="memory_access") as error:
        plugins.manager().implementation("memory_access")
    assert "standard" in str(error.value) and name in str(error.value)


def test_one_of_two_plugins_may_override_the_other(use, monkeypatch):
    import pallasite.plugin as door

    monkeypatch.setitem(sys.modules, "a_library_of_ours", types.SimpleNamespace(ACCESS="ours"))
    standard = plugins.manager().implementation("memory_access")
    path = "a_library_of_ours:ACCESS"
    use(memory_access=door.Replacement(path=path, overrides=("standard",)))
    assert plugins.manager().implementation("memory_access") == "ours" != standard
    use(memory_access=path)
    with pytest.raises(PluginError, match="of the Replacement that shall win"):
        plugins.manager().implementation("memory_access")


@pytest.mark.parametrize("replacement", [("nowhere", ("standard",)), ("a:b", "standard")])
def test_what_is_no_replacement(use, replacement):
    import pallasite.plugin as door

    path, overrides = replacement
    name = use(memory_access=door.Replacement(path=path, overrides=overrides))
    with pytest.warns(PluginWarning, match="is not used"):
        assert plugins.manager().implementation("memory_access") is not None
    (info,) = [one for one in plugins.manager().plugins() if one.name == name]
    assert info.state == "failed" and "or to a Replacement" in info.error


def test_what_is_no_path(use):
    name = use(cooling=3)
    with pytest.warns(PluginWarning, match="is not used"), pytest.raises(MissingNameError):
        plugins.manager().implementation("cooling")
    (info,) = [one for one in plugins.manager().plugins() if one.name == name]
    assert info.state == "failed"
    assert 'a mapping of name to "module:attribute"' in info.error


class RecordedLayouts:
    """Lane layouts that remember which equations they were asked for."""

    asked: list[str] = []

    def __new__(cls, registry, target):
        made = cls.original(registry, target)
        wanted = made.wanted

        def recorded(equation, path):
            cls.asked.append(equation.primitive.name)
            return wanted(equation, path)

        made.wanted = recorded
        return made


def test_a_kernel_is_lowered_with_it(use, monkeypatch):
    """Lane layouts of another author, for which those of the standard library make way."""
    manager = plugins.manager()
    standard = manager.paths("implementations")
    RecordedLayouts.original = manager.implementation("lane_layouts")
    monkeypatch.setattr(RecordedLayouts, "asked", [])
    monkeypatch.setitem(
        sys.modules, "a_library_of_ours", types.SimpleNamespace(made=RecordedLayouts)
    )
    paths = {**standard, "lane_layouts": "a_library_of_ours:made"}
    paths_of = type(manager).paths
    monkeypatch.setattr(
        type(manager),
        "paths",
        lambda self, field: paths if field == "implementations" else paths_of(self, field),
    )

    @plgpu.kernel(
        out_type=VECTOR,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    def double(x, out):
        out[...] = x[...] * 2

    with config.scoped(cache=False):
        pallasite.compile(double, VECTOR)
    assert {"get", "mul"} <= set(RecordedLayouts.asked)
