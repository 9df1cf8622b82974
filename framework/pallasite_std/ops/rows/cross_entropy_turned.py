"""The kernels of softmax cross-entropy of logits that lie across their rows.

Forward, a block goes over a part of the classes of neighbouring rows, each of which lanes keep a
maximum and a sum of exponentials of (see :mod:`.cross_entropy_kernels`). Backward, the gradient
lies as the logits do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.cross_entropy_kernels import (
    LOWEST,
    CrossEntropy,
    combined,
    gradient_of,
    loss_of,
)
from pallasite_std.ops.rows.elementwise import elementwise_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows, parameters
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, size_of
from pallasite_std.ops.rows.turned import Turned

_LINE = 128
"""Bytes of neighbouring rows that a block reads of each class."""

_ELEMENTS = 32
"""Of a lane at a time."""

_RESIDENT = 8
"""Blocks of a multiprocessor."""

_COMBINED = 16 * LANES
"""Parts of rows that a block combines, about."""

_LEAST_STEPS = 4
"""Of a block, if classes are divided among several."""


@functools.lru_cache(maxsize=512)
def forward(
    loss: CrossEntropy, problem: Turned, dtype: np.dtype[Any], multiprocessors: int
) -> Callable[..., Any] | None:
    """A function of logits (batch, classes, rows) and labels (rows of all batches,); None if these
    are fewer than lanes read.

    Returns: losses, maxima and log-sum-exps relative to these, float32 (rows of all batches,).
    """
    rows, columns, size = problem.rows, problem.columns, size_of(dtype)
    height = min(_LINE // size, 1 << (rows.bit_length() - 1))
    if height * size < VECTOR_BYTES:
        return None
    # Lanes have neighbouring rows of one class at a time.
    at_once = LANES * VECTOR_BYTES // (height * size)
    groups = _ELEMENTS * size // VECTOR_BYTES
    width = at_once * groups
    if columns < width:
        return None
    strips, steps = problem.batch * -(-rows // height), columns // width
    parts = min(-(-_RESIDENT * multiprocessors // strips), max(1, steps // _LEAST_STEPS))
    each = -(-steps // parts)
    parts = -(-steps // each)
    count = 3 if loss.smoothing else 2

    def body(x: Any, *results: Any) -> None:
        strip, part = lax.axis_index("strip"), lax.axis_index("part")
        down = -(-rows // height)
        batch = lax.div(strip, down) if problem.batch > 1 else 0
        begin = (lax.rem(strip, down) if problem.batch > 1 else strip) * height
        row = lax.min(begin, rows - height)

        def add(first: Any, carry: Any, exists: Any = None) -> Any:
            most, sums, *plain = carry
            logits = loss.logits(
                x[batch, pl.ds(first, width), pl.ds(row, height)].astype(jnp.float32)
            )
            shape = (groups, at_once, height)
            logits = logits.reshape(shape)
            if exists is not None:
                logits = jnp.where(exists.reshape(shape), logits, LOWEST)
            new = jnp.maximum(most, jnp.max(logits, axis=0))
            powers = jnp.exp(logits - lax.broadcast_in_dim(new, shape, (1, 2)))
            if exists is not None:
                there = exists.reshape(shape)
                powers, logits = jnp.where(there, powers, 0.0), jnp.where(there, logits, 0.0)
            sums = sums * jnp.exp(most - new) + jnp.sum(powers, axis=0)
            return new, sums, *(one + jnp.sum(logits, axis=0) for one in plain)

        def step(number: Any, carry: Any) -> Any:
            return add(pl.multiple_of(number * width, width), carry)

        zero = jnp.zeros((at_once, height), jnp.float32)
        carry: Any = (jnp.full((at_once, height), LOWEST, jnp.float32), *[zero] * (count - 1))
        last = lax.min((part + 1) * each, jnp.int32(steps))
        carry = lax.fori_loop(part * each, last, step, carry)
        if columns % width:

            def rest(carry: Any) -> Any:
                places = lax.broadcasted_iota(jnp.int32, (width, height), 0)
                return add(columns - width, carry, places >= width - columns % width)

            carry = lax.cond(part == parts - 1, rest, lambda carry: carry, carry)
        most, sums, *plain = carry
        largest = jnp.max(most, axis=0)
        shares = jnp.exp(most - lax.broadcast_in_dim(largest, most.shape, (1,)))
        values = largest, jnp.sum(sums * shares, axis=0), *(jnp.sum(one, axis=0) for one in plain)
        own = begin <= row + lax.broadcasted_iota(jnp.int32, (height,), 0)
        for ref, value in zip(results, values, strict=True):
            window = ref.at[part, batch, pl.ds(row, height)]
            if rows % height:
                pltriton.store(window, value, mask=own)
            else:
                window[...] = value

    partial = jax.ShapeDtypeStruct((parts, problem.batch, rows), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=(partial,) * count,
        grid=(strips, parts),
        grid_names=("strip", "part"),
        kernel_name="cross_entropy",
        compiler_params=_parameters(dtype),
    )

    combine = _combine(loss, problem, parts, count)
    return lambda x, labels: combine(x, labels, *kernel(x))


def _combine(loss: CrossEntropy, problem: Turned, parts: int, count: int) -> Callable[..., Any]:
    """The kernel that combines parts, each (parts, batch, rows)."""
    rows, columns = problem.rows, problem.columns
    height = min(max(8, 1 << (_COMBINED // parts).bit_length()), LANES, rows)
    down = -(-rows // height)

    def body(x: Any, labels: Any, *refs: Any) -> None:
        *sources, losses, maxima, logarithms = refs
        number = lax.axis_index("rows")
        batch = lax.div(number, down) if problem.batch > 1 else 0
        begin = (lax.rem(number, down) if problem.batch > 1 else number) * height
        row = lax.min(begin, rows - height)
        found = [one[:, batch, pl.ds(row, height)] for one in sources]
        largest, above, mean = combined(found, columns, 0)
        window = pl.ds(batch * rows + row, height)
        label, numbers = labels[window], row + lax.broadcasted_iota(jnp.int32, (height,), 0)
        chosen = x[batch, jnp.clip(label, 0, columns - 1), numbers].astype(jnp.float32)
        value = loss_of(loss, label, largest, above, chosen, mean)
        for ref, one in ((losses, value), (maxima, largest), (logarithms, above)):
            if rows % height:
                pltriton.store(ref.at[window], one, mask=numbers >= begin)
            else:
                ref[window] = one

    each = jax.ShapeDtypeStruct((problem.batch * rows,), jnp.float32)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=(each,) * 3,
        grid=(problem.batch * down,),
        grid_names=("rows",),
        kernel_name="cross_entropy_of_parts",
    )
    return kernel


def _parameters(dtype: Any) -> Any:
    return plgpu.CompilerParams(approx_math=size_of(dtype) < 4, min_blocks=_RESIDENT)


@functools.lru_cache(maxsize=512)
def backward(
    loss: CrossEntropy, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    """The kernel, a function of logits (columns, rows), and of labels, maxima, log-sum-exps above
    these and the losses' cotangents (rows,).

    Returns: the gradient by the logits, like them.
    """

    def work(block: Rows, chunk: Chunk, x: Any, *refs: Any) -> None:
        *vectors, d_x = refs
        place = pl.ds(chunk.first, chunk.width)

        def of_rows(one: Any) -> Any:
            return lax.broadcast_in_dim(one[place], chunk.shape, (len(chunk.shape) - 1,))

        classes: Any = block.first
        if len(chunk.shape) > 1:
            classes = classes + lax.broadcasted_iota(jnp.int32, chunk.shape, 0)
        value = gradient_of(loss, columns, chunk.load(x), classes, *map(of_rows, vectors))
        chunk.store(d_x, value)

    out = jax.ShapeDtypeStruct((columns, rows), dtype)
    return elementwise_kernel(
        work, columns, rows, [out], "cross_entropy_gradient", parameters(dtype)
    )
