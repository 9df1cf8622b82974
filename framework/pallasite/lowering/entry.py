"""From a traced kernel to a verified MLIR module: the entry point of lowering."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite import _jax, plugins
from pallasite.errors import SourceLocation
from pallasite.ir.context import make_context
from pallasite.language.checks import errors_at
from pallasite.language.effects import programmatic_launch_effect
from pallasite.language.spec import KernelSpec
from pallasite.launch import (
    Allocation,
    Buffer,
    BufferKind,
    DeviceMesh,
    ReservedAmount,
    ResourceReport,
)
from pallasite.lowering import recording
from pallasite.lowering.context import KernelContext, Mode, Value
from pallasite.lowering.equations import mlir_location
from pallasite.lowering.geometry import launch_geometry
from pallasite.lowering.inference.entry import Inference, infer_layouts
from pallasite.lowering.launch import BARRIER_BYTES, LaunchContext
from pallasite.lowering.lifecycles import ActiveLifecycles
from pallasite.lowering.memory_access import memory_access
from pallasite.lowering.memory_plan import SharedStack
from pallasite.lowering.planned_strategy import PlannedStrategy
from pallasite.lowering.resources import EstimatorContext, Resources, check_limits
from pallasite.lowering.result import LoweredKernel
from pallasite.lowering.walker import lower_jaxpr
from pallasite.resource import BARRIERS, SHARED_MEMORY
from pallasite.semantics import Semantics
from pallasite.targets import Target


def _kernel_location(spec: KernelSpec) -> SourceLocation | None:
    location: SourceLocation | None = getattr(spec, "location", None)
    if location is not None:
        return location
    for equation in spec.jaxpr.eqns:
        found = _jax.user_location(equation.source_info)
        if found is not None:
            return found
    return None


def estimate_kernel(spec: KernelSpec, target: Target) -> Resources:
    """The on-chip resources that a kernel reserves on ``target``, before it is lowered.

    Raises:
      ResourceError: more of something than the target has; the message lists who asked.
    """
    location = _kernel_location(spec)
    geometry = launch_geometry(spec.mesh, target, location)
    estimator = EstimatorContext(
        plugins.registry(), target, geometry, spec.params, location, spec.params.semantics
    )
    with errors_at(lambda: location):
        resources = estimator.estimate(spec.jaxpr)
        check_limits(spec.name, resources, target, estimator.registry)
    return resources


def _touched(spec: KernelSpec, kind: Any) -> set[int]:
    """Positions of the kernel's references that have an effect of a kind."""
    return {
        position
        for effect in spec.jaxpr.effects
        if isinstance(effect, kind)
        for position, variable in enumerate(spec.jaxpr.invars)
        if effect.input is variable or effect.input == position
    }


def _memory_used_both_ways(spec: KernelSpec) -> set[int]:
    """Positions of references whose memory the kernel reads, or writes by two references."""
    read, written = _touched(spec, _jax.ReadEffect), _touched(spec, _jax.WriteEffect)
    for given, output in spec.input_output_aliases:
        names = {given, len(spec.in_avals) + output}
        if names & read or names <= written:
            read |= names
    return read


def _constant_inputs(spec: KernelSpec) -> set[int]:
    """Positions of the inputs that are not written from the beginning of the kernel to its end.

    A kernel that waits for earlier ones may begin before its inputs are there.
    """
    if programmatic_launch_effect in spec.jaxpr.effects:
        return set()
    written = _touched(spec, _jax.WriteEffect)
    aliased = {given for given, _ in spec.input_output_aliases}
    return set(range(len(spec.in_avals))) - written - aliased


