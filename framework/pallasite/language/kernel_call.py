"""``kernel_call_p``: the primitive whose only parameter is the :class:`KernelSpec` of a kernel.

Its rules for types and effects, mutable arrays and ``jax.vmap`` are here. What it is compiled to is
decided by the runtime that is registered with :mod:`pallasite.language.execution`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import _jax, config, plugins
from pallasite.language import checks, execution
from pallasite.language.effects import communication_effect
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams
from pallasite.language.spec import KernelSpec
from pallasite.language.tracing import kernel_environment


class BatchAxis:
    """The name of a grid axis that ``jax.vmap`` added; each is different."""

    def __repr__(self) -> str:
        return "vmap"


kernel_call_p = _jax.Primitive("pallasite_kernel")
kernel_call_p.multiple_results = True


devices_p = _jax.Primitive("pallasite_devices")
"""Lets JAX lower a program once for each set of devices: does nothing else."""
devices_p.multiple_results = True
_jax.abstract_eval(devices_p)(lambda: ([], {_jax.debug_effect}))
_jax.prims_that_require_devices.add(devices_p)
_jax.register_lowering(devices_p, lambda ctx: [])


@functools.lru_cache(maxsize=1024)
def _communicates(body: Any) -> bool:
    """Whether a body has JAX's effect of communication, which JAX hides in regions of warps."""
    inner = (one for equation in body.eqns for one in _jax.jaxprs_in_params(equation.params))
    return _jax.comms_effect in body.effects or any(map(_communicates, inner))


def _order_of_calls() -> Any:
    """The effect of calls of kernels that communicate: on GPUs, a program runs in the same order on
    all devices; elsewhere JAX has to keep it."""
    return _jax.debug_effect if _jax.platform_of_mesh() == "gpu" else communication_effect


def effects_of_pallas(primitive: Any, params: Mapping[str, Any]) -> set[Any]:
    """Effects of equations of Pallas that call our kernels: whether these communicate.

    Pallas lets no such effect out of a kernel. Then calls would be dropped, or run in another order
    on each device.

    Args:
      primitive: that of ``pl.pallas_call``, or of ``pl.kernel``.
      params: of the equation.
    """
    ours = isinstance(params.get("compiler_params"), CompilerParams) or is_mesh_kernel(params)
    bodies = params["jaxprs"] if "jaxprs" in params else [params["jaxpr"]]
    if not ours or not any(map(_communicates, bodies)):
        return set()
    _jax.prims_that_require_devices.add(primitive)  # As of :data:`devices_p`.
    return {_order_of_calls()}


def is_mesh_kernel(params: Mapping[str, Any]) -> bool:
    """Whether an equation of ``pl.kernel`` or ``pl.core_map`` has our :class:`Mesh`."""
    ours = all(isinstance(mesh, Mesh) for mesh in params.get("meshes") or [None])
    return ours and not params["interpret"] and not params["external_meshes"]


def call_kernel(*operands: Any, spec: KernelSpec) -> Any:
    """Binds ``kernel_call_p``; programs whose kernels communicate are lowered for their devices."""
    if _communicates(spec.jaxpr) and not _jax.get_concrete_mesh().empty:
        devices_p.bind()
    return kernel_call_p.bind(*operands, spec=spec)


@functools.lru_cache(maxsize=1024)
def _jitted(spec: KernelSpec, executor: str | None) -> Callable[..., Any]:
    del executor  # A program keeps the one that it was lowered with.

    def call(*operands: Any) -> Any:
        return kernel_call_p.bind(*operands, spec=spec)

    call.__name__ = call.__qualname__ = f"kernel {spec.name}"
    call._apply_primitive = True  # type: ignore[attr-defined]  # Nothing to look into for NaNs.
    compiled: Callable[..., Any] = jax.jit(call)
    return compiled


def _impl(*operands: Any, spec: KernelSpec) -> Any:
    with jax.disable_jit(False), execution.runtime(spec.name).kernel_errors():
        return _jitted(spec, config.get("executor"))(*operands)


