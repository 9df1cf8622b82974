"""``pallasite doctor`` on a healthy machine and on ones where something is wrong."""

from __future__ import annotations

import subprocess

import pytest

import pallasite
from pallasite import config, plugins
from pallasite.cli import doctor_devices
from pallasite.cli.checks import PROBLEM, WARNING
from pallasite.extensions import InstructionRule

CPU = {"platform": "cpu", "version": "cpu", "devices": [["cpu", ""]]}
GPU = {
    "platform": "gpu",
    "version": "PJRT C API\ncuda 13000",
    "devices": [["NVIDIA H200", "9.0"]] * 2,
}


@pytest.fixture(autouse=True)
def devices(monkeypatch, tmp_path):
    """What JAX would say; tests change it."""
    answer = dict(CPU)
    monkeypatch.setattr(doctor_devices, "ask_jax", lambda: answer)
    monkeypatch.setattr(doctor_devices, "_DRIVER_VERSION", tmp_path / "no driver")
    return answer


def checks(result):
    return {one["name"]: one for section in result.json["checks"].values() for one in section}


def test_healthy(command):
    result = command("doctor")
    assert result.status == 0, result.out
    for title in ("software", "devices", "tools", "plugins", "cache", "configuration"):
        assert f"{title}\n" in result.out
    assert "cpu: 1 x cpu" in result.out
    assert "Kernels can be compiled." in result.out
    assert result.err == ""
    found = checks(command("doctor", "--json"))
    assert {"Python", "jax", "jaxlib", "llvmlite", "LLVM", "ptxas", "hopper"} <= set(found)
    assert not [one for one in found.values() if one["state"] == PROBLEM]


def test_gpu(command, devices):
    devices.update(GPU)
    found = checks(command("doctor", "--json"))
    assert found["JAX devices"]["text"] == (
        "gpu: 2 x NVIDIA H200 (compute capability 9.0); cuda 13000"
    )


def test_executors(command, devices):
    result = command("doctor", "--json")
    found = checks(result)
    assert found["on cuda"]["text"].startswith("jax-launcher runs kernels: ")
    assert found["on cpu, as JAX is here"]["text"].startswith("simulator runs kernels: ")
    listed = {one["platform"]: one for one in result.json["executors"]}
    assert [one["name"] for one in listed["cpu"]["executors"]] == ["simulator"]
    assert listed["cpu"]["runs"] == "simulator"
    assert found["PTX instructions"]["text"].startswith("rules for ")
    with config.scoped(disabled_plugins=("simulator", "hopper", "blackwell", "multigpu")):
        found = checks(command("doctor", "--json"))
        here = found["on cpu, as JAX is here"]
        assert here["text"] == ("nothing runs kernels: no plugin has an executor for this platform")
        assert here["state"] == WARNING
        assert "enable plugin 'simulator'" in here["remedy"]
        assert "PTX instructions" not in found
    devices.update(GPU)
    found = checks(command("doctor", "--json"))
    assert "on cuda, as JAX is here" in found and "on cpu" in found


class Launchers:
    """Two launchers for CUDA, one of which cannot work, and one for a platform of its own."""

    @pallasite.hookimpl
    def pallasite_executors(self):
        def run(compiled, *operands, request):
            return []

        def reason():
            return "needs driver 999"

        return [
            pallasite.Executor(name="fast", platforms=("cuda",), run=run, priority=5),
            pallasite.Executor(
                name="faster", platforms=("cuda",), run=run, priority=9, available=reason
            ),
            pallasite.Executor(name="other", platforms=("toaster",), run=run),
        ]


def test_which_executor_runs_and_why(command, monkeypatch):
    plugins.register(Launchers(), name="launchers")
    try:
        result = command("doctor", "--json")
        table = [line.split() for line in command("doctor").out.splitlines()]
        monkeypatch.setenv("PALLASITE_EXECUTOR", "faster")
        forced = command("doctor", "--json")
        shown = command("doctor").out
    finally:
        plugins.unregister("launchers")
    (cuda, _, toaster) = result.json["executors"]
    assert (cuda["runs"], cuda["reason"]) == (
        "fast",
        "the highest priority, 5, of those that are available",
    )
    assert [(one["name"], one["unavailable"]) for one in cuda["executors"]] == [
        ("faster", "needs driver 999"),
        ("fast", None),
        ("jax-launcher", None),
    ]
    assert (toaster["platform"], toaster["runs"]) == ("toaster", "other")
    expected = ["cuda", "faster", "launchers", "9", "no:", "needs", "driver", "999", "no"]
    assert expected in table
    assert ["cuda", "fast", "launchers", "5", "yes", "yes"] in table
    found = checks(forced)["on cuda"]
    assert found["state"] == WARNING
    assert found["text"] == (
        "nothing runs kernels: PALLASITE_EXECUTOR names faster, which cannot run: needs driver 999"
    )
    assert forced.json["executors"][0]["forced"] == "faster"
    assert "! on cuda" in shown


