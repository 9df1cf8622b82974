"""Matrix products of operands, or with results, that devices have parts of.

They consist of two kernels: the collective one of this package, and the product that
``pallasite.ops.matmul`` chooses for the target. The second begins when the first has ended. On
Hopper, one kernel gathers and multiplies at the same time, where the shapes are whole tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import ops
from pallasite.plugin import InvalidTypeError, InvalidValueError, select_target
from pallasite.plugin.jax_internals import match_varying_axes
from pallasite_multigpu.ops import choice, tuning
from pallasite_multigpu.ops.api import all_gather, reduce_scatter
from pallasite_multigpu.ops.devices import devices_along, varying_along
from pallasite_std.api import in_32_bits

SCATTERS = True
"""Whether a kernel of Hopper sends tiles of a product to the devices that they belong to."""


@in_32_bits
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
    lhs, rhs = varying_along(axis_name, lhs, rhs)
    dtype = jnp.dtype(out_dtype or lhs.dtype)
    if not (lhs.size and rhs.size):
        return _zeros(lhs.shape[0] * devices_along(axis_name), rhs, dtype)
    if config is None and choice.has_hopper():
        from pallasite_multigpu.ops import gathered_product

        config = _tuned(
            *("all_gather_matmul", lhs, rhs, axis_name, dtype),
            *(gathered_product.default, gathered_product.configs, _gathered_product),
        )
    if config is not None and _fuses(lhs, rhs, axis_name, dtype, config):
        return _gathered_product(lhs, rhs, axis_name, dtype, config)
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


@in_32_bits
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
      out_dtype: of the result, and of what devices send of their products, which is rounded to it;
        sums of these are made in float32. By default that of the operands.
      config: of the product: what ``pallasite.ops.matmul`` takes on this target.

    Gradients are taken of both operands.

    Returns:
      (m / devices, n).

    Raises:
      InvalidTypeError, InvalidValueError: operands that do not fit.
    """
    _check(lhs, rhs)
    lhs, rhs = varying_along(axis_name, lhs, rhs)
    dtype = jnp.dtype(out_dtype or lhs.dtype)
    count = devices_along(axis_name)
    if not (lhs.size and rhs.size) and lhs.shape[0] % count == 0:
        return _zeros(lhs.shape[0] // count, rhs, dtype)
    if config is None and SCATTERS and choice.has_hopper():
        from pallasite_multigpu.ops import scattered_product

        config = _tuned(
            *("matmul_reduce_scatter", lhs, rhs, axis_name, dtype),
            *(scattered_product.default, scattered_product.configs, _scattered_product),
        )
    if config is not None and _scatters(lhs, rhs, axis_name, dtype, config):
        return _scattered_product(lhs, rhs, axis_name, dtype, config)
    return reduce_scatter(_product(lhs, rhs, out_dtype, config), axis_name=axis_name)


def _tuned(
    name: str,
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: Hashable,
    dtype: Any,
    default: Callable[..., Any],
    candidates: Callable[..., Iterable[Any]],
    run: Callable[..., jax.Array],
) -> Any:
    """The configuration of a kernel that communicates, if the caller gives none: of those that fit.
    None if there shall be two kernels."""
    (m, k), n, count = lhs.shape, rhs.shape[1], devices_along(axis_name)
    usual = default(m, n, k, lhs.dtype, dtype, count)
    if usual is None:
        return None
    return tuning.chosen(
        name,
        [lhs, rhs],
        axis_name,
        lambda: [usual, *candidates(m, n, k, lhs.dtype, dtype, count)],
        usual,
        lambda one, a, b: run(a, b, axis_name, dtype, one),
        dtype.name,
    )


def _scatters(
    lhs: jax.Array, rhs: jax.Array, axis_name: Hashable, out_dtype: Any, config: Any
) -> bool:
    """Whether tiles of the product are sent as they are made, on this target."""
    if not SCATTERS or not choice.has_hopper():
        return False
    from pallasite_multigpu.ops import scattered_product

    (m, k), n, count = lhs.shape, rhs.shape[1], devices_along(axis_name)
    return scattered_product.fits(m, n, k, lhs.dtype, out_dtype or lhs.dtype, count, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _scattered_product(
    lhs: jax.Array, rhs: jax.Array, axis: Hashable, out_dtype: Any, config: Any
) -> jax.Array:
    from pallasite_multigpu.ops import scattered_product

    blocks = select_target().multiprocessors or 132
    count = devices_along(axis)
    return scattered_product.scattered_product(lhs, rhs, axis, count, out_dtype, blocks, config)


def _scattered_product_fwd(lhs: Any, rhs: Any, axis: Any, out_dtype: Any, config: Any) -> Any:
    return _scattered_product(lhs, rhs, axis, out_dtype, config), (lhs, rhs)


def _scattered_product_bwd(
    axis: Any, out_dtype: Any, config: Any, operands: Any, gradient: Any
) -> Any:
    del out_dtype, config
    lhs, rhs = operands
    whole = all_gather(gradient.astype(lhs.dtype), axis_name=axis)
    return ops.matmul(whole, rhs, transpose_b=True), ops.matmul(lhs, whole, transpose_a=True)


_scattered_product.defvjp(in_32_bits(_scattered_product_fwd), in_32_bits(_scattered_product_bwd))


def _fuses(
    lhs: jax.Array, rhs: jax.Array, axis_name: Hashable, out_dtype: Any, config: Any
) -> bool:
    """Whether one kernel does both, on this target and for these operands."""
    if not choice.has_hopper():
        return False
    from pallasite_multigpu.ops import gathered_product

    (m, k), n, count = lhs.shape, rhs.shape[1], devices_along(axis_name)
    return gathered_product.fits(m, n, k, lhs.dtype, out_dtype, count, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _gathered_product(
    lhs: jax.Array, rhs: jax.Array, axis: Hashable, out_dtype: Any, config: Any
) -> jax.Array:
    from pallasite_multigpu.ops import gathered_product

    blocks = select_target().multiprocessors or 132
    count = devices_along(axis)
    found = gathered_product.gathered_product(lhs, rhs, axis, count, out_dtype, blocks, config)
    return found[0]


def _gathered_product_fwd(lhs: Any, rhs: Any, axis: Any, out_dtype: Any, config: Any) -> Any:
    return _gathered_product(lhs, rhs, axis, out_dtype, config), (lhs, rhs)


def _gathered_product_bwd(
    axis: Any, out_dtype: Any, config: Any, operands: Any, gradient: Any
) -> Any:
    del out_dtype, config
    lhs, rhs = operands
    gradient = gradient.astype(lhs.dtype)
    whole = all_gather(lhs, axis_name=axis)
    of_rhs = ops.matmul(whole, gradient, transpose_a=True)
    return reduce_scatter(ops.matmul(gradient, rhs, transpose_b=True), axis_name=axis), of_rhs


_gathered_product.defvjp(in_32_bits(_gathered_product_fwd), in_32_bits(_gathered_product_bwd))


def _zeros(rows: int, rhs: jax.Array, dtype: Any) -> jax.Array:
    """The product of matrices of which one has no elements. XLA ends the process where gradients
    that are compiled keep such a matrix of several devices."""
    made: jax.Array = match_varying_axes(jnp.zeros((rows, rhs.shape[1]), dtype), rhs)[0]
    return made


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
