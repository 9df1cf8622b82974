"""Errors that know the user's line, and the checks that several modules of the language share."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from pallasite import _jax
from pallasite.errors import (
    InvalidTypeError,
    InvalidValueError,
    PallasiteError,
    SourceLocation,
    UnsupportedError,
)


def value_error(message: str, **details: Any) -> InvalidValueError:
    """An :class:`InvalidValueError` at the user's current line."""
    return InvalidValueError(message, location=_jax.current_user_location(), **details)


def type_error(message: str, **details: Any) -> InvalidTypeError:
    """An :class:`InvalidTypeError` at the user's current line."""
    return InvalidTypeError(message, location=_jax.current_user_location(), **details)


def unsupported(message: str, **details: Any) -> UnsupportedError:
    """An :class:`UnsupportedError` at the user's current line."""
    return UnsupportedError(message, location=_jax.current_user_location(), **details)


@contextlib.contextmanager
def errors_at(location: Callable[[], SourceLocation | None]) -> Iterator[None]:
    """Gives errors that know no line of a user's that of a function, called if one is raised."""
    try:
        yield
    except PallasiteError as error:
        where = location()
        if where and error.location and not _jax.is_user_filename(error.location.file):
            error.location, error.__notes__ = None, []
        raise error.at(where) from error.__cause__


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


# What JAX says when kernels do what they often try: (patterns of the exception's class and of the
# message, what we say instead; {0} is the first group of the pattern).
_EXPLANATIONS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "TypeError|AttributeError",
        "requires ndarray or scalar arguments, got .*DynamicJaxprTracer|'AbstractRef' object",
        {"message": "a reference is used as an array", "hint": "read it first: ref[...]"},
    ),
    (
        "ValueError",
        r"values to unpack \(expected 1\b",
        {"message": "a reference is indexed by None or a list", "hint": "index ref[...] instead"},
    ),
    (
        "AssertionError",
        "DShapedArray",
        {
            "message": "the size of a window is computed in the kernel",
            "expected": "a size that is known while tracing; the start may be computed",
        },
    ),
    (
        "TracerBoolConversionError",
        "",
        {
            "message": "Python cannot branch on a value that the kernel computes",
            "hint": "pl.when, jax.lax.cond or jnp.where",
        },
    ),
    (
        "TracerIntegerConversionError",
        "",
        {
            "message": "Python needs a number here, but the kernel computes the value",
            "hint": "pl.loop or jax.lax.fori_loop for loops; sizes must be known while tracing",
        },
    ),
    (
        "ValueError",
        r"Invalid shape for `\w+`.*Expected shape: (\(.*?\)). Value shape: (\(.*?\))",
        {
            "message": "the array that is stored does not have the shape of the reference",
            "got": "{1}",
            "expected": "{0}",
            "hint": "jnp.full_like(ref, x) of a number, jnp.broadcast_to(x, ref.shape) of a row",
        },
    ),
    (
        "ValueError",
        r"Invalid dtype for `\w+`. Ref dtype: (\w+). Value dtype: (\w+)",
        {
            "message": "the array that is stored does not have the dtype of the reference",
            "got": "{1}",
            "expected": "{0}",
            "hint": "x.astype(ref.dtype)",
        },
    ),
    (
        "ValueError",
        r"Out of bound slice: start=(\d+), size=(\d+), stride=(\d+), dim=(\d+)",
        {
            "message": "the window leaves a dimension of {3} elements",
            "got": "{1} elements from {0}, stride {2}",
            "expected": "a window inside the array",
        },
    ),
    (
        "ValueError",
        r"captures non-scalar array constants \[(.*)\]",
        {
            "message": "a warp-mapped region captures an array",
            "got": "{0}",
            "expected": "references and scalars",
            "hint": "write the array to shared memory before the region",
        },
    ),
    (
        "NameError",
        r"Found an unbound axis name: (\w+)",
        {
            "message": "there is no axis named '{0}'",
            "expected": "one of grid_names, cluster_names or thread_name of the kernel",
        },
    ),
)


@contextlib.contextmanager
def errors_at_user_line() -> Iterator[None]:
    """Turns what JAX raises while a kernel is traced into an error at the user's line.

    What the user's own code raises passes through.
    """
    with _jax.whole_tracebacks():
        try:
            yield
        except PallasiteError as error:
            raise error.at(_jax.last_user_frame(error)) from error.__cause__
        except Exception as error:
            location = _jax.last_user_frame(error)
            if location is None or _jax.raised_by_user(error):
                raise
            raise _explained(error, location) from error


def _explained(error: Exception, location: SourceLocation) -> PallasiteError:
    text = str(error).partition("\nThe error occurred while tracing")[0].strip()
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    details: dict[str, Any] = {"message": text or "JAX does not take the operands of this line"}
    if not text:
        details["got"] = f"{type(error).__name__} in {frames[-1]}"
        details["expected"] = "arrays of numbers, of shapes that fit together"
    for kind, pattern, explanation in _EXPLANATIONS:
        found = re.search(pattern, text) if re.fullmatch(kind, type(error).__name__) else None
        if found is not None:
            details = {name: said.format(*found.groups()) for name, said in explanation.items()}
    if "canonicalize_slice" in frames:
        details = {
            "message": "a slice begins or ends at a value that the kernel computes",
            "expected": "a size that is known while tracing",
            "hint": "ref[i * 128 : (i + 1) * 128] is ref[pl.ds(i * 128, 128)]",
        }
    message = details["message"]
    rest = {name: value for name, value in details.items() if name != "message"}
    if isinstance(error, NotImplementedError):
        return UnsupportedError(message, location=location, **rest)
    if isinstance(error, TypeError | AttributeError):
        return InvalidTypeError(message, location=location, **rest)
    return InvalidValueError(message, location=location, **rest)
