"""The hook implementations of the plugin; rules are imported when they are asked for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from pallasite.plugin import (
    BASELINE_FEATURES,
    InferenceRule,
    InstructionRule,
    LayoutRule,
    LoweringRule,
    MemoryEvents,
    NamedLayout,
    Operation,
    Pass,
    Target,
    TargetPredicate,
    ViewRule,
    hookimpl,
)

if TYPE_CHECKING:
    from pallasite.plugin.language import MemorySpace

PALLASITE_PLUGIN_API = (2, 0)
"""What the plugin needs of Pallasite."""

SM_90A = Target(
    name="sm_90a",
    ptx_version=86,
    compute_capability=(9, 0),
    features=BASELINE_FEATURES | {"setmaxnreg", "wgmma"},
    max_cluster_size=16,
    multiprocessors=132,
    description="Hopper (H100, H200): warpgroup MMA, register reallocation",
)


@hookimpl
def pallasite_targets() -> list[Target]:
    """Hopper with its architecture-specific instructions."""
    return [SM_90A]


@hookimpl
def pallasite_names() -> dict[str, str]:
    """What the plugin adds to ``pallasite.gpu``."""
    matrix = "pallasite_hopper.matrix"
    return {
        "ACC": f"{matrix}.accumulators:WGMMAAccumulatorRef",
        "WGMMAAccumulatorRef": f"{matrix}.accumulators:WGMMAAccumulatorRef",
        "wgmma": f"{matrix}.products:wgmma",
        "wgmma_accumulator_load": f"{matrix}.products:wgmma_accumulator_load",
        "wgmma_accumulator_store": f"{matrix}.products:wgmma_accumulator_store",
        "wgmma_wait": f"{matrix}.products:wgmma_wait",
    }


@hookimpl
def pallasite_memory_spaces() -> list[MemorySpace]:
    """Accumulators."""
    from pallasite_hopper.matrix.accumulators import ACCUMULATORS

    return [ACCUMULATORS]


@hookimpl
def pallasite_views() -> tuple[ViewRule, ...]:
    """Several rows of a matrix as one."""
    from pallasite_hopper.matrix.joined_rows import VIEWS

    return VIEWS


@hookimpl
def pallasite_lowering_rules() -> list[LoweringRule]:
    """Rules of the plugin's primitives."""
    from pallasite_hopper.matrix import aligned_rows, odd_rows, padded_rows, row_copies
    from pallasite_hopper.matrix import rules as matrix

    modules = (aligned_rows, odd_rows, padded_rows, row_copies)
    others = [rule for one in modules for rule in one.rules.lowering_rules]
    return [*matrix.rules.lowering_rules, *others]


@hookimpl
def pallasite_layout_rules() -> list[LayoutRule]:
    """Which layouts the plugin's primitives ask of their operands."""
    from pallasite_hopper.matrix import rules as matrix

    return matrix.rules.layout_rules


@hookimpl
def pallasite_operations() -> list[Operation]:
    """The operations library: GEMM and attention with wgmma."""
    modules = {
        "matmul": ("dense.api", "matmul"),
        "gated_matmul": ("dense.gated", "gated_matmul"),
        "mixed_matmul": ("mixed.api", "mixed_matmul"),
        "ragged_matmul": ("ragged.api", "ragged_matmul"),
        "transposed_ragged_matmul": ("ragged.api", "ragged_matmul"),
        "attention": ("flash.api", "attention"),
        "attention_backward": ("flash.api", "attention"),
        "attention_forward": ("flash.api", "attention"),
        "decode_attention": ("decode.api", "decode_attention"),
        "paged_attention": ("decode.api", "paged_attention"),
    }
    return [
        Operation(
            name=name,
            implementation=f"pallasite_hopper.ops.{module}:{name}",
            target=TargetPredicate(frozenset({"wgmma"})),
            refuses=f"pallasite_hopper.ops.refusals:{refuses}",
        )
        for name, (module, refuses) in modules.items()
    ]


@hookimpl
def pallasite_layouts() -> tuple[NamedLayout, ...]:
    """Names of the register layouts of operands and accumulators."""
    from pallasite_hopper.matrix.layouts import NAMED

    return NAMED


@hookimpl
def pallasite_inference_rules() -> list[InferenceRule]:
    """Which layouts the plugin's primitives ask for where the program leaves them open."""
    from pallasite_hopper.matrix import aligned_rows, inference, odd_rows, padded_rows, row_copies

    modules = (aligned_rows, odd_rows, padded_rows, row_copies)
    others = [rule for one in modules for rule in one.rules.inference_rules]
    return [*inference.rules.inference_rules, *others]


@hookimpl
def pallasite_memory_events() -> tuple[MemoryEvents, ...]:
    """What the plugin's primitives do to memory."""
    from pallasite_hopper.matrix.memory_events import EVENTS

    return EVENTS


def _check_matrix_waits(jaxpr: Any, context: Any) -> Any:
    from pallasite_hopper.matrix.waits import check_matrix_waits

    return check_matrix_waits(jaxpr, context)


@hookimpl
def pallasite_passes() -> list[Pass]:
    """A check of wgmma waits, or their insertion."""
    return [
        Pass(
            name="check-matrix-waits",
            stage="jaxpr",
            run=_check_matrix_waits,
            after=("check-barriers",),
            target=TargetPredicate(frozenset({"wgmma"})),
            description="finds operands and accumulators that are touched in flight; adds waits in"
            " warpgroup semantics",
        )
    ]


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """What Hopper's own instructions do, for the simulator, if it is installed."""
    if importlib.util.find_spec("pallasite_simulator") is None:
        return []
    from pallasite_hopper.simulation import instructions

    return instructions.rules
