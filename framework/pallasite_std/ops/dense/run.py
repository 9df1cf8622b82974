"""From a portable product's operands to the kernel: configuration, padding, and the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

import pallasite
from pallasite.plugin import select_target
from pallasite_std.ops.dense.config import MatmulConfig, default_config, matmul_configs
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.kernel import build
from pallasite_std.ops.dense.problem import MatmulCall, MatmulProblem
from pallasite_std.ops.padding import aligned, padded_columns

_VERSION = 1
"""Of the kernel, for what was measured."""


def run(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The product; ``extras`` are the operands of the epilogue."""
    problem = call.problem
    if problem.size != 2:
        # Elements of other widths are read along k, where lanes hold neighbours.
        a = a.T if problem.transpose_a else a
        b = b if problem.transpose_b else b.T
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    config = call.config or _choose(problem, call.epilogue, a, b, extras)
    return _run(problem, call.epilogue, config, a, b, *extras)


def _choose(
    problem: MatmulProblem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> MatmulConfig:
    m, n, out_size = problem.m, problem.n, problem.out_dtype.itemsize
    shared_memory = select_target().max_shared_memory
    chosen: MatmulConfig = pallasite.choose(
        "standard.matmul",
        _VERSION,
        (a, b, *extras),
        lambda: matmul_configs(m, n, out_size, shared_memory),
        default_config(m, n, out_size, shared_memory),
        functools.partial(_run, problem, epilogue),
        key=(problem.key(), epilogue.key()),
    )
    return chosen


def _run(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    *extras: jax.Array,
) -> jax.Array:
    operands = epilogue.padded_operands(extras, config.tile_m, config.tile_n)
    n = problem.n
    padded = padded_columns(n, problem.out_dtype.itemsize)
    kernel = _kernel(dataclasses.replace(problem, n=padded), config, epilogue)
    result = kernel(aligned(a), aligned(b), *operands)
    return result if padded == n else result[:, :n]


_kernel = functools.lru_cache(maxsize=256)(build)
