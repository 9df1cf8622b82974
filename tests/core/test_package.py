"""What ``import pallasite`` and ``pallasite.gpu`` load and offer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from core_support import FakeEntryPoint, manager

import pallasite
from pallasite import config, gpu, plugins
from pallasite.errors import MissingNameError, PallasiteError, PluginError
from pallasite.known_plugins import KNOWN_PLUGINS
from pallasite.language import PUBLIC_NAMES
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


def test_importing_pallasite_loads_neither_jax_nor_plugins():
    loaded = run(
        "import sys, pallasite, pallasite.gpu, pallasite.errors, pallasite.config\n"
        "print(sorted(m for m in ('jax', 'numpy', 'llvmlite', 'pluggy', 'pallasite.plugins',"
        " 'pallasite.language', 'pallasite_hopper') if m in sys.modules))"
    )
    assert loaded == "[]"


def test_the_language_without_a_runtime():
    """It does not reach for the runtime; whoever imports ``pallasite.gpu`` has one."""
    program = """
import sys, jax, jax.numpy as jnp
from pallasite.errors import InternalError
from pallasite.language.kernel import kernel
call = jax.jit(kernel(lambda x, o: None, out_type=jax.ShapeDtypeStruct((8,), jnp.float32)))
x = jax.ShapeDtypeStruct((8,), jnp.float32)
try:
    call.trace(x).lower(lowering_platforms=("cuda",))
except InternalError as error:
    print(error.message)
print("pallasite.runtime" in sys.modules)
from pallasite import gpu
gpu.kernel
print("pallasite.runtime.registration" in sys.modules, "pallasite.runtime.api" in sys.modules)
"""
    assert run(program).splitlines() == [
        "kernel 'lambda' is lowered, but no runtime is registered",
        "False",
        "True False",
    ]


def test_exports_exist():
    for name in pallasite.__all__:
        assert getattr(pallasite, name) is not None, name
    assert set(dir(pallasite)) == {*pallasite.__all__, "autotune", "choose"}
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


def test_plugin_cannot_replace_a_name_of_the_core():
    plugins.register(Names({"kernel": "os:getcwd"}), name="thief")
    try:
        with pytest.raises(PluginError, match="names that the core has: kernel"):
            _ = gpu.no_such_name
    finally:
        plugins.unregister("thief")


def test_name_that_leads_nowhere():
    plugins.register(Names({"lost": "os:no_such_function"}), name="lost")
    try:
        with pytest.raises(PluginError, match="os:no_such_function does not exist"):
            _ = gpu.lost
    finally:
        plugins.unregister("lost")


def test_table_of_known_plugins_agrees_with_the_plugins_here():
    """What a plugin lowers that the core does too is not missing without the plugin."""
    built_in = {str(rule.primitive) for rule in builtin.pallasite_lowering_rules()}
    for known in KNOWN_PLUGINS:
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
