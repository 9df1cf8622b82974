"""A plugin of another author: slots, a memory space with a resource, a limit and views of its own.

A slot holds one row of 128 numbers of 32 bits, one for each lane of a warpgroup. All slots of a
kernel are one piece of shared memory, of a power of two of slots, which is reserved once. They are
no memory with addresses to the compiler: rows are read and written as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from pallasite.plugin import BASELINE_FEATURES, InvalidValueError, Resource, Target, hookimpl
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import start_of
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace, transforms
from pallasite.plugin.layouts import RegisterLayout, strided
from pallasite.plugin.lowering import Allocation, RegisterArray, RuleContext, StateKey, relayout

LANES = 128
SLOT_BYTES = 4 * LANES


class SlotResource(Resource):
    """Slots are granted in powers of two."""

    def granted(self, amount: int) -> int:
        """The next power of two."""
        return 1 << (amount - 1).bit_length()


SLOT_COUNT = SlotResource("slots", unit="slots", title="slots", hint="fewer rows at a time")


@dataclasses.dataclass
class Pool:
    """The slots of one kernel: where they begin, and how many the open scopes use."""

    offset: int
    used: int = 0


def _pool(kernel: Any) -> Pool:
    size = SLOT_BYTES * SLOT_COUNT.granted(kernel.estimate.amount(SLOT_COUNT))
    return Pool(kernel.launch.reserve_shared(size, alignment=16, what="slots", location=None))


POOL = StateKey("slots.pool", _pool)


def layout_of(rows: int) -> RegisterLayout:
    """Each register of a lane is its element of one row."""
    return strided((rows, LANES), 1)


@dataclasses.dataclass(frozen=True, eq=False)
class SlotReference:
    """Some slots: the first one and how many, and the dtype of their numbers."""

    space: MemorySpace
    first: int
    rows: int
    dtype: Any
    offset: int

    def pointer(self, ctx: RuleContext, row: int) -> Any:
        """Where this lane's element of a row is."""
        base = ctx.launch.shared_pointer(self.offset + SLOT_BYTES * (self.first + row))
        lane = ops.add(ops.multiply(ctx.launch.warp_id, 32), ctx.launch.lane_id)
        return ops.byte_pointer(base, ops.multiply(lane, 4))


class Slots(MemorySpace):
    """Rows of 128 numbers of 32 bits."""

    name = "SLOTS"
    reuses_memory = False

    def describe(self, shape, dtype, *, zeroed: bool = False):
        """``zeroed`` is there to have an argument of its own."""
        if len(shape) != 2 or shape[1] != LANES or np.dtype(dtype).itemsize != 4:
            raise InvalidValueError(f"SLOTS are rows of {LANES} numbers", got=shape)
        return super().describe(shape, dtype)

    def union_placement(self, members):
        """One after the other, in slots."""
        starts, end = [], 0
        for member in members:
            starts.append(end)
            end += member.shape[0]
        return starts, end

    def resources(self, ctx, variable, axes):
        aval = variable.aval
        return ctx.reserve(SLOT_COUNT, aval.shape[0], f"{aval.dtype}{list(aval.shape)}")

    @contextlib.contextmanager
    def allocate(self, ctx, variable, axes):
        pool, aval = ctx.kernel.state(POOL), variable.aval
        first, rows = pool.used, aval.shape[0]
        row = Allocation("slots", f"{rows} rows", rows, first, ctx.location, "slots", "slots")
        ctx.launch.note(row)
        pool.used += rows
        try:
            yield SlotReference(self, first, rows, np.dtype(aval.dtype), pool.offset)
        finally:
            pool.used = first

    def view(self, ctx, reference, transform):
        if isinstance(transform, transforms.ExtractAliasedRef):
            first = reference.first + transform.offset
            return dataclasses.replace(
                reference, first=first, rows=transform.shape[0], dtype=np.dtype(transform.dtype)
            )
        if not isinstance(transform, _jax.NDIndexer):
            raise InvalidValueError("slots are only indexed", got=type(transform).__name__)
        rows, columns = transform.indices
        if (columns.start, columns.size) != (0, LANES) or not isinstance(rows, _jax.Slice):
            raise InvalidValueError("slots are read and written by rows")
        first = reference.first + int(rows.start)
        return dataclasses.replace(reference, first=first, rows=rows.size)

    def _viewed(self, ctx, reference, views):
        for view in views:
            reference = self.view(ctx, reference, view)
        return reference

    def read(self, ctx, reference, transforms):
        viewed = self._viewed(ctx, reference, transforms)
        kind = types.memory_type(viewed.dtype)
        registers = [
            ops.load(kind, viewed.pointer(ctx, row), alignment=4) for row in range(viewed.rows)
        ]
        return RegisterArray(tuple(registers), layout_of(viewed.rows), viewed.dtype)

    def write(self, ctx, reference, transforms, value):
        viewed = self._viewed(ctx, reference, transforms)
        old = self.read(ctx, viewed, ()) if any(ctx.used) else value
        value = relayout(ctx, value, layout_of(viewed.rows))
        for row, register in enumerate(value.registers):
            ops.store(register, viewed.pointer(ctx, row), alignment=4)
        return old

    def describe_layout(self, ctx, reference, transforms):
        viewed = self._viewed(ctx, reference, transforms)
        return f"slots {viewed.first} to {viewed.first + viewed.rows - 1}"

    def _infer(self, views):
        for view in views:
            if isinstance(view, _jax.NDIndexer) and start_of(view.indices[0]).known is None:
                raise InvalidValueError("which slot is computed in the kernel")

    def infer_read(self, ctx, reference, transforms, result):
        self._infer(transforms)
        ctx.makes(result, layout_of(result.shape[0]), "slots are read by rows")

    def infer_write(self, ctx, reference, transforms, value):
        self._infer(transforms)
        ctx.needs(1, value, layout_of(value.shape[0]), "slots are written by rows")


SLOTS = Slots()
TARGET = Target(
    name="sm_121a",
    ptx_version=88,
    compute_capability=(12, 1),
    features=BASELINE_FEATURES,
    max_shared_memory=101376,
    limits={"slots": 8},
)


@hookimpl
def pallasite_memory_spaces():
    return [SLOTS]


@hookimpl
def pallasite_targets():
    return [TARGET]
