"""What all tests share: the checkout's plugins, a clean configuration, tests that need a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import tomllib

import pytest

from pallasite import config, plugins

ROOT = pathlib.Path(__file__).parent.parent
GROUP = "pallasite.plugins"


def _register_plugins_of_checkout() -> None:
    """Where the plugins are only on the path, not installed, registers them in this process."""
    installed = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    for project in sorted(ROOT.glob("plugins/*/pyproject.toml")):
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="JAX has no CUDA GPU here"))
