"""The MLIR types of registers and of memory for a JAX dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallasite.errors import InvalidTypeError

_FLOAT8 = frozenset(
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3b11fnuz",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)
_FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
_NARROW = {
    np.dtype(ml_dtypes.int2): 2,
    np.dtype(ml_dtypes.uint2): 2,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
    _FLOAT4: 4,
}
_SIGNED_NARROW = frozenset({np.dtype(ml_dtypes.int2), np.dtype(ml_dtypes.int4)})
_FLOATS = {
    np.dtype(np.float16): "f16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
}


def is_float8(dtype: Any) -> bool:
    """Whether ``dtype`` is one of the 8-bit floats, which registers hold as ``i8``."""
    return np.dtype(dtype) in _FLOAT8


def is_float(dtype: Any) -> bool:
    """Whether ``dtype`` is a floating-point type of any width."""
    dtype = np.dtype(dtype)
    return dtype in _FLOATS or dtype in _FLOAT8 or dtype == _FLOAT4


def is_bool(dtype: Any) -> bool:
    """Whether ``dtype`` is boolean."""
    return bool(np.dtype(dtype) == np.dtype(np.bool_))


def is_integer(dtype: Any) -> bool:
    """Whether ``dtype`` is a signed or unsigned integer (not boolean) of any width."""
    dtype = np.dtype(dtype)
    return dtype != _FLOAT4 and (dtype in _NARROW or dtype.kind in "iu")


def is_signed(dtype: Any) -> bool:
    """Whether ``dtype`` is a signed integer."""
    dtype = np.dtype(dtype)
    return dtype in _SIGNED_NARROW or (dtype.kind == "i" and dtype not in _NARROW)


def bit_width(dtype: Any) -> int:
    """Bits of one element in memory; a boolean takes 8."""
    dtype = np.dtype(dtype)
    if dtype in _NARROW:
        return _NARROW[dtype]
    return int(dtype.itemsize) * 8


@functools.cache
def _type_text(dtype: np.dtype[Any], memory: bool) -> str:
    if is_bool(dtype):
        return "i8" if memory else "i1"
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype in _FLOAT8:
        return "i8"
    if dtype in _NARROW:
        return f"i{_NARROW[dtype]}"
    if dtype.kind in "iu":
        return f"i{dtype.itemsize * 8}"
    raise InvalidTypeError(
        f"arrays of dtype {dtype} have no representation on the GPU",
        expected="bool, an integer of 2 to 64 bits, or a float of 8, 16, 32 or 64 bits",
    )


def element_type(dtype: Any) -> ir.Type:
    """The MLIR type of one element in a register (``i1`` for bool, ``i8`` for 8-bit floats)."""
    return parse_type(_type_text(np.dtype(dtype), False))


def memory_type(dtype: Any) -> ir.Type:
    """The MLIR type of one element in memory (``i8`` for bool and 8-bit floats)."""
    return parse_type(_type_text(np.dtype(dtype), True))


def parse_type(text: str) -> ir.Type:
    """Parses an MLIR type; results are remembered per context."""
    return remembered(text, ir.Type.parse)


def remembered(key: Any, make: Callable[[Any], Any], context: ir.Context | None = None) -> Any:
    """``make(key)``, such as a type or attributes, which is made once in each context.

    A text is the key of a type, an attribute that of its flags; other keys begin with what they are
    for.
    """
    context = context or ir.Context.current
    cache = _caches.get(context)
    if cache is None:
        if len(_caches) > 16:
            _caches.clear()
        cache = _caches[context] = {}
    found = cache.get(key)
    if found is None:
        found = cache[key] = make(key)
    return found


_caches: dict[ir.Context, dict[Any, Any]] = {}


def register_type(dtype: Any, vector_length: int) -> ir.Type:
    """The MLIR type of one register: the element type, or a vector of it."""
    text = _type_text(np.dtype(dtype), False)
    return parse_type(text if vector_length == 1 else f"vector<{vector_length}x{text}>")


def vector_type(element: ir.Type, length: int) -> ir.Type:
    """``vector<length x element>``, or the element itself for length 1."""
    return element if length == 1 else ir.VectorType.get((length,), element)


def pointer_type(space: int = 0) -> ir.Type:
    """``!llvm.ptr`` in the address space given (0 generic, 1 global, 3 shared, 5 local)."""
    return parse_type("!llvm.ptr" if space == 0 else f"!llvm.ptr<{space}>")
