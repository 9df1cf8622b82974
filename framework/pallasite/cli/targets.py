"""List the targets that kernels can be compiled for.

The last ones are those that a known plugin would add, with the command that installs it.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from pallasite.cli import output

if TYPE_CHECKING:
    from pallasite.targets import Target

_LIMITS = (
    ("max_shared_memory", "bytes of shared memory per block"),
    ("max_threads", "threads per block"),
    ("max_registers", "registers per thread"),
    ("registers_per_block", "registers per block"),
    ("max_cluster_size", "blocks per cluster"),
    ("multiprocessors", "multiprocessors on a full chip"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("name", nargs="?", help="show all that is known about one target")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Lists, or shows one."""
    from pallasite.cli.contributions import providers
    from pallasite.plugins import manager
    from pallasite.target_selection import find_target

    plugin_of = providers(manager().targets)
    if arguments.name is not None:
        target = find_target(arguments.name)
        if arguments.json:
            output.print_json(_as_json(target, plugin_of[target.name]))
        else:
            print(_details(target, plugin_of[target.name]))
        return 0
    available = [manager().targets()[name] for name in sorted(plugin_of, key=_order)]
    missing = _missing(set(plugin_of))
    if arguments.json:
        found = [_as_json(target, plugin_of[target.name]) for target in available]
        output.print_json({"targets": found, "missing": missing})
        return 0
    rows = [
        (
            target.name,
            plugin_of[target.name],
            _version(target.ptx_version),
            f"{target.max_shared_memory / 1024:g}",
            target.max_cluster_size,
            ", ".join(f"{name} {limit}" for name, limit in sorted(target.limits.items())) or "-",
            target.description,
        )
        for target in available
    ]
    headers = ("target", "plugin", "PTX", "SMEM KiB", "cluster", "other limits", "")
    print(output.table(headers, rows))
    common = frozenset.intersection(*(target.features for target in available))
    print(f"\nfeatures of all: {', '.join(sorted(common)) or 'none'}")
    for target in available:
        more = sorted(target.features - common)
        if more:
            print(f"{target.name} also: {', '.join(more)}")
    if missing:
        print("\nnot available")
        print(output.indented(output.table(("target", "try"), missing.items())))
    return 0


def _missing(available: set[str]) -> dict[str, str]:
    """Targets that a known plugin would provide, each with what to do to get it."""
    from pallasite.known_plugins import known_plugins
    from pallasite.plugins import manager

    return {
        name: manager().remedy("targets", name) or ""
        for plugin in known_plugins()
        for name in plugin.targets
        if name not in available
    }


def _details(target: Target, plugin: str) -> str:
    major, minor = target.compute_capability
    lines = [
        f"{target.name}  (plugin {plugin})",
        target.description,
        "",
        f"{_version(target.ptx_version):>8}  PTX version",
        *(
            [f"{target.architecture:>8}  architecture"]
            if target.architecture not in ("", target.name)
            else ()
        ),
        f"{f'{major}.{minor}':>8}  compute capability of the oldest device",
        *(f"{getattr(target, field):>8}  {text}" for field, text in _LIMITS),
        *(f"{limit:>8}  {name} per block" for name, limit in sorted(target.limits.items())),
        "",
        "features: " + ", ".join(sorted(target.features)),
    ]
    return "\n".join(lines)


def _as_json(target: Target, plugin: str) -> dict[str, Any]:
    fields = dataclasses.asdict(target) | {"features": sorted(target.features)}
    return fields | {"ptx_version": _version(target.ptx_version), "plugin": plugin}


def _version(ptx_version: int) -> str:
    return f"{ptx_version // 10}.{ptx_version % 10}"


def _order(name: str) -> tuple[int, str]:
    """Sorts by the number in a name: sm_90, sm_90a, sm_100."""
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name
