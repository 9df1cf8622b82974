"""Tensor maps are on their way while barriers are initialised: the first copy needs them."""

from __future__ import annotations

from jaxlib.mlir.dialects import llvm

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, TensorMapParameter


def prefetch(kernel: KernelContext) -> None:
    """Fetches the tensor maps of the kernel while its barriers are initialised."""
    launch = kernel.launch

    def emit() -> None:
        # PTX ISA 9.7.9.15, prefetch.tensormap.
        for parameter in launch.parameters:
            if isinstance(parameter, TensorMapParameter):
                address = llvm.ptrtoint(ops.i64(), launch.parameter(parameter))
                ops.inline_assembly("prefetch.tensormap [$0];", "l", address)

    launch.before_barriers(emit)
