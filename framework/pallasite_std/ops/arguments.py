"""Checks of arguments that several operations have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    select_target,
)
from pallasite.plugin.jax_internals import current_user_location, match_varying_axes


def target_lacks(*args: Any, **kwargs: Any) -> str | None:
    """Why the target cannot run the portable operations; None if it can."""
    del args, kwargs
    target = select_target()
    missing = sorted({"mbarrier", "tma"} - target.features)
    return f"{target.name} lacks {', '.join(missing)}" if missing else None


def check_config(config: Any, kind: type) -> None:
    """Raises InvalidTypeError unless a configuration is None or one of its kind."""
    if config is not None and not isinstance(config, kind):
        raise InvalidTypeError(
            f"config is not of type {kind.__name__}",
            got=f"{config!r} of type {type(config).__name__}",
            expected=f"{kind.__name__}, or None",
        )


def is_portable_config(config: Any) -> bool:
    """Whether a configuration is one of the portable operations."""
    return type(config).__module__.startswith("pallasite_std.ops.")


def as_array(value: Any, what: str) -> jax.Array:
    """An array of real numbers or booleans.

    Raises:
      InvalidTypeError: it is none.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        array = None
    real = (jnp.floating, jnp.integer, jnp.bool_)
    if array is None or not any(jnp.issubdtype(array.dtype, kind) for kind in real):
        raise InvalidTypeError(
            f"{what} is not an array of real numbers",
            got=type(value).__name__ if array is None else f"{array.dtype}{list(array.shape)}",
            expected="such as a jax.Array of float32",
        )
    return array


def flag(value: Any, what: str) -> bool:
    """An option that is on or off.

    Raises:
      InvalidTypeError: neither True nor False, known while tracing.
    """
    if not isinstance(value, bool | int | np.bool_) or value not in (0, 1):
        raise InvalidTypeError(
            f"{what} is neither True nor False, known while tracing",
            got=type(value).__name__ if isinstance(value, jax.core.Tracer) else repr(value),
            expected="a Python bool",
        )
    return bool(value)


