"""From a product's operands to the kernel: its configuration, padding, and the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

import pallasite
from pallasite_hopper.ops.dense.config import MatmulConfig, default_config, matmul_configs
from pallasite_hopper.ops.dense.kernel import build
from pallasite_std.api import (
    Epilogue,
    MatmulCall,
    MatmulProblem,
    aligned,
    padded_columns,
)

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 1
"""Of the kernel, for what was measured."""


def run(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The product; ``extras`` are the operands of the epilogue."""
    problem = call.problem
    if problem.size != 2:
        # The tensor cores read such elements along k only.
        a = a.T if problem.transpose_a else a
        b = b if problem.transpose_b else b.T
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    config = call.config or _choose(problem, call.epilogue, a, b, extras)
    return _run(problem, call.epilogue, config, a, b, extras)


def _choose(
    problem: MatmulProblem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> MatmulConfig:
    m, n, k, out_size = problem.m, problem.n, problem.k, problem.out_dtype.itemsize
    default = default_config(m, n, k, problem.size, out_size, MULTIPROCESSORS)

    def attempt(config: MatmulConfig, a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        return _run(problem, epilogue, config, a, b, extras)

    chosen: MatmulConfig = pallasite.choose(
        "hopper.matmul",
        _VERSION,
        (a, b, *extras),
        lambda: matmul_configs(m, n, k, problem.dtype_a, problem.out_dtype),
        default,
        attempt,
        key=(*problem.key(), *epilogue.key()),
    )
    return chosen


def _run(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    m_multiple, n_multiple = config.tile_m, config.tile_n
    if config.cluster_along == "m":
        m_multiple *= config.cluster
    else:
        n_multiple *= config.cluster
    if config.swap:
        m_multiple, n_multiple = n_multiple, m_multiple
    operands = epilogue.padded_operands(extras, m_multiple, n_multiple)
    a, b = aligned(a), aligned(b)
    n = problem.n
    padded = padded_columns(n, problem.out_dtype.itemsize)
    problem = dataclasses.replace(problem, n=padded)
    if config.swap:
        problem, a, b = problem.swapped(), b, a
    result = _kernel(problem, config, epilogue, MULTIPROCESSORS)(a, b, *operands)
    return result if padded == n else result[:, :n]


_kernel = functools.lru_cache(maxsize=256)(build)
