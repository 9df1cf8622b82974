"""The kernels of a mixture of experts: rows go to the devices of their experts, and come back.

What is sent is described by three arrays with one entry for each row, in the order of experts: the
number of the row in the source, its expert, and its number among the rows of that expert. Each
device tells all others how many rows it has for each expert; from the counts of all of them, every
device knows where its rows go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_multigpu.ops.kernels import announce
from pallasite_multigpu.ops.tiles import BLOCKS, LANES, elements_of_tile
from pallasite_multigpu.protocol.layout import Trap
from pallasite_multigpu.rules.giving_up import give_up

UNROLL = 8
"""Vectors of 16 bytes that a lane has in flight."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """How experts are spread over devices.

    Attributes:
      axis: of the mesh.
      count: devices along it.
      number: of experts; each device has as many, in order.
      capacity: rows that a device has room for.
    """

    axis: Hashable
    count: int
    number: int
    capacity: int

    @property
    def here(self) -> int:
        """Experts of a device."""
        return self.number // self.count

    @property
    def padded(self) -> int:
        """Entries of an array with one for each expert."""
        return -(-self.number // LANES) * LANES


def _parts(columns: int, itemsize: int, arrays: int) -> list[Any]:
    """Parts of a row that a block moves at once."""
    width = elements_of_tile(itemsize, arrays, UNROLL)
    return [pl.ds(first, min(width, columns - first)) for first in range(0, columns, width)]


def _kernel(
    body: Callable[..., None], out_type: Any, blocks: int, name: str, scratch: Sequence[Any] = ()
) -> Callable[..., Any]:
    made: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=(BLOCKS,),
        scratch_types=list(scratch),
        kernel_name=name,
    )
    return made


def _each(number: Any, blocks: int, use: Callable[[Any, Any], Any], carry: Any = None) -> Any:
    """Calls ``use(item, carry)`` for this block's share of items, neighbouring ones."""
    block = lax.axis_index(BLOCKS)
    share = lax.div(number + blocks - 1, blocks)
    first = lax.min(block * share, number)
    last = lax.min(first + share, number)
    return lax.fori_loop(first, last, use, carry)


