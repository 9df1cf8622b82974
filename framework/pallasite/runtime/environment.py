"""What else decides the result of a compilation: versions, plugins, options, the assembler."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys

from pallasite import _jax, config, hookspecs, plugins
from pallasite.codegen.tools import find_tool
from pallasite.plugins import IN_PROCESS
from pallasite.runtime.fingerprint import Unkeyable

_LIBRARIES = ("jax", "jaxlib", "llvmlite", "numpy", "ml_dtypes")
_OPTIONS_WITHOUT_EFFECT = frozenset({"cache", "cache_dir", "dump", "target", "ptxas"})
"""Options that change no result; the target and the assembler are part of the key on their own."""


def environment_text(*, assemble: bool) -> str:
    """Everything outside the kernel that its compilation depends on, as one text.

    It has the versions of Python, Pallasite, its libraries and every enabled plugin, the contents
    of the source files of those that are not installed copies (a checkout, an editable
    installation), and the options (also Pallas's debug checks) that affect code.

    Args:
      assemble: whether machine code is asked for, so that the assembler counts too.

    Raises:
      Unkeyable: a plugin was registered by the program itself; its code has no version.
    """
    enabled = []
    for plugin in plugins.manager().plugins():
        if plugin.state == "disabled":
            continue
        if plugin.distribution == IN_PROCESS:
            raise Unkeyable(f"plugin {plugin.name!r}, which was registered in this process")
        enabled.append(plugin.name)
    return json.dumps(
        {
            "python": sys.version_info[:3],
            "libraries": _library_versions(),
            "core": _package_version("pallasite", "pallasite"),
            "plugins": {name: _plugin_version(name) for name in sorted(enabled)},
            "options": {
                name: repr(config.get(name))
                for name, option in sorted(config.OPTIONS.items())
                if option.affects_code and name not in _OPTIONS_WITHOUT_EFFECT
            },
            "debug_checks": _jax.debug_checks_enabled(),
            "assembler": _assembler() if assemble else None,
        },
        sort_keys=True,
    )


@functools.cache
def _library_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


@functools.cache
def _plugin_version(name: str) -> str:
    """Version of the plugin of an entry point, and its sources where they can change."""
    for point in importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP):
        if point.name == name:
            distribution = point.dist.name if point.dist is not None else ""
            return _package_version(distribution, point.module.partition(".")[0])
    raise Unkeyable(f"plugin {name!r}, which has no entry point")


@functools.cache
def _package_version(distribution: str, package: str) -> str:
    """``version``, or ``version+hash of sources`` for a package that is edited in place."""
    try:
        found = importlib.metadata.distribution(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return f"+{_hash_of_sources(package)}"
    about = json.loads(found.read_text("direct_url.json") or "{}")
    if not about.get("dir_info", {}).get("editable") and _is_part_of(found, package):
        return found.version
    return f"{found.version}+{_hash_of_sources(package)}"


def _roots(package: str) -> list[pathlib.Path]:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise Unkeyable(f"package {package!r}, which cannot be found")
    if spec.submodule_search_locations:
        return [pathlib.Path(root) for root in spec.submodule_search_locations]
    if spec.origin is None:
        raise Unkeyable(f"package {package!r}, which has no file")
    return [pathlib.Path(spec.origin)]


def _is_part_of(distribution: importlib.metadata.Distribution, package: str) -> bool:
    """Whether what would be imported is what the distribution installed."""
    (root, *more) = _roots(package)
    installed = pathlib.Path(str(distribution.locate_file(""))).resolve()
    return not more and root.resolve().parent == installed


def _hash_of_sources(package: str) -> str:
    """SHA-256 over the names and contents of a package's Python files."""
    digest = hashlib.sha256()
    for root in _roots(package):
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for file in files:
            digest.update(str(file.relative_to(root.parent)).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _assembler() -> list[object]:
    """The programs that make and show machine code; a new version is another file."""
    known: list[object] = []
    for name in ("ptxas", "nvdisasm"):
        path = find_tool(name).path
        status = path.stat() if path is not None else None
        known.append([str(path), status and status.st_size, status and status.st_mtime_ns])
    return known
