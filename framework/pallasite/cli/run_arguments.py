"""Values of kernels' arguments as they are written for ``pallasite run``."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
from typing import TYPE_CHECKING, Any

from pallasite.cli.array_types import ArrayType, array_type
from pallasite.errors import InvalidValueError

if TYPE_CHECKING:
    import numpy as np

RUBBISH = 0xCD
"""What the bytes of an output hold before the kernel runs."""

_SCALAR = re.compile(r"\s*(\w+)\s*=\s*(\S+)\s*")
_LIMIT = 100


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
      type: of the array or scalar; None for a file that says it, or a null pointer.
      fill: ``"random"``, ``"zeros"``, ``"ones"``, ``"iota"``, ``"rubbish"``, a number, a NumPy file
        (``.npy``), or ``"null"``.
      scalar: whether it is passed by value.
      read: whether the kernel may read it.
      written: whether the kernel may write to it, so that it is one of the outputs.
    """

    type: ArrayType | None
    fill: str
    scalar: bool = False
    read: bool = True
    written: bool = False


def argument(text: str) -> Argument:
    """Reads the value of ``--arg``.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    if text == "null":
        return Argument(None, "null")
    prefix, colon, rest = text.partition(":")
    written = bool(colon) and prefix in ("out", "inout")
    body = rest if written else text
    if body.endswith(".npy") and "[" not in body:
        return Argument(None, body, written=written)
    scalar = _SCALAR.fullmatch(body)
    if scalar is not None and not written:
        kind = array_type(f"{scalar[1]}[]")
        _check_fill(scalar[2], text, numbers_only=True)
        return Argument(kind, scalar[2], scalar=True)
    kind_text, colon, fill = body.partition(":")
    kind = array_type(kind_text)
    if not colon:
        fill = "rubbish" if written and prefix == "out" else "random"
    _check_fill(fill, text)
    read = prefix != "out" or not written
    return Argument(kind, fill, read=read, written=written)


def make(one: Argument, generator: np.random.Generator) -> Any:
    """The array, the scalar, or None.

    Raises:
      InvalidValueError: a file that cannot be read or is of another type, or a number that the type
        cannot hold.
    """
    import ml_dtypes  # noqa: F401  (NumPy knows its dtypes from then on)
    import numpy as np

    if one.fill == "null":
        return None
    if one.fill.endswith(".npy"):
        return _from_file(one)
    assert one.type is not None
    dtype, shape = np.dtype(one.type.dtype), one.type.shape
    if one.fill == "random":
        value = random_array(generator, shape, dtype)
    elif one.fill == "rubbish":
        value = np.full(shape + (dtype.itemsize,), RUBBISH, np.uint8).view(dtype).reshape(shape)
    elif one.fill == "iota":
        value = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    else:
        number = {"zeros": "0", "ones": "1"}.get(one.fill, one.fill)
        value = np.full(shape, _number(number, dtype))
    return value[()] if one.scalar else np.ascontiguousarray(value)


def random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Normally distributed floats, integers from -100 to 99 as far as the type goes, or bools."""
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(dtype)
    try:
        info = ml_dtypes.iinfo(dtype)
    except ValueError:
        return np.asarray(generator.standard_normal(shape)).astype(dtype)
    low, high = max(int(info.min), -_LIMIT), min(int(info.max), _LIMIT - 1)
    return generator.integers(low, high, shape, endpoint=True).astype(dtype)


def _check_fill(fill: str, text: str, *, numbers_only: bool = False) -> None:
    if not numbers_only and (
        fill in ("random", "zeros", "ones", "iota", "rubbish") or fill.endswith(".npy")
    ):
        return
    try:
        complex(fill) if fill.lower() not in ("true", "false") else None
    except ValueError:
        expected = "a number" if numbers_only else "random, zeros, ones, iota, a number or FILE.npy"
        raise argparse.ArgumentTypeError(
            f"{text!r} does not say what the argument holds: {fill!r}; expected {expected}"
        ) from None


def _number(text: str, dtype: Any) -> Any:
    import ml_dtypes
    import numpy as np

    if text.lower() in ("true", "false"):
        return np.asarray(text.lower() == "true").astype(dtype)
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        return np.asarray(float(text)).astype(dtype)
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or int(np.asarray(value).astype(dtype)) != value:
        raise InvalidValueError(f"{text} is not a number of type {np.dtype(dtype).name}")
    return np.asarray(value).astype(dtype)


def _from_file(one: Argument) -> Any:
    import numpy as np

    try:
        value = np.load(pathlib.Path(one.fill))
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"cannot read {one.fill}", got=str(error)) from error
    if one.type is not None:
        # NumPy's files do not know types such as bfloat16: they hold plain bytes of their size.
        dtype = np.dtype(one.type.dtype)
        if value.dtype.kind == "V" and value.dtype.itemsize == dtype.itemsize:
            value = value.view(dtype)
        if (value.dtype, value.shape) != (dtype, one.type.shape):
            raise InvalidValueError(
                f"{one.fill} has another type",
                got=f"{value.dtype.name}{list(value.shape)}",
                expected=str(one.type),
            )
    elif value.dtype.kind not in "biufc":
        raise InvalidValueError(
            f"{one.fill} has elements of a type that is none of numbers",
            got=f"{value.dtype.name}{list(value.shape)}",
            hint=f"say the type, such as 'bf16[1024]:{one.fill}', which files of NumPy do not know",
        )
    return np.ascontiguousarray(value)
