"""Takes over how the kernels of programs are compiled and run, within a ``with`` block."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

from pallasite import config
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True)
class Override:
    """What takes the place of the kernels' own choices; None leaves a choice to them.

    Attributes:
      run: runs kernels on the CPU: ``run(compiled, *operands)`` returns the list of outputs.
      target: what kernels are compiled for.
    """

    run: Callable[..., Any] | None = None
    target: Target | None = None


_current: contextvars.ContextVar[Override] = contextvars.ContextVar(
    "pallasite_override",
    default=Override(),  # noqa: B039  (it is frozen)
)


def current() -> Override:
    """What holds for programs that are lowered now."""
    return _current.get()


def override(
    run: Callable[..., Any] | None = None, target: Target | None = None
) -> contextlib.AbstractContextManager[None]:
    """Sets both for programs that are lowered within the block, by this thread.

    A function that ``jax.jit`` has compiled before is not lowered again.
    """
    return config.bound(_current, Override(run, target))
