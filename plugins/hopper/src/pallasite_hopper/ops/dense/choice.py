"""Which configuration a GEMM has: the best by the estimate, and what is tried when tuning."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.dense.candidates import (
    LARGEST,
    asks_for_much,
    candidates,
    further_candidates,
    usual_columns,
    with_most_stages,
)
from pallasite_hopper.ops.dense.config import SHARED_MEMORY, MatmulConfig
from pallasite_hopper.ops.dense.cost import (
    H100_CHOICE,
    H200,
    H200_CHOICE,
    H200_OF_8_BITS,
    Rates,
    Sizes,
    nanoseconds,
)
from pallasite_hopper.ops.dense.one_round import one_round_config
from pallasite_std.api import device

_MANY_COLUMNS, _MANY_ROUNDS = 192, 4


@dataclasses.dataclass(frozen=True)
class _Least:
    """What configurations have to gain by the estimate, as shares of the time.

    Attributes:
      rates: of the estimate.
      divided: of the estimate of a GEMM and one that a second kernel shares.
      columns: the transposed GEMM where it has several tiles of many columns. These and the
        following take more than estimated in the mean.
      parts, split: parts of k, and blocks that share steps.
      turns, other_turns: warpgroups that take turns, and those in tiles of 192 rows, or of elements
        that have not 16 bits.
      size: tiles of more than 128 x 256 elements. An H200 needs neither of these two (60 shapes of
        150 µs to 1.5 ms, 2026-11-28: choices are 0.6 % faster without).
      few_elements: tiles of fewer elements than 128 x 256 in many rounds of tiles, unless
        warpgroups take turns: they read more, which takes power.
      clusters: blocks that share operands in many rounds of tiles.
      flat: tiles of 64 rows where there are several along the rows, but for the transposed GEMM.
      rows: tiles of 128 rows where several rounds of tiles read a large operand once.
      filling: tiles of the transposed GEMM of other columns, whose number fills a round.
      halves: the same with the sign turned, of tiles of 128 rows whose two columns are one round:
        of two blocks that read the same rows the first one brings them for the other.
      much: blocks that ask for much ahead; see ``candidates.asks_for_much``.
    """

    rates: Rates
    divided: Rates
    columns: float
    parts: float
    split: float
    turns: float
    other_turns: float
    size: float
    few_elements: float
    clusters: float
    flat: float
    rows: float
    filling: float
    halves: float
    much: float = 0.0


_ON_H200 = _Least(
    rates=H200_CHOICE, divided=H200, columns=0.0, parts=0.03, split=0.08, turns=0.0,
    other_turns=0.03, size=0.0, few_elements=0.03, clusters=0.03, flat=0.05, rows=0.02,
    filling=0.01, halves=0.06,
)  # fmt: skip
_OF_16_BITS = {
    "H200": _ON_H200,
    "H100": dataclasses.replace(
        _ON_H200,
        rates=H100_CHOICE,
        divided=H100_CHOICE,
        columns=0.02,
        turns=0.03,
        size=0.03,
        filling=0.0,
        much=0.1,
    ),
}
"""By the chip."""
_OF_OTHERS = _Least(
    rates=H200, divided=H200, columns=0.03, parts=0.02, split=0.05, turns=0.01, other_turns=0.04,
    size=0.03, few_elements=0.01, clusters=0.0, flat=0.05, rows=0.02, filling=0.02, halves=0.0,
)  # fmt: skip
_OF_8_BITS = dataclasses.replace(
    _OF_OTHERS, rates=H200_OF_8_BITS, divided=H200_OF_8_BITS, other_turns=0.03, filling=0.01
)
"""On an H200."""
_OF_BATCHES = dataclasses.replace(
    _ON_H200, rates=dataclasses.replace(H200_CHOICE, misaligned=0.614, between_sectors=0.614)
)
"""Of several products of 16 bits on an H200: what is chosen with the rates of rows that one product
has was slower for unseen batches."""
_DIVIDED = 6
"""So many of the best are considered with another configuration for the rest."""
_LEAST_GAIN = 0.05
"""What a second kernel has to gain by the estimate."""
_MOST_ROUNDS, _MOST_LEFT = 12, 0.7
"""Rounds of tiles, and share of the last one, for which it may."""
_MOST_WRITTEN, _LARGE_RESULT, _SHORTEST, _SHORT = 2, 3, 128, 256
"""Times as many bytes as of the operands, and as the L2 cache has, that a result has to have to be
what takes time, and elements along k at most, for either kind of tiles."""
_LINE = 128
"""Bytes of a line of the L2 cache."""
_LISTED, _FURTHER = 24, 6
"""So many are tried when tuning, besides other orders of tiles for the first, and so many of those
that the estimate has not been fitted to."""


def chip_of(device_kind: str) -> str:
    """Whose rates estimates have on a GPU: ``"H100"`` or ``"H200"``, which others count as."""
    return "H100" if "H100" in device_kind else "H200"


def this_chip() -> str:
    """That of the device on which operations run."""
    return chip_of(device().device_kind)


def default_config(sizes: Sizes, chip: str | None = None) -> MatmulConfig:
    """The configuration that is used without tuning: the best by the estimate.

    Args:
      sizes: of the GEMM.
      chip: see :func:`chip_of`; by default that of the device on which operations run.
    """
    chip = chip or this_chip()
    written = _large_result_config(sizes)
    if written is not None:
        return written
    return one_round_config(sizes, chip) or _with_rest(sizes, chip) or _by_estimate(sizes, chip)[0]


def _large_result_config(sizes: Sizes) -> MatmulConfig | None:
    """The configuration of products that take as long as memory takes to write a result much larger
    than the L2 cache: tiles of the transposed GEMM, each of whose warpgroups writes 128 columns of
    the result at a time, so four tiles write rows of 512 or 1024 columns together (2026-11, an
    H200: 269 µs for 8192x57344x126, 302 with four tiles of rows together, 332 with tiles of 128 x
    256 of which 64 columns are written at a time). Where multiplying takes longer warpgroups take
    turns (311 rather than 339 for 12000x32768x256, 269 rather than 313 for 8192x50432x192)."""
    written = sizes.m * sizes.n * sizes.out_size * sizes.batch
    moved = (sizes.m + sizes.n) * sizes.k * sizes.size * sizes.batch
    large = written > max(_MOST_WRITTEN * moved, _LARGE_RESULT * H200.cache)
    large &= sizes.n * sizes.out_size % _LINE == 0
    if sizes.size != 2 or not large or sizes.k > _SHORT or min(sizes.m, sizes.n) < 256:
        return None
    tiles: dict[str, Any] = {"tile_m": 256, "tile_n": 128, "split": "m"}
    if sizes.k > _SHORTEST:
        tiles = {"tile_m": 128, "tile_n": 192, "alternate": True}
    config = MatmulConfig(swap=True, stages=2, group=4, grid_minor="m", **tiles)
    config = with_most_stages(config, sizes.size, sizes.out_size)
    return config if config.fits(sizes.size, sizes.out_size) else None


@functools.lru_cache(maxsize=1024)
def batched_config(sizes: Sizes) -> MatmulConfig | None:
    """The configuration of ``sizes.batch`` products by one kernel, whose blocks have whole tiles;
    None if there is none."""
    found = (
        one
        for one in candidates(sizes)
        if one.cluster_blocks * one.parts * one.split_k * one.last_parts * one.resident == 1
        and not one.epilogue_in_stages
    )
    rank = functools.partial(_rank, sizes, chip=this_chip())
    return _large_result_config(sizes) or min(found, key=rank, default=None)


@functools.lru_cache(maxsize=1024)
def _with_rest(sizes: Sizes, chip: str) -> MatmulConfig | None:
    """Whole rounds of tiles, and another configuration for what is left; None if one kernel takes
    hardly more time."""
    ordered, rates = _by_estimate(sizes, chip), _least(sizes, chip).divided
    best, limit = None, nanoseconds(ordered[0], sizes, rates) * (1 - _LEAST_GAIN)
    whole = (
        one
        for one in ordered
        if not (one.swap or one.alternate)
        and one.parts == one.split_k == one.last_parts == 1
        and one.tile_m * one.tile_n <= LARGEST
    )
    for config in itertools.islice(whole, _DIVIDED):
        m_tiles, n_tiles = -(-sizes.m // config.step_m), -(-sizes.n // config.step_n)
        resident = H200.clusters[config.cluster]
        rounds, left = divmod(m_tiles * n_tiles, resident)
        if not rounds or rounds > _MOST_ROUNDS or left > _MOST_LEFT * resident or not left:
            continue
        for along, step, across, extent in (
            ("m", config.step_m, n_tiles, sizes.m),
            ("n", config.step_n, m_tiles, sizes.n),
        ):
            place = rounds * resident // across * step
            if not 0 < place < extent:
                continue
            if nanoseconds(config, sizes.part(along, place), rates) + rates.launch > limit:
                continue
            others = _by_estimate(sizes.part(along, extent - place), chip)
            rest = next(one for one in others if one.parts == 1)
            both = dataclasses.replace(config, rest=rest, rest_from=place, rest_along=along)
            time = nanoseconds(both, sizes, rates)
            if time < limit:
                best, limit = both, time
    return best


def matmul_configs(
    m: int,
    n: int,
    k: int,
    dtype: Any,
    out_dtype: Any = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> list[MatmulConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n, k: extents of the GEMM.
      dtype: of the operands.
      out_dtype: of the result; by default ``dtype``.
      transpose_a, transpose_b: as for :func:`matmul`.
    """
    size = np.dtype(dtype).itemsize
    if size != 2:  # Read along k, whatever the order they come in.
        transpose_a, transpose_b = False, True
    out_size = np.dtype(out_dtype or dtype).itemsize
    sizes = Sizes(m, n, k, size, out_size, transpose_a, transpose_b)
    chip = this_chip()
    ordered = _by_estimate(sizes, chip)
    once = one_round_config(sizes, chip)
    found = [default_config(sizes, chip), *([once] if once else []), *ordered[:_LISTED]]
    if not ordered[0].swap:
        found += [
            dataclasses.replace(ordered[0], group=group, grid_minor=minor)
            for group, minor in itertools.product((4, 8, 16), ("m", "n"))
        ]
    further = sorted(further_candidates(sizes), key=functools.partial(_rank, sizes, chip=chip))
    return list(dict.fromkeys([*found, *further[:_FURTHER]]))


