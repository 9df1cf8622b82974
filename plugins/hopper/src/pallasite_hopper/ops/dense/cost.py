"""How long a GEMM takes with a configuration, from waves of tiles, bytes and rates.

A block goes through its units of work one after the other. Each takes its steps along k and then
the epilogue; a step takes hardly longer than what is slower of multiplying and of reading its
operands from the L2 cache, but no stage is filled anew before what it had was multiplied and memory
has answered. Reading the operands once from memory and writing the result takes a time of its own,
which overlaps with that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pallasite_hopper.ops.dense.config import MatmulConfig


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the estimate of a chip is calibrated with.

    Attributes:
      multiprocessors: of the GPU.
      clusters: clusters that are resident at once, by their number of blocks.
      clock: cycles in a nanosecond.
      operands: cycles in which an MMA of 64 rows reads its left operand from shared memory; each
        column of the right one takes a quarter of a cycle more, and half a cycle to multiply.
      sustained: operations of 16 bits in a nanosecond that all tiles would take at most if nothing
        were read: with more, the power would be too high.
      energy: bytes that all tiles would read in a nanosecond at most if nothing were calculated.
      port: bytes that a multiprocessor reads from the L2 cache in a nanosecond.
      l2: bytes that all multiprocessors together do.
      misaligned: share more that rows take which begin at sectors of the cache, but not at lines.
      between_sectors: the same of rows that do not begin at sectors either.
      empty: share more that rows and columns of a tile take beyond the end of an operand, which the
        copy engine fills with zeros.
      least_step: nanoseconds that a step takes at least.
      latency: nanoseconds until memory answers, of steps that nobody has read before.
      held: how many times as long as multiplying takes a stage is not filled anew.
      turn: nanoseconds until a stage is filled anew and its operands are there, of steps that
        others have read before.
      turn_first: more for steps that nobody has, as their share of all.
      turn_mma: how many times as long as multiplying takes that is more.
      turn_cluster: how much more for a pair of blocks that share operands.
      turn_overlap: exponent of the norm that joins that and a step.
      step_overlap: exponent of the norm that joins the times of multiplying and reading.
      group: bytes that multiprocessors near each other read from the L2 cache in a nanosecond, of
        what they read in common once.
      near: so many of them are, and have tiles that are visited one after the other.
      multicast: share more of a step's time for blocks of a cluster, which wait for what each of
        them reads alone, if that were all of a step's bytes.
      multicast_apart: exponent of the share of the bytes that it is.
      multicast_across: the same for blocks of a cluster whose operands both lie across k, in rows
        that do not all begin at lines of the cache.
      split: the same for blocks that share the steps of a tile.
      memory: bytes that the GPU moves from and to its memory in a nanosecond.
      block_memory: bytes that one block moves from memory in a nanosecond at most.
      evict_first: share less that memory takes if the L2 cache keeps nothing of what is read once.
      overlap: exponent of the norm that joins the times of the blocks and of memory.
      cache: bytes of the L2 cache.
      write: bytes that all multiprocessors write in a nanosecond in the epilogue.
      piece: nanoseconds of each time that columns are written in the epilogue, besides.
      drained: share of an epilogue that ends while the next tile is multiplied.
      narrow: share more that memory takes to write rows of tiles of 128 columns rather than of 256.
      launch: nanoseconds of a kernel besides its work.
      cluster: nanoseconds more of an epilogue for blocks in clusters that share operands.
      exchange: nanoseconds of adding up sums in a cluster, besides their bytes.
      exchanged: bytes of sums that a block sends in a nanosecond.
      shared: nanoseconds of a last tile that two blocks share, besides its bytes.
      unused: nanoseconds until all blocks of a cluster have read what sums are written over.
      second: nanoseconds of a second kernel that adds up partial sums.
      partial: bytes of partial sums that are written and read in a nanosecond.
      parts_step: share less that a step takes with parts of k: fewer blocks read the same at once.
      parts_memory: share more that memory takes then.
      pad: bytes that XLA's copy of an operand to longer rows reads and writes in a nanosecond.
      copy: nanoseconds of the copy of an operand besides.
      stored: bytes of a result that lanes write in a nanosecond where the copy engine cannot.
      stored_elements: the same where rows begin between words.
      store: nanoseconds of that besides.
      xla: operations of XLA's product in a nanosecond where rows along k are aligned, others not.
      xla_elements: the same where the others begin between words.
      xla_unaligned: the same where rows along k are not aligned.
      xla_memory: bytes that it reads and writes in a nanosecond.
      xla_unaligned_memory: bytes of operands that it reads where rows along k are not aligned.
      xla_launch: nanoseconds of it besides.
      xla_epilogue: nanoseconds of a further kernel for the epilogue.
      xla_fill: nanoseconds for each element along k, until ``xla_most_fill``.
      xla_unaligned_fill: the same of unaligned rows, until ``xla_most_unaligned_fill``.
      xla_most_fill, xla_most_unaligned_fill: the most of that, since k is divided among blocks
        then.
      xla_several: with more rows than that, and ``xla_padded`` elements along k or more, operands
        whose rows along k are not aligned are copied, or have a kernel that is as slow.
      xla_copies: nanoseconds of that; in proportion for fewer elements along k.
      xla_padded: see there.
      xla_few, xla_short: up to so many rows, and elements along k, it reads as if these were
        aligned; with fewer elements along k than ``xla_padded``, always.
      xla_long: with more elements along k, the other operand is copied if it is not aligned.
      xla_vector: nanoseconds of its product of one row with a matrix, besides what follows.
      xla_vector_fill: of that, for each element along k.
      xla_vector_memory: bytes that it reads.
      xla_vector_most: elements along k from which on two kernels do, which divide them.
      xla_vector_divided: nanoseconds of those besides what they read.
      xla_vector_divided_memory: bytes that they read.
    """

    multiprocessors: int
    clusters: Mapping[int, int]
    clock: float
    operands: float
    sustained: float
    energy: float
    port: float
    l2: float
    misaligned: float
    between_sectors: float
    empty: float
    least_step: float
    latency: float
    held: float
    turn: float
    turn_first: float
    turn_mma: float
    turn_cluster: float
    turn_overlap: float
    group: float
    near: int
    step_overlap: float
    multicast: float
    multicast_apart: float
    multicast_across: float
    split: float
    memory: float
    block_memory: float
    evict_first: float
    overlap: float
    cache: float
    write: float
    piece: float
    drained: float
    narrow: float
    launch: float
    cluster: float
    exchange: float
    exchanged: float
    shared: float
    unused: float
    second: float
    partial: float
    parts_step: float
    parts_memory: float
    pad: float
    copy: float
    stored: float
    stored_elements: float
    store: float
    xla: float
    xla_elements: float
    xla_unaligned: float
    xla_memory: float
    xla_unaligned_memory: float
    xla_launch: float
    xla_epilogue: float
    xla_fill: float
    xla_unaligned_fill: float
    xla_most_fill: float
    xla_most_unaligned_fill: float
    xla_several: int
    xla_copies: float
    xla_padded: int
    xla_few: int
    xla_short: int
    xla_long: int
    xla_vector: float
    xla_vector_fill: float
    xla_vector_memory: float
    xla_vector_most: int
    xla_vector_divided: float
    xla_vector_divided_memory: float