kernel_call_p.def_impl(_impl)


def has_host_effects(params: CompilerParams) -> bool:
    """Whether a kernel has effects on the host, by the lifecycles that plugins give it."""
    found = plugins.manager().lifecycles()
    return any(one.host_effects is not None and one.host_effects(params) for one in found)


@_jax.abstract_eval(kernel_call_p)
def _abstract_eval(*in_avals: Any, spec: KernelSpec) -> tuple[tuple[Any, ...], set[Any]]:
    for aval in (*in_avals, *spec.out_avals):
        if isinstance(aval, _jax.ShapedArray) and any(p is not None for p in aval.sharding.spec):
            raise checks.value_error(
                f"kernel {spec.name} is called on an array that is sharded over a mesh",
                got=aval,
                hint="call the kernel inside jax.shard_map, on one device's part",
            )
    positions = {var: i for i, var in enumerate(spec.jaxpr.invars)}
    effects: set[Any] = set()
    for effect in spec.jaxpr.effects:
        if isinstance(effect, _jax.JaxprInputEffect):
            position = positions[effect.input]
            if position < len(in_avals) and isinstance(in_avals[position], _jax.AbstractRef):
                effects.add(effect.replace(position))
        elif isinstance(effect, _jax.NamedAxisEffect):
            if effect.name not in spec.mesh.shape:
                effects.add(effect)
        elif effect is not _jax.comms_effect and not (
            spec.mesh.discharges_effect(effect) or _jax.kernel_local_effects.contains(effect)
        ):
            effects.add(effect)
    if has_host_effects(spec.params):
        effects.add(_jax.debug_effect)
    if _communicates(spec.jaxpr):
        effects.add(_order_of_calls())
    # If so, programs with kernels are lowered once for each set of devices, which JAX then tells.
    per_device = any(one.per_device for one in plugins.manager().lifecycles())
    asking = _jax.prims_that_require_devices
    (asking.add if per_device else asking.discard)(kernel_call_p)
    return _result_types(spec, in_avals, effects), effects


def _result_types(spec: KernelSpec, in_avals: Sequence[Any], effects: set[Any]) -> tuple[Any, ...]:
    """The types of the results: they vary over the manual axes of inputs and of the body."""
    manual = _jax.checked_manual_axes()
    indices = {one.name for one in effects if isinstance(one, _jax.NamedAxisEffect)}
    of_body = manual if _communicates(spec.jaxpr) else manual & indices
    varying = of_body.union(*map(_jax.varying_axes, in_avals))
    for position in sorted(_written_inputs(spec)):
        missing = varying - _jax.varying_axes(in_avals[position])
        if missing and isinstance(in_avals[position], _jax.AbstractRef):
            raise checks.value_error(
                f"kernel {spec.name} writes a reference that does not vary over the mesh",
                got=f"{in_avals[position]}, and an operand that varies over {sorted(missing)}",
                hint="make the reference of an array of jax.lax.pcast(x, axes, to='varying')",
            )
    own = spec.out_varying or (None,) * len(spec.out_avals)
    return tuple(
        _jax.varying_over(aval, varying if axes is None else axes)
        for aval, axes in zip(spec.out_avals, own, strict=True)
    )


def _written_inputs(spec: KernelSpec) -> set[int]:
    """Positions of inputs whose reference the body writes."""
    positions = {var: i for i, var in enumerate(spec.jaxpr.invars)}
    written = {
        positions[effect.input]
        for effect in spec.jaxpr.effects
        if isinstance(effect, _jax.WriteEffect | _jax.AccumEffect)
    }
    return {position for position in written if position < len(spec.in_avals)}


