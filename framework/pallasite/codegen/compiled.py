"""The result of a compilation: everything about one kernel, for people and for executors."""

from __future__ import annotations

import dataclasses

from pallasite.launch import (
    Allocation as Allocation,
)
from pallasite.launch import (
    ArrayParameter as ArrayParameter,
)
from pallasite.launch import (
    Buffer as Buffer,
)
from pallasite.launch import (
    BufferKind as BufferKind,
)
from pallasite.launch import (
    LaunchParameters as LaunchParameters,
)
from pallasite.launch import (
    Parameter as Parameter,
)
from pallasite.launch import (
    ResourceReport as ResourceReport,
)
from pallasite.launch import (
    TensorMapParameter as TensorMapParameter,
)
from pallasite.lowering.result import LoweredKernel as LoweredKernel
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel, every stage of it as text, and how to launch it.

    Stages that were not asked for are None (``cubin`` and ``sass`` need an assembler).
    ``timings`` gives seconds by stage name, in order.
    """

    name: str
    target: Target
    launch: LaunchParameters
    resources: ResourceReport
    jaxpr: str | None
    mlir: str | None
    llvm: str | None
    ptx: str
    cubin: bytes | None = None
    sass: str | None = None
    timings: tuple[tuple[str, float], ...] = ()
