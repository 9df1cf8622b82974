"""From a matmul's operands to the kernel: its configuration, padding, and the call."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite
from pallasite_hopper.ops.dense.choice import default_config, matmul_configs
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.direct import build as build_direct
from pallasite_hopper.ops.dense.few_rows import FewRowsConfig
from pallasite_hopper.ops.dense.few_rows import build as build_few_rows
from pallasite_hopper.ops.dense.joined_rows import JoinedRowsConfig
from pallasite_hopper.ops.dense.joined_rows import build as build_joined_rows
from pallasite_hopper.ops.dense.kernel import MatmulLoop, Region, build, resident_clusters
from pallasite_hopper.ops.dense.outer import build as build_outer
from pallasite_hopper.ops.dense.outer import nanoseconds as outer_nanoseconds
from pallasite_hopper.ops.dense.outer import outer_config
from pallasite_hopper.ops.dense.padding import aligned
from pallasite_hopper.ops.dense.short import build as build_short
from pallasite_hopper.ops.dense.short import short_config
from pallasite_hopper.ops.dense.turned import left_to_xla as turned_left_to_xla
from pallasite_hopper.ops.dense.unaligned import AnyRowsConfig, left_to_xla, without_copies
from pallasite_hopper.ops.dense.vector import vector_left_to_xla
from pallasite_std.api import (
    Epilogue,
    MatmulCall,
    MatmulProblem,
    padded_columns,
)

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 2
"""Of the kernel, for what was measured."""

_ROWS, _COLUMNS = ("m_end", "m"), ("n_end", "n")
"""Bounds of the region before a place, and of that from it on."""

WINNERS = pathlib.Path(__file__).with_name("winners.json")
"""Measured by ``benchmarks/winners.py``."""


def run(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The matmul; ``extras`` are the operands of the epilogue."""
    problem = call.problem
    if call.config is None and (turned_by_xla(problem) or _vector_by_xla(problem, call.epilogue)):
        return _by_xla(problem, call.epilogue, a, b, extras)
    if problem.size != 2:
        # The tensor cores read such elements along k only.
        a = a.T if problem.transpose_a else a
        b = b if problem.transpose_b else b.T
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    if call.config is None:
        config = _without_copies(problem, call.epilogue)
        if config is not None:
            kernel = _any_rows(problem, config, call.epilogue)
            return kernel(a, b, *map(jnp.atleast_1d, extras))
        if _left_to_xla(problem, call.epilogue):
            return _by_xla(problem, call.epilogue, a, b, extras)
        few_products = _few_products(problem, call.epilogue)
        if few_products is not None:
            return few_products(a, b)
    chosen = call.config or _choose(problem, call.epilogue, a, b, extras)
    return _run(problem, call.epilogue, chosen, a, b, extras)


def _without_copies(problem: MatmulProblem, epilogue: Epilogue) -> AnyRowsConfig | None:
    """The configuration of a kernel that reads any rows, if it is the fastest."""
    if problem.accumulator not in (np.float32, np.int32):
        return None
    xla = _xla_multiplies(problem)
    return without_copies(problem_sizes(problem), plain=_is_plain(epilogue), xla=xla)


def _few_products(problem: MatmulProblem, epilogue: Epilogue) -> Callable[..., jax.Array] | None:
    """The kernel that adds up outer products, or that which multiplies few elements along k at
    once, if it is the fastest."""
    if problem.accumulator != np.float32 or not _is_plain(epilogue):
        return None
    sizes = problem_sizes(problem)
    outer, short = outer_config(sizes), short_config(sizes)
    if short is not None and (outer is None or short[1] < outer_nanoseconds(sizes)):
        return _short_kernel(problem, short[0])
    return None if outer is None else _outer_kernel(problem, outer)


def turned_by_xla(problem: MatmulProblem, count: int = 1) -> bool:
    """Whether operands, of so many products, would have to be copied to the other order, which XLA
    need not."""
    kinds = {np.dtype(problem.dtype_a).kind, np.dtype(problem.dtype_b).kind}
    if problem.size == 2 or (problem.size == 1 and kinds - {"i", "u"}):
        return False
    along_k = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    sizes = dataclasses.replace(problem_sizes(along_k), batch=count)
    turned = {"turned_a": problem.transpose_a, "turned_b": not problem.transpose_b}
    return turned_left_to_xla(sizes, **turned)


