"""``attention``: the function that programs call."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

import pallasite
from pallasite.plugin import InvalidValueError, select_target
from pallasite_std.ops.arguments import in_32_bits, random_array
from pallasite_std.ops.flash import forward
from pallasite_std.ops.flash.arguments import (
    AttentionCall,
    AttentionOptions,
    Extras,
    attention_call,
    attention_options,
    check_residuals,
)
from pallasite_std.ops.flash.config import (
    LARGEST_HEAD,
    AttentionConfig,
    attention_configs,
    default_config,
)
from pallasite_std.ops.flash.gradient import differentiable_attention
from pallasite_std.ops.flash.problem import Problem
from pallasite_std.ops.flash.steps import with_operands
from pallasite_std.ops.padding import padded

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

HEAD_STEP = 16
"""Heads are filled up with zeros to multiples of this."""

_VERSION = 3
"""Of the kernel, for what was measured."""


@in_32_bits
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    block_mask: jax.Array | None = None,
    mask_block: tuple[int, int] = (128, 128),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    config: AttentionConfig | None = None,
) -> jax.Array:
    """``softmax(scale * q @ k.T + bias) @ v`` for each batch and head, in one kernel.

    It can be differentiated with respect to q, k, v and bias.

    Args:
      q: (batch, q_seq, q_heads, head_dim), bfloat16, float16 or float32 (multiplied as tf32); on
        Hopper also float8_e4m3fn, whose result is bfloat16. head_dim up to 256.
      k: (batch, kv_seq, kv_heads, head_dim), of the same dtype. kv_heads divides q_heads; query
        head h uses head ``h // (q_heads // kv_heads)``.
      v: (batch, kv_seq, kv_heads, v_dim), of the same dtype; v_dim up to 256.
      causal: query i sees keys up to ``i + (keys - queries)``: the last query sees all keys, as in
        FlashAttention. ``jax.nn.dot_product_attention`` lets the first query see the first key
        instead, which differs if there are not as many queries as keys.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale and
        before bias is added.
      window: keys that a query sees before and after its own position, which is
        ``i + (keys - queries)``; a number for both sides, None for all. With ``causal``, those
        before count.
      q_lengths, kv_lengths: (batch,), integers: how many queries and keys of each batch exist; more
        than there are means all. They also take the place of q_seq and kv_seq in ``causal`` and
        ``window``. What the arrays hold beyond must be finite.
      q_segments, kv_segments: (batch, q_seq) and (batch, kv_seq), integers: queries see keys of the
        same segment only. If segments are in ascending order, as in packed sequences, tiles without
        common ones are not computed.
      bias: (batch, q_heads, q_seq, kv_seq), each of them or 1, floating point: is added to the
        scores, which are numbers of float32. Minus infinity hides keys. Numbers such as -1e9 or the
        least finite one are added like others, as ``jax.nn.softmax`` does: a query with such a bias
        for all of its keys has weights, about the same for all where they round the scores away.
      alibi_slopes: (q_heads,) or (batch, q_heads): slope times the distance between a query's
        position and the key is subtracted from the scores (O. Press et al., arXiv 2108.12409). It
        has no derivative.
      block_mask: (batch, q_heads, blocks of queries, blocks of keys), batch and heads may be 1,
        boolean: blocks of scores that are computed; the others are hidden.
      mask_block: queries and keys of a block of it; multiples of 32.
      dropout_rate: the fraction of the weights that are dropped after the softmax, rounded to a
        multiple of ``2**-16``; the others are divided by one minus it.
      dropout_seed: what they are drawn with: an integer, or a key of ``jax.random``. The same seed
        drops the same weights, whatever the target and the configuration: those of
        :func:`attention_dropout_mask`.
      config: how to cut the work up, of the type that the implementation for the target takes. By
        default it is chosen from the shapes, or by measuring if the option ``autotune`` says so
        (see :func:`pallasite.choose`).

    Returns:
      (batch, q_seq, q_heads, v_dim), of the dtype of q; zeros for queries that do not exist or see
      no key, where ``jax.nn.dot_product_attention`` has NaN: all are hidden by lengths, a window,
      segments, a block mask or a bias of minus infinity.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: T. Dao, "FlashAttention-2", arXiv 2307.08691.
    """
    options = AttentionOptions(
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_segments=q_segments,
        kv_segments=kv_segments,
        bias=bias,
        alibi_slopes=alibi_slopes,
        block_mask=block_mask,
        mask_block=mask_block,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        config=config,
    )
    call, extras = _checked(q, k, v, options)
    result: jax.Array = _attention(q, k, v, extras, call)
    return result


@in_32_bits
def attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """:func:`attention` with log-sum-exp, for programs that combine results for parts of the keys.

    Args: as of :func:`attention`.

    Returns:
      The result, and the natural logarithms of the sums of exponentials, float32
      (batch, q_heads, q_seq); minus infinity for queries that do not exist or see no key. Neither
      has derivatives.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    call, extras = _checked(q, k, v, attention_options(options))
    out, lse = _with_logarithms(q, k, v, extras, call)
    return out, lse


