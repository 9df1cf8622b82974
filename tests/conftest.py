"""What all tests share: the checkout's plugins, a clean configuration, tests that need a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import pathlib
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

from pallasite import config, plugins
from pallasite.codegen import compile as code_generation
from pallasite.codegen.tools import find_tool
from pallasite.language.params import CompilerParams, LoweringSemantics
from pallasite.runtime import registration as registration  # so that traced kernels can run

pytest_plugins = ["pallasite_simulator.pytest_plugin"]

ROOT = pathlib.Path(__file__).parent.parent
GROUP = "pallasite.plugins"

# How long an example takes to be made or to run says nothing: other programs run as well.
hypothesis.settings.register_profile(
    "pallasite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pallasite")


def _register_plugins_of_checkout() -> None:
    """Where the plugins are only on the path, not installed, registers them in this process."""
    installed = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    for project in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        points = tomllib.loads(project.read_text())["project"]["entry-points"][GROUP]
        for name, module in points.items():
            if name not in installed:
                plugins.register(importlib.import_module(module), name=name)


_register_plugins_of_checkout()


@pytest.fixture(autouse=True)
def _clean_configuration(monkeypatch: pytest.MonkeyPatch):
    """Each test starts with no option set, and leaves none set."""
    for variable in [name for name in os.environ if name.startswith("PALLASITE_")]:
        monkeypatch.delenv(variable)
    config.reset()
    yield
    config.reset()


@pytest.fixture
def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> float:
    """The clock that measures durations goes on by so many seconds whenever it is read."""
    tick, ticks = 2.0**-10, itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * tick)
    return tick


@pytest.fixture
def lane_semantics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do not say which semantics they want have lane semantics, not the default."""
    defaults = CompilerParams.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lowering_semantics", LoweringSemantics.Lane)


@pytest.fixture(params=list(LoweringSemantics), ids=lambda semantics: semantics.name)
def semantics(request: pytest.FixtureRequest) -> LoweringSemantics:
    """Runs a test once for each semantics of kernels that do not say which they want."""
    if request.param is LoweringSemantics.Lane:
        request.getfixturevalue("lane_semantics")
    assert CompilerParams().lowering_semantics is request.param
    return request.param


@pytest.fixture(scope="session")
def _assemble(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], None] | None:
    """Fails unless ptxas accepts the PTX; None where there is no ptxas."""
    assembler = find_tool("ptxas").path
    if assembler is None:
        return None
    folder = tmp_path_factory.mktemp("ptx")
    accepted: set[str] = set()

    def check(ptx: str, target: str) -> None:
        if ptx in accepted:
            return
        source = folder / f"kernel-{threading.get_ident()}.ptx"  # Threads may compile side by side.
        source.write_text(ptx)
        command = [assembler, f"-arch={target}", "-O0", source, "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"ptxas refuses the PTX of a kernel:\n{result.stderr}"
        accepted.add(ptx)

    return check


@pytest.fixture(autouse=True)
def _every_ptx_assembles(
    monkeypatch: pytest.MonkeyPatch, _assemble: Callable[[str, str], None] | None
):
    """Whatever a test compiles is assembled for its target."""
    if _assemble is None:
        return
    run_stage = code_generation.run_stage

    def run_and_assemble(stage: str, program: Any, context: Any) -> Any:
        result = run_stage(stage, program, context)
        if stage == "ptx":
            _assemble(result, context.target.name)
        return result

    monkeypatch.setattr(code_generation, "run_stage", run_and_assemble)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each processor, but just one where there is a GPU, which is not shared."""
    return 1 if pathlib.Path("/proc/driver/nvidia/version").exists() else os.cpu_count() or 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the hardware itself need it; those that run kernels take what there is."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="JAX has no CUDA GPU here"))
