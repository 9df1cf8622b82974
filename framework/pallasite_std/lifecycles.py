"""The lifecycles of the standard library; their functions are imported when one is called."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import KernelLifecycle, TargetPredicate, imported_on_call
from pallasite_std.options import KernelOptions

_TMA = TargetPredicate(frozenset({"tma"}))


def _is_profiled(params: Any) -> bool:
    return bool(params.options_of(KernelOptions).profile_space > 0)


PROFILER = KernelLifecycle(
    name="profiler",
    applies=lambda kernel: _is_profiled(kernel.params),
    begin=imported_on_call("pallasite_std.profiler.lifecycle:begin"),
    epilogue=imported_on_call("pallasite_std.profiler.lifecycle:epilogue"),
    named_scope=imported_on_call("pallasite_std.profiler.lifecycle:named_scope"),
    host_effects=_is_profiled,
    description="records when the regions of jax.named_scope begin and end (profile_space)",
)

SHARED_TENSOR_MAPS = KernelLifecycle(
    name="shared-tensor-maps",
    target=_TMA,
    finish=imported_on_call("pallasite_std.copies.shared_tensor_maps:share"),
    description="copies of one array share tensor maps where the launcher cannot pass all of them",
)

TENSOR_MAP_PREFETCH = KernelLifecycle(
    name="tensor-map-prefetch",
    target=_TMA,
    finish=imported_on_call("pallasite_std.copies.tensor_map_prefetch:prefetch"),
    after=("shared-tensor-maps",),
    description="fetches tensor maps while barriers are initialised",
)

LIFECYCLES = (PROFILER, SHARED_TENSOR_MAPS, TENSOR_MAP_PREFETCH)
