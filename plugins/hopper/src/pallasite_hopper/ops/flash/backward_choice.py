"""Among how many blocks the gradients of a tile of keys are divided.

The estimate counts the steps of each block, and lets blocks begin in their order wherever a
multiprocessor is free: a causal mask, a window, and a few blocks too many for the multiprocessors
all leave some of these idle.
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

PARTS = (1, 2, 3, 4, 6, 8)
"""Blocks that may share a tile of keys."""

_MANY = 16
"""Blocks of a multiprocessor that are enough: the last ones are a small part of all."""

_GAIN = 0.95
"""Part of the time without division that it has to be estimated at."""

_SEGMENTS = 4
"""Sequences that are taken to be packed into one; it is not known before the program runs."""


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Microseconds of a block, of a step of 64 queries for each 128 elements of a head, and of what
    adds results up: of its kernels, and for each megabyte.

    Attributes:
      half: of a step of blocks with 64 keys, if these are of one warpgroup.
    """

    block: float = 1.5
    elements: float = 1.69
    half: float = 0.6
    adding: float = 5.28
    megabyte: float = 0.6


def default_config(problem: BackwardProblem) -> BackwardConfig:
    """A configuration that suits the head size, the mask and the number of tiles."""
    return _default_config(problem)


@functools.lru_cache(maxsize=1024)
def _default_config(problem: BackwardProblem) -> BackwardConfig:
    whole = config_for_heads(problem)
    if _blocks(problem, whole) >= _MANY * MULTIPROCESSORS:
        return whole
    # Masks that differ among heads need blocks of their own.
    divisible = problem.group > 1 and not problem.terms.has("block_mask")
    found = []
    for own_keys in (False, True) if divisible else (False,):
        config = whole
        if own_keys:
            alone = dataclasses.replace(problem, kv_heads=problem.q_heads)
            config = dataclasses.replace(config_for_heads(alone), own_keys=True)
        most = max(_steps(problem, config))
        for parts in PARTS:
            if parts == 1 or (parts <= most and _blocks(problem, config) < _MANY * MULTIPROCESSORS):
                found.append(dataclasses.replace(config, parts=parts))
    best = min(found, key=lambda config: microseconds(problem, config))
    limit = _GAIN * microseconds(problem, whole)
    return best if microseconds(problem, best) < limit else whole


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
    apart = config.own_keys or problem.terms.has("block_mask")
    return dataclasses.replace(problem, kv_heads=problem.q_heads) if apart else problem


def _blocks(problem: BackwardProblem, config: BackwardConfig) -> int:
    tiles = -(-problem.kv_seq // config.block_kv)
    return tiles * problem.batch * _of_blocks(problem, config).kv_heads * config.parts


def _steps(problem: BackwardProblem, config: BackwardConfig) -> list[int]:
    """Of each tile of keys, for one head of queries."""
    terms, period = problem.terms, problem.terms.period
    if terms.segmented and period is None:
        period = -(-problem.kv_seq // _SEGMENTS)
    return meeting(
        problem.kv_seq,
        problem.q_seq,
        config.block_kv,
        config.block_q,
        before=problem.ahead,
        after=problem.left,
        shift=problem.q_seq - problem.kv_seq,
        period=period,
    )
