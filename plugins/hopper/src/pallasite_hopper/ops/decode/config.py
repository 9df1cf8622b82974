"""How attention against a cache is tiled and distributed over blocks."""

from __future__ import annotations

import dataclasses
import itertools

from pallasite.plugin import InvalidValueError

LARGEST_HEAD = 256
"""Elements of a head at most."""

HEAD_STEP = 64
"""Heads in shared memory are filled up to a multiple of this, with zeros by the copy engine: values
are the left operand, transposed, and instructions take so many rows of it."""

MOST_TOKENS = 8
"""Queries of one sequence."""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor that blocks can use, 1 KB for each block included."""


def head_tile(head_dim: int) -> int:
    """Elements of a head in shared memory."""
    return -(-head_dim // HEAD_STEP) * HEAD_STEP


def takes_heads(head_dim: int, itemsize: int) -> bool:
    """Whether the copy engine reads rows of such heads, of elements of so many bytes."""
    return 0 < head_dim <= LARGEST_HEAD and head_dim * itemsize % 16 == 0


def most_columns(head_dim: int) -> int:
    """Queries of a tile at most; more are worked on in turn, each part with the whole cache."""
    return 64 if head_dim <= 128 else 32


_RESERVE = 5 * 1024
"""For barriers, lengths and exchanges between warps, and what the hardware takes."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Configuration of attention against a cache.

    Attributes:
      tile: keys in one step, a multiple of 64 up to 256.
      heads: heads of the cache, 1 to 4, that a block reads side by side, each by a warpgroup of its
        own. Rows of neighbouring heads are neighbours in memory if the cache has tokens first.
      stages: blocks of keys or of values in flight; None takes as many as shared memory has room
        for, up to 16.
      blocks_per_multiprocessor: blocks, 1 to 4, that share a multiprocessor.
      blocks: how many blocks share the work; None fills the GPU.
      evict_first: whether the L2 cache gives up first what is read of the cache.
      ahead: whether every lane loads the lengths of few sequences itself, the L2 cache is asked for
        the page table meanwhile, and blocks do not wait for their last writes.
    """

    tile: int = 64
    heads: int = 1
    stages: int | None = None
    blocks_per_multiprocessor: int = 2
    blocks: int | None = None
    evict_first: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        _within("heads", self.heads, 1, 4)
        _within("blocks_per_multiprocessor", self.blocks_per_multiprocessor, 1, 4)
        if self.stages is not None:
            _within("stages", self.stages, 2, 16)
        if self.blocks is not None:
            _within("blocks", self.blocks, 1, 1 << 16)
        if self.tile not in (64, 128, 192, 256):
            raise InvalidValueError(
                "tile of a decode configuration does not fit the tensor cores",
                got=self.tile,
                expected="64, 128, 192 or 256",
            )

    def stage_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of one step's keys, or values."""
        return self.heads * self.tile * head_tile(head_dim) * itemsize

    def fixed_bytes(self, head_dim: int, columns: int) -> int:
        """Shared memory of all else: two sets of queries, results and weights."""
        return self.heads * columns * 2 * (3 * head_tile(head_dim) + self.tile) + _RESERVE

    def room(self, head_dim: int, columns: int, itemsize: int) -> int:
        """Stages for which shared memory suffices."""
        free = SHARED_BYTES // self.blocks_per_multiprocessor
        free -= self.fixed_bytes(head_dim, columns)
        return max(0, free // self.stage_bytes(head_dim, itemsize))

    def filled(self, head_dim: int, columns: int, itemsize: int) -> DecodeConfig:
        """The same with a number of stages and of blocks.

        Raises:
          InvalidValueError: it does not fit shared memory.
        """
        fitting = self.room(head_dim, columns, itemsize)
        stages = min(fitting, 16) if self.stages is None else self.stages
        if fitting < max(2, stages):
            raise InvalidValueError(
                f"the configuration does not fit shared memory for heads of {head_dim}",
                got=f"{self}, which has room for {fitting} stages",
                hint="a smaller tile, fewer heads or fewer blocks_per_multiprocessor",
            )
        blocks = self.blocks or MULTIPROCESSORS * self.blocks_per_multiprocessor
        return dataclasses.replace(self, stages=stages, blocks=blocks)


def evenly(lines: int, most: int) -> int:
    """How many of ``most`` blocks share lines, each a head of the cache with its sequence.

    A few blocks are left out where lines of one length then end where blocks do: memory is as busy
    without them if others share their multiprocessors, and fewer partial results are combined.
    """
    counts = range(most, most * 31 // 32, -1)
    return next((n for n in counts if max(n, lines) % min(n, lines) == 0), most)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise InvalidValueError(
            f"{name} of a decode configuration is out of range",
            got=value,
            expected=f"an integer from {low} to {high}",
        )


@dataclasses.dataclass(frozen=True)
class Cache:
    """What is gone through: ``lines``, each a head of the cache with its sequence and a part of the
    queries, of ``rows``, or with ``lengths`` of up to so many, in pages of ``page_size`` rows, if
    that is not 0; the rows of so many heads are ``neighbours`` in memory."""

    lines: int
    rows: int
    page_size: int = 0
    lengths: bool = False
    neighbours: int = 1


_STEP = 320
"""Bytes of the cache that could be read while a step begins and ends: the difference between steps
of 64 and of 128 rows, 256 and 128 of them a block, measured on an H200."""

_REST = 1.0
"""Steps whose time a block takes before and after there are copies in flight."""


def default_config(
    head_dim: int, columns: int, itemsize: int, cache: Cache | None = None
) -> DecodeConfig:
    """The configuration that is used where none is given.

    Args:
      head_dim: size of a head.
      columns: queries of a tile.
      itemsize: bytes of an element of the cache.
      cache: of a given size; steps have more rows where blocks have many.
    """
    size = head_tile(head_dim)
    tile = 128 if size * itemsize <= 128 else 64
    # What two blocks have of the registers holds this much.
    shared = 2 if max(tile, size) * columns <= _REGISTERS else 1
    config = DecodeConfig(tile=tile, blocks_per_multiprocessor=shared)
    if cache is None:
        return config
    # Elements of 8 bits are converted in registers, which do not suffice for pairs.
    if itemsize == 2 and _shares_lines(head_dim * itemsize, cache):
        pairs = (
            dataclasses.replace(config, tile=64, heads=2, blocks_per_multiprocessor=n)
            for n in (2, 1)
        )
        fitting = (
            one
            for one in pairs
            if _registers_suffice(one, head_dim, columns)
            and one.room(head_dim, columns, itemsize) >= 2
            and pages_fit(cache.page_size, one)
        )
        return next(fitting, config)
    larger = dataclasses.replace(config, tile=2 * tile)
    fits = (
        (tile, shared) == (64, 2)
        # Elements of 8 bits are converted in registers.
        and itemsize == 2
        and max(2 * tile, size) * columns <= _REGISTERS
        and larger.room(head_dim, columns, itemsize) >= 3
        and pages_fit(cache.page_size, larger)
    )
    found = [config, larger] if fits else [config]
    return min(found, key=lambda one: _bytes_of_block(one, head_dim * itemsize, cache))


_LINE_BYTES, _L2_BYTES = 128, 50e6
"""A line of the L2 cache, and what that holds."""


def _shares_lines(row: int, cache: Cache) -> bool:
    """Whether neighbouring heads have parts of the same lines, of more than the L2 cache keeps
    until another block reads the other head.

    64 sequences of 4096 rows, 8 heads of 80 and 112 elements, an H200: 178.6 and 243.3 microseconds
    by pairs of heads side by side, 308.4 and 386.5 by single ones.
    """
    shares = row % _LINE_BYTES != 0 and cache.neighbours % 2 == 0
    return shares and 2.0 * cache.lines * cache.rows * row > _L2_BYTES


def _registers_suffice(config: DecodeConfig, head_dim: int, columns: int) -> bool:
    """Whether lanes have what they need: scores, sums, and all else that a lane holds; registers
    are those of lanes of all blocks."""
    needed = (config.tile + head_tile(head_dim)) * columns // 128 + 56
    return needed <= min(255, 512 // (config.blocks_per_multiprocessor * (config.heads + 1)))


_REGISTERS = 128 * 32
"""Rows of a step, or elements of a head, times queries: of each of two blocks."""


def _bytes_of_block(config: DecodeConfig, row: int, cache: Cache) -> float:
    """What a block reads at most, with what it could read while it does not."""
    tiles = max(1, -(-cache.rows // config.tile))
    blocks = filled_blocks(config, cache.lines, tiles)
    step = 2 * row * config.tile
    rest = _REST * step
    if cache.lengths and not 0 < cache.page_size < config.tile:
        rest += cache.lines / blocks * step / 2  # A line's last step is half beyond its end.
    return -(-cache.lines * tiles // blocks) * (step + _STEP) + rest


def filled_blocks(config: DecodeConfig, lines: int, tiles: int) -> int:
    """How many blocks share lines of so many steps."""
    most = config.blocks or MULTIPROCESSORS * config.blocks_per_multiprocessor
    blocks = min(most, lines * tiles)
    if config.blocks is None and config.blocks_per_multiprocessor > 1:
        blocks = evenly(lines, blocks)
    return blocks


def pages_fit(size: int, config: DecodeConfig) -> bool:
    """Whether pages of so many rows are parts of a step, or made of steps."""
    divides = not size or not config.tile % size or not size % config.tile
    return size % 8 == 0 and divides


def decode_configs(
    head_dim: int, queries: int, itemsize: int = 2, *, kv_heads: int = 1
) -> list[DecodeConfig]:
    """Candidate configurations, the default one first.

    Args:
      head_dim: up to 256, of rows that are multiples of 16 bytes.
      queries: that share a head of the cache: its query heads, times the tokens of a sequence.
      itemsize: bytes of an element of the cache.
      kv_heads: heads of the cache, which a block may have side by side.

    Raises:
      InvalidValueError: no such heads.
    """
    if not takes_heads(head_dim, itemsize):
        raise InvalidValueError(
            "no kernel for this size of heads",
            got=head_dim,
            expected=f"a multiple of {16 // itemsize} up to {LARGEST_HEAD}",
        )
    columns = min(most_columns(head_dim), -(-queries // 8) * 8)
    found = [default_config(head_dim, columns, itemsize)]
    for tile, heads, shared in itertools.product((64, 128, 256), (1, 2, 4), (1, 2, 3, 4)):
        config = DecodeConfig(tile=tile, heads=heads, blocks_per_multiprocessor=shared)
        if kv_heads % heads or not _registers_suffice(config, head_dim, columns):
            continue
        if config.room(head_dim, columns, itemsize) >= 3:
            found.append(config)
    return list(dict.fromkeys(found))
