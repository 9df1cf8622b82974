"""How attention is cut into tiles, and in which order the work is issued."""

from __future__ import annotations

import dataclasses
import itertools

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.flash.steps import makespan, meeting

LARGEST_HEAD = 256
"""Elements of a head at most."""

HEAD_STEP = 32
"""Heads in shared memory are filled up to a multiple of this, with zeros by the copy engine."""

ROWS = 64
"""Rows of a tile that one consumer warpgroup works on."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a block can use."""

BARRIER_BYTES = 256
"""Of that, for barriers."""

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""


SPLITS = (1, 2, 4, 8)
"""Blocks that may share a tile of queries."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Configuration of the forward kernel.

    Attributes:
      warpgroups: consumer warpgroups of a block, 1 to 3; each has 64 rows of the queries.
      block_kv: keys in one step, a multiple of 16 up to 256.
      stages: blocks of keys, and of values, in flight, 2 to 8.
      ping_pong: whether the warpgroups alternate on the tensor cores, so that the softmax of one
        falls into the matmuls of another.
      persistent: whether a block goes through many tiles, so that the next tile's operands arrive
        while one is finished; otherwise every tile is a block of its own.
      cluster: blocks, 1, 2 or 4, that work on neighbouring tiles and fetch keys and values once,
        each a part for all of them, which takes load off the L2 cache.
      separate_out: whether results have shared memory of their own, so that the next queries need
        not wait for them; otherwise they take the place of the queries.
      polynomial: one of so many groups of 8 columns has its exponentials computed by a polynomial,
        which takes load off the special function units; 0 for none.
      cache_bytes: how many bytes of keys and values the tiles that run at the same time may share
        in the L2 cache; heads beyond are left for later.
      split: blocks of a cluster, 1, 2, 4 or 8, that share a tile, each with a part of the keys that
        it sees, and combine what they have. Goes with one warpgroup that is not ``persistent``.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    ping_pong: bool = True
    persistent: bool = True
    cluster: int = 1
    separate_out: bool = True
    polynomial: int = 0
    cache_bytes: int = 32 << 20
    split: int = 1

    def __post_init__(self) -> None:
        _within("warpgroups", self.warpgroups, 1, 3)
        _within("block_kv", self.block_kv, 16, 256)
        _within("stages", self.stages, 2, 8)
        _within("polynomial", self.polynomial, 0, 16)
        if self.cluster not in (1, 2, 4):
            raise InvalidValueError(
                "an attention configuration cannot have this cluster",
                got=self.cluster,
                expected="1, 2 or 4",
            )
        if self.split not in SPLITS:
            raise InvalidValueError(
                "blocks of a cluster cannot share a tile of attention",
                got=f"split={self.split}",
                expected="1, 2, 4 or 8",
            )
        if self.split > 1 and (self.warpgroups, self.cluster, self.persistent) != (1, 1, False):
            raise InvalidValueError(
                "AttentionConfig.split does not go with the other options",
                got=self,
                expected="warpgroups=1, cluster=1, persistent=False",
            )
        if self.block_kv % 16:
            raise InvalidValueError(
                "block_kv does not fit the tensor cores",
                got=self.block_kv,
                expected="a multiple of 16",
            )

    @property
    def block_q(self) -> int:
        """Queries in one tile."""
        return ROWS * self.warpgroups

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of the kernel, barriers left out."""
        queries = self.block_q * (2 if self.separate_out else 1)
        keys = self.stages * self.block_kv
        if self.split > 1:  # Sums in float32 take the place of the keys.
            keys = max(keys, 2 * ROWS)
        return 2 * head_tile(head_dim) * (queries + self.stages * self.block_kv + keys)

    def fits(self, head_dim: int) -> bool:
        """Whether shared memory suffices; see :meth:`shared_bytes`."""
        return self.shared_bytes(head_dim) <= SHARED_BYTES - BARRIER_BYTES


