"""The shared memory of one operand of a pipeline, and the copies that fill and empty it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import types
from pallasite.plugin.language import SMEM, checks, transforms
from pallasite_std.copies.tensor_map_types import SHARED_ALIGNMENT
from pallasite_std.pipelines.blocks import Block
from pallasite_std.primitives.copies import barrier_expect, copy_gmem_to_smem, copy_smem_to_gmem

_COPY_UNIT = 16
"""Bytes of which rows consist that the copy engine moves."""

_SMALL = 2048
"""Bytes that a stage may have, however much of it is padding."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One operand with its place in shared memory.

    With one stage the allocation has the shape of the block, otherwise a leading dimension, and
    perhaps more rows or one row of all elements (:func:`_stage_shape`).
    """

    block: Block
    gmem_ref: Any
    smem_ref: Any
    num_stages: int

    def stage(self, stage: Any) -> Any:
        """The reference that holds the block of one stage."""
        if not self.block.in_smem:
            return self.gmem_ref
        if self.num_stages == 1:
            return self.smem_ref
        shape = self.block.shape
        if len(self.smem_ref.shape) == 2 < 1 + len(shape):
            return self.smem_ref.at[stage, : math.prod(shape)].reshape(*shape)
        return self.smem_ref.at[(stage, *map(slice, shape[:1]))]

    def copy_in(self, stage: Any, indices: Sequence[Any], barrier: Any) -> None:
        """Starts the copy of the block at a position of the grid into a stage.

        It does not arrive on the barrier; see :func:`copy_all_in`.
        """
        axes: Any = self.block.spec.collective_axes or None
        copy_gmem_to_smem(
            self.block.window(self.gmem_ref, indices),
            self.stage(stage),
            barrier,
            collective_axes=axes,
            oob_mode=self.block.spec.oob_fill_mode,
            arrive=False,
        )

    def copy_out(self, stage: Any, indices: Sequence[Any], predicate: Any = None) -> None:
        """Starts the copy of a stage to the block at a position; the group stays open. Whatever
        the stage is used for next, its contents are not used again."""
        copy_smem_to_gmem(
            self.stage(stage),
            self.block.window(self.gmem_ref, indices),
            predicate=predicate,
            commit_group=False,
            discard=True,
        )


def copy_all_in(
    buffers: Sequence[Buffer], stage: Any, indices: Sequence[Any], barrier: Any
) -> None:
    """Starts the copies of several operands into a stage, with one arrival for all of them."""
    barrier_expect(barrier, *(buffer.stage(stage) for buffer in buffers))
    for buffer in buffers:
        buffer.copy_in(stage, indices, barrier)


def allocation(block: Block, gmem_ref: Any, num_stages: int) -> Any:
    """Describes the shared memory for a block in so many stages; None for one in global memory."""
    if not block.in_smem:
        return None
    if num_stages == 1:
        return SMEM(block.shape, gmem_ref.dtype, transforms=block.spec.transforms)
    batched = tuple(_batched(one, 1) for one in block.spec.transforms)
    shape = block.shape if batched else _stage_shape(block.shape, gmem_ref)
    return SMEM((num_stages, *shape), gmem_ref.dtype, transforms=batched)


def _stage_shape(shape: tuple[int, ...], gmem_ref: Any) -> tuple[int, ...]:
    """The shape of a stage: that of the block, with more rows if each stage has to begin where the
    copy engine can write, and it can copy the block at all; one row if that takes much memory."""
    bits = types.bit_width(gmem_ref.dtype)
    rows = [one[-1] * bits if one else 0 for one in (shape, gmem_ref.shape)]
    size = math.prod(shape) * bits
    aligned = size % (8 * SHARED_ALIGNMENT) == 0
    if aligned or any(row == 0 or row % (8 * _COPY_UNIT) for row in rows):
        return shape
    row = size // shape[0]
    unit = math.lcm(row, 8 * SHARED_ALIGNMENT)
    padded = -(-size // unit) * unit
    if padded <= max(2 * size, 8 * _SMALL):
        return (padded // row, *shape[1:])
    unit = 8 * SHARED_ALIGNMENT
    return (-(-size // unit) * unit // bits,)


def _batched(transform: Any, leading_rank: int) -> Any:
    """The transform for an allocation with ``leading_rank`` more dimensions in front."""
    match transform:
        case _jax.TransposeTransform():
            shifted = (axis + leading_rank for axis in transform.permutation)
            return _jax.TransposeTransform((*range(leading_rank), *shifted))
        case transforms.TilingTransform() | transforms.SwizzleTransform():
            return transform
        case _:
            raise checks.unsupported(
                f"{type(transform).__name__} cannot be used on a pipelined block",
                expected="TilingTransform, SwizzleTransform or TransposeTransform",
            )
