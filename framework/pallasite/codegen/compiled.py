"""The result of a compilation: everything about one kernel, for people and for executors."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from pallasite.errors import SourceLocation
from pallasite.launch import LaunchParameters as LaunchParameters
from pallasite.launch import ResourceReport as ResourceReport
from pallasite.lowering.layout_report import LayoutReport as LayoutReport
from pallasite.lowering.result import LoweredKernel as LoweredKernel
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True)
class Change:
    """A pass of a plugin that changed a kernel: stage, name, its plugin, and that with version."""

    stage: str
    name: str
    plugin: str
    label: str

    def __str__(self) -> str:
        return f"{self.stage} pass {self.name!r} of plugin {self.label}"

    @property
    def hint(self) -> str:
        """How to compile without it."""
        passes, plugins = "PALLASITE_DISABLE_PASSES", "PALLASITE_DISABLE_PLUGINS"
        return f"{passes}={self.name} or {plugins}={self.plugin} compiles without it"


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel, every stage of it as text, and how to launch it.

    Attributes:
      name: the kernel's name, which is that of its entry point in the PTX.
      target: what it was compiled for.
      launch: grid, block and cluster, shared memory and parameters.
      resources: shared memory, barriers and, once assembled, registers and spills.
      jaxpr: the body after the passes of stage ``jaxpr``, as text; None if it was not kept.
      mlir: the module after the passes of stage ``mlir``, as text; None if it was not kept.
      llvm: the LLVM IR before the passes of stage ``llvm``; None if it was not kept.
      ptx: the PTX.
      cubin: the machine code; None unless ``assemble`` was asked for.
      sass: the machine code as text; None unless ``disassemble`` was asked for.
      timings: pairs of a stage's name and its time in seconds, in their order.
      layouts: what layout inference chose and converts, and why; None under lane semantics, or if
        it was not kept.
      plugin_options: what the kernel gave plugins: plugin, option and its value as text.
      location: where the body is defined.
      changes: the passes of plugins that changed it.
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
    layouts: LayoutReport | None = None
    plugin_options: tuple[tuple[str, str, str], ...] = ()
    location: SourceLocation | None = None
    changes: tuple[Change, ...] = ()

    def attributed_errors(self) -> contextlib.AbstractContextManager[None]:
        """A ``with`` block whose errors have the kernel's line, and name what changed it."""
        from pallasite.codegen.changes import attributed_errors

        return attributed_errors(self.changes, self.name, self.location)

    def __getstate__(self) -> dict[str, Any]:
        """Its fields, all of them plain data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class ModuleText(bytes):
    """MLIR's bytecode of a module, whose text a call returns."""

    def __call__(self) -> str:
        from pallasite.ir.context import printed

        return printed(self)


class _Text:
    """A field with a text or report, which may be given by what makes it.

    That is called when it is read for the first time: printing takes long, and few read it.
    """

    def __init__(self, name: str):
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        text: Any = instance.__dict__[self._name]
        if callable(text):
            text = instance.__dict__[self._name] = text()
        return text

    def __set__(self, instance: Any, text: Any) -> None:
        instance.__dict__[self._name] = text


for _name in ("jaxpr", "mlir", "layouts"):
    setattr(CompiledKernel, _name, _Text(_name))
