"""``quantize`` and ``dequantize``: the functions that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from pallasite_std.ops.rows.elementwise import elementwise_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows, Work, alone, resident_parameters, row_kernel
from pallasite_std.ops.rows.pipelines import row_pipeline, suits_pipeline
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.segments import in_segments, segment_kernel
from pallasite_std.ops.rows.shared import shared_row_kernel, suits_shared
from pallasite_std.ops.rows.streamed import row_stream, streamed_row_kernel, suits_stream
from pallasite_std.ops.rows.tiles import tiled_row_kernel
from pallasite_std.ops.rows.tiling import Registers, few_rows_tiling, row_tiling, size_of


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
    run = without_derivatives(
        "quantize",
        "quantise what does not take part in gradients",
        over_leading_axes(functools.partial(_run, kind), 1),
    )
    values, scales = run(x.reshape(-1, columns if group is None else group))
    return values.reshape(x.shape), scales.reshape(shape)


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

    def body(block: Rows, x: Any, out: Any, scales: Any) -> Work:
        (largest,) = yield lambda chunk: (abs(chunk.load(x)),), ("max",), []
        scale, inverse = row_scale(largest, kind)

        def store(chunk: Chunk) -> None:
            exact = chunk.load(x) * block.spread(inverse, chunk)
            chunk.store(out, quantized_values(exact, kind))

        block.each(store)
        block.store(scales, scale)

    out_types = [
        jax.ShapeDtypeStruct((rows, columns), kind),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    ]
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

    def work(block: Rows, chunk: Chunk, x: Any, inverse: Any, out: Any) -> None:
        (factor,) = block.row_values(lambda one: (one,), chunk, inverse)
        exact = chunk.load(x) * factor
        chunk.store(out, quantized_values(exact, kind))

    largest_of = segment_kernel(magnitude, rows, columns, 1, "quantize_magnitudes")
    out_types = [jax.ShapeDtypeStruct((rows, columns), kind)]
    of_elements = elementwise_kernel(work, rows, columns, out_types, "quantize", matrices=1)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        (largest,) = largest_of(x)
        scale, inverse = row_scale(jnp.max(largest, axis=1), kind)
        return of_elements(x, inverse)[0], scale

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
    rows = values.reshape(scales.size, -1)
    run = without_derivatives(
        "dequantize",
        "use jax.numpy for what takes part in gradients",
        over_leading_axes(functools.partial(_dequantized, out), 2),
    )
    return jnp.reshape(run(rows, scales.reshape(-1)), values.shape)


def _dequantized(out: np.dtype[Any], values: jax.Array, scales: jax.Array) -> jax.Array:
    rows = as_rows(values)
    (result,) = _dequantization(out, *rows.shape)(rows, scales.reshape(-1))
    return jnp.reshape(result, values.shape)


@functools.lru_cache(maxsize=512)
def _dequantization(out: np.dtype[Any], rows: int, columns: int) -> Callable[..., Any]:
    def work(block: Rows, chunk: Chunk, values: Any, scales: Any, result: Any) -> None:
        (scale,) = block.row_values(lambda one: (one,), chunk, scales)
        chunk.store(result, chunk.load(values) * scale)

    out_types = [jax.ShapeDtypeStruct((rows, columns), out)]
    return elementwise_kernel(
        work, rows, columns, out_types, "dequantize", matrices=1, grouped=True
    )
