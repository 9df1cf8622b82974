"""Kernels that read, write and signal the memory of other GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallasite_multigpu import options as options  # declares the options of the configuration

if TYPE_CHECKING:
    from pallasite_multigpu.runtime.symmetric import is_symmetric as is_symmetric
    from pallasite_multigpu.runtime.symmetric import symmetric_empty as symmetric_empty

_SYMMETRIC = ("is_symmetric", "symmetric_empty")


def __getattr__(name: str) -> Any:
    if name in _SYMMETRIC:
        from pallasite_multigpu.runtime import symmetric

        return getattr(symmetric, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SYMMETRIC})