H200 = Rates(
    multiprocessors=132,
    clusters={1: 132, 2: 66, 3: 38, 4: 30, 5: 22, 6: 18, 7: 14, 8: 14},
    clock=1.78,
    operands=10.7,
    sustained=1_020_000.0,
    energy=85700.0,
    port=228.0,
    l2=21700.0,
    misaligned=0.614,
    between_sectors=0.614,
    empty=4.31,
    least_step=110.0,
    latency=567.0,
    held=1.62,
    turn=0.0,
    turn_first=0.0,
    turn_mma=0.0,
    turn_cluster=0.0,
    turn_overlap=20.0,
    group=1660.0,
    near=16,
    step_overlap=2.85,
    multicast=0.224,
    multicast_apart=1.48,
    multicast_across=0.1,
    split=0.0569,
    memory=4460.0,
    block_memory=136.0,
    evict_first=0.004,
    overlap=4.19,
    cache=50_000_000.0,
    write=6090.0,
    piece=0.0,
    drained=0.0,
    narrow=0.0,
    launch=1880.0,
    cluster=1390.0,
    exchange=2140.0,
    exchanged=13.6,
    shared=2700.0,
    unused=404.0,
    second=1300.0,
    partial=3030.0,
    parts_step=0.0,
    parts_memory=0.0,
    pad=3390.0,
    copy=1250.0,
    stored=4400.0,
    stored_elements=1500.0,
    store=300.0,
    xla=570_000.0,
    xla_elements=238_000.0,
    xla_unaligned=203_000.0,
    xla_memory=3850.0,
    xla_unaligned_memory=1100.0,
    xla_launch=1315.0,
    xla_epilogue=1350.0,
    xla_fill=12.7,
    xla_unaligned_fill=8.14,
    xla_most_fill=5440.0,
    xla_most_unaligned_fill=4760.0,
    xla_several=16,
    xla_copies=1820.0,
    xla_padded=128,
    xla_few=32,
    xla_short=1000,
    xla_long=1500,
    xla_vector=1350.0,
    xla_vector_fill=3.7,
    xla_vector_memory=3790.0,
    xla_vector_most=4096,
    xla_vector_divided=3300.0,
    xla_vector_divided_memory=2400.0,
)
"""Those of our kernels: fitted to the times of 1,609 kernels of 144 shapes, 24 of them in float8,
on an H200 (2026-11), with nothing of the operands in the L2 cache (``benchmarks/gemm_fit.py``),
from rates that had been fitted to some 4,000 others. The standard deviation of the estimate is 7 %;
what it chooses of the configurations that were measured takes 1.7 % more time than the fastest in
the mean. ``least_step`` was found after that, by some 60 shapes more, as were the orders of tiles.
With extents not divisible by 8 (jax 0.11.2): ``pad`` and ``copy`` to the times of the kernels of 35
shapes (``benchmarks/unaligned.py``), ``stored`` to those of one large one, ``stored_elements`` of
another (which was stored by words then); from ``xla`` on, but for the epilogue and for one row, to
XLA's times of 253, of which those of 108 that take less than 15 us are 14 % off and all are 17 %;
``xla_vector`` and what follows to those of 18 that have one row, and two more whose row is
divided."""

