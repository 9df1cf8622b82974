"""What was measured, on disk: one JSON file for each operation, shared by processes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import StoreNamespace
from pallasite.plugin.runtime import DocumentStore

MAX_ENTRIES = 1000
"""For each operation; beyond it the entries that were written first are dropped."""

Entry = dict[str, Any]
"""``key`` (what it is for), ``best`` (the encoded configuration), and what was measured."""


def _is_entry(entry: Any) -> bool:
    return "best" in entry


def _table(entries: Sequence[Entry]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    headers = ("operation", "arguments", "device", "fastest", "us", "of", "measured")
    return headers, [_row(entry) for entry in entries]


def _row(entry: Entry) -> tuple[object, ...]:
    key, best, time = entry["key"], entry["best"], entry.get("microseconds")
    extra = "" if key.get("key") is None else f"; {json.dumps(key['key'])}"
    return (
        key.get("operation", "-"),
        f"{key.get('arguments', '-')}{extra}",
        key.get("device", "-"),
        _configuration(best),
        "-" if time is None else f"{time:g}",
        len(entry.get("candidates", ())) or "-",
        entry.get("date", "-"),
    )


def _configuration(best: Any) -> str:
    """A configuration in few words; the name of its class says little."""
    if not isinstance(best, dict):
        return json.dumps(best)
    return " ".join(
        f"{name}={json.dumps(value)}" for name, value in best.items() if name != "class"
    )


TUNED = StoreNamespace(
    name="tuned",
    noun="tuned configuration",
    folder="tuning",
    suffix=".json",
    documents=True,
    max_entries=MAX_ENTRIES,
    valid=_is_entry,
    table=_table,
    empty="no configuration was tuned: PALLASITE_AUTOTUNE=on, or pallasite.autotune",
)
"""The configurations that were measured to be the fastest, a document for each operation."""


class TuningStore(DocumentStore):
    """The entries in one cache folder.

    Args:
      directory: the cache folder, in which theirs is.
    """

    def __init__(self, directory: pathlib.Path):
        super().__init__(directory, TUNED)
