"""What concerns one equation, whoever walks over it: place in errors and in the code, checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from pallasite import _jax
from pallasite.errors import InternalError, PallasiteError, SourceLocation, UnsupportedError


@contextlib.contextmanager
def errors_at_equation(equation: Any) -> Iterator[None]:
    """Gives the errors of a rule the user's line; exceptions of another kind are ours to mend.

    What the user's own code raises, if a rule calls some, passes through.
    """
    location = _jax.user_location(equation.source_info)
    try:
        yield
    except PallasiteError as error:
        error.at(location)
        raise
    except Exception as error:
        if _jax.raised_by_user(error):
            raise
        operands = ", ".join(_type_of(atom.aval) for atom in equation.invars)
        raise InternalError(
            f"the rule of primitive {equation.primitive} failed: {type(error).__name__}: {error}",
            got=f"operands {operands or 'none'}",
            hint="report this; no kernel should make a rule fail like this",
            location=location,
        ) from error


def _type_of(aval: Any) -> str:
    return str(aval.str_short() if isinstance(aval, _jax.ShapedArray) else aval)


@contextlib.contextmanager
def mlir_location(location: SourceLocation | None) -> Iterator[None]:
    """Gives the operations emitted inside the user's source line."""
    if location is None:
        yield
        return
    with ir.Location.file(location.file, location.line, location.column):
        yield


def check_elements(equation: Any) -> None:
    """Refuses an equation that makes an array without elements."""
    for variable in equation.outvars:
        if 0 in getattr(variable.aval, "shape", ()):
            raise UnsupportedError(
                f"{equation.primitive} makes an array without elements",
                got=variable.aval.str_short(),
                expected="extents of at least 1",
            )
