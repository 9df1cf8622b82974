"""What JAX does with a kernel when it lowers a program: compile it, and call it on the platform.

The executor that serves the platform runs it; see :mod:`pallasite.runtime.executors`. It is made of
JAX operations that take the place of the kernel's equation, so kernels work wherever JAX lowers
programs: ``jax.jit`` (several kernels in one), ``jax.shard_map``, donated buffers, ahead-of-time
compilation, and the persistent compilation cache, since the same kernel always gives the same
program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from pallasite import _jax, plugins
from pallasite.errors import InvalidTypeError
from pallasite.extensions import LaunchRequest
from pallasite.language import checks
from pallasite.language.effects import communication_effect
from pallasite.language.interpretation import interpretation
from pallasite.language.kernel_call import is_mesh_kernel
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams
from pallasite.language.spec import KernelSpec
from pallasite.language.tracing import is_of_keys, words_type
from pallasite.launch import DeviceMesh
from pallasite.runtime.compiler import compile_kernel
from pallasite.runtime.executors import (
    check_device,
    find_executor,
    has_side_effects,
    interpreter,
    single_platform,
)
from pallasite.runtime.hidden_in_jax import placement_of, run_with_hidden
from pallasite.runtime.override import current
from pallasite.target_selection import local_compute_capability


def lower_kernel_call(
    ctx: Any, *operands: Any, spec: KernelSpec, platform: str | None = None
) -> Any:
    """The lowering rule of ``kernel_call_p``.

    Args:
      ctx: JAX's lowering context.
      *operands: the kernel's inputs.
      spec: the kernel.
      platform: what the program is lowered for, such as ``"cuda"``; None to ask JAX.

    Raises:
      ExecutionError: nothing can run kernels on this platform.
      PallasiteError: the kernel cannot be compiled.
    """
    with checks.errors_at(lambda: _jax.users_line(spec.location)):
        if platform is None:
            platform = single_platform(ctx.platforms or ctx.module_context.platforms, spec.name)
        check_operands(spec, [words_type(aval) for aval in ctx.avals_in])
        override = current()
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        request = LaunchRequest(
            platform=platform,
            side_effects=has_side_effects(spec),
            params=spec.params,
            device_mesh=_device_mesh(ctx),
            devices=tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None,
            ordered=communication_effect in ctx.tokens_in.effects(),
        )
        if spec.interpret is not None:
            run = interpreter(spec.interpret, spec.name, request)
        elif platform == "cpu" and override.run is not None:
            run = override.run
        else:
            run = find_executor(platform, spec.name, request)
        compiled = compile_kernel(
            spec, override.target, keep=False, device_mesh=request.device_mesh
        )
        if platform == "cuda" and spec.interpret is None:
            check_device(compiled.target, local_compute_capability(), spec.name)
        placement = placement_of(ctx, platform, compiled)
        run = functools.partial(run_with_hidden, run, compiled, placement, request)
        if any(map(is_of_keys, (*ctx.avals_in, *ctx.avals_out))):
            run = functools.partial(_with_words, run, tuple(ctx.avals_out))
        rule = mlir.lower_fun(run, multiple_results=True)
        return rule(ctx, *operands)


def _with_words(run: Callable[..., Any], results: Sequence[Any], *operands: Any) -> list[Any]:
    """What runs a kernel, of random keys by their words."""
    given = [jax.random.key_data(one) if is_of_keys(one) else one for one in operands]
    return [
        jax.random.wrap_key_data(one, impl=_jax.key_implementation(aval.dtype))
        if is_of_keys(aval)
        else one
        for one, aval in zip(run(*given), results, strict=True)
    ]


def lower_pallas_call(ctx: Any, *operands: Any, **params: Any) -> Any:
    """The lowering rule of ``pl.pallas_call`` with our :class:`CompilerParams`."""
    spec = spec_of_pallas_call(params)
    mode = interpretation().params(None)
    if mode is not None:
        spec = spec.replace(interpret=mode)
    return lower_kernel_call(ctx, *operands, spec=spec)


def lower_pallas_call_elsewhere(
    ctx: Any, *operands: Any, otherwise: Callable[..., Any], platform: str | None, **params: Any
) -> Any:
    """As :func:`lower_pallas_call`, where Pallas does not know our :class:`CompilerParams`.

    Args:
      ctx: JAX's lowering context.
      *operands: the kernel's inputs.
      otherwise: Pallas's own rule, for kernels that are not ours, and for its platform "gpu".
      platform: the platform of the rule; None for that of the program.
      **params: those of the equation.
    """
    interpret = params["interpret"]
    understood = bool(interpret) and interpretation().understands(interpret)
    if understood and params["compiler_params"] is None:
        params["compiler_params"] = CompilerParams()
    ours = isinstance(params["compiler_params"], CompilerParams) and (not interpret or understood)
    platforms = [platform] if platform else ctx.platforms or ctx.module_context.platforms
    if not ours or set(platforms) & {"cuda", "rocm"}:
        return otherwise(ctx, *operands, **params)
    spec = spec_of_pallas_call(params).replace(interpret=interpretation().params(interpret))
    return lower_kernel_call(ctx, *operands, spec=spec, platform=platform)


def lower_mesh_kernel(
    ctx: Any, *operands: Any, otherwise: Callable[..., Any], platform: str | None, **params: Any
) -> Any:
    """The lowering rule of ``pl.kernel`` and ``pl.core_map`` with our :class:`Mesh`.

    Kernels over other meshes go to Pallas's own rule, ``otherwise``.
    """
    if not is_mesh_kernel(params):
        return otherwise(ctx, *operands, **params)
    spec = spec_of_mesh_kernel(params, ctx.avals_in, ctx.avals_out)
    return lower_kernel_call(ctx, *operands, spec=spec, platform=platform)


def spec_of_mesh_kernel(
    params: dict[str, Any], avals_in: Sequence[Any], avals_out: Sequence[Any]
) -> KernelSpec:
    """The kernel of a ``pl.kernel`` or ``pl.core_map`` equation with our :class:`Mesh`."""
    return _mesh_kernel_spec(
        tuple(params["jaxprs"]),
        tuple(params["meshes"]),
        tuple((aval.shape, aval.dtype) for aval in avals_in),
        tuple((aval.shape, aval.dtype) for aval in avals_out),
        params["compiler_params"],
        params["name"],
        tuple(params["input_output_aliases"].items()),
        bool(params["debug"]),
    )


@functools.lru_cache(maxsize=1024)
def _mesh_kernel_spec(
    jaxprs: tuple[Any, ...],
    meshes: tuple[Mesh, ...],
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
    compiler_params: CompilerParams | None,
    name: str | None,
    aliases: tuple[tuple[int, int], ...],
    debug: bool,
) -> KernelSpec:
    make_spec = plugins.manager().named("front_ends", "mesh_kernel")
    spec: KernelSpec = make_spec(
        jaxprs,
        meshes,
        [_jax.ShapedArray(*one) for one in inputs],
        [_jax.ShapedArray(*one) for one in outputs],
        compiler_params,
        name=name,
        input_output_aliases=aliases,
        debug=debug,
    )
    return spec


def spec_of_pallas_call(params: dict[str, Any]) -> KernelSpec:
    """The kernel of a ``pl.pallas_call`` equation with our :class:`CompilerParams`."""
    return _pallas_call_spec(
        params["jaxpr"],
        params["grid_mapping"],
        params["compiler_params"],
        params.get("name"),
        tuple(params["input_output_aliases"]),
        bool(params["debug"]),
    )


@functools.lru_cache(maxsize=1024)
def _pallas_call_spec(
    jaxpr: Any,
    grid_mapping: Any,
    compiler_params: CompilerParams,
    name: str | None,
    aliases: tuple[tuple[int, int], ...],
    debug: bool,
) -> KernelSpec:
    make_spec = plugins.manager().named("front_ends", "pallas_call")
    spec: KernelSpec = make_spec(
        jaxpr, grid_mapping, compiler_params, name=name, input_output_aliases=aliases, debug=debug
    )
    return spec


def check_operands(spec: KernelSpec, avals: Sequence[Any]) -> None:
    """Compares the types of a call's operands with those that the kernel was traced for.

    Raises:
      InvalidTypeError: names the first operand that differs.
    """
    expected = spec.in_avals
    if len(avals) != len(expected):
        raise InvalidTypeError(
            f"kernel {spec.name!r} is called with the wrong number of operands",
            got=len(avals),
            expected=str(len(expected)),
        )
    for position, (given, wanted) in enumerate(zip(avals, expected, strict=True)):
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise InvalidTypeError(
                f"operand {position} of kernel {spec.name!r} has the wrong type",
                got=given.str_short(),
                expected=wanted.str_short(),
            )


def _device_mesh(ctx: Any) -> DeviceMesh:
    """The device mesh around the call."""
    context = ctx.module_context.axis_context
    manual: frozenset[Hashable] = getattr(context, "manual_axes", frozenset())
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return DeviceMesh()
    return DeviceMesh(tuple(mesh.shape.items()), tuple(one for one in mesh.shape if one in manual))


def kernel_in_equation(equation: Any) -> KernelSpec | None:
    """The kernel of an equation that calls one, else None."""
    if "spec" in equation.params and isinstance(equation.params["spec"], KernelSpec):
        spec: KernelSpec = equation.params["spec"]
        return spec
    params = equation.params
    if equation.primitive is _jax.mpmd_map_p and is_mesh_kernel(equation.params):
        avals = [[atom.aval for atom in atoms] for atoms in (equation.invars, equation.outvars)]
        return spec_of_mesh_kernel(equation.params, *avals)
    if equation.primitive is _jax.pallas_call_p and isinstance(
        params.get("compiler_params"), CompilerParams
    ):
        return spec_of_pallas_call(params)
    return None