@_jax.discharge_rule(kernel_call_p)
def _discharge(ctx: Any, *operands: Any, spec: KernelSpec) -> tuple[list[Any], list[Any]]:
    """Mutable arrays become inputs that are aliased to additional outputs."""
    updated = sorted(
        position
        for position in _written_inputs(spec)
        if ctx.should_discharge[position] and isinstance(ctx.in_avals[position], _jax.AbstractRef)
    )
    num_outs = len(spec.out_avals)
    new_refs = [_jax.new_var(spec.jaxpr.invars[position].aval) for position in updated]
    aliases = tuple((position, num_outs + i) for i, position in enumerate(updated))
    jaxpr = _jax.append_inputs(spec.jaxpr, new_refs) if new_refs else spec.jaxpr
    new = spec.replace(
        jaxpr=jaxpr,
        out_avals=(*spec.out_avals, *(spec.in_avals[position] for position in updated)),
        input_output_aliases=(*spec.input_output_aliases, *aliases),
        out_varying=(
            *(spec.out_varying or (None,) * num_outs),
            *(_jax.varying_axes(ctx.in_avals[position]) for position in updated),
        ),
    )
    results = kernel_call_p.bind(*operands, spec=new)
    new_values = dict(zip(updated, results[num_outs:], strict=True))
    return [new_values.get(i) for i in range(len(operands))], list(results[:num_outs])


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, spec: KernelSpec
) -> tuple[list[Any], list[Any]]:
    """``jax.vmap``: a new first grid axis; operands that are not batched are passed as they are."""
    if all(dim is None for dim in dims):
        return kernel_call_p.bind(*operands, spec=spec), [None] * len(spec.out_avals)
    size, axis = axis_data.size, BatchAxis()
    if not size:
        results = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in spec.out_avals]
        return results, [0] * len(results)
    written, aliased = _written_inputs(spec), {i for i, _ in spec.input_output_aliases}
    values, batched = [], []
    for position, (value, dim) in enumerate(zip(operands, dims, strict=True)):
        is_ref = isinstance(_jax.typeof(value), _jax.AbstractRef)
        if is_ref and dim is None and position in written:
            raise checks.value_error(
                f"jax.vmap of kernel {spec.name} would write one reference from every batch entry",
                hint="map over the reference too, with in_axes=0",
            )
        if is_ref and dim not in (None, 0):
            raise checks.unsupported(
                f"jax.vmap of kernel {spec.name} over axis {dim} of a reference",
                expected="in_axes=0 or None for references",
            )
        if dim is None and position in aliased:
            value, dim = jnp.broadcast_to(value, (size, *value.shape)), 0
        values.append(value if is_ref or dim is None else jnp.moveaxis(value, dim, 0))
        batched.append(dim is not None)
    mesh = spec.mesh.replace(grid=(size, *spec.mesh.grid), grid_names=(axis, *spec.mesh.grid_names))
    with kernel_environment(mesh):
        jaxpr = plugins.manager().implementation("batch_kernel")(
            spec.jaxpr, [*batched, *[True] * len(spec.out_avals)], axis, size
        )

    def add_axis(aval: Any) -> Any:
        return _jax.ShapedArray((size, *aval.shape), aval.dtype)

    new = spec.replace(
        jaxpr=jaxpr,
        in_avals=tuple(
            add_axis(aval) if b else aval for aval, b in zip(spec.in_avals, batched, strict=True)
        ),
        out_avals=tuple(add_axis(aval) for aval in spec.out_avals),
        mesh=mesh,
    )
    return kernel_call_p.bind(*values, spec=new), [0] * len(new.out_avals)


_jax.fancy_primitive_batchers[kernel_call_p] = _batch


def _jvp(primals: Any, tangents: Any, *, spec: KernelSpec) -> Any:
    del primals, tangents
    raise checks.unsupported(
        f"kernel {spec.name} cannot be differentiated automatically",
        hint="give it a derivative with jax.custom_vjp or jax.custom_jvp",
    )


_jax.primitive_jvps[kernel_call_p] = _jvp


def _lower(platform: str | None, ctx: Any, *operands: Any, spec: KernelSpec) -> Any:
    lower = execution.runtime(spec.name).lower_kernel_call
    return lower(ctx, *operands, spec=spec, platform=platform)


for _platform in (None, "cuda", "cpu"):
    _jax.register_lowering(kernel_call_p, functools.partial(_lower, _platform), platform=_platform)
