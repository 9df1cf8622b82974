"""The passes of the core, contributed through the same hook as those of any plugin."""

from __future__ import annotations

from pallasite.extensions import Pass
from pallasite.hookspecs import hookimpl
from pallasite.passes.canonicalize import canonicalize
from pallasite.passes.hoist import hoist_loop_invariants
from pallasite.passes.llvm_optimize import optimize_llvm


@hookimpl
def pallasite_passes() -> list[Pass]:
    """Simplification of MLIR, hoisting, and LLVM's optimization."""
    return [
        Pass(
            name="mlir-canonicalize",
            stage="mlir",
            run=canonicalize,
            before=("mlir-hoist",),
            description="folds constants, simplifies operations, removes duplicates",
        ),
        Pass(
            name="mlir-hoist",
            stage="mlir",
            run=hoist_loop_invariants,
            description="moves loop-invariant operations out of loops",
        ),
        Pass(
            name="llvm-optimize",
            stage="llvm",
            run=optimize_llvm,
            description="LLVM's standard optimization pipeline",
        ),
    ]
