"""What each Blackwell chip can do: its features are names that rules depend on.

Which instructions a target has was found by assembling each for every target.
"""

from __future__ import annotations

from pallasite.plugin import BASELINE_FEATURES, Target, find_target, plugins

TENSOR_MEMORY_COLUMNS = "tmem_columns"
"""The name of the limit on columns of tensor memory."""

COLUMNS = 512
"""Columns of 32 bits that the tensor memory of a multiprocessor has."""

COMMON_FEATURES = BASELINE_FEATURES | {"cluster_launch_control", "setmaxnreg", "tma_gather"}
"""Features of all Blackwell chips; ``tma_gather`` is the gather into a block's own memory."""

DATACENTER_FEATURES = COMMON_FEATURES | {
    "cta_pair",
    "tcgen05",
    "tma_gather_cluster",
    "tma_scatter",
}
"""Those of the chips with tensor memory; with ``cta_pair`` two blocks can act as one."""

INTEGER_PRODUCTS = "tcgen05_integer"
"""``tcgen05.mma`` of 8-bit integers."""

LOAD_REDUCE = "tcgen05_load_reduce"
"""``tcgen05.ld.red``: loads from tensor memory that reduce along columns."""

SCALED_ACCUMULATOR = "tcgen05_scale_input"
"""``tcgen05.mma`` with ``scale-input-d``."""

BLOCK_SCALED_MMA_SYNC = "mma_block_scale"
"""``mma.sync`` with block scales."""

SM_100A = Target(
    name="sm_100a",
    ptx_version=87,
    compute_capability=(10, 0),
    features=DATACENTER_FEATURES | {INTEGER_PRODUCTS, SCALED_ACCUMULATOR},
    max_cluster_size=16,
    limits={TENSOR_MEMORY_COLUMNS: COLUMNS},
    multiprocessors=148,
    description="Blackwell (B200): tensor memory and its MMA",
)

SM_103A = Target(
    name="sm_103a",
    ptx_version=88,
    compute_capability=(10, 3),
    features=DATACENTER_FEATURES | {LOAD_REDUCE, SCALED_ACCUMULATOR},
    max_cluster_size=16,
    limits={TENSOR_MEMORY_COLUMNS: COLUMNS},
    multiprocessors=148,
    description="Blackwell Ultra (B300): loads that reduce, no products of integers",
)

SM_110A = Target(
    name="sm_110a",
    ptx_version=90,
    compute_capability=(11, 0),
    features=DATACENTER_FEATURES | {INTEGER_PRODUCTS, LOAD_REDUCE},
    max_cluster_size=16,
    limits={TENSOR_MEMORY_COLUMNS: COLUMNS},
    multiprocessors=20,
    description="Blackwell for vehicles and robots (Thor): tensor memory and its MMA",
)

SM_120A = Target(
    name="sm_120a",
    ptx_version=87,
    compute_capability=(12, 0),
    features=COMMON_FEATURES | {BLOCK_SCALED_MMA_SYNC},
    max_shared_memory=101376,
    max_cluster_size=8,
    multiprocessors=188,
    description="Blackwell workstation (RTX): 99 KiB of shared memory, no tensor memory",
)

TARGETS = (SM_100A, SM_103A, SM_110A, SM_120A)


def targets_with(feature: str) -> str:
    """The names of the targets that have a feature, for messages."""
    names = sorted(plugins.registry().targets)
    return " or ".join(name for name in names if find_target(name).has(feature)) or "none"
