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
from pallasite.plugin_api import PLUGIN_API, check_plugin_api, needed_by, stated_in_source
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
    assert plugin_manager.paths("names") == {"twice": "toy.module:twice"}
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
        ("pallasite_targets", ["sm_1"], "pallasite_targets of plugin 'bad' (?) returned the wrong"),
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
    assert set(plugin_manager.targets()) == {"sm_100a", "sm_103a", "sm_110a", "sm_120a"}
    assert plugin_manager.packages() == {"pallasite_blackwell"}


# Versions of the plugin API -----------------------------------------------------------------------


class Versioned(Toy):
    """A plugin that states which plugin API it needs."""

    def __init__(self, needed):
        super().__init__()
        self.PALLASITE_PLUGIN_API = needed


def versioned(needed):
    dist = types.SimpleNamespace(name="toy-plugin", version="2.1")
    return FakeEntryPoint("toy", lambda: Versioned(needed), dist=dist)


@pytest.mark.parametrize("needed", [PLUGIN_API, (PLUGIN_API[0], 0)])
def test_plugin_that_needs_what_there_is(needed):
    assert "toy" in manager(versioned(needed)).targets()


@pytest.mark.parametrize(
    ("needed", "version", "hint"),
    [
        ((2, 1), "2.1", "pip install --upgrade pallasite"),
        ((3, 0), "3.0", "pip install --upgrade pallasite"),
        ((1, 0), "1.0", "pip install --upgrade toy-plugin"),
    ],
)
def test_plugin_that_needs_another_version_is_reported_and_others_work(needed, version, hint):
    good = entry_point("good")[0]
    plugin_manager = manager(versioned(needed), good)
    with pytest.warns(plugins.PluginWarning) as caught:
        assert "toy" in plugin_manager.targets()  # That of the good one.
    message = (
        f"plugin 'toy' (toy-plugin 2.1) needs plugin API {version}, and this pallasite has 2.0"
    )
    assert message in str(caught[0].message)
    failed = {one.name: one for one in plugin_manager.plugins()}["toy"]
    assert (failed.state, failed.reason) == ("failed", message)
    assert failed.error.splitlines()[1:] == [
        "  expected: a plugin that needs 2.0",
        f"  try: {hint}, if there is a later version",
    ]
    assert plugin_manager.registry().plugins == ("pallasite", "good")
    assert plugin_manager.absences()["toy"] == f"failed to load: {message}"


@pytest.mark.parametrize("needed", [1, "1.0", (1,), (1, 0, 0), (1, -1), (True, 0), None])
def test_plugin_that_states_its_needs_wrongly(needed):
    plugin_manager = manager(versioned(needed))
    with pytest.warns(plugins.PluginWarning):
        plugin_manager.targets()
    assert plugin_manager.plugins()[0].error.splitlines() == [
        "plugin 'toy' does not say which plugin API it needs",
        f"  got: PALLASITE_PLUGIN_API = {needed!r}",
        "  expected: a major and a minor number, such as PALLASITE_PLUGIN_API = (2, 0)",
    ]


def test_later_minor_versions_serve_earlier_plugins():
    check_plugin_api("toy", "toy 1.0", (1, 2), (1, 3))
    with pytest.raises(PluginError) as error:
        check_plugin_api("toy", "toy 1.0", (2, 0), (1, 3))
    assert "expected: a plugin that needs 1.0 to 1.3" in str(error.value)


def test_plugin_of_this_process_that_needs_another_version():
    with pytest.raises(PluginError) as error:
        manager().register(Versioned((0, 1)), name="mine")
    assert str(error.value).splitlines()[0] == (
        "plugin 'mine' (in process) needs plugin API 0.1, and this pallasite has 2.0"
    )
    assert error.value.hint == "change the plugin for plugin API 2.0"


def test_plugin_that_imports_what_only_a_later_version_has(tmp_path, monkeypatch):
    """Its module cannot be imported, so what it needs is read in its source."""
    source = "PALLASITE_PLUGIN_API = (2, 7)\nfrom pallasite.plugin import of_the_future\n"
    (tmp_path / "plugin_of_the_future.py").write_text(source)
    (tmp_path / "broken_plugin.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        importlib.metadata.EntryPoint(name, module, "pallasite.plugins")
        for name, module in (("future", "plugin_of_the_future"), ("broken", "broken_plugin"))
    ]
    plugin_manager = manager(*points)
    with pytest.warns(plugins.PluginWarning):
        plugin_manager.targets()
    reasons = {one.name: one.reason for one in plugin_manager.plugins()}
    assert reasons == {
        "future": "plugin 'future' (?) needs plugin API 2.7, and this pallasite has 2.0",
        "broken": "ModuleNotFoundError: No module named 'no_such_module'",
    }


@pytest.mark.parametrize("name", ["std", "hopper", "blackwell", "multigpu", "simulator"])
def test_the_plugins_here_state_what_they_need(name):
    module = importlib.import_module(f"pallasite_{name}.plugin")
    assert stated_in_source(module.__name__) == needed_by(module) == PLUGIN_API
    assert hasattr(module, "PALLASITE_PLUGIN_API")
