"""Derivatives of fused operations, of both modes, without intermediate results that are kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallasite_std.ops.arguments import in_32_bits, matched

tangent_p = Primitive("recomputed_tangent")
"""The derivative of a function by some of its arguments.

Its operands are the arguments, then the tangents, in which it is linear. Its transpose computes
the function again, which in other ways to take gradients leaves what it needs in memory.
"""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A function of arrays with its first argument.

    Attributes:
      function: that has derivatives.
      first: argument, with a hash.
    """

    function: Callable[..., jax.Array]
    first: Any

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """The result."""
        return self.function(self.first, *operands)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    function: Callable[..., jax.Array]
    axes: tuple[int | None, ...]

    def __call__(self, *operands: jax.Array) -> jax.Array:
        result: jax.Array = jax.vmap(self.function, self.axes)(*operands)
        return result


def recomputed_tangent(
    function: Callable[..., jax.Array],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    forward: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """The tangent of a function's result.

    Args:
      function: with a hash, of operations that have gradients; it has one result.
      primals: its arguments.
      tangents: of these, at least one; None where there is none.
      forward: the same of operations that have forward derivatives, if those of ``function`` do
        not.
    """
    given = tuple(one is not None for one in tangents)
    operands = matched(*primals, *(one for one in tangents if one is not None))
    jaxpr = _jitted(forward or function, given).trace(*operands).jaxpr
    params = {"function": function, "forward": forward, "given": given, "jaxpr": jaxpr}
    result: jax.Array = tangent_p.bind(*operands, **params)
    return result


@functools.lru_cache(maxsize=256)
def _jitted(function: Callable[..., jax.Array], given: tuple[bool, ...]) -> Any:
    def tangent(*operands: Any) -> Any:
        primals, tangents = operands[: len(given)], operands[len(given) :]
        varying, varied = _of_varied(function, primals, given)
        return jax.jvp(varying, varied, list(tangents))[1]

    return jax.jit(tangent)


def _of_varied(
    function: Callable[..., jax.Array], primals: Sequence[Any], given: Sequence[bool]
) -> tuple[Callable[..., jax.Array], list[Any]]:
    """A function of those arguments that are given, and these."""

    def varying(*varied: Any) -> jax.Array:
        remaining = iter(varied)
        return function(
            *(next(remaining) if there else one for one, there in zip(primals, given, strict=True))
        )

    return varying, [one for one, there in zip(primals, given, strict=True) if there]


def _impl(*operands: Any, jaxpr: Any, **params: Any) -> Any:
    del params
    return jaxpr_as_fun(jaxpr)(*operands)[0]


def _abstract_eval(*avals: Any, jaxpr: Any, **params: Any) -> Any:
    del params
    return type_of_result(jaxpr, avals)


def type_of_result(jaxpr: Any, avals: Sequence[Any]) -> Any:
    """The type of the result of a traced function of operands of these types."""
    if list(jaxpr.in_avals) != list(avals):  # Of another context, such as ``jax.shard_map``.
        jaxpr = jax.make_jaxpr(jaxpr_as_fun(jaxpr))(*avals)
    return jaxpr.out_avals[0]


tangent_p.def_impl(_impl)
tangent_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(tangent_p, mlir.lower_fun(_impl, multiple_results=False))


@in_32_bits
def _batch(
    operands: Sequence[Any],
    places: Sequence[int | None],
    *,
    function: Any,
    forward: Any,
    given: tuple[bool, ...],
    jaxpr: Any,
) -> tuple[jax.Array, int]:
    of_primals, of_tangents = places[: len(given)], iter(places[len(given) :])
    pairs = [
        (one, next(of_tangents)) for one, there in zip(of_primals, given, strict=True) if there
    ]
    if any(one is None and other is not None for one, other in pairs):
        return jax.vmap(jaxpr_as_fun(jaxpr), places)(*operands)[0], 0
    tangents: list[Any] = []
    remaining = iter(operands[len(given) :])
    for primal, place, there in zip(operands, of_primals, given, strict=False):
        if there:
            tangents.append(_along(next(remaining), pairs[len(tangents)][1], place, primal))
        else:
            tangents.append(None)
    mapped, mapped_forward = (
        None if one is None else _Mapped(one, tuple(of_primals)) for one in (function, forward)
    )
    assert mapped is not None
    return recomputed_tangent(mapped, operands[: len(given)], tangents, mapped_forward), 0


def _along(tangent: Any, place: int | None, wanted: int | None, primal: Any) -> Any:
    """A tangent with the dimension of its argument."""
    if wanted is None:
        return tangent
    if place is None:
        return jnp.broadcast_to(jnp.expand_dims(tangent, wanted), primal.shape)
    return jnp.moveaxis(tangent, place, wanted)


batching.primitive_batchers[tangent_p] = _batch


@in_32_bits
def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, **params: Any
) -> tuple[Any, Any]:
    del params
    given = [not isinstance(one, ad.Zero) for one in tangents]
    varying, varied = _of_varied(lambda *given: jaxpr_as_fun(jaxpr)(*given)[0], primals, given)
    changes = [one for one, there in zip(tangents, given, strict=True) if there]
    out, change = jax.jvp(varying, varied, changes)
    return out, change


ad.primitive_jvps[tangent_p] = _jvp


@in_32_bits
def _transpose(
    cotangent: Any, *operands: Any, function: Any, given: tuple[bool, ...], **params: Any
) -> list[Any]:
    del params
    if isinstance(cotangent, ad.Zero):
        return [None] * len(operands)
    varying, varied = _of_varied(function, operands[: len(given)], given)
    return [*[None] * len(given), *jax.vjp(varying, *varied)[1](cotangent)]


ad.primitive_transposes[tangent_p] = _transpose
