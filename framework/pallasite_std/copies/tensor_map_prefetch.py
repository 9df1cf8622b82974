"""Tensor maps are on their way while barriers are initialised: the first copy needs them."""

from __future__ import annotations

from jaxlib.mlir.dialects import llvm

from pallasite.plugin import KernelLifecycle, TargetPredicate
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, TensorMapParameter


def _prefetch(kernel: KernelContext) -> None:
    launch = kernel.launch

    def emit() -> None:
        # PTX ISA 9.7.9.15, prefetch.tensormap.
        for parameter in launch.parameters:
            if isinstance(parameter, TensorMapParameter):
                address = llvm.ptrtoint(ops.i64(), launch.parameter(parameter))
                ops.inline_assembly("prefetch.tensormap [$0];", "l", address)

    launch.before_barriers(emit)


tensor_map_prefetch = KernelLifecycle(
    name="tensor-map-prefetch",
    target=TargetPredicate(frozenset({"tma"})),
    finish=_prefetch,
    after=("shared-tensor-maps",),
    description="fetches tensor maps while barriers are initialised",
)
