"""``ring_attention``: attention of a sequence whose parts lie on several devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import ops
from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_multigpu.ops import choice, ring_steps, tuning
from pallasite_multigpu.ops.api import all_gather, reduce_scatter
from pallasite_multigpu.ops.devices import devices_along, varying_along
from pallasite_multigpu.ops.ring_schedule import (
    Placement,
    Step,
    chunks,
    rotation,
    step_of,
)
from pallasite_multigpu.ops.shift import shift
from pallasite_std.api import in_32_bits

type RingMethod = Literal["ring", "gather"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What does not depend on the arrays: the arguments of :func:`ring_attention`."""

    axis: Hashable
    causal: bool
    scale: float
    soft_cap: float | None
    placement: Placement

    @property
    def count(self) -> int:
        """Devices of the ring."""
        return devices_along(self.axis)

    @property
    def options(self) -> dict[str, Any]:
        """What attention of parts takes."""
        return {"scale": self.scale, "soft_cap": self.soft_cap}


@in_32_bits
def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: Hashable,
    causal: bool = False,
    placement: Placement = "contiguous",
    scale: float | None = None,
    soft_cap: float | None = None,
    method: RingMethod | None = None,
) -> jax.Array:
    """Attention of all devices' sequence, of which each has a part: ``softmax(q @ k.T) @ v``.

    Keys and values travel around the ring of devices while each computes with those that it has;
    results for parts of the keys are merged by their log-sum-exp, in float32.

    Args:
      q: (batch, tokens, q_heads, head_dim), this device's part; the dtypes and heads that
        ``pallasite.ops.attention`` takes on the target.
      k, v: (batch, tokens, kv_heads, head_dim), of the same dtype. kv_heads divides q_heads; query
        head h uses head ``h // (q_heads // kv_heads)``.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      causal: whether a query sees no key behind its own place in the sequence.
      placement: which part a device has: ``"contiguous"`` for one piece, in the order of devices;
        ``"zigzag"`` for what :func:`zigzag_order` gives, with which a causal mask leaves all
        devices the same work.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      method: ``"ring"``; or ``"gather"``: all keys and values are gathered first. By default
        chosen by their size.

    It can be differentiated with respect to q, k and v; gradients travel around the ring, too.

    Returns:
      An array like q.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.

    Source: H. Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context",
    arXiv 2310.01889.
    """
    _check(q, k, v, placement, method)
    if scale is None:
        scale = max(1, q.shape[3]) ** -0.5
    call = _Call(axis_name, bool(causal), scale, soft_cap, placement)
    q, k, v = varying_along(axis_name, q, k, v)
    if call.count == 1:
        return jnp.asarray(ops.attention(q, k, v, causal=call.causal, **call.options))
    if method is not None:
        return _by(method, q, k, v, call)
    chosen: RingMethod = tuning.chosen(
        "ring_attention",
        [q, k, v],
        axis_name,
        _methods,
        choice.method_of_ring_attention(2 * k.size * k.dtype.itemsize * call.count),
        lambda one, q, k, v: _by(one, q, k, v, call),
        *(call.causal, scale, soft_cap, placement),
    )
    return _by(chosen, q, k, v, call)


def _methods() -> list[RingMethod]:
    return ["ring", "gather"]


def _by(method: RingMethod, q: jax.Array, k: jax.Array, v: jax.Array, call: _Call) -> jax.Array:
    return _gathered(q, k, v, call) if method == "gather" else _ring(q, k, v, call)


def _check(q: Any, k: Any, v: Any, placement: str, method: str | None) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(getattr(array, "shape", ())) != 4:
            raise InvalidTypeError(
                f"{name} does not have four dimensions",
                got=getattr(array, "shape", type(array).__name__),
                expected="(batch, tokens, heads, head_dim)",
            )
    if q.shape[1] != k.shape[1] or k.shape != v.shape:
        raise InvalidValueError(
            "ring_attention: a device has other tokens in q than in k and v",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            expected="as many tokens in each, those of the device's part of the sequence",
        )
    if placement not in ("contiguous", "zigzag"):
        raise InvalidValueError(
            "ring_attention: the placement is unknown",
            got=repr(placement),
            expected='"contiguous" or "zigzag"',
        )
    if method not in (None, "ring", "gather"):
        raise InvalidValueError(
            "ring_attention: the method is unknown", got=repr(method), expected='"ring" or "gather"'
        )


# All keys at once ---------------------------------------------------------------------------------


def _gathered(q: jax.Array, k: jax.Array, v: jax.Array, call: _Call) -> jax.Array:
    keys, values = _all_keys(k, v, call)
    results = [
        jnp.asarray(ops.attention(q[:, rows], keys, values, **options))
        for rows, options in _parts(q, call)
    ]
    return jnp.concatenate(results, axis=1)


