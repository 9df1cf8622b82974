"""Configurations and arguments as JSON: what the files of the tuner hold and are looked up by."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError

Json = Any
"""None, a boolean, a number, a string, or a list or dictionary of such."""


def encode(value: Any) -> Json:
    """A configuration as JSON: equal configurations have equal encodings in every process.

    Accepted are None, booleans, numbers, strings, enumerations, dtypes, and tuples (also
    named ones), lists, mappings with string keys and dataclasses of such.

    Raises:
      InvalidTypeError: anything else.
      InvalidValueError: a number that JSON cannot hold.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise InvalidValueError(
                "a configuration holds a number that is not finite", got=str(value)
            )
        return float(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = {name: encode(field) for name, field in value._asdict().items()}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [encode(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: encode(value[key]) for key in sorted(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, np.dtype) or (isinstance(value, type) and _is_dtype(value)):
        return np.dtype(value).name
    raise InvalidTypeError(
        "a configuration holds something that cannot be written as JSON",
        got=f"{value!r} of type {type(value).__name__}",
        expected="None, booleans, numbers, strings, enumerations, dtypes; tuples, lists,"
        " dictionaries with string keys and dataclasses of such",
    )


def text_of(value: Any) -> str:
    """The encoding of a configuration as one line of JSON."""
    return json.dumps(encode(value), sort_keys=True)


def digest(value: Json) -> str:
    """SHA-256, in hexadecimal, of something that is JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def distinct[Configuration: Hashable](
    candidates: Iterable[Configuration], name: str
) -> dict[str, Configuration]:
    """Candidates by the text of their encoding, in order; the first of equal ones.

    Raises:
      InvalidValueError: there is none.
      InvalidTypeError: one cannot be written as JSON.
    """
    found: dict[str, Configuration] = {}
    for candidate in candidates:
        found.setdefault(text_of(candidate), candidate)
    if not found:
        raise InvalidValueError(
            f"there is no configuration of {name!r} to choose from", expected="at least one"
        )
    return found


def describe_arguments(arguments: tuple[Any, ...]) -> str:
    """The shapes, dtypes and structure of arguments, such as ``bfloat16[64,32], 2.0``.

    Arrays, tracers and ``jax.ShapeDtypeStruct`` count by their type alone; other leaves (numbers,
    strings) by value. The structure is left out where every argument is one leaf.
    """
    leaves, tree = jax.tree.flatten(arguments)
    text = ", ".join(map(_describe, leaves))
    plain = jax.tree.structure((0,) * len(leaves))
    return text if tree == plain else f"{text}; {tree}"


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype: an array, a tracer, or a description of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _describe(leaf: Any) -> str:
    if not is_array(leaf):
        return repr(leaf)
    dtype = getattr(leaf.dtype, "name", None) or str(leaf.dtype)
    return f"{dtype}[{','.join(map(str, leaf.shape))}]"


def _is_dtype(kind: type) -> bool:
    try:
        np.dtype(kind)
    except TypeError:
        return False
    return kind is not object
