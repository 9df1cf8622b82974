"""``rms_norm`` and ``layer_norm``: the functions that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite_std.ops.arguments import (
    float_dtype,
    in_32_bits,
    matched,
    with_derivatives_of,
    without_derivatives,
    zeros,
)
from pallasite_std.ops.rows import (
    norm_beside,
    norm_kernels,
    norm_segments,
    norm_strips,
    norm_turned,
)
from pallasite_std.ops.rows.arguments import (
    FLOATS,
    as_rows,
    float_array,
    machine,
    per_column,
    quantized_dtype,
    same_type,
    small_number,
)
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.column_sums import column_sums
from pallasite_std.ops.rows.norm_body import Norm
from pallasite_std.ops.rows.segments import (
    LEAST_GRADIENT_COLUMNS,
    LEAST_QUANTIZED,
    in_segments,
)
from pallasite_std.ops.rows.turned import Turned
from pallasite_std.ops.rows.turned_operands import (
    TurnedOperands,
    as_given,
    in_rows,
    turned_operands,
    with_rows_where_mapped,
)


@in_32_bits
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: Any = None,
    quantize: Any = None,
) -> Any:
    """``x / sqrt(mean(x**2) + epsilon) * (weight + weight_offset)`` along the last axis, in one
    kernel.

    Args:
      x: (..., columns), bfloat16, float16 or float32; it is computed in float32.
      weight: (columns,), of any of these dtypes.
      residual: like x. It is added before, and the sum, rounded to the dtype of x, is returned too.
      epsilon: added to the mean square.
      weight_offset: 1.0 for models that keep their weights minus one.
      out_dtype: of the result; by default that of x.
      quantize: float8_e4m3fn, float8_e5m2 or int8: each row of the result is divided by a scale
        that maps its largest magnitude to the dtype's largest number, and rounded to the dtype.

    Returns:
      The result, like x; with ``quantize`` followed by the scales, float32 (...,); with
      ``residual`` followed by the sum, like x. A single result is not in a tuple.
      There are gradients by x, weight and residual, but not of quantised results.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: B. Zhang and R. Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    return _norm(False, x, weight, None, residual, epsilon, weight_offset, out_dtype, quantize)


@in_32_bits
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-5,
    weight_offset: float = 0.0,
    out_dtype: Any = None,
    quantize: Any = None,
) -> Any:
    """``(x - mean(x)) / sqrt(var(x) + epsilon) * (weight + weight_offset) + bias`` along the last
    axis, in one kernel.

    Args:
      bias: (columns,).
      x, weight, residual, epsilon, weight_offset, out_dtype, quantize: as of :func:`rms_norm`.

    Returns:
      As :func:`rms_norm`; there are gradients by bias, too.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: J. L. Ba et al., "Layer normalization", arXiv 1607.06450.
    """
    return _norm(True, x, weight, bias, residual, epsilon, weight_offset, out_dtype, quantize)


def _norm(
    centered: bool,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    epsilon: Any,
    weight_offset: Any,
    out_dtype: Any,
    quantize: Any,
) -> Any:
    x = float_array(x, "x")
    columns = x.shape[-1]
    weight, bias = per_column(weight, "weight", columns), per_column(bias, "bias", columns)
    if residual is not None:
        residual = same_type(residual, x, "residual", "x")
    norm = Norm(
        centered=centered,
        epsilon=small_number(epsilon, "epsilon"),
        offset=small_number(weight_offset, "weight_offset"),
        weight=weight is not None,
        bias=bias is not None,
        residual=residual is not None,
        out_dtype=float_dtype(x.dtype if out_dtype is None else out_dtype, FLOATS),
        quantized=None if quantize is None else quantized_dtype(quantize),
        weight_size=4 if weight is None else np.dtype(weight.dtype).itemsize,
    )
    x, weight, bias, residual = matched(x, weight, bias, residual)
    if x.size == 0:
        results = _of_nothing(norm, x)
    else:
        turned = turned_operands(x, *([residual] if norm.residual else []))
        if norm.quantized is not None:
            results = _quantized(norm, x, weight, bias, residual, turned)
        elif turned is not None:
            results = _turned(norm, turned.problem, turned.shape, turned.given, weight, bias)
        else:
            results = _differentiable(norm, x, weight, bias, residual)
    return results if len(results) > 1 else results[0]


