"""Matrix products of operands, or with results, that devices have parts of.

They consist of two kernels: the collective one of this package, and the product that
``pallasite.ops.matmul`` chooses for the target. The second begins when the first has ended.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

from pallasite import ops
from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_multigpu.ops.api import all_gather, reduce_scatter


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    axis_name: Hashable,
    out_dtype: Any = None,
    config: Any = None,
) -> jax.Array:
    """``all_gather(lhs) @ rhs``: the product of all devices' rows with this device's columns.

    Args:
      lhs: (m, k), this device's rows.
      rhs: (k, n), this device's columns; the same dtype.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      out_dtype: of the result; by default that of the operands.
      config: of the product: what ``pallasite.ops.matmul`` takes on this target.

    Gradients are taken of both operands.

    Returns:
      (devices * m, n).

    Raises:
      InvalidTypeError, InvalidValueError: operands that do not fit.
    """
    _check(lhs, rhs)
    whole = all_gather(lhs, axis_name=axis_name)
    return _product(whole, rhs, out_dtype, config)


def all_gather_lhs_matmul(
    lhs: jax.Array, rhs: jax.Array, axis_name: Hashable, *, config: Any = None, dtype: Any = None
) -> jax.Array:
    """:func:`all_gather_matmul` by the name and with the arguments of the reference backend.

    Args:
      lhs, rhs, axis_name, config: as there.
      dtype: of the result.
    """
    return all_gather_matmul(lhs, rhs, axis_name=axis_name, out_dtype=dtype, config=config)


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    axis_name: Hashable,
    out_dtype: Any = None,
    config: Any = None,
) -> jax.Array:
    """``reduce_scatter(lhs @ rhs)``: this device's rows of the sum of all devices' products.

    Args:
      lhs: (m, k), of which the devices have different parts of k; they divide m.
      rhs: (k, n); the same dtype.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      out_dtype: of the result, and of the products that are added; by default that of the operands.
      config: of the product: what ``pallasite.ops.matmul`` takes on this target.

    Gradients are taken of both operands.

    Returns:
      (m / devices, n).

    Raises:
      InvalidTypeError, InvalidValueError: operands that do not fit.
    """
    _check(lhs, rhs)
    return reduce_scatter(_product(lhs, rhs, out_dtype, config), axis_name=axis_name)


def _product(lhs: jax.Array, rhs: jax.Array, out_dtype: Any, config: Any) -> jax.Array:
    options = {} if config is None else {"config": config}
    made: jax.Array = ops.matmul(lhs, rhs, out_dtype=out_dtype, **options)
    return made


def _check(lhs: jax.Array, rhs: jax.Array) -> None:
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[1] != rhs.shape[0]:
        raise InvalidValueError(
            "these matrices have no product",
            got=f"{list(lhs.shape)} and {list(rhs.shape)}",
            expected="(m, k) and (k, n)",
        )
    if lhs.dtype != rhs.dtype:
        raise InvalidTypeError(
            "the operands of a product have different types",
            got=f"{lhs.dtype} and {rhs.dtype}",
            expected="the same dtype",
        )
