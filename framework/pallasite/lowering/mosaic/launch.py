"""What inlined code asks of its launch, by the names of ``jax.experimental.mosaic.gpu``."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallasite.ir import ops
from pallasite.lowering.context import RuleContext


def name_architecture(ctx: RuleContext) -> None:
    """Says in the module what is compiled for, where ``mgpu.utils.get_arch`` looks for it."""
    attributes = ctx.launch.module.operation.attributes
    for name, number in zip(("major", "minor"), ctx.target.compute_capability, strict=True):
        attributes[f"mosaic_gpu.arch_{name}"] = ir.IntegerAttr.get(ops.i32(), number)
