"""Which configuration of the kernel for few rows is the fastest by an estimate, and its time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from pallasite_hopper.ops.dense.config import SHARED_MEMORY
from pallasite_hopper.ops.dense.cost import H200, Sizes
from pallasite_hopper.ops.dense.few_rows import ELEMENTS, VECTOR, FewRowsConfig

_REGISTERS, _THREADS = 65536, 128
"""Of a multiprocessor, and of a warpgroup."""

MOST_ROWS = 4
"""Whose sums registers have room for."""

_OTHER_REGISTERS = 24
"""Of a lane, besides vectors and sums."""


@dataclasses.dataclass(frozen=True)
class FewRowsRates:
    """What the estimate is calibrated with.

    Attributes:
      launch: nanoseconds of a kernel besides what follows.
      latency: until memory answers.
      vector: nanoseconds of a multiprocessor for a vector of each lane of a warpgroup.
      row: the same for each row that it is multiplied by.
      memory: bytes of the matrix that the GPU reads in a nanosecond.
      sums: nanoseconds in which a row of a warpgroup's sums is added.
      split: nanoseconds in which those of blocks of a cluster are.
      overlap: exponent of the norm that joins the times of the steps and of memory.
    """

    launch: float
    latency: float
    vector: float
    row: float
    memory: float
    sums: float
    split: float
    overlap: float


RATES = FewRowsRates(
    launch=1410.0,
    latency=298.0,
    vector=7.9,
    row=10.9,
    memory=4850.0,
    sums=6.0,
    split=1330.0,
    overlap=1.24,
)
"""Fitted to the times of 124 kernels of 20 shapes in bfloat16 on an H200 (2026-11;
``benchmarks/unaligned.py``), which they are 8 % off in the mean."""


def few_rows_config(sizes: Sizes) -> tuple[FewRowsConfig, float] | None:
    """The best configuration, and nanoseconds that it takes; None if there is none."""
    return _best(sizes)


@functools.lru_cache(maxsize=1024)
def _best(sizes: Sizes) -> tuple[FewRowsConfig, float] | None:
    timed = [(one, few_rows_nanoseconds(one, sizes)) for one in candidates(sizes)]
    return min(timed, key=lambda one: one[1], default=None)


def candidates(sizes: Sizes) -> Iterator[FewRowsConfig]:
    """Configurations; none where there are too many rows, or operands have another order."""
    turned = sizes.transpose_b or (sizes.transpose_a and sizes.m > 1)
    if not 1 <= sizes.m <= MOST_ROWS or sizes.size != 2 or turned or sizes.n < VECTOR:
        return
    for columns, warpgroups, split in itertools.product((32, 64, 128), (1, 2, 3, 4), (1, 2, 4, 8)):
        for together in (2, 4, 8):
            config = FewRowsConfig(
                columns=columns,
                warpgroups=warpgroups,
                split_k=split,
                together=together,
                fold=columns < _THREADS and split == 1,
            )
            chunks = math.ceil(sizes.k / (ELEMENTS // columns * together))
            units = warpgroups * split
            if (units == 1 or units <= chunks) and _fits(config, sizes):
                yield config


def _registers(config: FewRowsConfig, sizes: Sizes) -> int:
    vectors = 2 * config.together * (VECTOR // 2 + sizes.m)
    return -(-(VECTOR * sizes.m + vectors + _OTHER_REGISTERS) // 8) * 8


def _shared_bytes(config: FewRowsConfig, sizes: Sizes) -> int:
    parts = (config.split_k - 1) * sizes.m * config.columns
    return 4 * (sizes.m * config.warpgroups * ELEMENTS + config.columns + parts) + 1024


def _fits(config: FewRowsConfig, sizes: Sizes) -> bool:
    lanes = config.warpgroups * _THREADS
    registers = min(255, _REGISTERS // lanes // 8 * 8)
    return _registers(config, sizes) <= registers and _shared_bytes(config, sizes) <= SHARED_MEMORY


def few_rows_nanoseconds(config: FewRowsConfig, sizes: Sizes, rates: FewRowsRates = RATES) -> float:
    """The time of a product, good enough to compare configurations."""
    m, n, k = sizes.m, sizes.n, sizes.k
    rows = ELEMENTS // config.columns
    useful = config.columns - VECTOR * bool(n % VECTOR)
    tiles = math.ceil(n / useful)
    steps = math.ceil(
        math.ceil(k / (rows * config.together)) / (config.warpgroups * config.split_k)
    )
    lanes = config.warpgroups * _THREADS
    resident = min(
        _REGISTERS // (_registers(config, sizes) * lanes),
        SHARED_MEMORY // _shared_bytes(config, sizes),
        2048 // lanes,
    )
    blocks = tiles * config.split_k
    at_once = H200.clusters[config.split_k] * config.split_k * max(1, resident)
    rounds = math.ceil(blocks / at_once)
    active = math.ceil(min(blocks, at_once) / H200.multiprocessors) * config.warpgroups
    work = config.together * (rates.vector + m * rates.row)
    step = _norm(rates.latency, active * work)
    added = config.warpgroups * rows
    if config.fold:  # First those of rows that begin alike, by all lanes.
        different = min(rows, VECTOR // math.gcd(VECTOR, n))
        added = added // different + different
    adding = added * m * rates.sums + rates.split * (config.split_k > 1)
    busy = rounds * (rates.latency + steps * step + adding)
    memory = k * (n + tiles * (config.columns - useful)) * sizes.size / rates.memory
    return rates.launch + _norm(busy, memory, rates.overlap)


def _norm(one: float, other: float, exponent: float = 4.0) -> float:
    """Of two times that overlap."""
    longer, shorter = max(one, other), min(one, other)
    return longer * math.pow(1 + math.pow(shorter / longer, exponent), 1 / exponent)
