"""``pallasite targets | plugins | passes | cache``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from core_support import FakeEntryPoint, manager

import pallasite
from pallasite import plugins
from pallasite.extensions import Pass
from pallasite.runtime.store import SealedStore
from pallasite.stores import KERNELS
from pallasite.targets import Target
from pallasite_std.tuning.store import TuningStore


class Extra:
    """A plugin with a target, a name and a pass."""

    @pallasite.hookimpl
    def pallasite_targets(self):
        return [Target(name="sm_250x", ptx_version=99, compute_capability=(25, 0))]

    @pallasite.hookimpl
    def pallasite_names(self):
        return {"extra_name": "os:getcwd"}

    @pallasite.hookimpl
    def pallasite_passes(self):
        return [
            Pass(name="late", stage="mlir", run=lambda *_: None, after=("mlir-hoist",)),
            Pass(name="on-jaxpr", stage="jaxpr", run=lambda *_: None, description="does it"),
        ]


class Contrary(Extra):
    """Contradicts :class:`Extra`."""


@pytest.fixture
def extra():
    plugins.register(Extra(), name="extra")
    yield
    plugins.unregister("extra")


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_targets(command, extra):
    result = command("targets")
    assert result.status == 0
    rows = {row[0]: row for row in cells(result.out.partition("\n\n")[0])}
    assert rows["sm_90"][1:4] == ["standard", "8.6", "227"]
    assert rows["sm_90a"][1] == "hopper"
    assert rows["sm_250x"][1:3] == ["extra", "9.9"]
    assert "\nsm_90a also: " in result.out


def test_missing_targets(command):
    result = command("targets", "--json")
    assert {one["name"] for one in result.json["targets"]} >= {"sm_90", "sm_100", "sm_90a"}
    assert result.json["missing"] == {}
    with pallasite.config.scoped(disabled_plugins="hopper"):
        result = command("targets")
        assert "not available" in result.out
        assert "enable plugin 'hopper'" in result.out
        assert list(command("targets", "--json").json["missing"]) == ["sm_90a"]


def test_one_target(command):
    result = command("targets", "sm_90")
    assert "sm_90  (plugin standard)" in result.out
    assert "232448  bytes of shared memory per block" in result.out
    assert command("targets", "sm_90", "--json").json["ptx_version"] == "8.6"
    result = command("targets", "sm_1")
    assert (result.status, result.err.splitlines()[0]) == (1, "error: no target named 'sm_1'")


def test_plugins(command, extra):
    result = command("plugins")
    assert result.status == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in result.out.splitlines()}
    assert lines["pallasite"].startswith(f"pallasite built in pallasite {pallasite.__version__}")
    assert "lowering rules" in lines["standard"]
    assert lines["extra"] == (
        "extra loaded in process targets sm_250x, names extra_name, passes on-jaxpr late"
    )
    assert lines["multigpu"].startswith("multigpu loaded ")
    assert "plugin API 2.0, " in lines["pallasite"]
    assert "executors simulator" in lines["simulator"]
    found = {one["name"]: one for one in command("plugins", "--json").json["plugins"]}
    assert found["extra"]["contributes"]["targets"] == ["sm_250x"]
    assert found["standard"]["contributes"]["lowering rules"] > 100
    for plugin in ("standard", "hopper"):
        assert {"matmul", "attention"} <= set(found[plugin]["contributes"]["operations"])
    assert found["simulator"]["contributes"]["executors"] == ["simulator"]
    assert found["simulator"]["contributes"]["PTX instructions"] > 100


def test_plugin_that_fails(command):
    class Failing:
        @pallasite.hookimpl
        def pallasite_targets(self):
            raise RuntimeError("no luck")

    plugins.register(Failing(), name="failing")
    try:
        result = command("plugins")
    finally:
        plugins.unregister("failing")
    assert result.status == 1
    assert "failing failed to load:" in result.out
    assert "RuntimeError: no luck" in result.out
    assert result.err == ""


def test_plugin_that_needs_another_plugin_api(command, monkeypatch):
    class Old:
        PALLASITE_PLUGIN_API = (0, 3)

    point = FakeEntryPoint("old", Old, dist=SimpleNamespace(name="old-plugin", version="0.2"))
    monkeypatch.setattr(plugins, "_manager", manager(point))
    result = command("plugins")
    assert result.status == 1
    assert "old        failed" in result.out
    assert (
        "old failed to load:\n"
        "  plugin 'old' (old-plugin 0.2) needs plugin API 0.3, and this pallasite has 2.0\n"
        "    expected: a plugin that needs 2.0\n"
        "    try: pip install --upgrade old-plugin, if there is a later version\n"
    ) in result.out
    found = {
        check["name"]: check for check in command("doctor", "--json").json["checks"]["plugins"]
    }
    assert found["old"]["remedy"].startswith(
        "pip install --upgrade old-plugin, if there is a later version; "
    )


def test_plugins_that_contradict_each_other(command, extra):
    plugins.register(Contrary(), name="contrary")
    try:
        result = command("plugins")
    finally:
        plugins.unregister("contrary")
    assert result.status == 1
    assert "plugins contradict each other:" in result.out
    assert "'extra'" in result.out


def test_passes(command, extra):
    result = command("passes")
    assert result.status == 0
    steps = [step["name"] for step in command("passes", "--json").json["steps"]]
    fixed = ["trace", "lower", "translate", "llvm-parse", "ptx-emit", "ptxas", "disassemble"]
    assert [name for name in steps if name in fixed] == fixed
    order = ["trace", "on-jaxpr", "lower", "mlir-canonicalize", "mlir-hoist", "late", "translate"]
    assert [name for name in steps if name in order] == order
    rows = {row[1]: row for row in cells(result.out) if "on-jaxpr" in row}
    assert rows["on-jaxpr"] == ["jaxpr", "on-jaxpr", "on", "extra", "every", "target", "does", "it"]


def test_disabled_passes(command, monkeypatch):
    monkeypatch.setenv("PALLASITE_DISABLE_PASSES", "mlir-hoist,nonsense")
    result = command("passes", "--target", "sm_90")
    assert "off (PALLASITE_DISABLE_PASSES)" in result.out
    assert "names passes that do not exist: nonsense" in result.out
    report = command("passes", "--json").json
    assert report["unknown_disabled_passes"] == ["nonsense"]


def test_cache(command, tmp_path):
    result = command("cache")
    assert f"{tmp_path / 'cache'} (not created yet)" in result.out
    SealedStore(tmp_path / "cache", KERNELS).put("0123", b"a kernel")
    report = command("cache", "info", "--json").json
    assert report["enabled"] is True
    kernels = report["parts"]["kernels"]
    assert (kernels["entries"], kernels["files"], kernels["max_bytes"]) == (1, 1, 2**30)
    assert kernels["bytes"] > 0
    (line,) = [one for one in command("cache").out.splitlines() if one.startswith("kernels")]
    assert "1 kernel, " in line and " of at most 1.0 GiB, the oldest used 20" in line
    assert command("cache", "kernels").out.startswith("1 kernel, ")
    result = command("cache", "clear")
    assert result.status == 0
    assert result.out.startswith("removed 1 kernel, ")
    assert command("cache", "--json").json["parts"]["kernels"]["entries"] == 0
    assert command("cache", "clear").out.startswith("removed 0 kernels, 0 bytes")


def test_cache_of_tuned_configurations(command, tmp_path):
    assert "tuned 0 tuned configurations, 0 bytes" in " ".join(command("cache").out.split())
    assert "PALLASITE_AUTOTUNE=on" in command("cache", "tuned").out
    store = TuningStore(tmp_path / "cache")
    for rows, arguments in ((64, "float32[8]"), (128, "float32[16]")):
        key = {"operation": "ops.add", "arguments": arguments, "device": "a GPU", "key": ["x"]}
        best = {"class": "Tiles", "rows": rows, "stages": None}
        store.put("ops.add", key, {"best": best, "microseconds": 12.5, "candidates": [best] * 3})
    store.put("other", {"operation": "other"}, {"best": 7})
    SealedStore(tmp_path / "cache", KERNELS).put("0123", b"a kernel")

    (line,) = [one for one in command("cache").out.splitlines() if one.startswith("tuned")]
    assert " ".join(line.split()).startswith("tuned 3 tuned configurations, ")
    assert line.endswith(": pallasite cache tuned")
    assert command("cache", "--json").json["parts"]["tuned"]["entries"] == 3
    lines = command("cache", "tuned").out.splitlines()
    assert lines[1].split()[:2] == ["ops.add", "float32[8];"]
    assert '["x"]' in lines[1] and "rows=64 stages=null" in lines[1] and "12.5" in lines[1]
    assert lines[3].split() == ["other", "-", "-", "7", "-", "-", "-"]
    report = command("cache", "tuned", "--json").json["tuned"]
    assert [entry["best"] for entry in report[1:]] == [{**best, "rows": 128}, 7]

    assert command("cache", "clear", "--only", "kernels").out.startswith("removed 1 kernel, ")
    assert command("cache", "--json").json["parts"]["tuned"]["entries"] == 3
    result = command("cache", "clear", "--only", "tuned", "--json")
    assert list(result.json["removed"]) == ["tuned"]
    assert result.json["removed"]["tuned"]["entries"] == 3
    store.put("other", {"operation": "other"}, {"best": 7})
    assert "and 1 tuned configuration, " in command("cache", "clear").out
    assert command("cache", "--json").json["parts"]["tuned"]["entries"] == 0


def test_parts_of_the_cache_that_do_not_exist(command):
    for arguments in (("cache", "nothing"), ("cache", "clear", "--only", "nothing")):
        result = command(*arguments)
        assert result.status == 1
        assert "error: the cache has no part named 'nothing'\n" in result.err
        expected = result.err.partition("expected: one of ")[2].split()
        assert {"kernels,", "loops,", "tuned,"} < set(expected)
    assert "--only is for 'pallasite cache clear'" in command("cache", "--only", "kernels").err


def test_what_cannot_be_removed(command, tmp_path, monkeypatch):
    SealedStore(tmp_path / "cache", KERNELS).put("0123", b"a kernel")
    monkeypatch.setattr("pallasite.files.remove", lambda path: False)
    result = command("cache", "clear", "--only", "kernels")
    assert result.status == 1
    assert result.out.startswith("removed 0 kernels, 0 bytes from ")
    assert "1 kernel, " in result.out and "in 1 files could not be removed from kernels" in (
        result.out
    )


def test_damaged_file_of_tuned_configurations(command, tmp_path):
    store = TuningStore(tmp_path / "cache")
    store.put("op", {"operation": "op"}, {"best": 7})
    store.path("op").write_text("{")
    result = command("cache")
    assert "tuned 0 tuned configurations, " in " ".join(result.out.split())
    assert "a damaged file of tuned configurations is ignored" in result.err
    assert command("cache", "clear").status == 0
    assert store.files() == []
