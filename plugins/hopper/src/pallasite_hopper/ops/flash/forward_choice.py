"""Which configuration attention's forward has where none is given, and which ones tuning tries."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.flash.config import (
    LARGEST_HEAD,
    MULTIPROCESSORS,
    ROWS,
    SPLITS,
    AttentionConfig,
    head_tile,
)
from pallasite_hopper.ops.flash.forward_time import Work, microseconds


def _registers(head_dim: int, block_kv: int) -> int:
    """Registers of a lane for sums, scores and weights, and addresses."""
    return head_tile(head_dim) // 2 + block_kv * 3 // 4 + 24


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
    group: int = 1,
    kv_seq: int | None = None,
    left: int | None = None,
    right: int | None = None,
    v_dim: int | None = None,
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
      group: heads of queries that share keys.
      kv_seq: keys of a sequence; steps fit them where they are few, and blocks share them where
        tiles are few.
      left: keys before its own position that a query sees, None for all.
      right: keys after it, if there is no causal mask; None for all.
      v_dim: elements of a value, None for as many as of a key.
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
        config = next(one for one in sizes if one.fits(head_dim, v_dim))
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
    most = warpgroups = max(1, min(config.warpgroups, needed))
    if heads is not None:
        fitting = (n for n in range(1, 4) if -(-needed // n) * heads <= MULTIPROCESSORS)
        warpgroups = min(warpgroups, next(fitting, warpgroups))
    config = dataclasses.replace(config, warpgroups=warpgroups)
    if heads is None or kv_seq is None or period is not None or scattered or blocks:
        return config  # How long blocks are is not known.
    work = Work(heads, q_seq, kv_seq, head_dim, left, 0 if causal else right, group)
    return _of_least_time(config, work, most, shared=plain)


PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of the keys, that may be worked on as batches."""

_ADDING_UP, _BYTES = 5.0, 2.5e6
"""Microseconds of the kernels that add up what parts of the keys have given, and bytes of it that
are written and read in one."""

_GAIN_OF_PARTS = 0.85
"""What parts have to be estimated at, of the time of one kernel."""


@functools.lru_cache(maxsize=1024)
def parts_of_least_time(
    heads: int, q_seq: int, kv_seq: int, head_dim: int, group: int, v_dim: int | None
) -> int:
    """How many parts of the keys, worked on as batches, take the least time by the estimate, where
    queries see all keys."""

    def time(parts: int) -> float:
        keys, many = -(-kv_seq // parts), heads * parts
        config = default_config(
            head_dim, False, q_seq, heads=many, kv_seq=keys, group=group, v_dim=v_dim
        )
        one = microseconds(Work(many, q_seq, keys, head_dim, group=group), config)
        if parts == 1:
            return one
        return one + _ADDING_UP + 4.0 * many * q_seq * head_dim / _BYTES

    tiles = heads * -(-q_seq // ROWS)
    fitting = [n for n in PARTS if n == 1 or (kv_seq >= n * _FEW_KEYS and n * tiles <= _MANY_TILES)]
    best = min(fitting, key=time)
    return best if time(best) < _GAIN_OF_PARTS * time(1) else 1


_FEW_KEYS, _MANY_TILES = 512, 2 * MULTIPROCESSORS
"""Keys of a part at least, and tiles of 64 queries of all parts at most."""

_GAIN = 0.92
"""What other tiles have to be estimated at, of the time of those that rounds of blocks say."""


@functools.lru_cache(maxsize=1024)
def _of_least_time(
    config: AttentionConfig, work: Work, most: int, *, shared: bool
) -> AttentionConfig:
    """The configuration, or another one if it takes less time by the estimate."""
    if not work.q_seq * work.kv_seq * work.heads:
        return config
    others = [one for one in alternatives(config, work, most, shared=shared) if _timed(config, one)]
    best = min(others, key=lambda one: microseconds(work, one))
    limit = _GAIN * microseconds(work, config)
    return best if microseconds(work, best) < limit else config


def alternatives(
    config: AttentionConfig, work: Work, most: int, *, shared: bool
) -> list[AttentionConfig]:
    """Configurations with tiles of up to ``most`` warpgroups; if ``shared`` also with blocks that
    share the keys of a tile, with three warpgroups and small steps, and with small steps where
    tiles see few keys."""
    found = [dataclasses.replace(config, warpgroups=n) for n in range(1, most + 1)]
    if not shared:
        return found
    seen = min(work.kv_seq, work.kv_seq if work.left is None else work.left + config.block_q)
    few = config.block_kv > 64 and seen <= 4 * config.block_kv
    small = [dataclasses.replace(one, block_kv=64) for one in found if few]
    if 64 < work.head_dim <= 128 and work.q_seq > 2 * ROWS and work.kv_seq > SHORT[1]:
        small.append(dataclasses.replace(config, warpgroups=3, block_kv=64, ping_pong=True))
    found += [deep for one in small if (deep := _as_deep_as_fits(one, work.head_dim))]
    parts = _shared_configs(config, work.head_dim, most)
    return found + [one for one in parts if one.split <= 4]


def _timed(config: AttentionConfig, other: AttentionConfig) -> bool:
    """Whether tiles of this kind have been timed as a choice; the others are left to tuning."""
    small = other.block_kv < config.block_kv and other.warpgroups <= config.warpgroups
    return other.split > 1 or not small


def _shared_configs(base: AttentionConfig, head_dim: int, most: int) -> list[AttentionConfig]:
    """Configurations with blocks that share the keys of a tile, in steps of so many or 64."""
    found = list[AttentionConfig]()
    for warpgroups, split, size in itertools.product(
        range(1, min(most, 2) + 1), SPLITS[1:], sorted({64, base.block_kv})
    ):
        config = AttentionConfig(
            warpgroups=warpgroups,
            block_kv=size,
            ping_pong=base.ping_pong and warpgroups > 1,
            persistent=False,
            separate_out=False,
            split=split,
        )
        deep = _as_deep_as_fits(config, head_dim)
        if deep is not None:
            found.append(deep)
    return found


SHORT = (ROWS + 1, 512)
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
    heads = heads or MULTIPROCESSORS
    shared = _shared_configs(found[0], head_dim, most) if kv_seq > ROWS else []
    found += [
        one for one in shared if one.split * heads * -(-q_seq // one.block_q) <= 4 * MULTIPROCESSORS
    ]
    return list(dict.fromkeys(found))


def _as_deep_as_fits(config: AttentionConfig, head_dim: int) -> AttentionConfig | None:
    for stages in (4, 3, 2):
        deep = dataclasses.replace(config, stages=stages)
        if deep.fits(head_dim):
            return deep
    return None
