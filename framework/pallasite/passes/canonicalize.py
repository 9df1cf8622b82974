"""Canonicalization and common subexpression elimination on MLIR."""

from __future__ import annotations

from typing import Any


def canonicalize(module: Any, context: Any) -> None:
    """Folds constants, simplifies operations and control flow, and removes duplicates."""
    from pallasite.passes.mlir import run_pipeline

    run_pipeline(module, "canonicalize,cse")