def _all_keys(k: jax.Array, v: jax.Array, call: _Call) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all devices, in the order of the sequence if there is a causal mask."""
    whole = all_gather(jnp.concatenate([k, v], axis=3), axis_name=call.axis, gather_dimension=1)
    if call.causal and call.placement == "zigzag":
        first, _ = chunks(k.shape[1])
        parts = whole.reshape(k.shape[0], call.count, k.shape[1], *whole.shape[2:])
        halves = (parts[:, :, :first], parts[:, ::-1, first:])
        whole = jnp.concatenate(
            [one.reshape(k.shape[0], -1, *whole.shape[2:]) for one in halves], axis=1
        )
    return whole[..., : k.shape[3]], whole[..., k.shape[3] :]


def _by_device(x: jax.Array, tokens: int, call: _Call) -> jax.Array:
    """What is in the order of :func:`_all_keys`, device by device."""
    if not (call.causal and call.placement == "zigzag"):
        return x
    first, second = chunks(tokens)
    halves = x[:, : call.count * first], x[:, call.count * first :]
    parts = [
        one.reshape(x.shape[0], call.count, length, *x.shape[2:])
        for one, length in zip(halves, (first, second), strict=True)
    ]
    return jnp.concatenate([parts[0], parts[1][:, ::-1]], axis=2).reshape(x.shape)


def _parts(q: jax.Array, call: _Call) -> list[tuple[slice, dict[str, Any]]]:
    """Rows of the queries, and how they attend to all keys: the last one sees so many of them."""
    tokens, count, own = q.shape[1], call.count, lax.axis_index(call.axis)
    if not call.causal:
        return [(slice(None), call.options)]

    def part(rows: slice, keys: Any) -> tuple[slice, dict[str, Any]]:
        lengths = jnp.full((q.shape[0],), keys, jnp.int32)
        return rows, {"causal": True, "kv_lengths": lengths, **call.options}

    if call.placement == "contiguous":
        return [part(slice(None), (own + 1) * tokens)]
    first, second = chunks(tokens)
    found = [part(slice(first), (own + 1) * first)]
    if second:
        found.append(part(slice(first, None), count * first + (count - own) * second))
    return found


def _gathered_bwd(call: _Call, saved: Any, d_out: jax.Array) -> Any:
    """Gradients for all keys, of which each device gets its own. Less travels than in a ring, whose
    sums go around in float32, and nothing is added up in each step."""
    q, k, v, out, lse = saved
    keys, values = _all_keys(k, v, call)
    of_queries, sums = [], None
    for rows, options in _parts(q, call):
        of_q, *found = ops.attention_backward(
            *(q[:, rows], keys, values, out[:, rows], lse[:, :, rows], d_out[:, rows]), **options
        )
        of_queries.append(of_q)
        sums = found if sums is None else [_added(*pair) for pair in zip(sums, found, strict=True)]
    mine = (
        reduce_scatter(_by_device(one, k.shape[1], call), axis_name=call.axis, scatter_dimension=1)
        for one in sums or ()
    )
    return jnp.concatenate(of_queries, axis=1), *mine


def _added(one: jax.Array, other: jax.Array) -> jax.Array:
    return (one.astype(jnp.float32) + other.astype(jnp.float32)).astype(one.dtype)


# The ring -----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ring(q: jax.Array, k: jax.Array, v: jax.Array, call: _Call) -> jax.Array:
    return _forward(q, k, v, call)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, call: _Call) -> tuple[jax.Array, jax.Array]:
    """The result, and log-sum-exp (batch, q_heads, tokens)."""
    tokens, count, own = q.shape[1], call.count, lax.axis_index(call.axis)
    turned = rotation(tokens, call.causal, call.placement)
    sums: Any = None
    if turned and tokens % 2 == 0:
        return _forward_of_halves(q, k, v, call)
    for number in range(count):
        step = step_of(number, own, tokens, call.causal, call.placement)
        if number == 1 and turned:
            q = jnp.roll(q, -turned, axis=1)
        out, lse, following = ring_steps.attend(
            q, k, v, step, call.axis, count, call.options, sends=number + 1 < count
        )
        if number and turned:
            out, lse = _rolled((out, lse), turned)
        sums = (out.astype(jnp.float32), lse) if sums is None else _merged(sums, out, lse)
        k, v = following
    out, lse = sums
    return out.astype(q.dtype), lse


def _forward_of_halves(
    q: jax.Array, k: jax.Array, v: jax.Array, call: _Call
) -> tuple[jax.Array, jax.Array]:
    """A zigzag with a causal mask, where both chunks of a device have as many tokens.

    With keys of an earlier device, both halves of the queries see the first half of them; with keys
    of a later one, the second half of the queries sees all. Either is twice the work of half of the
    queries with half of the keys, the second half with the first and another pair, in one kernel
    that takes halves for sequences of their own. No tile of them is empty.
    """
    count, own = call.count, lax.axis_index(call.axis)
    batch, tokens = q.shape[:2]
    options = call.options
    first_step = step_of(0, own, tokens, call.causal, call.placement)
    out, lse, (k, v) = ring_steps.attend(
        q, k, v, first_step, call.axis, count, options, sends=count > 1
    )

    def halves(x: jax.Array) -> jax.Array:
        """(2 batch, tokens / 2, ...): halves of a sequence, one behind the other."""
        return x.reshape(2 * batch, tokens // 2, *x.shape[2:])

    outs = out.reshape(batch, 2, tokens // 2, *out.shape[2:]).astype(jnp.float32)
    lses = lse.reshape(batch, -1, 2, tokens // 2)
    sums = [(outs[:, half], lses[:, :, half]) for half in range(2)]
    first_halves = 2 * np.arange(batch, dtype=np.int32)
    common = np.stack([first_halves + 1, first_halves], axis=1)
    for number in range(1, count):
        earlier = own >= number  # The keys are of a device before this one.
        both = first_halves + lax.select(earlier, np.int32(0), np.int32(1))
        pairs = jnp.concatenate([common, jnp.stack([both, both], axis=1)])
        out, lse, (k, v) = ring_steps.attend(
            *(halves(q), halves(k), halves(v), Step(), call.axis, count, options),
            sends=number + 1 < count,
            sent=(k, v),
            pairs=pairs,
        )
        sums[1] = _merged(sums[1], out[:batch], lse[:batch])
        out, lse = out[batch:], lse[batch:]
        none = jnp.full_like(lse, -jnp.inf)
        sums[0] = _merged(sums[0], out, lax.select(earlier, lse, none))
        sums[1] = _merged(sums[1], out, lax.select(earlier, none, lse))
    whole = jnp.concatenate([one.astype(q.dtype) for one, _ in sums], axis=1)
    return whole, jnp.concatenate([one for _, one in sums], axis=2)


def _merged(sums: tuple[Any, Any], other: Any, other_lse: Any) -> tuple[Any, Any]:
    """Results for two parts of the keys as the result for both."""
    out, lse = sums
    total = jnp.logaddexp(lse, other_lse)

    def share(logarithms: Any) -> Any:
        # Minus infinity for queries that see none of the keys.
        shares = jnp.where(jnp.isneginf(logarithms), 0.0, jnp.exp(logarithms - total))
        return shares.transpose(0, 2, 1)[..., None]

    return out * share(lse) + other.astype(jnp.float32) * share(other_lse), total


def _rolled(sums: tuple[Any, Any], by: int) -> tuple[Any, Any]:
    out, lse = sums
    return jnp.roll(out, by, axis=1), jnp.roll(lse, by, axis=2)


def _ring_fwd(q: Any, k: Any, v: Any, call: _Call) -> Any:
    out, lse = _forward(q, k, v, call)
    return out, (q, k, v, out, lse)


def _ring_bwd(call: _Call, saved: Any, d_out: Any) -> Any:
    q, k, v, out, lse = saved
    d_out = d_out.astype(q.dtype)
    if choice.gathers_for_gradients(2 * k.size * k.dtype.itemsize * call.count):
        return _gathered_bwd(call, saved, d_out)
    tokens, count, own = q.shape[1], call.count, lax.axis_index(call.axis)
    turned = rotation(tokens, call.causal, call.placement)
    d_q: Any = None
    own_sums: list[Any] = []  # Gradients of the own keys and values, which stay here,
    sums: list[Any] = []  # and of those that have come, which travel on with them.
    for number in range(count):
        step = step_of(number, own, tokens, call.causal, call.placement)
        if number == 1 and turned:
            q, out, d_out, d_q = (jnp.roll(one, -turned, axis=1) for one in (q, out, d_out, d_q))
            lse = jnp.roll(lse, -turned, axis=2)
        found = ops.attention_backward(
            q, k, v, out, lse, d_out, **ring_steps.arguments(step, q.shape[0]), **call.options
        )
        wide = [one.astype(jnp.float32) for one in found]
        d_q = wide[0] if d_q is None else d_q + wide[0]
        if number == 0:
            own_sums = wide[1:]
        else:
            sums = [one + more for one, more in zip(sums or [0, 0], wide[1:], strict=True)]
        if number + 1 < count:
            k, v, *sums = shift([k, v, *sums], call.axis, count)
        elif number:
            sums = shift(sums, call.axis, count)  # Home.
    sums = [one + more for one, more in zip(own_sums, sums or [0, 0], strict=True)]
    if turned:
        d_q = jnp.roll(d_q, turned, axis=1)
    return tuple(one.astype(q.dtype) for one in (d_q, *sums))


_ring.defvjp(in_32_bits(_ring_fwd), in_32_bits(_ring_bwd))