H200_OF_8_BITS = dataclasses.replace(
    H200,
    misaligned=0.35,
    between_sectors=1.5,
    operands=14.0,
    port=280.0,
    latency=400.0,
    held=2.2,
    group=2200.0,
    memory=4736.0,
    overlap=3.0,
    write=3800.0,
    piece=95.0,
    launch=1550.0,
    exchanged=9.5,
    parts_memory=0.05,
)
"""Those by which configurations for operands of 8 bits are compared. What they choose of 84 shapes
in float8, 60 of them drawn anew (an H200, 2026-11), is 0.9 % slower than the fastest in the mean,
where the rates above choose what is 1.6 % slower. They are what searches by either half of the
shapes have in common, with which the choice for the other half was better, too."""

H200_CHOICE = dataclasses.replace(
    H200,
    operands=14.0,
    port=253.0,
    l2=19250.0,
    misaligned=0.2,
    between_sectors=1.0,
    empty=8.0,
    least_step=108.0,
    latency=676.0,
    held=2.2,
    turn=830.0,
    turn_first=190.0,
    turn_mma=1.4,
    turn_cluster=400.0,
    turn_overlap=8.0,
    group=1550.0,
    step_overlap=2.28,
    multicast=0.2,
    multicast_apart=1.4,
    split=0.15,
    memory=4736.0,
    evict_first=0.03,
    overlap=5.0,
    write=4300.0,
    piece=300.0,
    drained=0.5,
    narrow=0.2,
    launch=1365.0,
    cluster=1150.0,
    exchange=3000.0,
    exchanged=9.0,
    shared=3200.0,
    second=1250.0,
    partial=3200.0,
    parts_step=0.1,
    parts_memory=0.06,
)
"""Those by which configurations for operands of 16 bits are compared. They are not those whose
times are nearest: what they choose of 838 sets of times is 1.2 % slower than the fastest in the
mean, where the other rates choose what is 1.5 % slower (``benchmarks/gemm_fit.py --choice``). Those
of parts of k, from ``second`` on, are of 98 further sets. ``multicast_across`` and
what pieces of rows take are of 94 products of a transposed operand of few columns, most of whose
rows do not begin at lines: what is chosen of those measured is 1 to 4 % slower than the fastest
(25 % before)."""

