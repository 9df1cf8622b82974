"""Blocks of kernels for Blackwell, at published sizes, on the simulator: whether they are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import blackwell_cases
import numpy as np
import tensor_core_trace
from blackwell_cases import Case

import pallasite
from pallasite.target_selection import find_target
from pallasite_simulator import simulate

_UNWRITTEN = 0xCDCD
"""Elements of outputs that nobody writes."""

_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Right:
    """What some blocks computed.

    Attributes:
      blocks: how many ran.
      tiles: of 128 x 128 elements that they wrote to.
      error: the norm of the difference, relative to that of what is expected, of the worst tile.
    """

    blocks: int
    tiles: int
    error: float


def chosen_blocks(case: Case, target: str, blocks: Sequence[int] | None = None) -> Right:
    """Runs blocks of a kernel at its published size, and compares what they wrote.

    Args:
      blocks: linear numbers; one in the middle of the grid and the last one, if not given. Those
        of their clusters run with them.
    """
    inputs = case.inputs()
    made = pallasite.compile(case.function(blackwell_cases.OURS), *inputs, target=target)
    count = int(np.prod(made.launch.grid))
    if blocks is None:
        blocks = (count // 2, count - 1)
    result = simulate(made, *inputs, blocks=blocks, statistics=False).outputs[0]
    cluster = int(np.prod(made.launch.cluster))
    clusters = {block // cluster for block in blocks}
    return compare(np.asarray(result), inputs, len(clusters) * cluster)


def compare(result: np.ndarray, inputs: Sequence[np.ndarray], blocks: int) -> Right:
    """Compares the elements of a result that were written with the product in double precision."""
    a, b, *groups = inputs
    b = b if groups else b[None]
    ends = np.cumsum(groups[0]) if groups else np.array([len(a)])
    written = result.view(np.uint16) != _UNWRITTEN
    rows, columns = (size // _BLOCK for size in result.shape)
    touched = written.reshape(rows, _BLOCK, columns, _BLOCK).any((1, 3))
    worst = 0.0
    for row, column in np.argwhere(touched):
        place = (
            slice(row * _BLOCK, (row + 1) * _BLOCK),
            slice(column * _BLOCK, (column + 1) * _BLOCK),
        )
        of_row = np.searchsorted(ends, np.arange(len(a))[place[0]], side="right")
        expected = np.empty((_BLOCK, _BLOCK))
        for group in np.unique(of_row):
            mine = of_row == group
            left = a[place[0]][mine].astype(np.float64)
            expected[mine] = left @ b[group][:, place[1]].astype(np.float64)
        mask = written[place]
        difference = np.where(mask, result[place] - expected, 0)
        scale = np.linalg.norm(np.where(mask, expected, 0))
        worst = max(worst, float(np.linalg.norm(difference) / scale))
    return Right(blocks, int(touched.sum()), worst)


def in_flight(case: Case, target: str) -> tuple[int, int]:
    """For how many tiles the products of the next one do not wait for the loads, and of how many.

    With the published tiles, but few of them.
    """
    small = dataclasses.replace(find_target(target), multiprocessors=2)
    (m, n), groups = case.tile, max(1, case.groups)
    sizes = (m * groups, n * 3, 2 * 64)
    with blackwell_cases.multiprocessors(2):
        inputs = case.inputs(sizes)
        function = case.function(blackwell_cases.OURS)
        made = pallasite.compile(function, *inputs, target=small)
    begun, count = tensor_core_trace.overlaps(tensor_core_trace.traced(made, *inputs))
    return begun, count