def positive(value: Any, what: str) -> float:
    """A factor that has to be known while tracing.

    Raises:
      InvalidTypeError: it is not a number.
      InvalidValueError: it is not positive and finite.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(
            f"{what} must be known while tracing",
            got=type(value).__name__,
            expected="a positive Python number",
        )
    if not (value > 0 and math.isfinite(value)):
        raise InvalidValueError(
            f"{what} is not positive and finite", got=value, expected="a positive number"
        )
    return float(value)


def dtype_of(dtype: Any, what: str) -> np.dtype[Any]:
    """A dtype that arrays can have: without ``jax_enable_x64``, none of 64 bits.

    Raises:
      InvalidTypeError: it is no dtype of numbers.
    """
    try:
        given = np.dtype(dtype)
    except (TypeError, ValueError):
        given = None
    real = (np.floating, np.integer, np.bool_)
    if given is None or not any(jnp.issubdtype(given, kind) for kind in real):
        raise InvalidTypeError(
            f"{what} is not a dtype of real numbers", got=dtype, expected="such as jnp.bfloat16"
        )
    result: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(given))
    return result


def float_dtype(dtype: Any, accepted: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    """The dtype of a result.

    Raises:
      InvalidTypeError: it is none of those accepted.
    """
    result = dtype_of(dtype, "out_dtype")
    if result not in accepted:
        raise InvalidTypeError(
            "the result cannot have this dtype",
            got=result,
            expected=", ".join(str(one) for one in accepted),
        )
    return result


def accepted_dtypes(dtypes: Iterable[Any], operation: str) -> str:
    """Floating-point dtypes that an implementation takes, for messages; an implementation for some
    targets only may leave float32 to the portable one of ``pallasite.ops``."""
    names = [str(np.dtype(one)) for one in dtypes]
    others = "" if "float32" in names else f", or float32 with pallasite.ops.{operation}"
    return " or ".join(names) + others


def check_extents_along_k(
    a: Any, b: Any, k: int, depth: int, *, transpose_b: bool, transpose_a: bool | None = None
) -> None:
    """Raises InvalidValueError unless a and b have the same extent along k."""
    if k == depth:
        return
    flags = f"transpose_b={transpose_b}"
    if transpose_a is not None:
        flags = f"transpose_a={transpose_a}, {flags}"
    raise InvalidValueError(
        "a and b do not have the same extent along k",
        got=f"{k} and {depth}, from shapes {a.shape} and {b.shape}, {flags}",
    )


def whole_numbers(array: Any, what: str, shape: tuple[int | str, ...]) -> jax.Array:
    """An array of integers, one for each sequence of a batch or more, as int32.

    Args:
      array: what is given.
      what: its name, for messages.
      shape: extents that it must have; the name of one stands for any.

    Raises:
      InvalidTypeError: the array does not fit.
    """
    array = as_array(array, what)
    fits = len(array.shape) == len(shape) and all(
        isinstance(wanted, str) or wanted == extent
        for wanted, extent in zip(shape, array.shape, strict=True)
    )
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits:
        extents = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise InvalidTypeError(
            f"{what} does not fit the batch",
            got=f"{array.dtype}{list(array.shape)}",
            expected=f"integers of shape ({extents})",
        )
    return array.astype(jnp.int32)


def matched(*arrays: Any) -> tuple[Any, ...]:
    """Arrays that vary over the same axes of a device mesh, for a function with its own derivative.

    Within ``jax.shard_map``, the derivative by an array that is the same on all devices is a sum
    over them, which the conversion has. None stays None.
    """
    given = iter(match_varying_axes(*(one for one in arrays if one is not None)))
    return tuple(None if one is None else next(given) for one in arrays)


def zeros(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.Array:
    """The result where an operand has no elements; it varies over a mesh as the operands do."""
    result: jax.Array = matched(jnp.zeros(shape, dtype), *operands)[0]
    return result


def saturated(integers: Any) -> Any:
    """Integers as int32: those that it does not hold as the nearest that it does."""
    kind, limits = jnp.iinfo(integers.dtype), np.iinfo(np.int32)
    if kind.max > limits.max:
        integers = integers.clip(max(kind.min, limits.min), limits.max)
    return integers.astype(np.int32)


def in_32_bits[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """An operation, or a rule of its derivatives, that computes as without ``jax_enable_x64``.

    Kernels have indices of 32 bits, and intermediate results of 32 bits at most, whatever the
    types of Python's numbers are in the program. Integers of 64 bits become ones of 32, as labels
    and sizes may (:func:`saturated`); the operation says what it thinks of other operands.
    """

    def narrow(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        return saturated(leaf) if leaf.dtype in (np.int64, np.uint64) else leaf

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Also of NumPy, whose arrays JAX converts without saturation.
        args, kwargs = jax.tree.map(narrow, (args, kwargs))
        if not jax.config.jax_enable_x64:
            return function(*args, **kwargs)
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    if isinstance(function, functools.partial):
        # JAX takes a partial's signature for opaque. Seen through this function, defaults of
        # static parameters would become operands.
        del call.__wrapped__
    return call


def without_derivatives[**P, T](what: str, hint: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function of arrays that says what is missing if its derivatives are asked for.

    Args:
      what: that has no derivatives, for the message.
      hint: what has.
      function: of positional arguments.
    """
    wrapped: Any = jax.custom_jvp(in_32_bits(function))

    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            f"{what} has no derivatives", hint=hint, location=current_user_location()
        )

    wrapped.defjvp(refuse)
    guarded: Callable[P, T] = wrapped
    return guarded


def with_derivatives_of[**P, T](
    reference: Callable[P, T], function: Callable[P, T]
) -> Callable[P, T]:
    """A function of arrays whose derivatives, of every order, are those of another one.

    Args:
      reference: of operations that JAX differentiates; its results have the same types.
      function: of positional arguments, which calls kernels; it computes the same.
    """
    wrapped: Any = jax.custom_jvp(in_32_bits(function))

    def derivative(primals: Any, tangents: Any) -> Any:
        return wrapped(*primals), jax.jvp(reference, primals, tangents)[1]

    wrapped.defjvp(in_32_bits(derivative))
    differentiable: Callable[P, T] = wrapped
    return differentiable


def random_array(key: jax.Array, like: Any) -> jax.Array:
    """Random numbers of the shape and dtype of an array, or of its type, to measure with."""
    dtype = np.dtype(like.dtype)
    if dtype.kind in "iu" or "int" in dtype.name:
        return jax.random.randint(key, like.shape, 0, 5, np.int32).astype(dtype)
    return jax.random.normal(key, like.shape, np.float32).astype(dtype)
