"""LINES, a memory space with a limit: lines of 128 numbers of 32 bits, one for each lane.

All lines of a kernel are one piece of shared memory, of a power of two of lines, which is reserved
once. To the compiler they have no addresses: lines are read and written as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from pallasite.plugin import (
    BASELINE_FEATURES,
    InvalidValueError,
    Resource,
    Target,
    UnsupportedError,
    jax_internals,
)
from pallasite.plugin.inference import start_of
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import LANES, WARPS, RegisterLayout, strided
from pallasite.plugin.lowering import Allocation, RegisterArray, RuleContext, StateKey, relayout
from third_party_plugin.views import EveryOtherRow

WIDTH = WARPS * LANES
LINE_BYTES = 4 * WIDTH


class LineCount(Resource):
    """Lines are granted in powers of two."""

    def granted(self, amount: int) -> int:
        """The next power of two."""
        return 1 << (amount - 1).bit_length()


LINE_COUNT = LineCount("lines", unit="lines", title="lines", hint="fewer lines at a time")

TARGET = Target(
    name="sm_121a",
    ptx_version=88,
    compute_capability=(12, 1),
    features=BASELINE_FEATURES,
    max_shared_memory=101376,
    limits={"lines": 8},
    description="a chip with lines",
)


@dataclasses.dataclass
class Pool:
    """The lines of one kernel: where they begin, and how many the open scopes use."""

    offset: int
    used: int = 0


def _pool(kernel: Any) -> Pool:
    size = LINE_BYTES * LINE_COUNT.granted(kernel.estimate.amount(LINE_COUNT))
    return Pool(kernel.launch.reserve_shared(size, alignment=16, what="lines", location=None))


POOL = StateKey("third-party.lines", _pool)


def layout_of(rows: int) -> RegisterLayout:
    """Each register of a lane is its element of one line."""
    return strided((rows, WIDTH), 1)


@dataclasses.dataclass(frozen=True, eq=False)
class LineReference:
    """Some lines: their numbers, their dtype, and where line 0 is in shared memory."""

    space: MemorySpace
    numbers: range
    dtype: Any
    offset: int

    def pointers(self, ctx: RuleContext) -> list[Any]:
        """Where this lane's element of each line is."""
        lane = ops.add(ops.multiply(ctx.launch.warp_id, LANES), ctx.launch.lane_id)
        bases = [
            ctx.launch.shared_pointer(self.offset + LINE_BYTES * number) for number in self.numbers
        ]
        return [ops.byte_pointer(base, ops.multiply(lane, 4)) for base in bases]


class Lines(MemorySpace):
    """Lines of 128 numbers of 32 bits."""

    name = "LINES"
    reuses_memory = False

    def describe(self, shape, dtype):
        """Arrays of any number of lines."""
        if len(shape) != 2 or shape[1] != WIDTH or np.dtype(dtype).itemsize != 4:
            raise InvalidValueError(
                "an array of another shape or dtype in LINES",
                got=f"{np.dtype(dtype)}{list(shape)}",
                expected=f"[n, {WIDTH}] numbers of 32 bits",
            )
        return super().describe(shape, dtype)

    def resources(self, ctx, variable, axes):
        """So many lines."""
        aval = variable.aval
        return ctx.reserve(LINE_COUNT, aval.shape[0], f"{aval.dtype}{list(aval.shape)}")

    @contextlib.contextmanager
    def allocate(self, ctx, variable, axes):
        """The lines behind those that are in use."""
        pool, aval = ctx.kernel.state(POOL), variable.aval
        first, rows = pool.used, aval.shape[0]
        ctx.launch.note(
            Allocation("lines", f"{rows} lines", rows, first, ctx.location, "lines", "lines")
        )
        pool.used += rows
        try:
            yield LineReference(self, range(first, first + rows), np.dtype(aval.dtype), pool.offset)
        finally:
            pool.used = first

    def view(self, ctx, reference, transform):
        """Indices that select lines as a whole, and every other line."""
        if isinstance(transform, EveryOtherRow):
            numbers = reference.numbers[transform.first :: 2]
        elif isinstance(transform, jax_internals.NDIndexer):
            rows, columns = transform.indices
            if (columns.start, columns.size) != (0, WIDTH):
                raise InvalidValueError("a part of a line", expected="lines as a whole")
            begin = ctx.static_integer(rows.start, "the number of the line")
            numbers = reference.numbers[begin : begin + rows.size]
        else:
            raise UnsupportedError("such a view of LINES", got=type(transform).__name__)
        return dataclasses.replace(reference, numbers=numbers)

    def _viewed(self, ctx, reference, views):
        for view in views:
            reference = self.view(ctx, reference, view)
        return reference

    def read(self, ctx, reference, transforms):
        """One register of each lane for each line."""
        viewed = self._viewed(ctx, reference, transforms)
        kind = types.memory_type(viewed.dtype)
        registers = [ops.load(kind, one, alignment=4) for one in viewed.pointers(ctx)]
        return RegisterArray(tuple(registers), layout_of(len(registers)), viewed.dtype)

    def write(self, ctx, reference, transforms, value):
        """The same the other way round."""
        viewed = self._viewed(ctx, reference, transforms)
        old = self.read(ctx, viewed, ()) if any(ctx.used) else value
        value = relayout(ctx, value, layout_of(len(viewed.numbers)))
        for pointer, register in zip(viewed.pointers(ctx), value.registers, strict=True):
            ops.store(register, pointer, alignment=4)
        return old

    def infer_read(self, ctx, reference, transforms, result):
        """Lines are read in one layout."""
        self._check(transforms)
        ctx.makes(result, layout_of(result.shape[0]), "LINES are read by lines")

    def infer_write(self, ctx, reference, transforms, value):
        """Lines are written in one layout."""
        self._check(transforms)
        ctx.needs(1, value, layout_of(value.shape[0]), "LINES are written by lines")

    def _check(self, views):
        for view in views:
            is_index = isinstance(view, jax_internals.NDIndexer)
            if is_index and start_of(view.indices[0]).known is None:
                raise InvalidValueError("the number of a line is computed in the kernel")


LINES = Lines()
