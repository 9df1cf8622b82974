"""List the plugins, what they contribute, and what is wrong with them.

Exit status 1 if a plugin fails to load or two contradict each other.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

import pallasite
from pallasite.cli import output
from pallasite.errors import PluginError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--json", action="store_true", help="for programs")


@dataclasses.dataclass
class _Row:
    """One plugin, installed or known."""

    name: str
    distribution: str
    state: str
    error: str = ""
    install: str = ""
    contributes: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(arguments: argparse.Namespace) -> int:
    """Loads all plugins and lists them."""
    from pallasite.cli.contributions import quiet

    with quiet():
        contradiction = _load()
        rows = _rows(contradiction)
    if arguments.json:
        found = [dataclasses.asdict(row) for row in rows]
        output.print_json({"plugins": found, "contradiction": contradiction or None})
    else:
        headers = ("plugin", "state", "distribution", "contributes")
        cells = [(row.name, row.state, row.distribution, _summary(row)) for row in rows]
        print(output.table(headers, cells))
        for row in rows:
            if row.error:
                print(f"\n{row.name} failed to load:\n{output.indented(row.error)}")
        if contradiction:
            print(f"\nplugins contradict each other:\n{output.indented(contradiction)}")
    return 1 if contradiction or any(row.error for row in rows) else 0


def _load() -> str:
    """Loads everything; returns in what plugins contradict each other."""
    from pallasite.plugins import manager

    try:
        manager().registry()
        manager().instructions()
        manager().stores()
        manager().paths("exports")
    except PluginError as error:
        return str(error)
    return ""


def _rows(contradiction: str) -> list[_Row]:
    from pallasite import plugins
    from pallasite.cli.contributions import counts, providers
    from pallasite.known_plugins import known_plugins
    from pallasite.plugin_api import PLUGIN_API
    from pallasite.plugin_options import describe

    core = _Row(plugins.CORE, f"pallasite {pallasite.__version__}", "built in")
    core.contributes["plugin API"] = [".".join(map(str, PLUGIN_API))]
    found = [_Row(p.name, p.distribution, p.state, p.error) for p in plugins.plugins()]
    present = {row.name for row in found}
    rows = [core, *found]
    if not contradiction:
        registry, manager = plugins.registry(), plugins.manager()
        rules = counts(registry)
        for kind, plugin_of in (
            ("targets", providers(manager.targets)),
            ("names", providers(partial(manager.paths, "names"))),
            ("names of pallasite", providers(partial(manager.paths, "exports"))),
            ("memory spaces", providers(manager.memory_spaces)),
            ("layouts", {entry.name: entry.plugin for entry in manager.layouts().values()}),
            ("layout proposals", {one.name: one.plugin for one in registry.layout_proposals()}),
            ("front ends", providers(partial(manager.paths, "front_ends"))),
            ("implementations", providers(partial(manager.paths, "implementations"))),
            ("passes", {entry.name: entry.plugin for entry in registry.passes()}),
            ("lifecycles", {entry.name: entry.plugin for entry in registry.lifecycles()}),
            ("executors", {one.name: one.plugin for one in registry.executors.values()}),
            ("parts of the cache", {one.name: one.plugin for one in manager.stores().values()}),
        ):
            for row in rows:
                names = [name for name, plugin in plugin_of.items() if plugin == row.name]
                if names:
                    row.contributes[kind] = names
        for row in rows:
            operations = [one.name for one in manager.all_operations() if one.plugin == row.name]
            if operations:
                row.contributes["operations"] = list(dict.fromkeys(operations))
        for name, declared in manager.options().items():
            for row in rows:
                if row.name == name:
                    row.contributes["options"] = [one for one, _, _ in describe(declared)]
        for row in rows:
            row.contributes.update(rules.get(row.name, {}))
    return rows + [
        _Row(known.name, "", known.absence, install=known.install)
        for known in known_plugins()
        if known.name not in present
    ]


def _summary(row: _Row) -> str:
    if row.install:
        return row.install
    parts = []
    for kind, value in row.contributes.items():
        if isinstance(value, int):
            parts.append(f"{value} {kind}")
        elif len(value) > 5:
            parts.append(f"{len(value)} {kind}")
        else:
            parts.append(f"{kind} {' '.join(value)}")
    return ", ".join(parts)
