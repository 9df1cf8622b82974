"""The result of a compilation: everything about one kernel, for people and for executors."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.launch import (
    Allocation as Allocation,
    ArrayParameter as ArrayParameter,
    Buffer as Buffer,
    BufferKind as BufferKind,
    LaunchParameters as LaunchParameters,
    Parameter as Parameter,
    ResourceReport as ResourceReport,
    TensorMapParameter as TensorMapParameter,
    canonical_order as canonical_order,
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
