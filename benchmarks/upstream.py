"""JAX's own kernels for Hopper, with the configurations among which they are tuned.

The searches go in steps: tiles first, then what refines the best of them. ``"full"`` tries all that
upstream's own tuning scripts try, and clusters as well.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import contest
import jax
import jax.numpy as jnp

SEARCHES = ("one", "quick", "full")


def climb(
    make: Callable[[Any], contest.Candidate],
    first: Iterable[Any],
    *refine: Callable[[Any], Iterable[Any]],
) -> contest.Candidates:
    """Yields candidates for the first configurations, then for refinements of the best so far."""
    best, best_milliseconds, seen = None, math.inf, set()
    for options in (lambda _: first, *refine):
        for config in options(best):
            if config in seen:
                continue
            seen.add(config)
            milliseconds = yield make(config)
            if milliseconds is not None and milliseconds < best_milliseconds:
                best, best_milliseconds = config, milliseconds
        if best is None:
            return


def label(config: Any) -> str:
    """A configuration in one line: the fields that are not at their defaults."""
    fields = dataclasses.fields(config)
    pairs = [(f.name, getattr(config, f.name), f.default) for f in fields]
    return " ".join(f"{name}={value}" for name, value, default in pairs if value != default)


def matmul_configs(m: int, search: str) -> tuple[list[Any], list[Callable[[Any], list[Any]]]]:
    """Configurations of the product kernel for a number of rows, and refinements of one."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as upstream

    config, (rows, columns) = upstream.TuningConfig, upstream.MatmulDimension
    if m <= SKINNY:
        return _skinny_configs(m, search, config, rows, columns), []
    wide = config(128, 128, 64, 4, grid_tile_width=8, wg_dimension=columns)
    replace = dataclasses.replace
    tall = replace(wide, wg_dimension=rows)
    if search == "one":
        return [wide], []
    if search == "full":
        grid = itertools.product(
            (128, 256), (64, 128), (rows, columns), (4, 8, 16), (rows, columns), (None,)
        )
        clusters = itertools.product(
            (128,), (128,), (rows, columns), (4, 8, 16), (rows, columns), (rows, columns)
        )
        return [
            config(tile_m, tile_n, 64, 4, grid_minor_dim=minor, grid_tile_width=width,
                   wg_dimension=wg, cluster_dimension=cluster)
            for tile_m, tile_n, minor, width, wg, cluster in itertools.chain(grid, clusters)
        ], []  # fmt: skip
    first = [
        wide,
        tall,
        replace(wide, cluster_dimension=rows),
        replace(wide, cluster_dimension=columns),
        replace(tall, cluster_dimension=rows),
        replace(tall, cluster_dimension=columns),
    ]

    def order(best: Any) -> list[Any]:
        return [
            replace(best, grid_minor_dim=minor, grid_tile_width=width)
            for minor, width in itertools.product((rows, columns), (16, 8, 4))
        ]

    return first, [order]


SKINNY = 128
"""At most so many rows: one block has all of them."""


def _skinny_configs(m: int, search: str, config: Any, rows: Any, columns: Any) -> list[Any]:
    """Configurations for 64 or 128 rows. The warpgroups' parts have 64 columns at least."""
    if m == 64:  # tile_m, tile_n, tile_k, steps, which of its sides the warpgroups share
        shapes = [
            (64, 64, 128, 4, columns),
            (64, 64, 64, 8, columns),
            (64, 128, 64, 4, columns),
        ]
    else:
        shapes = [
            (64, 64, 128, 4, rows),
            (64, 64, 64, 8, rows),
            (64, 128, 64, 6, rows),
            (64, 128, 128, 3, rows),
            (128, 64, 64, 6, columns),
        ]
    if search == "one":
        shapes = shapes[:1]
    clusters = [None, columns] if search == "full" else [None]
    return [
        config(tile_m, tile_n, tile_k, steps, grid_minor_dim=rows, wg_dimension=wg,
               cluster_dimension=cluster)
        for cluster in clusters
        for tile_m, tile_n, tile_k, steps, wg in shapes
    ]  # fmt: skip


