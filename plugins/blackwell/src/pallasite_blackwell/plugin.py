"""The hook implementations of the plugin."""

from __future__ import annotations

import importlib.util

from pallasite.plugin import (
    BASELINE_FEATURES,
    InstructionRule,
    LayoutProposal,
    LoweringRule,
    NamedLayout,
    Target,
    hookimpl,
)

PALLASITE_PLUGIN_API = (1, 0)
"""What the plugin needs of Pallasite."""

COMMON_FEATURES = BASELINE_FEATURES | {"cluster_launch_control", "setmaxnreg", "tma_gather"}
"""Features of all Blackwell chips; ``tma_gather`` is the gather into a block's own memory."""

DATACENTER_FEATURES = COMMON_FEATURES | {
    "cta_pair",
    "tcgen05",
    "tma_gather_cluster",
    "tma_scatter",
}
"""Those of the data-center chips; with ``cta_pair`` two blocks can act as one."""

SM_100A = Target(
    name="sm_100a",
    ptx_version=86,
    compute_capability=(10, 0),
    features=DATACENTER_FEATURES,
    max_cluster_size=16,
    limits={"tmem_columns": 512},
    multiprocessors=148,
    description="Blackwell (B200): tensor memory and its MMA",
)

SM_103A = Target(
    name="sm_103a",
    ptx_version=88,
    compute_capability=(10, 3),
    features=DATACENTER_FEATURES,
    max_cluster_size=16,
    limits={"tmem_columns": 512},
    multiprocessors=148,
    description="Blackwell Ultra (B300): as sm_100a",
)

SM_120A = Target(
    name="sm_120a",
    ptx_version=87,
    compute_capability=(12, 0),
    features=COMMON_FEATURES,
    max_shared_memory=101376,
    max_cluster_size=8,
    multiprocessors=188,
    description="Blackwell workstation (RTX): 99 KiB of shared memory, no tensor memory",
)


@hookimpl
def pallasite_targets() -> list[Target]:
    """Blackwell with its architecture-specific instructions."""
    return [SM_100A, SM_103A, SM_120A]


@hookimpl
def pallasite_layouts() -> tuple[NamedLayout, ...]:
    """Names of the register layouts of what is moved to and from tensor memory."""
    from pallasite_blackwell.layouts import NAMED

    return NAMED


@hookimpl
def pallasite_layout_proposals() -> tuple[LayoutProposal, ...]:
    """The same layouts, for layout inference to try."""
    from pallasite_blackwell.layouts import PROPOSALS

    return PROPOSALS


@hookimpl
def pallasite_lowering_rules() -> list[LoweringRule]:
    """Copies that pairs of blocks share."""
    from pallasite_blackwell import copies

    return copies.rules.lowering_rules


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """What Blackwell's own instructions do, for the simulator, if it is installed."""
    if importlib.util.find_spec("pallasite_simulator") is None:
        return []
    from pallasite_blackwell.simulation import instructions

    return instructions.rules
