"""Which tiles of the other operand a block goes through."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite_std.ops.flash.arguments import Extras, in_whole_tiles
from pallasite_std.ops.flash.problem import Problem, View

SPANS, INDEX = "spans", "index"
"""Operands of the kernels: tiles of segments, tiles of a block mask."""


# On the host --------------------------------------------------------------------------------------


def spans(extras: Extras, rows: int, columns: int) -> jax.Array:
    """For each tile of queries the tiles of keys [begin, end) that may have the same segments.

    Args:
      rows, columns: queries and keys of a tile.

    Returns:
      (batch, tiles of queries, 2) of int32. Segments in ascending order make it exact up to the
      tiles at both ends.
    """
    ends = [
        _ends(one, size) for one, size in ((extras.q_segments, rows), (extras.kv_segments, columns))
    ]
    (q_low, q_high), (k_low, k_high) = ends
    meet = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    count = meet.shape[2]
    first = jnp.argmax(meet, axis=2)
    last = count - jnp.argmax(meet[:, :, ::-1], axis=2)
    found = jnp.any(meet, axis=2)
    both = (jnp.where(found, first, 0), jnp.where(found, last, 0))
    return jnp.stack(both, axis=2).astype(jnp.int32)


def _ends(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest segment of each tile."""
    rest = -segments.shape[1] % size
    filled = jnp.pad(segments, ((0, 0), (0, rest)), mode="edge").reshape(
        segments.shape[0], -1, size
    )
    return filled.min(axis=2), filled.max(axis=2)


