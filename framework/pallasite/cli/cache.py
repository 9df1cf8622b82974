"""Show or clear the cache of compiled kernels on disk.

The folder is that of PALLASITE_CACHE_DIR, else the user's cache folder; PALLASITE_CACHE=off
switches the cache off.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.cli import output

if TYPE_CHECKING:
    from pallasite.runtime.disk_cache import DiskCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("action", nargs="?", choices=("info", "clear"), default="info")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Shows, or clears and says what was removed."""
    from pallasite.runtime.disk_cache import DiskCache

    store = DiskCache(config.get("cache_dir"))
    before = usage(store)
    if arguments.action == "clear":
        store.clear()
        after = usage(store)
        removed = {name: before[name] - after[name] for name in ("kernels", "bytes")}
        if arguments.json:
            output.print_json({"directory": str(store.directory), "removed": removed})
        else:
            print(f"removed {_kernels(**removed)} from {store.directory}")
        if after["kernels"]:
            print(f"{_kernels(after['kernels'], after['bytes'])} could not be removed")
            return 1
        return 0
    if arguments.json:
        output.print_json(before)
        return 0
    print(f"directory  {store.directory}" + ("" if before["exists"] else " (not created yet)"))
    print(f"state      {'on' if before['enabled'] else 'off'}")
    print(f"holds      {_kernels(before['kernels'], before['bytes'])}")
    print(f"bound      {output.size(before['max_bytes'])}")
    if before["oldest_use"]:
        print(f"oldest use {before['oldest_use']}")
    return 0


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
    return f"{kernels} kernel{'' if kernels == 1 else 's'}, {output.size(bytes)}"
