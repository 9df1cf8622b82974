"""Activations: what of a function can be seen before a kernel applies it to parts of a result."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import DynamicJaxprTracer

from pallasite.plugin import InvalidTypeError, InvalidValueError, PallasiteError, plugins
from pallasite_std.ops.dependences import mixing

_SHAPE = (5, 7)
"""That functions are traced with."""

_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def check_activation(activation: Any) -> None:
    """Whether a function is one that kernels can apply to the elements of a matrix, tile by tile.

    Raises:
      InvalidTypeError: it is not a function, or its result is not an array.
      InvalidValueError: the result has another shape, or elements depend on others.
    """
    if not callable(activation):
        raise InvalidTypeError(
            "activation is not a function",
            got=repr(activation),
            expected="a function of an array, such as jax.nn.relu",
        )
    if not isinstance(activation, Hashable):
        raise InvalidTypeError(
            "activation has no hash, by which kernels are found again",
            got=f"a {type(activation).__name__}",
            expected="a function, or an object with __hash__",
            hint="a frozen dataclass has one",
        )
    with contextlib.suppress(TypeError):  # Without weak references.
        if activation in _checked:
            return
    _check(activation)
    with contextlib.suppress(TypeError):
        _checked.add(activation)


def _check(activation: Any) -> None:
    try:
        traced = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(_SHAPE, jnp.float32))
    except PallasiteError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            "activation cannot be applied to a matrix of any extents",
            got=f"{type(error).__name__} for an array of shape {_SHAPE}: {error}",
            expected="a function of each element",
        ) from error
    for captured in traced.consts:
        if isinstance(captured, jax.core.Tracer) and not isinstance(captured, DynamicJaxprTracer):
            raise InvalidValueError(
                "activation captures a value by which a transformation maps or differentiates",
                got=f"{captured.aval} of a {type(captured).__name__}",
                expected="a function of its argument alone, or of constants",
                hint="apply it to the result, after the product",
            )
    shapes = [getattr(aval, "shape", None) for aval in traced.out_avals]
    if shapes != [_SHAPE]:
        raise InvalidValueError(
            "activation does not return an array of the shape that it is given",
            got=f"{', '.join(map(str, shapes)) or 'nothing'} of {_SHAPE}",
            expected="a function of each element",
        )
    found = mixing(traced, plugins.registry().jaxprs)
    if found is not None:
        raise InvalidValueError(
            "activation does not work element by element: kernels apply it to tiles of the result",
            got=found,
            expected="a function of each element",
            hint="apply it to the result, after the product",
        )
