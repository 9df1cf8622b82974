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
"""Of a lane, besides words and sums."""

_MOST_COLUMNS = 128

_AT_ONCE = 2
"""Steps along k that a warpgroup may ask for before it multiplies; with more it takes longer than
estimated (measured on an H200, as is what follows)."""

_MOST_AT_ONCE = 64
"""Columns that it then has registers for."""

_BESIDE = 32
"""Columns up to which lanes of a tile that is not transposed do well to write what they have."""


@dataclasses.dataclass(frozen=True)
class DirectRates:
    """What the estimate is calibrated with.

    Attributes:
      launch: nanoseconds of a kernel besides its steps.
      step: of a step of a warpgroup, besides what follows.
      latency: until memory answers.
      word: nanoseconds of a multiprocessor for the words of a register of each lane that are loaded
        and stored to shared memory; those that are shifted are loaded twice.
      copy: the same for a copy of a word to shared memory, without registers.
      pair: the same for a copy of two words.
      vector: the same for a copy of four words.
      memory: bytes of operands that the GPU reads in a nanosecond.
      write: bytes of the result that it writes.
      sums: nanoseconds in which a column of another warpgroup's sums is added.
      split: nanoseconds in which those of blocks of a cluster are, besides what follows.
      sent: nanoseconds in which a column of them is sent.
      collected: nanoseconds in which a column of each other block's is added.
      overlap: exponent of the norm that joins the times of the steps and of memory.
    """

    launch: float
    step: float
    latency: float
    word: float
    copy: float
    pair: float
    vector: float
    memory: float
    write: float
    sums: float
    split: float
    sent: float
    collected: float
    overlap: float


