"""Tables of winners that come with operations: what was measured on a kind of GPU.

They are JSON: ``devices`` (beginnings of device kinds), and ``winners``, each with ``operation``,
``version``, ``arguments``, ``key`` and ``best``, the encoded configuration. Attributes that were
added to a configuration later need not be there: they have their defaults.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from pallasite_std.tuning.encoding import Json, describe_arguments, encode, is_array


@dataclasses.dataclass(frozen=True)
class Question:
    """What an operation asked :func:`pallasite.choose`.

    Attributes:
      name, version, args, key, default, run: as there.
      listed: the candidates by the text of their encoding.
    """

    name: str
    version: int | str
    args: tuple[Any, ...]
    key: Any
    listed: Mapping[str, Any]
    default: Any
    run: Callable[..., Any]

    def place(self) -> dict[str, Json]:
        """What a winner is looked up by."""
        return _place(self.name, self.version, self.args, self.key)


_asked: contextvars.ContextVar[list[Question] | None] = contextvars.ContextVar(
    "pallasite_asked", default=None
)


def asked() -> list[Question] | None:
    """Where questions are collected, if they are."""
    return _asked.get()


def questions(function: Callable[..., Any], *args: Any) -> list[Question]:
    """What the operations in a function ask, which get their defaults; nothing runs."""
    with _collecting() as found:
        jax.eval_shape(lambda *arrays: function(*arrays), *args)
    return found


def described(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with types in place of arrays and tracers."""

    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf

    return tuple(jax.tree.map(one, args))


@contextlib.contextmanager
def _collecting() -> Iterator[list[Question]]:
    found: list[Question] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def find[Configuration: Hashable](
    table: pathlib.Path,
    device: str,
    name: str,
    version: int | str,
    args: Sequence[Any],
    key: Any,
    listed: Mapping[str, Configuration],
) -> tuple[Configuration] | None:
    """The candidate that a table names for these arguments, in a tuple; None if there is none.

    Args:
      table: the file; if there is none, nothing was measured.
      device: the kind of the GPU, which has to be one of the table's.
      name, version, args, key: as of :func:`pallasite.choose`.
      listed: the candidates by the text of their encoding.
    """
    devices, best = _read(table)
    if not device.startswith(devices):
        return None
    wanted = best.get(_text(_place(name, version, args, key)))
    if wanted is None:
        return None
    return next(((one,) for one in listed.values() if encode(one) == _completed(wanted, one)), None)


def _completed(entry: Json, configuration: Any) -> Json:
    """An entry with what was added since to the attributes of such a configuration."""
    if not isinstance(entry, dict) or not dataclasses.is_dataclass(configuration):
        return entry
    fields = dataclasses.fields(configuration)
    added = {f.name: encode(f.default) for f in fields if f.default is not dataclasses.MISSING}
    nested = {name: _completed(entry.get(name), getattr(configuration, name)) for name in added}
    return added | entry | {name: one for name, one in nested.items() if name in entry}


@functools.cache
def _read(table: pathlib.Path) -> tuple[tuple[str, ...], dict[str, Json]]:
    try:
        content = json.loads(table.read_text())
    except FileNotFoundError:
        return (), {}
    best = {
        _text({name: one[name] for name in ("operation", "version", "arguments", "key")}): one[
            "best"
        ]
        for one in content["winners"]
    }
    return tuple(content["devices"]), best


def _place(name: str, version: int | str, args: Sequence[Any], key: Any) -> dict[str, Json]:
    return {
        "operation": name,
        "version": encode(version),
        "arguments": describe_arguments(tuple(args)),
        "key": encode(key),
    }


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
