"""Among how many blocks the gradients of a tile of keys are divided.

The first choice takes all blocks to be as long as the longest, which suits few of them. A causal
mask makes blocks of very different lengths; where these leave multiprocessors idle in the end, the
work is divided further. The estimate for that lets blocks begin in their order wherever a
multiprocessor is free. All of 15 causal shapes that were timed on an H200 gain where it says so,
with the forward 0.62 to 0.97 of the time; two with windows, of which steps take longer, do not.
"""

from __future__ import annotations

import dataclasses
import functools

from pallasite_hopper.ops.flash.backward_config import (
    ROWS,
    BackwardConfig,
    BackwardProblem,
    config_for_heads,
)
from pallasite_hopper.ops.flash.backward_tiles import section_heads
from pallasite_hopper.ops.flash.config import MULTIPROCESSORS
from pallasite_hopper.ops.flash.steps import makespan, meeting

MOST_PARTS = 8
"""Blocks that may share a tile of keys."""

_ADDING = 3
"""Steps that take as long as it takes to add up what blocks have for the same keys and values."""

_GAIN = 0.9
"""What dividing the work of many blocks has to be estimated at, of the time without it."""

_MEAN = 0.5
"""Steps of a block in the mean, of those of the longest one, with a causal mask and segments."""

_MANY = 16
"""Blocks of a multiprocessor that are enough: the last ones are a small part of all."""

_FURTHER = 0.95
"""What dividing the work further has to be estimated at."""

