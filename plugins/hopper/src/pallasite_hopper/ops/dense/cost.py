"""How long a GEMM takes with a configuration, from waves of tiles, bytes and rates.

A block goes through its units of work one after the other. Each takes its steps along k and then
the epilogue; a step takes longer the more it multiplies and the more it reads. Reading the operands
once and writing the result takes a time of its own, which partly overlaps with that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pallasite_hopper.ops.dense.config import MatmulConfig


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the estimate of a chip is calibrated with.

    The rates are those of the formula, in which a step takes the longer of two times and both
    once more; so they are not those of a data sheet.

    Attributes:
      multiprocessors: of the GPU.
      clusters: clusters that are resident at once, by their number of blocks.
      mma: rows times columns times bytes along k that a multiprocessor multiplies in a nanosecond.
      sustained: operations of 16 bits in a nanosecond at most, whatever the tiles: with more, the
        power would be too high.
      mma_columns: columns more whose time an MMA takes.
      l2: bytes that all multiprocessors together read in a nanosecond.
      misaligned: share more that rows take which do not begin at lines of the cache.
      latency: nanoseconds from asking for a step until it is there.
      step: nanoseconds of a step besides.
      multicast: share more of a step's time for blocks of a cluster that share operands.
      split: the same for blocks that share the steps of a tile.
      memory: bytes that the GPU moves from and to its memory in a nanosecond.
      block_memory: bytes that one block moves from memory in a nanosecond.
      write: bytes that a multiprocessor writes in a nanosecond in the epilogue.
      launch: nanoseconds of a kernel besides its work.
      cluster: nanoseconds more of an epilogue for blocks in clusters.
      exchange: nanoseconds of adding up sums in a cluster, besides their bytes.
      overlap: share of the shorter of the blocks' time and the memory's that is not hidden.
      second: nanoseconds of a second kernel.
      partial: bytes of partial sums that are written and read in a nanosecond.
      pad: bytes that XLA's copy of an operand to longer rows reads and writes in a nanosecond.
      crop: the same for the copy of a result to shorter rows.
      copy: nanoseconds of such a copy besides.
      xla: operations of XLA's product in a nanosecond where rows along k are aligned, others not.
      xla_unaligned: the same where rows along k are not aligned.
      xla_memory: bytes that it reads and writes in a nanosecond.
      xla_launch: nanoseconds of it besides.
      xla_fill: nanoseconds for each element along k of unaligned rows, until ``xla_most_fill``.
      xla_most_fill: the most of that, since k is divided among blocks then.
    """

    multiprocessors: int
    clusters: Mapping[int, int]
    mma: float
    sustained: float
    mma_columns: float
    l2: float
    misaligned: float
    latency: float
    step: float
    multicast: float
    split: float
    memory: float
    block_memory: float
    write: float
    launch: float
    cluster: float
    exchange: float
    overlap: float
    second: float
    partial: float
    pad: float
    crop: float
    copy: float
    xla: float
    xla_unaligned: float
    xla_memory: float
    xla_launch: float
    xla_fill: float
    xla_most_fill: float


H200 = Rates(
    multiprocessors=132,
    clusters={1: 132, 2: 66, 3: 38, 4: 30, 5: 22, 6: 18, 7: 14, 8: 14},
    mma=22900.0,
    sustained=870_000.0,
    mma_columns=5.5,
    l2=41700.0,
    misaligned=0.76,
    latency=370.0,
    step=14.0,
    multicast=0.12,
    split=0.03,
    memory=5440.0,
    block_memory=300.0,
    write=72.0,
    launch=1455.0,
    cluster=480.0,
    exchange=1320.0,
    overlap=0.576,
    second=1350.0,
    partial=3460.0,
    pad=3500.0,
    crop=1500.0,
    copy=1200.0,
    xla=600_000.0,
    xla_unaligned=200_000.0,
    xla_memory=3000.0,
    xla_launch=2000.0,
    xla_fill=15.0,
    xla_most_fill=8000.0,
)
"""Fitted to the times of some 4,000 kernels of 166 shapes in bfloat16 on an H200 (2026-11). From
``pad`` on: to 28 shapes with extents that are no multiples of 8 (``benchmarks/shapes.py``, seed 79
among others; jax 0.11.2), which both estimates miss by 15 % in the mean; operands in the order of
rows, the fast rate of XLA by one shape with much to compute (1233 x 51866 x 1280)."""

