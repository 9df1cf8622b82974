"""The hook implementations of the plugin; rules are imported when they are asked for."""

from __future__ import annotations

import importlib.util

from pallasite.builtin_targets import BASELINE_FEATURES
from pallasite.extensions import InstructionRule, LoweringRule
from pallasite.hookspecs import hookimpl
from pallasite.targets import Target

SM_90A = Target(
    name="sm_90a",
    ptx_version=86,
    compute_capability=(9, 0),
    features=BASELINE_FEATURES | {"setmaxnreg", "wgmma"},
    max_cluster_size=16,
    multiprocessors=132,
    description="Hopper (H100, H200): warpgroup matrix products, register reallocation",
)


@hookimpl
def pallasite_targets() -> list[Target]:
    """Hopper with its architecture-specific instructions."""
    return [SM_90A]


@hookimpl
def pallasite_names() -> dict[str, str]:
    """What the plugin adds to ``pallasite.gpu``."""
    return {"set_max_registers": "pallasite_hopper.registers:set_max_registers"}


@hookimpl
def pallasite_lowering_rules() -> list[LoweringRule]:
    """Rules of the plugin's primitives."""
    from pallasite_hopper import registers

    return registers.rules.lowering_rules


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """What Hopper's own instructions do, for the simulator, if it is installed."""
    if importlib.util.find_spec("pallasite_simulator") is None:
        return []
    from pallasite_hopper.simulation import instructions

    return instructions.rules
