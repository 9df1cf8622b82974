"""The number of a block in its grid."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext


def block_number(kernel: KernelContext) -> ir.Value:
    """Emits the number of this block (i32), x first."""
    grid = kernel.geometry.cuda_grid
    ids = [kernel.launch.block_id(dimension) for dimension in range(3)]
    number = ops.add(ops.multiply(ids[2], grid[1]), ids[1])
    return ops.add(ops.multiply(number, grid[0]), ids[0])
