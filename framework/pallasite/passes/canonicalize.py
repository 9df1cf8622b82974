"""Canonicalization and common subexpression elimination on MLIR."""

from __future__ import annotations

from typing import Any


def canonicalize(module: Any, context: Any) -> None:
    """Folds constants, simplifies operations and control flow, and removes duplicates."""
    from pallasite.passes.mlir import run_pipeline

    # From the top down, rewriting takes quadratic time in the number of values that loops carry.
    run_pipeline(module, "canonicalize{top-down=false},cse")
