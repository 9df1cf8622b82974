"""Shared memory of another block of the cluster: ``cluster_ref``."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.plugin import InvalidValueError, ViewRule, nothing_changes
from pallasite.plugin.ir import ops
from pallasite.plugin.language import ClusterRefTransform
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.regions import RegionBuilder


def in_cluster(
    ctx: RuleContext, reference: MemoryReference, transform: ClusterRefTransform
) -> MemoryReference:
    """The same memory in the block that a transform selects."""
    if not reference.space.is_shared:
        raise InvalidValueError(
            "cluster_ref is for shared memory", got=str(reference.space), expected="smem"
        )
    launch = ctx.launch
    launch.uses_cluster_memory = True
    launch.shares_memory_in_cluster = True
    coordinates = {
        launch.geometry.cluster_dimension(name): ctx.scalar(index, ops.i32())
        for name, index in zip(transform.dims, transform.idxs, strict=True)
    }
    return dataclasses.replace(reference, remote=launch.cluster_rank(coordinates))


def _region(builder: RegionBuilder, transform: Any) -> None:
    del transform
    builder.elsewhere = True


RULES: tuple[ViewRule, ...] = (
    ViewRule(
        transform=ClusterRefTransform, lower=in_cluster, infer=nothing_changes, region=_region
    ),
)