def matmul(config: Any, module: Any = None) -> Callable[..., Any]:
    """The product kernel with a configuration; ``module`` is JAX's or has the same source."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

    upstream = module or hopper_matmul_mgpu
    return lambda a, b: upstream.matmul(a, b, None, config)


def matmul_candidates(m: int, search: str) -> contest.Candidates:
    """The product kernel, tuned. It takes 64 or 128 rows: rows of zeros are added beforehand."""

    def make(choice: tuple[int, Any]) -> contest.Candidate:
        rows, config = choice
        function = jax.jit(matmul(config))
        if m == rows:
            return contest.Candidate(label(config), function)
        return contest.Candidate(
            f"{label(config)}, padded to {rows} rows beforehand",
            function,
            lambda a, b: (jnp.pad(a, ((0, rows - m), (0, 0))), b),
            lambda c: c[:m],
        )

    if m > SKINNY:
        first, refine = matmul_configs(m, search)
        steps = [lambda best, f=f: [(m, config) for config in f(best[1])] for f in refine]
        return climb(make, [(m, config) for config in first], *steps)
    choices = [
        (rows, config)
        for rows in (128, 64)
        if rows >= m
        for config in matmul_configs(rows, search)[0]
    ]
    return climb(make, choices[:1] if search == "one" else choices)


FORWARD_BLOCKS: dict[int, Sequence[tuple[int, int, int]]] = {
    64: ((64, 256, 2), (64, 128, 2), (128, 128, 2), (64, 128, 4), (128, 64, 4)),
    128: ((64, 128, 2), (128, 64, 2), (64, 128, 3), (64, 64, 4), (128, 128, 2)),
    256: ((64, 64, 2),),  # nothing larger fits shared memory
}
"""For each head dimension: block_q, block_kv, steps in flight."""

BACKWARD_BLOCKS: dict[int, Sequence[tuple[int, int, int, int, int]]] = {
    64: (
        (64, 64, 64, 64, 2),
        (64, 128, 128, 64, 2),
        (128, 128, 128, 128, 2),
        (64, 128, 64, 128, 2),
        (128, 64, 64, 128, 2),
    ),
    128: (
        (64, 64, 64, 64, 2),
        (64, 128, 128, 64, 2),
        (64, 128, 64, 64, 2),
        (128, 64, 64, 64, 2),
        (64, 64, 64, 64, 1),
    ),
}
"""For each head dimension: block_q_dq, block_kv_dq, block_q_dkv, block_kv_dkv, warpgroups."""


def attention_configs(
    head_dim: int, causal: bool, backward: bool, search: str, sequence: int = 1 << 30
) -> list[Any]:
    """Configurations of the attention kernels that fit a sequence."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as upstream

    forward = [
        upstream.TuningConfig(*blocks, causal=causal)
        for blocks in FORWARD_BLOCKS[head_dim]
        if sequence % blocks[1] == 0 and sequence % (2 * blocks[0]) == 0
    ]
    if search == "full" and not backward:
        grid = itertools.product((64, 128), (64, 128, 256), (2, 3, 4, 5))
        forward += [upstream.TuningConfig(*blocks, causal=causal) for blocks in grid]
    if not backward:
        return forward[:1] if search == "one" else list(dict.fromkeys(forward))
    blocks = list(BACKWARD_BLOCKS[head_dim])
    if search == "full":
        sizes = (64, 128)
        blocks += list(itertools.product(sizes, sizes, sizes, sizes, (1, 2)))
    result = [
        dataclasses.replace(
            forward[0], block_q_dq=q, block_kv_dq=kv, block_q_dkv=q2, block_kv_dkv=kv2,
            compute_wgs_bwd=warpgroups,
        )
        for q, kv, q2, kv2, warpgroups in dict.fromkeys(blocks)
    ]  # fmt: skip
    return result[:1] if search == "one" or causal else result


def attention(config: Any, pipelined: bool = False, module: Any = None) -> Callable[..., Any]:
    """The attention kernel with a configuration; it does not scale the logits.

    ``module`` is JAX's or has the same source.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    upstream = module or attention_mgpu
    if pipelined:
        return functools.partial(upstream.attention_with_pipeline_emitter, config=config)
    return lambda q, k, v: upstream.attention(q, k, v, config)


def as_float16(*arrays: jax.Array, scale: float) -> tuple[jax.Array, ...]:
    """What the attention kernels take: queries that are scaled beforehand, all in float16."""
    first, *others = arrays
    scaled = (first.astype(jnp.float32) * scale).astype(jnp.float16)
    return scaled, *(array.astype(jnp.float16) for array in others)


def attention_candidate(
    config: Any, head_dim: int, pipelined: bool = False, module: Any = None
) -> contest.Candidate:
    """A forward kernel."""
    name = ", with its pipeline emitter" if pipelined else ""
    return contest.Candidate(
        f"float16 {label(config)}{name}",
        jax.jit(attention(config, pipelined, module)),
        functools.partial(as_float16, scale=head_dim**-0.5),
    )


def attention_candidates(
    sequence: int, head_dim: int, causal: bool, search: str
) -> contest.Candidates:
    """The forward kernels, tuned."""

    def make(choice: tuple[Any, bool]) -> contest.Candidate:
        config, pipelined = choice
        return attention_candidate(config, head_dim, pipelined)

    def emitter(best: tuple[Any, bool]) -> list[tuple[Any, bool]]:
        return [] if causal or search == "one" else [(best[0], True)]

    configs = attention_configs(head_dim, causal, False, search, sequence)
    return climb(make, [(config, False) for config in configs], emitter)


def attention_gradient_candidate(
    config: Any, head_dim: int, module: Any = None
) -> contest.Candidate:
    """The kernels of the gradient; the forward pass before is not timed."""
    scale = head_dim**-0.5
    forward = jax.jit(lambda q, k, v: jax.vjp(attention(config, False, module), q, k, v))

    def prepare(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        _, pull = forward(*as_float16(q, k, v, scale=scale))
        return pull, do.astype(jnp.float16)

    def output(gradients: Any) -> Any:
        dq, dk, dv = gradients
        return dq.astype(jnp.float32) * scale, dk, dv

    backward = jax.jit(lambda pull, do: pull(do))
    return contest.Candidate(f"float16 {label(config)}", backward, prepare, output)


def attention_gradient_candidates(
    sequence: int, head_dim: int, causal: bool, search: str
) -> contest.Candidates:
    """The kernels of the gradient, tuned."""
    make = functools.partial(attention_gradient_candidate, head_dim=head_dim)
    return climb(make, attention_configs(head_dim, causal, True, search, sequence))
