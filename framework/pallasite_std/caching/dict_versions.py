"""Numbers that change whenever a dictionary does, where Python has them.

CPython up to 3.13 counts changes of dictionaries (PEP 509; PEP 699 announces the removal). Reading
a count takes a fraction of the time of comparing what a dictionary holds.
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Mapping
from typing import Any

# The field is behind the head of the object and the number of its items.
_PLACE = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


def version_of(scope: Mapping[str, Any]) -> Any:
    """The version of a dictionary, or of that of a class, as an object whose ``value`` is the
    number; the dictionary must live for as long as that is used."""
    if isinstance(scope, types.MappingProxyType):
        (scope,) = gc.get_referents(scope)
    return ctypes.c_uint64.from_address(id(scope) + _PLACE)


def _has_versions() -> bool:
    """Whether the versions of dictionaries, and of classes, are where they are looked for."""
    if dict.__basicsize__ < _PLACE + ctypes.sizeof(ctypes.c_uint64):
        return False

    class Example:
        value: Any = 1

    names: dict[str, Any] = {"value": 1}
    try:
        versions = [version_of(names), version_of(Example.__dict__)]
    except ValueError:  # Not the mappings of CPython.
        return False
    seen = [[one.value for one in versions]]
    for value in (2, "other", 1):
        names["value"] = Example.value = value
        seen.append([one.value for one in versions])
    steady = [one.value for one in versions] == seen[-1]
    names["value"] = names["value"]
    return steady and all(len(set(one)) == len(seen) for one in zip(*seen, strict=True))


HAS_VERSIONS = _has_versions()
"""Whether :func:`version_of` can be used."""
