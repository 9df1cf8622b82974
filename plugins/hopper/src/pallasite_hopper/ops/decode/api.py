"""``decode_attention`` and ``paged_attention``: the functions that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.decode import kernel, prefill
from pallasite_hopper.ops.decode.config import (
    LARGEST_HEAD,
    MOST_TOKENS,
    Cache,
    DecodeConfig,
    decode_configs,
    default_config,
    filled_blocks,
    pages_fit,
    takes_heads,
)
from pallasite_hopper.ops.decode.schedule import Problem, most_tiles
from pallasite_std.api import (
    DecodeAccepted,
    DecodeOptions,
    PageLayout,
    decode_call,
    decoded,
    in_32_bits,
    paged_call,
    random_array,
)

_ACCEPTED = DecodeAccepted((jnp.bfloat16, jnp.float16), None, DecodeConfig, MOST_TOKENS)

_PREFILL = dataclasses.replace(_ACCEPTED, tokens=None)

_VERSION = 2
"""Of the kernel, for what was measured."""


@in_32_bits
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    config: DecodeConfig | None = None,
) -> jax.Array:
    """Attention of one query, or a few, for each sequence against its keys and values.

    ``softmax(scale * q @ k.T) @ v`` for each head, in the time of reading the cache once. The
    sequences may have very different lengths. It has no derivatives.

    Args:
      q: (batch, q_heads, head_dim), or (batch, tokens, q_heads, head_dim) for the last ``tokens``
        queries of each sequence: each sees the keys up to its own, which is the last one for the
        last query. bfloat16 or float16; head_dim up to 256. tokens is up to 8, and head_dim a
        multiple of 8, or of 16 if the cache has 8 bits; or, unless it has, tokens is larger, and so
        many queries share a head of the cache that gathering its rows is estimated to pay.
      k, v: (batch, kv_len, kv_heads, head_dim) of the dtype of q, or float8_e4m3fn or int8.
        kv_heads divides q_heads; query head h uses head ``h // (q_heads // kv_heads)``. kv_len is
        best a multiple of 8.
      kv_lengths: (batch,), integers: how many keys of each sequence exist, those of the queries
        included; all by default. What the arrays hold beyond does not matter.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      k_scale, v_scale: factors of keys and values with 8 bits: numbers, or (kv_heads,).
      config: how to cut the work up; one of :func:`decode_configs`, say. By default it is chosen
        from the shapes, or by measuring full caches if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Returns:
      An array like q; zeros for queries that see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    options = DecodeOptions(scale, soft_cap, k_scale, v_scale, config)
    if config is None and _is_prefill(q, k, 2):
        problem, operands = decode_call(Problem, _PREFILL, q, k, v, kv_lengths, options)
        return decoded(functools.partial(prefill.run, problem), operands, "decode_attention")
    return attend(q, k, v, kv_lengths, options)


def attend(
    q: Any, k: Any, v: Any, kv_lengths: Any, options: DecodeOptions, left: int | None = None
) -> jax.Array:
    """:func:`decode_attention` by the kernel; a query sees ``left`` keys before its own position if
    that is given."""
    problem, operands = decode_call(Problem, _ACCEPTED, q, k, v, kv_lengths, options)
    problem = dataclasses.replace(problem, left=left)
    run = functools.partial(_run, problem, options.config)
    return decoded(run, operands, "decode_attention")


@in_32_bits
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    kv_lengths: jax.Array,
    page_indices: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    page_layout: PageLayout = "heads_first",
    config: DecodeConfig | None = None,
) -> jax.Array:
    """Attention of one query, or a few, for each sequence against keys and values in pages.

    As :func:`decode_attention`, but the rows of a sequence lie in pages anywhere in the cache. Only
    pages with rows below the length are read. Unlike in
    ``jax.experimental.pallas.ops.gpu.paged_attention``, scores are scaled, see ``scale``.

    Args:
      q: (batch, q_heads, head_dim) or (batch, tokens, q_heads, head_dim).
      k_pages, v_pages: (kv_heads, pages, page_size, head_dim), of the dtype of q, or float8_e4m3fn
        or int8. page_size is a multiple of 8, and a divisor or multiple of the configuration's
        tile, 64 or 128 by default.
      kv_lengths: (batch,), integers: rows of each sequence, those of the queries included. What the
        last page of a sequence holds beyond does not matter.
      page_indices: (batch, pages_per_sequence), integers: which page has rows
        ``i * page_size`` to ``(i + 1) * page_size - 1`` of a sequence. Entries beyond the length
        mean nothing.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      k_scale, v_scale: factors of keys and values with 8 bits: numbers, or (kv_heads,).
      page_layout: ``"tokens_first"`` if pages are (pages, page_size, kv_heads, head_dim).
      config: how to cut the work up; one of :func:`decode_configs`, say. By default it is chosen
        from the shapes, or by measuring full caches if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Returns:
      An array like q; zeros for queries that see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", arXiv 2309.06180.
    """
    options = DecodeOptions(scale, soft_cap, k_scale, v_scale, config)
    many = config is None and _is_prefill(q, k_pages, 0 if page_layout == "heads_first" else 2)
    accepted = _PREFILL if many else _ACCEPTED
    problem, operands = paged_call(
        Problem, accepted, q, k_pages, v_pages, kv_lengths, page_indices, page_layout, options
    )
    if many:
        return decoded(functools.partial(prefill.run, problem), operands, "paged_attention")
    head_dim, kv_heads = problem.head_dim, problem.kv_heads
    count = problem.pages * problem.page_size
    rows = (count * kv_heads, head_dim) if problem.heads_first else (count, kv_heads, head_dim)
    operands[1:3] = [pages.reshape(rows) for pages in operands[1:3]]
    operands[-1] = operands[-1].reshape(-1)
    run = functools.partial(_run, problem, config)
    return decoded(run, operands, "paged_attention")


