"""When the profiler records: from the beginning of a kernel to its end, in its named regions."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pallasite.plugin import KernelLifecycle
from pallasite.plugin.language import CompilerParams
from pallasite.plugin.lowering import KernelContext, StateKey
from pallasite_std.profiler.events import Profiler

PROFILER = StateKey("standard.profiler", Profiler)


def _wanted(params: CompilerParams) -> bool:
    return params.profile_space > 0


def _applies(kernel: KernelContext) -> bool:
    return _wanted(kernel.params)


def _begin(kernel: KernelContext) -> None:
    kernel.state(PROFILER)


def _named_scope(kernel: KernelContext, name: str) -> AbstractContextManager[None]:
    return kernel.state(PROFILER).record(name)


def _epilogue(kernel: KernelContext) -> None:
    kernel.state(PROFILER).finish()


profiler = KernelLifecycle(
    name="profiler",
    applies=_applies,
    begin=_begin,
    epilogue=_epilogue,
    named_scope=_named_scope,
    host_effects=_wanted,
    description="records when the regions of jax.named_scope begin and end (profile_space)",
)
