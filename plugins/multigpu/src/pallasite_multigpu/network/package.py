"""The package with NVSHMEM's libraries."""

from __future__ import annotations

import importlib.util
import pathlib

PACKAGE = "nvidia-nvshmem-cu13"


def find(name: str) -> pathlib.Path | None:
    """Where a file of its libraries is; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        place = pathlib.Path(folder) / "lib" / name
        if place.exists():
            return place
    return None
