"""``decode_attention`` and ``paged_attention``: the functions that programs call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidValueError, select_target
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.decode import kernel
from pallasite_std.ops.decode.arguments import (
    DecodeAccepted,
    DecodeOptions,
    DecodeProblem,
    PageLayout,
    decode_call,
    decoded,
    paged_call,
)
from pallasite_std.ops.decode.config import DecodeConfig, default_config
from pallasite_std.ops.flash.config import LARGEST_HEAD
from pallasite_std.ops.padding import padded

_ACCEPTED = DecodeAccepted((jnp.bfloat16, jnp.float16, jnp.float32), None, DecodeConfig)


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
    """Attention of the last query, or the last ones, of each sequence against its keys and values.

    ``softmax(scale * q @ k.T) @ v`` for each head; the sequences may have very different lengths.
    It has no derivatives.

    Args:
      q: (batch, q_heads, head_dim), or (batch, tokens, q_heads, head_dim) for the last ``tokens``
        queries of each sequence: each sees the keys up to its own, which is the last one for the
        last query. Prefill has many of them; if a sequence has fewer new tokens than others, its
        first queries mean nothing. bfloat16, float16 or float32 (multiplied as tf32); head_dim up
        to 256.
      k, v: (batch, kv_len, kv_heads, head_dim) of the dtype of q, or float8_e4m3fn or int8.
        kv_heads divides q_heads; query head h uses head ``h // (q_heads // kv_heads)``. The cache
        is read as it is if head_dim is a multiple of 16, else it is copied.
      kv_lengths: (batch,), integers: how many keys of each sequence exist, those of the queries
        included; all by default. What the arrays hold beyond does not matter.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      k_scale, v_scale: factors of keys and values with 8 bits: numbers, or (kv_heads,).
      config: how to cut the work up, of the type that the implementation for the target takes. By
        default it is chosen from the shapes.

    Returns:
      An array like q; zeros for queries that see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    options = DecodeOptions(scale, soft_cap, k_scale, v_scale, config)
    problem, operands = decode_call(DecodeProblem, _ACCEPTED, q, k, v, kv_lengths, options)
    run = functools.partial(_run, problem, config)
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
    """Attention of the last query, or the last ones, of each sequence against keys and values in
    pages, for decoding and prefill.

    As :func:`decode_attention`, but the rows of a sequence lie in pages anywhere in the cache. Only
    pages with rows below the length are read. Unlike in
    ``jax.experimental.pallas.ops.gpu.paged_attention``, scores are scaled, see ``scale``.

    Args:
      q: (batch, q_heads, head_dim) or (batch, tokens, q_heads, head_dim).
      k_pages, v_pages: (kv_heads, pages, page_size, head_dim), of the dtype of q, or float8_e4m3fn
        or int8. page_size is a multiple of 8.
      kv_lengths: (batch,), integers: rows of each sequence, those of the queries included. What the
        last page of a sequence holds beyond does not matter.
      page_indices: (batch, pages_per_sequence), integers: which page has rows
        ``i * page_size`` to ``(i + 1) * page_size - 1`` of a sequence. Entries beyond the length
        mean nothing.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      k_scale, v_scale: factors of keys and values with 8 bits: numbers, or (kv_heads,).
      page_layout: ``"tokens_first"`` if pages are (pages, page_size, kv_heads, head_dim).
      config: how to cut the work up, of the type that the implementation for the target takes. By
        default it is chosen from the shapes.

    Returns:
      An array like q; zeros for queries that see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", arXiv 2309.06180.
    """
    options = DecodeOptions(scale, soft_cap, k_scale, v_scale, config)
    problem, operands = paged_call(
        DecodeProblem,
        _ACCEPTED,
        q,
        k_pages,
        v_pages,
        kv_lengths,
        page_indices,
        page_layout,
        options,
    )
    run = functools.partial(_run, problem, config)
    return decoded(run, operands, "paged_attention")


def _run(problem: DecodeProblem, config: DecodeConfig | None, operands: list[Any]) -> jax.Array:
    q, k, v, *rest = operands
    if problem.head_dim > LARGEST_HEAD:
        raise InvalidValueError(
            "heads of this size are not supported",
            got=f"head_dim {problem.head_dim}",
            expected=f"at most {LARGEST_HEAD}",
        )
    q_rows = q.reshape(-1, problem.tokens, problem.kv_heads, problem.group, problem.head_dim)
    q_rows = q_rows.transpose(0, 2, 1, 3, 4)
    q_rows = q_rows.reshape(*q_rows.shape[:2], kernel.query_rows(problem), problem.head_dim)
    q_rows, k, v = (padded(one, one.ndim - 1, 16) for one in (q_rows, k, v))
    wide = dataclasses.replace(problem, head_dim=q_rows.shape[-1])
    results, logarithms = _kernel(wide, _tiling(wide, config))(q_rows, k, v, *rest)
    values = kernel.combined(results, logarithms)
    values = values[:, :, : kernel.query_rows(problem), : problem.head_dim]
    values = values.reshape(
        problem.batch, problem.kv_heads, problem.tokens, problem.group, problem.head_dim
    )
    return values.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _tiling(problem: DecodeProblem, config: DecodeConfig | None) -> kernel.Tiling:
    if problem.page_size % 8:
        raise InvalidValueError(
            "the pages do not fit the steps",
            got=f"page_size {problem.page_size}",
            expected="a multiple of 8",
        )
    target = select_target()
    rows = kernel.query_rows(problem)
    # 16 rows need results of multiples of 32 columns.
    fitting = (16, 32, 64) if problem.head_dim % 32 == 0 else (32, 64)
    wanted = next((one for one in fitting if one >= rows), 64)
    if config is None:
        config = default_config(problem.head_dim, np.dtype(problem.cache_dtype).itemsize)
        heights = [wanted, *(one for one in (32, 16) if one in fitting)]
        sizes = [
            kernel.Tiling(height, tile, config.stages, 1)
            for height in heights
            for tile in (config.tile, 32, 16)
            if height > 16 or tile % 32 == 0
        ]
        smallest = min(sizes, key=lambda one: one.shared_bytes(problem))
        fits = (one for one in sizes if one.shared_bytes(problem) <= target.max_shared_memory)
        chosen = next(fits, smallest)
    else:
        chosen = kernel.Tiling(wanted, config.tile, config.stages, 1)
    splits = config.splits
    if splits is None:
        blocks = problem.batch * problem.kv_heads * -(-rows // chosen.rows)
        needed = -(-2 * max(1, target.multiprocessors) // blocks)
        splits = max(1, min(needed, problem.kv_len // (4 * chosen.tile)))
    return dataclasses.replace(chosen, splits=splits)


@functools.lru_cache(maxsize=256)
def _kernel(problem: DecodeProblem, tiling: kernel.Tiling) -> Any:
    return kernel.build(problem, tiling)
