"""Show or clear what is kept on disk: compiled kernels, and what plugins keep there.

The folder is that of PALLASITE_CACHE_DIR, else the user's cache folder; PALLASITE_CACHE=off
switches it off.

  pallasite cache                      what it holds
  pallasite cache tuned                one part: the configurations that were tuned
  pallasite cache clear --only tuned   forgets these
"""

from __future__ import annotations

import argparse
import datetime
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.cli import output
from pallasite.errors import InvalidValueError

if TYPE_CHECKING:
    from pallasite.runtime.store import DocumentStore, SealedStore

Stores = dict[str, "SealedStore | DocumentStore"]
_ACTIONS = ("info", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "action",
        nargs="?",
        default="info",
        metavar="info | PART | clear",
        help="what all parts hold, what one holds, or to remove it",
    )
    parser.add_argument("--only", metavar="PART", help="which part to clear, such as kernels")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Shows, or clears and says what was removed."""
    stores = open_stores()
    if arguments.only is not None and arguments.action != "clear":
        raise InvalidValueError("--only is for 'pallasite cache clear'")
    if arguments.action == "clear":
        return _clear(_only(stores, arguments.only), arguments.json)
    if arguments.action == "info":
        return _info(stores, arguments.json)
    return _show(_only(stores, arguments.action)[arguments.action], arguments.json)


def open_stores() -> Stores:
    """The parts of the cache folder by name; the core's first."""
    from pallasite.plugins import manager
    from pallasite.runtime.store import DocumentStore, SealedStore

    folder = config.get("cache_dir")
    return {
        name: DocumentStore(folder, one) if one.documents else SealedStore(folder, one)
        for name, one in manager().stores().items()
    }


def usage(store: SealedStore | DocumentStore) -> dict[str, Any]:
    """What a part holds, for programs; sizes in bytes."""
    found = store.usage()
    return {
        "directory": str(store.directory),
        "entries": found.entries,
        "files": found.files,
        "bytes": found.bytes,
        "max_bytes": getattr(store, "max_bytes", None),
        "oldest_use": found.oldest_use
        and datetime.datetime.fromtimestamp(found.oldest_use).isoformat(" ", timespec="seconds"),
    }


def _only(stores: Stores, name: str | None) -> Stores:
    if name is None:
        return stores
    if name not in stores:
        raise InvalidValueError(
            f"the cache has no part named {name!r}", expected=f"one of {', '.join(stores)}"
        )
    return {name: stores[name]}


def _info(stores: Stores, as_json: bool) -> int:
    folder, enabled = config.get("cache_dir"), config.get("cache")
    found = {name: usage(store) for name, store in stores.items()}
    if as_json:
        about = {"directory": str(folder), "exists": folder.is_dir(), "enabled": enabled}
        output.print_json({**about, "parts": found})
        return 0
    rows = [
        ("directory", str(folder) + ("" if folder.is_dir() else " (not created yet)")),
        ("state", "on" if enabled else "off"),
    ]
    for name, held in found.items():
        text = _held(stores[name], held["entries"], held["bytes"])
        if held["max_bytes"] is not None:
            text += f" of at most {output.size(held['max_bytes'])}"
        if held["oldest_use"]:
            text += f", the oldest used {held['oldest_use']}"
        if held["entries"] and stores[name].namespace.table is not None:
            text += f": pallasite cache {name}"
        rows.append((name, text))
    print(output.columns(rows))
    return 0


def _show(store: SealedStore | DocumentStore, as_json: bool) -> int:
    from pallasite.runtime.store import DocumentStore

    namespace, held = store.namespace, usage(store)
    entries = store.all_entries() if isinstance(store, DocumentStore) else None
    if as_json:
        output.print_json(held if entries is None else {**held, namespace.name: entries})
    elif entries and namespace.table is not None:
        print(output.table(*namespace.table(entries)))
    elif not held["entries"] and namespace.empty:
        print(namespace.empty)
    else:
        print(f"{_held(store, held['entries'], held['bytes'])} in {store.directory}")
    return 0


def _clear(stores: Stores, as_json: bool) -> int:
    removed, left = {}, {}
    for name, store in stores.items():
        before = store.usage()
        store.clear()
        after = store.usage()
        removed[name] = (before.entries - after.entries, before.bytes - after.bytes)
        if after.files:
            left[name] = after
    if as_json:
        parts = {name: {"entries": n, "bytes": size} for name, (n, size) in removed.items()}
        output.print_json({"directory": str(config.get("cache_dir")), "removed": parts})
    else:
        texts = [_held(stores[name], *amounts) for name, amounts in removed.items()]
        print(f"removed {' and '.join(texts)} from {config.get('cache_dir')}")
        for name, held in left.items():
            text = _held(stores[name], held.entries, held.bytes)
            print(f"{text} in {held.files} files could not be removed from {name}")
    return 1 if left else 0


def _held(store: SealedStore | DocumentStore, entries: int, size: int) -> str:
    return f"{store.namespace.count(entries)}, {output.size(size)}"
