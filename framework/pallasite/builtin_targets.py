"""The portable baseline targets: what every chip of a generation and its successors can do."""

from __future__ import annotations

from pallasite.hookspecs import hookimpl
from pallasite.targets import Target

BASELINE_FEATURES = frozenset(
    {
        "bf16",
        "bulk_reduce",
        "cluster",
        "cp_async",
        "elect",
        "fp8",
        "griddepcontrol",
        "ldmatrix",
        "mbarrier",
        "stmatrix",
        "tma",
    }
)
"""Features of compute capability 9.0 that all later chips have, too."""

SM_90 = Target(
    name="sm_90",
    ptx_version=86,
    compute_capability=(9, 0),
    features=BASELINE_FEATURES,
    max_cluster_size=16,
    multiprocessors=132,
    description="portable: compute capability 9.0 and later, no architecture-specific instructions",
)

SM_100 = Target(
    name="sm_100",
    ptx_version=86,
    compute_capability=(10, 0),
    features=BASELINE_FEATURES | {"cluster_launch_control", "tma_gather"},
    max_cluster_size=16,
    multiprocessors=148,
    description="portable: compute capability 10.0 and later, no architecture-specific"
    " instructions",
)


@hookimpl
def pallasite_targets() -> list[Target]:
    """The targets of the core."""
    return [SM_90, SM_100]
