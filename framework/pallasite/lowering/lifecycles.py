"""The lifecycles of plugins in one kernel: which take part, and calling them at each moment."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pallasite.errors import InvalidTypeError, PallasiteError
from pallasite.launch import HostStep
from pallasite.lifecycle import KernelLifecycle

if TYPE_CHECKING:
    from pallasite.lowering.context import KernelContext


class ActiveLifecycles:
    """Those that apply to a kernel, in their order."""

    def __init__(self, kernel: KernelContext):
        self._kernel = kernel
        self._active = []
        for one in kernel.registry.lifecycles(target=kernel.target):
            with _named(one, "applies"):
                if one.applies is None or one.applies(kernel):
                    self._active.append(one)

    def call(self, moment: str) -> None:
        """Calls the functions of a moment: ``"begin"``, ``"prologue"``, ``"epilogue"`` or
        ``"finish"``."""
        for one in self._active:
            function = getattr(one, moment)
            if function is not None:
                with _named(one, moment):
                    function(self._kernel)

    def named_scopes(self) -> tuple[Callable[[str], AbstractContextManager[None]], ...]:
        """What opens a named region, for each lifecycle that wants to know of them."""
        return tuple(
            functools.partial(one.named_scope, self._kernel)
            for one in self._active
            if one.named_scope is not None
        )

    def host_steps(self) -> tuple[HostStep, ...]:
        """What the host does on each device before the first launch."""
        steps = []
        for one in self._active:
            if one.before_first_launch is None:
                continue
            with _named(one, "before_first_launch"):
                step: Any = one.before_first_launch(self._kernel)
                if step is None:
                    continue
                if not isinstance(step, HostStep):
                    raise InvalidTypeError(
                        f"before_first_launch of kernel lifecycle {one.name!r} returned the wrong"
                        " thing",
                        got=repr(step),
                        expected="host_step(function, arguments), or None",
                    )
                steps.append(step)
        return tuple(steps)


@contextlib.contextmanager
def _named(lifecycle: KernelLifecycle, moment: str) -> Iterator[None]:
    """Notes in errors that are not Pallasite's own whose function failed."""
    try:
        yield
    except PallasiteError:
        raise
    except Exception as error:
        error.add_note(
            f"in {moment} of kernel lifecycle {lifecycle.name!r} (plugin {lifecycle.plugin!r})"
        )
        raise
