"""``mixed_matmul``: the function that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallasite
from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.mixed.choice import default_config, mixed_configs
from pallasite_hopper.ops.mixed.config import MixedConfig
from pallasite_hopper.ops.mixed.kernel import build
from pallasite_std.api import MixedProblem, in_32_bits, mixed_call, multiplied, padded

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 2
"""Of the kernel, for what was measured."""


@in_32_bits
def mixed_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scales: jax.Array | None = None,
    transpose_b: bool = False,
    out_dtype: Any = None,
    config: MixedConfig | None = None,
) -> jax.Array:
    """Mixed-precision GEMM of activations with narrow weights, ``a @ (b * scales)``, in one kernel.

    Weights are read as they are and converted in registers, so a skinny GEMM takes as
    long as reading them. Sums are float32. It has no derivatives.

    Args:
      a: (m, k), bfloat16 or float16.
      b: the weights, (k, n), or (n, k) with ``transpose_b``: int8, uint8, int4, uint4,
        float8_e4m3fn or float8_e5m2. Weights of 4 bits given as (k, n) are transposed beforehand,
        at the price of reading and writing them; (n, k) is the faster form of 8 bits, too. int8 and
        4 bits are converted fastest.
      scales: (n,): a factor for each column, applied to the sums; or (groups, n): for each group of
        k / groups consecutive elements along k. Factors of groups are rounded to the dtype of a,
        and weights are multiplied by them before the matmul, rounded once. A group has a multiple
        of 8 elements, and divides the pieces of a step along k, or is made of whole steps.
      transpose_b: the weights are given as (n, k).
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling; one of :func:`mixed_configs`, say. By default it is chosen
        from the shape, or by measuring if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``wgmma.mma_async`` with the converted weights as its operand in registers.
    """
    problem, operands = mixed_call(
        a,
        b,
        scales=scales,
        transpose_b=transpose_b,
        out_dtype=out_dtype,
        config=config,
        config_type=MixedConfig,
    )
    return multiplied(problem, functools.partial(_attempt, config), operands)


def _attempt(config: MixedConfig | None, problem: MixedProblem, *operands: jax.Array) -> jax.Array:
    if config is None:
        config = _choose(problem, operands)
    if problem.group:
        _check_group(problem.group, config)
    return _run(problem, config, *operands)


def _choose(problem: MixedProblem, operands: tuple[jax.Array, ...]) -> MixedConfig:
    m, n, k, bits = problem.m, problem.n, problem.k, problem.weight_bits
    size = problem.out_dtype.itemsize

    chosen: MixedConfig = pallasite.choose(
        "hopper.mixed_matmul",
        _VERSION,
        operands,
        lambda: mixed_configs(m, n, k, bits, size, problem.group),
        default_config(m, n, k, bits, size, problem.group),
        functools.partial(_run, problem),
        key=(problem.transposed, problem.group, str(problem.out_dtype)),
    )
    return chosen


def _run(
    problem: MixedProblem, config: MixedConfig, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> jax.Array:
    # The copy engine reads rows of multiples of 16 bytes.
    columns = 16 if not problem.transposed else 8
    n = problem.n
    whole = -(-n // columns) * columns
    operands = [padded(a, 1, 8), padded(b, 1, 128 // problem.weight_bits)]
    if problem.group:
        operands.append(padded(scales[0].astype(a.dtype), 1, 8))
    elif scales:
        multiple = config.tile_n * config.cluster
        operands.append(padded(scales[0].astype(jnp.float32), 0, multiple))
    problem = dataclasses.replace(problem, n=whole)
    result = _kernel(problem, config, MULTIPROCESSORS)(*operands)
    return result if whole == n else result[:, :n]


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: MixedProblem, config: MixedConfig, multiprocessors: int
) -> Callable[..., jax.Array]:
    return build(problem, config, multiprocessors)


def _check_group(group: int, config: MixedConfig) -> None:
    if not config.fits_group(group):
        depth = config.tile_k // config.pieces
        raise InvalidValueError(
            "the groups of scales do not fit the steps along k",
            got=f"groups of {group}, steps of {config.tile_k} in {config.pieces} pieces",
            expected=f"a multiple of 8 that divides {depth} or that {config.tile_k} divides",
        )
