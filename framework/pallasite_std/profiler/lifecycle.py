"""When the profiler records: from the beginning of a kernel to its end, in its named regions."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pallasite.plugin.lowering import KernelContext, StateKey
from pallasite_std.profiler.events import Profiler

PROFILER = StateKey("standard.profiler", Profiler)


def begin(kernel: KernelContext) -> None:
    """Makes room for the events of a kernel."""
    kernel.state(PROFILER)


def named_scope(kernel: KernelContext, name: str) -> AbstractContextManager[None]:
    """Records when the code of a ``jax.named_scope`` begins and ends."""
    return kernel.state(PROFILER).record(name)


def epilogue(kernel: KernelContext) -> None:
    """Stores what was recorded last."""
    kernel.state(PROFILER).finish()
