"""Discovery, lazy loading, failing and disabled plugins, plugins of this process."""

from __future__ import annotations

import importlib.metadata
import sys
import types
import warnings

import pytest
from core_support import LANE, FakeEntryPoint, manager, rule
from jax.extend.core import Primitive

from pallasite import config, plugins
from pallasite.errors import PluginError
from pallasite.hookspecs import hookimpl
from pallasite.targets import Target

ADD = Primitive("add")
TARGET = Target(name="toy", ptx_version=80, compute_capability=(8, 0))


class Toy:
    """A plugin that counts how often its hooks are called."""

    def __init__(self):
        self.calls = []

    @hookimpl
    def pallasite_targets(self):
        self.calls.append("targets")
        return [TARGET]

    @hookimpl
    def pallasite_names(self):
        self.calls.append("names")
        return {"twice": "toy.module:twice"}

    @hookimpl
    def pallasite_lowering_rules(self):
        self.calls.append("rules")
        return rule(ADD).lowering_rules


def entry_point(name="toy", plugin=None):
    plugin = plugin or Toy()
    loads = []

    def load():
        loads.append(name)
        return plugin

    point = FakeEntryPoint(name, load)
    point.loads = loads
    return point, plugin


def states(manager):
    return {one.name: one.state for one in manager.plugins()}


def test_names_are_known_without_loading():
    point, _ = entry_point()
    plugin_manager = manager(point)
    assert states(plugin_manager) == {"toy": "found"}
    assert point.loads == []


def test_each_hook_is_called_once_and_only_when_needed():
    point, toy = entry_point()
    plugin_manager = manager(point)
    assert set(plugin_manager.targets()) == {"sm_90", "sm_100", "toy"}
    assert toy.calls == ["targets"]
    assert plugin_manager.names() == {"twice": "toy.module:twice"}
    assert toy.calls == ["targets", "names"]
    registry = plugin_manager.registry()
    assert registry.lowering_rule(ADD, LANE, TARGET).plugin == "toy"
    assert plugin_manager.registry() is registry
    assert sorted(toy.calls) == ["names", "rules", "targets"]
    assert (point.loads, states(plugin_manager)) == (["toy"], {"toy": "loaded"})


