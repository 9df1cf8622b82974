"""PTX that other compilers made of the tests' kernels, recorded: they take longer than the tests.

It is found by the compiler's version and by all that the compiler gets. What is not found is
compiled, so a new compiler or a changed kernel costs time and nothing else. All is compiled, and
recorded again, by::

    TESTS_RECORD_PTX=1 python -m pytest -p no:randomly $(git grep -l recorded_ptx tests)
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import lzma
import os
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

FILE = pathlib.Path(__file__).parent / "recorded" / "compilers.json.xz"

_PLACES = {
    str(pathlib.Path(__file__).parents[2]): "/checkout",
    sysconfig.get_path("platlib"): "/packages",
}
"""Folders, with what stands for them in what is recorded and in what tells kernels apart."""

_RECORD = bool(os.environ.get("TESTS_RECORD_PTX"))
_made: dict[str, Any] = {}


def recorded(parts: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """What was recorded, or else what is made.

    Args:
      parts: all that the result depends on.
      make: compiles; returns what JSON can hold.
    """
    key = hashlib.sha256(without_places("\0".join(parts)).encode()).hexdigest()
    if not _RECORD:
        text = _read().get(key)
        return make() if text is None else json.loads(with_places(text))
    if not _made:
        atexit.register(_write)
    result = make()
    _made[key] = without_places(json.dumps(result))
    return result


def without_places(text: str) -> str:
    # One may be in the other: the longer path first.
    for folder, name in sorted(_PLACES.items(), key=lambda one: -len(one[0])):
        text = text.replace(folder, name)
    return text


def with_places(text: str) -> str:
    for folder, name in _PLACES.items():
        text = text.replace(name, folder)
    return text


@functools.cache
def _read() -> dict[str, str]:
    if not FILE.exists():
        return {}
    found: dict[str, str] = json.loads(lzma.decompress(FILE.read_bytes()))
    return found


def _write() -> None:
    """Similar texts are next to each other, for the compression."""
    ordered = dict(sorted(_made.items(), key=lambda one: (len(one[1]), one[0])))
    data = lzma.compress(json.dumps(ordered, indent=0).encode(), preset=9 | lzma.PRESET_EXTREME)
    made = FILE.with_suffix(f".{os.getpid()}")
    made.write_bytes(data)
    os.replace(made, FILE)
