"""The shared memory of one operand of a pipeline, and the copies that fill and empty it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import SMEM, checks, transforms
from pallasite_std.pipelines.blocks import Block
from pallasite_std.primitives.copies import barrier_expect, copy_gmem_to_smem, copy_smem_to_gmem


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One operand with its place in shared memory.

    With one stage the allocation has the shape of the block, otherwise a leading dimension.
    """

    block: Block
    gmem_ref: Any
    smem_ref: Any
    num_stages: int

    def stage(self, stage: Any) -> Any:
        """The reference that holds the block of one stage."""
        if not self.block.in_smem:
            return self.gmem_ref
        return self.smem_ref if self.num_stages == 1 else self.smem_ref.at[stage]

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
        """Starts the copy of a stage to the block at a position; the group stays open."""
        copy_smem_to_gmem(
            self.stage(stage),
            self.block.window(self.gmem_ref, indices),
            predicate=predicate,
            commit_group=False,
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
    leading = () if num_stages == 1 else (num_stages,)
    transforms = tuple(_batched(t, len(leading)) for t in block.spec.transforms)
    return SMEM((*leading, *block.shape), gmem_ref.dtype, transforms=transforms)


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
