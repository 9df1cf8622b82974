"""Collective operations as kernels: what other devices have, by their memory."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from pallasite.plugin import InvalidValueError, PallasiteError
from pallasite.plugin.jax_internals import current_user_location

_NAMES = {
    "all_gather": "pallasite_multigpu.ops.api",
    "all_gather_lhs_matmul": "pallasite_multigpu.ops.products",
    "all_gather_matmul": "pallasite_multigpu.ops.products",
    "all_reduce": "pallasite_multigpu.ops.api",
    "all_to_all": "pallasite_multigpu.ops.api",
    "matmul_reduce_scatter": "pallasite_multigpu.ops.products",
    "MoeRoute": "pallasite_multigpu.ops.moe",
    "moe_combine": "pallasite_multigpu.ops.moe",
    "moe_dispatch": "pallasite_multigpu.ops.moe",
    "reduce_scatter": "pallasite_multigpu.ops.api",
    "ring_attention": "pallasite_multigpu.ops.ring",
    "zigzag_order": "pallasite_multigpu.ops.ring_schedule",
}
"""The module of each public name; it is imported when the name is first used."""

__all__ = list(_NAMES)


def _with_lines(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation whose errors begin with the line that calls it."""

    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except PallasiteError as error:
            raise error.at(current_user_location()) from error.__cause__
        except NameError as error:
            _, known, axis = str(error).partition("unbound axis name: ")
            if not known:
                raise
            raise InvalidValueError(
                f"{operation.__name__}: there is no axis of that name here",
                got=repr(axis.partition(".")[0]),
                expected="an axis of the mesh of jax.shard_map around the call, or a tuple of them",
                hint="call it inside jax.shard_map(..., mesh=mesh), over all axes of the mesh",
                location=current_user_location(),
            ) from error

    return call


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    if inspect.isfunction(value):
        value = _with_lines(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
