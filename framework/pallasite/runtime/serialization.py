"""Compiled kernels as bytes: JSON of a fixed set of records, compressed. Nothing is executed."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (makes NumPy know names such as bfloat16)
import numpy as np

from pallasite.codegen.compiled import Change, CompiledKernel, ModuleText
from pallasite.errors import SourceLocation
from pallasite.launch import (
    Allocation,
    ArrayParameter,
    Buffer,
    BufferKind,
    HiddenOperand,
    HiddenResult,
    HostStep,
    LaunchParameters,
    ReservedAmount,
    ResourceReport,
    TensorMapParameter,
)
from pallasite.lowering.layout_report import (
    ArrayLayout,
    Insertion,
    LayoutConversion,
    LayoutReport,
    Reason,
    SharedLayout,
)
from pallasite.targets import Target

_RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        Allocation,
        ArrayLayout,
        ArrayParameter,
        Buffer,
        Change,
        CompiledKernel,
        HiddenOperand,
        HiddenResult,
        HostStep,
        Insertion,
        LaunchParameters,
        LayoutConversion,
        LayoutReport,
        Reason,
        ReservedAmount,
        ResourceReport,
        SharedLayout,
        SourceLocation,
        Target,
        TensorMapParameter,
    )
}
_KEY = "="
"""The member of a JSON object that says what it stands for."""
_PLAIN = frozenset({type(None), bool, int, float, str})

_MAX_BYTES = 2**26
"""Bound on the size of a kernel's JSON; larger kernels are compiled in each process."""

_BROKEN = (zlib.error, LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading bytes that are something else raises."""


class CorruptError(Exception):
    """Bytes that no :func:`dumps` of this version wrote."""


def dumps(kernel: CompiledKernel) -> bytes:
    """A compiled kernel as bytes.

    Raises:
      TypeError: it holds something that is not plain data, or is too large.
    """
    data = json.dumps(_encode(kernel)).encode()
    if len(data) > _MAX_BYTES:
        raise TypeError(f"a kernel of {len(data)} bytes is too large")
    return zlib.compress(data, 3)


def loads(data: bytes) -> CompiledKernel:
    """The kernel that :func:`dumps` turned into bytes.

    Raises:
      CorruptError: the bytes are something else.
    """
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(data, _MAX_BYTES)
        if not stream.eof or stream.unused_data:
            raise CorruptError(f"no complete stream of at most {_MAX_BYTES} bytes")
        kernel = _decode(json.loads(text))
    except _BROKEN as error:
        raise CorruptError(str(error)) from error
    if not isinstance(kernel, CompiledKernel):
        raise CorruptError("not a compiled kernel")
    return kernel


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if _RECORDS.get(kind.__name__) is kind:
        encoded: dict[str, Any] = {_KEY: kind.__name__}
        stored = vars(value)
        for name in kind.__dataclass_fields__:
            field = stored.get(name)  # A module's text is kept as it is, unread.
            encoded[name] = _encode(field if type(field) is ModuleText else getattr(value, name))
        return encoded
    if isinstance(value, ModuleText):
        return {_KEY: "module", "base64": base64.b64encode(value).decode()}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, np.generic):
        return _encode(value.item())
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, frozenset):
        return {_KEY: "set", "items": [_encode(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return {_KEY: "mapping", "items": [[key, _encode(value[key])] for key in sorted(value)]}
    if isinstance(value, bytes):
        return {_KEY: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, BufferKind):
        return {_KEY: "kind", "name": value.name}
    if isinstance(value, np.dtype | type):
        return {_KEY: "dtype", "name": np.dtype(value).name}
    raise TypeError(f"cannot keep a {type(value).__qualname__} on disk: {value!r}")


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda value: frozenset(_decode(value["items"])),
    "mapping": lambda value: dict(_decode(value["items"])),
    "bytes": lambda value: base64.b64decode(value["base64"], validate=True),
    "module": lambda value: ModuleText(base64.b64decode(value["base64"], validate=True)),
    "kind": lambda value: BufferKind[value["name"]],
    "dtype": lambda value: np.dtype(value["name"]),
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.pop(_KEY)
    if kind in _DECODERS:
        return _DECODERS[kind](value)
    return _RECORDS[kind](**{name: _decode(field) for name, field in value.items()})
