"""``pl.kernel`` and ``pl.core_map`` over a GPU mesh: makes a :class:`KernelSpec` of the body."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl

from pallasite.plugin import InvalidTypeError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import CompilerParams, KernelSpec, Mesh, trace_kernel
from pallasite_std.front_ends.pallas_call import (
    Scratch,
    check_no_captured,
    source_location,
)
from pallasite_std.rewriting import evaluate


def mesh_kernel_spec(
    jaxprs: Sequence[Any],
    meshes: Sequence[Mesh],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    params: CompilerParams | None = None,
    *,
    name: str | None = None,
    input_output_aliases: Sequence[tuple[int, int]] = (),
    debug: bool = False,
) -> KernelSpec:
    """The kernel that an equation of Pallas stands for that maps a body over a mesh.

    Args:
      jaxprs: the body, alone; its inputs are references to inputs and outputs, then the scratch
        references.
      meshes: its mesh.
      in_avals, out_avals: array types of inputs and outputs.
      params: compiler parameters.
      name: the kernel's name, unless the mesh has one.
      input_output_aliases: pairs (input, output).
      debug: prints the jaxpr.

    Raises:
      UnsupportedError: several meshes at once, or a captured array.
      InvalidTypeError: compiler parameters of another backend.
    """
    if len(jaxprs) != 1 or len(meshes) != 1:
        raise UnsupportedError(
            "a kernel over several meshes at once", got=len(meshes), expected="one mesh"
        )
    (jaxpr,), (mesh,) = jaxprs, meshes
    location = source_location(jaxpr)
    if not isinstance(params, CompilerParams | None):
        raise InvalidTypeError(
            "the compiler_params of a kernel over a GPU mesh are those of another backend",
            got=type(params).__name__,
            expected="pallasite.gpu.CompilerParams(...)",
            location=location,
        )
    if jaxpr.consts:
        raise UnsupportedError("a body that captures arrays", location=location)
    operands = len(in_avals) + len(out_avals)
    scratch = [Scratch(variable.aval) for variable in jaxpr.invars[operands:]]
    axes = () if mesh.thread_name is None else (mesh.thread_name,)

    def run(gmem_refs: Sequence[Any], *scratch_refs: Any) -> None:
        evaluate(jaxpr, [*gmem_refs, *scratch_refs], purpose="a kernel over a mesh")

    def body(*gmem_refs: Any) -> None:
        if scratch:
            pl.run_scoped(functools.partial(run, gmem_refs), *scratch, collective_axes=axes)
        else:
            run(gmem_refs)

    spec, captured = trace_kernel(
        body,
        in_avals,
        [_jax.ShapedArray(aval.shape, aval.dtype) for aval in out_avals],
        name=mesh.kernel_name or name or jaxpr.debug_info.func_name,
        mesh=mesh,
        params=params or CompilerParams(),
        input_output_aliases=tuple(input_output_aliases),
        location=location,
        debug=debug,
    )
    check_no_captured(captured, location)
    return spec