def test_instructions_that_contradict_each_other(command):
    class Plugin:
        @pallasite.hookimpl
        def pallasite_instructions(self):
            return [InstructionRule(name="mov", bind=print)]

    plugins.register(Plugin(), name="moving")
    try:
        result = command("doctor", "--json")
        listing = command("plugins")
    finally:
        plugins.unregister("moving")
    found = checks(result)["PTX instructions"]
    assert (result.status, found["state"]) == (0, WARNING)
    assert "'moving'" in found["text"] and "'mov'" in found["text"]
    assert listing.status == 1
    assert "plugins contradict each other" in listing.out


def test_jax_that_does_not_start(command, devices):
    devices.clear()
    devices["error"] = "Fatal: no"
    result = command("doctor")
    assert result.status == 0
    assert "! JAX devices" in result.out
    assert "JAX does not start: Fatal: no" in result.out


def test_driver_without_cuda(command, monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\nmore\n")
    monkeypatch.setattr(doctor_devices, "_DRIVER_VERSION", driver)
    found = checks(command("doctor", "--json"))
    assert found["GPU driver"]["state"] == WARNING
    assert "pallasite[cuda]" in found["GPU driver"]["remedy"]


@pytest.mark.parametrize(
    ("variable", "value", "name", "state", "text"),
    [
        ("PALLASITE_CACHE", "perhaps", "cache", PROBLEM, "does not accept"),
        ("PALLASITE_TARGET", "sm_1", "selected target", PROBLEM, "no target named 'sm_1'"),
        ("PALLASITE_TARGET", "sm_90", "selected target", "ok", "sm_90"),
        ("PALLASITE_DISABLE_PASSES", "x", "disabled passes", PROBLEM, "do not exist: x"),
        ("PALLASITE_PTXAS", "off", "ptxas", PROBLEM, ""),
        ("PALLASITE_CACH", "1", "PALLASITE_CACH", WARNING, "no option reads"),
        ("PALLASITE_CACHE_DIR", "/dev/null/cache", "cache", WARNING, "cannot be written"),
    ],
)
def test_configuration(command, monkeypatch, variable, value, name, state, text):
    monkeypatch.setenv(variable, value)
    result = command("doctor", "--json")
    section = "tools" if name == "ptxas" else None
    found = [
        one
        for title, section_checks in result.json["checks"].items()
        for one in section_checks
        if one["name"] == name and section in (None, title)
    ]
    states = {one["state"] for one in found}
    if name == "ptxas":
        assert states == {WARNING}
        assert "switched off" in found[0]["text"]
        assert result.status == 0
        return
    assert state in states
    assert any(text in one["text"] for one in found)
    assert result.status == (1 if state == PROBLEM else 0)
    assert all(one["remedy"] for one in found if one["state"] != "ok")


def test_plugin_that_fails(command):
    class Failing:
        @pallasite.hookimpl
        def pallasite_targets(self):
            raise RuntimeError("no luck\nwhatever was tried")

    plugins.register(Failing(), name="failing")
    try:
        result = command("doctor")
    finally:
        plugins.unregister("failing")
    assert result.status == 0
    assert "! failing" in result.out
    reason = "RuntimeError: no luck (in pallasite_targets of plugin 'failing' (in process))"
    assert f"in process, failed: {reason}" in " ".join(result.out.split())


def test_ask_jax_survives_a_crash(monkeypatch):
    monkeypatch.undo()

    def crash(*arguments, **keywords):
        return subprocess.CompletedProcess(arguments, -11, "", "F: check failed\n")

    monkeypatch.setattr(subprocess, "run", crash)
    assert doctor_devices.ask_jax() == {"error": "F: check failed"}

    def hang(*arguments, **keywords):
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "no answer" in doctor_devices.ask_jax()["error"]
