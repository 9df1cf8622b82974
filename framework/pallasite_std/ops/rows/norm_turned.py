"""The kernel of forward norms whose operands lie across their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite_std.ops.rows.kernel import parameters
from pallasite_std.ops.rows.norm_body import Norm, forward_body, forward_types
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.tiling import VECTOR_BYTES
from pallasite_std.ops.rows.turned import Turned, turned_row_kernel

_NARROWEST = 16
"""Columns at least, if results are not quantised. With 8, and with rows of results that begin
within vectors, that took 1.1 to 1.6 of XLA's time on an H200."""


@functools.lru_cache(maxsize=512)
def forward(
    norm: Norm,
    problem: Turned,
    dtype: np.dtype[Any],
    saves: bool,
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., Any] | None:
    """As :func:`.norm_kernels.forward`, of x and residual as they lie; None if it does not suit."""
    columns = problem.columns
    unaligned = columns * norm.out_dtype.itemsize % VECTOR_BYTES > 0
    if norm.quantized is None and (columns < _NARROWEST or unaligned):
        return None
    out_types = forward_types(norm, problem.batch * problem.rows, columns, dtype, saves)
    exchanges = (2 if norm.centered else 1) + (norm.quantized is not None)
    summed = [(1 + (norm.quantized is not None), 1)] if norm.residual else []
    return turned_row_kernel(
        forward_body(norm, columns, dtype), problem, [dtype] * (1 + norm.residual), out_types,
        norm.name, exchanges, multiprocessors, shared_memory, parameters(dtype), summed,
    )  # fmt: skip


def results(
    norm: Norm, saves: bool, x: Any, residual: Any, weight: Any, bias: Any
) -> tuple[Any, ...]:
    """What the kernel returns, of matrices of rows, by XLA: it reads operands that it has to
    transpose as they lie, which no kernel does of rows that shared memory does not hold."""
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    mean = jnp.mean(wide, axis=1) if norm.centered else None
    if mean is not None:
        wide = wide - mean[:, None]
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1) + norm.epsilon)
    out = wide * scale[:, None]
    if weight is not None:
        out = out * (weight.astype(jnp.float32) + norm.offset)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    found = [out.astype(norm.out_dtype)]
    if norm.quantized is not None:
        step, inverse = row_scale(jnp.max(abs(out), axis=1), norm.quantized)
        found = [quantized_values(out * inverse[:, None], norm.quantized), step]
    if residual is not None:
        found.append(total)
    if saves:
        found += [scale] if mean is None else [scale, mean]
    return tuple(found)
