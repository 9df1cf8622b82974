"""The operations library: GEMM, attention and more, for every target.

``pallasite.ops.matmul(a, b)`` runs the implementation that suits the target best among those that
plugins contribute, and names no chip. Which operations there are, and what they take, depends on
the plugins: ``dir(pallasite.ops)`` lists them, and ``help`` shows what each accepts everywhere; an
implementation may accept more.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from pallasite import _jax, plugins
from pallasite.errors import MissingNameError, PallasiteError, PluginError, UnsupportedError
from pallasite.extensions import Operation
from pallasite.known_plugins import remedy
from pallasite.language.checks import errors_at
from pallasite.plugin_values import Guard
from pallasite.target_selection import select_target
from pallasite.targets import Target


def implementations(name: str, target: Target | None = None) -> tuple[Operation, ...]:
    """The implementations of an operation for a target, in the order in which they are tried.

    Args:
      name: of the operation.
      target: what is compiled for; by default what the configuration selects.

    Raises:
      PluginError: two equally specific implementations, of which none overrides the other.
    """
    return plugins.manager().operations(name, target or select_target())


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in plugins.manager().operation_names():
        hint = remedy("operations", name, plugins.manager().absences())
        raise MissingNameError(f"pallasite.ops has no operation {name!r}", hint=hint)
    return _dispatcher(name, plugins.manager().generation())


def __dir__() -> list[str]:
    return sorted({*plugins.manager().operation_names(), "implementations"})


@functools.lru_cache(maxsize=256)
def _dispatcher(name: str, generation: Any) -> Callable[..., Any]:
    """The function that programs call; made anew when plugins come or go."""
    del generation

    def operation(*args: Any, **kwargs: Any) -> Any:
        with errors_at(_jax.current_user_location):
            target = select_target()
            return _chosen(name, target, args, kwargs)(*args, **kwargs)

    operation.__name__ = operation.__qualname__ = name
    operation.__module__ = __name__
    documented = plugins.manager().portable_operation(name)
    if documented is not None:
        function = _function(documented.implementation, documented)
        operation.__doc__ = function.__doc__
        operation.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return operation


def _chosen(
    name: str, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    refusals = []
    for entry in implementations(name, target):
        reason = None
        if entry.refuses is not None:
            try:
                reason = _function(entry.refuses, entry, "str | None")(*args, **kwargs)
            except PluginError as error:
                reason = _unbound(_function(entry.implementation, entry), args, kwargs)
                if reason is None or error.__cause__ is None:
                    raise
        if reason is None:
            return _function(entry.implementation, entry)
        refusals.append(f"{entry.plugin}: {reason}")
    raise UnsupportedError(
        f"no implementation of {name} on {target.name} takes these arguments",
        got="; ".join(refusals) or f"no implementation for {target.name}",
        hint="see help(pallasite.ops." + name + ")",
    )


def _unbound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a function's parameters do not take arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=1024)
def _function(path: str, entry: Operation, result: str = "") -> Callable[..., Any]:
    """A function by its name; one that says what it returns is called through a guard."""
    module, _, attribute = path.partition(":")
    what = f"pallasite_operations of plugin {plugins.manager().label(entry.plugin)}: {path}"
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except PallasiteError:
        raise
    except Exception as error:
        raise PluginError(
            f"{what}, of operation {entry.name!r}, cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise PluginError(
            f"{what}, of operation {entry.name!r}, is no function", got=repr(function)
        )
    return Guard(function, what, result) if result else function
