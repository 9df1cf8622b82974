"""Which configuration of the kernel without copies is the fastest by an estimate, and its time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from pallasite_hopper.matrix.odd_rows import LEAST_PITCH, WORD
from pallasite_hopper.ops.dense.config import SHARED_MEMORY
from pallasite_hopper.ops.dense.cost import H200, Sizes
from pallasite_hopper.ops.dense.direct import DEPTH_BYTES, ROWS, DirectConfig

_REGISTERS, _THREADS = 65536, 128
"""Of a multiprocessor, and of a warpgroup."""

_OTHER_REGISTERS = 32
"""Of a lane, besides words, sums and what is loaded."""

_MOST_COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class DirectRates:
    """What the estimate is calibrated with.

    Attributes:
      launch: nanoseconds of a kernel besides its steps.
      step: of a step at least: until memory answers, and to store and multiply what it answered.
      load: nanoseconds of a multiprocessor for each load of a warpgroup.
      memory: bytes of operands that the GPU reads in a nanosecond.
      write: bytes of the result that it writes.
      sums: nanoseconds in which a column of another warpgroup's sums is added.
      split: nanoseconds in which those of blocks of a cluster are.
      overlap: exponent of the norm that joins the times of the steps and of memory.
    """

    launch: float
    step: float
    load: float
    memory: float
    write: float
    sums: float
    split: float
    overlap: float


RATES = DirectRates(
    launch=2500.0,
    step=1500.0,
    load=5.0,
    memory=3000.0,
    write=1000.0,
    sums=3.0,
    split=3000.0,
    overlap=2.0,
)
"""Not measured yet, but on the slow side of what loads, stores and clusters of other kernels take:
so the kernel is only taken where others are far behind."""


def direct_config(sizes: Sizes) -> tuple[DirectConfig, float] | None:
    """The best configuration, and nanoseconds that it takes; None if there is none."""
    return _best(sizes)


@functools.lru_cache(maxsize=1024)
def _best(sizes: Sizes) -> tuple[DirectConfig, float] | None:
    if min(sizes.m, sizes.n, sizes.k) < 1 or not _loadable(sizes):
        return None
    timed = [(config, direct_nanoseconds(config, sizes)) for config in _candidates(sizes)]
    return min(timed, key=lambda one: one[1], default=None)


def _loadable(sizes: Sizes) -> bool:
    """Whether rows are as long as loads of words want them."""
    row_a = sizes.m if sizes.transpose_a else sizes.k
    row_b = sizes.k if sizes.transpose_b else sizes.n
    return min(row_a, row_b) * sizes.size >= LEAST_PITCH


def _candidates(sizes: Sizes) -> Iterator[DirectConfig]:
    steps = -(-sizes.k * sizes.size // DEPTH_BYTES)
    for swap in (False, True):
        right = sizes.m if swap else sizes.n
        along_k = not sizes.transpose_a if swap else sizes.transpose_b
        for columns in _columns(right, along_k=along_k):
            for warpgroups, split in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2, 4, 8)):
                if warpgroups * split > max(1, steps) and split > 1 or warpgroups > steps:
                    continue
                config = DirectConfig(
                    columns=columns, warpgroups=warpgroups, split_k=split, swap=swap
                )
                if _fits(config, sizes):
                    yield config


def _columns(extent: int, *, along_k: bool) -> list[int]:
    """Columns of tiles of which hardly any are left over; powers of two, where rows are theirs."""
    if not along_k:
        fitting = [c for c in (8, 16, 32, 64, 128) if c < 2 * extent]
        return fitting or [8]
    found = set()
    for tiles in range(-(-extent // _MOST_COLUMNS), -(-extent // _MOST_COLUMNS) + 6):
        found.add(-(-extent // (8 * tiles)) * 8)
    return sorted(found)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a warpgroup does in a step.

    Attributes:
      words: registers of a lane that are loaded.
      loads: instructions that load them.
    """

    words: int
    loads: float


def _work(config: DirectConfig, sizes: Sizes) -> _Work:
    pitches = [
        (sizes.m if sizes.transpose_a else sizes.k) * sizes.size,
        (sizes.k if sizes.transpose_b else sizes.n) * sizes.size,
    ]
    if config.swap:
        pitches.reverse()
    words, loads = 0, 0.0
    for pitch, extent in zip(pitches, (ROWS, config.columns), strict=True):
        own = extent * DEPTH_BYTES // WORD // _THREADS
        width = next((n for n in (4, 2) if pitch % (n * WORD) == 0 and own % n == 0), 1)
        shifted = pitch % WORD != 0
        words += own * (1 + shifted)
        # Rows of each size from a word on are as many.
        loads += own * (1.5 if shifted else 1 / width)
    return _Work(words, loads)


def _registers(config: DirectConfig, sizes: Sizes) -> int:
    return config.columns // 2 + _work(config, sizes).words + _OTHER_REGISTERS


def _shared_bytes(config: DirectConfig) -> int:
    own = (ROWS + config.columns) * DEPTH_BYTES + ROWS * config.columns * 4
    return own * config.warpgroups + (config.split_k - 1) * ROWS * config.columns * 4 + 1024


def _fits(config: DirectConfig, sizes: Sizes) -> bool:
    lanes = config.warpgroups * _THREADS
    return (
        _registers(config, sizes) <= min(255, _REGISTERS // lanes // 8 * 8)
        and _shared_bytes(config) <= SHARED_MEMORY
    )


def direct_nanoseconds(config: DirectConfig, sizes: Sizes, rates: DirectRates = RATES) -> float:
    """The time of a GEMM, good enough to compare configurations."""
    m, n, k, size = sizes.m, sizes.n, sizes.k, sizes.size
    left, right = (n, m) if config.swap else (m, n)
    tiles = -(-left // ROWS) * -(-right // config.columns)
    steps = -(-k * size // DEPTH_BYTES)
    own_steps = -(-steps // (config.warpgroups * config.split_k))
    registers = -(-_registers(config, sizes) // 8) * 8
    lanes = config.warpgroups * _THREADS
    resident = min(
        _REGISTERS // (registers * lanes), SHARED_MEMORY // _shared_bytes(config), 2048 // lanes
    )
    blocks = tiles * config.split_k
    at_once = H200.clusters[config.split_k] * config.split_k * max(1, resident)
    rounds = -(-blocks // at_once)
    active = min(blocks, at_once) / H200.multiprocessors * config.warpgroups
    loads = _work(config, sizes).loads
    step = max(rates.step, active * loads * rates.load)
    busy = rounds * own_steps * step
    memory = (m + n) * k * size / rates.memory
    longer, shorter = max(busy, memory), min(busy, memory)
    time = longer * math.pow(1 + math.pow(shorter / longer, rates.overlap), 1 / rates.overlap)
    time += (config.warpgroups - 1) * config.columns * rates.sums
    time += rates.split * (config.split_k > 1) + m * n * sizes.out_size / rates.write
    return rates.launch + time
