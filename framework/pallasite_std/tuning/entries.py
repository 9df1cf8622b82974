"""What a measured choice is valid for, and where it is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

import pallasite
from pallasite.plugin import config, plugins, select_target
from pallasite_std.tuning.encoding import Json, describe_arguments, digest, encode
from pallasite_std.tuning.store import Entry, TuningStore

_lock = threading.Lock()
_stores: dict[Any, TuningStore] = {}
_memory: dict[str, Entry] = {}
"""Where the disk cache is switched off: what this process has measured, by the key's digest."""


def entry_key(
    name: str, version: int | str, args: Sequence[Any], listed: Mapping[str, Any], key: Any
) -> Json:
    """Everything that a measured choice is valid for, as JSON that people can read.

    Args:
      name, version, args, key: as in :func:`pallasite.choose`.
      listed: the candidates by the text of their encoding.
    """
    return {
        "operation": name,
        "version": encode(version),
        "arguments": describe_arguments(tuple(args)),
        "key": encode(key),
        "device": device().device_kind,
        "target": select_target().name,
        "pallasite": pallasite.__version__,
        "plugins": _plugin_versions(),
        "candidates": digest(list(listed)),
    }


def find(name: str, key: Json) -> Entry | None:
    """What was measured under a key, if anything."""
    if not config.get("cache"):
        return _memory.get(digest(key))
    return store().get(name, key)


def keep(name: str, key: Json, entry: Entry, *, replace: bool = False) -> Entry:
    """Keeps what was measured: on disk, or in memory where the disk cache is switched off.

    Returns:
      The entry that holds: that of another process, if it was faster and ``replace`` is false.
    """
    if config.get("cache"):
        return store().put(name, key, entry, replace=replace)
    with _lock:
        _memory[digest(key)] = entry
    return entry


def chosen[Configuration: Hashable](
    entry: Entry, listed: Mapping[str, Configuration]
) -> tuple[Configuration] | None:
    """The candidate that an entry names, in a tuple; None if there is none such."""
    text = json.dumps(entry["best"], sort_keys=True)
    return (listed[text],) if text in listed else None


def forget() -> None:
    """Forgets what is kept in memory."""
    with _lock:
        _memory.clear()


def device() -> Any:
    """The JAX device that operations run on by default."""
    default = jax.config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default


def store() -> TuningStore:
    """The files in the folder that the option ``cache_dir`` names."""
    directory = config.get("cache_dir")
    with _lock:
        if directory not in _stores:
            _stores[directory] = TuningStore(directory)
        return _stores[directory]


def _plugin_versions() -> dict[str, str]:
    found = plugins.manager().plugins()
    return {one.name: one.distribution for one in found if one.state in ("found", "loaded")}
