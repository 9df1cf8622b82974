"""Where the code of a distribution is: its modules, whichever way it is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

_Distribution = importlib.metadata.Distribution


def find_distribution(name: str) -> _Distribution | None:
    """An installed distribution, or None."""
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def top_level_names(distribution: _Distribution | None) -> frozenset[str]:
    """Names of the modules and packages that come with a distribution.

    They are those of its record of installed files, of the folders that an editable installation
    adds to the path, and of what is beside the metadata of a distribution without a record.
    """
    if distribution is None:
        return frozenset()
    names = set((distribution.read_text("top_level.txt") or "").split())
    folder = pathlib.Path(str(distribution.locate_file("")))
    record = distribution.read_text("RECORD")
    if record is None:
        if len(list(folder.glob("*.dist-info"))) == 1:
            names.update(_importable(folder))
        return frozenset(names)
    for first in {line.split(",")[0].partition("/")[0] for line in record.splitlines()}:
        if first.endswith(".pth"):
            for added in _added_folders(folder / first):
                names.update(_importable(added))
        elif first.startswith("__editable__") and first.endswith(".py"):
            finder = sys.modules.get(first.removesuffix(".py"))
            names.update(getattr(finder, "MAPPING", ()))
        else:
            names.update(_module_name(first))
    return frozenset(names)


def requirements(distribution: _Distribution | None) -> frozenset[str]:
    """Names of the distributions that one requires, also for its extras."""
    text = "" if distribution is None else distribution.read_text("METADATA") or ""
    return frozenset(
        _normalized(name) for name in re.findall(r"^Requires-Dist:\s*([\w.-]+)", text, re.MULTILINE)
    )


def roots(names: Iterable[str]) -> tuple[str, ...]:
    """The files and folders of the modules of some names, as they would be imported."""
    found: list[str] = []
    for name in sorted(names):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None:
            continue
        if spec.submodule_search_locations:
            found += [os.path.abspath(path) for path in spec.submodule_search_locations]
        elif spec.has_location and spec.origin:
            found.append(os.path.abspath(spec.origin))
    return tuple(found)


def recorded_hash(distribution: _Distribution) -> str | None:
    """SHA-256 of a distribution's record, which has the hashes of all its files; None if there is
    none, or it says nothing of the code since the installation is editable."""
    if json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info"):
        return None
    record = distribution.read_text("RECORD")
    return None if record is None else hashlib.sha256(record.encode()).hexdigest()


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _added_folders(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folders that a ``.pth`` file adds to the path."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        if line.strip() and not line.startswith(("#", "import ", "import\t")):
            folder = path.parent / line.strip()
            if folder.is_dir():
                yield folder


def _importable(folder: pathlib.Path) -> Iterator[str]:
    """Names of the modules in a folder, and of the packages that are not namespaces."""
    for entry in os.scandir(folder):
        if not entry.is_dir():
            yield from _module_name(entry.name)
        elif entry.name.isidentifier() and os.path.exists(os.path.join(entry, "__init__.py")):
            yield entry.name


def _module_name(first: str) -> Iterator[str]:
    """The name of a module or package whose file or folder is called so, if it is one."""
    stem, _, suffix = first.partition(".")
    if stem.isidentifier() and (not suffix or suffix.endswith(("py", "so", "pyd", "pyc"))):
        yield stem
