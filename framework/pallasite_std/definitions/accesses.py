"""Accesses of references in terms of plain ones: updates that read and write, and masks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite.plugin import jax_internals as _jax

type Call = Callable[[Any, Callable[..., Sequence[Any]], Sequence[Any], Any], Any]
"""Makes a call of a function: of an equation at its place, the function, operands, result."""

_UPDATES = (_jax.swap_p, _jax.masked_swap_p, _jax.addupdate_p)
_MASKED = (_jax.masked_load_p, _jax.masked_swap_p)


def reads_what_it_writes(equation: Any, used: Callable[[], set[Any]]) -> bool:
    """Whether an equation stores to a reference, and what was there before is used.

    Args:
      equation: any.
      used: returns the variables of its jaxpr that are.
    """
    if equation.primitive is _jax.addupdate_p:
        return True
    return equation.primitive in _UPDATES and equation.outvars[0] in used()


def is_masked(equation: Any) -> bool:
    """Whether an equation accesses memory under a mask."""
    return equation.primitive in _MASKED


def with_plain_mask(equation: Any, call: Call, location: Any) -> list[Any]:
    """An access whose mask, and value for what it leaves out, have the shape of what is accessed,
    or none, and the right dtypes.

    Raises:
      InvalidTypeError: they cannot be converted.
    """
    leaves, tree = equation.invars, equation.params["args_tree"]
    result = equation.outvars[0].aval
    first, transforms, third, last = tree.unflatten(leaves)
    loads = equation.primitive is _jax.masked_load_p
    mask, other = (third, last) if loads else (last, None)
    if mask is None:
        return [equation]
    if mask.aval.dtype != jnp.bool_:
        raise InvalidTypeError(
            "the mask of an access is not boolean",
            got=str(mask.aval.dtype),
            expected="bool",
            hint="mask != 0",
            location=location,
        )
    equations: list[Any] = []

    def plain(atom: Any, dtype: Any, what: str) -> Any:
        shape = result.shape if atom.aval.shape else ()
        if not _stretches(atom.aval.shape, shape):
            raise InvalidValueError(
                f"the {what} does not have the shape of what it applies to",
                got=f"shape {list(atom.aval.shape)} for {list(shape)}",
                expected="a scalar, or a shape that can be broadcast",
                location=location,
            )
        if atom.aval.shape == shape and atom.aval.dtype == dtype:
            return atom
        variable = _jax.new_var(result.update(shape=shape, dtype=dtype, weak_type=False))
        function = functools.partial(_convert, shape=shape, dtype=dtype)
        equations.append(call(equation, function, [atom], variable))
        return variable

    mask = plain(mask, mask.aval.dtype, "mask")
    if other is not None:
        if not _converts(other, result.dtype):
            raise InvalidTypeError(
                "the value for masked elements does not have the dtype of the reference",
                got=str(other.aval.dtype),
                expected=str(result.dtype),
                hint="other.astype(ref.dtype)",
                location=location,
            )
        other = plain(other, result.dtype, "value for masked elements")
    if not equations:
        return [equation]
    operands = (first, transforms, mask, other) if loads else (first, transforms, third, mask)
    return [*equations, _masked(equation, operands)]


def _converts(atom: Any, dtype: Any) -> bool:
    """Whether something may become one of a dtype: numbers in the program if they are the same
    there, or nearly, in floating point; else where promotion leads to the dtype."""
    if not isinstance(atom, _jax.Literal):
        with contextlib.suppress(TypeError, ValueError), jax.numpy_dtype_promotion("standard"):
            return bool(jnp.promote_types(atom.aval.dtype, dtype) == dtype)
        return False
    value = np.asarray(atom.val)
    if all(jnp.issubdtype(one, jnp.floating) for one in (value.dtype, dtype)):
        return True
    return bool(np.all(value == value.astype(dtype).astype(value.dtype)))


def _stretches(shape: Sequence[int], other: Sequence[int]) -> bool:
    if len(shape) > len(other):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))


def _convert(value: Any, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jnp.broadcast_to(value, shape).astype(dtype)]


def _masked(equation: Any, operands: Any, **changes: Any) -> Any:
    leaves, tree = jax.tree.flatten(operands)
    params = {**equation.params, "args_tree": tree}
    return equation.replace(invars=leaves, params=params, **changes)


def separated(equation: Any, call: Call) -> list[Any]:
    """A load and a store in the place of an equation that reads what it writes."""
    (effect,) = equation.effects
    read, write = {_jax.ReadEffect(effect.input)}, {_jax.WriteEffect(effect.input)}
    if equation.primitive is _jax.masked_swap_p:
        reference, transforms, value, mask = equation.params["args_tree"].unflatten(equation.invars)
        (old,) = equation.outvars
        operands = (reference, transforms, mask, None if mask is None else value)
        leaves, tree = jax.tree.flatten(operands)
        params = {
            "args_tree": tree,
            "cache_modifier": None,
            "eviction_policy": None,
            "is_volatile": False,
        }
        load = equation.replace(
            primitive=_jax.masked_load_p, invars=leaves, params=params, effects=read
        )
        return [load, equation.replace(outvars=[_jax.new_var(old.aval)])]
    reference, value, *leaves = equation.invars
    params = {"tree": equation.params["tree"]}
    adds = equation.primitive is _jax.addupdate_p
    old = _jax.new_var(value.aval) if adds else equation.outvars[0]
    load = equation.replace(
        primitive=_jax.get_p,
        invars=[reference, *leaves],
        outvars=[old],
        params=params,
        effects=read,
    )
    equations = [load]
    if adds:
        total = _jax.new_var(value.aval)
        equations.append(call(equation, _add, [old, value], total))
        value = total
    store = equation.replace(
        primitive=_jax.swap_p,
        invars=[reference, value, *leaves],
        outvars=[_jax.new_var(value.aval)],
        params=params,
        effects=write,
    )
    return [*equations, store]


def _add(old: Any, value: Any) -> list[Any]:
    return [jnp.add(old, value)]