def _is_prefill(q: Any, k: Any, axis: int) -> bool:
    """Whether there are many queries; ``axis`` of k is that of heads."""
    shapes = getattr(q, "shape", ()), getattr(k, "shape", ())
    if list(map(len, shapes)) != [4, 4]:
        return False
    return prefill.suits(shapes[0], q.dtype, shapes[1][axis], k.dtype)


# The kernel ---------------------------------------------------------------------------------------


def _run(problem: Problem, config: DecodeConfig | None, operands: list[Any]) -> jax.Array:
    shape = operands[0].shape
    operands[0] = operands[0].reshape(kernel.out_shape(problem).shape)
    if config is None and takes_heads(problem.head_dim, np.dtype(problem.cache_dtype).itemsize):
        config = _choose(problem, operands)
    config = config or DecodeConfig()
    return _attend(problem, config, *operands).reshape(shape)


def _attend(problem: Problem, config: DecodeConfig, *operands: Any) -> jax.Array:
    out: jax.Array = _kernel(problem, _filled(problem, config))(*operands)[0]
    return out


def _choose(problem: Problem, operands: list[Any]) -> DecodeConfig:
    itemsize = np.dtype(problem.cache_dtype).itemsize
    lines = problem.batch * problem.kv_heads * problem.parts
    rows = problem.kv_len
    if problem.left is not None:
        rows = min(rows, problem.tokens + problem.left)
    tokens_first = not (problem.page_size and problem.heads_first)
    neighbours = problem.kv_heads if tokens_first else 1
    cache = Cache(lines, rows, problem.page_size, problem.lengths, neighbours)

    def candidates() -> list[DecodeConfig]:
        found = decode_configs(
            problem.head_dim, problem.columns, itemsize, kv_heads=problem.kv_heads
        )
        return [one for one in found if pages_fit(problem.page_size, one)]

    def make_inputs(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        made = [random_array(*pair) for pair in zip(keys, operands[:3], strict=True)]
        if problem.scales:
            made += [jnp.ones((problem.kv_heads,), jnp.float32)] * 2
        if problem.lengths:
            made.append(jnp.full((problem.batch,), problem.kv_len, jnp.int32))
        if problem.page_size:
            count = problem.batch * problem.pages_per_sequence
            order = jax.random.permutation(key, problem.pages)
            made.append(jnp.resize(order, (count,)).astype(jnp.int32))
        return made

    chosen: DecodeConfig = pallasite.choose(
        "hopper.decode_attention",
        _VERSION,
        operands,
        candidates,
        default_config(problem.head_dim, problem.columns, itemsize, cache),
        functools.partial(_attend, problem),
        key=(
            problem.tokens,
            problem.soft_cap is not None,
            problem.page_size,
            problem.pages_per_sequence,
            problem.heads_first,
            problem.scales,
            problem.lengths,
            problem.left,
        ),
        make_inputs=make_inputs,
    )
    return chosen


@functools.lru_cache(maxsize=256)
def _kernel(problem: Problem, config: DecodeConfig) -> Callable[..., Any]:
    return kernel.build(problem, config)


def _filled(problem: Problem, config: DecodeConfig) -> DecodeConfig:
    """The configuration with stages and blocks: no more of them than tiles."""
    itemsize = np.dtype(problem.cache_dtype).itemsize
    if not takes_heads(problem.head_dim, itemsize):
        raise InvalidValueError(
            "heads of these sizes are not supported",
            got=f"head_dim {problem.head_dim}",
            expected=f"a multiple of {16 // itemsize} up to {LARGEST_HEAD}",
            hint="the operations of pallasite.ops take others, for this target too",
        )
    if problem.kv_heads % config.heads:
        raise InvalidValueError(
            "blocks cannot have so many heads side by side",
            got=f"heads={config.heads} of {problem.kv_heads}",
            expected="a divisor",
        )
    size = problem.page_size
    if not pages_fit(size, config):
        raise InvalidValueError(
            "the pages do not fit the steps",
            got=f"page_size {size}, steps of {config.tile} rows",
            expected=f"a multiple of 8 that divides {config.tile} or that it divides",
        )
    filled = config.filled(problem.head_dim, problem.columns, itemsize)
    lines = problem.batch * problem.kv_heads // config.heads * problem.parts
    blocks = filled_blocks(config, lines, most_tiles(problem, config))
    return dataclasses.replace(filled, blocks=blocks)
