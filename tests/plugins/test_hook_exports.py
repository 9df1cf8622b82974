"""The hook ``pallasite_exports``: names for the package ``pallasite`` itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

import pallasite
from pallasite.plugin import MissingNameError, PluginError, config, hookimpl, manager


class Exports:
    """A plugin that adds names."""

    def __init__(self, **names):
        self.names = names

    @hookimpl
    def pallasite_exports(self):
        return self.names


@contextlib.contextmanager
def registered(**plugins):
    with contextlib.ExitStack() as stack:
        for name, plugin in plugins.items():
            stack.callback(manager().unregister, manager().register(plugin, name))
        yield


def test_a_name_is_imported_when_it_is_used():
    assert not hasattr(pallasite, "join_paths")
    with registered(paths=Exports(join_paths="os.path:join")):
        assert pallasite.join_paths("a", "b") == "a/b"
        assert "join_paths" in dir(pallasite)
    assert not hasattr(pallasite, "join_paths")


def test_the_standard_library_adds_tuning():
    from pallasite_std.tuning import autotune, choose

    assert pallasite.autotune is autotune and pallasite.choose is choose
    with config.scoped(disabled_plugins="standard"), pytest.raises(MissingNameError) as error:
        _ = pallasite.autotune
    assert str(error.value).splitlines() == [
        "module 'pallasite' has no attribute 'autotune'",
        "  try: plugins that are disabled may provide it: 'standard'"
        " (PALLASITE_DISABLE_PLUGINS or config disabled_plugins)",
    ]


def test_names_of_the_core_and_of_its_modules_are_its_own():
    with registered(thief=Exports(compile="os:getcwd", cli="os:getcwd")):
        assert pallasite.compile.__module__ == "pallasite.runtime.api"
        from pallasite import cli

        assert cli.__name__ == "pallasite.cli"


def test_two_plugins_with_one_name():
    twice = {"one": Exports(join="os.path:join"), "two": Exports(join="os.path:join")}
    with registered(**twice), pytest.raises(PluginError) as error:
        _ = pallasite.join
    assert "plugins 'one' and 'two' both register names of pallasite 'join'" in str(error.value)


def test_a_name_that_leads_nowhere():
    with (
        registered(lost=Exports(lost="os:no_such_function")),
        pytest.raises(PluginError, match="leads to os:no_such_function, which cannot be imported"),
    ):
        _ = pallasite.lost


def test_modules_are_imported_without_loading_plugins():
    program = (
        "import sys\n"
        "from pallasite import cli, files, conflicts\n"
        "print('pallasite_std' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert done.stdout.split() == ["False", "False"]
