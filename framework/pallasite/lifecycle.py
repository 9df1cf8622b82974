"""What a plugin does at fixed moments in the life of a kernel, as a record."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pallasite.targets import ANY_TARGET, TargetPredicate

if TYPE_CHECKING:
    from pallasite.launch import HostStep


def imported_on_call(path: str) -> Callable[..., Any]:
    """The function ``"module:attribute"``, whose module is imported when it is first called: for
    records that are asked for before it is known whether a kernel is in the cache."""
    module, _, attribute = path.partition(":")

    def function(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*arguments, **options)

    return function


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelLifecycle:
    """Functions that are called while a kernel is lowered, each with its ``KernelContext``.

    What a lifecycle, or a plugin's rules, keep for one kernel is in ``kernel.state(KEY)``. All
    threads of the grid execute what ``prologue`` and ``epilogue`` emit, and each warp is converged
    there, so collective instructions of a warp, ``launch.block_barrier()`` and, in a cluster,
    ``launch.cluster_barrier()`` may be used.

    Of several lifecycles, each moment is called in one order: that of the plugins, unless
    ``before`` and ``after`` say otherwise.

    Attributes:
      name: unique name.
      target: the targets for which it is there.
      applies: ``applies(kernel)`` says whether it takes part in a kernel; None means always.
      begin: before layouts are inferred and anything of the body is emitted. Values that the whole
        kernel uses are emitted with ``launch.emit_once`` or ``launch.at_entry``, before barriers
        are initialised.
      prologue: emits code before the body, where all barriers of the kernel, also those that are
        asked for later, are initialised and visible to the block.
      epilogue: emits code after the body, before the last synchronisation of a cluster.
      finish: after the body and all epilogues are lowered, when everything that the kernel asks
        for is known, and before parameters get their order. What ``kernel.emit_later`` deferred is
        emitted afterwards.
      named_scope: ``named_scope(kernel, name)`` is a context manager around the code of a
        ``jax.named_scope``, which may emit something where it begins and ends.
      before_first_launch: after ``finish``: says what the host does on each device before the
        kernel is first launched there, or None for nothing.
      host_effects: ``host_effects(params)`` says from the kernel's ``CompilerParams`` whether it
        has effects on the host, so that it must run even if its results are unused.
      per_device: whether kernels have to know the devices of the program they are lowered for; to
        be set if there are steps before the first launch, or hidden operands per device.
      before, after: names of lifecycles that come later, or earlier, if they are there.
      overrides: names of plugins whose lifecycle of the same name this one replaces.
      description: one line for listings.
      plugin: who contributed it; the registry fills it in.
    """

    name: str
    target: TargetPredicate = ANY_TARGET
    applies: Callable[[Any], bool] | None = None
    begin: Callable[[Any], None] | None = None
    prologue: Callable[[Any], None] | None = None
    epilogue: Callable[[Any], None] | None = None
    finish: Callable[[Any], None] | None = None
    named_scope: Callable[[Any, str], AbstractContextManager[None]] | None = None
    before_first_launch: Callable[[Any], HostStep | None] | None = None
    host_effects: Callable[[Any], bool] | None = None
    per_device: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    description: str = ""
    plugin: str = ""
