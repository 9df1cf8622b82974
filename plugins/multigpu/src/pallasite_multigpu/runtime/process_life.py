"""Whether another process of this machine still lives, by ``/proc`` (proc(5))."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

_PROC = pathlib.Path("/proc")
_STATE, _BEGAN = 0, 19
_ENDED = ("Z", "X")


def identity() -> dict[str, Any]:
    """What tells this process from all others, for JSON; empty where there is no ``/proc``."""
    found = _state(os.getpid())
    if found is None:
        return {}
    return {"number": os.getpid(), "began": found[_BEGAN], "namespace": _namespace()}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process has ended; False also for one that this process cannot see.

    Args:
      process: its :func:`identity`.
    """
    if not process or process["namespace"] != _namespace():
        return False
    found = _state(process["number"])
    return found is None or found[_STATE] in _ENDED or found[_BEGAN] != process["began"]


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self" / "ns" / "pid")
    except OSError:
        return ""


def _state(number: int) -> list[str] | None:
    """The fields behind the name of a process, which may have any characters."""
    try:
        text = (_PROC / str(number) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
