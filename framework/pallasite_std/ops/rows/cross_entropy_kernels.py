"""The kernels of softmax cross-entropy.

Forward, a row is read once, however long: each lane keeps the maximum of what it has read and a sum
of exponentials relative to it (M. Milakov and N. Gimelshein, arXiv 1805.02867), over groups of
elements, so that a sum is rescaled once for a group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.aligned import AlignedRow
from pallasite_std.ops.rows.elementwise import elementwise_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows, parameters, row_kernel
from pallasite_std.ops.rows.segments import segment_kernel
from pallasite_std.ops.rows.tiling import (
    VECTOR_BYTES,
    Registers,
    size_of,
    streaming_tiling,
)

LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """One loss.

    Attributes:
      smoothing: share of the target distribution that all classes have alike.
      z_loss: factor of the squared log-sum-exp.
      soft_cap: of the logits, or None.
      ignored: the label of rows without a loss, or None.
    """

    smoothing: float
    z_loss: float
    soft_cap: float | None
    ignored: int | None

    def logits(self, x: Any) -> Any:
        """What the softmax is taken of."""
        return x if self.soft_cap is None else self.soft_cap * jnp.tanh(x / self.soft_cap)


@functools.lru_cache(maxsize=512)
def forward(
    loss: CrossEntropy, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    """The kernel, a function of logits (rows, columns) and labels (rows,).

    Returns: losses, maxima, and log-sum-exps relative to these, float32 (rows,). Their sums would
    have few digits of the softmax where all logits are far from zero.
    """
    registers, vector = Registers(), VECTOR_BYTES // size_of(dtype)
    tiling = streaming_tiling(rows, columns, registers)
    flat = columns % vector > 0 and not tiling.resident and rows * columns < 2**31
    # What is not in whole chunks is read after them.
    flat = flat and (columns - vector + 1) % tiling.chunk < columns // 8

    def body(block: Rows, x: Any, labels: Any, losses: Any, maxima: Any, logarithms: Any) -> None:
        if flat:
            block = AlignedRow(block, rows, columns, vector)
        largest, total, mean = _log_sum_exp(block, loss, x, columns)
        above = jnp.log(total)
        label = labels[block.place]
        chosen = block.elements(x, jnp.clip(label, 0, columns - 1))
        block.store(losses, loss_of(loss, label, largest, above, chosen, mean))
        block.store(maxima, largest)
        block.store(logarithms, above)

    each = jax.ShapeDtypeStruct((rows,), jnp.float32)
    exchanges = 3 if loss.smoothing else 2
    params = parameters(dtype)
    if flat:
        # As many as of rows that begin at whole vectors.
        least = 10 if tiling.threads == 1 else 8 // tiling.threads
        params = dataclasses.replace(params, min_blocks=least)
    kernel = row_kernel(body, rows, tiling, [each] * 3, "cross_entropy", exchanges, params)
    return (lambda x, labels: kernel(x.reshape(-1), labels)) if flat else kernel


def loss_of(
    loss: CrossEntropy, label: Any, largest: Any, above: Any, chosen: Any, mean: Any
) -> Any:
    """The loss of rows, given the label of each, its maximum, the log-sum-exp above that, the logit
    of the label and the mean.

    Logits may all be far from zero, where the log-sum-exp itself has few digits of the loss.
    """
    chosen = loss.logits(chosen)
    value = above + (largest - chosen)
    if mean is not None:
        value = value + loss.smoothing * (chosen - mean)
    if loss.z_loss:
        logarithm = above + largest
        value = value + loss.z_loss * logarithm * logarithm
    return value if loss.ignored is None else jnp.where(label == loss.ignored, 0.0, value)


def combined(parts: Sequence[Any], columns: int, axis: int) -> tuple[Any, Any, Any]:
    """Maxima, log-sum-exps above these, and means or None, of rows whose parts along an axis have
    maxima, sums of exponentials relative to these and, if there are means, sums of logits."""
    most, totals, *sums = parts
    largest = jnp.max(most, axis=axis)
    spread = largest
    if most.ndim > 1:
        others = [one for one in range(most.ndim) if one != axis]
        spread = lax.broadcast_in_dim(largest, most.shape, others)
    above = jnp.log(jnp.sum(totals * jnp.exp(most - spread), axis=axis))
    return largest, above, jnp.sum(sums[0], axis=axis) / columns if sums else None


def _log_sum_exp(block: Rows, loss: CrossEntropy, x: Any, columns: int) -> tuple[Any, Any, Any]:
    """Each row's maximum, sum of exponentials relative to it, and (for smoothing) mean."""
    if block.tiling.resident and not isinstance(block, AlignedRow):
        (largest,) = block.reduce(lambda chunk: (loss.logits(chunk.load(x)),), "max")
        largest = jnp.maximum(largest, LOWEST)

        def exponentials(chunk: Chunk) -> tuple[Any, ...]:
            logits = loss.logits(chunk.load(x))
            both = (jnp.exp(logits - block.spread(largest, chunk)), logits)
            return both if loss.smoothing else both[:1]

        total, *rest = block.reduce(exponentials, *("sum",) * (2 if loss.smoothing else 1))
        return largest, total, rest[0] / columns if rest else None

    # A group is what one lane loads: neighbours if rows are aligned to vectors, else every 256th.
    vector = VECTOR_BYTES // x.dtype.itemsize
    aligned = columns % vector == 0 or isinstance(block, AlignedRow)
    size = block.tiling.chunk // (vector if aligned else 8)
    shape, axis = ((size, vector), 1) if aligned else ((8, size), 0)

    def step(chunk: Chunk, carry: Any) -> Any:
        most, sums, all_logits = carry
        logits = loss.logits(chunk.load(x))
        groups = logits.reshape(shape)
        new = jnp.maximum(most, jnp.max(groups, axis=axis))
        exponentials = jnp.exp(groups - lax.broadcast_in_dim(new, shape, (1 - axis,)))
        sums = sums * jnp.exp(most - new) + jnp.sum(exponentials, axis=axis)
        if loss.smoothing:
            all_logits = all_logits + jnp.sum(groups, axis=axis)
        return new, sums, all_logits

    zero = jnp.zeros((size,), jnp.float32)
    start = (jnp.full((size,), LOWEST, jnp.float32), zero, zero)
    # What is left is on its way while the chunks are read.
    ends: list[tuple[Any, Callable[[Any, Any], Any]]]
    if isinstance(block, AlignedRow):
        ends = [
            (loss.logits(one), functools.partial(jnp.where, inside))
            for one, inside in block.ends(x)
        ]
    else:
        tail = block.rest()
        ends = [] if tail is None else [(loss.logits(tail.load(x)), lambda one, other: one)]
    most, sums, all_logits = block.fold(step, start)
    mine = jnp.max(most)
    last = block.thread == block.tiling.threads - 1
    for one, inside in ends:
        mine = jnp.where(last, jnp.maximum(mine, jnp.max(inside(one, LOWEST))), mine)
    (largest,) = block.exchange((mine,), ("max",))
    total, every = jnp.sum(sums * jnp.exp(most - largest)), jnp.sum(all_logits)
    for one, inside in ends:
        exponentials = inside(jnp.exp(one - largest), 0.0)
        total = total + jnp.where(last, jnp.sum(exponentials), 0.0)
        every = every + jnp.where(last, jnp.sum(inside(one, 0.0)), 0.0)
    values = (total, every) if loss.smoothing else (total,)
    total, *means = block.exchange(values, ("sum",) * len(values))
    return largest, total, means[0] / columns if means else None


