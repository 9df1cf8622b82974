"""MLIR to LLVM IR: :func:`translate` writes a module of ``llvm.func`` as LLVM IR text."""

from __future__ import annotations

import functools
from typing import Any

from pallasite import plugins
from pallasite.codegen.translation.arith import ARITH
from pallasite.codegen.translation.assembly import ASSEMBLY
from pallasite.codegen.translation.control import CONTROL
from pallasite.codegen.translation.emitter import Emitter, HandlerTable
from pallasite.codegen.translation.functions import (
    ATTRIBUTE_GROUPS,
    declare,
    define,
    global_variable,
)
from pallasite.codegen.translation.llvm_ops import LLVM
from pallasite.codegen.translation.locations import Metadata, source_location
from pallasite.codegen.translation.memory import MEMORY
from pallasite.codegen.translation.types import TypeTable, name_wide_structures
from pallasite.conflicts import unique
from pallasite.errors import CompilationError, PallasiteError, PluginError, SourceLocation
from pallasite.extensions import Translation
from pallasite.registry import Registry

_TABLES = (ARITH, CONTROL, LLVM, ASSEMBLY, MEMORY)

DEVICE_TRIPLE = "nvptx64-nvidia-cuda"
DATA_LAYOUTS = {
    DEVICE_TRIPLE: "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64",
}
"""Data layouts by triple; without the right one LLVM assumes wrong default alignments."""


def translate(
    module: Any,
    *,
    triple: str = DEVICE_TRIPLE,
    data_layout: str | None = None,
    debug_info: bool = True,
) -> str:
    """Writes a verified MLIR module as LLVM IR text.

    Args:
      module: an ``ir.Module`` of ``llvm.func`` and ``llvm.mlir.global``, with bodies of arith,
        scf, llvm and what plugins translate.
      triple: the target triple; another one than the default is for tests on the host.
      data_layout: data layout string; needed for a triple that is not in ``DATA_LAYOUTS``.
      debug_info: whether operations keep their source locations.

    Raises:
      CompilationError: an operation, type or constant has no translation; names it and its line.
    """
    handlers = _handlers(plugins.registry())
    types = TypeTable()
    metadata = Metadata()
    device = triple.startswith("nvptx")
    layout = data_layout or DATA_LAYOUTS.get(triple)
    head = [f'target triple = "{triple}"']
    if layout is not None:
        head.insert(0, f'target datalayout = "{layout}"')
    lines: list[str] = []
    for operation in module.body.operations:
        try:
            name = operation.operation.name
            if name == "llvm.mlir.global":
                lines.append(global_variable(operation, types))
            elif name == "llvm.func" and not operation.regions[0].blocks:
                lines.append(declare(operation, types))
            elif name == "llvm.func":
                lines += _function(operation, handlers, types, metadata, device, debug_info)
            else:
                raise CompilationError(
                    f"operation {name!r} at the top of the module",
                    expected="llvm.func and llvm.mlir.global",
                )
        except PallasiteError as error:
            raise error.at(source_location(operation.location)) from None
    lines += ATTRIBUTE_GROUPS
    lines += metadata.lines()
    lines.append("")
    return "\n".join([*head, name_wide_structures(lines, types)])


@functools.lru_cache(maxsize=16)
def _handlers(registry: Registry) -> HandlerTable:
    own = [
        Translation(operation=name, translate=handler, plugin=plugins.CORE)
        for table in _TABLES
        for name, handler in table.items()
    ]
    found = unique(
        "translations of operation",
        [*own, *registry.translations.values()],
        lambda one: one.operation,
    )
    plain = (plugins.CORE, plugins.STANDARD)
    return HandlerTable(
        {
            name: one.translate if one.plugin in plain else functools.partial(_translate, one)
            for name, one in found.items()
        }
    )


def _translate(translation: Translation, emitter: Any, operation: Any) -> None:
    """Translates an operation by a plugin's function, which has to bind all results."""
    translation.translate(emitter, operation)
    if any(result not in emitter.values for result in operation.operation.results):
        plugin = plugins.manager().label(translation.plugin)
        raise PluginError(
            f"pallasite_translations of plugin {plugin}: the translation of"
            f" {translation.operation} does not bind its result"
        )


def _function(
    operation: Any,
    handlers: HandlerTable,
    types: TypeTable,
    metadata: Metadata,
    device: bool,
    debug_info: bool,
) -> list[str]:
    debug = None
    if debug_info:
        where = source_location(operation.location) or _first_location(operation)
        if where is not None:
            debug = metadata.function(operation.attributes["sym_name"].value, where)
    emitter = Emitter(handlers, types, debug, metadata, device)
    define(operation, emitter, debug.subprogram if debug is not None else None)
    return emitter.lines


def _first_location(operation: Any) -> SourceLocation | None:
    """The first location in a function that has a file."""
    for block in operation.regions[0].blocks:
        for one in block.operations:
            found = source_location(one.location)
            if found is not None:
                return found
    return None
