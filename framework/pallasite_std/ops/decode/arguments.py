"""The arguments of ``decode_attention`` and ``paged_attention``, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    accepted_dtypes,
    as_array,
    check_config,
    positive,
    whole_numbers,
    without_derivatives,
    zeros,
)

PageLayout = Literal["heads_first", "tokens_first"]


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """What attention is computed of.

    Attributes:
      batch, tokens, kv_heads, group, head_dim: extents; ``group`` query heads share one of the
        cache, ``tokens`` queries one sequence.
      kv_len: rows that a sequence can have in the cache.
      dtype: of queries and results.
      cache_dtype: of keys and values.
      scale, soft_cap: of the scores.
      lengths: whether the sequences have lengths of their own.
      page_size: rows of a page, or 0 if the cache has no pages.
      pages_per_sequence: of the page table.
      pages: in the cache.
      heads_first: whether pages are given as (kv_heads, pages, page_size, head_dim).
      scales: whether keys and values have a factor for each head.
    """

    batch: int
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    kv_len: int
    dtype: Any
    cache_dtype: Any
    scale: float
    soft_cap: float | None = None
    lengths: bool = False
    page_size: int = 0
    pages_per_sequence: int = 0
    pages: int = 0
    heads_first: bool = True
    scales: bool = False

    @property
    def narrow(self) -> bool:
        """Keys and values are converted in registers."""
        return bool(np.dtype(self.cache_dtype).itemsize == 1)


@dataclasses.dataclass(frozen=True)
class DecodeAccepted:
    """What an implementation takes.

    Attributes:
      dtypes: of queries.
      head_dims: sizes of a head, or None for all.
      config: type of configurations.
      tokens: queries of a sequence at most, or None for any number.
    """

    dtypes: tuple[Any, ...]
    head_dims: tuple[int, ...] | None
    config: type
    tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """Arguments that both functions have.

    Attributes:
      scale, soft_cap, k_scale, v_scale, config: as they are given.
    """

    scale: Any
    soft_cap: Any
    k_scale: Any
    v_scale: Any
    config: Any


def decode_call[P: DecodeProblem](
    kind: type[P],
    accepted: DecodeAccepted,
    q: Any,
    k: Any,
    v: Any,
    kv_lengths: Any,
    options: DecodeOptions,
) -> tuple[P, list[Any]]:
    """What ``decode_attention`` is asked for.

    Args:
      kind: of the problem that is returned.

    Returns:
      The problem, and (q, k, v, k_scales?, v_scales?, lengths?).

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    for array, what in ((k, "k"), (v, "v")):
        _check_rank(array, what, "(batch, kv_len, kv_heads, head_dim)")
    batch, kv_len, kv_heads, head_dim = k.shape
    tokens, group = _check_operands(accepted, q, k, v, ("k", "v"), kv_heads, head_dim)
    if q.shape[0] != batch:
        raise InvalidValueError(
            "q and k do not have the same batch", got=f"q {q.shape}, k {k.shape}"
        )
    problem = kind(
        batch=batch,
        tokens=tokens,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        kv_len=kv_len,
        dtype=np.dtype(q.dtype),
        cache_dtype=np.dtype(k.dtype),
        scale=_scale(options.scale, head_dim),
        soft_cap=_soft_cap(options.soft_cap),
        lengths=kv_lengths is not None,
    )
    extra = [] if kv_lengths is None else [whole_numbers(kv_lengths, "kv_lengths", (batch,))]
    return _with_factors(problem, accepted, options, [q, k, v], extra)