@functools.lru_cache(maxsize=1024)
def _by_estimate(sizes: Sizes, chip: str) -> tuple[MatmulConfig, ...]:
    """All candidates, the best by the estimate first."""
    found = sorted(candidates(sizes), key=functools.partial(_rank, sizes, chip=chip))
    if not found:
        raise InvalidValueError(
            "no tile of this GEMM fits in shared memory",
            got=f"elements of {sizes.size} bytes, and of {sizes.out_size} bytes in the result",
            expected=f"at most {SHARED_MEMORY} bytes, see MatmulConfig.shared_bytes",
        )
    return tuple(found)


def estimated(config: MatmulConfig, sizes: Sizes, chip: str) -> float:
    """Nanoseconds by which configurations are compared on a chip; see :func:`chip_of`."""
    return _rank(sizes, config, chip)


def memory_rate(sizes: Sizes, chip: str) -> float:
    """Bytes that the memory of a chip moves in a nanosecond."""
    return _least(sizes, chip).rates.memory


def _least(sizes: Sizes, chip: str) -> _Least:
    if sizes.size == 2 and sizes.batch > 1 and chip == "H200":
        return _OF_BATCHES
    if sizes.size == 2:
        return _OF_16_BITS[chip]
    return _OF_8_BITS if sizes.size == 1 and chip == "H200" else _OF_OTHERS


