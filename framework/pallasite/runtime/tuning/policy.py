"""Which configuration an operation runs with: the author's choice, or what was measured.

The option ``autotune`` says which. Nothing is measured unless it is ``on``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

import pallasite
from pallasite import config, plugins
from pallasite.runtime.tuning.encoding import (
    Json,
    describe_arguments,
    digest,
    distinct,
    encode,
)
from pallasite.runtime.tuning.store import Entry, TuningStore
from pallasite.target_selection import select_target

_lock = threading.Lock()
_stores: dict[Any, TuningStore] = {}
_memory: dict[str, Entry] = {}
"""Where the disk cache is switched off: what this process has measured, by the key's digest."""


def choose[Configuration: Hashable](
    name: str,
    version: int | str,
    args: Sequence[Any],
    candidates: Sequence[Configuration] | Callable[[], Sequence[Configuration]],
    default: Configuration,
    run: Callable[..., Any],
    *,
    key: Any = None,
) -> Configuration:
    """The configuration that an operation shall use; for authors of operations.

    The option ``autotune`` decides: with ``"off"`` it is ``default``; with ``"cached"`` it is the
    one that was measured to be the fastest for such arguments on such a GPU, or else ``default``.
    Call it outside or inside of ``jax.jit``: of tracers, shapes and dtypes count.

    Args:
      name: of the operation; what was measured is kept under it.
      version: of the operation: another one makes what was measured before invalid.
      args: the operation's arguments: arrays, tracers, ``jax.ShapeDtypeStruct``, trees of such;
        other leaves (numbers, strings) count by value.
      candidates: the configurations to choose from, or a function that gives them; see
        :func:`pallasite.autotune`.
      default: the configuration where nothing was measured; it need not be a candidate.
      run: ``run(configuration, *args)`` runs the operation.
      key: what else the choice depends on, such as static parameters; the same kinds of values as
        in configurations.

    Raises:
      InvalidTypeError, InvalidValueError: the candidates, or the key, cannot be used.
    """
    if config.get("autotune") == "off":
        return default
    listed = distinct(candidates() if callable(candidates) else candidates, name)
    entry = find(name, entry_key(name, version, args, listed, key))
    return default if entry is None else chosen(entry, listed, default)


def chosen[Configuration: Hashable](
    entry: Entry, listed: dict[str, Configuration], default: Configuration
) -> Configuration:
    """The candidate that an entry names; ``default`` if there is none such."""
    return listed.get(json.dumps(entry["best"], sort_keys=True), default)


def entry_key(
    name: str,
    version: int | str,
    args: Sequence[Any],
    listed: dict[str, Any],
    key: Any,
) -> Json:
    """Everything that a measured choice is valid for, as JSON that people can read.

    Args:
      name, version, args, key: as in :func:`choose`.
      listed: the candidates by the text of their encoding.
    """
    device = jax.local_devices()[0]
    return {
        "version": encode(version),
        "arguments": describe_arguments(tuple(args)),
        "key": encode(key),
        "device": device.device_kind,
        "target": select_target().name,
        "pallasite": pallasite.__version__,
        "plugins": _plugin_versions(),
        "candidates": digest(list(listed)),
    }


def find(name: str, key: Json) -> Entry | None:
    """What was measured under a key, if anything."""
    if not config.get("cache"):
        return _memory.get(digest([name, key]))
    return store().get(name, key)


def keep(name: str, key: Json, entry: Entry) -> None:
    """Keeps what was measured: on disk, or in memory where the disk cache is switched off."""
    if config.get("cache"):
        store().put(name, key, entry)
    else:
        _memory[digest([name, key])] = entry


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