H100_CHOICE = dataclasses.replace(
    H200_CHOICE,
    misaligned=0.614,
    between_sectors=0.614,
    turn=1240.0,
    turn_first=346.0,
    turn_mma=1.8,
    turn_cluster=729.0,
    turn_overlap=3.6,
    multicast=0.664,
    cluster=2095.0,
    group=1295.0,
    step_overlap=2.06,
    held=2.43,
    latency=697.0,
    port=238.0,
    l2=18400.0,
    empty=10.8,
    operands=9.38,
    memory=3607.0,
    block_memory=111.0,
    overlap=5.39,
    write=3521.0,
    piece=110.0,
    drained=0.3,
    launch=991.0,
    exchange=4475.0,
    exchanged=7.19,
    second=2280.0,
    partial=1980.0,
    split=0.498,
    least_step=161.0,
    parts_step=0.03,
    parts_memory=0.2,
)
"""The same of an H100 (SXM, HBM3), whose memory is slower: found by 2,039 kernels of 237 shapes
(2026-11; ``benchmarks/gemm_fit.py --chip H100 --choice``). What these rates choose takes 1.0 % more
than the fastest in the mean, 1.1 % of shapes that they were not fitted to; the choice by the rates
of an H200 takes 1.6 % more."""

_PAIRS = {1: 0.0, 2: 1.0, 4: 0.6, 8: 0.3}
"""Of what pairs of blocks wait for each other, what other clusters do, by their blocks."""

_APART = 0.67
"""Of the time of a further piece of the epilogue, what one takes that has a buffer of its own."""

_WIDE = 256
"""Columns of a tile from which on memory takes no less time to write them."""

_LINE = 128
"""Bytes of a line of the L2 cache."""

SECTOR = 32
"""Bytes that it reads of a line at least."""

