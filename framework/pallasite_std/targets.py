"""The portable baseline targets: what every chip of a generation and its successors can do."""

from __future__ import annotations

from pallasite.plugin import BASELINE_FEATURES, Target

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
