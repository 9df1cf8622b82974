"""Which instructions a copy between global and shared memory is made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.lowering import RuleContext
from pallasite_std.copies import bulk_copies as bulk
from pallasite_std.copies import tensor_copies as tma
from pallasite_std.copies.tensor_map_types import reduction_operator
from pallasite_std.memory.proxies import acquire_stores
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.primitives.copy_options import OOBFillMode


@dataclasses.dataclass(frozen=True)
class Load:
    """A planned load.

    Attributes:
      size: bytes that the barrier has to wait for.
      issue: emits the instructions of the lane that the caller has elected; it takes the 32-bit
        shared address of the mbarrier.
    """

    size: int
    issue: Callable[[ir.Value], None]


def tensor_load(
    ctx: RuleContext,
    source: MemoryReference,
    destination: MemoryReference,
    dimensions: Sequence[int] = (),
    blocks: int = 1,
    evict_first: bool = False,
) -> Load:
    """The load through a tensor map: zeros arrive for what lies outside of the array.

    Args:
      ctx: the rule's context.
      source: a window of a kernel argument.
      destination: shared memory of the same shape.
      dimensions: CUDA cluster dimensions whose blocks share the load.
      blocks: how many blocks these are.
      evict_first: whether the L2 cache gives up first what is read; only if one block loads it.

    Raises:
      InvalidValueError: what the TMA engine cannot do.
    """
    tma.check_shared_alignment(destination)
    copy = tma.plan_copy(ctx, source, destination.layout, blocks=blocks)

    def issue(barrier: ir.Value) -> None:
        acquire_stores(ctx, source)
        tma.issue_load(
            ctx, copy, destination, barrier, collective=dimensions, evict_first=evict_first
        )

    return Load(copy.plan.expected_bytes, issue)


def plan_load(
    ctx: RuleContext,
    source: MemoryReference,
    destination: MemoryReference,
    mode: OOBFillMode | None,
    evict_first: bool = False,
) -> Load:
    """The load by one block that leaves in shared memory what the mode says.

    A run of bytes that is known to lie inside the array needs no tensor map. In other loads only a
    tensor map fills with zeros.

    Args:
      ctx: the rule's context.
      source: a window of a kernel argument.
      destination: shared memory of the same shape.
      mode: what happens outside of the array; None is ``OOBFillMode.ZEROS``, but leaves the choice
        of the instruction where nothing lies outside.
      evict_first: see :func:`tensor_load`.

    Raises:
      InvalidValueError: what no instruction can do.
    """
    fills = mode in (None, OOBFillMode.ZEROS)
    run = bulk.plan(source, destination, promised=mode is OOBFillMode.PROMISE_IN_BOUNDS)
    if run is not None and run.may_leave and fills:
        run = None
    if run is None or mode is OOBFillMode.ZEROS:
        try:
            return tensor_load(ctx, source, destination, evict_first=evict_first)
        except InvalidValueError as error:
            if run is None:
                if fills and bulk.plan(source, destination, promised=True) is not None:
                    error.hint = (
                        "if the window never leaves the array, say so:"
                        " oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS"
                    )
                raise

    def issue(barrier: ir.Value) -> None:
        acquire_stores(ctx, source)
        bulk.issue_load(ctx, run, barrier)

    return Load(run.size, issue)


def plan_store(
    ctx: RuleContext,
    source: MemoryReference,
    destination: MemoryReference,
    reduction: str | None,
) -> Callable[[], None]:
    """The store that drops what lies outside of the array.

    Args:
      ctx: the rule's context.
      source: shared memory.
      destination: a window of a kernel argument, of the same shape.
      reduction: how it combines with what is there.

    Returns:
      What emits the instructions of the lane that the caller has elected.

    Raises:
      InvalidValueError: what no instruction can do.
    """

    def after_stores(store: Callable[[], None]) -> Callable[[], None]:
        def issue() -> None:
            acquire_stores(ctx, destination)
            store()

        return issue

    run = None if reduction is not None else bulk.plan(destination, source)
    # Elsewhere, a tensor map takes more than to see what lies outside.
    if run is None or (run.may_leave and destination.peer is None):
        try:
            tma.check_shared_alignment(source)
            copy = tma.plan_copy(ctx, destination, source.layout, reduction=reduction)
            _check_beginning(destination)
            operator = None
            if reduction is not None:
                operator = reduction_operator(reduction, str(source.dtype))
            return after_stores(functools.partial(tma.issue_store, ctx, copy, source, operator))
        except InvalidValueError:
            if run is None:
                raise
    return after_stores(functools.partial(bulk.issue_store, ctx, run))


def _check_beginning(destination: MemoryReference) -> None:
    """The engine drops what a box writes behind the array, but stops at boxes before it."""
    for dim, start in enumerate(destination.window or ()):
        if not start.dynamic and start.static < 0:
            raise InvalidValueError(
                f"a store that begins before the array along dimension {dim}",
                got=start.static,
                expected="a start of at least 0; what is written behind the array is dropped",
            )
