"""``jax.vmap`` of attention: one call of more batches.

A kernel that is mapped has a further grid dimension, but is cut up as if there were one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.flash.arguments import Extras
from pallasite_std.ops.padding import padded

_SHARED = ("bias", "slopes", "block_mask")
"""Of :class:`Extras`, arrays that may be the same for all batches."""

type Split = Callable[[Any, Any, Extras, Any], Any]
"""Of q, k, extras and log-sum-exp, as a kernel leaves it: (batch, q_heads, q_seq)."""


def forward_of_batches(function: Callable[..., tuple[Any, ...]], split: Split) -> Any:
    """A function of (q, k, v, extras) that returns results and perhaps log-sum-exp, with a rule for
    ``jax.vmap``."""
    mapped: Any = jax.custom_batching.custom_vmap(function)

    @in_32_bits
    def rule(size: int, marks: Any, q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, Any]:
        if not _joins(size, marks[:3], extras, (q, k, v)):
            found = _as_before(function, size, marks, q, k, v, extras)
            return found, jax.tree.map(lambda _: True, found)
        one = jax.eval_shape(function, *_each(marks, q, k, v, extras))
        rows = _extras_of(size, q.shape[1], marks[3], extras)
        given = tuple(map(_joined, (q, k, v)))
        out, *lse = forward_of_batches(function, split)(*given, rows)
        found = [out.reshape(size, *one[0].shape)]
        for array, like in zip(lse, one[1:], strict=True):
            if array is None:
                found.append(None)
                continue
            array = split(given[0], given[1], rows, array)[..., : q.shape[2]]
            found.append(_as_one_leaves_it(array, size, q.shape[1], like.shape))
        result = tuple(found)
        return result, jax.tree.map(lambda _: True, result)

    mapped.def_vmap(rule)
    return mapped


def backward_of_batches(function: Callable[..., tuple[Any, ...]]) -> Any:
    """A function of (q, k, v, extras, out, lse, d_out) that returns gradients of q, k and v, and
    None, with a rule for ``jax.vmap``."""
    mapped: Any = jax.custom_batching.custom_vmap(function)

    @in_32_bits
    def rule(size: int, marks: Any, *arrays: Any) -> tuple[Any, Any]:
        q, k, v, extras, out, lse, d_out = arrays
        of_arrays = (*marks[:3], *marks[4:])
        if not _joins(size, of_arrays, extras, (q, k, v)):
            found = _as_before(function, size, marks, *arrays)
        else:
            batch, length = q.shape[1:3]
            logarithms = _by_queries(lse, batch, length)
            given = [_joined(one) for one in (q, k, v, out, d_out)]
            rows = _extras_of(size, batch, marks[3], extras)
            gradients = backward_of_batches(function)(
                *given[:3], rows, given[3], logarithms, given[4]
            )
            found = tuple(
                None if one is None else one.reshape(size, batch, *one.shape[1:])
                for one in gradients
            )
        return found, jax.tree.map(lambda _: True, found)

    mapped.def_vmap(rule)
    return mapped


def _joins(size: int, marks: tuple[bool, ...], extras: Extras, arrays: tuple[Any, ...]) -> bool:
    """Whether all arrays have the new dimension, and none is empty; dropped weights depend on the
    number of their batch."""
    some = size and all(math.prod(one.shape) for one in arrays)
    return bool(some) and all(marks) and extras.seed is None


def _as_before(function: Callable[..., Any], size: int, marks: Any, *arrays: Any) -> Any:
    """The function mapped without a rule."""
    axes = jax.tree.map(lambda one: 0 if one else None, tuple(marks))
    return jax.vmap(function, axes, axis_size=size)(*arrays)


def _each(marks: Any, *arrays: Any) -> Any:
    """Types of the arrays of one call."""

    def kind(mark: bool, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape[1:] if mark else array.shape, array.dtype)

    return jax.tree.map(kind, tuple(marks), arrays)


def _joined(array: Any) -> Any:
    """The first two dimensions as one."""
    return array.reshape(-1, *array.shape[2:])


def _extras_of(size: int, batch: int, marks: Extras, extras: Extras) -> Extras:
    """The arrays beside, for all batches."""
    found = {}
    for (name, array), mark in zip(extras._asdict().items(), marks, strict=True):
        shared = name in _SHARED
        if array is None or (shared and not mark and array.shape[0] == 1):
            found[name] = array
            continue
        rest = array.shape[2:] if mark else array.shape[1:]
        with_both = array if mark else array[None]
        found[name] = _joined(jnp.broadcast_to(with_both, (size, batch, *rest)))
    return Extras(**found)


def _by_queries(lse: Any, batch: int, length: int) -> Any:
    """(calls * batch, q_heads, q_seq) of log-sum-exp of calls, as these left it: whole tiles for
    each batch, or the batches of a call one after the other."""
    size, rows, heads = lse.shape[:3]
    if rows == batch:
        return _joined(lse[..., :length])
    found = lse[:, 0, :, : batch * length].reshape(size, heads, batch, length)
    return _joined(jnp.moveaxis(found, 2, 1))


def _as_one_leaves_it(lse: Any, size: int, batch: int, shape: tuple[int, ...]) -> Any:
    """The inverse of :func:`_by_queries`, for calls that leave this shape."""
    found = lse.reshape(size, batch, *lse.shape[1:])
    if shape[0] != batch:
        found = jnp.moveaxis(found, 1, 2)
        found = found.reshape(size, 1, found.shape[1], -1)
    return padded(found, found.ndim - 1, shape[-1])
