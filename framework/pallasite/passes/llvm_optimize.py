"""LLVM's own optimization."""

from __future__ import annotations

from typing import Any

from pallasite import config


def optimize_llvm(module: Any, context: Any) -> None:
    """Runs LLVM's passes on an llvmlite module, as the option ``llvm_pipeline`` says."""
    from pallasite.codegen import ptx

    pipeline = config.get("llvm_pipeline")
    if pipeline == "auto":
        pipeline = ptx.sufficient_pipeline(context.llvm)
    if pipeline == "short":
        ptx.simplify(module, context.target)
    else:
        ptx.optimize(module, context.target, speed_level=int(pipeline[1:]))