def _vector_by_xla(problem: MatmulProblem, epilogue: Epilogue) -> bool:
    """Whether XLA's kernel for one row is faster."""
    same = problem.dtype_a == problem.dtype_b and problem.accumulator == np.float32
    plain = same and problem.size <= 2 and _is_plain(epilogue)
    return plain and vector_left_to_xla(problem_sizes(problem))


def _left_to_xla(problem: MatmulProblem, epilogue: Epilogue) -> bool:
    """Whether the copies that rows need take so long that XLA is faster."""
    return _xla_multiplies(problem) and left_to_xla(
        problem_sizes(problem), plain=_is_plain(epilogue)
    )


def _xla_multiplies(problem: MatmulProblem) -> bool:
    """Whether XLA has a fast kernel for the operands."""
    same = problem.dtype_a == problem.dtype_b
    return problem.size == 2 and same and problem.accumulator == np.float32


def problem_sizes(problem: MatmulProblem) -> Sizes:
    """What estimates take of a product."""
    m, n, k, size = problem.m, problem.n, problem.k, problem.size
    orders = {"transpose_a": problem.transpose_a, "transpose_b": problem.transpose_b}
    return Sizes(m, n, k, size, problem.out_dtype.itemsize, **orders)


def _is_plain(epilogue: Epilogue) -> bool:
    return not epilogue.count and epilogue.activation is None


