"""Array types and settings as they are written on the command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from typing import Any

_SHORT_NAMES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e8m0fnu": "float8_e8m0fnu",
    "f4e2m1fn": "float4_e2m1fn",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{letter}{bits}": f"int{bits}" for letter in "is" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
}
DTYPES = frozenset({*_SHORT_NAMES.values(), "bool"})

_TYPE = re.compile(r"\s*(\w+)\s*\[\s*((?:\d+(?:\s*,\s*\d+)*)?)\s*\]\s*")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of one array, such as ``bf16[1024,1024]``; ``f32[]`` is a scalar."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        short = {name: abbreviation for abbreviation, name in reversed(_SHORT_NAMES.items())}
        return f"{short.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"


def array_type(text: str) -> ArrayType:
    """Reads the value of ``--arg``.

    Raises:
      argparse.ArgumentTypeError: it is no array type.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an array type; expected a dtype and a shape,"
            " such as f32[1024,1024], bf16[4096] or i32[]"
        )
    dtype = _SHORT_NAMES.get(match[1], match[1])
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} has an unknown dtype {match[1]!r}; expected one of "
            + ", ".join(sorted({*_SHORT_NAMES, "bool"}))
            + ", or NumPy's name for it"
        )
    return ArrayType(dtype, tuple(int(extent) for extent in re.findall(r"\d+", match[2])))


def setting(text: str) -> tuple[str, Any]:
    """Reads the value of ``--set``: a name and a Python literal; other values are strings.

    Raises:
      argparse.ArgumentTypeError: it is no setting.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a setting; expected NAME=VALUE, such as causal=True"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