def test_plugin_that_cannot_be_imported_is_reported_and_others_work():
    def load():
        raise ImportError("no module named cutlass")

    good, _ = entry_point()
    plugin_manager = manager(FakeEntryPoint("broken", load), good)
    with pytest.warns(plugins.PluginWarning) as caught:
        assert "toy" in plugin_manager.targets()
    assert [str(one.message) for one in caught] == [
        "plugin 'broken' (?) is not used, since it failed to load:"
        " ImportError: no module named cutlass"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert plugin_manager.registry().plugins == ("pallasite", "toy")
    broken = plugin_manager.plugins()[0]
    assert broken.state == "failed"
    assert broken.error.endswith("ImportError: no module named cutlass")
    assert "in load" in broken.error
    assert plugin_manager.absences() == {
        "broken": "failed to load: ImportError: no module named cutlass",
        "toy": "",
    }


def test_second_plugin_of_a_name_is_reported_and_not_used():
    first, second, core = (
        FakeEntryPoint(name, Toy, dist=types.SimpleNamespace(name=distribution, version="1.0"))
        for name, distribution in (("toy", "one"), ("toy", "two"), ("pallasite", "three"))
    )
    plugin_manager = manager(first, second, core)
    with pytest.warns(plugins.PluginWarning) as caught:
        assert [one.distribution for one in plugin_manager.plugins()] == ["one 1.0"]
    assert [str(one.message).partition(":")[0] for one in caught] == [
        "plugin 'pallasite' (three 1.0) is not used, since pallasite has a plugin of that name",
        "plugin 'toy' (two 1.0) is not used, since one 1.0 has a plugin of that name",
    ]
    assert "toy" in plugin_manager.targets()


def test_plugin_that_ends_the_program_is_reported_and_others_work():
    def load():
        sys.exit("this plugin needs a licence")

    plugin_manager = manager(FakeEntryPoint("stubborn", load), entry_point()[0])
    with pytest.warns(plugins.PluginWarning, match="'stubborn'.*SystemExit: this plugin needs"):
        assert "toy" in plugin_manager.targets()
    assert states(plugin_manager) == {"stubborn": "failed", "toy": "loaded"}


@pytest.mark.parametrize(
    ("hook", "value", "message"),
    [
        ("pallasite_targets", ["sm_1"], "pallasite_targets of plugin 'bad' returned the wrong"),
        ("pallasite_names", {"f": "module.f"}, 'expected: a mapping of name to "module:attribute"'),
        ("pallasite_passes", 3, "expected: an iterable of Pass"),
    ],
)
def test_plugin_whose_hook_returns_the_wrong_thing_fails(hook, value, message):
    plugin = types.SimpleNamespace(**{hook: hookimpl(lambda: value)})
    plugin_manager = manager(FakeEntryPoint("bad", lambda: plugin))
    with pytest.warns(plugins.PluginWarning):
        plugin_manager.registry()
    assert message in plugin_manager.plugins()[0].error


def test_hook_that_returns_nothing_contributes_nothing():
    plugin = types.SimpleNamespace(
        pallasite_targets=hookimpl(lambda: None), pallasite_names=hookimpl(lambda: None)
    )
    plugin_manager = manager(FakeEntryPoint("empty", lambda: plugin))
    assert plugin_manager.registry().plugins == ("pallasite", "empty")


def test_unknown_hook_and_plugin_without_hooks_are_refused():
    with pytest.raises(PluginError) as error:
        manager().register(types.SimpleNamespace(pallasite_rules=hookimpl(lambda: ())), name="typo")
    assert "plugin 'typo' does not fit the hook specifications" in str(error.value)
    assert "pallasite_lowering_rules" in str(error.value)
    with pytest.raises(PluginError, match="plugin 'nothing' implements no hook"):
        manager().register(types.SimpleNamespace(), name="nothing")


def test_register_and_unregister():
    plugin_manager = manager()
    before = plugin_manager.registry()
    assert plugin_manager.register(Toy(), name="mine") == "mine"
    assert "toy" in plugin_manager.registry().targets
    assert plugin_manager.plugins()[0].distribution == "in process"
    with pytest.raises(PluginError, match="a plugin named 'mine' is already there"):
        plugin_manager.register(Toy(), name="mine")
    plugin_manager.unregister("mine")
    assert plugin_manager.registry().targets == before.targets
    with pytest.raises(PluginError, match="no plugin named 'mine' was registered"):
        plugin_manager.unregister("mine")


def test_conflict_is_reported_until_one_plugin_is_disabled():
    one, _ = entry_point("one")
    two, _ = entry_point("two")
    plugin_manager = manager(one, two)
    with pytest.raises(PluginError, match="plugins 'one' and 'two' both register targets"):
        plugin_manager.registry()
    config.update("disabled_plugins", ["two"])
    assert plugin_manager.registry().plugins == ("pallasite", "one")


def test_disabling_and_enabling_again(monkeypatch):
    point, _ = entry_point()
    plugin_manager = manager(point)
    monkeypatch.setenv("PALLASITE_DISABLE_PLUGINS", "other, toy")
    assert plugin_manager.registry().plugins == ("pallasite",)
    assert (point.loads, states(plugin_manager)) == ([], {"toy": "disabled"})
    monkeypatch.delenv("PALLASITE_DISABLE_PLUGINS")
    assert plugin_manager.registry().plugins == ("pallasite", "toy")


def test_real_entry_points_are_read():
    point = importlib.metadata.EntryPoint(
        "blackwell", "pallasite_blackwell.plugin", "pallasite.plugins"
    )
    plugin_manager = plugins.PluginManager({}, entry_points=lambda: [point])
    assert set(plugin_manager.targets()) == {"sm_100a", "sm_103a", "sm_120a"}
    assert plugin_manager.packages() == {"pallasite_blackwell"}
