"""What ``import pallasite`` and ``pallasite.gpu`` load and offer."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest
from core_support import FakeEntryPoint, manager

import pallasite
from pallasite import config, gpu, plugins
from pallasite.errors import InternalError, MissingNameError, PallasiteError, PluginError
from pallasite.extensions import Replacement
from pallasite.known_plugins import KnownPlugin, known_plugins
from pallasite.language import PUBLIC_NAMES, execution
from pallasite_std import plugin as builtin


def run(program: str) -> str:
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout.strip()


def test_options_of_plugins_are_there_from_the_start():
    """Before anything else has imported the plugins that declare them."""
    program = (
        "import pallasite\n"
        "pallasite.config.update('code_limit', 7)\n"
        "print(pallasite.config.get('code_limit'))\n"
        "try: pallasite.config.update('no_such_option', 1)\n"
        "except pallasite.ConfigError as error: print('code_limit' in str(error))"
    )
    assert run(program).split() == ["7", "True"]


def test_importing_pallasite_loads_neither_jax_nor_plugins():
    loaded = run(
        "import sys, pallasite, pallasite.gpu, pallasite.errors, pallasite.config\n"
        "print(sorted(m for m in ('jax', 'numpy', 'llvmlite', 'pluggy', 'pallasite.plugins',"
        " 'pallasite.language', 'pallasite_hopper') if m in sys.modules))"
    )
    assert loaded == "[]"


def test_the_language_does_not_reach_for_the_runtime():
    """Whoever gets a name of ``pallasite.gpu`` has one, whose parts are imported when needed."""
    program = """
