"""The arguments of grouped (ragged) GEMM, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    accepted_dtypes,
    as_array,
    check_config,
    check_extents_along_k,
    flag,
    float_dtype,
)

HALF = (jnp.bfloat16, jnp.float16)


def ragged_call(
    a: Any,
    b: Any,
    group_sizes: Any,
    *,
    transpose_b: bool,
    out_dtype: Any,
    config: Any,
    config_type: type,
    dtypes: tuple[Any, ...] = HALF,
) -> tuple[jax.Array, np.dtype[Any]]:
    """The sizes as int32 and the dtype of the result of ``ragged_matmul``.

    Args:
      config_type: of configurations.
      dtypes: of operands, that the implementation takes.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    name = "ragged_matmul"
    out_dtype = _operands(name, a, b, (2, 3), out_dtype, config, config_type, dtypes)
    sizes = _sizes(group_sizes, b.shape[0])
    transpose_b = flag(transpose_b, "transpose_b")
    depth = b.shape[2] if transpose_b else b.shape[1]
    check_extents_along_k(a, b, a.shape[1], depth, transpose_b=transpose_b)
    return sizes, out_dtype


def transposed_ragged_call(
    a: Any,
    b: Any,
    group_sizes: Any,
    *,
    out_dtype: Any,
    config: Any,
    config_type: type,
    dtypes: tuple[Any, ...] = HALF,
) -> tuple[jax.Array, np.dtype[Any]]:
    """The same of ``transposed_ragged_matmul``."""
    name = "transposed_ragged_matmul"
    out_dtype = _operands(name, a, b, (2, 2), out_dtype, config, config_type, dtypes)
    sizes = _sizes(group_sizes, None)
    if a.shape[0] != b.shape[0]:
        raise InvalidValueError(
            "a and b do not have the same number of rows",
            got=f"{a.shape[0]} and {b.shape[0]}",
        )
    return sizes, out_dtype


def _operands(
    name: str,
    a: Any,
    b: Any,
    ranks: tuple[int, int],
    out_dtype: Any,
    config: Any,
    config_type: type,
    dtypes: tuple[Any, ...],
) -> np.dtype[Any]:
    check_config(config, config_type)
    accepted = tuple(np.dtype(one) for one in dtypes)
    for array, what, rank in ((a, "a", ranks[0]), (b, "b", ranks[1])):
        _check(name, array, what, rank, accepted)
    results = tuple(dict.fromkeys((*accepted, np.dtype(np.float32))))
    result = float_dtype(a.dtype if out_dtype is None else out_dtype, results)
    if a.dtype != b.dtype:
        raise InvalidTypeError("a and b have different dtypes", got=f"{a.dtype} and {b.dtype}")
    return result


def _check(
    name: str, array: Any, what: str, rank: int, accepted: tuple[np.dtype[Any], ...]
) -> None:
    if not hasattr(array, "shape") or len(array.shape) != rank:
        raise InvalidTypeError(
            f"{what} does not have {rank} dimensions", got=getattr(array, "shape", array)
        )
    if np.dtype(array.dtype) not in accepted:
        raise InvalidTypeError(
            f"{what} has a dtype that this product does not take",
            got=array.dtype,
            expected=accepted_dtypes(accepted, name),
        )


def _sizes(group_sizes: Any, groups: int | None) -> jax.Array:
    sizes = as_array(group_sizes, "group_sizes")
    fits = sizes.ndim == 1 and groups in (None, sizes.shape[0])
    if not fits or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise InvalidTypeError(
            "group_sizes is not a vector with the size of each group",
            got=f"{sizes.dtype}{list(sizes.shape)}",
            expected=f"integers of shape ({'groups' if groups is None else groups},)",
        )
    return sizes.astype(jnp.int32)
