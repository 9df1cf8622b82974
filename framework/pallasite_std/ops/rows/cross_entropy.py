"""``softmax_cross_entropy``: the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    as_array,
    in_32_bits,
    matched,
    positive,
    saturated,
    with_derivatives_of,
    zeros,
)
from pallasite_std.ops.rows import cross_entropy_kernels, cross_entropy_turned
from pallasite_std.ops.rows.arguments import (
    as_rows,
    float_array,
    integer,
    machine,
    small_number,
)
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.cross_entropy_kernels import CrossEntropy
from pallasite_std.ops.rows.segments import reduced_in_segments
from pallasite_std.ops.rows.tiling import VECTOR_BYTES
from pallasite_std.ops.rows.turned import Turned
from pallasite_std.ops.rows.turned_operands import (
    TurnedOperands,
    as_given,
    in_rows,
    turned_operands,
    with_rows_where_mapped,
)


@in_32_bits
def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    ignored_label: int | None = None,
) -> jax.Array:
    """``logsumexp(logits) - logits[label]`` of each row, in one kernel that reads them once.

    Args:
      logits: (..., classes), bfloat16, float16 or float32; it is computed in float32.
      labels: (...), integers. Labels that are no classes count as the nearest one.
      label_smoothing: share, from 0 to 1, of the target distribution that is the same for all
        classes.
      z_loss: factor of ``logsumexp(logits)**2``, which is added to the loss.
      soft_cap: if given, logits are ``soft_cap * tanh(logits / soft_cap)``.
      ignored_label: rows with this label have no loss and no gradient.

    Returns:
      Losses, float32 (...); they have gradients by the logits.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    logits = float_array(logits, "logits")
    labels = as_array(labels, "labels")
    if labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InvalidTypeError(
            "labels do not fit the logits",
            got=f"{labels.dtype}{list(labels.shape)}",
            expected=f"integers of shape {logits.shape[:-1]}",
        )
    if logits.shape[-1] == 0:
        raise InvalidValueError(
            "there are no classes", got=f"logits of shape {logits.shape}", expected="at least one"
        )
    loss = CrossEntropy(
        smoothing=small_number(label_smoothing, "label_smoothing"),
        z_loss=small_number(z_loss, "z_loss"),
        soft_cap=None if soft_cap is None else positive(soft_cap, "soft_cap"),
        ignored=None if ignored_label is None else integer(ignored_label, "ignored_label"),
    )
    if loss.smoothing > 1.0:
        raise InvalidValueError(
            "label_smoothing is no share", got=label_smoothing, expected="a number from 0 to 1"
        )
    logits, labels = matched(logits, saturated(labels))
    if logits.size == 0:
        return zeros(labels.shape, np.dtype(np.float32), logits)
    turned = turned_operands(logits)
    if turned is None:
        result: jax.Array = _loss(loss, logits, labels)
        return result
    result = _turned_loss(loss, turned.problem, *turned.given, labels.reshape(-1))
    return result.reshape(labels.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(loss: CrossEntropy, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(loss, logits, labels)[0]


def _forward(loss: CrossEntropy, logits: Any, labels: Any) -> tuple[jax.Array, Any]:
    turned = turned_operands(logits)
    if turned is not None:
        problem, (lying,) = turned.problem, turned.given
        losses, (_, _, *sums) = _turned_forward(loss, problem, lying, labels.reshape(-1))
        losses, *sums = (one.reshape(labels.shape) for one in (losses, *sums))
        return losses, (turned, labels, *sums)
    losses_of = over_leading_axes(
        functools.partial(_losses, loss), 2, functools.partial(_losses_if_turned, loss)
    )
    run = with_derivatives_of(functools.partial(_reference, loss), losses_of)
    losses, *sums = run(logits, labels)
    return losses, (logits, labels, *sums)


def _losses(loss: CrossEntropy, logits: Any, labels: Any) -> tuple[Any, ...]:
    rows = as_rows(logits)
    if reduced_in_segments(rows.shape, machine()[0]):
        kernel = cross_entropy_kernels.segments(loss, *rows.shape, np.dtype(logits.dtype))
    else:
        kernel = cross_entropy_kernels.forward(loss, *rows.shape, np.dtype(logits.dtype))
    found = kernel(rows, labels.reshape(-1))
    return tuple(one.reshape(labels.shape) for one in found)


def _backward(loss: CrossEntropy, saved: Any, d_losses: Any) -> tuple[Any, Any]:
    logits, labels, *sums = saved
    if isinstance(logits, TurnedOperands):
        rest = (one.reshape(-1) for one in (labels, *sums, d_losses))
        found = _turned_gradient(loss, logits.problem)(*logits.given, *rest)
        return logits.in_program([found])[0], np.zeros(labels.shape, jax.dtypes.float0)
    compute = over_leading_axes(functools.partial(_gradient, loss), 5)
    gradient = with_derivatives_of(functools.partial(_reference_gradient, loss), compute)
    zero = np.zeros(labels.shape, jax.dtypes.float0)
    return gradient(logits, labels, *sums, d_losses), zero


def _gradient(loss: CrossEntropy, logits: Any, *vectors: Any) -> Any:
    """The gradient, given labels, maxima, log-sum-exps relative to these, and cotangents."""
    rows = as_rows(logits)
    kernel = cross_entropy_kernels.backward(loss, *rows.shape, np.dtype(logits.dtype))
    (d_logits,) = kernel(rows, *(one.reshape(-1) for one in vectors))
    return d_logits.reshape(logits.shape)


def _reference(loss: CrossEntropy, logits: Any, labels: Any) -> tuple[Any, ...]:
    """What the forward kernel computes; second derivatives are its."""
    wide = loss.logits(logits.astype(jnp.float32))
    largest = lax.stop_gradient(jnp.maximum(jnp.max(wide, axis=-1), cross_entropy_kernels.LOWEST))
    above = jax.nn.logsumexp(wide - largest[..., None], axis=-1)
    logarithms = above + largest
    there = jnp.clip(labels, 0, wide.shape[-1] - 1)[..., None]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(wide, axis=-1), there, axis=-1)[..., 0]
    if loss.smoothing:
        chosen = jnp.take_along_axis(wide, there, axis=-1)[..., 0]
        losses = losses + loss.smoothing * (chosen - jnp.mean(wide, axis=-1))
    losses = losses + loss.z_loss * logarithms * logarithms
    if loss.ignored is not None:
        losses = jnp.where(labels == loss.ignored, 0.0, losses)
    return losses, largest, above


def _reference_gradient(loss: CrossEntropy, logits: Any, labels: Any, *rest: Any) -> Any:
    *_, d_losses = rest
    _, pull_back = jax.vjp(lambda x: _reference(loss, x, labels)[0], logits)
    return pull_back(d_losses)[0]


_loss.defvjp(in_32_bits(_forward), in_32_bits(_backward))


# Logits that lie across their rows ----------------------------------------------------------------


def _losses_if_turned(loss: CrossEntropy, logits: Any, labels: Any) -> Any:
    found = turned_operands(logits)
    if found is None:
        return None
    losses = _turned_losses(loss, found.problem)(*found.given, labels.reshape(-1))
    return tuple(one.reshape(labels.shape) for one in losses)


def _turned_losses(loss: CrossEntropy, problem: Turned) -> Callable[..., Any]:
    """A function of logits as they lie and labels (rows of all batches,): losses, maxima, and
    log-sum-exps relative to these."""

    def run(logits: Any, labels: Any) -> tuple[Any, ...]:
        given = loss, problem, np.dtype(logits.dtype), machine()[0]
        kernel = cross_entropy_turned.forward(*given)
        if kernel is None:  # XLA reads what it has to transpose as it lies.
            return _reference(loss, in_rows(problem, [logits])[0], labels)
        found: tuple[Any, ...] = tuple(kernel(logits, labels))
        return found

    def run_rows(logits: Any, labels: Any) -> tuple[Any, ...]:
        return _losses(loss, in_rows(problem, [logits])[0], labels)

    return with_rows_where_mapped(run, run_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _turned_loss(loss: CrossEntropy, problem: Turned, logits: Any, labels: Any) -> Any:
    return _turned_losses(loss, problem)(logits, labels)[0]


def _turned_forward(
    loss: CrossEntropy, problem: Turned, logits: Any, labels: Any
) -> tuple[Any, Any]:
    def reference(logits: Any, labels: Any) -> Any:
        return _reference(loss, in_rows(problem, [logits])[0], labels)

    run = with_derivatives_of(reference, _turned_losses(loss, problem))
    losses, *sums = run(logits, labels)
    return losses, (logits, labels, *sums)


def _turned_backward(
    loss: CrossEntropy, problem: Turned, saved: Any, d_losses: Any
) -> tuple[Any, Any]:
    gradient = _turned_gradient(loss, problem)(*saved, d_losses)
    return gradient, np.zeros(saved[1].shape, jax.dtypes.float0)


_turned_loss.defvjp(in_32_bits(_turned_forward), in_32_bits(_turned_backward))


_FEW = 64
"""Rows that begin within vectors whose gradients XLA computes, of logits that lie across them. Of
45 rows of float32 the kernel took 1.2 of its time on an H200."""


def _turned_gradient(loss: CrossEntropy, problem: Turned) -> Callable[..., Any]:
    """A function of logits as they lie and of (rows of all batches,) labels, maxima, log-sum-exps
    relative to these and cotangents: the gradient by the logits, as they lie."""

    def of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(logits: Any, *vectors: Any) -> Any:
            found = function(loss, in_rows(problem, [logits])[0], *vectors)
            return as_given(problem, [found])[0]

        return call

    def run(logits: Any, *vectors: Any) -> Any:
        rows, columns = problem.rows, problem.columns
        if rows < _FEW and rows * logits.dtype.itemsize % VECTOR_BYTES:
            return of_rows(_reference_gradient)(logits, *vectors)
        kernel = cross_entropy_turned.backward(loss, rows, columns, np.dtype(logits.dtype))
        return kernel(logits.reshape(columns, rows), *vectors)[0].reshape(logits.shape)

    plain = of_rows(_gradient)
    compute = plain if problem.batch > 1 else with_rows_where_mapped(run, plain)
    return with_derivatives_of(of_rows(_reference_gradient), compute)
