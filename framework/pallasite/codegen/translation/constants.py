"""LLVM IR spelling of MLIR attributes that are constants."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.codegen.translation.types import element_type, vector_length
from pallasite.errors import CompilationError

_ELEMENT = re.compile(r"0x[0-9A-Fa-f]+|[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|true|false")
_BYTES = {"half": 2, "bfloat": 2, "float": 4, "double": 8}


def constant_text(attribute: Any, type_: str) -> str:
    """Text of a constant of LLVM type ``type_``, without the type itself."""
    match type(attribute).__name__:
        case "IntegerAttr" | "BoolAttr":
            return integer_text(attribute.value, type_)
        case "FloatAttr":
            if type_[0] == "i":
                return str(narrow_bits(attribute.value, str(attribute.type)))
            return float_text(attribute.value, type_)
        case "StringAttr":
            return 'c"' + escape(attribute.value_bytes) + '"'
        case "ArrayAttr":
            return _aggregate(
                [constant_text(one, e) for one, e in _members(attribute, type_)], type_
            )
        case "DenseFPElementsAttr" | "DenseIntElementsAttr" | "DenseElementsAttr":
            return _dense(attribute, type_)
    if str(attribute) in ("#llvm.zero", "unit"):
        return "zeroinitializer"
    raise CompilationError("a constant that cannot be expressed in LLVM IR", got=str(attribute))


def integer_text(value: int, type_: str) -> str:
    """Text of an integer constant; ``i1`` is spelled as a word, a null pointer as ``null``."""
    if type_ == "i1":
        return "true" if value else "false"
    if type_.startswith("ptr") and value == 0:
        return "null"
    if type_ in _BYTES:
        return float_text(float(value), type_)
    return str(int(value))


def narrow_bits(value: float, kind: str) -> int:
    """The bits of a number in a float of less than 16 bits, such as ``f8E4M3FN``."""
    width, _, rest = kind.removeprefix("f").partition("E")
    dtype = np.dtype(getattr(ml_dtypes, f"float{width}_e{rest.lower()}"))
    return int(np.asarray(value, dtype).view(np.uint8))


def float_text(value: float, type_: str) -> str:
    """Text of a floating-point constant, in decimal where that is exact."""
    if type_ == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if type_ == "bfloat":
        return f"0xR{struct.unpack('<I', struct.pack('<f', value))[0] >> 16:04X}"
    decimal = f"{value:e}"
    if math.isfinite(value) and float(decimal) == value:
        return decimal
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def splat_text(element: str, type_: str) -> str:
    """Text of a vector constant whose elements are all ``element``."""
    length = vector_length(type_)
    if length is None:
        return element
    return "<" + ", ".join([f"{element_type(type_)} {element}"] * length) + ">"


def escape(data: bytes | str) -> str:
    """The inside of an LLVM IR string literal."""
    raw = data.encode() if isinstance(data, str) else data
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in raw
    )


def _members(attribute: Any, type_: str) -> list[tuple[Any, str]]:
    elements = list(attribute)
    if type_[0] == "[":
        element = type_[1:-1].split(" x ", 1)[1]
        return [(one, element) for one in elements]
    if type_[0] == "<" and type_[1] != "{":
        return [(one, element_type(type_)) for one in elements]
    inside = type_.strip("<>")[1:-1]
    return list(zip(elements, split_types(inside), strict=True))


def split_types(text: str) -> list[str]:
    """Splits ``"i32, {i8, i8}, float"`` at its outermost commas."""
    parts: list[str] = []
    depth = start = 0
    for index, character in enumerate(text):
        if character in "<[{(":
            depth += 1
        elif character in ">]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _aggregate(elements: list[str], type_: str) -> str:
    if type_[0] == "[":
        element = type_[1:-1].split(" x ", 1)[1]
        return "[" + ", ".join(f"{element} {one}" for one in elements) + "]"
    if type_[0] == "<" and type_[1] != "{":
        return "<" + ", ".join(f"{element_type(type_)} {one}" for one in elements) + ">"
    members = split_types(type_.strip("<>")[1:-1])
    body = "{" + ", ".join(f"{t} {one}" for t, one in zip(members, elements, strict=True)) + "}"
    return f"<{body}>" if type_[0] == "<" else body


def _dense(attribute: Any, type_: str) -> str:
    array = type_[0] == "["
    element = type_[1:-1].split(" x ", 1)[1] if array else element_type(type_)
    length = int(type_[1:].split(" x ", 1)[0]) if type_[0] in "[<" else 1
    if element in _BYTES:
        elements = [float_text(one, element) for one in _floats(attribute, element)]
    elif attribute.is_splat:
        elements = [constant_text(attribute.get_splat_value(), element)]
    else:
        elements = [integer_text(one, element) for one in attribute]
    if len(elements) == 1:
        elements *= length
    if all(one in ("0", "false", "0.000000e+00", "0xH0000", "0xR0000") for one in elements):
        return "zeroinitializer"
    return _aggregate(elements, type_) if array or type_[0] == "<" else elements[0]


def _floats(attribute: Any, element: str) -> list[float]:
    if attribute.is_splat:
        return [attribute.get_splat_value().value]
    if element in ("float", "double"):
        return list(attribute)
    # The bindings cannot iterate over 16-bit floats; their text is exact.
    body = str(attribute).split("<", 1)[1].rsplit(">", 2)[0].split("> :")[0]
    if body.startswith('"0x'):
        data = bytes.fromhex(body[3:].rstrip('"'))
        return [from_bits(int.from_bytes(data[i : i + 2], "little"), element)
                for i in range(0, len(data), 2)]  # fmt: skip
    return [
        from_bits(int(one, 16), element) if one.startswith("0x") else float(one)
        for one in _ELEMENT.findall(body)
    ]


def from_bits(bits: int, element: str) -> float:
    """Value of a 16-bit floating-point number given by its bits."""
    if element == "half":
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
