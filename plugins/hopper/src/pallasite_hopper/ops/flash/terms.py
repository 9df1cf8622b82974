"""What besides queries and keys decides scores and weights: segments, slopes, a bias, a mask of
blocks, the seed of dropout; and the arrays of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite_hopper.ops.flash.spans import spans
from pallasite_std.api import Extras, in_whole_tiles

ARRAYS = ("q_segments", "kv_segments", "slopes", "bias", "block_mask", "seed")
"""Of ``Extras``, those that the kernels take beside lengths."""


SHORT = 768
"""Sequences of so many are gone through without looking for tiles of the same segments: kernels of
XLA do that, which would take longer."""
MASK_STEP = 128
"""Blocks of a mask are multiples of this along queries and keys, as tiles divide it."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What decides scores besides products, lengths and windows, and which weights are dropped;
    false if nothing does.

    Attributes:
      period: if given, queries and keys are sequences of so many, one after the other, and queries
        see keys of their own sequence only; lengths and windows are of the whole.
      names: arrays that a kernel gets, in this order: some of :data:`ARRAYS`, ``"spans"`` (see
        ``spans.py``) of long sequences, and in place of a mask of blocks ``"visits"`` (see
        :func:`visits`).
      of_batch, of_head: which of these have an entry for each batch, for each head.
    """

    period: int | None = None
    names: tuple[str, ...] = ()
    of_batch: frozenset[str] = frozenset()
    of_head: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.period is not None or bool(self.names)

    def has(self, name: str) -> bool:
        """Whether a kernel gets such an array."""
        return name in self.names

    @property
    def segmented(self) -> bool:
        """Whether only some tiles of keys have those that a tile of queries sees."""
        return self.period is not None or self.has("q_segments")

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.has("bias") or self.has("slopes")

    def entry(self, name: str, batch: Any, head: Any) -> tuple[Any, Any]:
        """Indices by batch and head into an array that may have one entry for all."""
        return batch if name in self.of_batch else 0, head if name in self.of_head else 0


def given_arrays(extras: Extras) -> dict[str, Any]:
    """Those of :data:`ARRAYS` that there are."""
    return {name: one for name in ARRAYS if (one := getattr(extras, name)) is not None}


def with_arrays(
    period: int | None,
    arrays: dict[str, Any],
    rows: int,
    columns: int,
    part: int,
    *,
    by_keys: bool = False,
    mask_block: tuple[int, int] = (MASK_STEP, MASK_STEP),
) -> tuple[Terms, list[jax.Array]]:
    """The terms of a kernel, and their arrays as it reads them.

    Args:
      period: see :class:`Terms`.
      arrays: as of :func:`given_arrays`.
      rows, columns, part: queries and keys of a tile, and queries of its parts; with ``by_keys``, a
        block of the kernel has a tile of keys, of which ``part`` is, and goes through queries.
      mask_block: queries and keys of a block of the mask.
    """
    found = dict(arrays)
    if "block_mask" in found:
        found["visits"] = visits(found.pop("block_mask"), mask_block, rows, columns, by_keys)
    if any(found[name].shape[1] > SHORT for name in ARRAYS[:2] if name in found):
        pair = found["q_segments"], found["kv_segments"]
        if by_keys:
            found["spans"] = spans(pair[1], pair[0], columns, rows, part)
        else:
            found["spans"] = spans(*pair, rows, columns, part)
    found = in_whole_tiles(found, rows, columns)
    shared = {name: found[name].shape for name in ("bias", "slopes", "visits") if name in found}
    terms = Terms(
        period=period,
        names=tuple(found),
        of_batch=frozenset(name for name, shape in shared.items() if shape[0] != 1),
        of_head=frozenset(
            name for name, shape in shared.items() if shape[1] != 1 or name == "slopes"
        ),
    )
    return terms, list(found.values())


def visits(
    mask: jax.Array, block: tuple[int, int], rows: int, columns: int, by_keys: bool
) -> jax.Array:
    """For each tile of queries the tiles of keys that it sees, or the other way round.

    Args:
      mask: (batch or 1, heads or 1, blocks of queries, blocks of keys): which are seen.
      block: queries and keys of a block.
      rows, columns: queries and keys of a tile, which divide those of a block.
      by_keys: whether tiles of keys have lists of tiles of queries.

    Returns:
      (batch or 1, heads or 1, tiles, 2 n + 1) of int32 for n tiles to be listed: how many of those
      before each of them, and of all, are seen, then the numbers of these, in ascending order;
      what follows these is the number of any tile.
    """
    again, size = block[0] // rows, block[1] // columns
    if by_keys:
        mask, again, size = jnp.swapaxes(mask, 2, 3), size, again
    seen = jnp.repeat(mask, size, axis=3)
    count = seen.shape[3]
    # Sums over all of them, of which XLA makes a kernel each: prefix sums and sorting are several.
    numbers, ends = jnp.arange(count), jnp.arange(count + 1)
    before = numbers < ends[:, None]
    counts = jnp.sum(seen[..., None, :] & before, axis=4, dtype=jnp.int32)
    passed = counts[..., None, 1:] <= numbers[:, None]
    listed = jnp.minimum(jnp.sum(passed, axis=4, dtype=jnp.int32), count - 1)
    return jnp.repeat(jnp.concatenate([counts, listed], axis=3), again, axis=2)


@dataclasses.dataclass(frozen=True)
class Visits:
    """The list of one tile, in a kernel.

    Attributes:
      entry: a reference to what :func:`visits` has for it.
    """

    entry: Any

    @property
    def count(self) -> int:
        """Of all tiles that could be listed."""
        return int(self.entry.shape[0] - 1) // 2

    def place(self, tile: Any) -> Any:
        """How many of the tiles before a tile are listed: the place of it, or of the next one."""
        return self.entry[lax.clamp(jnp.int32(0), jnp.int32(tile), jnp.int32(self.count))]

    def tile(self, place: Any) -> Any:
        """The tile at a place in the list."""
        return self.entry[self.count + 1 + lax.min(jnp.int32(place), self.count - 1)]
