"""``quantize`` and ``dequantize``: the functions that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    as_array,
    float_dtype,
    in_32_bits,
    matched,
    without_derivatives,
    zeros,
)
from pallasite_std.ops.rows.arguments import (
    FLOATS,
    QUANTIZED,
    as_rows,
    float_array,
    integer,
    machine,
    names,
    quantized_dtype,
)
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.elementwise import elementwise_kernel, tile_elements
from pallasite_std.ops.rows.kernel import Chunk, Rows, Work, alone, resident_parameters, row_kernel
from pallasite_std.ops.rows.pipelines import row_pipeline, suits_pipeline
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.segments import MOST_PARTS, in_segments, segment_kernel
from pallasite_std.ops.rows.shared import shared_row_kernel, suits_shared
from pallasite_std.ops.rows.streamed import row_stream, streamed_row_kernel, suits_stream
from pallasite_std.ops.rows.tiles import tiled_row_kernel
from pallasite_std.ops.rows.tiling import Registers, few_rows_tiling, row_tiling, size_of
from pallasite_std.ops.rows.turned import (
    Turned,
    turned_elementwise_kernel,
    turned_row_kernel,
)
from pallasite_std.ops.rows.turned_operands import (
    in_rows,
    turned_operands,
    with_rows_where_mapped,
)


@in_32_bits
def quantize(x: jax.Array, dtype: Any, *, group: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Divides rows by a scale each, and rounds them to a narrow dtype, in one kernel.

    The scale maps the largest magnitude of a row to the dtype's largest number; that of a row of
    zeros is 1.

    Args:
      x: (..., columns), bfloat16, float16 or float32.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      group: if given, each run of so many columns has a scale of its own; it divides the columns.

    Returns:
      The quotients, (..., columns) of ``dtype``, and the scales, float32: (...,), or
      (..., columns // group) with ``group``. Neither has derivatives.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    x, kind = float_array(x, "x"), quantized_dtype(dtype)
    columns = x.shape[-1]
    group = None if group is None else integer(group, "group")
    if group is not None and (group <= 0 or columns % group):
        raise InvalidValueError(
            "group does not divide the columns",
            got=f"group {group}, {columns} columns",
            expected="a positive divisor",
        )
    shape = x.shape[:-1] if group is None else (*x.shape[:-1], columns // group)
    (x,) = matched(x)
    if x.size == 0:
        return zeros(x.shape, kind, x), zeros(shape, np.dtype(np.float32), x) + 1
    width, turned = columns if group is None else group, turned_operands(x)
    if turned is None:
        run = over_leading_axes(
            functools.partial(_run, kind), 1, functools.partial(_run_if_turned, kind)
        )
        given = x.reshape(-1, width)
    else:
        run, (given,) = _of_turned(kind, turned.problem, width), turned.given
    what, hint = "quantize", "quantise what does not take part in gradients"
    values, scales = without_derivatives(what, hint, run)(given)
    return values.reshape(x.shape), scales.reshape(shape)


def _grouped(problem: Turned, width: int) -> Turned:
    """A problem of which ``width`` columns have a scale."""
    return problem if width == problem.columns else dataclasses.replace(problem, group=width)


def _of_turned(kind: np.dtype[Any], problem: Turned, width: int) -> Callable[..., Any]:
    """The function of a matrix as it lies, of which ``width`` columns have a scale."""
    grouped, groups = _grouped(problem, width), problem.columns // width

    def found(values: Any, scales: Any) -> tuple[Any, Any]:
        return values.reshape(-1, problem.columns), scales.reshape(-1)

    def run(x: Any) -> tuple[Any, Any]:
        kernel = _turned_kernel(kind, grouped, np.dtype(x.dtype), *machine())
        if kernel is not None:
            return found(*kernel(x))
        # XLA reads what it has to transpose as it lies.
        wide = in_rows(problem, [x])[0].reshape(-1, groups, width).astype(jnp.float32)
        scale, inverse = row_scale(jnp.max(abs(wide), axis=2), kind)
        return found(quantized_values(wide * inverse[:, :, None], kind), scale)

    def run_rows(x: Any) -> tuple[Any, Any]:
        return found(*_run(kind, in_rows(problem, [x])[0].reshape(-1, width)))

    return with_rows_where_mapped(run, run_rows)


def _run_if_turned(kind: np.dtype[Any], x: Any) -> tuple[Any, Any] | None:
    found = turned_operands(x)
    if found is None:
        return None
    values, scales = _of_turned(kind, found.problem, x.shape[-1])(*found.given)
    return values.reshape(x.shape), scales.reshape(x.shape[:-1])


@functools.lru_cache(maxsize=512)
def _turned_kernel(
    kind: np.dtype[Any],
    problem: Turned,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """The kernel for a matrix as it lies across its rows; None if it does not suit."""
    rows, groups = problem.batch * problem.rows, problem.columns // (problem.group or 1)
    types = _out_types(kind, rows, problem.columns)
    if problem.group is not None:
        types[1] = jax.ShapeDtypeStruct((rows, groups), jnp.float32)
    given = problem, [dtype], types, "quantize", 1, multiprocessors, shared_memory
    return turned_row_kernel(functools.partial(_quotients, kind), *given)


def _out_types(kind: np.dtype[Any], rows: int, columns: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((rows, columns), kind),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    ]


def _quotients(kind: np.dtype[Any], block: Rows, x: Any, out: Any, scales: Any) -> Work:
    """The body of kernels for whole rows."""
    (largest,) = yield lambda chunk: (abs(chunk.load(x)),), ("max",), []
    scale, inverse = row_scale(largest, kind)

    def store(chunk: Chunk) -> None:
        exact = chunk.load(x) * block.spread(inverse, chunk)
        chunk.store(out, quantized_values(exact, kind))

    block.each(store)
    block.store(scales, scale)


def _run(dtype: np.dtype[Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, here = as_rows(x), machine()
    if in_segments(rows.shape, here[0], size_of(rows.dtype)):
        values, scales = _of_segments(dtype, *rows.shape)(rows)
    else:
        values, scales = _kernel(dtype, *rows.shape, np.dtype(rows.dtype), *here)(rows)
    return values.reshape(x.shape), scales.reshape(x.shape[:-1])


@functools.lru_cache(maxsize=512)
def _kernel(
    kind: np.dtype[Any],
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., Any]:
    tiling = row_tiling(rows, columns, size_of(dtype), Registers())
    tiling = few_rows_tiling(rows, tiling, size_of(dtype))

    body = functools.partial(_quotients, kind)
    out_types = _out_types(kind, rows, columns)
    kernel = tiled_row_kernel(
        body,
        rows,
        columns,
        [dtype],
        out_types,
        "quantize",
        multiprocessors,
        shared_memory,
    )
    if kernel is not None:
        return kernel
    stream = None
    if suits_stream(columns, [dtype], False, tiling.resident):
        stream = row_stream(rows, columns, [dtype], (), multiprocessors, shared_memory)
    if stream is not None:
        return streamed_row_kernel(
            body, rows, columns, [dtype], out_types, "quantize", 1, stream, multiprocessors
        )
    if suits_shared(columns, [dtype]):
        kernel = shared_row_kernel(
            body, rows, columns, [dtype], out_types, "quantize", 1, multiprocessors, shared_memory
        )
        if kernel is not None:
            return kernel
    if suits_pipeline(tiling, [dtype]):
        kernel = row_pipeline(
            body, rows, columns, [dtype], [("max",)], out_types, "quantize", multiprocessors,
            shared_memory,
        )  # fmt: skip
        if kernel is not None:
            return kernel
    params = resident_parameters(tiling, dtype, plgpu.CompilerParams())
    return row_kernel(alone(body), rows, tiling, out_types, "quantize", 1, params)


@functools.lru_cache(maxsize=512)
def _of_segments(
    kind: np.dtype[Any], rows: int, columns: int
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Of few long rows: a kernel for the largest magnitudes, and one for the quotients."""

    def magnitude(block: Rows, chunk: Chunk, x: Any) -> tuple[Any, ...]:
        return (jnp.max(abs(chunk.load(x))),)

    def work(block: Rows, chunk: Chunk, x: Any, parts: Any, out: Any, scales: Any) -> None:
        scale, inverse = row_scale(jnp.max(parts[block.place]), kind)
        chunk.store(out, quantized_values(chunk.load(x) * inverse, kind))

        def store_scale() -> None:
            scales[block.place] = scale

        pl.when(chunk.first == 0)(store_scale)

    largest_of = segment_kernel(magnitude, rows, columns, 1, "quantize_magnitudes")
    of_elements = elementwise_kernel(
        work, rows, columns, _out_types(kind, rows, columns), "quantize"
    )

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        (largest,) = largest_of(x)
        if largest.shape[1] > MOST_PARTS:
            largest = jnp.max(largest, axis=1, keepdims=True)
        values, scales = of_elements(x, largest)
        return values, scales

    return run


