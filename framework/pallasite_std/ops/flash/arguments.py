"""The arguments of ``attention``, checked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    accepted_dtypes,
    as_array,
    check_config,
    flag,
    positive,
    whole_numbers,
)
from pallasite_std.ops.padding import padded

MASK_STEP = 32
"""Blocks of a block mask are multiples of this along queries and keys."""

type Window = tuple[int | None, int | None]
"""Keys before and after its own position that a query sees; None for all."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What does not depend on the arrays.

    Attributes:
      causal: whether later keys are hidden.
      scale: factor of the scores.
      soft_cap: bound of the scores, or None.
      config: how to cut the work up, or None.
      window: keys before and after a query's own position that it sees; ``causal`` is part of it.
      dropout: the fraction of the weights that are dropped.
      mask_block: queries and keys of a block of the block mask.
    """

    causal: bool
    scale: float
    soft_cap: float | None
    config: Any
    window: Window = (None, None)
    dropout: float = 0.0
    mask_block: tuple[int, int] = (128, 128)


class Extras(NamedTuple):
    """Arrays beside queries, keys and values, each None if it is not given.

    Attributes:
      q_lengths, kv_lengths: (batch,) of int32.
      q_segments, kv_segments: (batch, sequence) of int32.
      bias: (batch or 1, q_heads or 1, q_seq, kv_seq).
      slopes: (batch or 1, q_heads) of float32.
      block_mask: (batch or 1, q_heads or 1, blocks of queries, blocks of keys) of bool.
      seed: (2,) of uint32.
    """

    q_lengths: Any = None
    kv_lengths: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    bias: Any = None
    slopes: Any = None
    block_mask: Any = None
    seed: Any = None


def in_whole_tiles(
    arrays: Mapping[str, jax.Array], rows: int, columns: int
) -> dict[str, jax.Array]:
    """Arrays of :class:`Extras`, by name, with queries filled up to a multiple of ``rows``, and
    keys to one of ``columns``."""
    found = dict(arrays)
    for name, axes in (
        ("q_segments", {1: rows}),
        ("kv_segments", {1: columns}),
        ("bias", {2: rows, 3: columns}),
    ):
        for axis, size in axes.items():
            if name in found:
                found[name] = padded(found[name], axis, size)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The keyword arguments of ``attention`` as they are given; see there."""

    causal: Any = False
    scale: Any = None
    soft_cap: Any = None
    window: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    block_mask: Any = None
    mask_block: Any = (128, 128)
    dropout_rate: Any = 0.0
    dropout_seed: Any = None
    config: Any = None


def attention_options(options: dict[str, Any]) -> AttentionOptions:
    """The keyword arguments of ``attention``.

    Raises:
      TypeError: a name that it does not have, as Python says of any function.
    """
    known = [one.name for one in dataclasses.fields(AttentionOptions)]
    wrong = next((name for name in options if name not in known), None)
    if wrong is not None:
        raise TypeError(f"attention() got an unexpected keyword argument {wrong!r}")
    return AttentionOptions(**options)