def _of_nothing(norm: Norm, x: jax.Array) -> tuple[jax.Array, ...]:
    results = [zeros(x.shape, norm.quantized or norm.out_dtype, x)]
    if norm.quantized is not None:
        results.append(zeros(x.shape[:-1], np.dtype(np.float32), x) + 1)
    if norm.residual:
        results.append(x)
    return tuple(results)


def _run(
    norm: Norm, x: Any, weight: Any, bias: Any, residual: Any, saves: bool = False
) -> tuple[jax.Array, ...]:
    """The results; with ``saves`` then what the gradient needs of each row."""
    run = over_leading_axes(
        functools.partial(_run_rows, norm, saves),
        2,
        functools.partial(_run_if_turned, norm, saves),
    )
    results: tuple[jax.Array, ...] = run(x, residual, weight, bias)
    return results


def _run_rows(
    norm: Norm, saves: bool, x: Any, residual: Any, weight: Any, bias: Any
) -> tuple[jax.Array, ...]:
    rows = as_rows(x)
    operands = [as_rows(residual)] if norm.residual else []
    operands += [one for one in (weight, bias) if one is not None]
    here, dtype = machine(), np.dtype(x.dtype)
    least = None if norm.quantized is None else LEAST_QUANTIZED
    if in_segments(rows.shape, here[0], dtype.itemsize, least):
        out, *rest = norm_segments.forward(norm, *rows.shape, dtype)(rows, *operands)
        rest = rest if saves else rest[: len(rest) - norm.moments]
    else:
        out, *rest = norm_kernels.forward(norm, *rows.shape, dtype, saves, *here)(rows, *operands)
    results = [out.reshape(x.shape)]
    if norm.quantized is not None:
        results.append(rest.pop(0).reshape(x.shape[:-1]))
    if norm.residual:
        results.append(rest.pop(0).reshape(x.shape))
    return (*results, *(one.reshape(x.shape[:-1]) for one in rest))


def _run_if_turned(
    norm: Norm, saves: bool, x: Any, residual: Any, weight: Any, bias: Any
) -> tuple[jax.Array, ...] | None:
    """What :func:`_run` returns, if a kernel reads these operands as they lie across their rows."""
    found = turned_operands(x, *([residual] if norm.residual else []))
    if found is None:
        return None
    return _run_turned(norm, found.problem, found.shape, saves, found.given, weight, bias)


def _run_turned(
    norm: Norm,
    problem: Turned,
    shape: tuple[int, ...],
    saves: bool,
    given: tuple[Any, ...],
    weight: Any,
    bias: Any,
) -> tuple[jax.Array, ...]:
    """What :func:`_run` returns of matrices as they lie; ``shape`` is that of x."""

    def in_shape(results: Any) -> tuple[jax.Array, ...]:
        return tuple(one.reshape(shape if one.ndim == 2 else shape[:-1]) for one in results)

    def run(given: tuple[Any, ...], weight: Any, bias: Any) -> tuple[jax.Array, ...]:
        dtype = np.dtype(given[0].dtype)
        kernel = norm_turned.forward(norm, problem, dtype, saves, *machine())
        if kernel is not None:
            vectors = (one for one in (weight, bias) if one is not None)
            return in_shape(kernel(*given, *vectors))
        x, *residual = in_rows(problem, given)
        other = residual[0] if residual else None
        return in_shape(norm_turned.results(norm, saves, x, other, weight, bias))

    def run_rows(given: tuple[Any, ...], weight: Any, bias: Any) -> tuple[jax.Array, ...]:
        x, *residual = in_rows(problem, given)
        results = _run(norm, x, weight, bias, residual[0] if residual else None, saves)
        return in_shape(results)

    results: tuple[jax.Array, ...] = with_rows_where_mapped(run, run_rows)(given, weight, bias)
    return results


