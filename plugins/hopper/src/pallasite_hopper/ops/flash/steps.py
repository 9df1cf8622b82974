"""Which tiles meet under a mask, and how long blocks of different lengths take together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def meeting(
    own_rows: int,
    other_rows: int,
    own: int,
    other: int,
    *,
    before: int | None = None,
    after: int | None = None,
    shift: int = 0,
    period: int | None = None,
) -> list[int]:
    """How many tiles of the other rows meet each tile of its own.

    Args:
      own_rows, other_rows: keys and queries, or queries and keys.
      own, other: rows of a tile of either.
      before, after: of the others before and after row ``i + shift`` that row ``i`` meets; None for
        all.
      shift: where the first row's own position among the others is.
      period: rows meet only others of the same run of so many, if given.
    """
    counts = []
    for start in range(0, own_rows, own):
        end = min(start + own, own_rows)
        first, last = 0, other_rows
        if before is not None:
            first = max(first, start + shift - before)
        if after is not None:
            last = min(last, end + shift + after)
        if period is not None:
            first = max(first, start // period * period)
            last = min(last, -(-end // period) * period)
        counts.append(max(-(-last // other) - first // other, 0))
    return counts


def makespan(times: Sequence[float], places: int) -> float:
    """When the last of some blocks ends, of which each begins, in their order, at the first place
    that is free."""
    ends = list(times[:places])
    heapq.heapify(ends)
    for time in times[places:]:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends, default=0.0)