@in_32_bits
def dequantize(values: jax.Array, scales: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """``values * scales``, the inverse of :func:`quantize` but for rounding, in one kernel.

    Args:
      values: (..., columns), float8_e4m3fn, float8_e5m2 or int8.
      scales: float32; (...,), or (..., groups) where groups divide the columns.
      dtype: of the result: bfloat16, float16 or float32.

    Raises:
      InvalidTypeError: arguments that do not fit together.
    """
    values, scales = as_array(values, "values"), as_array(scales, "scales")
    out = float_dtype(dtype, FLOATS)
    lead, columns = values.shape[:-1], values.shape[-1] if values.ndim else 0
    grouped = scales.ndim == values.ndim and scales.shape[:-1] == lead and scales.shape[-1]
    fits = scales.shape == lead or (grouped and columns % scales.shape[-1] == 0)
    if not (values.ndim and fits) or np.dtype(values.dtype) not in QUANTIZED:
        raise InvalidTypeError(
            "values and scales do not fit together",
            got=f"{values.dtype}{list(values.shape)} and {scales.dtype}{list(scales.shape)}",
            expected=f"values of {names(QUANTIZED)}, and a scale for each row or group of columns",
        )
    values, scales = matched(values, scales.astype(jnp.float32))
    if values.size == 0:
        return zeros(values.shape, out, values)
    turned, width = turned_operands(values), values.size // scales.size
    if turned is None:
        run = over_leading_axes(
            functools.partial(_dequantized, out), 2, functools.partial(_dequantized_if_turned, out)
        )
        given = values.reshape(-1, width)
    else:
        run, (given,) = _dequantized_turned(out, turned.problem, width), turned.given
    what, hint = "dequantize", "use jax.numpy for what takes part in gradients"
    result = without_derivatives(what, hint, run)(given, scales.reshape(-1))
    return jnp.reshape(result, values.shape)


def _dequantized_turned(out: np.dtype[Any], problem: Turned, width: int) -> Callable[..., Any]:
    """The function of values as they lie, and scales, each of ``width`` columns."""
    grouped, groups = _grouped(problem, width), problem.columns // width

    def run(values: Any, scales: Any) -> Any:
        kernel = _turned_dequantization(out, grouped, np.dtype(values.dtype), *machine())
        if kernel is not None:
            of_rows = scales if grouped.group is None else scales.reshape(-1, groups)
            return kernel(values, of_rows)[0]
        # XLA reads what it has to transpose as it lies.
        wide = in_rows(problem, [values])[0].reshape(-1, groups, width).astype(jnp.float32)
        exact = wide * scales.reshape(-1, groups, 1)
        return exact.astype(out).reshape(-1, problem.columns)

    def run_rows(values: Any, scales: Any) -> Any:
        rows = in_rows(problem, [values])[0].reshape(-1, width)
        return _dequantized(out, rows, scales).reshape(-1, problem.columns)

    return with_rows_where_mapped(run, run_rows)


def _dequantized_if_turned(out: np.dtype[Any], values: Any, scales: Any) -> Any:
    found = turned_operands(values)
    if found is None:
        return None
    run = _dequantized_turned(out, found.problem, values.shape[-1])
    return jnp.reshape(run(*found.given, scales.reshape(-1)), values.shape)


@functools.lru_cache(maxsize=512)
def _turned_dequantization(
    out: np.dtype[Any],
    problem: Turned,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    out_types = [jax.ShapeDtypeStruct((problem.batch * problem.rows, problem.columns), out)]
    given = [dtype], out_types, "dequantize", multiprocessors, shared_memory
    return turned_elementwise_kernel(_products, problem, *given)


def _products(block: Rows, chunk: Chunk, values: Any, scales: Any, result: Any) -> None:
    """What dequantisation does with a chunk."""
    (scale,) = block.row_values(lambda one: (one,), chunk, scales)
    chunk.store(result, chunk.load(values) * scale)


def _dequantized(out: np.dtype[Any], values: jax.Array, scales: jax.Array) -> jax.Array:
    rows = as_rows(values)
    (result,) = _dequantization(out, *rows.shape)(rows, scales.reshape(-1))
    return jnp.reshape(result, values.shape)


@functools.lru_cache(maxsize=512)
def _dequantization(out: np.dtype[Any], rows: int, columns: int) -> Callable[..., Any]:
    out_types = [jax.ShapeDtypeStruct((rows, columns), out)]
    return elementwise_kernel(
        _products, rows, columns, out_types, "dequantize", matrices=1, grouped=True,
        elements=tile_elements(rows * columns, out),
    )  # fmt: skip
