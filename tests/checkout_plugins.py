"""Where plugins of the checkout are only on the path, makes them installed ones."""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys

from tests import session_folders
from tests.plugins import installation

from pallasite import plugins
from pallasite._jax import hide_frames_of


def install_plugins() -> None:
    """Gives entry points to plugins without, for this process and those that it starts: kernels
    that plugins compile which are not installed are in no cache."""
    group, root = installation.GROUP, installation.ROOT
    there = {point.name for point in importlib.metadata.entry_points(group=group)}
    folder = session_folders.make("plugins")
    for project in [root, *sorted(one.parent for one in root.glob("plugins/*/pyproject.toml"))]:
        points = installation.read_project(project)["entry-points"][group]
        if not there.issuperset(points):
            installation.write_metadata(project, folder)
    missing = importlib.metadata.distributions(path=[str(folder)])
    points = [point for one in missing for point in one.entry_points.select(group=group)]
    if points:
        sys.path.append(str(folder))
        plugins.manager().refresh()
    for point in points:
        hide_frames_of(str(pathlib.Path(point.load().__file__ or "").parent))
