"""Running the MLIR passes that jaxlib registers."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.passmanager import PassManager


def run_pipeline(module: Any, pipeline: str) -> None:
    """Runs a textual pass pipeline, such as ``"canonicalize,cse"``, on a module in place.

    They leave a valid module valid, so it is not verified again.
    """
    with module.context:
        passes = PassManager.parse(f"builtin.module({pipeline})")
        passes.enable_verifier(False)
        passes.run(module.operation)