_MMA_ROWS, _MMA_DEPTH = 64, 32
"""Rows, and bytes along k, that one instruction multiplies (PTX ISA, ``wgmma.mma_async``)."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the time of a GEMM depends on, besides its configuration.

    Attributes:
      m, n, k: extents.
      size, out_size: bytes of an element of the operands and of the result.
      transpose_a, transpose_b: whether a is given as (k, m), b as (n, k).
      pitch_m, pitch_n: extents of the operands, if only a part of the result is computed.
      batch: so many such products are computed by one kernel.
      matrices: so many right operands are read altogether, each by a group of the rows.
      activation: nanoseconds more that the epilogue takes for each sum of a tile.
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
    batch: int = 1
    matrices: int = 1
    activation: float = 0.0

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
    width = config.tile_m if config.swap else config.tile_n
    written = m * n * sizes.out_size * (1 + rates.narrow * max(0.0, _WIDE / width - 1))
    moved = ((m + n * sizes.matrices) * k * size + written) * sizes.batch
    partial = config.parts * m * n * 4
    row_a = (sizes.pitch_m or m) if sizes.transpose_a else k
    row_b = k if sizes.transpose_b else (sizes.pitch_n or n)
    read_a, read_b = (_row_share(row * size, rates) for row in (row_a, row_b))
    asked_a, asked_b = map(max, _least_shares(config, sizes), (read_a, read_b))
    if config.swap:
        m, n, read_a, read_b, asked_a, asked_b = n, m, read_b, read_a, asked_b, asked_a
    along_m, along_n = config.cluster_m, config.cluster_n
    m_tiles = math.ceil(m / (config.tile_m * along_m))
    n_tiles = math.ceil(n / (config.tile_n * along_n))
    tiles = m_tiles * n_tiles * sizes.batch
    k_steps = math.ceil(k / config.tile_k)
    steps = math.ceil(k_steps / (config.parts * config.split_k))
    blocks = config.cluster_blocks * config.split_k
    resident = rates.clusters[blocks] * config.resident
    units = tiles * config.parts
    rounds = math.ceil(units / resident)
    active = min(units, resident) * blocks
    # A step. Blocks of a cluster read what they share once.
    depth = config.tile_k * size
    width = config.warpgroup_n
    cycles = _norm(width / 2, rates.operands + width / 4, 4)
    count = config.tile_m * config.tile_n / (_MMA_ROWS * width) * depth / _MMA_DEPTH
    mma = count * cycles / rates.clock * config.resident
    beyond_m, beyond_n = _beyond(m, config.tile_m), _beyond(n, config.tile_n)
    rows = (config.tile_m + rates.empty * beyond_m) * asked_a / along_n
    columns = (config.tile_n + rates.empty * beyond_n) * asked_b / along_m
    read = (rows + columns) * depth
    fill = read * max(active / rates.l2, config.resident / rates.port)
    step = _norm(mma, fill, rates.step_overlap)
    count = max(1, min(rates.near, active) // blocks)
    rows, columns = _visited(config, count, m_tiles, n_tiles)
    rows *= config.tile_m * along_m * read_a
    columns *= config.tile_n * along_n * read_b
    step = _norm(step, (rows + columns) * depth / rates.group, rates.step_overlap)
    if config.cluster > 1:
        apart = config.tile_m * (along_n == 1) + config.tile_n * (along_m == 1)
        apart_share = apart / (config.tile_m + config.tile_n)
        step *= 1 + rates.multicast * apart_share**rates.multicast_apart
        if along_n > 1 and sizes.transpose_a and not sizes.transpose_b and read_a * read_b > 1:
            step *= 1 + rates.multicast_across
    step *= 1 + rates.split * (config.split_k > 1) - rates.parts_step * (config.parts > 1)
    stages = max(2, min(config.stages, math.ceil(units / resident) * steps))
    once = (sizes.m + sizes.n * sizes.matrices) * sizes.batch
    first = _read_first(config, m, n, units, resident, once)
    waits = rates.latency * first + rates.held * mma
    step = max(step, waits / (stages - 1), rates.least_step)
    turn = rates.turn + rates.turn_first * first + rates.turn_mma * mma
    turn += rates.turn_cluster * _PAIRS.get(config.cluster_blocks, 1.0)
    step = _norm(step, turn / stages, rates.turn_overlap)
    # The epilogue.
    area = config.tile_m * config.tile_n
    epilogue = area * (sizes.out_size if config.parts == 1 else 4) * active / rates.write
    activation = area / config.split_k * sizes.activation
    pieces = math.ceil(config.warpgroup_n / (config.epilogue_n * config.split_k))
    epilogue += rates.piece * (1 + (pieces - 1) * (_APART if config.epilogue_in_stages else 1.0))
    if config.split_k > 1:
        epilogue += rates.exchange + area * 4 * (1 - 1 / config.split_k) / rates.exchanged
    waits = rates.unused * config.sums_in_stages(size, sizes.out_size)
    if config.split_k > 1:
        epilogue += waits
    if config.cluster > 1:
        epilogue += rates.cluster
    last = units - (rounds - 1) * resident
    shared = config.last_parts if last * config.last_parts <= resident else 1
    drained = rates.drained * epilogue if config.parts == config.split_k == 1 else 0.0
    epilogue += activation
    busy = rounds * (steps * step + epilogue) - (rounds - 1) * drained
    if config.alternate:  # One warpgroup multiplies while the other one writes.
        busy = rounds * max(steps * step, (steps * step + epilogue) / 2) + epilogue
    if shared > 1:
        saved = (steps - math.ceil(steps / shared)) * step
        sent = area * 4 / (shared if config.exchanges_last else 1)
        busy += rates.shared + sent / rates.exchanged - saved + waits
    # The blocks of the last round may be too few to keep memory busy.
    memory = 0.0
    for share, working in ((units - last, resident * blocks), (last, last * blocks * shared)):
        memory += moved * share / units / min(rates.memory, working * rates.block_memory)
    memory /= 1 + rates.evict_first * config.evict_first
    memory *= 1 + rates.parts_memory * (config.parts > 1)
    time = _norm(busy, memory, rates.overlap)
    calculated = tiles * config.cluster_blocks * area * k_steps * depth
    fetched = units * blocks * steps * read
    time = rates.launch + max(time, calculated / rates.sustained + fetched / rates.energy)
    if config.parts > 1:
        time += rates.second + partial / rates.partial
    return time


def _row_share(pitch: int, rates: Rates) -> float:
    """How many times as long rows so many bytes apart take as those that begin at lines."""
    if pitch % _LINE == 0:
        return 1.0
    return 1 + (rates.between_sectors if pitch % SECTOR else rates.misaligned)


def _least_shares(config: MatmulConfig, sizes: Sizes) -> tuple[float, float]:
    """How many times as long as whole lines of the L2 cache the rows of both operands take, by what
    the copy engine asks for at once: of operands that lie across k, pieces as long as the widest
    swizzle that divides the tile's rows, of 112 elements of 16 bits seven pieces."""
    m, n = (config.tile_n, config.tile_m) if config.swap else (config.tile_m, config.tile_n)
    across = (m, sizes.transpose_a), (n, not sizes.transpose_b)
    of_a, of_b = (_LINE / math.gcd(row * sizes.size, _LINE) if is_ else 1.0 for row, is_ in across)
    return of_a, of_b


