"""Options: where values come from, and what they accept."""

from __future__ import annotations

import pathlib
import threading

import pytest

from pallasite import config
from pallasite.errors import ConfigError


def test_defaults(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr("sys.platform", "linux")
    # Plugins declare theirs when they are imported.
    declared = ("code_limit", "peer_memory", "peer_network", "peer_timeout", "symmetric_heap")
    own = [n for n in config.OPTIONS if not n.startswith("simulator_") and n not in declared]
    assert {name: config.get(name) for name in own} == {
        "target": None,
        "disabled_plugins": (),
        "disabled_passes": (),
        "dump": None,
        "cache": True,
        "cache_dir": pathlib.Path("/somewhere/pallasite"),
        "ptxas": "auto",
        "llvm_pipeline": "auto",
        "executor": None,
        "sanitize": ("fast",),
        "autotune": "off",
    }


def test_context_wins_over_environment_over_update_over_default(monkeypatch):
    assert config.source("target") == (None, "default")
    config.update("target", "a")
    assert config.source("target") == ("a", "update")
    monkeypatch.setenv("PALLASITE_TARGET", "b")
    assert config.source("target") == ("b", "PALLASITE_TARGET")
    with config.scoped(target="c"):
        with config.scoped(cache=False):
            assert config.source("target") == ("c", "context")
            assert config.get("cache") is False
        assert config.get("cache") is True
    assert config.get("target") == "b"


def test_empty_variable_counts_as_not_set(monkeypatch):
    monkeypatch.setenv("PALLASITE_TARGET", "")
    assert config.source("target") == (None, "default")


def test_scope_is_of_one_thread():
    seen = []
    with config.scoped(target="here"):
        thread = threading.Thread(target=lambda: seen.append(config.get("target")))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("disabled_passes", "b, a,,b", ("a", "b")),
        ("disabled_passes", ["a"], ("a",)),
        ("cache", "off", False),
        ("cache", "1", True),
        ("sanitize", True, True),
        ("dump", "out", pathlib.Path("out")),
        ("dump", "", None),
        ("ptxas", pathlib.Path("/opt/ptxas"), "/opt/ptxas"),
        ("ptxas", "off", "off"),
    ],
)
def test_values_are_parsed(name, given, value):
    config.update(name, given)
    assert config.get(name) == value


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cache", "perhaps"),
        ("cache", 2),
        ("dump", 3),
        ("cache_dir", ""),
        ("ptxas", "on"),
        ("disabled_plugins", 3),
        ("disabled_plugins", [1]),
        ("target", 90),
    ],
)
def test_wrong_values_are_refused(name, given):
    with pytest.raises(ConfigError) as error:
        config.update(name, given)
    assert str(error.value).splitlines() == [
        f"option {name!r} does not accept this value",
        f"  got: {given!r}",
        f"  expected: {config.OPTIONS[name].accepts}",
    ]


def test_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("PALLASITE_CACHE", "maybe")
    with pytest.raises(ConfigError, match="variable PALLASITE_CACHE does not accept"):
        config.get("cache")


def test_unknown_option_lists_the_known_ones():
    for call in (lambda: config.get("targets"), lambda: config.update("targets", "x")):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value).startswith("there is no configuration option 'targets'")
        assert "one of target, disabled_plugins" in str(error.value)


def test_reset_of_one_option():
    config.update("target", "a")
    config.update("cache", False)
    config.reset("target")
    assert (config.get("target"), config.get("cache")) == (None, False)


def test_options_of_plugins(monkeypatch):
    monkeypatch.setattr(config, "OPTIONS", dict(config.OPTIONS))
    option = config.Option("depth", "PALLASITE_DEPTH", lambda: 3, int, "a number", "how deep")
    config.declare(option)
    config.declare(option)
    assert config.get("depth") == 3
    monkeypatch.setenv("PALLASITE_DEPTH", "5")
    assert config.source("depth") == (5, "PALLASITE_DEPTH")
    for name, variable in (("depth", "PALLASITE_OTHER"), ("other", "PALLASITE_DEPTH")):
        with pytest.raises(ConfigError, match="clashes with another one"):
            config.declare(config.Option(name, variable, lambda: 3, int, "a number", ""))


def test_scoped_options_can_be_carried_over():
    with config.scoped(target="a", cache=False):
        carried = config.scoped_options()
    assert config.scoped_options() == {}
    with config.scoped(**carried):
        assert config.get("target") == "a"
        assert config.get("cache") is False