RATES = DirectRates(
    launch=1064.0,
    step=54.0,
    latency=679.0,
    word=8.8,
    copy=13.6,
    pair=23.6,
    vector=11.0,
    memory=5000.0,
    write=1370.0,
    sums=8.3,
    split=980.0,
    sent=8.8,
    collected=4.2,
    overlap=1.2,
)
"""Fitted to the times of 320 kernels of 84 shapes in bfloat16 on an H200 (2026-11;
``benchmarks/unaligned.py``), which they are 12 % off in the mean, the fastest of a shape counting
most."""


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
            for warpgroups, split in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4, 8)):
                units = warpgroups * split
                if units > max(1, steps):
                    continue
                config = DirectConfig(
                    columns=columns, warpgroups=warpgroups, split_k=split, swap=swap
                )
                config = dataclasses.replace(config, at_once=_writes_at_once(config))
                yield from _with_stages(config, sizes, max(2, -(-steps // units)))
    yield from at_once_candidates(sizes)


def at_once_candidates(sizes: Sizes) -> Iterator[DirectConfig]:
    """Those of one warpgroup that asks for all of a short K before it multiplies, and writes its
    sums at once; none where K is long."""
    steps = -(-sizes.k * sizes.size // DEPTH_BYTES)
    if min(sizes.m, sizes.n, sizes.k) < 1 or not _loadable(sizes) or steps > _AT_ONCE:
        return
    for swap in (False, True):
        right = sizes.m if swap else sizes.n
        along_k = not sizes.transpose_a if swap else sizes.transpose_b
        for columns in _columns(right, along_k=along_k):
            for ahead in range(1, steps + 1):
                config = DirectConfig(
                    columns=columns,
                    warpgroups=1,
                    swap=swap,
                    ahead=ahead,
                    stages=steps + 1,
                    at_once=True,
                )
                if columns <= _MOST_AT_ONCE and _writes_at_once(config) and _fits(config, sizes):
                    yield config


def _writes_at_once(config: DirectConfig) -> bool:
    """Whether lanes that have all sums of a tile need not send them through shared memory."""
    alone = config.warpgroups == config.split_k == 1
    return alone and (config.swap or config.columns <= _BESIDE)


def _with_stages(config: DirectConfig, sizes: Sizes, most: int) -> Iterator[DirectConfig]:
    """With as many stages as there is room for in a multiprocessor, and in half of one."""
    found: set[int] = set()
    for stages in (8, 6, 4, 3, 2):
        one = dataclasses.replace(config, stages=stages)
        if stages > most or not _fits(one, sizes):
            continue
        half = 2 * _shared_bytes(one, sizes) <= SHARED_MEMORY
        if not found or half:
            found.add(stages)
            yield one
        if half or all(operand.shifted for operand in _operands(one, sizes)):
            return


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
class _Operand:
    """What a lane moves of an operand in a step.

    Attributes:
      words: of a step.
      width: of them that are moved at once.
      shifted: whether rows do not all begin at words; then words are loaded to registers, and
        else copied to shared memory.
    """

    words: int
    width: int
    shifted: bool

    @property
    def registers(self) -> int:
        """For the words of a step."""
        return 2 * self.words * self.shifted

    def nanoseconds(self, rates: DirectRates) -> float:
        """Of a multiprocessor."""
        if self.shifted:
            return 2 * self.words * rates.word
        return self.words / self.width * {1: rates.copy, 2: rates.pair, 4: rates.vector}[self.width]


def _operands(config: DirectConfig, sizes: Sizes) -> list[_Operand]:
    """The left one and the right one."""
    return _operands_of(config.columns, config.swap, sizes)


@functools.lru_cache(maxsize=64)
def _operands_of(columns: int, swap: bool, sizes: Sizes) -> list[_Operand]:
    turned = [sizes.transpose_a, not sizes.transpose_b]
    rows = [sizes.m if sizes.transpose_a else sizes.k, sizes.k if sizes.transpose_b else sizes.n]
    if swap:
        turned.reverse()
        rows.reverse()
    found = []
    for along, row, extent in zip(turned, rows, (ROWS, columns), strict=True):
        pitch, words = row * sizes.size, extent * DEPTH_BYTES // WORD // _THREADS
        in_row = extent * sizes.size // WORD if along else DEPTH_BYTES // WORD
        fitting = (n for n in (4, 2) if pitch % (n * WORD) == 0)
        width = next((n for n in fitting if words % n == 0 and in_row % n == 0), 1)
        shifted = pitch % WORD != 0
        found.append(_Operand(words, width, shifted))
    return found


def _registers(config: DirectConfig, sizes: Sizes) -> int:
    words = sum(one.registers for one in _operands(config, sizes))
    return config.columns // 2 + words * config.ahead + _OTHER_REGISTERS


def _shared_bytes(config: DirectConfig, sizes: Sizes) -> int:
    operands = _operands(config, sizes)
    rounds = [2 if one.shifted else config.stages for one in operands]
    extents = (ROWS, config.columns)
    own = sum(n * extent * DEPTH_BYTES for n, extent in zip(rounds, extents, strict=True))
    sums = ROWS * config.columns * 4
    return max(own, sums) * config.warpgroups + (config.split_k - 1) * sums + 1024


def _fits(config: DirectConfig, sizes: Sizes) -> bool:
    lanes = config.warpgroups * _THREADS
    return (
        _registers(config, sizes) <= min(255, _REGISTERS // lanes // 8 * 8)
        and _shared_bytes(config, sizes) <= SHARED_MEMORY
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
        _REGISTERS // (registers * lanes),
        SHARED_MEMORY // _shared_bytes(config, sizes),
        2048 // lanes,
    )
    blocks = tiles * config.split_k
    at_once = H200.clusters[config.split_k] * config.split_k * max(1, resident)
    rounds = -(-blocks // at_once)
    active = math.ceil(min(blocks, at_once) / H200.multiprocessors) * config.warpgroups
    operands = _operands(config, sizes)
    work = sum(one.nanoseconds(rates) for one in operands)
    ahead = min(config.ahead if one.shifted else config.stages - 1 for one in operands)
    step = _norm(max(rates.step + work, rates.latency / ahead), active * work)
    adding = (config.warpgroups - 1) * config.columns * rates.sums
    if config.split_k > 1:
        adding += rates.split + config.columns * rates.sent
        adding += (config.split_k - 1) * config.columns * rates.collected
    busy = rates.latency + rounds * (own_steps * step + adding)
    memory = (m + n) * k * size / rates.memory
    time = _norm(busy, memory, rates.overlap)
    return rates.launch + time + m * n * sizes.out_size / rates.write


def _norm(one: float, other: float, exponent: float = 4.0) -> float:
    """Of two times that overlap."""
    longer, shorter = max(one, other), min(one, other)
    return longer * math.pow(1 + math.pow(shorter / longer, exponent), 1 / exponent)
