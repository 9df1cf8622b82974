"""Many products by one kernel, for ``jax.vmap``: its blocks go through the tiles of all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_hopper.ops.dense.choice import batched_config, default_config, this_chip
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import nanoseconds
from pallasite_hopper.ops.dense.kernel import Item, MatmulLoop, build
from pallasite_hopper.ops.dense.run import (
    MULTIPROCESSORS,
    by_xla,
    problem_sizes,
    run,
    turned_by_xla,
    useful,
)
from pallasite_std.api import Epilogue, MatmulCall, MatmulProblem, mapped_product, padded_columns

_LARGEST_GRID = 2**31 - 1
"""Items that the index of one counts."""


def run_many(
    call: MatmulCall, count: int, stacked: tuple[bool, ...], operands: Sequence[jax.Array]
) -> jax.Array:
    """So many matmuls; see ``pallasite_std.ops.dense.batching.RunMany``.

    Rows of the operands and of the result that are not multiples of 16 bytes, and configurations
    that divide k, have a kernel for one product with a further grid dimension.
    """
    problem = call.problem
    a, b, *extras = operands
    if call.config is None and turned_by_xla(problem, count):
        return mapped_product(by_xla, call, count, stacked, tuple(operands))
    if problem.size != 2:  # The tensor cores read such elements along k only.
        a = jnp.swapaxes(a, -1, -2) if problem.transpose_a else a
        b = b if problem.transpose_b else jnp.swapaxes(b, -1, -2)
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    config = _config(problem, call.config, count)
    if config is None:
        return mapped_product(run, call, count, stacked, tuple(operands))
    m_multiple, n_multiple = config.step_m, config.step_n
    if config.swap:
        m_multiple, n_multiple = n_multiple, m_multiple
    extras = _padded(call.epilogue, count, stacked[2:], extras, m_multiple, n_multiple)
    left, right, *others = stacked
    if config.swap:
        problem, a, b, left, right = problem.swapped(), b, a, right, left
    marks = left, right, tuple(others)
    config = useful(lambda one: BatchedLoop(problem, one, call.epilogue, count, *marks), config)
    result: jax.Array = _kernel(problem, config, call.epilogue, count, *marks)(a, b, *extras)
    return result


def _config(problem: MatmulProblem, given: MatmulConfig | None, count: int) -> MatmulConfig | None:
    """The configuration of the kernel; None if there is no kernel for all products."""
    rows = (
        (problem.m if problem.transpose_a else problem.k, problem.size),
        (problem.k if problem.transpose_b else problem.n, problem.size),
        (problem.n, problem.out_dtype.itemsize),
    )
    if any(padded_columns(columns, size) != columns for columns, size in rows):
        return None
    if given is not None:
        return given if _is_whole(given) else None
    sizes = dataclasses.replace(problem_sizes(problem), batch=count)
    config = batched_config(sizes)
    tiles = -(-problem.m // 8) * -(-problem.n // 8)
    if config is None or tiles * count > _LARGEST_GRID:
        return None
    one = dataclasses.replace(sizes, batch=1)
    chip = this_chip()
    alone = nanoseconds(default_config(one, chip), one)
    return config if nanoseconds(config, sizes) <= count * alone else None


def _is_whole(config: MatmulConfig) -> bool:
    """Whether each tile is one block's, and blocks may have several."""
    shared = max(config.parts, config.split_k, config.last_parts, config.resident) > 1
    return not (shared or config.epilogue_in_stages or config.rest is not None)


def _padded(
    epilogue: Epilogue,
    count: int,
    stacked: Sequence[bool],
    extras: Sequence[jax.Array],
    m_multiple: int,
    n_multiple: int,
) -> list[jax.Array]:
    def padded(*extras: jax.Array) -> list[jax.Array]:
        return epilogue.padded_operands(extras, m_multiple, n_multiple)

    if not any(stacked):
        return padded(*extras)
    # What all products share stays so.
    axes = [0 if one else None for one in stacked]
    found: list[jax.Array] = jax.vmap(padded, axes, list(axes), axis_size=count)(*extras)
    return found


class BatchedLoop(MatmulLoop):
    """The kernel's body for several products.

    Args:
      count: of the products.
      left, right, others: whether the operands, and those of the epilogue, have a dimension of the
        products before their own.
    """

    def __init__(
        self,
        problem: MatmulProblem,
        config: MatmulConfig,
        epilogue: Epilogue,
        count: int,
        left: bool,
        right: bool,
        others: Sequence[bool],
    ):
        super().__init__(problem, config, epilogue)
        self.count, self.left, self.right, self.others = count, left, right, others

    @property
    def several(self) -> tuple[int, ...]:
        return (self.count,)

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        a = a.at[item.part] if self.left else a
        super().fetch_left(a, item, window, smem, full, share)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        b = b.at[item.part] if self.right else b
        super().fetch_right(b, item, depth, smem, full, share)

    def epilogue_operands(self, operands: Any, item_part: Any) -> Any:
        return [
            one.at[item_part] if mark else one
            for one, mark in zip(operands, self.others, strict=True)
        ]


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: MatmulProblem,
    config: MatmulConfig,
    epilogue: Epilogue,
    count: int,
    left: bool,
    right: bool,
    others: tuple[bool, ...],
) -> Callable[..., jax.Array]:
    loop = BatchedLoop(problem, config, epilogue, count, left, right, others)
    return build(problem, config, epilogue, MULTIPROCESSORS, loop, name="batched_matmul")
