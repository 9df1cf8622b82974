"""Activations: what of a function can be seen before a kernel applies it to parts of a result."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.plugin import InvalidTypeError, InvalidValueError, PallasiteError

_SHAPE = (5, 7)
"""That functions are traced with; hardly one has constants of it."""

_MIXING = frozenset(
    (
        *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        *("argmax", "argmin", "sort", "top_k", "rev", "dot_general"),
        *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window", "fft"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "gather", "pad"),
        *("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "scatter_sub"),
    )
)
"""Primitives that make an element of several, or of another one."""

_NUMBERING = frozenset(("iota", "random_bits"))
"""Primitives that make elements of where they are."""

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
    shapes = [getattr(aval, "shape", None) for aval in traced.out_avals]
    if shapes != [_SHAPE]:
        raise InvalidValueError(
            "activation does not return an array of the shape that it is given",
            got=f"{', '.join(map(str, shapes)) or 'nothing'} of {_SHAPE}",
            expected="a function of each element",
        )
    name = _mixing(traced.jaxpr)
    if name is not None:
        raise InvalidValueError(
            "activation does not work element by element: kernels apply it to tiles of the result",
            got=f"{name} of the whole array",
            expected="a function of each element",
            hint="apply it to the result, after the product",
        )


def _mixing(jaxpr: Any) -> str | None:
    """The first primitive that makes elements of others, or of where they are; None if there is
    none."""
    for equation in jaxpr.eqns:
        name = str(equation.primitive.name)
        sizes = [math.prod(getattr(var.aval, "shape", ())) for var in equation.invars]
        whole = math.prod(_SHAPE) in sizes  # Reshaped, too.
        extents = {n for var in equation.outvars for n in getattr(var.aval, "shape", ())}
        if (whole and name in _MIXING) or (name in _NUMBERING and extents & set(_SHAPE)):
            return name
        for inner in _jaxprs(equation.params):
            found = _mixing(inner)
            if found is not None:
                return found
    return None


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