def paged_call[P: DecodeProblem](
    kind: type[P],
    accepted: DecodeAccepted,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    kv_lengths: Any,
    page_indices: Any,
    page_layout: Any,
    options: DecodeOptions,
) -> tuple[P, list[Any]]:
    """What ``paged_attention`` is asked for.

    Returns:
      The problem, and (q, k, v, k_scales?, v_scales?, lengths, page_indices).

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    if page_layout not in ("heads_first", "tokens_first"):
        raise InvalidValueError(
            "page_layout is unknown", got=page_layout, expected="'heads_first' or 'tokens_first'"
        )
    heads_first = page_layout == "heads_first"
    expected = "(kv_heads, pages, page_size, head_dim)"
    if not heads_first:
        expected = "(pages, page_size, kv_heads, head_dim)"
    for array, what in ((k_pages, "k_pages"), (v_pages, "v_pages")):
        _check_rank(array, what, expected)
    if heads_first:
        kv_heads, pages, page_size, head_dim = k_pages.shape
    else:
        pages, page_size, kv_heads, head_dim = k_pages.shape
    names = ("k_pages", "v_pages")
    tokens, group = _check_operands(accepted, q, k_pages, v_pages, names, kv_heads, head_dim)
    batch = q.shape[0]
    kv_lengths = whole_numbers(kv_lengths, "kv_lengths", (batch,))
    page_indices = whole_numbers(page_indices, "page_indices", (batch, "pages_per_sequence"))
    problem = kind(
        batch=batch,
        tokens=tokens,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        kv_len=page_indices.shape[1] * page_size,
        dtype=np.dtype(q.dtype),
        cache_dtype=np.dtype(k_pages.dtype),
        scale=_scale(options.scale, head_dim),
        soft_cap=_soft_cap(options.soft_cap),
        lengths=True,
        page_size=page_size,
        pages_per_sequence=page_indices.shape[1],
        pages=pages,
        heads_first=heads_first,
    )
    extra = [kv_lengths, page_indices]
    return _with_factors(problem, accepted, options, [q, k_pages, v_pages], extra)


def decoded(run: Callable[..., jax.Array], operands: list[Any], name: str) -> jax.Array:
    """The result of a kernel, which has no derivatives; zeros where there is nothing to see.

    Args:
      run: takes the operands.
      operands: of which the first three are queries, keys and values.
      name: of the operation.
    """
    q, k, *_ = operands
    if 0 in (*q.shape, *k.shape) or 0 in operands[-1].shape:
        return zeros(q.shape, q.dtype, *operands)
    hint = "attention() has derivatives"
    return without_derivatives(name, hint, lambda *arrays: run(list(arrays)))(*operands)


def _with_factors[P: DecodeProblem](
    problem: P,
    accepted: DecodeAccepted,
    options: DecodeOptions,
    arrays: list[Any],
    extra: list[Any],
) -> tuple[P, list[Any]]:
    factors = []
    scales = (options.k_scale, options.v_scale)
    if any(given is not None for given in scales):
        problem = dataclasses.replace(problem, scales=True)
        named = zip(("k_scale", "v_scale"), scales, strict=True)
        factors = [_factors(given, what, problem) for what, given in named]
    check_config(options.config, accepted.config)
    return problem, [*arrays, *factors, *extra]


def _check_rank(array: Any, what: str, expected: str) -> None:
    if len(getattr(array, "shape", ())) != 4:
        raise InvalidTypeError(
            f"{what} does not have four dimensions",
            got=getattr(array, "shape", type(array).__name__),
            expected=expected,
        )


def _check_operands(
    accepted: DecodeAccepted,
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str],
    kv_heads: int,
    head_dim: int,
) -> tuple[int, int]:
    """Returns how many queries a sequence has, and how many heads of them share one of the cache.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    if len(getattr(q, "shape", ())) not in (3, 4):
        raise InvalidTypeError(
            "q has neither three nor four dimensions",
            got=getattr(q, "shape", type(q).__name__),
            expected="(batch, q_heads, head_dim) or (batch, tokens, q_heads, head_dim)",
        )
    if q.dtype not in tuple(np.dtype(one) for one in accepted.dtypes):
        operation = "decode_attention" if names[0] == "k" else "paged_attention"
        raise InvalidTypeError(
            "attention of this dtype of q",
            got=q.dtype,
            expected=accepted_dtypes(accepted.dtypes, operation),
            hint="convert q to one of these, and the cache to that or to one of 8 bits",
        )
    if k.dtype != v.dtype or k.dtype not in (q.dtype, jnp.float8_e4m3fn, jnp.int8):
        raise InvalidTypeError(
            f"{names[0]} and {names[1]} do not fit q",
            got=f"{k.dtype} and {v.dtype}, q {q.dtype}",
            expected="both of the dtype of q, or both float8_e4m3fn or int8",
        )
    if k.shape != v.shape:
        raise InvalidValueError(
            f"{names[0]} and {names[1]} do not have the same shape", got=f"{k.shape}, {v.shape}"
        )
    head_dims = accepted.head_dims
    if q.shape[-1] != head_dim or (head_dims is not None and head_dim not in head_dims):
        among = "" if head_dims is None else ", " + " or ".join(map(str, head_dims))
        raise InvalidValueError(
            "heads of these sizes are not supported",
            got=f"head_dim {q.shape[-1]} of q, {head_dim} of the cache",
            expected="the same" + among,
            hint="pad with zeros, and give the scale",
        )
    q_heads = q.shape[-2]
    if q_heads % max(1, kv_heads) or (q_heads and not kv_heads):
        raise InvalidValueError(
            "the heads of the queries cannot be divided among those of the cache",
            got=f"{q_heads} and {kv_heads} heads",
            expected="a multiple",
        )
    tokens = q.shape[1] if len(q.shape) == 4 else 1
    if accepted.tokens is not None and tokens > accepted.tokens:
        raise InvalidValueError(
            "too many queries for each sequence",
            got=f"{tokens}",
            expected=f"at most {accepted.tokens}",
            hint="the operations of pallasite.ops take more, for this target too",
        )
    return tokens, q_heads // max(1, kv_heads)


def _factors(given: Any, what: str, problem: DecodeProblem) -> jax.Array:
    """Factors of all heads."""
    if not problem.narrow:
        raise InvalidValueError(f"{what} is for keys and values with 8 bits")
    factors = as_array(1.0 if given is None else given, what).astype(jnp.float32)
    if factors.shape not in ((), (problem.kv_heads,)):
        raise InvalidTypeError(
            f"{what} does not fit the heads",
            got=factors.shape,
            expected=f"a number, or ({problem.kv_heads},)",
        )
    return jnp.broadcast_to(factors, (problem.kv_heads,))


def _scale(scale: Any, head_dim: int) -> float:
    return float(max(1, head_dim) ** -0.5) if scale is None else positive(scale, "scale")


def _soft_cap(soft_cap: Any) -> float | None:
    return None if soft_cap is None else positive(soft_cap, "soft_cap")
