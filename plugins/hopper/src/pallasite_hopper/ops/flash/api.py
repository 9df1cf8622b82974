"""``attention``: the function that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite_hopper.ops.decode.config import MOST_TOKENS, takes_heads
from pallasite_hopper.ops.flash import forward
from pallasite_hopper.ops.flash.config import (
    BARRIER_BYTES,
    LARGEST_HEAD,
    MULTIPROCESSORS,
    ROWS,
    SHARED_BYTES,
    AttentionConfig,
    head_tile,
)
from pallasite_hopper.ops.flash.forward_choice import (
    attention_configs,
    default_config,
    parts_of_least_time,
)
from pallasite_hopper.ops.flash.options import portable_option
from pallasite_hopper.ops.flash.terms import Terms, given_arrays, with_arrays
from pallasite_hopper.ops.flash.tiles import Problem, Tiles
from pallasite_std.api import (
    AttentionCall,
    AttentionOptions,
    AttentionProblem,
    DecodeOptions,
    Extras,
    attention_call,
    attention_options,
    check_residuals,
    differentiable_attention,
    in_32_bits,
    padded,
    portable_gradients,
    random_array,
    two_numbers,
)

_VERSION = 2
"""Of the kernel, for what was measured."""


DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)


@in_32_bits
def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """``softmax(scale * q @ k.T) @ v`` for each batch and head, in one kernel.

    It can be differentiated with respect to q, k and v, except those of 8 bits.

    Args:
      q: (batch, q_seq, q_heads, head_dim), bfloat16, float16 or float8_e4m3fn; head_dim up to 256.
        Factors of arrays of 8 bits belong into ``scale``, or to the result.
      k: (batch, kv_seq, kv_heads, head_dim), of the same dtype. kv_heads divides q_heads; query
        head h uses head ``h // (q_heads // kv_heads)``.
      v: (batch, kv_seq, kv_heads, v_dim), of the same dtype; v_dim up to 256.
      options: those of ``pallasite.ops.attention``. These kernels have masks of blocks of multiples
        of 128 only; ``pallasite.ops.attention`` uses its portable kernels for others, and for some
        gradients by a bias, see ``backward.has_bias_gradient``. config is one of
        :func:`attention_configs`, say; derivatives have a configuration of their own.

    Returns:
      (batch, q_seq, q_heads, v_dim), of the dtype of q or, if that has 8 bits, bfloat16; zeros for
      queries that do not exist or see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
      UnsupportedError: an option that these kernels do not have.

    Source: J. Shah et al., "FlashAttention-3", arXiv 2407.08608.
    """
    call, extras = _checked(q, k, v, attention_options(options))
    result: jax.Array = _attention(q, k, v, extras, call)
    return result


@in_32_bits
def attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """:func:`attention` with log-sum-exp, for programs that combine results for parts of the keys.

    Args: as of :func:`attention`.

    Returns:
      The result, an array like q, and the natural logarithms of the sums of exponentials, float32
      (batch, q_heads, q_seq); minus infinity for queries that do not exist or see no key. Neither
      has derivatives.

    Raises:
      PallasiteError: as :func:`attention`.
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

    Args:
      q, k, v, options: as of :func:`attention`.
      out: its result.
      lse: (batch, q_heads, q_seq), float32: its log-sum-exp, as of :func:`attention_forward`.
      d_out: the gradient with respect to ``out``, an array like q.

    Returns:
      The gradients with respect to q, k and v, arrays like these. They have no derivatives.

    Raises:
      PallasiteError: as :func:`attention`.
    """
    call, extras = _checked(q, k, v, attention_options(options))
    check_residuals(q, v, out, lse, d_out)
    d_q, d_k, d_v = _gradients(q, k, v, extras, out, lse, d_out, call)
    return d_q, d_k, d_v


# Derivatives --------------------------------------------------------------------------------------


def _backward(
    options: AttentionCall, residuals: Any, d_out: Any, with_bias: bool
) -> tuple[Any, Any, Any, Any]:
    from pallasite_hopper.ops.flash import single_api
    from pallasite_hopper.ops.flash.backward import attention_backward, has_bias_gradient

    if residuals[0].dtype.itemsize == 1:
        raise UnsupportedError(
            "attention of 8-bit floats has no derivatives",
            hint="attention of bfloat16 has; convert q, k and v before",
        )
    q, k, v, extras, out, lse = residuals
    if extras.bias is not None or extras.slopes is not None:
        lse = two_numbers(lse, 1.0)
    if with_bias and not has_bias_gradient(q, v, extras.bias, options.soft_cap):
        residuals = (*residuals[:-1], _of_queries(q, k, extras, lse))
        return portable_gradients(options, residuals, d_out, with_bias)
    size, v_size = q.shape[3], v.shape[3]
    period = packed_period(q, k, extras)
    batch = q.shape[:2]
    if period is not None:
        if lse.shape[0] == batch[0]:
            lse = jnp.moveaxis(lse, 1, 0).reshape(1, q.shape[2], -1)
        q, k, v, out, d_out = (_joined(one) for one in (q, k, v, out, d_out))
    problem = AttentionProblem.of(q, k, v, options, period)
    config = None if with_bias else single_api.chosen(problem, extras)
    if config is not None:
        found = single_api.gradients(problem, config, q, k, v, out, lse, d_out, extras)
        if period is not None:
            found = tuple(one.reshape(*batch, *one.shape[2:]) for one in found)
        return (*found, None)
    if v_size > size:
        q, k = (padded(one, 3, v_size) for one in (q, k))
    gradients = attention_backward(
        q,
        k,
        v,
        out,
        lse,
        d_out,
        causal=options.causal,
        scale=options.scale,
        soft_cap=options.soft_cap,
        q_lengths=extras.q_lengths,
        kv_lengths=extras.kv_lengths,
        extras=extras,
        window=options.window,
        period=period,
        mask_block=options.mask_block,
        dropout=options.dropout,
        with_bias=with_bias,
    )
    if period is not None:
        gradients = tuple(one.reshape(*batch, *one.shape[2:]) for one in gradients)
    d_q, d_k, d_v, *d_bias = gradients
    found = d_q[..., :size], d_k[..., :size], d_v[..., :v_size]
    return *found, d_bias[0] if d_bias else None


# The kernel ---------------------------------------------------------------------------------------


def packed_period(q: Any, k: Any, extras: Extras) -> int | None:
    """The length of the sequences if tiles of several of them are to be computed together.

    A tile of one short sequence would be empty for the most part: below three quarters of the rows
    of an instruction, what it takes to mask the others is less.
    """
    length = q.shape[1]
    short = 4 * length < 3 * ROWS and k.shape[1] == length and q.shape[0] > 1
    return length if short and all(one is None for one in extras) else None


def as_decoding(q: Any, k: Any, v: Any, extras: Extras, call: AttentionCall) -> bool:
    """Whether there are so few queries that the kernels for decoding compute them: these divide
    the keys among blocks, and heads that share keys are rows of one tile."""
    tokens, keys, size = q.shape[1], k.shape[1], q.shape[3]
    return (
        tokens <= min(MOST_TOKENS, keys)
        and keys >= ROWS
        and (call.causal or tokens == 1)
        and call.config is None
        and q.dtype.itemsize == 2
        and takes_heads(size, 2)
        and v.shape[3] == size
        and all(one is None for one in extras._replace(kv_lengths=None))
    )


def has_own_tiles(size: int, v_size: int) -> bool:
    """Whether values that are smaller than keys are no larger in shared memory: results may take
    the place of queries, of which they are whole swizzled columns."""
    return head_tile(v_size) < head_tile(size) and head_tile(v_size) % _SWIZZLED == 0


_SWIZZLED = 64
"""Elements of 16 bits in a row of the largest swizzle."""


def _joined(array: jax.Array) -> jax.Array:
    """(batch, sequence, ...) as one sequence."""
    return array.reshape(1, -1, *array.shape[2:])


def _forward(
    q: Any, k: Any, v: Any, extras: Extras, options: AttentionCall, residuals: bool
) -> tuple[jax.Array, Any]:
    q_lengths, kv_lengths = extras.q_lengths, extras.kv_lengths
    if not residuals and as_decoding(q, k, v, extras, options):
        from pallasite_hopper.ops.decode.api import attend

        given = DecodeOptions(options.scale, options.soft_cap, None, None, None)
        return attend(q, k, v, kv_lengths, given, options.window[0]), None
    v_size, shape = v.shape[3], q.shape
    # Rows of the copy engine are whole vectors of 16 bytes.
    vector = 16 // q.dtype.itemsize
    sizes = [size + -size % vector for size in (shape[3], v_size)]
    if not has_own_tiles(*sizes):
        sizes = [max(sizes)] * 2
    q, k, v = (
        padded(array, 3, size) for array, size in zip((q, k, v), (sizes[0], *sizes), strict=True)
    )
    period = packed_period(q, k, extras)
    if period is not None:
        q, k, v = _joined(q), _joined(k), _joined(v)
    batch, q_seq, q_heads, head_dim = q.shape
    arrays = given_arrays(extras)
    problem = Problem(
        batch=batch,
        q_seq=q_seq,
        kv_seq=k.shape[1],
        q_heads=q_heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        dtype=np.dtype(q.dtype),
        causal=options.causal,
        scale=options.scale,
        soft_cap=options.soft_cap,
        q_lengths=q_lengths is not None,
        kv_lengths=kv_lengths is not None,
        save_residuals=residuals,
        left=options.window[0],
        right=options.window[1],
        terms=Terms(period, tuple(arrays)),
        mask_block=options.mask_block,
        dropout=options.dropout,
        v_dim=None if sizes[0] == sizes[1] else sizes[1],
    )
    lengths = [given for given in (q_lengths, kv_lengths) if given is not None]
    operands = [q, k, v, *lengths, *arrays.values()]
    if problem.narrow:
        # Weights of 8 bits would be rounded to three of them, and rearranged among lanes.
        operands[2] = v.astype(problem.out_dtype)
    parts = 1 if options.config is not None else parts_of_keys(problem)
    if parts > 1:
        out, lse = _in_parts(problem, parts, residuals, operands)
    else:
        config = options.config or _choose(problem, operands)
        out, lse = _run(problem, config, *operands)
    out = out if v_size == out.shape[3] else out[..., :v_size]
    if period is not None:
        out = out.reshape(*shape[:3], v_size)
    return out, lse


def parts_of_keys(problem: Problem) -> int:
    """How many parts keys are divided into that are worked on as if there were as many batches."""
    masked = problem.ahead is not None or problem.left is not None
    varied = masked or problem.q_lengths or problem.kv_lengths or bool(problem.terms)
    if varied or problem.narrow:
        return 1
    sizes = problem.q_seq, problem.kv_seq, problem.head_dim
    return parts_of_least_time(problem.heads, *sizes, problem.group, problem.v_dim)


def _in_parts(
    problem: Problem, parts: int, residuals: bool, operands: list[Any]
) -> tuple[jax.Array, Any]:
    """What :func:`_run` returns, of parts of the keys, which XLA adds up."""
    batch, length = problem.batch, problem.q_seq
    problem = dataclasses.replace(problem, batch=batch * parts, parts=parts, save_residuals=True)
    out, lse = _run(problem, _choose(problem, operands), *operands)
    logarithms = lse[:, :, :length].reshape(batch, parts, problem.q_heads, length)
    largest = jnp.max(logarithms, axis=1, keepdims=True)
    weights = jnp.exp(logarithms - largest)
    total = jnp.sum(weights, axis=1, keepdims=True)
    shares = jnp.swapaxes(weights / total, 2, 3)[..., None]
    each = out.reshape(batch, parts, *out.shape[1:]).astype(jnp.float32)
    sums = jnp.sum(each * shares, axis=1).astype(out.dtype)
    return sums, (largest + jnp.log(total))[:, 0] if residuals else None


def _of_queries(q: Any, k: Any, extras: Extras, lse: Any) -> Any:
    """Log-sum-exp as (batch, q_heads, q_seq), of what the kernel writes: whole tiles, where several
    sequences may follow each other."""
    batch, length, heads, _ = q.shape
    if packed_period(q, k, extras) is None or lse.shape[0] == batch:
        return lse[..., :length]
    return jnp.moveaxis(lse[0, :, : batch * length].reshape(heads, batch, length), 1, 0)


_attention, _with_logarithms, _gradients = differentiable_attention(
    _forward, _backward, _of_queries
)


def _choose(problem: Problem, operands: list[Any]) -> AttentionConfig:
    head_dim, causal, q_seq = problem.head_dim, problem.causal, problem.q_seq

    def make_inputs(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        arrays = [random_array(*pair) for pair in zip(keys, operands[:3], strict=True)]
        most = [q_seq] * problem.q_lengths + [problem.kv_seq] * problem.kv_lengths
        lengths = [jnp.full((problem.batch,), n, jnp.int32) for n in most]
        others = operands[3 + len(lengths) :]
        return arrays + lengths + [jnp.zeros(one.shape, one.dtype) for one in others]

    default = default_config(
        head_dim,
        causal,
        q_seq,
        terms=bool(problem.terms),
        period=problem.terms.period,
        scattered=problem.terms.has("q_segments") or problem.terms.has("block_mask"),
        narrow=problem.narrow,
        blocks=problem.terms.has("block_mask"),
        heads=problem.heads,
        kv_seq=-(-problem.kv_seq // problem.parts),
        group=problem.group,
        left=problem.left,
        right=problem.right,
        v_dim=problem.v_dim,
    )
    if problem.narrow:
        return default
    listed = [default, *attention_configs(head_dim, causal, q_seq, problem.kv_seq, problem.heads)]
    if problem.terms.has("block_mask"):
        listed = [one for one in listed if divides(one, problem.mask_block)]
    chosen: AttentionConfig = pallasite.choose(
        "hopper.attention",
        _VERSION,
        operands,
        lambda: listed,
        default,
        functools.partial(_run, problem),
        key=(
            causal,
            problem.soft_cap is not None,
            problem.q_lengths,
            problem.kv_lengths,
            problem.save_residuals,
            problem.parts,
            problem.left,
            problem.ahead,
            *(() if not problem.terms else (problem.terms.period, *problem.terms.names)),
        ),
        make_inputs=make_inputs,
    )
    return chosen


def divides(config: AttentionConfig, block: tuple[int, int]) -> bool:
    """Whether tiles of a configuration divide blocks of a mask."""
    return block[0] % (config.block_q * config.cluster) == 0 and block[1] % config.block_kv == 0


def _run(problem: Problem, config: AttentionConfig, *operands: Any) -> tuple[jax.Array, Any]:
    # A block with one tile, of few keys, has no use for more stages than there are blocks of keys.
    tiles = Tiles(problem, config, MULTIPROCESSORS)
    if tiles.clusters == tiles.count:
        blocks = -(-problem.kv_seq // config.block_kv)
        config = dataclasses.replace(config, stages=max(2, min(config.stages, blocks)))
    names = problem.terms.names
    given, arrays = list(operands), list[jax.Array]()
    if problem.terms:
        given = given[: len(operands) - len(names)]
        raw = dict(zip(names, operands[len(given) :], strict=True))
        size, block = config.block_kv, problem.mask_block
        terms, arrays = with_arrays(
            problem.terms.period, raw, tiles.rows, size, ROWS, mask_block=block
        )
        problem = dataclasses.replace(problem, terms=terms)
    out, lse = _kernel(problem, config, MULTIPROCESSORS)(*given, *arrays)
    return out, lse


@functools.lru_cache(maxsize=256)
def _kernel(problem: Problem, config: AttentionConfig, multiprocessors: int) -> Callable[..., Any]:
    return forward.build(problem, config, multiprocessors)


# Arguments ----------------------------------------------------------------------------------------


def _checked(q: Any, k: Any, v: Any, options: AttentionOptions) -> tuple[AttentionCall, Extras]:
    option = portable_option(options)
    if option is not None:
        if getattr(q, "dtype", None) == jnp.float8_e4m3fn:
            name = option.partition(" ")[0]
            given = getattr(options, "mask_block" if name == "block_mask" else name)
            raise UnsupportedError(
                f"attention of 8-bit floats has no {option}",
                got=f"{given!r}, and q of {q.dtype}",
                expected=f"q, k and v of bfloat16, float16 or float32, or no {name}",
                hint="convert q, k and v, as by q.astype(jnp.bfloat16)",
            )
        raise UnsupportedError(
            f"these kernels have no {option}",
            hint="pallasite.ops.attention has, for this target too",
        )
    call, extras = attention_call(q, k, v, options, config_type=AttentionConfig, dtypes=DTYPES)
    head_dim, config = max(q.shape[3], v.shape[3]), options.config
    if head_dim > LARGEST_HEAD:
        raise InvalidValueError(
            "heads of this size are not supported",
            got=f"head_dim {head_dim}",
            expected=f"at most {LARGEST_HEAD}",
        )
    narrow = q.dtype.itemsize == 1
    masked = config is not None and options.block_mask is not None
    if masked and not divides(config, call.mask_block):
        raise InvalidValueError(
            "the tiles of the configuration do not divide the blocks of the mask",
            got=f"{config}, blocks of {call.mask_block}",
            expected="block_q * cluster and block_kv that do",
        )
    if config is not None and narrow and not config.separate_out:
        raise InvalidValueError(
            "the configuration does not suit elements of 8 bits",
            got=str(config),
            expected="separate_out=True",
        )
    if config is not None and not config.fits(head_dim):
        raise InvalidValueError(
            f"the configuration does not fit shared memory for heads of {head_dim}",
            got=f"{config}: {config.shared_bytes(head_dim)} bytes",
            expected=f"at most {SHARED_BYTES - BARRIER_BYTES}",
            hint="fewer stages, a smaller block_kv or separate_out=False",
        )
    return call, extras