_LINE = 128
"""Bytes of a line of the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the time of a GEMM depends on, besides its configuration.

    Attributes:
      m, n, k: extents.
      size, out_size: bytes of an element of the operands and of the result.
      transpose_a, transpose_b: whether a is given as (k, m), b as (n, k).
      pitch_m, pitch_n: extents of the operands, if only a part of the result is computed.
    """

    m: int
    n: int
    k: int
    size: int
    out_size: int
    transpose_a: bool = False
    transpose_b: bool = False
    pitch_m: int | None = None
    pitch_n: int | None = None

    def part(self, along: str, extent: int) -> Sizes:
        """Of some rows (``"m"``) or columns (``"n"``) of the result."""
        m, n = (extent, self.n) if along == "m" else (self.m, extent)
        pitch_m, pitch_n = self.pitch_m or self.m, self.pitch_n or self.n
        return dataclasses.replace(self, m=m, n=n, pitch_m=pitch_m, pitch_n=pitch_n)


def nanoseconds(config: MatmulConfig, sizes: Sizes, rates: Rates = H200) -> float:
    """The time of a GEMM, good enough to compare configurations."""
    if config.rest is not None:
        along, place = config.rest_along, config.rest_from
        left = (sizes.m if along == "m" else sizes.n) - place
        alone = dataclasses.replace(config, rest=None)
        rest = nanoseconds(config.rest, sizes.part(along, left), rates)
        return nanoseconds(alone, sizes.part(along, place), rates) + rest
    m, n, k, size = sizes.m, sizes.n, sizes.k, sizes.size
    moved = (m + n) * k * size + m * n * sizes.out_size
    partial = config.parts * m * n * 4
    row_a = (sizes.pitch_m or m) if sizes.transpose_a else k
    row_b = k if sizes.transpose_b else (sizes.pitch_n or n)
    read_a, read_b = (1 + rates.misaligned * bool(row * size % _LINE) for row in (row_a, row_b))
    if config.swap:
        m, n, read_a, read_b = n, m, read_b, read_a
    along_m = config.cluster if config.cluster_along == "m" else 1
    along_n = config.cluster // along_m
    tiles = math.ceil(m / (config.tile_m * along_m)) * math.ceil(n / (config.tile_n * along_n))
    k_steps = math.ceil(k / config.tile_k)
    steps = math.ceil(k_steps / (config.parts * config.split_k))
    blocks = config.cluster * config.split_k
    resident = rates.clusters[blocks]
    units = tiles * config.parts
    rounds = math.ceil(units / resident)
    active = min(units, resident) * blocks
    # A step. Blocks of a cluster read what they share once.
    depth = config.tile_k * size
    columns = config.tile_n + rates.mma_columns * config.tile_n / config.warpgroup_n
    mma = config.tile_m * columns * depth / rates.mma
    read = (config.tile_m * read_a / along_n + config.tile_n * read_b / along_m) * depth
    fill = max(read * active / rates.l2, rates.latency / (config.stages - 1))
    step = max(mma, fill) + mma + fill + rates.step
    step *= 1 + rates.multicast * (config.cluster > 1) + rates.split * (config.split_k > 1)
    # The epilogue.
    area = config.tile_m * config.tile_n
    epilogue = area * (sizes.out_size if config.parts == 1 else 4) / rates.write
    if config.split_k > 1:
        epilogue += rates.exchange + area * 4 * (1 - 1 / config.split_k) / rates.write
    if blocks > 1:
        epilogue += rates.cluster
    busy = rates.latency + rounds * (steps * step + epilogue)
    memory = moved / min(rates.memory, active * rates.block_memory)
    time = rates.launch + max(busy, memory) + rates.overlap * min(busy, memory)
    time = max(time, m * n * k * size / rates.sustained)
    if config.parts > 1:
        time += rates.second + partial / rates.partial
    return time
