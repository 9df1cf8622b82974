"""The hook implementations of the standard library; everything else is imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pallasite.plugin import (
    BarrierKind,
    BarrierUse,
    InferenceRule,
    JaxprPrimitive,
    KernelLifecycle,
    LayoutProposal,
    LayoutRule,
    LoweringRule,
    MemoryEvents,
    NamedLayout,
    Operation,
    Pass,
    ProxyFence,
    ResourceRule,
    RuleSet,
    StoreNamespace,
    Target,
    Translation,
    ViewRule,
    hookimpl,
)

if TYPE_CHECKING:
    from pallasite.plugin.language import MemorySpace

PALLASITE_PLUGIN_API = (2, 0)
"""What the plugin needs of Pallasite."""

RULE_MODULES = (
    "rules.arithmetic",
    "rules.atomics",
    "rules.barriers",
    "rules.cluster_launch",
    "rules.cluster_stores",
    "rules.control_flow",
    "rules.copies",
    "rules.debug",
    "rules.grid_dependencies",
    "rules.ids",
    "rules.indexing",
    "rules.inline",
    "rules.loads",
    "rules.mma",
    "rules.movements",
    "rules.placement",
    "rules.references",
    "rules.reductions",
    "rules.registers",
    "rules.scans",
    "rules.scopes",
    "rules.semaphores",
    "rules.shape",
    "rules.slices",
    "rules.warp",
    "pipelines.warp_specialized.register_split",
    "inference.elementwise",
    "inference.memory",
    "inference.other",
    "inference.shape",
)
"""Modules with a ``RuleSet`` named ``rules``."""

_NAMES = {
    "barriers.types": ("Barrier", "ClusterBarrier"),
    "interpret": ("InterpretGPUParams", "force_gpu_interpret_mode", "set_gpu_interpret_mode"),
    "options": ("TraceScope",),
    "pipelines.block_spec": ("BlockSpec",),
    "pipelines.helpers": ("NDLoopInfo", "nd_loop", "planar_snake", "warp_map"),
    "pipelines.pipeline": ("emit_pipeline",),
    "pipelines.scheduling": ("dynamic_scheduling_loop",),
    "pipelines.warp_specialized.emit": ("emit_pipeline_warp_specialized",),
    "pipelines.warp_specialized.states": ("PipelinePipeline",),
    "primitives.arrays": (
        *("atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or", "atomic_xor"),
        *("broadcasted_iota", "load", "print_layout"),
    ),
    "primitives.barriers": (
        *("barrier_arrive", "barrier_test", "barrier_wait", "commit_smem"),
        *("griddepcontrol_launch_dependents", "griddepcontrol_wait"),
    ),
    "primitives.cluster_launch": (
        *("TryClusterCancelResult", "query_cluster_cancel", "try_cluster_cancel"),
    ),
    "primitives.copies": (
        *("async_prefetch", "async_store_smem", "barrier_expect", "commit_smem_to_gmem_group"),
        *("copy_gmem_to_smem", "copy_smem_to_gmem", "wait_gmem_to_smem", "wait_smem_to_gmem"),
    ),
    "primitives.copy_options": ("CopyPartition", "OOBFillMode"),
    "primitives.inline": ("RefType", "ShapeDtypeStruct", "inline_mgpu"),
    "primitives.layouts": ("Layout", "layout_cast"),
    "primitives.matrix": ("mma",),
    "primitives.semaphores": ("semaphore_signal", "semaphore_wait"),
    "rules.registers": ("set_max_registers",),
    "torch.kernel": ("as_torch_kernel",),
}


def _rules() -> RuleSet:
    found = RuleSet()
    for name in RULE_MODULES:
        found.extend(importlib.import_module(f"pallasite_std.{name}").rules)
    return found


@hookimpl
def pallasite_options() -> type:
    """Compiler parameters of the standard library."""
    from pallasite_std.options import KernelOptions

    return KernelOptions


@hookimpl
def pallasite_targets() -> list[Target]:
    """The portable targets."""
    from pallasite_std.targets import SM_90, SM_100

    return [SM_90, SM_100]


@hookimpl
def pallasite_names() -> dict[str, str]:
    """Primitives, pipelines and helpers for ``pallasite.gpu``."""
    return {
        name: f"pallasite_std.{module}:{name}" for module, names in _NAMES.items() for name in names
    }


@hookimpl
def pallasite_exports() -> dict[str, str]:
    """Choosing configurations by measuring them, and errors of kernels on the CPU."""
    tuning = {name: f"pallasite_std.tuning:{name}" for name in ("autotune", "choose")}
    return {"kernel_errors": "pallasite_std.host_calls:kernel_errors", **tuning}


@hookimpl
def pallasite_stores() -> list[StoreNamespace]:
    """Configurations that were measured to be the fastest, hashes of code."""
    from pallasite_std.caching.code_identity import CODE
    from pallasite_std.tuning.store import TUNED

    return [TUNED, CODE]


@hookimpl
def pallasite_memory_spaces() -> list[MemorySpace]:
    """Barriers and semaphores."""
    from pallasite_std.spaces import BARRIERS, SEMAPHORES

    return [BARRIERS, SEMAPHORES]


@hookimpl
def pallasite_views() -> Iterable[ViewRule]:
    """Indices, tiles, swizzles, transposition, members of unions, other blocks of a cluster."""
    from pallasite_std.views import VIEW_RULES

    return VIEW_RULES


@hookimpl
def pallasite_lowering_rules() -> Iterable[LoweringRule]:
    """How the portable primitives are emitted."""
    return _rules().lowering_rules


@hookimpl
def pallasite_resource_rules() -> Iterable[ResourceRule]:
    """What they reserve on chip."""
    return _rules().resource_rules


@hookimpl
def pallasite_layout_rules() -> Iterable[LayoutRule]:
    """Layout hints in lane semantics."""
    return _rules().layout_rules


@hookimpl
def pallasite_inference_rules() -> Iterable[InferenceRule]:
    """What they ask of layouts that a program leaves open."""
    return _rules().inference_rules


@hookimpl
def pallasite_jaxpr_primitives() -> Iterable[JaxprPrimitive]:
    """Calls, loops, branches and scopes of JAX and Pallas."""
    from pallasite_std.jaxprs import JAXPR_PRIMITIVES

    return JAXPR_PRIMITIVES


_OPERATIONS = {
    "dense.api": ("matmul",),
    "dense.gated": ("gated_matmul",),
    "flash.api": ("attention", "attention_backward", "attention_forward"),
    "decode.api": ("decode_attention", "paged_attention"),
    "mixed.api": ("mixed_matmul",),
    "ragged.api": ("ragged_matmul", "transposed_ragged_matmul"),
}
_ROW_OPERATIONS = {
    "rows.norms": ("rms_norm", "layer_norm"),
    "rows.cross_entropy": ("softmax_cross_entropy",),
    "rows.quantize": ("quantize", "dequantize"),
    "rows.rotary": ("rotary_embedding",),
    "rows.gated": ("gated_activation", "swiglu"),
    "rows.top_k": ("top_k",),
}
_ARRAY_OPERATIONS = {"flash.dropout": ("attention_dropout_mask",)}
"""Those that XLA compiles."""


@hookimpl
def pallasite_operations() -> list[Operation]:
    """Products and attention with warp-level MMA, which need TMA; and operations on rows."""
    return [
        Operation(
            name=name,
            implementation=f"pallasite_std.ops.{module}:{name}",
            refuses=refuses,
        )
        for modules, refuses in (
            (_OPERATIONS, "pallasite_std.ops.arguments:target_lacks"),
            (_ROW_OPERATIONS, None),
            (_ARRAY_OPERATIONS, None),
        )
        for module, names in modules.items()
        for name in names
    ]


@hookimpl
def pallasite_translations() -> list[Translation]:
    """Mathematics, atomic operations, vectors, and the dialects that inlined code emits."""
    from pallasite_std import dialects
    from pallasite_std.inline.gpu_translation import GPU
    from pallasite_std.inline.memref_translation import MEMREF
    from pallasite_std.translations.atomics import ATOMICS
    from pallasite_std.translations.math import MATH
    from pallasite_std.translations.vector import VECTOR

    dialects.register()
    handlers = MATH | ATOMICS | VECTOR | GPU | MEMREF
    return [Translation(operation=name, translate=handler) for name, handler in handlers.items()]


@hookimpl
def pallasite_front_ends() -> dict[str, str]:
    """Kernels that are written as calls of Pallas's own."""
    return {
        "pallas_call": "pallasite_std.front_ends.pallas_call:pallas_call_spec",
        "mesh_kernel": "pallasite_std.front_ends.mesh_kernel:mesh_kernel_spec",
    }


