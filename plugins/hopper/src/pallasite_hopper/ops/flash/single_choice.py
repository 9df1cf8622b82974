"""When the gradients of attention take less time in one kernel than in several.

Both estimates count the steps of blocks: the longest block, and all of them over the
multiprocessors. Their rates are fitted to 193 kernels of 21 shapes (1 to 1000 tokens, heads of 64
to 256 elements), timed by CUPTI on an H200 at default clocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from pallasite_hopper.ops.flash.config import (
    BARRIER_BYTES,
    MULTIPROCESSORS,
    SHARED_BYTES,
    head_tile,
)
from pallasite_hopper.ops.flash.single_config import TILE, Kind, SingleConfig, shared_bytes
from pallasite_hopper.ops.flash.steps import meeting
from pallasite_std.api import AttentionProblem

SPLITS = (1, 2, 4, 8)

_WIDE = 160
"""Elements of heads beyond which registers do not suffice for tiles of 64 columns."""

_GAIN = 0.9
"""Part of the other kernels' estimated time that one kernel may take at most: what both estimates
may be wrong by."""


@dataclasses.dataclass(frozen=True)
class _Single:
    """Microseconds of the one kernel: of a block, of a step (and for each 128 elements of a head),
    for each doubling of a cluster, and what shares they are of.

    Attributes:
      of_kind: of a block of a kind, relative to a step.
      narrow: of a step with 32 columns, relative to 64.
      shared: how much a further block on a multiprocessor adds to what it does.
    """

    block: float = 2.57
    step: float = 0.68
    elements: float = 0.34
    doubling: float = 1.07
    narrow: float = 0.67
    shared: float = 0.48

    @staticmethod
    def of_kind(kind: Kind) -> float:
        """Products of a step, relative to two and a half of them."""
        return {Kind.KEYS: 1.40, Kind.VALUES: 0.72, Kind.BOTH: 1.68, Kind.QUERIES: 1.53}[kind]


@dataclasses.dataclass(frozen=True)
class _Several:
    """Microseconds of the other kernels: of what begins and ends them, of sums over the heads of a
    group, of a block, of a step for each 128 elements of a head, and of each megabyte moved."""

    kernels: float = 6.61
    groups: float = 5.28
    block: float = 0.87
    elements: float = 1.69
    megabyte: float = 1.46


def one_kernel(problem: AttentionProblem) -> SingleConfig | None:
    """The configuration of one kernel that takes the least time, or None if several take less."""
    best = min(configs(problem), key=lambda config: microseconds(problem, config))
    limit = _GAIN * microseconds_of_several(problem)
    return best if microseconds(problem, best) < limit else None


def configs(problem: AttentionProblem) -> list[SingleConfig]:
    """Of as many columns as registers suffice for first, with as many stages as fit."""
    size = head_tile(max(problem.head_dim, problem.v_dim))
    found = []
    for split, columns in itertools.product(SPLITS, (64, 32) if size <= _WIDE else (32,)):
        fits = shared_bytes(size, columns, 2) <= SHARED_BYTES - BARRIER_BYTES
        found.append(SingleConfig(columns=columns, stages=2 if fits else 1, split=split))
    return found


def microseconds(problem: AttentionProblem, config: SingleConfig) -> float:
    """The estimate for the one kernel."""
    rates, size = _Single(), head_tile(max(problem.head_dim, problem.v_dim))
    step = rates.step + rates.elements * size / 128
    if config.columns < TILE:
        step *= rates.narrow
    times = []
    for kind in config.kinds:
        steps, heads = _steps(problem, config.columns, by_keys=kind.by_keys), problem.q_heads
        cost = rates.of_kind(kind) * step
        if kind.by_keys:
            group, heads = problem.q_heads // problem.kv_heads, problem.kv_heads * config.split
            steps = [-(-group * count // config.split) for count in steps]
        begin = rates.block + rates.doubling * math.log2(config.split) * kind.by_keys
        times += [(begin + count * cost, problem.batch * heads) for count in steps]
    most = 2 if size > 128 else 3
    resident = min(
        most, (SHARED_BYTES + 1024) // (shared_bytes(size, config.columns, config.stages) + 1024)
    )
    return _time(times, 1 + rates.shared * (max(resident, 1) - 1))


def microseconds_of_several(problem: AttentionProblem) -> float:
    """The estimate for the kernels that the one replaces."""
    rates, size = _Several(), head_tile(max(problem.head_dim, problem.v_dim))
    steps = _steps(problem, TILE, by_keys=True, own=2 * TILE)
    step = rates.elements * size / 128
    times = [(rates.block + count * step, problem.batch * problem.q_heads) for count in steps]
    heads = problem.q_heads + problem.kv_heads
    megabytes = 2e-6 * problem.batch * problem.q_seq * heads * size
    result = rates.kernels + _time(times, 1.0) + rates.megabyte * megabytes
    return result + rates.groups * (problem.q_heads != problem.kv_heads)


def _time(times: list[tuple[float, int]], of_multiprocessor: float) -> float:
    """Of blocks with their counts: a little more than the longest, and than all side by side."""
    longest = max(time for time, _ in times)
    total = sum(time * count for time, count in times) / (MULTIPROCESSORS * of_multiprocessor)
    return float((longest**3 + total**3) ** (1 / 3))


def _steps(problem: AttentionProblem, other: int, *, by_keys: bool, own: int = TILE) -> list[int]:
    """For each tile of ``own`` keys, or queries, how many tiles of ``other`` queries, or keys, meet
    it."""
    mine, theirs = problem.q_seq, problem.kv_seq
    before, after, shift = problem.left, problem.right, theirs - mine
    if by_keys:
        mine, theirs, shift = theirs, mine, -shift
        before, after = after, before
    return meeting(
        mine, theirs, own, other, before=before, after=after, shift=shift, period=problem.period
    )
