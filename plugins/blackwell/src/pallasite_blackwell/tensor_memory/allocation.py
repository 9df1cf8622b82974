"""The columns of a kernel: allocated once when it begins, given back when it ends.

One warp allocates the peak of what the scopes of the kernel need, in a power of two of columns, and
lets other blocks of the multiprocessor allocate theirs. Scopes get parts of it, as on a stack (PTX
ISA, "Tensor Memory Allocation and Management").
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import Allocation, RuleContext, StateKey
from pallasite_blackwell.order import synchronize
from pallasite_blackwell.tensor_memory.layouts import default
from pallasite_blackwell.tensor_memory.references import TensorMemoryReference, reference
from pallasite_blackwell.tensor_memory.space import ALIGNMENT, COLLECTIVE, PLAIN, TMEM, width


@dataclasses.dataclass
class Columns:
    """What a kernel has.

    Attributes:
      granted: how many columns.
      collective: whether pairs of blocks have them together.
      word: where in shared memory the address is left.
      base: the address.
      used: columns that the open scopes use.
      reached: columns that any scope has used.
    """

    granted: int
    collective: bool
    word: int
    base: ir.Value | None = None
    used: int = 0
    reached: int = 0

    @property
    def group(self) -> str:
        """The instructions' qualifier."""
        return f"cta_group::{2 if self.collective else 1}"


def _columns(kernel: Any) -> Columns:
    collective = kernel.estimate.amount(COLLECTIVE)
    resource = COLLECTIVE if collective else PLAIN
    word = kernel.launch.reserve_shared(
        4, alignment=16, what="address of tensor memory", location=kernel.location
    )
    return Columns(resource.granted(kernel.estimate.amount(resource)), bool(collective), word)


COLUMNS = StateKey("blackwell.tensor-memory", _columns)


def applies(kernel: Any) -> bool:
    """Whether a kernel uses tensor memory."""
    return bool(kernel.estimate.amount(PLAIN) or kernel.estimate.amount(COLLECTIVE))


def begin(kernel: Any) -> None:
    """Makes room for the address of the allocation."""
    if kernel.estimate.amount(PLAIN) and kernel.estimate.amount(COLLECTIVE):
        raise InvalidValueError(
            "Can't mix collective and non-collective TMEM allocations within the same kernel.",
            expected="collective=True for all of them, or for none",
            location=kernel.location,
        )
    columns = kernel.state(COLUMNS)
    if columns.collective:
        cluster = kernel.geometry.cluster
        if cluster[0] % 2:
            raise InvalidValueError(
                "tensor memory of pairs of blocks in clusters that have no pairs",
                got=f"blocks along the axes of a cluster: {kernel.geometry.cluster_extents}",
                expected="an even number along the minormost axis of the cluster",
                location=kernel.location,
            )
        kernel.launch.uses_cluster_memory = True


def prologue(kernel: Any) -> None:
    """Allocates the columns, by the first warp of the block."""
    columns = kernel.state(COLUMNS)
    launch = kernel.launch
    pointer = launch.shared_pointer(columns.word)
    first = ops.compare("eq", launch.block_warp_id, 0)
    with ops.when(first):
        ops.inline_assembly(
            f"tcgen05.alloc.{columns.group}.sync.aligned.shared::cta.b32 [$0], {columns.granted};",
            "r,~{memory}",
            ops.shared_address(pointer),
        )
        ops.inline_assembly(
            f"tcgen05.relinquish_alloc_permit.{columns.group}.sync.aligned;", "~{memory}"
        )
    launch.block_barrier()
    columns.base = ops.load(ops.i32(), pointer, alignment=4)


def epilogue(kernel: Any) -> None:
    """Gives the columns back, when all threads are done with them."""
    columns = kernel.state(COLUMNS)
    launch = kernel.launch
    if columns.collective:
        launch.cluster_barrier()
    else:
        launch.block_barrier()
    with ops.when(ops.compare("eq", launch.block_warp_id, 0)):
        assert columns.base is not None
        ops.inline_assembly(
            f"tcgen05.dealloc.{columns.group}.sync.aligned.b32 $0, {columns.granted};",
            "r,~{memory}",
            columns.base,
        )


@contextlib.contextmanager
def allocate(ctx: RuleContext, variable: Any) -> Iterator[TensorMemoryReference]:
    """Columns for a scope."""
    columns = ctx.kernel.state(COLUMNS)
    if columns.base is None:
        raise UnsupportedError(
            "tensor memory on a target that has none",
            got=ctx.target.name,
            expected="a target with the feature tcgen05",
        )
    aval = variable.aval
    union = hasattr(aval, "refs")
    size = math.prod(aval.shape) if union else width(aval)
    first = columns.used
    what = "RefUnion" if union else f"{aval.dtype}{list(aval.shape)}"
    row = Allocation(PLAIN.name, what, size, first, ctx.location, PLAIN.name, PLAIN.unit)
    ctx.launch.note(row)
    if first < columns.reached or ir.InsertionPoint.current.block != ctx.launch.entry:
        # Another scope, or an earlier iteration, may have loaded from these columns just now.
        synchronize(ctx, "ld", "st")
    columns.used += -(-size // ALIGNMENT) * ALIGNMENT
    columns.reached = max(columns.reached, columns.used)
    try:
        if union:
            # Its members have layouts of their own.
            shape, layout, collective = (128, size), default(), columns.collective
            dtype: Any = "int32"
        else:
            shape, layout, collective = aval.shape, aval.layout, aval.collective
            dtype = aval.dtype
        yield reference(TMEM, columns.base, first, shape, dtype, layout, collective)
    finally:
        columns.used = first