def dispatch(
    x: jax.Array,
    counts: jax.Array,
    sources: jax.Array,
    experts: jax.Array,
    numbers: jax.Array,
    layout: Experts,
    blocks: int,
) -> tuple[jax.Array, jax.Array]:
    """Sends rows to the devices of their experts.

    Args:
      x: (tokens, columns).
      counts: (1, padded), int32: how many rows each expert gets from here.
      sources, experts, numbers: (rows,), int32; see above. Rows beyond the sum of the counts go
        nowhere.
      layout: of experts.
      blocks: of the kernel.

    Returns:
      (capacity, columns), by expert and device that they come from, with zeros behind; and the
      counts of all devices, (devices, padded).
    """
    axis, count, padded = layout.axis, layout.count, layout.padded
    parts = _parts(x.shape[1], x.dtype.itemsize, 1)
    entries = lax.broadcasted_iota

    def body(
        x_ref: Any,
        counts_ref: Any,
        sources_ref: Any,
        experts_ref: Any,
        numbers_ref: Any,
        rows_ref: Any,
        all_ref: Any,
        arrived: Any,
    ) -> None:
        own, block = lax.axis_index(axis), lax.axis_index(BLOCKS)
        counted = pl.get_global(plgpu.SemaphoreType.REGULAR)

        @pl.when(block == 0)  # type: ignore[untyped-decorator]
        def _() -> None:
            mine = counts_ref[0, :]
            for offset in range(1, count):
                peer = {axis: lax.rem(own + offset, count)}
                plgpu.remote_ref(all_ref, peer)[own, :] = mine
            all_ref[own, :] = mine
            for offset in range(1, count):
                pl.semaphore_signal(counted, 1, device_id={axis: lax.rem(own + offset, count)})
            pl.semaphore_signal(counted, 1)

        pl.semaphore_wait(counted, count, decrement=False)

        def total(shown: Callable[[Any, int], Any]) -> Any:
            """The sum of the counts that are shown, of all devices."""
            index = entries(jnp.int32, (padded,), 0)
            found = [
                jnp.where(shown(index, device), all_ref[device, :], 0) for device in range(count)
            ]
            return jnp.sum(sum(found[1:], found[0]))

        first_here = own * layout.here
        used = total(lambda e, _: (e >= first_here) & (e < first_here + layout.here))

        @pl.when(used > layout.capacity)  # type: ignore[untyped-decorator]
        def _() -> None:
            give_up(Trap.CAPACITY, used)

        def send(row: Any, carry: Any) -> Any:
            known, known_start = carry
            expert = experts_ref[row]
            # In range by its form, too: it need not be checked.
            device = lax.min(lax.max(lax.div(expert, layout.here), 0), count - 1)

            def start() -> Any:
                first = device * layout.here
                return total(
                    lambda e, sender: (
                        ((e >= first) & (e < expert)) | ((e == expert) & (sender < own))
                    )
                )

            place = lax.cond(expert == known, lambda: known_start, start)
            source, target = sources_ref[row], place + numbers_ref[row]

            @pl.when(target < layout.capacity)  # type: ignore[untyped-decorator]
            def _() -> None:
                there = plgpu.remote_ref(rows_ref, {axis: device})
                for columns in parts:
                    there[target, columns] = x_ref[source, columns]

            return expert, place

        index = entries(jnp.int32, (padded,), 0)
        sent = jnp.sum(jnp.where(index < layout.number, counts_ref[0, :], 0))
        _each(sent, blocks, send, (jnp.int32(-1), jnp.int32(0)))

        def clear(row: Any, _: Any) -> None:
            for columns in parts:
                rows_ref[used + row, columns] = jnp.zeros((columns.size,), x.dtype)

        _each(lax.max(layout.capacity - used, 0), blocks, clear)
        announce(arrived, axis, own, count)

    out_type = [
        jax.ShapeDtypeStruct((layout.capacity, x.shape[1]), x.dtype),
        jax.ShapeDtypeStruct((count, padded), jnp.int32),
    ]
    scratch = [plgpu.SemaphoreType.REGULAR]
    kernel = _kernel(body, out_type, blocks, "moe_dispatch", scratch)
    rows, everywhere = kernel(x, counts, sources, experts, numbers)
    return rows, everywhere


def collect(
    rows: jax.Array,
    devices: jax.Array,
    places: jax.Array,
    weights: jax.Array | None,
    axis: Hashable,
    count: int,
    blocks: int,
    dtype: Any,
) -> jax.Array:
    """For each token the sum of its rows, which other devices have.

    Args:
      rows: (capacity, columns).
      devices, places: (tokens, k), int32: where its rows are; -1 for none.
      weights: (tokens, k), float32, or None for ones.
      axis: of the mesh.
      count: devices along it.
      blocks: of the kernel.
      dtype: of the sum while it is made.
    """
    (tokens, k), columns = devices.shape, rows.shape[1]
    parts = _parts(columns, 4, k)

    def body(rows_ref: Any, devices_ref: Any, places_ref: Any, *rest: Any) -> None:
        *given, out_ref = rest

        def add(token: Any, _: Any) -> None:
            found = [
                _at(rows_ref, devices_ref, places_ref, axis, count, token, n) for n in range(k)
            ]
            factors = [given[0][token, n] if given else None for n in range(k)]
            for part in parts:
                values = [there[place, part].astype(dtype) for there, place, _ in found]
                total = jnp.zeros((part.size,), dtype)
                for value, (_, _, shown), factor in zip(values, found, factors, strict=True):
                    term = value if factor is None else value * factor
                    total = total + jnp.where(shown, term, jnp.zeros_like(term))
                out_ref[token, part] = total.astype(rows.dtype)

        _each(jnp.int32(tokens), blocks, add)

    out_type = jax.ShapeDtypeStruct((tokens, columns), rows.dtype)
    given = () if weights is None else (weights,)
    result: jax.Array = _kernel(body, out_type, blocks, "moe_combine")(
        rows, devices, places, *given
    )
    return result