def _read_first(
    config: MatmulConfig, m: int, n: int, units: int, resident: int, once: int
) -> float:
    """The share of steps whose operands nobody has read before: all rows of both operands, so many,
    over those that the rounds of tiles read."""
    at_once = min(units, resident)
    tiles = min(units // config.parts, at_once)
    parts = at_once / tiles / config.parts
    m_tiles, n_tiles = math.ceil(m / config.tile_m), math.ceil(n / config.tile_n)
    rows, columns = _visited(config, tiles * config.cluster_blocks, m_tiles, n_tiles)
    read = (rows * config.tile_m + columns * config.tile_n) * parts
    read *= max(1.0, tiles * config.cluster_blocks / (m_tiles * n_tiles))  # of several products
    return min(1.0, once / (math.ceil(units / resident) * read))


def _visited(config: MatmulConfig, count: int, m_tiles: int, n_tiles: int) -> tuple[float, float]:
    """Extents along both directions of so many tiles that are visited one after the other."""
    count = min(count, m_tiles * n_tiles)
    if config.grid_minor == "m":
        return visited(count, config.group, m_tiles, n_tiles)
    columns, rows = visited(count, config.group, n_tiles, m_tiles)
    return rows, columns


def visited(tiles: float, group: int, minor: int, major: int) -> tuple[float, float]:
    """Extents along both directions, in tiles, of those that are visited one after the other."""
    group = min(group, minor)
    along = group if group * major >= tiles else min(minor, tiles / major)
    return along, min(major, math.ceil(tiles / along))


def _beyond(extent: int, tile: int) -> float:
    """How much of a tile is beyond the end, in the mean."""
    return tile - extent / math.ceil(extent / tile)


def _norm(one: float, other: float, exponent: float) -> float:
    """Of two times that overlap: the longer one, and more the closer the other comes to it."""
    longer, shorter = max(one, other), min(one, other)
    return longer * math.pow(1 + math.pow(shorter / longer, exponent), 1 / exponent)
