"""Activations: what of a function can be seen before a kernel applies it to parts of a result."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
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
      InvalidValueError: the result has another shape, or elements depend on others; or it captures
        a value by which a transformation maps or differentiates.
    """
    for captured in captured_values(activation):
        if not isinstance(captured, DynamicJaxprTracer):
            raise InvalidValueError(
                "activation captures a value by which a transformation maps or differentiates",
                got=f"{captured.aval} of a {type(captured).__name__}",
                expected="a function of its argument alone, or of constants",
                hint="apply it to the result, after the product",
            )


def captured_values(activation: Any) -> tuple[Any, ...]:
    """The traced values that a function captures, which is checked as an activation.

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
            return ()
    captured = _check(activation)
    if not captured:
        with contextlib.suppress(TypeError):
            _checked.add(activation)
    return captured


class CapturingActivation:
    """A function of each element whose captured values are arguments instead.

    So they are operands of a product, which JAX's transformations see. When the function is called
    again, they only tell which of what it captures is which argument.

    Args:
      function: the activation.
      captured: traced values that it captures.
    """

    def __init__(self, function: Any, captured: tuple[Any, ...]):
        self.function, self.captured = function, captured
        self.__qualname__ = getattr(function, "__qualname__", "activation")

    @property
    def captures_arrays(self) -> bool:
        """Whether it captures arrays of more, or fewer, than one element."""
        return any(one.size != 1 for one in self.captured)

    def __call__(self, values: Any, *given: Any) -> Any:
        """The function of an array, with these for what it captures."""
        traced = jax.make_jaxpr(self.function)(values)
        arguments = {id(one): value for one, value in zip(self.captured, given, strict=True)}
        consts = [
            jnp.broadcast_to(arguments[id(one)], one.shape) if id(one) in arguments else one
            for one in traced.consts
        ]
        return jaxpr_as_fun(traced.with_consts(consts))(values)[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturingActivation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.function, *map(id, self.captured)


def _check(activation: Any) -> tuple[Any, ...]:
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
    found = mixing(traced, plugins.registry().jaxprs)
    if found is not None:
        raise InvalidValueError(
            "activation does not work element by element: kernels apply it to tiles of the result",
            got=found,
            expected="a function of each element",
            hint="apply it to the result, after the product",
        )
    return tuple(one for one in traced.consts if isinstance(one, jax.core.Tracer))