def _quantized(
    norm: Norm, x: Any, weight: Any, bias: Any, residual: Any, turned: TurnedOperands | None
) -> tuple[jax.Array, ...]:
    run: Callable[..., Any] = functools.partial(_run, norm)
    operands: tuple[Any, ...] = (x, weight, bias, residual)
    if turned is not None:
        run = functools.partial(_run_turned, norm, turned.problem, turned.shape, False)
        operands = (turned.given, weight, bias)
    what = f"{norm.name} with a quantised result"
    hint = "leave quantize out, and quantise what does not take part in gradients"
    results: tuple[jax.Array, ...] = without_derivatives(what, hint, run)(*operands)
    return results


_MANY_SUMS = 768
"""Blocks from which on one sum for each takes 0.83 to 0.91 of XLA's time on an H200; of 256 to 547
blocks it took 1.09 to 1.29 of it, two sums 0.72 to 1.01."""

TOGETHER = True
"""Whether what blocks have summed for weight and bias is summed by one kernel."""


# Derivatives --------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(norm: Norm, x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    return _run(norm, x, weight, bias, residual)


def _forward(norm: Norm, x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
    turned = turned_operands(x, *([residual] if norm.residual else []))
    if turned is not None:
        return _turned_forward(norm, turned.problem, turned.shape, turned.given, weight, bias)
    run = with_derivatives_of(
        functools.partial(_reference_results, norm), functools.partial(_run, norm, saves=True)
    )
    *results, moments = _grouped(norm, run(x, weight, bias, residual))
    return tuple(results), (results[-1] if norm.residual else x, moments, weight, bias)


def _grouped(norm: Norm, results: Any) -> list[Any]:
    """The results, then what else was saved, together."""
    count = 2 if norm.residual else 1
    return [*results[:count], tuple(results[count:])]


def _backward(norm: Norm, saved: Any, cotangents: Any) -> tuple[Any, Any, Any, Any]:
    normalized, moments, weight, bias = saved
    compute: Callable[..., Any] = functools.partial(_gradients, norm)
    if not (norm.weight or norm.bias):  # Sums over rows would be those of more rows.
        compute = over_leading_axes(compute, 5)
    gradients = with_derivatives_of(functools.partial(_reference_gradients, norm), compute)
    d_x, d_weight, d_bias = gradients(normalized, moments, weight, bias, tuple(cotangents))
    return d_x, d_weight, d_bias, d_x if norm.residual else None


def _reference(norm: Norm, x: Any, weight: Any, bias: Any) -> Any:
    """What the forward kernel computes of the sum; second derivatives are its."""
    wide = x.astype(jnp.float32)
    if norm.centered:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    out = wide * jax.lax.rsqrt(square + norm.epsilon)
    if weight is not None:
        out = out * (weight.astype(jnp.float32) + norm.offset)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(norm.out_dtype)


def _reference_results(
    norm: Norm, x: Any, weight: Any, bias: Any, residual: Any
) -> tuple[jax.Array, ...]:
    """The results. What is saved beside them is zero: the reference of gradients needs none."""
    total = [] if residual is None else [x + residual]
    results = [_reference(norm, total[0] if total else x, weight, bias), *total]
    types = jax.eval_shape(functools.partial(_run, norm, saves=True), x, weight, bias, residual)
    return (
        *results,
        *(matched(jnp.zeros(one.shape, one.dtype), x)[0] for one in types[len(results) :]),
    )


def _reference_gradients(
    norm: Norm, x: Any, moments: Any, weight: Any, bias: Any, cotangents: Any
) -> Any:
    _, pull_back = jax.vjp(functools.partial(_reference, norm), x, weight, bias)
    d_x, d_weight, d_bias = pull_back(cotangents[0])
    return d_x + cotangents[1] if norm.residual else d_x, d_weight, d_bias


def _gradients(norm: Norm, x: Any, moments: Any, weight: Any, bias: Any, cotangents: Any) -> Any:
    rows, d_out = as_rows(x), as_rows(cotangents[0])
    moments = [one.reshape(-1) for one in moments]
    vectors = [] if weight is None else [weight]
    d_sum = [as_rows(cotangents[1])] if norm.residual else []
    here = machine()
    count, columns = rows.shape
    dtypes = tuple(np.dtype(one.dtype) for one in (weight, bias) if one is not None)
    if norm_beside.suits_beside(norm, count, columns, np.dtype(x.dtype)):
        beside = norm_beside.gradients_beside(norm, count, columns, np.dtype(x.dtype), dtypes)
        d_x, *whole = beside(rows, d_out, *d_sum, *moments, *vectors)
        d_weight = None if weight is None else whole.pop(0)
        return d_x.reshape(x.shape), d_weight, None if bias is None else whole.pop(0)
    few = in_segments(rows.shape, here[0], rows.dtype.itemsize, LEAST_GRADIENT_COLUMNS)
    if not few and norm_kernels.keeps_rows(norm, count, columns, np.dtype(x.dtype), *here):
        kernel = norm_kernels.backward(norm, *rows.shape, np.dtype(x.dtype), *here)
        d_x, *rest = kernel(rows, d_out, *d_sum, *moments, *vectors)
    else:
        reduce = norm_strips.reductions(norm, *rows.shape, np.dtype(x.dtype), here[0])
        reduced = reduce(rows, d_out, *moments, *vectors)
        kernel = norm_strips.gradients(norm, *rows.shape, np.dtype(x.dtype), here[0])
        d_x, *rest = kernel(rows, d_out, *moments, *reduced, *vectors, *d_sum)
    # XLA sums one of few rows as fast, or faster.
    if TOGETHER and rest and rest[0].shape[0] > (1 if len(rest) > 1 else _MANY_SUMS):
        sums = column_sums(rest, dtypes, here[0])
    else:
        sums = [jnp.sum(one, axis=0).astype(d) for one, d in zip(rest, dtypes, strict=True)]
    d_weight = None if weight is None else sums.pop(0)
    d_bias = None if bias is None else sums.pop(0)
    return d_x.reshape(x.shape), d_weight, d_bias


_differentiable.defvjp(in_32_bits(_forward), in_32_bits(_backward))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _turned(
    norm: Norm, problem: Turned, shape: Any, given: tuple[Any, ...], weight: Any, bias: Any
) -> Any:
    """:func:`_differentiable` of x and residual as they lie."""
    return _run_turned(norm, problem, shape, False, given, weight, bias)


def _turned_forward(
    norm: Norm, problem: Turned, shape: Any, given: tuple[Any, ...], weight: Any, bias: Any
) -> tuple[Any, Any]:
    def reference(given: tuple[Any, ...], weight: Any, bias: Any) -> Any:
        x, *residual = (one.reshape(shape) for one in in_rows(problem, given))
        return _reference_results(norm, x, weight, bias, residual[0] if residual else None)

    run = with_derivatives_of(reference, functools.partial(_run_turned, norm, problem, shape, True))
    *results, moments = _grouped(norm, run(given, weight, bias))
    x = results[-1] if norm.residual else in_rows(problem, given)[0].reshape(shape)
    return tuple(results), (x, moments, weight, bias)


def _turned_backward(
    norm: Norm, problem: Turned, shape: Any, saved: Any, cotangents: Any
) -> tuple[Any, Any, Any]:
    d_x, d_weight, d_bias, _ = _backward(norm, saved, cotangents)
    return tuple(as_given(problem, [d_x] * len(problem.across))), d_weight, d_bias


_turned.defvjp(in_32_bits(_turned_forward), in_32_bits(_turned_backward))