@hookimpl
def pallasite_implementations() -> dict[str, str]:
    """Memory with addresses, layouts under lane semantics, what layouts cost, what is missing."""
    return {
        "batch_kernel": "pallasite_std.batching:prepend_axis",
        "cache_keys": "pallasite_std.caching.keys:KEYS",
        "check_layouts": "pallasite_std.inference.conflicts:check_solution",
        "divisor_of_result": "pallasite_std.divisors:divisor_of_result",
        "encode_tensor_map": "pallasite_std.copies.tensor_map_encoding:encode",
        "interpretation": "pallasite_std.interpret:INTERPRETATION",
        "kernel_errors": "pallasite_std.host_calls:kernel_errors",
        "lane_layouts": "pallasite_std.lane_layouts.strategy:LaneStrategy",
        "layout_costs": "pallasite_std.inference.costs:LAYOUT_COSTS",
        "layout_report": "pallasite_std.inference.report:layout_report",
        "loop_divisors": "pallasite_std.divisors:loop_divisors",
        "memory_access": "pallasite_std.memory.accesses:ACCESSES",
        "missing_barriers": "pallasite_std.inference.missing_barriers:missing_barriers",
        "missing_fences": "pallasite_std.inference.missing_fences:missing_fences",
        "mosaic_layout": "pallasite_std.inline.layouts:fragmented_layout",
        "run_on_host": "pallasite_std.host_calls:run_on_host",
        "reduced_mosaic_layout": "pallasite_std.inline.layouts:reduced_layout",
        "separate_llvm": "pallasite_std.llvm_process:separate_llvm",
    }


