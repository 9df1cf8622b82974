"""What lowering hands to code generation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pallasite.launch import LaunchParameters, ResourceReport
from pallasite.targets import Target

if TYPE_CHECKING:
    from pallasite.lowering.inference.entry import Inference


@dataclasses.dataclass(frozen=True)
class LoweredKernel:
    """What the lowering hands to code generation: a verified MLIR module and its launch.

    ``module`` is an ``ir.Module`` that holds one ``llvm.func`` named ``name``; ``inference`` what
    layout inference has found, None under lane semantics.
    """

    name: str
    module: Any
    target: Target
    launch: LaunchParameters
    resources: ResourceReport
    jaxpr: Any = None
    options: Any = None
    inference: Inference | None = None
