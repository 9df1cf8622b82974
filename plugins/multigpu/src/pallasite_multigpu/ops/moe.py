"""``moe_dispatch`` and ``moe_combine``: tokens of a mixture of experts, which devices share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.plugin import InvalidTypeError, InvalidValueError, select_target
from pallasite.plugin.jax_internals import match_varying_axes
from pallasite_multigpu.ops import moe_kernels
from pallasite_multigpu.ops.devices import devices_along, varying_along
from pallasite_multigpu.ops.moe_kernels import Experts
from pallasite_std.api import in_32_bits

BLOCKS_OF_MULTIPROCESSOR = 2
"""Blocks of a kernel for each multiprocessor."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("devices", "places", "received"),
    meta_fields=("num_experts", "capacity"),
)
@dataclasses.dataclass(frozen=True)
class MoeRoute:
    """Where the rows of a device's tokens are, and what it got; for :func:`moe_combine`.

    Attributes:
      devices: (tokens, k), int32: the index of the device along the axis, -1 for none.
      places: (tokens, k), int32: the number of the row there, -1 for none.
      received: int32 scalar: rows that this device got.
      num_experts: of all devices.
      capacity: rows that a device has room for.
    """

    devices: jax.Array
    places: jax.Array
    received: jax.Array
    num_experts: int
    capacity: int


@in_32_bits
def moe_dispatch(
    x: jax.Array,
    experts: jax.Array,
    *,
    axis_name: Hashable,
    num_experts: int,
    capacity: int | None = None,
) -> tuple[jax.Array, jax.Array, MoeRoute]:
    """Sends each token to the devices of its experts, in one kernel.

    Device ``i`` of ``n`` has the experts from ``i * num_experts / n`` on. Devices tell each other
    in the kernel how many rows they send, and write them where they belong: what
    ``lax.ragged_all_to_all`` does with sorted tokens, and their sorting by expert.

    Args:
      x: (tokens, columns), this device's tokens; of any dtype of at most 32 bits.
      experts: (tokens, k), integers: the experts of each token. A number that is no expert's stands
        for none.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      num_experts: of all devices; a multiple of their number.
      capacity: rows that a device has room for. By default as many as there may be, which is every
        row of all devices. If there are more, the kernel gives up: an error that says how many.

    It can be differentiated with respect to x.

    Returns:
      The rows for this device's experts, (capacity, columns), by expert, then by the device and the
      token that they come from, with zeros behind them; how many each of its experts has, int32
      (num_experts / n,), what ``pallasite.ops.ragged_matmul`` takes; and what
      :func:`moe_combine` needs.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.
    """
    count = devices_along(axis_name)
    _check(x, experts, num_experts, count, capacity)
    if capacity is None:
        capacity = max(1, count * experts.size)
    layout = Experts(axis_name, count, num_experts, capacity)
    x, experts = varying_along(axis_name, x, experts)
    rows, counts, devices, places = _dispatch(x, experts.astype(jnp.int32), layout)
    first = lax.axis_index(axis_name) * layout.here
    sizes = lax.dynamic_slice_in_dim(counts.sum(0), first, layout.here)
    route = MoeRoute(devices, places, sizes.sum(), num_experts, capacity)
    return rows, sizes, route


@in_32_bits
def moe_combine(
    rows: jax.Array,
    weights: jax.Array | None,
    route: MoeRoute,
    *,
    axis_name: Hashable,
) -> jax.Array:
    """The weighted sum of what the experts have made of each token, in one kernel.

    Args:
      rows: (capacity, columns): the results for the rows that :func:`moe_dispatch` returned, in
        their places.
      weights: (tokens, k), of floating-point numbers, for the experts that ``moe_dispatch`` got; or
        None for ones.
      route: what it returned.
      axis_name: as there.

    It can be differentiated with respect to rows and weights. Sums are made in float32 if rows are
    of floating-point numbers, in the order of k.

    Returns:
      (tokens, columns), of the dtype of rows; zeros for a token without experts.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.
    """
    if rows.ndim != 2 or rows.shape[0] != route.capacity:
        raise InvalidValueError(
            "moe_combine: rows are not as many as moe_dispatch returned",
            got=f"{list(rows.shape)}",
            expected=f"({route.capacity}, columns)",
        )
    _check_width("moe_combine: rows have", rows.dtype)
    if weights is not None and (
        weights.shape != route.places.shape or not jnp.issubdtype(weights.dtype, jnp.floating)
    ):
        raise InvalidTypeError(
            "moe_combine: weights do not fit the tokens and their experts",
            got=f"{weights.dtype}{list(weights.shape)}",
            expected=f"floating-point numbers of shape {list(route.places.shape)}",
        )
    count = devices_along(axis_name)
    layout = Experts(axis_name, count, route.num_experts, route.capacity)
    if weights is None:
        weights = jnp.ones(route.places.shape, jnp.float32)
    of_route = (route.devices, route.places, route.received)
    return _combine(*varying_along(axis_name, rows, weights, *of_route), layout)