@hookimpl
def pallasite_layouts() -> tuple[NamedLayout, ...]:
    """Names of the register layouts of portable instructions."""
    from pallasite_std.layouts import NAMED

    return NAMED


@hookimpl
def pallasite_layout_proposals() -> tuple[LayoutProposal, ...]:
    """Matrix fragments, for layout inference to try."""
    from pallasite_std.layouts import PROPOSALS

    return PROPOSALS


@hookimpl
def pallasite_barrier_kinds() -> Iterable[BarrierKind]:
    """Barriers of a block and of a cluster."""
    from pallasite_std.barriers.kinds import KINDS

    return KINDS


@hookimpl
def pallasite_barrier_uses() -> Iterable[BarrierUse]:
    """Which portable primitives arrive on barriers or wait for them."""
    from pallasite_std.barriers.uses import USES

    return USES


@hookimpl
def pallasite_lifecycles() -> Iterable[KernelLifecycle]:
    """The profiler, and what is done for tensor maps."""
    from pallasite_std.lifecycles import LIFECYCLES

    return LIFECYCLES


@hookimpl
def pallasite_memory_events() -> Iterable[MemoryEvents]:
    """What the portable primitives do to memory."""
    from pallasite_std.memory_events import EVENTS

    return EVENTS


@hookimpl
def pallasite_proxy_fences() -> Iterable[ProxyFence]:
    """The fence before asynchronous accesses."""
    from pallasite_std.memory_events import FENCES

    return FENCES


def _check(name: str) -> Callable[[Any, Any], None]:
    """A check of kernels, which is imported when it first runs."""

    def run(jaxpr: Any, context: Any) -> None:
        from pallasite_std.checks import passes

        getattr(passes, f"run_check_{name}")(jaxpr, context)

    return run


