"""The whole of code generation: from a lowered kernel to PTX and, on request, machine code."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from pallasite import plugins
from pallasite.codegen import ptx as ptx_emission
from pallasite.codegen.assembler import Assembly
from pallasite.codegen.assembler import assemble as assemble_ptx
from pallasite.codegen.assembler import disassemble as disassemble_cubin
from pallasite.codegen.changes import refused_first
from pallasite.codegen.compiled import CompiledKernel, LoweredKernel, ModuleText
from pallasite.codegen.llvm_ir import translate
from pallasite.errors import CompilationError
from pallasite.ir.context import bytecode
from pallasite.known_plugins import is_own
from pallasite.passes.pipeline import PassContext, run_stage
from pallasite.plugin_values import NOTED


def compile_lowered(
    lowered: LoweredKernel,
    *,
    assemble: bool = False,
    disassemble: bool = False,
    keep: bool = True,
    context: PassContext | None = None,
) -> CompiledKernel:
    """Compiles a lowered kernel to PTX, and further if asked.

    The passes of the stages ``mlir``, ``llvm`` and ``ptx`` run; those on MLIR change the module of
    ``lowered``.

    Args:
      lowered: what the lowering returned.
      assemble: whether to make machine code and count registers.
      disassemble: whether to show machine code as text; implies ``assemble``.
      keep: whether the result holds the text of the jaxpr, the MLIR, the LLVM IR and the layouts.
      context: the context of the jaxpr passes, whose timings are continued; by default a new one.

    Raises:
      CompilationError: a stage refuses the kernel; names the source line where it is known, or
        there is no assembler.
    """
    if context is None:
        context = PassContext(lowered.name, lowered.target, lowered.options)
    target = lowered.target
    with lowered.module.context:
        module = run_stage("mlir", lowered.module, context)
        mlir: Any = ModuleText(bytecode(module)) if keep else None
        with context.timed("translate"):
            llvm = context.llvm = translate(module)
    with contextlib.ExitStack() as stack:
        separate = _separate_llvm(context, stack)
        with context.timed("llvm-parse"):
            if separate is not None:
                separate.read(llvm)
            llvm_module = stack.enter_context(ptx_emission.parsed(llvm))
        llvm_module = run_stage("llvm", llvm_module, context)
        with context.timed("ptx-emit"):
            separate = separate or _separate_llvm(context, stack)
            ptx = ptx_emission.emit(llvm_module, target, separate)
    ptx = run_stage("ptx", ptx, context)
    resources, cubin, sass = lowered.resources, None, None
    if assemble or disassemble:
        with context.timed("ptxas"):
            assembly = _assemble(ptx, context)
        resources, cubin = assembly.add_to(resources), assembly.cubin
    if cubin is not None and disassemble:
        with context.timed("disassemble"):
            sass = disassemble_cubin(cubin)
        context.dump("sass", "sass", lambda: sass or "")
    jaxpr: Any = lowered.jaxpr.__str__ if keep and lowered.jaxpr is not None else None
    layouts: Any = None
    if keep and lowered.inference is not None:
        report = plugins.manager().implementation("layout_report")
        layouts = functools.partial(report, lowered.inference)
    return CompiledKernel(
        name=lowered.name,
        target=target,
        launch=lowered.launch,
        resources=resources,
        jaxpr=jaxpr,
        mlir=mlir,
        llvm=llvm if keep else None,
        ptx=ptx,
        cubin=cubin,
        sass=sass,
        timings=tuple(context.timings),
        layouts=layouts,
        plugin_options=_plugin_options(lowered),
        location=context.spec and context.spec.location,
        changes=tuple(context.changes),
    )


def _separate_llvm(context: PassContext, stack: contextlib.ExitStack) -> Any:
    """LLVM in a process of its own, which code of others may end; None if there is none."""
    changed = {one.stage for one in context.changes if not is_own(one.plugin)}
    if not any((NOTED.get() or {}).values()) and changed.isdisjoint(("mlir", "llvm")):
        return None
    start = plugins.manager().implementation("separate_llvm")
    return stack.enter_context(start(context.kernel, ptx_emission.settings(context.target)))


def _assemble(ptx: str, context: PassContext) -> Assembly:
    """Machine code of a kernel; an error names the pass of a plugin that left what is refused."""
    try:
        return assemble_ptx(ptx, context.kernel)
    except CompilationError as error:
        found = refused_first(error, context.ptx, lambda text: assemble_ptx(text, context.kernel))
        if found is None:
            context.changes[:] = [one for one in context.changes if one.stage != "ptx"]
        raise found or error from None


def _plugin_options(lowered: LoweredKernel) -> tuple[tuple[str, str, str], ...]:
    given = getattr(lowered.options, "plugin_options", {})
    return tuple(
        (plugin, name, repr(value))
        for plugin, values in given.items()
        for name, value in values.items()
    )
