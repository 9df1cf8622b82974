"""The hook implementations of the plugin; rules are imported when they are asked for."""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING

from pallasite.plugin import (
    BarrierOrder,
    BarrierUse,
    InferenceRule,
    InstructionRule,
    KernelLifecycle,
    LayoutProposal,
    LayoutRule,
    LoweringRule,
    MemoryEvents,
    NamedLayout,
    Operation,
    Pass,
    Target,
    TargetPredicate,
    hookimpl,
    imported_on_call,
)

if TYPE_CHECKING:
    from pallasite.plugin.language import MemorySpace

PALLASITE_PLUGIN_API = (2, 0)
"""What the plugin needs of Pallasite."""


@hookimpl
def pallasite_targets() -> list[Target]:
    """Blackwell with its architecture-specific instructions."""
    from pallasite_blackwell.targets import TARGETS

    return list(TARGETS)


@hookimpl
def pallasite_names() -> dict[str, str]:
    """What the plugin adds to ``pallasite.gpu``."""
    memory = "pallasite_blackwell.tensor_memory.primitives"
    products = "pallasite_blackwell.tensor_core.products"
    copies = "pallasite_blackwell.tensor_core.copies"
    return {
        "TMEMLayout": "pallasite_blackwell.tensor_memory.names:TMEMLayout",
        "async_copy_scales_to_tmem": f"{copies}:async_copy_scales_to_tmem",
        "async_copy_smem_to_tmem": f"{copies}:async_copy_smem_to_tmem",
        "async_copy_sparse_metadata_to_tmem": f"{copies}:async_copy_sparse_metadata_to_tmem",
        "async_load_tmem": f"{memory}:async_load_tmem",
        "async_store_tmem": f"{memory}:async_store_tmem",
        "commit_tmem": f"{memory}:commit_tmem",
        "format_tcgen05_sparse_metadata": f"{copies}:format_tcgen05_sparse_metadata",
        "tcgen05_commit_arrive": f"{products}:tcgen05_commit_arrive",
        "tcgen05_mma": f"{products}:tcgen05_mma",
        "wait_load_tmem": f"{memory}:wait_load_tmem",
    }


@hookimpl
def pallasite_memory_spaces() -> list[MemorySpace]:
    """Tensor memory."""
    from pallasite_blackwell.tensor_memory.space import TMEM

    return [TMEM]


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
    """Rules of the plugin's primitives, and of copies that pairs of blocks share."""
    from pallasite_blackwell import cluster_launch, copies, gathers
    from pallasite_blackwell.tensor_core import copies as to_tensor_memory
    from pallasite_blackwell.tensor_core import rules as products
    from pallasite_blackwell.tensor_memory import rules as memory

    modules = (copies, cluster_launch, gathers, memory, products, to_tensor_memory)
    return list(itertools.chain.from_iterable(one.rules.lowering_rules for one in modules))


@hookimpl
def pallasite_layout_rules() -> list[LayoutRule]:
    """Which layouts the plugin's primitives ask of their operands."""
    from pallasite_blackwell.tensor_memory import rules as memory

    return memory.rules.layout_rules


@hookimpl
def pallasite_inference_rules() -> list[InferenceRule]:
    """Which layouts the plugin's primitives ask for where the program leaves them open."""
    from pallasite_blackwell import gathers
    from pallasite_blackwell.tensor_core import inference as products
    from pallasite_blackwell.tensor_memory import inference as memory

    modules = (gathers, memory, products)
    return list(itertools.chain.from_iterable(one.rules.inference_rules for one in modules))


@hookimpl
def pallasite_operations() -> list[Operation]:
    """The operations library: GEMM with tensor memory."""
    return [
        Operation(
            name="matmul",
            implementation="pallasite_blackwell.ops.matmul:matmul",
            target=TargetPredicate(frozenset({"tcgen05"})),
            refuses="pallasite_blackwell.ops.matmul:refuses_matmul",
        )
    ]


@hookimpl
def pallasite_passes() -> list[Pass]:
    """A check of loads from tensor memory, and loops that only one lane runs."""
    return [
        Pass(
            name="check-load-waits",
            stage="jaxpr",
            run=imported_on_call("pallasite_blackwell.tensor_memory.waits:check_load_waits"),
            after=("check-barriers",),
            target=TargetPredicate(frozenset({"tcgen05"})),
            description="finds columns of tensor memory that are overwritten while they are loaded",
        ),
        Pass(
            name="single-lane-loops",
            stage="mlir",
            run=imported_on_call("pallasite_blackwell.single_lane_loops:run_in_one_lane"),
            after=("mlir-canonicalize",),
            before=("carry-remainders", "hoist-parameters", "mlir-hoist"),
            target=TargetPredicate(frozenset({"tcgen05"})),
            description="lets the lane that starts copies and products run their loop alone",
        ),
    ]


@hookimpl
def pallasite_lifecycles() -> tuple[KernelLifecycle, ...]:
    """Allocation of tensor memory."""
    where = "pallasite_blackwell.tensor_memory.allocation"
    return (
        KernelLifecycle(
            name="tensor-memory",
            applies=imported_on_call(f"{where}:applies"),
            begin=imported_on_call(f"{where}:begin"),
            prologue=imported_on_call(f"{where}:prologue"),
            epilogue=imported_on_call(f"{where}:epilogue"),
            description="allocates tensor memory, and gives it back",
        ),
    )


@hookimpl
def pallasite_barrier_orders() -> tuple[BarrierOrder, ...]:
    """The order of the tensor core's work."""
    from pallasite_blackwell.order import ORDERS

    return ORDERS


@hookimpl
def pallasite_barrier_uses() -> tuple[BarrierUse, ...]:
    """What the plugin's primitives do to barriers."""
    from pallasite_blackwell.order import USES

    return USES


@hookimpl
def pallasite_memory_events() -> tuple[MemoryEvents, ...]:
    """What the plugin's primitives do to memory."""
    from pallasite_blackwell.order import events

    return events()


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """What Blackwell's own instructions do, for the simulator, if it is installed."""
    if importlib.util.find_spec("pallasite_simulator") is None:
        return []
    from pallasite_blackwell.simulation import instructions

    return instructions.rules