_CHECKS = {
    "indices": "finds indices that leave an array for some block",
    "outputs": "finds what is added to outputs that nobody has written",
    "contents": "finds blocks of pipelines that are copied without having been written, and members"
    " of unions that others have overwritten",
    "grid": "finds outputs that the grid covers in part or twice",
    "transfers": "compares the bytes that phases of barriers expect with those copied",
    "arrivals": "finds waits for arrivals that can never come",
    "reuse": "finds shared memory that is used while a copy may write or read it",
    "copies": "finds copies that lack a commit or a wait",
    "stages": "finds pipelines with more stages than steps",
}
"""Checks of :mod:`pallasite_std.checks`, in the order in which they run."""


def _checks() -> list[Pass]:
    before, passes = "definitions", []
    for name, description in _CHECKS.items():
        after = tuple(dict.fromkeys(("definitions", before)))
        passes.append(
            Pass(
                name=f"check-{name}",
                stage="jaxpr",
                run=_check(name),
                after=after,
                description=description,
            )
        )
        before = f"check-{name}"
    return passes


@hookimpl
def pallasite_passes() -> list[Pass]:
    """Definitions of primitives, checks of kernels, a limit on the size of the code, counters of
    slots, negations that assemblers get wrong."""
    from pallasite_std.passes.barriers import check_barriers
    from pallasite_std.passes.code_size import check_code_size
    from pallasite_std.passes.counters import carry_remainders
    from pallasite_std.passes.definitions import expand_definitions
    from pallasite_std.passes.loaded_slices import load_slices
    from pallasite_std.passes.movements import move_directly
    from pallasite_std.passes.negation import exact_negations
    from pallasite_std.passes.odd_rows import join_odd_rows
    from pallasite_std.passes.parameters import hoist_parameter_addresses
    from pallasite_std.passes.slices import join_slices
    from pallasite_std.passes.stored_parts import store_parts

    return [
        Pass(
            name="definitions",
            stage="jaxpr",
            run=expand_definitions,
            before=("check-barriers",),
            description="replaces primitives that others define by their definitions",
        ),
        Pass(
            name="join-odd-rows",
            stage="jaxpr",
            run=join_odd_rows,
            after=("check-stages",),
            description="reduces arrays with odd rows of 16-bit elements by whole vectors",
        ),
        Pass(
            name="move-directly",
            stage="jaxpr",
            run=move_directly,
            after=("check-stages", "join-odd-rows"),
            description="copies arrays of odd shapes that are only brought into another order",
        ),
        Pass(
            name="load-slices",
            stage="jaxpr",
            run=load_slices,
            after=("check-stages", "move-directly"),
            description="loads small slices of arrays of odd shapes by themselves",
        ),
        Pass(
            name="store-parts",
            stage="jaxpr",
            run=store_parts,
            after=("check-stages", "load-slices"),
            description="stores arrays of odd shapes that make up another one by themselves",
        ),
        Pass(
            name="join-slices",
            stage="jaxpr",
            run=join_slices,
            after=("check-stages", "join-odd-rows", "store-parts"),
            description="moves slices of arrays of odd shapes that are concatenated at once",
        ),
        Pass(
            name="check-code-size",
            stage="llvm",
            run=check_code_size,
            before=("llvm-optimize",),
            description="refuses kernels that would take minutes to compile",
        ),
        Pass(
            name="carry-remainders",
            stage="mlir",
            run=carry_remainders,
            after=("mlir-canonicalize",),
            before=("mlir-hoist",),
            description="loops count slots of rings instead of dividing their counters",
        ),
        Pass(
            name="hoist-parameters",
            stage="mlir",
            run=hoist_parameter_addresses,
            after=("mlir-canonicalize",),
            before=("mlir-hoist",),
            description="takes addresses of tensor maps outside of loops",
        ),
        Pass(
            name="exact-negations",
            stage="ptx",
            run=exact_negations,
            description="negates 16-bit integers without the instruction that ptxas can lose",
        ),
        Pass(
            name="check-barriers",
            stage="jaxpr",
            run=check_barriers,
            description="finds waits on barriers that can never end",
        ),
        *_checks(),
    ]
