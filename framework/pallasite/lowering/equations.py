"""What concerns one equation, whoever walks over it: place in errors and in the code, checks."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from jaxlib.mlir import ir

from pallasite import _jax
from pallasite.errors import (
    InternalError,
    PallasiteError,
    PluginError,
    SourceLocation,
    UnsupportedError,
)


class errors_at_equation:  # noqa: N801 -- entered like a function, for every equation
    """Gives the errors of a rule the user's line; other exceptions are bugs in Pallasite.

    What the user's own code raises, if a rule calls some, passes through.
    """

    __slots__ = ("_equation",)

    def __init__(self, equation: Any):
        self._equation = equation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if error is None:
            return
        equation = self._equation
        location = _jax.user_location(equation.source_info)
        if isinstance(error, PallasiteError):
            error.at(location)
            return
        if not isinstance(error, Exception):
            return
        operands = ", ".join(_type_of(atom.aval) for atom in equation.invars)
        plugins = importlib.import_module("pallasite.plugins")  # Only where something fails.
        plugin = plugins.manager().culprit(error)
        if plugin is not None:
            raise PluginError(
                f"plugin {plugin} failed at primitive {equation.primitive}:"
                f" {type(error).__name__}: {error}",
                got=f"operands {operands or 'none'}",
                hint="report it to the plugin's authors",
                location=location,
            ) from error
        if _jax.raised_by_user(error):
            return
        raise InternalError(
            f"the rule of primitive {equation.primitive} failed: {type(error).__name__}: {error}",
            got=f"operands {operands or 'none'}",
            hint="report this; no kernel should make a rule fail like this",
            location=location,
        ) from error


def _type_of(aval: Any) -> str:
    return str(aval.str_short() if isinstance(aval, _jax.ShapedArray) else aval)


def mlir_location(location: SourceLocation | None) -> contextlib.AbstractContextManager[Any]:
    """Gives the operations emitted inside the user's source line."""
    if location is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = ir.Location.file(
        location.file, location.line, location.column
    )
    return found


def check_elements(equation: Any) -> None:
    """Refuses an equation that makes an array without elements."""
    for variable in equation.outvars:
        if 0 in getattr(variable.aval, "shape", ()):
            raise UnsupportedError(
                f"{equation.primitive} makes an array without elements",
                got=variable.aval.str_short(),
                expected="extents of at least 1",
            )