def by_xla(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The matmul by a kernel of XLA."""
    return _by_xla(call.problem, call.epilogue, a, b, extras)


def _by_xla(
    problem: MatmulProblem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    contracted = ((0 if problem.transpose_a else 1,), (1 if problem.transpose_b else 0,))
    plain = _is_plain(epilogue)
    on_gpu = jax.default_backend() == "gpu"
    tf32 = lax.DotAlgorithmPreset.TF32_TF32_F32 if problem.size == 4 and on_gpu else None
    # cuBLASLt has no product of one 16-bit type with results of another one.
    direct = plain and problem.out_dtype in (problem.dtype_a, problem.accumulator)
    sums = lax.dot_general(
        a,
        b,
        (contracted, ((), ())),
        precision=tf32,
        preferred_element_type=problem.out_dtype if direct else problem.accumulator,
    )
    if not plain:
        return _with_epilogue(problem, epilogue, sums, extras)
    return sums.astype(problem.out_dtype)


def _choose(
    problem: MatmulProblem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> MatmulConfig:
    m, n, k = problem.m, problem.n, problem.k
    orders = {"transpose_a": problem.transpose_a, "transpose_b": problem.transpose_b}
    default = default_config(problem_sizes(problem))

    def attempt(config: MatmulConfig, a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        return _run(problem, epilogue, config, a, b, extras)

    chosen: MatmulConfig = pallasite.choose(
        "hopper.matmul",
        _VERSION,
        (a, b, *extras),
        lambda: matmul_configs(m, n, k, problem.dtype_a, problem.out_dtype, **orders),
        default,
        attempt,
        key=(*problem.key(), *epilogue.key()),
        winners=WINNERS,
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
    if config.parts > 1:
        return _run_in_parts(problem, epilogue, config, a, b, extras)
    if config.rest is not None and config.rest_from < _extent(problem, config.rest_along):
        return _run_with_rest(problem, epilogue, config, config.rest, a, b, extras)
    config = dataclasses.replace(config, rest=None, rest_from=0, rest_along="m")
    m_multiple, n_multiple = config.step_m, config.step_n
    if config.swap:
        m_multiple, n_multiple = n_multiple, m_multiple
    operands = epilogue.padded_operands(extras, m_multiple, n_multiple)
    return _call(problem, epilogue, config, a, b, operands)


def _extent(problem: MatmulProblem, along: str) -> int:
    return problem.m if along == "m" else problem.n


def _run_with_rest(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    rest: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    """Two kernels, of which the second writes into the result of the first."""
    m, n = problem.m, problem.n
    a, b = aligned(a), aligned(b)
    whole = Region(0, m, 0, n)
    if config.rest_along == "m":
        first, second = (dataclasses.replace(whole, **{end: config.rest_from}) for end in _ROWS)
    else:
        first, second = (dataclasses.replace(whole, **{end: config.rest_from}) for end in _COLUMNS)
    steps = (rest.step_n, rest.step_m) if rest.swap else (rest.step_m, rest.step_n)
    # As far as tiles of both reach.
    reach = [
        start + -(-(end - start) // step) * step
        for start, end, step in zip(
            (second.m, second.n), (second.m_end, second.n_end), steps, strict=True
        )
    ]
    own = -(-m // config.step_m) * config.step_m, -(-n // config.step_n) * config.step_n
    operands = epilogue.padded_operands(extras, *map(max, reach, own))
    config = dataclasses.replace(config, rest=None, rest_from=0, rest_along="m")
    out = _call(problem, epilogue, config, a, b, operands, first)
    return _call(problem, epilogue, rest, a, b, [*operands, out], second)


def _run_in_parts(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    """The kernel leaves sums over parts of k; XLA makes one kernel of adding up and epilogue."""
    sums_problem = dataclasses.replace(problem, out_dtype=np.dtype(problem.accumulator))
    sums = _call(sums_problem, Epilogue(), config, a, b, ()).sum(axis=0)
    return _with_epilogue(problem, epilogue, sums, extras)


def _with_epilogue(
    problem: MatmulProblem, epilogue: Epilogue, sums: jax.Array, extras: Sequence[jax.Array]
) -> jax.Array:
    extras = [jnp.atleast_1d(x) for x in extras]
    residual = extras[-1] if epilogue.residual else None
    every = slice(None)
    values = epilogue.apply(sums, extras, every, every, residual, swapped=False)
    return values.astype(problem.out_dtype)


def _call(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    region: Region | None = None,
) -> jax.Array:
    a, b = aligned(a), aligned(b)
    n = problem.n
    if config.parts > 1:  # What adds up the parts leaves out what is beyond the end of rows.
        n = padded_columns(problem.n, problem.out_dtype.itemsize)
    cropped = None if n == problem.n else problem.n
    problem = dataclasses.replace(problem, n=n)
    if config.swap:
        problem, a, b = problem.swapped(), b, a
        region = None if region is None else region.swapped()
    config = useful(lambda config: MatmulLoop(problem, config, epilogue, region), config)
    if region is not None:
        kernel = _kernel(problem, config, epilogue, MULTIPROCESSORS, region=region)
        return kernel(a, b, *operands)
    result = _kernel(problem, config, epilogue, MULTIPROCESSORS)(a, b, *operands)
    return result if cropped is None else result[..., :cropped]


def useful(loop_of: Callable[[MatmulConfig], MatmulLoop], config: MatmulConfig) -> MatmulConfig:
    """A configuration without what is of no use to a loop with it: blocks that share last tiles
    where none are left for them, and stages that no block has steps along k for."""
    if config.last_parts > 1 and not _shares_last(loop_of(config)):
        config = dataclasses.replace(config, last_parts=1)
    loop, at_once = loop_of(config), resident_clusters(config.cluster_blocks, MULTIPROCESSORS)
    if config.split_k > 1:
        at_once = loop.items
    parts = config.parts * config.split_k
    steps = -(-loop.items // at_once) * -(-loop.k_steps // parts)
    return dataclasses.replace(config, stages=max(2, min(config.stages, steps)))


def _shares_last(loop: MatmulLoop) -> bool:
    """Whether tiles are left that the blocks of clusters can share."""
    parts = loop.config.last_parts
    clusters = MULTIPROCESSORS // parts
    _, left = loop.rounds_before_shared(clusters)
    return 0 < left <= clusters and loop.k_steps >= parts


@functools.lru_cache(maxsize=256)
def _any_rows(
    problem: MatmulProblem, config: AnyRowsConfig, epilogue: Epilogue
) -> Callable[..., jax.Array]:
    """The kernel that reads any rows."""
    if isinstance(config, JoinedRowsConfig):
        return _joined_rows(problem, config, epilogue)
    if isinstance(config, FewRowsConfig):
        return build_few_rows(problem, config, epilogue)
    return build_direct(problem, config, epilogue)


def _joined_rows(
    problem: MatmulProblem, config: JoinedRowsConfig, epilogue: Epilogue
) -> Callable[..., jax.Array]:
    """The kernel that reads several rows as one; with copies for several matrices at once."""
    alone = jax.custom_batching.custom_vmap(
        build_joined_rows(problem, config, epilogue, MULTIPROCESSORS)
    )

    def with_copies(a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        return _run(problem, epilogue, default_config(problem_sizes(problem)), a, b, extras)

    def several(size: int, batched: Sequence[bool], *operands: jax.Array) -> Any:
        axes = [0 if one else None for one in batched]
        return jax.vmap(with_copies, axes, axis_size=size)(*operands), True

    alone.def_vmap(several)
    kernel: Callable[..., jax.Array] = jax.jit(alone)
    return kernel


_kernel = functools.lru_cache(maxsize=256)(build)
_outer_kernel = functools.lru_cache(maxsize=256)(build_outer)
_short_kernel = functools.lru_cache(maxsize=256)(build_short)
