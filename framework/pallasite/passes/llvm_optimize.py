"""LLVM's own optimization pipeline."""

from __future__ import annotations

from typing import Any


def optimize_llvm(module: Any, context: Any) -> None:
    """Runs LLVM's standard pipeline for the target on an llvmlite module."""
    from pallasite.codegen.ptx import optimize

    optimize(module, context.target)