def _check(x: Any, experts: Any, num_experts: int, count: int, capacity: int | None) -> None:
    if getattr(x, "ndim", 0) != 2:
        raise InvalidTypeError(
            "moe_dispatch: x does not have two dimensions",
            got=getattr(x, "shape", type(x).__name__),
            expected="(tokens, columns)",
        )
    _check_width("moe_dispatch: x has", x.dtype)
    fits = getattr(experts, "ndim", 0) == 2 and experts.shape[0] == x.shape[0]
    if not fits or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise InvalidTypeError(
            "moe_dispatch: experts do not fit the tokens",
            got=f"{experts.dtype}{list(experts.shape)}",
            expected=f"integers of shape ({x.shape[0]}, k)",
        )
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % count:
        raise InvalidValueError(
            "moe_dispatch: the experts cannot be divided among the devices",
            got=f"num_experts {num_experts}",
            expected=f"a multiple of {count}, the number of devices",
        )
    if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
        raise InvalidValueError(
            "moe_dispatch: the capacity is no positive number", got=repr(capacity)
        )


def _check_width(what: str, dtype: Any) -> None:
    if dtype.itemsize > 4:
        raise InvalidTypeError(
            f"{what} elements of 64 bits",
            got=dtype,
            expected="a dtype of at most 32 bits",
            hint="convert it, with astype(jnp.float32) for instance",
        )


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros, of a type that varies over the axes over which an array does."""
    made: jax.Array = match_varying_axes(jnp.zeros(shape, dtype), like)[0]
    return made


def _blocks(items: int) -> int:
    most = (select_target().multiprocessors or 132) * BLOCKS_OF_MULTIPROCESSOR
    return max(1, min(most, items))


# Rows to their experts ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatch(
    x: jax.Array, experts: jax.Array, layout: Experts
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows, the counts of all devices, and for each token the devices and places."""
    shape, k = experts.shape, experts.shape[1]
    chosen = experts.reshape(-1)
    there = (chosen >= 0) & (chosen < layout.number)
    chosen = jnp.where(there, chosen, layout.number)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    by_expert = chosen[order]
    counts = jnp.zeros((layout.padded + 1,), jnp.int32).at[chosen].add(1)[: layout.padded]
    counts = jnp.where(jnp.arange(layout.padded) < layout.number, counts, 0)
    starts = jnp.cumsum(counts) - counts
    numbers = jnp.arange(chosen.size, dtype=jnp.int32) - starts[by_expert]
    if x.size and chosen.size:
        rows, everywhere = moe_kernels.dispatch(
            x,
            counts[None],
            order // k,
            jnp.minimum(by_expert, layout.number - 1),
            numbers,
            layout,
            _blocks(max(chosen.size, 1)),
        )
    else:
        rows = _zeros((layout.capacity, x.shape[1]), x.dtype, x)
        everywhere = _zeros((layout.count, layout.padded), jnp.int32, x)
    place = _starts(everywhere, layout)[by_expert] + numbers
    places = jnp.zeros_like(chosen).at[order].set(place)
    devices = jnp.where(there, chosen // layout.here, -1).reshape(shape)
    return rows, everywhere, devices, jnp.where(there, places, -1).reshape(shape)


def _starts(counts: jax.Array, layout: Experts) -> jax.Array:
    """For each expert, where this device's rows begin on the device of the expert."""
    own = lax.axis_index(layout.axis)
    totals = counts.sum(0)
    before = jnp.cumsum(totals) - totals
    # The first expert of each one's device.
    first = np.arange(layout.padded) // layout.here * layout.here
    earlier = jnp.where(jnp.arange(layout.count)[:, None] < own, counts, 0).sum(0)
    return before - before[np.minimum(first, layout.padded - 1)] + earlier


def _dispatch_fwd(x: Any, experts: Any, layout: Experts) -> Any:
    results = _dispatch(x, experts, layout)
    return results, results[2:]


def _dispatch_bwd(layout: Experts, saved: Any, gradients: Any) -> Any:
    devices, places = saved
    return _collect(gradients[0], devices, places, None, layout), None


_dispatch.defvjp(in_32_bits(_dispatch_fwd), in_32_bits(_dispatch_bwd))


# And back -----------------------------------------------------------------------------------------


def _collect(rows: Any, devices: Any, places: Any, weights: Any, layout: Experts) -> jax.Array:
    tokens = devices.shape[0]
    if not rows.size or not devices.size:
        return _zeros((tokens, rows.shape[1]), rows.dtype, rows)
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    return moe_kernels.collect(
        rows,
        devices,
        places,
        weights,
        layout.axis,
        layout.count,
        _blocks(tokens),
        jnp.float32 if floats else rows.dtype,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _combine(
    rows: jax.Array,
    weights: jax.Array,
    devices: jax.Array,
    places: jax.Array,
    received: jax.Array,
    layout: Experts,
) -> jax.Array:
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    factors = weights.astype(jnp.float32 if floats else rows.dtype)
    return _collect(rows, devices, places, factors, layout)


def _combine_fwd(
    rows: Any, weights: Any, devices: Any, places: Any, received: Any, layout: Experts
) -> Any:
    result = _combine(rows, weights, devices, places, received, layout)
    return result, (rows, weights, devices, places, received)


def _combine_bwd(layout: Experts, saved: Any, gradient: Any) -> Any:
    rows, weights, devices, places, received = saved
    if not rows.size or not devices.size:
        return jnp.zeros_like(rows), jnp.zeros_like(weights), None, None, None
    blocks = _blocks(devices.size)
    axis, count = layout.axis, layout.count
    of_weights = moe_kernels.products(rows, gradient, devices, places, axis, count, blocks)
    of_rows = moe_kernels.scatter(
        gradient.astype(rows.dtype),
        devices,
        places,
        weights.astype(jnp.float32),
        received.reshape(1),
        layout,
        blocks,
    )
    return of_rows, of_weights.astype(weights.dtype), None, None, None


_combine.defvjp(in_32_bits(_combine_fwd), in_32_bits(_combine_bwd))
