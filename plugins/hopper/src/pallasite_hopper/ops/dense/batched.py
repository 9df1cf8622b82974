"""Many products by one kernel, for ``jax.vmap``: its blocks go through the tiles of all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
from pallasite_hopper.ops.dense.turned import copying
from pallasite_std.api import (
    MATRIX,
    Batch,
    Epilogue,
    MatmulCall,
    MatmulProblem,
    mapped_product,
    padded_columns,
)

_LARGEST_GRID = 2**31 - 1
"""Items that the index of one counts."""

type _Places = tuple[int, ...]

_MOST_DIMENSIONS = 5
"""Of an array, that the copy engine reads and writes."""


def run_many(call: MatmulCall, batch: Batch, operands: Sequence[jax.Array]) -> jax.Array:
    """So many matmuls; see ``pallasite_std.ops.dense.arrangement.RunMany``.

    Rows of the operands and of the result that are not multiples of 16 bytes, and configurations
    that divide k, have a kernel for one product with a further grid dimension.
    """
    problem, count = call.problem, batch.count
    given = tuple(operands)
    if call.config is None and turned_by_xla(problem, count):
        return mapped_product(by_xla, call, batch, given)
    a, b, *extras = operands
    of_a, of_b = batch.a, batch.b
    if problem.size != 2:  # The tensor cores read such elements along k only.
        if problem.transpose_a:
            a, of_a = _turned(a, of_a)
        if not problem.transpose_b:
            b, of_b = _turned(b, of_b)
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    most = max(map(len, (of_a, of_b, batch.out)))
    config = _config(problem, call.config, count) if most <= _MOST_DIMENSIONS else None
    if call.config is None and not extras and call.epilogue == Epilogue():
        joined = _joined(call, batch, config, given)
        if joined is not None:
            return joined
    if config is None:
        return mapped_product(run, call, batch, given)
    m_multiple, n_multiple = config.step_m, config.step_n
    if config.swap:
        m_multiple, n_multiple = n_multiple, m_multiple
    extras = _padded(call.epilogue, count, batch.extras, extras, m_multiple, n_multiple)
    if config.swap:
        problem, a, b, of_a, of_b = problem.swapped(), b, a, of_b, of_a
    batch = dataclasses.replace(batch, a=of_a, b=of_b)
    config = useful(lambda one: BatchedLoop(problem, one, call.epilogue, batch), config)
    result: jax.Array = _kernel(problem, config, call.epilogue, batch)(a, b, *extras)
    return result


def _joined(
    call: MatmulCall, batch: Batch, config: MatmulConfig | None, operands: Sequence[jax.Array]
) -> jax.Array | None:
    """One product of the rows or columns of all matrices of an operand, if all have the other one
    and that takes less time, with the copies that bring them next to each other; without a
    configuration of a kernel for all, if they lie between the rows of each other.

    Tiles of matrices with few columns are mostly empty, and the other operand is read for each.
    """
    problem, count, numbers = call.problem, batch.count, range(len(batch.sizes))
    shared = [not any(one != MATRIX for one in places) for places in (batch.a, batch.b)]
    if sum(shared) != 1:
        return None
    position = 0 if shared[1] else 1  # Of the operand with several matrices.
    places = (batch.a, batch.b)[position]
    depth_first = (problem.transpose_a, not problem.transpose_b)[position]
    m, n = (problem.m * count, problem.n) if position == 0 else (problem.m, problem.n * count)
    joined = dataclasses.replace(problem, m=m, n=n)
    sizes = problem_sizes(joined)

    def copies(order: _Places, wanted: _Places) -> float:
        copied = copying(problem.k * (m, n)[position] * problem.size) * (places != order)
        return copied + copying(m * n * sizes.out_size) * (batch.out != wanted)

    before, after = (*numbers, MATRIX), (MATRIX, *numbers)
    order, wanted = min(
        (
            (
                (MATRIX, *own) if depth_first else (*own, MATRIX),
                (*own, MATRIX) if position == 0 else (MATRIX, *own),
            )
            for own in (before, after)
        ),
        key=lambda one: copies(*one),
    )
    if config is None:
        if places != order or places[0] != MATRIX:
            return None
    else:
        if problem.size != 2:
            return None
        alone = dataclasses.replace(problem_sizes(problem), batch=count)
        time = nanoseconds(default_config(sizes, this_chip()), sizes) + copies(order, wanted)
        if time >= nanoseconds(config, alone):
            return None
    arrays = list(operands)
    shape = (problem.k, -1) if depth_first else (-1, problem.k)
    arrays[position] = _ordered(arrays[position], places, order).reshape(shape)
    result = run(dataclasses.replace(call, problem=joined), arrays[0], arrays[1], ())
    extents = iter((problem.m, problem.n))
    result = result.reshape([next(extents) if x == MATRIX else batch.sizes[x] for x in wanted])
    return _ordered(result, wanted, batch.out)


def _ordered(array: jax.Array, places: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """An array with its dimensions in another order, in which those of matrices keep theirs."""
    matrix = iter(axis for axis, one in enumerate(places) if one == MATRIX)
    return jnp.transpose(
        array, [next(matrix) if one == MATRIX else places.index(one) for one in order]
    )


def _turned(array: jax.Array, places: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """An array whose matrices are transposed, behind all other dimensions, and where these are."""
    first = [axis for axis, one in enumerate(places) if one != MATRIX]
    rows, columns = (axis for axis, one in enumerate(places) if one == MATRIX)
    order = (*first, columns, rows)
    return jnp.transpose(array, order), tuple(places[axis] for axis in order)


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
      batch: where the operands and the result have the dimensions of the products.
    """

    def __init__(
        self, problem: MatmulProblem, config: MatmulConfig, epilogue: Epilogue, batch: Batch
    ):
        super().__init__(problem, config, epilogue)
        self.batch = batch

    @property
    def several(self) -> tuple[int, ...]:
        return (self.batch.count,)

    def out_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        extents = iter((rows, columns))
        sizes = self.batch.sizes
        return tuple(next(extents) if one == MATRIX else sizes[one] for one in self.batch.out)

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        window = self._placed(self.batch.a, item.part, window)
        super().fetch_left(a, item, window, smem, full, share)

    def right_window(self, item: Item, window: tuple[Any, Any]) -> tuple[Any, ...]:
        return self._placed(self.batch.b, item.part, window)

    def out_window(self, item_part: Any, window: tuple[Any, Any]) -> tuple[Any, ...]:
        return self._placed(self.batch.out, item_part, window)

    def _placed(self, places: Sequence[int], item_part: Any, window: Any) -> tuple[Any, ...]:
        """The part of an array that is the window of a product's matrix."""
        sizes, indices, rest = self.batch.sizes, dict[int, Any](), item_part
        for number in reversed(range(len(sizes))):
            size = jnp.int32(sizes[number])
            indices[number] = lax.rem(rest, size) if number else rest
            rest = lax.div(rest, size)
        matrix = iter(window)
        return tuple(next(matrix) if one == MATRIX else indices[one] for one in places)

    def epilogue_operands(self, operands: Any, item_part: Any) -> Any:
        return [
            one.at[item_part] if mark else one
            for one, mark in zip(operands, self.batch.extras, strict=True)
        ]


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: MatmulProblem, config: MatmulConfig, epilogue: Epilogue, batch: Batch
) -> Callable[..., jax.Array]:
    loop = BatchedLoop(problem, config, epilogue, batch)
    return build(problem, config, epilogue, MULTIPROCESSORS, loop, name="batched_matmul")