import sys
import pallasite.language.kernel, pallasite.language.params
print("pallasite.runtime" in sys.modules)
from pallasite import gpu
gpu.kernel
print("pallasite.runtime.registration" in sys.modules, "pallasite.runtime.compiler" in sys.modules)
"""
    assert run(program).splitlines() == ["False", "True False"]


def test_a_kernel_that_is_lowered_without_a_runtime(monkeypatch):
    monkeypatch.setattr(execution, "_registered", None)
    x = jax.ShapeDtypeStruct((8,), "float32")
    traced = jax.jit(gpu.kernel(lambda x_ref, o_ref: None, out_type=x)).trace(x)
    with pytest.raises(InternalError, match="is lowered, but no runtime is registered") as error:
        traced.lower(lowering_platforms=("cuda",))
    assert error.value.hint.startswith("import pallasite.gpu, which registers the runtime")


def test_exports_exist():
    for name in pallasite.__all__:
        assert getattr(pallasite, name) is not None, name
    assert set(dir(pallasite)) == {*pallasite.__all__, "autotune", "choose", "kernel_errors"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pallasite.nonsense


def test_public_names_of_the_language_exist():
    for name in PUBLIC_NAMES:
        assert getattr(gpu, name) is not None, name
    assert set(PUBLIC_NAMES) <= set(dir(gpu))


def test_name_of_an_installed_plugin():
    from pallasite_std.rules.registers import set_max_registers

    assert gpu.set_max_registers is set_max_registers
    assert "set_max_registers" in dir(gpu)


def test_name_of_a_disabled_plugin():
    config.update("disabled_plugins", "hopper")
    with pytest.raises(MissingNameError) as error:
        _ = gpu.wgmma_wait
    assert str(error.value).startswith(
        "pallasite.gpu has no name 'wgmma_wait'\n  try: enable plugin 'hopper'"
    )


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("wgmma", "hopper"),
        ("tcgen05_mma", "blackwell"),
        ("remote_ref", "multigpu"),
    ],
)
def test_name_of_a_plugin_that_is_not_installed(monkeypatch, name, extra):
    monkeypatch.setattr(plugins, "_manager", manager())
    with pytest.raises(AttributeError) as error:
        getattr(gpu, name)
    assert isinstance(error.value, PallasiteError)
    assert str(error.value).splitlines() == [
        f"pallasite.gpu has no name '{name}'",
        f"  try: pip install pallasite[{extra}]"
        f" (plugin '{extra}' provides it and is not installed)",
    ]


def test_name_of_a_plugin_that_is_not_published(monkeypatch):
    unpublished = KnownPlugin(name="later", names=("not_yet",))
    monkeypatch.setattr("pallasite.known_plugins.known_plugins", lambda: (unpublished,))
    monkeypatch.setattr(plugins, "_manager", manager())
    with pytest.raises(MissingNameError) as error:
        _ = gpu.not_yet
    assert error.value.hint == "plugin 'later', which is to provide it, is not available yet"


def test_name_that_an_installed_plugin_lacks(monkeypatch):
    old = FakeEntryPoint("hopper", lambda: Names({"something": "os:getcwd"}))
    monkeypatch.setattr(plugins, "_manager", manager(old))
    with pytest.raises(MissingNameError) as error:
        _ = gpu.wgmma
    assert error.value.hint == (
        "plugin 'hopper' is to provide it; this version, which is installed, does not have it"
    )


def test_known_plugins_can_be_installed_as_they_say():
    root = pathlib.Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for known in known_plugins():
        if not known.install:
            assert known.name not in extras and not (root / "plugins" / known.name).exists()
            continue
        assert known.install == f"pip install pallasite[{known.name}]"
        (distribution,) = extras[known.name]
        about = tomllib.loads((root / "plugins" / known.name / "pyproject.toml").read_text())
        assert about["project"]["name"] == distribution
        assert known.name in about["project"]["entry-points"]["pallasite.plugins"]


def test_no_message_names_an_extra_that_does_not_exist():
    root = pathlib.Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = set()
    sources = ("framework/**/*.py", "framework/**/*.json", "plugins/**/*.py")
    for source in [path for pattern in sources for path in root.glob(pattern)]:
        named.update(re.findall(r"pallasite\[([\w,]+)\]", source.read_text()))
    assert {"hopper", "cuda"} <= named
    assert {one for names in named for one in names.split(",")} <= set(
        project["optional-dependencies"]
    )


def test_missing_name_while_a_plugin_is_of_no_use(monkeypatch):
    def load():
        raise ImportError("boom")

    broken = FakeEntryPoint("broken", load)
    off = FakeEntryPoint("off", lambda: Names({"flash": "os:getcwd"}))
    monkeypatch.setattr(plugins, "_manager", manager(broken, off))
    with (
        config.scoped(disabled_plugins="off"),
        pytest.warns(plugins.PluginWarning),
        pytest.raises(MissingNameError) as error,
    ):
        _ = gpu.flash
    assert error.value.hint == (
        "plugins that are disabled may provide it: 'off' (PALLASITE_DISABLE_PLUGINS or config"
        " disabled_plugins); plugins that are broken may provide it: 'broken', which failed to"
        " load: ImportError: boom"
    )


def test_name_of_a_plugin_that_fails_to_load(monkeypatch):
    def load():
        raise ImportError("boom")

    monkeypatch.setattr(plugins, "_manager", manager(FakeEntryPoint("hopper", load)))
    with pytest.warns(plugins.PluginWarning), pytest.raises(MissingNameError) as error:
        _ = gpu.wgmma
    assert "repair plugin 'hopper', which provides it; it failed to load: ImportError: boom" in str(
        error.value
    )


def test_misspelt_name():
    with pytest.raises(MissingNameError, match="did you mean copy_gmem_to_smem"):
        _ = gpu.copy_gmem_to_smm
    assert not hasattr(gpu, "__wrapped__")


class Names:
    def __init__(self, names):
        self.names = names

    @pallasite.hookimpl
    def pallasite_names(self):
        return self.names


@pytest.mark.parametrize(
    ("taken", "owner"), [("kernel", "pallasite"), ("SMEM", "pallasite"), ("TMEM", "blackwell")]
)
def test_plugin_cannot_replace_a_name_of_the_core_or_of_a_memory_space(taken, owner):
    """It says whose it is, whatever is looked up, and when a kernel is compiled."""
    names = {taken: Replacement(path="os:getcwd", overrides=(owner,))}
    plugins.register(Names(names), name="thief")
    said = f"'{owner}' and 'thief' both register names of pallasite.gpu '{taken}'"
    try:
        for look in (lambda: gpu.no_such_name, lambda: dir(gpu), plugins.registry):
            with pytest.raises(PluginError, match=said):
                look()
    finally:
        plugins.unregister("thief")


def test_name_that_leads_nowhere():
    plugins.register(Names({"lost": "os:no_such_function"}), name="lost")
    try:
        with pytest.raises(PluginError, match="leads to os:no_such_function, which"):
            _ = gpu.lost
    finally:
        plugins.unregister("lost")


def test_table_of_known_plugins_agrees_with_the_plugins_here():
    """What a plugin lowers that the core does too is not missing without the plugin."""
    built_in = {str(rule.primitive) for rule in builtin.pallasite_lowering_rules()}
    for known in known_plugins():
        package = f"pallasite_{known.name}.plugin"
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        plugin = importlib.import_module(package)
        if hasattr(plugin, "pallasite_targets"):
            assert {target.name for target in plugin.pallasite_targets()} == set(known.targets)
        if hasattr(plugin, "pallasite_names"):
            assert set(plugin.pallasite_names()) <= set(known.names)
        if hasattr(plugin, "pallasite_lowering_rules"):
            rules = plugin.pallasite_lowering_rules()
            lowered = {str(rule.primitive) for rule in rules} - built_in
            assert lowered <= set(known.primitives)
        if hasattr(plugin, "pallasite_executors"):
            names = {executor.name for executor in plugin.pallasite_executors()}
            assert names == set(known.executors)


def test_distributions_are_released_together():
    """They have one version, and the plugins require a core of the same release."""
    root = pathlib.Path(__file__).parents[2]
    major, minor, _ = (int(part) for part in pallasite.__version__.split("."))
    for file in root.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        assert project["version"] == pallasite.__version__, file
        required = f"pallasite>={major}.{minor},<{major}.{minor + 1}"
        assert required in project["dependencies"], file