def attention_call(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    *,
    config_type: type,
    dtypes: tuple[Any, ...],
) -> tuple[AttentionCall, Extras]:
    """What the arguments of ``attention`` ask for, and the arrays among them.

    Args:
      config_type: of configurations.
      dtypes: that the implementation takes.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    _check_arrays(q, k, v, tuple(np.dtype(one) for one in dtypes))
    head_dim = q.shape[3]
    scale = max(1, head_dim) ** -0.5 if options.scale is None else options.scale
    check_config(options.config, config_type)
    causal = flag(options.causal, "causal")
    rate = dropout_fraction(options.dropout_rate, options.dropout_seed)
    call = AttentionCall(
        causal=causal,
        scale=positive(scale, "scale"),
        soft_cap=None if options.soft_cap is None else positive(options.soft_cap, "soft_cap"),
        config=options.config,
        window=_window(options.window, causal, q.shape[1] + k.shape[1]),
        dropout=rate,
        mask_block=_mask_block(options.mask_block),
    )
    q_segments, kv_segments = _segments(q, k, options)
    batch = (q.shape[0],)
    extras = Extras(
        q_lengths=_whole_numbers(options.q_lengths, "q_lengths", batch),
        kv_lengths=_whole_numbers(options.kv_lengths, "kv_lengths", batch),
        q_segments=q_segments,
        kv_segments=kv_segments,
        bias=_bias(q, k, options.bias),
        slopes=_slopes(q, options.alibi_slopes),
        block_mask=_block_mask(q, k, options.block_mask, call.mask_block),
        seed=dropout_words(options.dropout_seed) if rate else None,
    )
    return call, extras


def _whole_numbers(array: Any, what: str, shape: tuple[int, ...]) -> Any:
    return None if array is None else whole_numbers(array, what, shape)


def check_residuals(q: Any, v: Any, out: Any, lse: Any, d_out: Any) -> None:
    """Raises InvalidTypeError unless what ``attention_backward`` takes besides operands fits them.

    Args:
      q: (batch, q_seq, q_heads, head_dim).
      v: (batch, kv_seq, kv_heads, v_dim).
      out, d_out: should be like q, with v_dim in place of head_dim.
      lse: should be float32 (batch, q_heads, q_seq).
    """
    batch, q_seq, q_heads, _ = q.shape
    shape, like_out = (batch, q_heads, q_seq), (*q.shape[:3], v.shape[3])
    for what, array, wanted, dtype in (
        ("out", out, like_out, q.dtype),
        ("d_out", d_out, like_out, q.dtype),
        ("lse", lse, shape, np.dtype(np.float32)),
    ):
        found = getattr(array, "shape", None), getattr(array, "dtype", None)
        if found != (wanted, dtype):
            raise InvalidTypeError(
                f"{what} does not fit q",
                got=type(array).__name__ if None in found else f"{found[1]}{list(array.shape)}",
                expected=f"{dtype}{list(wanted)}",
            )


def _check_arrays(q: Any, k: Any, v: Any, dtypes: tuple[np.dtype[Any], ...]) -> None:
    for what, array in (("q", q), ("k", k), ("v", v)):
        if len(getattr(array, "shape", ())) != 4:
            raise InvalidTypeError(
                f"{what} does not have four dimensions",
                got=getattr(array, "shape", type(array).__name__),
                expected="(batch, sequence, heads, head_dim)",
            )
        if array.dtype not in dtypes:
            raise InvalidTypeError(
                f"attention of this dtype of {what}",
                got=array.dtype,
                expected=accepted_dtypes(dtypes, "attention"),
                hint="convert q, k and v to one of these",
            )
    if k.shape[:3] != v.shape[:3]:
        raise InvalidValueError(
            "k and v do not agree in batch, sequence and heads",
            got=f"k {k.shape}, v {v.shape}",
            expected="the same shape but for the size of a head",
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidValueError(
            "q and k do not agree in batch and head_dim", got=f"q {q.shape}, k {k.shape}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidTypeError(
            "q, k and v do not have one dtype", got=f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape[2] % max(1, k.shape[2]) or (q.shape[2] and not k.shape[2]):
        raise InvalidValueError(
            "the heads of the queries cannot be divided among those of the keys",
            got=f"{q.shape[2]} and {k.shape[2]} heads",
            expected="a multiple",
        )


def _window(window: Any, causal: bool, most: int) -> Window:
    """Keys before and after a query's own position that it sees; None for all, as many as
    ``most``."""
    left, right = (None if one is None or one >= most else one for one in _pair(window))
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _pair(window: Any) -> Window:
    sides = window if isinstance(window, tuple | list) else (window, window)
    fits = len(sides) == 2 and all(
        one is None
        or (isinstance(one, int | np.integer) and not isinstance(one, bool) and one >= 0)
        for one in sides
    )
    if not fits:
        raise InvalidValueError(
            "window does not say how many keys a query sees",
            got=repr(window),
            expected="a number, or (keys before, keys after) its own position, None for all",
        )
    left, right = sides
    return None if left is None else int(left), None if right is None else int(right)


def _segments(q: Any, k: Any, options: AttentionOptions) -> tuple[Any, Any]:
    given = (options.q_segments, options.kv_segments)
    if (given[0] is None) != (given[1] is None):
        missing = "q_segments" if given[0] is None else "kv_segments"
        raise InvalidValueError(
            f"{missing} is not given", expected="q_segments and kv_segments, or none of them"
        )
    batch, q_seq, kv_seq = q.shape[0], q.shape[1], k.shape[1]
    return (
        _whole_numbers(given[0], "q_segments", (batch, q_seq)),
        _whole_numbers(given[1], "kv_segments", (batch, kv_seq)),
    )


def _bias(q: Any, k: Any, bias: Any) -> Any:
    """Broadcast along queries and keys, but not along batch and heads."""
    if bias is None:
        return None
    bias = as_array(bias, "bias")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    _check_broadcast(bias, "bias", full)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise InvalidTypeError(
            "bias does not have a floating-point dtype",
            got=bias.dtype,
            hint="block_mask or segments hide keys",
        )
    return _spread(bias, bias.shape, (*bias.shape[:2], *full[2:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _spread(bias: jax.Array, own: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """A bias of this shape, repeated; its gradient is summed up in float32, not in its dtype."""
    del own
    return jnp.broadcast_to(bias, shape)


def _spread_forward(
    bias: jax.Array, own: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[jax.Array, None]:
    return _spread(bias, own, shape), None


def _summed_up(
    own: tuple[int, ...], shape: tuple[int, ...], _: None, slope: jax.Array
) -> tuple[jax.Array]:
    axes = [axis for axis, (one, all_) in enumerate(zip(own, shape, strict=True)) if one != all_]
    return (jnp.sum(slope.astype(jnp.float32), axes, keepdims=True).astype(slope.dtype),)


_spread.defvjp(_spread_forward, _summed_up)


def _slopes(q: Any, slopes: Any) -> Any:
    if slopes is None:
        return None
    slopes = as_array(slopes, "alibi_slopes")
    batch, heads = q.shape[0], q.shape[2]
    if slopes.shape not in ((heads,), (batch, heads)) or slopes.dtype.kind not in "fiu":
        raise InvalidTypeError(
            "alibi_slopes does not fit the heads",
            got=f"{slopes.dtype}{list(slopes.shape)}",
            expected=f"numbers of shape ({heads},) or ({batch}, {heads})",
        )
    return slopes.astype(jnp.float32).reshape(1 if slopes.ndim == 1 else batch, heads)


def _mask_block(block: Any) -> tuple[int, int]:
    fits = (
        isinstance(block, tuple | list)
        and len(block) == 2
        and all(isinstance(one, int) and one > 0 and one % MASK_STEP == 0 for one in block)
    )
    if not fits:
        raise InvalidValueError(
            "mask_block does not fit the tiles of attention",
            got=repr(block),
            expected=f"(queries, keys) of a block, multiples of {MASK_STEP}",
        )
    return int(block[0]), int(block[1])


def _block_mask(q: Any, k: Any, mask: Any, block: tuple[int, int]) -> Any:
    if mask is None:
        return None
    mask = as_array(mask, "block_mask")
    blocks = (-(-q.shape[1] // block[0]), -(-k.shape[1] // block[1]))
    if mask.dtype != jnp.bool_:
        raise InvalidTypeError(
            "block_mask is not boolean", got=mask.dtype, expected="True for blocks that are seen"
        )
    _check_broadcast(mask, "block_mask", (q.shape[0], q.shape[2], *blocks))
    return jnp.broadcast_to(mask, (*mask.shape[:2], *blocks))


def _check_broadcast(array: Any, what: str, full: tuple[int, ...]) -> None:
    pairs = zip(array.shape, full, strict=False)
    if len(array.shape) != 4 or any(extent not in (1, wanted) for extent, wanted in pairs):
        raise InvalidValueError(
            f"{what} does not fit q and k",
            got=f"shape {tuple(array.shape)}",
            expected=f"{full}, each of them or 1",
        )


def dropout_fraction(rate: Any, seed: Any) -> float:
    """The rate, as a number of Python's.

    Raises:
      InvalidValueError: it is none, or has no seed.
    """
    number = isinstance(rate, int | float | np.number) and not isinstance(rate, jax.core.Tracer)
    if not number or not 0 <= rate < 1:
        raise InvalidValueError(
            "dropout_rate is not a fraction",
            got=repr(rate),
            expected="a Python number from 0 up to, but not including, 1",
        )
    if rate and seed is None:
        raise InvalidValueError(
            "dropout needs a seed",
            got="dropout_seed=None",
            expected="an integer or a key of jax.random, another one for each call",
        )
    return float(rate)


def dropout_words(seed: Any) -> jax.Array:
    """Two words of a seed.

    Raises:
      InvalidTypeError: it is none.
    """
    if isinstance(seed, int):
        seed = np.asarray(seed & 0xFFFFFFFF, np.uint32)
    seed = jnp.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ():
        return jax.random.bits(seed, (2,), jnp.uint32)
    if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        return jnp.stack([seed.astype(jnp.uint32), jnp.uint32(0)])
    raise InvalidTypeError(
        "dropout_seed is neither an integer nor a key",
        got=f"{seed.dtype}{list(seed.shape)}",
        expected="one integer, or one key of jax.random.key",
    )