@functools.lru_cache(maxsize=512)
def segments(
    loss: CrossEntropy, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    """As :func:`forward`, of few long rows: a kernel for segments, and one that combines these."""

    def work(block: Rows, chunk: Chunk, x: Any) -> tuple[Any, ...]:
        logits = loss.logits(chunk.load(x))
        largest = jnp.maximum(jnp.max(logits), LOWEST)
        total = jnp.sum(jnp.exp(logits - largest))
        return (largest, total, jnp.sum(logits)) if loss.smoothing else (largest, total)

    def combine(x: Any, labels: Any, *refs: Any) -> None:
        *parts, losses, maxima, logarithms = refs
        row = lax.axis_index("row")
        largest, above, mean = combined([one[row] for one in parts], columns, 0)
        label = labels[row]
        chosen = x[row, jnp.clip(label, 0, columns - 1)].astype(jnp.float32)
        losses[row] = loss_of(loss, label, largest, above, chosen, mean)
        maxima[row], logarithms[row] = largest, above

    count = 3 if loss.smoothing else 2
    of_segments = segment_kernel(work, rows, columns, count, "cross_entropy", parameters(dtype))
    each = jax.ShapeDtypeStruct((rows,), jnp.float32)
    kernel: Callable[..., Any] = plgpu.kernel(
        combine,
        out_type=(each,) * 3,
        grid=(rows,),
        grid_names=("row",),
        kernel_name="cross_entropy_of_segments",
    )
    return lambda x, labels: kernel(x, labels, *of_segments(x))


def gradient_of(
    loss: CrossEntropy,
    columns: int,
    x: Any,
    classes: Any,
    label: Any,
    largest: Any,
    above: Any,
    d_loss: Any,
) -> Any:
    """The gradient by logits of these classes, given labels, maxima, log-sum-exps relative to these
    and cotangents of their rows."""
    of_row = _of_row(loss, columns, label, largest, above, d_loss)
    return _gradient(loss, columns, x, classes, *of_row)


def _of_row(
    loss: CrossEntropy, columns: int, label: Any, largest: Any, above: Any, d_loss: Any
) -> tuple[Any, ...]:
    """What the gradients of a row's elements have in common."""
    if loss.ignored is not None:
        d_loss = jnp.where(label == loss.ignored, 0.0, d_loss)
    factor = d_loss * (1.0 + 2.0 * loss.z_loss * (above + largest)) if loss.z_loss else d_loss
    # Labels outside of the classes read the nearest one, forward and backward.
    return jnp.clip(label, 0, columns - 1), largest, above, d_loss, factor


def _gradient(
    loss: CrossEntropy,
    columns: int,
    x: Any,
    classes: Any,
    there: Any,
    largest: Any,
    above: Any,
    d_loss: Any,
    factor: Any,
) -> Any:
    logits = loss.logits(x)
    value = jnp.exp((logits - largest) - above) * factor
    value = value - jnp.where(classes == there, d_loss * (1.0 - loss.smoothing), 0.0)
    if loss.smoothing:
        value = value - d_loss * (loss.smoothing / columns)
    if loss.soft_cap is not None:
        share = logits / loss.soft_cap
        value = value * (1.0 - share * share)
    return value


@functools.lru_cache(maxsize=512)
def backward(
    loss: CrossEntropy, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    """The kernel, a function of logits, labels, maxima, log-sum-exps relative to these, and the
    losses' cotangents.

    Returns: the gradient by the logits, like them.
    """

    def work(block: Rows, chunk: Chunk, x: Any, *refs: Any) -> None:
        *vectors, d_x = refs
        of_row = block.row_values(functools.partial(_of_row, loss, columns), chunk, *vectors)
        chunk.store(d_x, _gradient(loss, columns, chunk.load(x), chunk.columns(), *of_row))

    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    name = "cross_entropy_gradient"
    return elementwise_kernel(work, rows, columns, [out], name, parameters(dtype), matrices=1)
