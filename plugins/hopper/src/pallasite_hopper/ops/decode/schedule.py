"""Which tiles of the cache a block goes through.

An item is one part of the queries of one head, or of several that a block has side by side, of one
sequence. The tiles of all items, one after the other, are cut into equal ranges, one for each block
("stream-K": M. Osama et al., arXiv 2301.03598), so all blocks end together, however the lengths
differ; these are known on the device only. A range has any number of whole items, and parts of two
at most: one that began in a range before, and one that goes on in the next. Parts leave partial
results, which the block whose range ends the item combines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite_hopper.ops.decode.config import DecodeConfig, head_tile, most_columns
from pallasite_std.api import DecodeProblem


@dataclasses.dataclass(frozen=True)
class Problem(DecodeProblem):
    """What attention is computed of, and how queries become columns of the products.

    Attributes:
      left: keys before its own position that a query sees, or None for all.
    """

    left: int | None = None

    @property
    def weights_dtype(self) -> Any:
        """What the values are multiplied by: 8-bit values are all exact in float16."""
        return np.dtype(np.float16) if self.narrow else self.dtype

    @property
    def head_tile(self) -> int:
        """Elements of a head in shared memory and registers."""
        return head_tile(self.head_dim)

    @property
    def lane_heads(self) -> int:
        """Query heads of a tile: those of a group, filled up to a multiple of 8."""
        return min(most_columns(self.head_dim), -(-self.group // 8) * 8)

    @property
    def group_parts(self) -> int:
        """Parts of a group that are worked on in turn."""
        return -(-self.group // self.lane_heads)

    @property
    def lane_tokens(self) -> int:
        """Tokens of a tile."""
        fitting = range(1, most_columns(self.head_dim) // self.lane_heads + 1)
        return max(count for count in fitting if self.tokens % count == 0)

    @property
    def columns(self) -> int:
        """Queries of a tile: token by token."""
        return self.lane_heads * self.lane_tokens

    @property
    def parts(self) -> int:
        """Parts of the queries of one sequence and head that are worked on in turn."""
        return self.group_parts * (self.tokens // self.lane_tokens)


@dataclasses.dataclass(frozen=True)
class Item:
    """One part of the queries of a sequence; values of the kernel.

    Attributes:
      sequence: its index.
      head: the first head of the cache.
      token: the first query.
      group_start: the first query head of those that share a head.
      length: rows of the cache.
      hidden: tiles at its beginning of which no query sees a row.
    """

    sequence: Any
    head: Any
    token: Any
    group_start: Any
    length: Any
    hidden: Any


_FEW = 32
"""Sequences whose lengths are loaded at once, sooner than a copy brings them."""


def loads_lengths(problem: Problem, config: DecodeConfig) -> bool:
    """Whether every lane loads the lengths, rather than all share a copy in shared memory."""
    return config.ahead and problem.batch <= _FEW


class Schedule:
    """The ranges of tiles, as values of a kernel.

    Attributes:
      units: items of one sequence.
      padded: extent of the lengths in shared memory.
    """

    def __init__(self, problem: Problem, config: DecodeConfig, lengths: Any):
        """``lengths``: a reference to ``padded`` integers in shared memory, or None; to all of them
        in global memory if lanes load them."""
        assert config.blocks is not None
        self.problem, self.config, self.lengths = problem, config, lengths
        self.blocks: int = config.blocks
        self.units = problem.kv_heads // config.heads * problem.parts
        self.loaded: list[Any] = []
        if lengths is None:
            tiles: Any = jnp.int32(problem.batch * self._most_tiles())
        elif loads_lengths(problem, config):
            self.loaded = [self._tiles(lengths[number]) for number in range(problem.batch)]
            tiles = sum(self.loaded[1:], self.loaded[0])
        else:
            entries = lengths[...]
            numbers = lax.broadcasted_iota(jnp.int32, entries.shape, 0)
            each = jnp.where(numbers < problem.batch, self._tiles(entries), 0)
            tiles = jnp.sum(each)
        self.total = tiles * self.units
        self.share = lax.div(self.total, jnp.int32(self.blocks))
        self.longer = self.total - self.share * self.blocks

    def start(self, block: Any) -> Any:
        """The first tile of a block; those before ``longer`` have one tile more than the others."""
        return block * self.share + lax.min(jnp.int32(block), self.longer)

    def block_of(self, tile: Any) -> Any:
        """The block whose range has a tile."""
        inside = tile - self.longer * (self.share + 1)
        after = self.longer + lax.div(inside, lax.max(self.share, jnp.int32(1)))
        return jnp.where(inside < 0, lax.div(tile, self.share + 1), after)

    def length(self, sequence: Any) -> Any:
        """Rows of a sequence, not more than the cache can have."""
        if self.lengths is None:
            return jnp.int32(self.problem.kv_len)
        return self._clamped(self.lengths[sequence])

    def tiles(self, sequence: Any) -> Any:
        """Tiles of a sequence: at least one, which writes the zeros of an empty one."""
        if self.lengths is None:
            return jnp.int32(self._most_tiles())
        return self._tiles(self.lengths[sequence])

    def find(self, tile: Any) -> tuple[Any, Any, Any]:
        """(sequence, unit, number within the item) of a tile below ``total``."""
        if self.lengths is None:
            most = self._most_tiles()
            item = lax.div(tile, most)
            return lax.div(item, self.units), lax.rem(item, self.units), lax.rem(tile, most)
        position = lax.div(tile, self.units)

        def step(sequence: Any, carry: Any) -> Any:
            found, before, so_far = carry
            after = so_far + self.tiles(sequence)
            passed = after <= position
            found = jnp.where(passed, sequence + 1, found)
            return found, jnp.where(passed, after, before), after

        zero = jnp.int32(0)
        sequence, before, so_far = zero, zero, zero
        for number, tiles in enumerate(self.loaded):
            so_far += tiles
            sequence = jnp.where(so_far <= position, number + 1, sequence)
            before = jnp.where(so_far <= position, so_far, before)
        # The entries are looked at in fours, so that their loads overlap; those beyond the last
        # sequence are never passed.
        if not self.loaded:
            sequence, before, _ = lax.fori_loop(
                0, -(-self.problem.batch // 4) * 4, step, (zero, zero, zero), unroll=4
            )
        rest = tile - before * self.units
        tiles = self.tiles(sequence)
        unit = lax.div(rest, tiles)
        return sequence, unit, rest - unit * tiles

    def item(self, sequence: Any, unit: Any) -> Item:
        """What a unit of a sequence is."""
        problem = self.problem
        head_parts, part = lax.div(unit, problem.parts), lax.rem(unit, problem.parts)
        token_part = lax.div(part, problem.group_parts)
        group_part = lax.rem(part, problem.group_parts)
        return Item(
            sequence=sequence,
            head=head_parts * self.config.heads,
            token=token_part * problem.lane_tokens,
            group_start=group_part * problem.lane_heads,
            length=self.length(sequence),
            hidden=self._hidden(self.length(sequence)),
        )

    def begin(self, block: Any) -> tuple[Any, Any, Any]:
        """What :meth:`find` says of a block's first tile; of some one if it has none, since an
        empty range may begin beyond the last tile."""
        start = self.start(block)
        return self.find(jnp.where(self.start(block + 1) > start, start, jnp.int32(0)))

    def each(self, block: Any, body: Callable[..., Any], carry: Any, begin: Any = None) -> Any:
        """``carry = body(item, first, count, tiles, carry)`` for each item of a block's range.

        ``first`` and ``count`` are the tiles of the item that the range has, ``tiles`` is how many
        the item has. ``begin`` is :meth:`begin` of the block, if that is known.
        """
        remaining = self.start(block + 1) - self.start(block)
        zero = jnp.int32(0)
        sequence, unit, first = self.begin(block) if begin is None else begin

        def more(state: Any) -> Any:
            return state[3] > 0

        def step(state: Any) -> Any:
            sequence, unit, first, remaining, carry = state
            tiles = self.tiles(sequence)
            count = lax.min(tiles - first, remaining)
            carry = body(self.item(sequence, unit), first, count, tiles, carry)
            last = unit + 1 == self.units
            return (
                jnp.where(last, sequence + 1, sequence),
                jnp.where(last, zero, unit + 1),
                zero,
                remaining - count,
                carry,
            )

        return lax.while_loop(more, step, (sequence, unit, first, remaining, carry))[-1]

    def _most_tiles(self) -> int:
        return most_tiles(self.problem, self.config)

    def _clamped(self, lengths: Any) -> Any:
        return lax.clamp(jnp.int32(0), lengths, jnp.int32(self.problem.kv_len))

    def _hidden(self, lengths: Any) -> Any:
        """Tiles of sequences of these lengths of which no query sees a row."""
        if self.problem.left is None:
            return jnp.zeros_like(lengths)
        before = lengths - (self.problem.tokens + self.problem.left)
        return lax.div(lax.max(before, jnp.zeros_like(before)), self.config.tile)

    def _tiles(self, lengths: Any) -> Any:
        lengths = self._clamped(lengths)
        rounded = lax.div(lengths + (self.config.tile - 1), self.config.tile)
        return lax.max(rounded - self._hidden(lengths), jnp.ones_like(rounded))


def most_tiles(problem: Problem, config: DecodeConfig) -> int:
    """Tiles that a sequence has at most; all of them where there are no lengths."""
    hidden = 0
    if problem.left is not None:
        seen = problem.tokens + problem.left
        if problem.lengths:
            return max(1, min(-(-problem.kv_len // config.tile), (seen - 1) // config.tile + 2))
        hidden = max(0, problem.kv_len - seen) // config.tile
    return max(1, -(-problem.kv_len // config.tile) - hidden)


def padded_lengths(problem: Problem) -> int:
    """Extent of the lengths in shared memory: whole rows of 128 lanes."""
    return -(-problem.batch // 128) * 128