def head_tile(head_dim: int) -> int:
    """Columns of a head in shared memory."""
    return -(-head_dim // HEAD_STEP) * HEAD_STEP


def _registers(head_dim: int, block_kv: int) -> int:
    """Registers of a lane for sums, scores and weights, and addresses."""
    return head_tile(head_dim) // 2 + block_kv * 3 // 4 + 24


def _within(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise InvalidValueError(
            f"{name} of an attention configuration is out of range",
            got=value,
            expected=f"an integer from {low} to {high}",
        )


def default_config(
    head_dim: int,
    causal: bool,
    q_seq: int,
    *,
    terms: bool = False,
    period: int | None = None,
    scattered: bool = False,
    narrow: bool = False,
    blocks: bool = False,
    heads: int | None = None,
    kv_seq: int | None = None,
    left: int | None = None,
) -> AttentionConfig:
    """The configuration that is used where none is given.

    Args:
      head_dim: up to 256.
      causal: whether there is a causal mask.
      q_seq: queries of a sequence.
      terms: whether there are segments, slopes or a bias, which take registers.
      period: queries of a sequence, of which several share a tile.
      scattered: whether tiles see very different numbers of keys, as with segments.
      narrow: whether elements have 8 bits.
      blocks: whether tiles are to divide blocks of a mask.
      heads: of all batches; where they have few tiles, these are smaller.
      kv_seq: keys of a sequence; steps fit them where they are few, and blocks share them where
        tiles are few.
      left: keys before its own position that a query sees, None for all.
    """
    if head_dim <= 64:
        config = AttentionConfig(warpgroups=3 if head_dim > 32 and not terms else 2, stages=4)
    elif head_dim <= 128 and causal:
        # Tiles of many lengths: the hardware schedules them better than a table.
        config = AttentionConfig(persistent=False)
    elif head_dim <= 128:
        config = AttentionConfig(ping_pong=False)
    elif narrow:
        config = AttentionConfig(block_kv=80)
    else:
        sizes = (AttentionConfig(block_kv=n, separate_out=False) for n in range(128, 0, -16))
        config = next(one for one in sizes if one.fits(head_dim))
    if period is not None and config.block_q % period:
        # Tiles see few keys: those of their sequences, which small steps fit better.
        warpgroups, size = 3 if head_dim <= 64 else 2, min(64, config.block_kv)
        config = dataclasses.replace(config, warpgroups=warpgroups, block_kv=size)
    if scattered:
        config = dataclasses.replace(config, persistent=False)
    if blocks:
        size = next(size for size in (128, 64, 32, 16) if size <= config.block_kv)
        config = dataclasses.replace(config, warpgroups=min(config.warpgroups, 2), block_kv=size)
    needed = -(-q_seq // ROWS)
    many = heads is not None and -(-needed // config.warpgroups) * heads > MULTIPROCESSORS
    plain = period is None and not (terms or scattered or narrow or blocks)
    short = kv_seq is not None and SHORT[0] <= kv_seq <= SHORT[1]
    if kv_seq is not None and short and many and plain and 64 < head_dim <= 128:
        config = _of_short_sequences(head_dim, causal, kv_seq)
    warpgroups = max(1, min(config.warpgroups, needed))
    if heads is not None:
        fitting = (n for n in range(1, 4) if -(-needed // n) * heads <= MULTIPROCESSORS)
        warpgroups = min(warpgroups, next(fitting, warpgroups))
    config = dataclasses.replace(config, warpgroups=warpgroups)
    if heads is None or kv_seq is None or not plain:
        return config
    if 0 < needed * heads <= MULTIPROCESSORS // 2:
        seen = meeting(
            q_seq,
            kv_seq,
            ROWS,
            config.block_kv,
            before=left,
            after=0 if causal else None,
            shift=kv_seq - q_seq,
        )
        tiles = [steps for steps in reversed(seen) for _ in range(heads)]
        return _sharing_keys(config, head_dim, tiles)
    return config


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Microseconds of a block of 64 queries, of a step, of 128 keys of a step and, for each 128
    elements of a head, of these, and of what it takes to combine the parts of blocks. Fitted to 13
    shapes of up to 80 tiles and heads of 64 to 256 elements, timed by CUPTI on an H200.

    Attributes:
      clusters: of so many blocks that run at the same time; those of eight took longer wherever
        they were timed.
    """

    block: float = 2.5
    step: float = 0.17
    keys: float = 0.33
    elements: float = 0.56
    combine: float = 0.8
    combine_elements: float = 2.0
    clusters: tuple[tuple[int, int], ...] = ((2, 64), (4, 30))


_SHARING_GAIN = 0.9
"""What sharing keys has to be estimated at, of the time without it."""


def _sharing_keys(config: AttentionConfig, head_dim: int, tiles: list[int]) -> AttentionConfig:
    """The configuration, or one whose blocks share the keys of a tile if that takes less time.

    ``tiles``: the steps of each, in the order of the tiles.
    """
    rates, heads = _Rates(), head_tile(head_dim) / 128
    combine = rates.combine + rates.combine_elements * heads

    def step(size: int) -> float:
        return rates.step + size / 128 * (rates.keys + rates.elements * heads)

    found = [(rates.block + max(tiles) * step(config.block_kv), config)]
    places = dict(rates.clusters)
    for one in _shared_configs(head_dim, config.block_kv):
        if one.split not in places:
            continue
        keys = one.block_kv * one.split
        counts = (-(-count * config.block_kv // keys) for count in tiles)
        times = [rates.block + combine + count * step(one.block_kv) for count in counts]
        found.append((makespan(times, places[one.split]) / _SHARING_GAIN, one))
    return min(found, key=lambda pair: pair[0])[1]


def _shared_configs(head_dim: int, block_kv: int) -> list[AttentionConfig]:
    """Configurations with blocks that share the keys of a tile, in steps of so many or 64."""
    found = []
    for split, size in itertools.product(SPLITS[1:], sorted({64, block_kv})):
        config = AttentionConfig(
            warpgroups=1,
            block_kv=size,
            ping_pong=False,
            persistent=False,
            separate_out=False,
            split=split,
        )
        deep = _as_deep_as_fits(config, head_dim)
        if deep is not None:
            found.append(deep)
    return found


SHORT = (128, 512)
"""Keys, at least and at most, of sequences of which tiles are done after a few steps."""


def _of_short_sequences(head_dim: int, causal: bool, kv_seq: int) -> AttentionConfig:
    """The configuration of many short sequences: the next tile's operands arrive meanwhile, and
    steps have few keys that do not exist or, with a causal mask, are not seen."""
    size = 64 if causal else -(-kv_seq // -(-kv_seq // 128))
    size += -size % 16
    config = AttentionConfig(block_kv=size, ping_pong=False)
    return _as_deep_as_fits(config, head_dim) or config


def _blocks_kv(head_dim: int) -> tuple[int, ...]:
    """Keys of a step that are worth trying."""
    if head_dim <= 64:
        return (64, 128, 176)
    if head_dim <= 128:
        return (64, 96, 128, 176)
    return (48, 64, 80) if head_dim > 224 else (64, 80, 96, 112)


def attention_configs(
    head_dim: int, causal: bool, q_seq: int, kv_seq: int | None = None, heads: int | None = None
) -> list[AttentionConfig]:
    """Candidate configurations, the default one first.

    Args:
      head_dim: up to 256.
      causal: whether there is a causal mask.
      q_seq: queries of a sequence.
      kv_seq: keys of a sequence; by default as many as queries.
      heads: of all batches; where these have few tiles, blocks may share keys.

    Raises:
      InvalidValueError: no such heads.
    """
    if not 0 < head_dim <= LARGEST_HEAD:
        raise InvalidValueError(
            "no kernel for this size of heads", got=head_dim, expected=f"at most {LARGEST_HEAD}"
        )
    kv_seq = q_seq if kv_seq is None else kv_seq
    found = [default_config(head_dim, causal, q_seq)]
    most = max(1, min(3, -(-q_seq // ROWS)))
    for warpgroups, block_kv, ping_pong, persistent, cluster in itertools.product(
        (3, 2, 1), _blocks_kv(head_dim), (True, False), (True, False), (1, 2)
    ):
        registers = _registers(head_dim, block_kv)
        too_large = registers > (160 if warpgroups == 3 else 240) or block_kv >= kv_seq + ROWS
        if too_large or warpgroups > most or (ping_pong and warpgroups == 1):
            continue
        config = AttentionConfig(
            warpgroups=warpgroups,
            block_kv=block_kv,
            ping_pong=ping_pong,
            persistent=persistent,
            cluster=cluster,
            # Blocks with one tile have no next queries.
            separate_out=persistent,
        )
        deepest = _as_deep_as_fits(config, head_dim)
        if deepest is None and persistent:
            deepest = _as_deep_as_fits(dataclasses.replace(config, separate_out=False), head_dim)
        if deepest is not None:
            found.append(deepest)
    tiles = -(-q_seq // ROWS) * (heads or MULTIPROCESSORS)
    shared = _shared_configs(head_dim, found[0].block_kv) if kv_seq > ROWS else []
    found += [one for one in shared if one.split * tiles <= 2 * MULTIPROCESSORS]
    return list(dict.fromkeys(found))


def _as_deep_as_fits(config: AttentionConfig, head_dim: int) -> AttentionConfig | None:
    for stages in (4, 3, 2):
        deep = dataclasses.replace(config, stages=stages)
        if deep.fits(head_dim):
            return deep
    return None
