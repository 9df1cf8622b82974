"""Running the MLIR passes that jaxlib registers."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.passmanager import PassManager


def run_pipeline(module: Any, pipeline: str) -> None:
    """Runs a textual pass pipeline, such as ``"canonicalize,cse"``, on a module in place.

    The module is verified after each pass.
    """
    with module.context:
        PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
