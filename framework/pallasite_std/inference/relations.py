"""How the layouts of operands and results of changes of shape follow from each other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from pallasite.plugin.inference import Pair, Pairs, remembered, tried
from pallasite.plugin.inference import broadcast as broadcast
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    ConversionKind,
    Layout,
    LayoutProposals,
    RegisterLayout,
    SplatLayout,
    conversion,
    default_strided,
    padded,
)
from pallasite_std.inference.costs import SYNCHRONIZATION, movement_cost, ordering_cost
from pallasite_std.memory.access import MAXIMUM_BYTES
from pallasite_std.memory.reduced_layouts import SHORT, by_rows, reduced
from pallasite_std.memory.relayout import USUAL, rows_in_registers
from pallasite_std.memory.rows import better_row, is_beginning, moved, same_row
from pallasite_std.stacking import stacked


def bijection(forward: Callable[[Layout], Layout], backward: Callable[[Layout], Layout]) -> Pairs:
    """Of a change of shape that loses nothing, such as a transposition."""

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[Pair]:
        if result is not None:
            before = tried(lambda: backward(result))
            if before is not None and tried(lambda: forward(before)) == result:
                yield before, result
        if operand is not None:
            after = tried(lambda: forward(operand))
            if after is not None:
                yield operand, after

    return remembered(pairs)


_TOO_LARGE = 1e6
"""Of an array that shared memory may not have room for, if there is another way."""

_FETCH = 8.0
"""An instruction that is fetched to be run once."""

_AROUND = 20
"""Instructions of a movement through memory beside those for each register, where renaming
registers may do instead."""

_EXCESS = 64.0
"""One beyond twice as many as for powers of two."""

_GUARDS = 4
"""Instructions for the padding of more than one dimension."""


@functools.lru_cache(maxsize=1024)
def _row_registers(shape: tuple[int, ...], bits: int) -> int | None:
    """Registers of an array of an odd shape in one row, or in its default layout if that suits it
    better."""
    if not math.prod(shape) & (math.prod(shape) - 1):
        return None
    default = default_strided(shape, bits)
    return (better_row(default, 128 // max(8, bits)) or default).registers


def _is_exchanged(one: Layout | None, other: Layout) -> bool:
    """Whether an array goes through memory from one layout to another."""
    if not isinstance(one, RegisterLayout) or not isinstance(other, RegisterLayout):
        return False
    return one != other and conversion(one, other).kind is ConversionKind.SHARED_MEMORY


def _fills_threads(layout: Layout) -> bool:
    """Whether every thread holds elements of its own, without padding, in several dimensions."""
    if not isinstance(layout, RegisterLayout):
        return False
    own = [d.size for digits in layout.dims for d in digits if d.owner.is_thread]
    return not layout.flat and not layout.is_padded and math.prod(own) == LANES * WARPS


@dataclasses.dataclass(frozen=True)
class Movement:
    """A relation that works between any two layouts, through scratch memory where it has to.

    Attributes:
      exact: between which layouts it works by renaming registers.
      before, after: shapes of the operand and of the result.
      bits: of an element.
      run: consecutive elements that stay so; None if that is not known.
      counted: whether code counts that moves elements one by one in such layouts.
      by_rows: whether the operand is stored to rows that do not follow each other in memory.
      in_row: whether it takes less code if all elements of the result are in one row of vectors.
    """

    exact: Pairs
    before: tuple[int, ...]
    after: tuple[int, ...]
    bits: int
    run: int | None = None
    counted: bool = True
    by_rows: bool = False
    in_row: bool = False

    def pairs(self, operand: Layout | None, result: Layout | None) -> list[Pair]:
        """See :data:`pallasite.plugin.inference.Pairs`."""
        found = list(self.exact(operand, result))
        if found and (operand is None or result is None):
            return found
        if self._is_in_lines():
            # To convert an array in memory first would be such a movement, too.
            found = [pair for pair in found if not _is_exchanged(operand, pair[0])]
        start = self._suitable(operand, self.before, result)
        end = self._suitable(result, self.after, operand)
        ends = [(start, end)]
        if self.in_row and result is None and (row := moved(self.after, self.bits)) is not None:
            ends.append((start, row))
        if self.run is not None:
            # What is neither loaded nor stored may be a row of vectors, too.
            if operand is None and (row := moved(self.before, self.bits)) is not None:
                ends.append((row, end))
            if result is None and (row := moved(self.after, self.bits)) is not None:
                ends.append((start, row))
        return [*found, *(pair for pair in ends if pair not in found)]

    def _suitable(
        self, layout: Layout | None, shape: tuple[int, ...], other: Layout | None
    ) -> Layout:
        if layout is not None:
            return layout
        if other is not None and other.shape == shape:
            return other
        return default_strided(shape, self.bits)

    def work(self, operand: Layout, result: Layout) -> float:
        """What it costs between two layouts."""
        if isinstance(operand, SplatLayout):
            return 0.0
        if (operand, result) in self.exact(operand, result):
            part = math.prod(self.before) > math.prod(self.after)
            # What goes through memory takes more code than parts of such rows do, or of fragments.
            less = part and (self._is_in_lines() or _fills_threads(operand))
            cost = self._direct(result, excess=0.0 if less else _EXCESS)
            if part:
                # Of a part, the whole is what takes code.
                cost = max(cost, self._direct(operand, excess=0.0))
            return cost
        if self.in_row and isinstance(result, RegisterLayout) and result.flat:
            return 2 * SYNCHRONIZATION
        cost = movement_cost(operand, result, self.bits, self.run)
        if operand.size * self.bits // 8 > USUAL:
            return cost + _TOO_LARGE
        if not isinstance(result, RegisterLayout):
            return cost
        if result.flat:
            # Its lanes do not take what a view of rows has; only whole arrays are in one row.
            cost += movement_cost(padded(result.shape), result, self.bits)
        cost += self._code(result, self.run)
        if result.flat or (operand.size + result.size) * self.bits // 8 <= USUAL:
            whole = movement_cost(operand, result, self.bits)
            ordered = whole + ordering_cost(result.size // (self.run or 1)) + self._code(result)
            cost = min(cost, ordered)
        cost += _FETCH * _AROUND if self._is_in_lines() else 0.0
        if self.by_rows and isinstance(operand, RegisterLayout) and operand.flat:
            cost += movement_cost(operand, padded(self.before), self.bits)
        return cost + self._code(operand)

    def _is_in_lines(self) -> bool:
        """Whether rows are so short that lanes may hold whole ones, and parts of registers."""
        return self.run is not None and 1 < self.before[-1] <= SHORT

    def _direct(self, result: Layout, excess: float = _EXCESS) -> float:
        """What the code costs that loads and stores elements one by one, in the same layout."""
        if self.run is None or not self.counted or not isinstance(result, RegisterLayout):
            return 0.0
        if result.flat or _fills_threads(result):  # Fragments of matrices, say.
            return 0.0
        row = _row_registers(result.shape, self.bits)
        if row is None:
            return 0.0
        own = result.registers * (result.vector_length + 1)
        powers = math.prod(1 << (n - 1).bit_length() for n in result.shape)
        usual = 2 * max(1, powers * self.bits // (8 * MAXIMUM_BYTES * LANES * WARPS))
        return _FETCH * max(0, own - 4 * row - _GUARDS) + excess * max(0, own - 2 * usual)

    def _code(self, layout: Layout, run: int | None = None) -> float:
        """What code costs that a row would not need: it is fetched, and runs once."""
        if self.run is None or not isinstance(layout, RegisterLayout):
            return 0.0
        row = _row_registers(layout.shape, self.bits)
        if row is None:
            return 0.0
        pieces = 1 if run is None else -(-layout.vector_length // run)
        own = layout.registers * pieces + (0 if layout.flat or not layout.is_padded else _GUARDS)
        return _FETCH * max(0, own - row)


def nothing(operand: Layout | None, result: Layout | None) -> Sequence[Pair]:
    """Of what always goes through memory."""
    return ()


@functools.lru_cache(maxsize=256)
def reshape(before: tuple[int, ...], after: tuple[int, ...]) -> Pairs:
    """Of a reshape between two shapes."""
    return bijection(
        lambda layout: layout.reshape(tuple(after)).layout,
        lambda layout: layout.reshape(tuple(before)).layout,
    )


@functools.lru_cache(maxsize=256)
def transpose(permutation: tuple[int, ...], proposals: LayoutProposals) -> Pairs:
    """Of a transposition; it also knows layouts that suit tiles in memory on both sides."""
    inverse = [permutation.index(i) for i in range(len(permutation))]

    def forward(layout: Layout) -> Layout:
        return layout.transpose(permutation).layout

    def backward(layout: Layout) -> Layout:
        return layout.transpose(inverse).layout

    exact = bijection(forward, backward)

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[Pair]:
        yield from exact(operand, result)
        if operand is not None:
            yield from (
                (layout, forward(layout)) for layout in proposals.for_transpose(operand.shape)
            )
        elif result is not None:
            yield from (
                (backward(layout), layout) for layout in proposals.for_transpose(result.shape)
            )

    return remembered(pairs)


@functools.lru_cache(maxsize=256)
def slice_(
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
    proposals: LayoutProposals,
) -> Pairs:
    """Of a slice: the result's layout is part of the operand's."""

    beginning = is_beginning(shape, starts, sizes)

    def part(operand: Layout) -> Layout | None:
        if beginning and (row := same_row(operand, sizes)) is not None:
            return row
        return tried(lambda: operand.slice(starts, sizes).layout)

    def whole(result: RegisterLayout) -> RegisterLayout:
        """The layout of the operand whose registers are those of such parts."""
        for dimension, (extent, size) in enumerate(zip(shape, sizes, strict=True)):
            if extent != size:
                wider = (*shape[: dimension + 1], *sizes[dimension + 1 :])
                result = stacked(result, dimension, wider)
        return result

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[Pair]:
        if operand is not None:
            after = part(operand)
            if after is not None:
                yield operand, after
                return
        if isinstance(result, RegisterLayout):
            candidates: list[Layout | None] = [*proposals.for_broadcast(shape)]
            candidates.append(same_row(result, shape) if beginning else None)
            for before in (*candidates, tried(lambda: whole(result))):
                if before is not None and part(before) == result:
                    yield before, result
        if operand is not None:
            other = rows_in_registers(operand.shape)
            after = part(other)
            if after is not None:
                yield other, after

    return remembered(pairs)


@functools.lru_cache(maxsize=256)
def reduction(
    shape: tuple[int, ...], axes: tuple[int, ...], proposals: LayoutProposals, bits: int = 32
) -> Pairs:
    """Of a reduction of elements of so many bits: the result's layout is what is left of the
    operand's."""
    kept = [d for d in range(len(shape)) if d not in axes]

    def after(layout: Layout) -> Layout | None:
        return tried(lambda: layout.reduce(axes))

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[Pair]:
        if isinstance(operand, RegisterLayout):
            left = after(operand)
            if left is None:
                other = padded(shape)
                left = after(other)
                if left is not None:
                    yield other, left
            else:
                yield operand, left
        candidates: tuple[RegisterLayout, ...] = proposals.for_broadcast(shape)
        # Lanes of a row are neighbours rather.
        near = [reduced(shape, axes, bits, sector) for sector in (0.5, 1.0) if bits >= 32]
        for suited in (reduced(shape, axes, bits), *near, by_rows(shape, bits)):
            if suited is not None:
                candidates = (*candidates, suited)
        if isinstance(result, RegisterLayout):
            wide = tried(lambda: result.broadcast_in_dim(tuple(shape), kept).layout)
            for candidate in [*candidates, *([wide] if wide is not None else [])]:
                if after(candidate) == result:
                    yield candidate, result
        if operand is None and result is not None:
            # It may be cheaper to reduce in another layout, and convert what is left.
            for candidate in candidates:
                left = after(candidate)
                if left is not None:
                    yield candidate, left

    return remembered(pairs)
