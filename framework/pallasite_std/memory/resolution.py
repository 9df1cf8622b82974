"""Resolving the transforms of a reference: every view becomes a memory layout and an offset.

What each transform means is in the table of views, to which plugins add theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError, UnsupportedError, plugins
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.lowering import RuleContext, Value
from pallasite_std.memory.reference_types import BarrierReference, MemoryReference
from pallasite_std.memory.references import GlobalReference


def resolve(
    ctx: RuleContext,
    reference: Value,
    transforms: Any = (),
    *,
    pointer: bool = True,
    other_blocks: bool = False,
    copied_to: bool = False,
    discards: bool = False,
    own_line: bool = False,
) -> MemoryReference:
    """The memory that a reference and its transforms stand for.

    Args:
      ctx: the rule's context.
      reference: a reference value, or a TransformedRef whose ``ref`` is one.
      transforms: its transforms, outermost view last.
      pointer: whether plain accesses will happen; a copy by TMA needs no pointer of a global array.
      other_blocks: whether the rule accesses the shared memory of other blocks of the cluster too.
      copied_to: whether the rule is of a copy to what the reference stands for.
      discards: whether it is of a copy after which what is there is not used.
      own_line: whether the rule emits the accesses under the ``line`` of what is returned.

    Raises:
      InvalidTypeError: not a reference to memory.
      InvalidValueError, UnsupportedError: a view that the memory layout cannot express.
    """
    if isinstance(reference, _jax.TransformedRef):
        transforms = (*reference.transforms, *transforms)
        reference = reference.ref
    if isinstance(reference, GlobalReference):
        reference = reference.resolve(pointer=pointer)
    if not isinstance(reference, MemoryReference):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} cannot access this reference",
            got=type(reference).__name__,
            expected="a reference to global or shared memory",
        )
    memory: MemoryReference = reference
    for transform in transforms:
        memory = memory.space.view(ctx, memory, transform)
    if memory.remote is not None and not other_blocks:
        raise UnsupportedError(
            f"primitive {ctx.primitive} cannot access the shared memory of another block",
            expected="the block's own shared memory",
            hint="read what cluster_ref gives, or assign to it",
        )
    if memory.peer is not None and memory.peer.copied_to and not copied_to:
        raise UnsupportedError(
            f"primitive {ctx.primitive} cannot access the memory of all devices at once",
            expected="the memory of one device, or a copy from shared memory to that of all",
            hint="use multimem_store and multimem_load_reduce, or remote_ref",
        )
    if memory.use is not None and ctx.location is not None:
        line = memory.use.access(ctx.location, memory.part, discards=discards, own_line=own_line)
        if line is not ctx.location:
            memory = dataclasses.replace(memory, line=line)
    if ctx.kernel.recorder is not None and memory.space.is_shared:
        ctx.kernel.recorder.view(ctx, reference, memory)
    return memory


def by_table(ctx: RuleContext, reference: MemoryReference, transform: Any) -> MemoryReference:
    """One view of a reference, as the table of views has it.

    Raises:
      UnsupportedError: the table does not have the transform.
    """
    rule = ctx.kernel.registry.view_rule(type(transform))
    if rule is None:
        name = type(transform).__name__
        raise UnsupportedError(
            f"primitive {ctx.primitive} does not understand the view {name}",
            got=str(transform),
            expected="a view for which a plugin has a ViewRule",
            hint=plugins.manager().remedy("names", name),
        )
    viewed: MemoryReference = rule.lower(ctx, reference, transform)
    return viewed


def resolve_barrier(ctx: RuleContext, reference: Value, transforms: Any = ()) -> BarrierReference:
    """The barrier that a reference and its transforms select.

    Indices may be chained; a slice must cover its dimension.

    Raises:
      InvalidTypeError: not a barrier.
      InvalidValueError: an array of barriers from which none is selected.
    """
    if isinstance(reference, _jax.TransformedRef):
        transforms = (*reference.transforms, *transforms)
        reference = reference.ref
    if not isinstance(reference, BarrierReference):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} needs a barrier",
            got=type(reference).__name__,
            expected="a reference allocated as plgpu.Barrier or plgpu.ClusterBarrier",
        )
    barrier = reference
    for transform in transforms:
        barrier = barrier.space.view(ctx, barrier, transform)
    if barrier.shape != ():
        count = int(np.prod(barrier.shape))
        if count != 1:
            raise InvalidValueError(
                f"an array of {count} barriers is used as one",
                got=f"shape {list(barrier.shape)}",
                expected="one barrier",
                hint="select one, such as barrier.at[slot]",
            )
        barrier = dataclasses.replace(barrier, shape=())
    return barrier
