"""What inlined code asks of its launch, by the names of ``jax.experimental.mosaic.gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import MissingNameError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext
from pallasite_std.copies import copy_plans
from pallasite_std.inline import memory_views
from pallasite_std.memory.reference_types import MemoryReference

_BY_DEFAULT: Any = object()


def name_architecture(ctx: RuleContext) -> None:
    """Says in the module what is compiled for, where ``mgpu.utils.get_arch`` looks for it."""
    attributes = ctx.launch.module.operation.attributes
    for name, number in zip(("major", "minor"), ctx.target.compute_capability, strict=True):
        attributes[f"mosaic_gpu.arch_{name}"] = ir.IntegerAttr.get(ops.i32(), number)


class InlineLaunch:
    """The first argument of inlined code: everything of our launch context, and some names of
    ``mgpu.LaunchContext``.

    Attributes:
      cluster_size: blocks of a cluster along x, y and z.
    """

    def __init__(self, ctx: RuleContext, references: Mapping[ir.Value, MemoryReference]):
        self._ctx = ctx
        self._references = references
        self.cluster_size = ctx.kernel.geometry.cluster

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._ctx.launch, name)
        except AttributeError:
            raise MissingNameError(
                f"the launch context of inlined code has no {name!r}",
                expected="async_copy, await_async_copy, named_region, cluster_size, or what"
                " pallasite.lowering.launch.LaunchContext has",
                hint="the primitives of plgpu do the rest, around the inlined code",
            ) from None

    def async_copy(
        self,
        *,
        src_ref: ir.Value,
        dst_ref: ir.Value,
        gmem_slice: Any = (),
        gmem_transform: Any = (),
        swizzle: int | None = None,
        arrive: bool | None = None,
        predicate: Any = _BY_DEFAULT,
        reduction_op: str | None = None,
        **others: Any,
    ) -> None:
        """Starts a copy by TMA from shared to global memory.

        Args:
          src_ref: a memref in shared memory, contiguous in each tile.
          dst_ref: a memref in global memory: an argument, or a slice of one.
          gmem_slice: the part of ``dst_ref`` that is written.
          gmem_transform: how that part lies in shared memory: tiles and transpositions.
          swizzle: of the shared memory, in bytes.
          arrive: whether to close a group of copies, which is the default.
          predicate: (i1) true in at most one lane of the warpgroup; by default in one of them.
            None starts the copy in every lane that gets here.
          reduction_op: how what is copied combines with what is there.
          **others: further arguments of the reference backend, which must be None.

        Raises:
          UnsupportedError: a copy to shared memory, or one of the other arguments.
          InvalidValueError: what the TMA engine cannot do.
        """
        for name, value in others.items():
            if value is not None and value != ():
                raise UnsupportedError(
                    f"async_copy of inlined code does not take {name}",
                    got=repr(value),
                    hint="the primitives of plgpu do, around the inlined code",
                )
        mosaic = _jax.mosaic_gpu()
        if not mosaic.utils.is_smem_ref(src_ref) or dst_ref.type.memory_space is not None:
            raise UnsupportedError(
                "async_copy of inlined code copies from shared to global memory",
                got=f"a copy from {src_ref.type} to {dst_ref.type}",
                hint="plgpu.copy_gmem_to_smem, before the inlined code",
            )
        target = memory_views.window_of(dst_ref, self._references)
        if gmem_slice != ():
            target = memory_views.select(
                target, *mosaic.utils.parse_indices(gmem_slice, target.shape)
            )
        transforms = gmem_transform if isinstance(gmem_transform, tuple) else (gmem_transform,)
        source = memory_views.shared_memory_of(src_ref, target.dtype, int(swizzle or 16))
        source = memory_views.without_transforms(source, transforms, target.shape)
        issue = copy_plans.plan_store(self._ctx, source, target, reduction_op)
        if predicate is _BY_DEFAULT:
            predicate = self._ctx.leader
        if predicate is None:
            issue()
        else:
            with ops.when(predicate):
                issue()
        if arrive is None or arrive:
            ops.inline_assembly("cp.async.bulk.commit_group;", "~{memory}")

    def await_async_copy(
        self, allow_groups: int, await_read_only: bool = False, scope: Any = None
    ) -> None:
        """Waits until all but the last groups of copies to global memory are done.

        Args:
          allow_groups: how many groups may still be in flight.
          await_read_only: whether it is enough that shared memory may be written again.
          scope: of ``mgpu.ThreadSubset``, the lanes that converge then: by default those of the
            user's thread, or of the warp.
        """
        kind = ".read" if await_read_only else ""
        ops.inline_assembly(f"cp.async.bulk.wait_group{kind} {allow_groups};", "~{memory}")
        if scope is not None and scope == _jax.mosaic_gpu().ThreadSubset.WARP:
            self._ctx.launch.warp_barrier()
        else:
            self._ctx.synchronize()
