"""Pointers and counts inside of many Python objects, read at once.

Whether any of thousands of functions has other code than it had, or any of hundreds of modules and
classes other attributes, is asked for each kernel. To ask each one takes half a millisecond, to
read the fields as an array a hundredth of that. CPython up to 3.13 counts changes of dictionaries
(PEP 509; PEP 699 announces the removal).
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

type Words = np.ndarray[Any, np.dtype[np.uint64]]

_WORD = 8


class Fields:
    """Words of 8 bytes at addresses that stay valid for as long as this is used."""

    def __init__(self, addresses: Sequence[int]):
        places = np.array(addresses, np.int64)
        base = int(places.min(initial=2**62)) if len(places) else 0
        self._indices = (places - base) // _WORD
        count = int(self._indices.max(initial=-1)) + 1
        self._memory: Words = np.asarray(_Memory(base, count)) if count else np.zeros(0, np.uint64)

    def read(self) -> Words:
        """The words at present."""
        return self._memory.take(self._indices)


class _Memory:
    """Memory from an address on, as NumPy takes it; nothing of it is read yet."""

    def __init__(self, base: int, count: int):
        self.__array_interface__ = {
            "data": (base, True),
            "shape": (count,),
            "typestr": np.dtype(np.uint64).str,
            "version": 3,
        }


def codes_of(functions: Sequence[types.FunctionType]) -> Fields | None:
    """The addresses of functions' codes; None where it is not known where functions have them.

    The functions must live for as long as the result is used, and so must the codes that an earlier
    result is compared with, lest another one comes to lie in the same place.
    """
    return None if _CODE is None else Fields([id(function) + _CODE for function in functions])


def _place_of_code() -> int | None:
    """Where functions have the pointer to their code, tried out."""

    def first() -> int:
        return 1

    def second() -> int:
        return 2

    if ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    for place in range(object.__basicsize__, type(first).__basicsize__ - _WORD + 1, _WORD):
        fields = Fields([id(first) + place, id(second) + place])
        codes = first.__code__, second.__code__
        if fields.read().tolist() == [id(code) for code in codes]:
            first.__code__ = codes[1]
            return place if fields.read().tolist() == [id(codes[1])] * 2 else None
    return None


_CODE = _place_of_code()


# The count is behind the head of the dictionary and the number of its items.
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
