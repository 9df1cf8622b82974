"""The passes of the core, contributed through the same hook as those of any plugin."""

from __future__ import annotations

import functools
from typing import Any

from pallasite import config
from pallasite.extensions import Pass
from pallasite.hookspecs import hookimpl


@hookimpl
def pallasite_passes() -> list[Pass]:
    """Simplification of MLIR, hoisting, and LLVM's optimization."""
    return [
        Pass(
            name="mlir-canonicalize",
            stage="mlir",
            # From the top down, it takes quadratic time in the number of values that loops carry.
            run=functools.partial(_run_mlir, "canonicalize{top-down=false},cse"),
            before=("mlir-hoist",),
            description="folds constants, simplifies operations, removes duplicates",
        ),
        Pass(
            name="mlir-hoist",
            stage="mlir",
            run=functools.partial(_run_mlir, "loop-invariant-code-motion"),
            description="moves loop-invariant operations out of loops",
        ),
        Pass(
            name="llvm-optimize",
            stage="llvm",
            run=_optimize_llvm,
            description="LLVM's standard optimization pipeline",
        ),
    ]


def _run_mlir(pipeline: str, module: Any, context: Any) -> None:
    """Runs passes of jaxlib's in place. They leave it valid, so it is not verified again."""
    from jaxlib.mlir.passmanager import PassManager

    with module.context:
        passes = PassManager.parse(f"builtin.module({pipeline})")
        passes.enable_verifier(False)
        passes.run(module.operation)


def _optimize_llvm(module: Any, context: Any) -> None:
    """Runs LLVM's passes on an llvmlite module, as the option ``llvm_pipeline`` says."""
    from pallasite.codegen import ptx

    pipeline = config.get("llvm_pipeline")
    if pipeline == "auto":
        pipeline = ptx.sufficient_pipeline(context.llvm)
    if pipeline == "short":
        ptx.simplify(module, context.target)
    else:
        ptx.optimize(module, context.target, speed_level=int(pipeline[1:]))
