"""``mixed_matmul``: the function that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import pallasite
from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.mixed.config import MixedConfig, default_config, mixed_configs
from pallasite_hopper.ops.mixed.kernel import Problem, build
from pallasite_std.api import check_config, float_dtype

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 1
"""Of the kernel, for what was measured."""

_ACTIVATIONS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_OUT_DTYPES = (*_ACTIVATIONS, np.dtype(np.float32))
_WEIGHTS = {
    np.dtype(np.int8): 8,
    np.dtype(np.uint8): 8,
    np.dtype(ml_dtypes.float8_e4m3fn): 8,
    np.dtype(ml_dtypes.float8_e5m2): 8,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
}


def mixed_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scales: jax.Array | None = None,
    transpose_b: bool = False,
    out_dtype: Any = None,
    config: MixedConfig | None = None,
) -> jax.Array:
    """The product of activations with narrow weights, ``a @ (b * scales)``, in one kernel.

    Weights are read as they are and converted in registers, so a product with few rows takes as
    long as reading them. Sums are float32. It has no derivatives.

    Args:
      a: (m, k), bfloat16 or float16.
      b: the weights, (k, n), or (n, k) with ``transpose_b``: int8, uint8, int4, uint4,
        float8_e4m3fn or float8_e5m2. Weights of 4 bits given as (k, n) are transposed beforehand,
        at the price of reading and writing them; (n, k) is the faster form of 8 bits, too. int8 and
        4 bits are converted fastest.
      scales: (n,): a factor for each column, applied to the sums; or (groups, n): for each group of
        k / groups consecutive elements along k. Factors of groups are rounded to the dtype of a,
        and weights are multiplied by them before the product, rounded once.
      transpose_b: the weights are given as (n, k).
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: how to cut the product up; one of :func:`mixed_configs`, say. By default it is chosen
        from the shape, or by measuring if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``wgmma.mma_async`` with the converted weights as its operand in registers.
    """
    check_config(config, MixedConfig)
    _check(a, "a", _ACTIVATIONS)
    _check(b, "b", tuple(_WEIGHTS))
    n, depth = b.shape if transpose_b else b.shape[::-1]
    m, k = a.shape
    if k != depth:
        raise InvalidValueError(
            "a and b do not have the same extent along k",
            got=f"{k} and {depth}, from shapes {a.shape} and {b.shape}, transpose_b={transpose_b}",
        )
    weight_bits = _WEIGHTS[np.dtype(b.dtype)]
    if weight_bits == 4 and not transpose_b:
        b, transpose_b = b.T, True
    scales = None if scales is None else jnp.asarray(scales)
    group = _group(scales, n, k)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        dtype=np.dtype(a.dtype),
        weights=np.dtype(b.dtype),
        weight_bits=weight_bits,
        out_dtype=float_dtype(a.dtype if out_dtype is None else out_dtype, _OUT_DTYPES),
        transposed=transpose_b,
        group=group,
        column_scale=scales is not None and not group,
    )
    operands = (a, b) if scales is None else (a, b, scales)
    if config is None:
        config = _choose(problem, operands)
    if group:
        _check_group(group, config)
    return _run(problem, config, *operands)


def _choose(problem: Problem, operands: tuple[jax.Array, ...]) -> MixedConfig:
    m, n, k, bits = problem.m, problem.n, problem.k, problem.weight_bits
    size = problem.out_dtype.itemsize

    def candidates() -> list[MixedConfig]:
        found = mixed_configs(m, n, k, bits, size)
        return [one for one in found if not problem.group or _group_fits(problem.group, one)]

    chosen: MixedConfig = pallasite.choose(
        "hopper.mixed_matmul",
        _VERSION,
        operands,
        candidates,
        default_config(m, n, k, bits, size, MULTIPROCESSORS),
        functools.partial(_run, problem),
        key=(problem.transposed, problem.group, str(problem.out_dtype)),
    )
    return chosen


def _run(
    problem: Problem, config: MixedConfig, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> jax.Array:
    # The copy engine reads rows of multiples of 16 bytes.
    columns = 16 if not problem.transposed else 8
    n = problem.n
    padded = -(-n // columns) * columns
    operands = [_padded(a, 1, 8), _padded(b, 1, 128 // problem.weight_bits)]
    if problem.group:
        operands.append(_padded(scales[0].astype(a.dtype), 1, 8))
    elif scales:
        multiple = config.tile_n * config.cluster
        operands.append(_padded(scales[0].astype(jnp.float32), 0, multiple))
    problem = dataclasses.replace(problem, n=padded)
    result = _kernel(problem, config, MULTIPROCESSORS)(*operands)
    return result if padded == n else result[:, :n]


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: Problem, config: MixedConfig, multiprocessors: int
) -> Callable[..., jax.Array]:
    return build(problem, config, multiprocessors)


def _check(array: Any, what: str, dtypes: tuple[Any, ...]) -> None:
    if not hasattr(array, "shape") or len(array.shape) != 2:
        raise InvalidTypeError(
            f"{what} is not a matrix", got=getattr(array, "shape", array), expected="2 dimensions"
        )
    if np.dtype(array.dtype) not in dtypes:
        raise InvalidTypeError(
            f"{what} has a dtype that this product does not take",
            got=array.dtype,
            expected=", ".join(str(dtype) for dtype in dtypes),
        )
    if 0 in array.shape:
        raise InvalidValueError(f"{what} has no elements", got=array.shape)


def _group(scales: Any, n: int, k: int) -> int:
    """Elements along k of a group, or 0 if scales are of columns."""
    if scales is None or scales.shape == (n,):
        return 0
    if len(scales.shape) != 2 or scales.shape[1] != n or k % scales.shape[0]:
        raise InvalidValueError(
            "scales do not fit the weights",
            got=scales.shape,
            expected=f"({n},), or (groups, {n}) where groups divides {k}",
        )
    return int(k // scales.shape[0])


def _group_fits(group: int, config: MixedConfig) -> bool:
    steps = config.tile_k % group == 0 or group % config.tile_k == 0
    return group % (config.tile_k // config.pieces) == 0 and steps


def _check_group(group: int, config: MixedConfig) -> None:
    if not _group_fits(group, config):
        depth = config.tile_k // config.pieces
        raise InvalidValueError(
            "the groups of scales do not fit the steps along k",
            got=f"groups of {group}, steps of {config.tile_k} in {config.pieces} pieces",
            expected=f"groups of a multiple of {depth} that divides a step or that steps divide",
        )


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    rest = -array.shape[axis] % multiple
    if not rest:
        return array
    widths = [(0, rest if one == axis else 0) for one in range(array.ndim)]
    return jnp.pad(array, widths)
