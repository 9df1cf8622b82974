"""Show or clear the caches on disk: of compiled kernels, and of configurations that were tuned.

The folder is that of PALLASITE_CACHE_DIR, else the user's cache folder; PALLASITE_CACHE=off
switches both caches off.

  pallasite cache                      what they hold
  pallasite cache tuned                the configurations that were measured to be the fastest
  pallasite cache clear --only tuned   forgets these
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.cli import output

if TYPE_CHECKING:
    from pallasite.runtime.disk_cache import DiskCache
    from pallasite_std.tuning.store import Entry, TuningStore

KINDS = ("kernels", "tuned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("action", nargs="?", choices=("info", "tuned", "clear"), default="info")
    parser.add_argument("--only", choices=KINDS, help="which of the two to clear")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Shows, or clears and says what was removed."""
    from pallasite.runtime.disk_cache import DiskCache
    from pallasite_std.tuning.store import TuningStore

    store, tuning = DiskCache(config.get("cache_dir")), TuningStore(config.get("cache_dir"))
    if arguments.action == "clear":
        return _clear(store, tuning, arguments)
    entries = tuning.all_entries()
    if arguments.action == "tuned":
        _show_tuned(entries, arguments.json)
        return 0
    found = {**usage(store), "tuned": len(entries)}
    if arguments.json:
        output.print_json(found)
        return 0
    print(f"directory  {store.directory}" + ("" if found["exists"] else " (not created yet)"))
    print(f"state      {'on' if found['enabled'] else 'off'}")
    print(f"holds      {_kernels(found['kernels'], found['bytes'])}")
    print(f"bound      {output.size(found['max_bytes'])}")
    if found["oldest_use"]:
        print(f"oldest use {found['oldest_use']}")
    operations = len({entry["key"].get("operation") for entry in entries})
    of = f" of {_count(operations, 'operation')}: pallasite cache tuned" if entries else ""
    print(f"tuned      {_count(len(entries), 'configuration')}{of}")
    return 0


def _clear(store: DiskCache, tuning: TuningStore, arguments: argparse.Namespace) -> int:
    before, tuned_before = usage(store), len(tuning.all_entries())
    if arguments.only in (None, "kernels"):
        store.clear()
    if arguments.only in (None, "tuned"):
        tuning.clear()
    after, files = usage(store), tuning.files()
    tuned = tuned_before - len(tuning.all_entries())
    removed = {name: before[name] - after[name] for name in ("kernels", "bytes")}
    if arguments.json:
        output.print_json(
            {"directory": str(store.directory), "removed": {**removed, "tuned": tuned}}
        )
    else:
        what = {"kernels": _kernels(**removed), "tuned": _count(tuned, "tuned configuration")}
        shown = " and ".join(text for kind, text in what.items() if arguments.only in (None, kind))
        print(f"removed {shown} from {store.directory}")
    left = []
    if arguments.only in (None, "kernels") and after["kernels"]:
        left.append(_kernels(after["kernels"], after["bytes"]))
    if arguments.only in (None, "tuned") and files:
        left.append(_count(len(files), "file") + " of tuned configurations")
    if left and not arguments.json:
        print(f"{' and '.join(left)} could not be removed")
    return 1 if left else 0


def _show_tuned(entries: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        output.print_json({"tuned": list(entries)})
        return
    if not entries:
        print("no configuration was tuned: PALLASITE_AUTOTUNE=on, or pallasite.autotune")
        return
    rows = []
    for entry in entries:
        key, best, time = entry["key"], entry["best"], entry.get("microseconds")
        extra = "" if key.get("key") is None else f"; {json.dumps(key['key'])}"
        rows.append(
            (
                key.get("operation", "-"),
                f"{key.get('arguments', '-')}{extra}",
                key.get("device", "-"),
                _configuration(best),
                "-" if time is None else f"{time:g}",
                len(entry.get("candidates", ())) or "-",
                entry.get("date", "-"),
            )
        )
    headers = ("operation", "arguments", "device", "fastest", "us", "of", "measured")
    print(output.table(headers, rows))


def _configuration(best: Any) -> str:
    """A configuration in few words; the name of its class says little."""
    if not isinstance(best, dict):
        return json.dumps(best)
    return " ".join(
        f"{name}={json.dumps(value)}" for name, value in best.items() if name != "class"
    )


def usage(store: DiskCache) -> dict[str, Any]:
    """What is in a cache."""
    statuses: list[os.stat_result] = []
    for path in store.entries():
        with contextlib.suppress(OSError):  # another process may have removed it
            statuses.append(path.stat())
    oldest = min((status.st_mtime for status in statuses), default=None)
    return {
        "directory": str(store.directory),
        "exists": store.directory.is_dir(),
        "enabled": config.get("cache"),
        "kernels": len(statuses),
        "bytes": sum(status.st_size for status in statuses),
        "max_bytes": store.max_bytes,
        "oldest_use": oldest
        and datetime.datetime.fromtimestamp(oldest).isoformat(" ", timespec="seconds"),
    }


def _kernels(kernels: int, bytes: int) -> str:
    return f"{_count(kernels, 'kernel')}, {output.size(bytes)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