@in_32_bits
def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of :func:`attention`, for programs that combine results for parts of the keys.

    With ``out`` and ``lse`` of all keys, the gradients of the queries for parts of the keys add up
    to the whole, and those of the keys and values of each part are complete.

    Args:
      q, k, v, options: as of :func:`attention`.
      out: its result.
      lse: (batch, q_heads, q_seq), float32: its log-sum-exp, as of :func:`attention_forward`. From
        ``2**24`` on, of either sign, it does not tell weights any more, and such queries have no
        gradients here; those of :func:`attention` are of both parts of it where there is a bias.
      d_out: the gradient with respect to ``out``, an array like it.

    Returns:
      The gradients with respect to q, k and v, arrays like these. They have no derivatives.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    call, extras = _checked(q, k, v, attention_options(options))
    check_residuals(q, v, out, lse, d_out)
    d_q, d_k, d_v = _gradients(q, k, v, extras, out, lse, d_out, call)
    return d_q, d_k, d_v


def _checked(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[AttentionCall, Extras]:
    call, extras = attention_call(q, k, v, options, config_type=AttentionConfig, dtypes=DTYPES)
    for what, size in (("head_dim", q.shape[3]), ("v_dim", v.shape[3])):
        if size > LARGEST_HEAD:
            raise InvalidValueError(
                "heads of this size are not supported",
                got=f"{what} {size}",
                expected=f"at most {LARGEST_HEAD}",
            )
    if extras.block_mask is not None and call.config is not None:
        config, block = call.config, call.mask_block
        if block[0] % config.block_q or block[1] % config.block_kv:
            raise InvalidValueError(
                "tiles do not fit the blocks of the block mask",
                got=f"{config.block_q} queries and {config.block_kv} keys, blocks of {block}",
                expected="tiles that divide mask_block",
            )
    return call, extras


def _show_options(function: Any) -> None:
    """Lets the signature of a function name those of ``attention`` instead of ``options``."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.name != "options"]
    named = inspect.signature(attention).parameters.values()
    options = [one for one in named if one.kind == one.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*own, *options])


_show_options(attention_forward)
_show_options(attention_backward)


# Derivatives --------------------------------------------------------------------------------------


def portable_gradients(
    call: AttentionCall, saved: Any, d_out: Any, with_bias: bool
) -> tuple[Any, Any, Any, Any]:
    """The gradients of q, k, v and, if it is wanted, the bias, by the portable kernels; also for
    implementations that have no such gradient. ``saved`` are q, k, v, extras, out and lse."""
    from pallasite_std.ops.flash.backward import gradients

    q, k, v, extras, out, lse = saved
    head_dim, v_dim = q.shape[3], v.shape[3]
    arrays = (q, k, v, out, d_out.astype(q.dtype))
    q, k, v, out, d_out = (padded(array, 3, HEAD_STEP) for array in arrays)
    problem = Problem.of(q, k, v, call)
    d_q, d_k, d_v, d_bias = gradients(problem, q, k, v, out, d_out, lse, extras, with_bias)
    return d_q[..., :head_dim], d_k[..., :head_dim], d_v[..., :v_dim], d_bias


# The kernel ---------------------------------------------------------------------------------------


def _forward(
    q: Any, k: Any, v: Any, extras: Extras, call: AttentionCall, residuals: bool
) -> tuple[Any, ...]:
    v_dim = v.shape[3]
    q, k, v = (padded(array, 3, HEAD_STEP) for array in (q, k, v))
    problem = Problem.of(q, k, v, call)
    config = call.config or _choose(problem, residuals, q, k, v, extras)
    out, *lse = _run(problem, residuals, config, q, k, v, extras)
    return (out[..., :v_dim], *lse)


_attention, _with_logarithms, _gradients = differentiable_attention(_forward, portable_gradients)


def _choose(
    problem: Problem, residuals: bool, q: Any, k: Any, v: Any, extras: Extras
) -> AttentionConfig:
    head_dim, size = max(problem.head_dim, problem.v_dim), problem.dtype.itemsize
    shared_memory = select_target().max_shared_memory
    block = problem.mask_block if extras.block_mask is not None else None
    given = [name for name, one in extras._asdict().items() if one is not None]
    operands = [q, k, v, *(one for one in extras if one is not None)]

    def make_inputs(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        arrays = [random_array(*pair) for pair in zip(keys, operands[:3], strict=True)]
        full = {"q_lengths": problem.q_seq, "kv_lengths": problem.kv_seq, "block_mask": True}
        others = zip(given, operands[3:], strict=True)
        return arrays + [jnp.full(one.shape, full.get(name, 0), one.dtype) for name, one in others]

    def run(config: AttentionConfig, *arrays: Any) -> tuple[Any, ...]:
        q, k, v, *rest = arrays
        others = Extras(**dict(zip(given, rest, strict=True)))
        return _run(problem, residuals, config, q, k, v, others)

    chosen: AttentionConfig = pallasite.choose(
        "standard.attention",
        _VERSION,
        operands,
        lambda: attention_configs(problem.q_seq, head_dim, size, shared_memory, block),
        default_config(problem.q_seq, head_dim, size, shared_memory, block),
        run,
        key=(
            problem.left,
            problem.right,
            problem.soft_cap is not None,
            bool(problem.dropout),
            *given,
            block,
            residuals,
        ),
        make_inputs=make_inputs,
    )
    return chosen


def _run(
    problem: Problem,
    residuals: bool,
    config: AttentionConfig,
    q: Any,
    k: Any,
    v: Any,
    extras: Extras,
) -> tuple[Any, ...]:
    problem, operands = with_operands(problem, extras, config.block_q, config.block_kv)
    out, *lse = _kernel(problem, config, residuals)(q, k, v, *operands)
    return (out, *(one[..., : problem.q_seq] for one in lse))


_kernel = functools.lru_cache(maxsize=256)(forward.build)