def _at(
    rows: Any, devices: Any, places: Any, axis: Hashable, count: int, token: Any, number: int
) -> tuple[Any, Any, Any]:
    """A row of a token: the reference to the rows there, its place, and whether there is one."""
    place = places[token, number]
    device = lax.clamp(jnp.int32(0), devices[token, number], jnp.int32(count - 1))
    return plgpu.remote_ref(rows, {axis: device}), lax.max(place, 0), place >= 0


def products(
    rows: jax.Array,
    others: jax.Array,
    devices: jax.Array,
    places: jax.Array,
    axis: Hashable,
    count: int,
    blocks: int,
) -> jax.Array:
    """For each token and each of its rows, the inner product with the token's row of ``others``.

    Args:
      rows, devices, places, axis, count, blocks: as of :func:`collect`.
      others: (tokens, columns).

    Returns:
      (tokens, k), float32.
    """
    tokens, k = devices.shape
    parts = _parts(rows.shape[1], 4, 2)

    def body(
        rows_ref: Any, others_ref: Any, devices_ref: Any, places_ref: Any, out_ref: Any
    ) -> None:
        def multiply(item: Any, _: Any) -> None:
            token, number = lax.div(item, k), lax.rem(item, k)
            there, place, shown = _at(rows_ref, devices_ref, places_ref, axis, count, token, number)
            total = jnp.float32(0)
            for part in parts:
                pair = (there[place, part], others_ref[token, part])
                wide = [one.astype(jnp.float32) for one in pair]
                total = total + jnp.sum(wide[0] * wide[1])
            out_ref[token, number] = jnp.where(shown, total, jnp.float32(0))

        _each(jnp.int32(tokens * k), blocks, multiply)

    out_type = jax.ShapeDtypeStruct((tokens, k), jnp.float32)
    result: jax.Array = _kernel(body, out_type, blocks, "moe_products")(
        rows, others, devices, places
    )
    return result


def scatter(
    x: jax.Array,
    devices: jax.Array,
    places: jax.Array,
    weights: jax.Array,
    used: jax.Array,
    layout: Experts,
    blocks: int,
) -> jax.Array:
    """Sends each token's row, times its weights, to where its rows are: the transpose of
    :func:`collect`.

    Args:
      x: (tokens, columns).
      devices, places, weights: as of :func:`collect`.
      used: (1,), int32: rows that this device gets.
      layout: of experts.
      blocks: of the kernel.

    Returns:
      (capacity, columns), with zeros behind the rows.
    """
    (tokens, k), columns = devices.shape, x.shape[1]
    parts = _parts(columns, 4, 1)
    axis, count = layout.axis, layout.count

    def body(
        x_ref: Any,
        devices_ref: Any,
        places_ref: Any,
        weights_ref: Any,
        used_ref: Any,
        rows_ref: Any,
        arrived: Any,
    ) -> None:
        def send(item: Any, _: Any) -> None:
            token, number = lax.div(item, k), lax.rem(item, k)
            there, place, shown = _at(rows_ref, devices_ref, places_ref, axis, count, token, number)

            @pl.when(shown)  # type: ignore[untyped-decorator]
            def put() -> None:
                weight = weights_ref[token, number]
                for part in parts:
                    value = x_ref[token, part].astype(jnp.float32) * weight
                    there[place, part] = value.astype(x.dtype)

        _each(jnp.int32(tokens * k), blocks, send)
        rest = used_ref[0]

        def clear(row: Any, _: Any) -> None:
            for part in parts:
                rows_ref[rest + row, part] = jnp.zeros((part.size,), x.dtype)

        _each(lax.max(layout.capacity - rest, 0), blocks, clear)
        announce(arrived, axis, lax.axis_index(axis), count)

    out_type = jax.ShapeDtypeStruct((layout.capacity, columns), x.dtype)
    scratch = [plgpu.SemaphoreType.REGULAR]
    result: jax.Array = _kernel(body, out_type, blocks, "moe_scatter", scratch)(
        x, devices, places, weights, used
    )
    return result
