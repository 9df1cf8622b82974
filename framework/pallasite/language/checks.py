"""Errors that know the user's line, and the checks that several modules of the language share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pallasite._jax import current_user_location
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError


def value_error(message: str, **details: Any) -> InvalidValueError:
    """An :class:`InvalidValueError` at the user's current line."""
    return InvalidValueError(message, location=current_user_location(), **details)


def type_error(message: str, **details: Any) -> InvalidTypeError:
    """An :class:`InvalidTypeError` at the user's current line."""
    return InvalidTypeError(message, location=current_user_location(), **details)


def unsupported(message: str, **details: Any) -> UnsupportedError:
    """An :class:`UnsupportedError` at the user's current line."""
    return UnsupportedError(message, location=current_user_location(), **details)


def is_integer(value: Any) -> bool:
    """Whether ``value`` is a compile-time integer (a boolean is not one)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def positive_integers(values: Iterable[Any], what: str) -> tuple[int, ...]:
    """``values`` as a tuple of positive integers, or an error that calls them ``what``."""
    result = tuple(values)
    for position, value in enumerate(result):
        if not is_integer(value):
            raise type_error(
                f"{what}[{position}] is a {type(value).__name__}, not an integer",
                got=value,
                expected="a Python integer that is known while tracing",
            )
        if value < 1:
            raise value_error(
                f"{what}[{position}] is not positive", got=result, expected="integers >= 1"
            )
    return tuple(int(value) for value in result)


def count(value: Any, what: str, *, minimum: int = 0) -> int:
    """``value`` as an integer of at least ``minimum``, or an error that calls it ``what``."""
    if not is_integer(value):
        raise type_error(
            f"{what} must be known while tracing",
            got=f"{value!r} of type {type(value).__name__}",
            expected=f"a Python integer >= {minimum}",
        )
    if value < minimum:
        raise value_error(f"{what} is too small", got=value, expected=f"an integer >= {minimum}")
    return int(value)


def axis_names(axes: Any, what: str) -> tuple[Any, ...] | None:
    """Axis names as a tuple; a single name may be given bare, None stays None."""
    if axes is None:
        return None
    names = axes if isinstance(axes, tuple | list) else (axes,)
    for name in names:
        if not isinstance(name, str | tuple):
            raise type_error(
                f"{what} holds something that is not an axis name",
                got=name,
                expected="the name of a cluster axis, or a tuple of names",
            )
    if not names:
        raise value_error(f"{what} is empty", expected="None, an axis name or a tuple of names")
    return tuple(names)