def lower_kernel(
    spec: KernelSpec,
    target: Target,
    *,
    device_mesh: DeviceMesh | None = None,
    context: ir.Context | None = None,
) -> LoweredKernel:
    """Lowers a traced kernel for a target to an MLIR module, not yet verified, and its launch.

    Args:
      spec: the traced kernel.
      target: what to compile for.
      device_mesh: the JAX device mesh around the call.
      context: where the module is made; by default a new one.

    Raises:
      PallasiteError: anything in the kernel that cannot work; it names the user's line.
    """
    estimate = estimate_kernel(spec, target)
    location = _kernel_location(spec)
    geometry = launch_geometry(spec.mesh, target, location)
    scoped_bytes = estimate.amount(SHARED_MEMORY)
    asked = recording.active()
    with context or make_context(), ir.Location.unknown():
        module = ir.Module.create()
        launch = LaunchContext(spec.name, target, geometry, module, scoped_bytes)
        launch.hidden.inputs = _buffers(BufferKind.INPUT, spec.in_avals)
        launch.hidden.outputs = _buffers(BufferKind.OUTPUT, spec.out_avals)
        launch.aliases = tuple(spec.input_output_aliases)
        launch.min_blocks = spec.params.min_blocks
        kernel = KernelContext(
            target=target,
            params=spec.params,
            registry=plugins.registry(),
            launch=launch,
            geometry=geometry,
            shared=SharedStack(scoped_bytes),
            device_mesh=device_mesh or DeviceMesh(),
            location=location,
            estimate=estimate,
            semantics=spec.params.semantics,
            recorder=asked.recorder(spec.name, target.name) if asked is not None else None,
        )
        inference: Inference | None = None
        read = _memory_used_both_ways(spec)
        launch.shares_memory_in_cluster = bool(read & _touched(spec, _jax.WriteEffect))
        constant = _constant_inputs(spec)
        accesses = memory_access()
        references: list[Value] = [
            accesses.kernel_argument(
                launch, buffer, may_be_read=position in read, constant=position in constant
            )
            for position, buffer in enumerate((*launch.hidden.inputs, *launch.hidden.outputs))
        ]
        with mlir_location(location), errors_at(lambda: location):
            lifecycles = ActiveLifecycles(kernel)
            launch.named_scopes = lifecycles.named_scopes()
            lifecycles.call("begin")
            kernel.accesses = accesses
            kernel.strategy = plugins.manager().implementation("lane_layouts")(
                kernel.registry, target
            )
            if kernel.semantics.extends(Semantics.WARPGROUP):
                inference = infer_layouts(kernel, spec.jaxpr)
                kernel.strategy = PlannedStrategy(inference.plan)
                if kernel.recorder is not None:
                    kernel.recorder.layouts.report = plugins.manager().implementation(
                        "layout_report"
                    )(inference)
            with launch.body():
                lifecycles.call("prologue")
                lower_jaxpr(kernel, Mode(kernel.semantics), spec.jaxpr, references)
            parameters = launch.finish(lifecycles)
        return LoweredKernel(
            name=spec.name,
            module=module,
            target=target,
            launch=parameters,
            resources=ResourceReport(
                shared_memory_bytes=parameters.shared_memory_bytes,
                shared_memory_limit=target.max_shared_memory,
                barriers=sum(
                    row.amount // BARRIER_BYTES
                    for row in launch.allocations
                    if row.space == "barrier"
                ),
                reserved=_reserved(estimate, target),
                allocations=_ordered(launch.allocations),
            ),
            jaxpr=spec.jaxpr,
            options=spec.params,
            inference=inference,
        )


def _reserved(estimate: Resources, target: Target) -> tuple[ReservedAmount, ...]:
    """What is reserved besides shared memory and barriers, of what targets limit."""
    return tuple(
        ReservedAmount(
            one.name, one.label, one.unit, one.granted(amount), target.limit(one.limit_name)
        )
        for one, amount in estimate.amounts().items()
        if one.limited and one not in (SHARED_MEMORY, BARRIERS)
    )


def _ordered(allocations: list[Allocation]) -> tuple[Allocation, ...]:
    return tuple(sorted(allocations, key=lambda row: (row.space, row.offset)))


def _buffers(kind: BufferKind, avals: tuple[Any, ...]) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(kind, index, tuple(aval.shape), np.dtype(aval.dtype))
        for index, aval in enumerate(avals)
    )