def tiles_seen(problem: Problem, extras: Extras, rows: int, columns: int) -> jax.Array:
    """The block mask in tiles, without those that lengths, window or segments hide as a whole.

    Args:
      rows, columns: queries and keys of a tile, which divide those of a block.

    Returns:
      (batch or 1, heads or 1, tiles of queries, tiles of keys), of those that exist.
    """
    mask: jax.Array = extras.block_mask
    sizes = ((rows, problem.q_seq), (columns, problem.kv_seq))
    for axis, (block, (size, most)) in enumerate(zip(problem.mask_block, sizes, strict=True), 2):
        repeated = jnp.repeat(mask, block // size, axis)
        mask = lax.slice_in_dim(repeated, 0, -(-most // size), axis=axis)
    query = jnp.arange(mask.shape[2])[:, None] * rows
    key = jnp.arange(mask.shape[3])[None, :] * columns
    q_lengths, kv_lengths = (
        jnp.full((1,), most) if given is None else jnp.minimum(given, most)
        for given, most in (
            (extras.q_lengths, problem.q_seq),
            (extras.kv_lengths, problem.kv_seq),
        )
    )
    queries, keys = q_lengths[:, None, None], kv_lengths[:, None, None]
    offset = keys - queries
    seen = (query < queries) & (key < keys)
    if problem.right is not None:
        seen &= key <= query + (rows - 1) + offset + problem.right
    if problem.left is not None:
        seen &= key + (columns - 1) >= query + offset - problem.left
    if extras.q_segments is not None:
        found = spans(extras, rows, columns)
        number = jnp.arange(mask.shape[3])
        seen &= (number >= found[:, :, :1]) & (number < found[:, :, 1:])
    return mask & seen[:, None]


def index(seen: jax.Array) -> jax.Array:
    """For each row of a mask how many columns are seen, then these columns.

    Args:
      seen: (..., rows, columns).

    Returns:
      (..., rows, 1 + columns) of int32.
    """
    counts = jnp.sum(seen, axis=-1, keepdims=True)
    order = jnp.argsort(~seen, axis=-1, stable=True)
    return jnp.concatenate([counts, order], axis=-1).astype(jnp.int32)


def index_of_keys(problem: Problem, seen: jax.Array) -> jax.Array:
    """For each block of keys how many tiles of queries of the heads that share it see it, then
    these, as ``head in the group * tiles + tile``.

    Returns:
      (batch or 1, kv_heads or 1, blocks of keys, 1 + group * tiles of queries) of int32.
    """
    batch, heads, rows, columns = seen.shape
    if heads == 1:
        by_head = jnp.broadcast_to(seen[:, :, None], (batch, 1, problem.group, rows, columns))
    else:
        by_head = seen.reshape(batch, problem.kv_heads, problem.group, rows, columns)
    return index(jnp.moveaxis(by_head, 4, 2).reshape(*by_head.shape[:2], columns, -1))


def with_operands(
    problem: Problem, extras: Extras, rows: int, columns: int, *, by_keys: bool = False
) -> tuple[Problem, list[jax.Array]]:
    """The problem of a kernel that gets these arrays, and the arrays as it reads them.

    Args:
      rows, columns: queries and keys of a tile; arrays are filled up to whole tiles.
      by_keys: whether a block of the kernel has a tile of keys and goes through queries.
    """
    found = {
        name: given
        for name, given in zip(Extras._fields, extras, strict=True)
        if given is not None and name != "block_mask"
    }
    found = in_whole_tiles(found, rows, columns)
    if extras.block_mask is not None:
        # Tiles of what a block of the kernel goes through, whole blocks of the mask of the others.
        if by_keys:
            seen = tiles_seen(problem, extras, rows, problem.mask_block[1])
            found[INDEX] = index_of_keys(problem, seen)
        else:
            found[INDEX] = index(tiles_seen(problem, extras, problem.mask_block[0], columns))
    elif extras.q_segments is not None:
        turned = extras._replace(q_segments=extras.kv_segments, kv_segments=extras.q_segments)
        found[SPANS] = spans(turned, columns, rows) if by_keys else spans(extras, rows, columns)
    shared = {name: found[name].shape for name in ("bias", "slopes", INDEX) if name in found}
    problem = dataclasses.replace(
        problem,
        operands=tuple(found),
        of_batch=frozenset(name for name, shape in shared.items() if shape[0] != 1),
        of_head=frozenset(
            name for name, shape in shared.items() if shape[1] != 1 or name == "slopes"
        ),
    )
    return problem, list(found.values())


# In kernels ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Steps:
    """The tiles that a block goes through, one at a step.

    Attributes:
      count: how many.
      size: keys, or queries, of a tile.
      first: the number of the first one, where they follow each other.
      entries: else a reference to the numbers of tiles, after how many there are.
      per_head: where steps go through several heads: tiles of one head.
    """

    count: Any
    size: int
    first: Any = None
    entries: Any = None
    per_head: Any = None

    def place(self, step: Any) -> tuple[Any, Any]:
        """The head, counted from the first one, and the first key or query of a step."""
        if self.entries is not None:
            tile = self.entries[1 + step]
            if self.per_head is None:
                return jnp.int32(0), tile * self.size
            return lax.div(tile, self.per_head), lax.rem(tile, self.per_head) * self.size
        head = jnp.int32(0)
        if self.per_head is not None:
            head = lax.div(step, lax.max(self.per_head, 1))
            step = step - head * self.per_head
        return head, (self.first + step) * self.size


def over_keys(view: View, start: Any, rows: int, size: int) -> Steps:
    """The tiles of ``size`` keys that a tile of queries goes through."""
    problem = view.problem
    if problem.has(INDEX):
        block = lax.div(start, problem.mask_block[0])
        entries = view.refs[INDEX].at[(*view.entry(INDEX), block)]
        return Steps(jnp.where(start < view.q_length, entries[0], 0), size, None, entries)
    begin, end = view.keys_seen(start, rows)
    first, last = lax.div(begin, size), lax.div(end + (size - 1), size)
    if problem.has(SPANS):
        tile = lax.div(start, rows)
        first = lax.max(first, view.refs[SPANS][view.batch, tile, 0])
        last = lax.min(last, view.refs[SPANS][view.batch, tile, 1])
    return Steps(lax.max(last - first, 0), size, first)


def over_queries(view: View, kv_head: Any, start: Any, rows: int, size: int) -> Steps:
    """The tiles of ``size`` queries that a tile of keys goes through, of all heads of its group."""
    problem = view.problem
    if problem.has(INDEX):
        block = lax.div(start, problem.mask_block[1])
        entries = view.refs[INDEX].at[(*view.entry(INDEX, kv_head), block)]
        count = jnp.where(start < view.kv_length, entries[0], 0)
        return Steps(count, size, None, entries, -(-problem.q_seq // size))
    begin, end = view.queries_seeing(start, rows)
    first, last = lax.div(begin, size), lax.div(end + (size - 1), size)
    if problem.has(SPANS):
        tile = lax.div(start, rows)
        first = lax.max(first, view.refs[SPANS][view.batch, tile, 0])
        last = lax.min(last, view.refs[SPANS][view.batch, tile, 1])
    tiles = lax.max(last - first, 0)
    return Steps(tiles * problem.group, size, first, per_head=tiles)
