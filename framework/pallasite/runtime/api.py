"""``pallasite.compile`` and ``pallasite.compile_all``: the kernels of a JAX function, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallasite import _jax, forks
from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import InvalidValueError
from pallasite.language.spec import KernelSpec
from pallasite.launch import DeviceMesh
from pallasite.runtime.compiler import compile_kernel
from pallasite.runtime.jax_lowering import kernel_in_equation
from pallasite.target_selection import traced_for
from pallasite.targets import Target


def compile(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    assemble: bool = False,
    disassemble: bool = False,
    **kwargs: Any,
) -> CompiledKernel:
    """Compiles the one kernel that a function calls; needs no GPU and runs nothing.

    Args:
      fn: a kernel, or any function that JAX can trace, jitted or not.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct``.
      target: what to compile for; by default what the kernel's ``CompilerParams`` or else the
        configuration says.
      assemble: whether to make machine code and count registers; needs ``ptxas``.
      disassemble: whether to show machine code as text; implies ``assemble``.
      **kwargs: further arguments of ``fn``.

    Raises:
      InvalidValueError: the function calls no kernel, or several different ones.
      PallasiteError: the kernel cannot be compiled.
    """
    kernels = compile_all(
        fn, *args, target=target, assemble=assemble, disassemble=disassemble, **kwargs
    )
    if len(kernels) > 1:
        raise InvalidValueError(
            f"{_name(fn)} calls {len(kernels)} different kernels",
            got=", ".join(kernel.name for kernel in kernels),
            expected="one",
            hint="use pallasite.compile_all, or compile each kernel on its own",
        )
    return kernels[0]


def compile_all(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    assemble: bool = False,
    disassemble: bool = False,
    **kwargs: Any,
) -> list[CompiledKernel]:
    """Compiles all kernels that a function calls; needs no GPU and runs nothing.

    The arguments are those of :func:`compile`.

    Returns:
      The kernels in the order of their first call; calls of the same kernel count once.

    Raises:
      InvalidValueError: the function calls no kernel.
      PallasiteError: a kernel cannot be compiled.
    """
    # Operations choose their implementation while they are traced.
    with forks.unforked(), traced_for(target):
        traced = (fn if hasattr(fn, "trace") and hasattr(fn, "lower") else jax.jit(fn)).trace(
            *args, **kwargs
        )
    found: dict[int, CompiledKernel] = {}
    for spec, device_mesh in _kernels(traced.jaxpr, DeviceMesh()):
        kernel = compile_kernel(
            spec, target, assemble=assemble, disassemble=disassemble, device_mesh=device_mesh
        )
        found.setdefault(id(kernel), kernel)
    if not found:
        raise InvalidValueError(
            f"{_name(fn)} calls no kernel",
            expected="a call of pallasite.gpu.kernel, or of pl.pallas_call with"
            " compiler_params=pallasite.CompilerParams(...), or of pl.kernel with"
            " mesh=pallasite.gpu.Mesh(...)",
        )
    return list(found.values())


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def _kernels(jaxpr: Any, device_mesh: DeviceMesh) -> Iterator[tuple[KernelSpec, DeviceMesh]]:
    """The kernels called in a jaxpr and inside its equations, with the device mesh around each."""
    for equation in jaxpr.eqns:
        spec = kernel_in_equation(equation)
        if spec is not None:
            yield spec, device_mesh
            continue
        inside = device_mesh
        if equation.primitive.name == "shard_map":
            shape, manual = equation.params["mesh"].shape, equation.params["newly_manual_axes"]
            inside = DeviceMesh(
                tuple(shape.items()), (*device_mesh.manual, *sorted(manual, key=str))
            )
        for inner in _jax.jaxprs_in_params(equation.params):
            yield from _kernels(inner, inside)