def _rank(sizes: Sizes, config: MatmulConfig, chip: str = "H200") -> float:
    """The estimated time, and a little more where a configuration must be worth it."""
    least = _least(sizes, chip)
    several = config.swap and sizes.m > config.tile_n >= _MANY_COLUMNS
    large = config.tile_m * config.tile_n > LARGEST
    once = config.swap and config.tile_m > 64 and _reads_once_in_rounds(config, sizes.m, sizes.n)
    once &= sizes.batch == 1
    gain = max(least.columns * several, least.size * large, least.rows * once)
    if config.swap:
        usual, width = usual_columns(sizes), config.tile_n
        known = width in usual or (config.split == "n" and width - 8 in usual)
        gain += least.filling * (not known)
    gain += least.parts * (config.parts > 1) + least.split * (config.split_k > 1)
    round_of_tiles = H200.multiprocessors * config.tile_m * config.tile_n
    many = sizes.m * sizes.n * sizes.batch >= _MANY_ROUNDS * round_of_tiles
    if config.alternate:
        known = config.tile_m <= 128 and sizes.size == 2
        gain += least.turns if known else least.other_turns
    elif config.tile_m * config.tile_n < LARGEST:
        gain += least.few_elements * many
    gain += least.clusters * (many and config.cluster > 1)
    gain += least.flat * (config.tile_m == 64 and not config.swap and sizes.m > 128)
    gain -= least.halves * _halves_columns(config, sizes)
    gain += least.much * asks_for_much(config, sizes)
    return nanoseconds(config, sizes, least.rates) * (1 + gain)


def _halves_columns(config: MatmulConfig, sizes: Sizes) -> bool:
    """Whether tiles of 128 rows of the transposed GEMM are two columns, and one round."""
    alone = config.parts == config.split_k == config.last_parts == config.cluster == 1
    alone &= sizes.batch == 1
    two = config.swap and config.tile_n < sizes.m <= 2 * config.tile_n and config.tile_m == 128
    few = 2 * -(-sizes.n // config.tile_m) <= H200.multiprocessors
    return alone and two and few and not config.alternate


def _reads_once_in_rounds(config: MatmulConfig, m: int, n: int) -> bool:
    """Whether the transposed GEMM reads a large operand once, in several rounds of tiles."""
    return (
        config.evict_first and m <= config.tile_n and -(-n // config.tile_m) > H200.multiprocessors
    )
