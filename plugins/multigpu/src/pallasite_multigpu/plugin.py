"""The hook implementations of the plugin; what they contribute is imported when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from pallasite.plugin import (
    Diagnosis,
    InferenceRule,
    InstructionRule,
    KernelLifecycle,
    LayoutRule,
    LoweringRule,
    Pass,
    ResourceRule,
    RuleSet,
    StoreNamespace,
    ViewRule,
    hookimpl,
    imported_on_call,
)

PALLASITE_PLUGIN_API = (2, 0)
"""What the plugin needs of Pallasite."""


@hookimpl
def pallasite_options() -> type:
    """Compiler parameters of the plugin."""
    from pallasite_multigpu.options import MultiGpuOptions

    return MultiGpuOptions


@hookimpl
def pallasite_passes() -> list[Pass]:
    """Links NVSHMEM's functions to kernels that call them."""
    return [
        Pass(
            name="link-network",
            stage="llvm",
            run=imported_on_call("pallasite_multigpu.network.library:link"),
            before=("llvm-optimize",),
            description="links NVSHMEM's functions to kernels that reach other hosts",
        )
    ]


@hookimpl
def pallasite_stores() -> list[StoreNamespace]:
    """Device libraries, cut down to what is used."""
    from pallasite_multigpu.network.library import LIBRARIES

    return [LIBRARIES]


@hookimpl
def pallasite_diagnoses() -> list[Diagnosis]:
    """Whether the GPUs here can reach each other."""
    from pallasite_multigpu.runtime.diagnoses import diagnoses

    return diagnoses()


_NAMES = {
    "language.multimem": ("multimem_load_reduce", "multimem_store"),
    "language.references": ("PeerMemRef", "multicast_ref", "remote_ref"),
    "language.semaphores": (
        *("SemaphoreSignal", "semaphore_signal_multicast", "semaphore_signal_parallel"),
    ),
}

_RULES = (
    *("rules.fences", "rules.giving_up", "rules.identity", "rules.multimem", "rules.semaphores"),
)


def _rules() -> RuleSet:
    found = RuleSet()
    for name in _RULES:
        found.extend(importlib.import_module(f"pallasite_multigpu.{name}").rules)
    return found


@hookimpl
def pallasite_names() -> dict[str, str]:
    """References to other devices, signals, multicast."""
    return {
        name: f"pallasite_multigpu.{module}:{name}"
        for module, names in _NAMES.items()
        for name in names
    }


@hookimpl
def pallasite_views() -> Iterable[ViewRule]:
    """Memory of other devices."""
    from pallasite_multigpu.views.peers import VIEW_RULES

    return VIEW_RULES


@hookimpl
def pallasite_lowering_rules() -> Iterable[LoweringRule]:
    """How signals, multicast and device indices are emitted."""
    return _rules().lowering_rules


@hookimpl
def pallasite_resource_rules() -> Iterable[ResourceRule]:
    """Which of them signal other devices."""
    return _rules().resource_rules


@hookimpl
def pallasite_layout_rules() -> Iterable[LayoutRule]:
    """Layout hints of reducing loads."""
    return _rules().layout_rules


@hookimpl
def pallasite_inference_rules() -> Iterable[InferenceRule]:
    """Layouts of multicast stores and reducing loads."""
    return _rules().inference_rules


@hookimpl
def pallasite_instructions() -> list[InstructionRule]:
    """What instructions on the memory of all devices do, for the simulator, if it is installed."""
    if importlib.util.find_spec("pallasite_simulator") is None:
        return []
    from pallasite_multigpu.simulation.multimem import instructions

    return instructions.rules


@hookimpl
def pallasite_lifecycles() -> tuple[KernelLifecycle, ...]:
    """The exchange of addresses and the barriers between devices."""
    where = "pallasite_multigpu.protocol.lifecycle"
    return (
        KernelLifecycle(
            name="device-barriers",
            applies=imported_on_call(f"{where}:applies"),
            prologue=imported_on_call(f"{where}:prologue"),
            epilogue=imported_on_call(f"{where}:epilogue"),
            finish=imported_on_call(f"{where}:finish"),
            description="kernels that reach other devices begin and end with these, if need be",
        ),
        KernelLifecycle(
            name="device-tensor-maps",
            applies=imported_on_call(f"{where}:applies"),
            prologue=imported_on_call("pallasite_multigpu.views.tensor_maps:make_descriptors"),
            after=("device-barriers",),
            description="makes TMA descriptors of other devices' arrays",
        ),
    )