_WHOLE = 0.8
"""What blocks of two warpgroups have to be estimated at, of the time of twice as many with one. Of
14 shapes timed on an H200, with the forward, the six below gain (0.79 to 0.95), and the others do
not or lose (0.99 to 1.32)."""


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Microseconds of a block, of a step of 64 queries for each 128 elements of a head, and of what
    adds results up: of its kernels, and for each megabyte.

    Attributes:
      half: of a step of blocks with 64 keys of one warpgroup, relative to two: these wait for each
        matmul in turn. The least of what four shapes say.
    """

    block: float = 1.5
    elements: float = 1.69
    half: float = 1.1
    adding: float = 5.28
    megabyte: float = 0.6


def default_config(problem: BackwardProblem) -> BackwardConfig:
    """A configuration that suits the head size, the mask and the number of tiles."""
    return _default_config(problem)


@functools.lru_cache(maxsize=1024)
def _default_config(problem: BackwardProblem) -> BackwardConfig:
    found = best_of(problem)
    if found.warpgroups > 1 or problem.has_lengths or problem.terms:
        return found
    whole = best_of(problem, halves=False)
    return whole if microseconds(problem, whole) < _WHOLE * microseconds(problem, found) else found


def best_of(problem: BackwardProblem, *, halves: bool = True) -> BackwardConfig:
    """The configuration that rounds of blocks or, where it gains, the estimate say; ``halves``: see
    :func:`config_for_heads`."""
    rounds = _by_rounds(problem, config_for_heads(problem, halves=halves))
    first = _divided(problem, *rounds, halves=halves)
    # How long blocks are is not known before if arrays decide it.
    known = not problem.has_lengths and not problem.terms and problem.left is None
    if not (known and problem.causal) or _blocks(problem, first) >= _MANY * MULTIPROCESSORS:
        return first
    found = [
        _divided(problem, parts, own_keys, halves=halves)
        for own_keys in ((False, True) if problem.group > 1 else (False,))
        for parts in range(1, MOST_PARTS + 1)
    ]
    found = [
        config
        for config in found
        if config.parts <= max(_steps(problem, config))
        and _blocks(problem, config) <= _MANY * MULTIPROCESSORS
    ]
    best = min([first, *found], key=lambda config: microseconds(problem, config))
    limit = _FURTHER * microseconds(problem, first)
    return best if microseconds(problem, best) < limit else first


def _divided(
    problem: BackwardProblem, parts: int, own_keys: bool, *, halves: bool = True
) -> BackwardConfig:
    if own_keys:
        problem = dataclasses.replace(problem, kv_heads=problem.q_heads)
    config = config_for_heads(problem, halves=halves)
    return dataclasses.replace(config, parts=parts, own_keys=own_keys)


def _by_rounds(problem: BackwardProblem, config: BackwardConfig) -> tuple[int, bool]:
    """How many blocks share a tile of keys, where there are few of these or a few too many for the
    multiprocessors, and whether heads of queries have keys of their own."""
    seen = problem.q_seq
    if problem.left is not None:
        seen = min(seen, problem.left + (problem.ahead or 0) + config.block_kv)
    steps = -(-seen // config.block_q)
    tiles = -(-problem.kv_seq // config.block_kv) * problem.batch
    # Masks that differ among heads need it.
    fixed = problem.group > 1 and problem.terms.has("block_mask")
    many = tiles * (problem.q_heads if fixed else problem.kv_heads) >= MULTIPROCESSORS
    if many and (problem.windowed or problem.terms or problem.has_lengths):
        return 1, False  # Short blocks fill up what the last round leaves.

    varied = problem.causal and problem.terms.has("q_segments")

    def cost(choice: tuple[int, bool]) -> float:
        parts, own_keys = choice
        heads = problem.q_heads if own_keys or fixed else problem.kv_heads
        blocks = tiles * heads * parts
        rounds: float = -(-blocks // MULTIPROCESSORS)
        if varied:  # The longest block is one round; of many blocks, the mean counts.
            rounds = max(1.0, _MEAN * blocks / MULTIPROCESSORS)
        each = -(-steps // parts) * (problem.q_heads // heads)
        return rounds * (each + _ADDING * ((parts > 1) + own_keys))

    most = max(1, min(steps, MOST_PARTS))
    own = (False, True) if problem.group > 1 and not fixed else (False,)
    best = min(((parts, one) for parts in range(1, most + 1) for one in own), key=cost)
    sure = not many and not varied
    return best if sure or cost(best) < _GAIN * cost((1, False)) else (1, False)


def microseconds(problem: BackwardProblem, config: BackwardConfig) -> float:
    """The estimate for the matmuls, and for adding up what blocks have for the same keys."""
    rates = _Rates()
    problem, heads = _of_blocks(problem, config), problem.kv_heads
    step = rates.elements * problem.head_dim / 128 * config.block_q / ROWS
    if config.warpgroups == 1:
        step *= rates.half
    times = []
    for count in _steps(problem, config):
        each = [
            count * (part + 1) // config.parts - count * part // config.parts
            for part in range(config.parts)
        ]
        times.append([rates.block + problem.group * one * step for one in each])
    section = section_heads(problem, config)
    order = [time for tile in times for _ in range(section) for time in tile]
    sections = problem.batch * problem.kv_heads // section
    result = makespan(order * sections, MULTIPROCESSORS)
    copies = config.parts * problem.kv_heads // heads
    if copies > 1:
        rows = problem.batch * problem.kv_seq * heads * (copies + 1)
        result += rates.adding + rates.megabyte * 4e-6 * rows * problem.head_dim
    return result


def _of_blocks(problem: BackwardProblem, config: BackwardConfig) -> BackwardProblem:
    """The problem with as many heads of keys as have blocks."""
    return dataclasses.replace(problem, kv_heads=problem.q_heads) if config.own_keys else problem


def _blocks(problem: BackwardProblem, config: BackwardConfig) -> int:
    tiles = -(-problem.kv_seq // config.block_kv)
    return tiles * problem.batch * _of_blocks(problem, config).kv_heads * config.parts


def _steps(problem: BackwardProblem, config: BackwardConfig) -> list[int]:
    """Of each tile of keys, for one head of queries."""
    return meeting(
        problem.kv_seq,
        problem.q_seq,
        config.block_kv,
        config.block_q,
        before=problem.ahead,
        after=problem.left,
        shift=problem.q_seq - problem.kv_seq,
        period=problem.terms.period,
    )
