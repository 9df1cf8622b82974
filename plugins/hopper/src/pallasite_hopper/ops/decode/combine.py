"""How blocks combine what the ranges of tiles left of an item that they share.

The block whose range ends an item completes it. Where many blocks share one, reading what they left
would take this block longer than all of them took for their ranges; so the last block of each
:data:`GROUP` combines what these have left, and the one that completes the item reads the groups'.
Blocks wait for earlier ones only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_hopper.ops.decode.schedule import Problem, Schedule
from pallasite_hopper.ops.flash import softmax

GROUP = 16
"""Blocks, one after the other, whose parts are combined first."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What a block combines when it is done with its range; values of the kernel.

    Attributes:
      kind: 0 for nothing, 1 for what completes an item, 2 for what its group has left.
      first: the block in whose range the item began.
      last: the one whose range ends it.
    """

    kind: Any
    first: Any
    last: Any

    @staticmethod
    def of(schedule: Schedule, block: Any, begin: tuple[Any, Any, Any]) -> Role:
        """Of a block with the first item of its range, from ``schedule.begin``: another one that it
        has a part of goes on in a range behind."""
        sequence, _, before = begin
        size = schedule.start(block + 1) - schedule.start(block)
        tiles = schedule.tiles(sequence)
        count = lax.min(tiles - before, size)
        shares = Shares.of(schedule, block, before, tiles - (before + count))
        return shares.role((size > 0) & (count < tiles))

    @property
    def combines(self) -> Any:
        """Whether there is something."""
        return self.kind > 0

    @property
    def leads(self) -> Any:
        """Whether it is what the block's group has left."""
        return self.kind == 2

    def groups(self, block: Any) -> Any:
        """How many groups are read as one part each."""
        return jnp.where(self.leads, 0, lax.div(block - self.first, jnp.int32(GROUP)))

    def parts(self, block: Any) -> Any:
        """How many parts are combined, the block's own included."""
        behind = block - self.first
        return jnp.where(self.leads, GROUP, behind + 1 - self.groups(block) * (GROUP - 1))

    def place(self, number: Any, block: Any) -> tuple[Any, Any]:
        """The first two indices of a part, see ``kernel.partial_shapes``."""
        groups = self.groups(block)
        of_group = number < groups
        # Parts are numbered from the group's first block, or from behind the groups.
        start = jnp.where(self.leads, block - (GROUP - 1), self.first + groups * (GROUP - 1))
        found = jnp.where(of_group, self.first + (number + 1) * GROUP - 1, start + number)
        return (of_group | (found == self.first)).astype(jnp.int32), found


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which blocks share the item of which a block has a part; values of the kernel.

    Attributes:
      block: the block.
      first, last: the blocks in whose ranges the item begins and ends.
      leader: the last block of its group, if that has as many.
    """

    block: Any
    first: Any
    last: Any
    leader: Any

    @staticmethod
    def of(schedule: Schedule, block: Any, before: Any, rest: Any) -> Shares:
        """By how many tiles the item has before the block's range, and after it."""
        first = jnp.where(before > 0, schedule.block_of(schedule.start(block) - before), block)
        end = schedule.start(block + 1) + rest - 1
        last = jnp.where(rest > 0, schedule.block_of(end), block)
        leader = first + (lax.div(block - first, jnp.int32(GROUP)) + 1) * GROUP - 1
        return Shares(block, first, last, leader)

    @property
    def reader(self) -> Any:
        """The block that combines what this one has left."""
        return lax.min(self.leader, self.last)

    def role(self, shared: Any) -> Role:
        """Of the block, if it has not all of the item."""
        ends = shared & (self.last == self.block)
        leads = shared & (self.leader == self.block) & (self.last > self.block)
        kind = jnp.where(leads, 2, ends.astype(jnp.int32))
        return Role(kind, self.first, self.last)


def combined(
    problem: Problem, parts: tuple[Any, ...], role: Role, block: Any, head: Any
) -> tuple[Any, Any, Any]:
    """The sum of the parts that a block combines.

    Args:
      problem: what is computed.
      parts: references to results, maxima and sums, see ``kernel.partial_shapes``.
      role: of the block.
      block: which it is.
      head: which of the heads side by side.

    Returns:
      The transposed results (head_tile, columns), maxima and sums (columns,).
    """
    results, maxima, sums = parts
    lowest = softmax.LOWEST
    elements = problem.head_tile * problem.columns // 128
    at_once = max(1, min(8, 64 // elements))  # Parts whose loads overlap and fit the registers.
    count = role.parts(block)

    def step(turn: Any, carry: Any) -> Any:
        largest, total, values = carry
        loaded = []
        for number in range(at_once):
            part = turn * at_once + number
            place = (*role.place(lax.min(part, count - 1), block), head)
            part_maxima = jnp.where(part < count, maxima[place], -jnp.inf)
            loaded.append((part_maxima, sums[place], results[place]))
        larger = largest
        for part_maxima, _, _ in loaded:
            larger = jnp.maximum(larger, part_maxima)
        shrink = jnp.exp2(largest - larger)
        total = total * shrink
        values = values * _spread(shrink, problem.head_tile)
        for part_maxima, part_sums, part in loaded:
            weight = jnp.exp2(part_maxima - larger)
            total = total + part_sums * weight
            values = values + part * _spread(weight, problem.head_tile)
        return larger, total, values

    columns = problem.columns
    start = (
        jnp.full((columns,), lowest, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
        jnp.zeros((problem.head_tile, columns), jnp.float32),
    )
    turns = lax.div(count + (at_once - 1), at_once)
    larger, total, values = lax.fori_loop(0, turns, step, start)
    return values, larger, total


def _spread(columns: Any, rows: int) -> Any:
    return lax.broadcast_in_dim(columns, (rows, columns.shape[0]), (1,))
