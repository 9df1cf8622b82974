"""Loop-invariant code motion on MLIR."""

from __future__ import annotations

from typing import Any


def hoist_loop_invariants(module: Any, context: Any) -> None:
    """Moves operations without side effects out of loops that do not change their operands."""
    from pallasite.passes.mlir import run_pipeline

    run_pipeline(module, "loop-invariant-code-motion")
