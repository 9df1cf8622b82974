"""Source locations of MLIR operations: for messages, and as LLVM debug information.

The debug information only serves ``.loc`` and ``.file`` directives; it describes neither variables
nor types, so it adds no debug section to the PTX.
"""

from __future__ import annotations

import os
import re
from typing import Any

from jaxlib.mlir import ir

from pallasite.codegen.translation.constants import escape
from pallasite.errors import SourceLocation


def source_location(location: Any) -> SourceLocation | None:
    """The file, line and column of an MLIR location, or None when it has none.

    Of a call-site location the callee counts, of a fused one the first part that has a file, and of
    a named one its child; the innermost name becomes the function's name.
    """
    return _locate(location, "")


def _locate(location: Any, function: str) -> SourceLocation | None:
    match type(location).__name__:
        case "FileLineColLoc":
            return SourceLocation(
                location.filename, location.start_line, location.start_col, function
            )
        case "Location":
            # Diagnostics have locations of the base class.
            precise = ir.Location.from_attr(location.attr, location.context)
            return None if type(precise) is type(location) else _locate(precise, function)
        case "NameLoc":
            return _locate(location.child_loc, location.name_str)
        case "CallSiteLoc":
            return _locate(location.callee, function) or _locate(location.caller, function)
        case "FusedLoc":
            for part in location.locations:
                found = _locate(part, function)
                if found is not None:
                    return found
    return None


def location_in_llvm(line: str, llvm: str) -> SourceLocation | None:
    """The source position that ``!dbg`` in a line of LLVM IR text gives, or None."""
    node = re.search(r"!dbg (!\d+)", line)
    position = node and re.search(
        rf"^{node[1]} = !DILocation\(line: (\d+), column: (\d+), scope: (!\d+)", llvm, re.MULTILINE
    )
    file = position and re.search(rf"^{position[3]} = .*file: (!\d+)", llvm, re.MULTILINE)
    name = file and re.search(
        rf'^{file[1]} = !DIFile\(filename: "(.*?)", directory: "(.*?)"', llvm, re.MULTILINE
    )
    if not position or not name:
        return None
    return SourceLocation(os.path.join(name[2], name[1]), int(position[1]), int(position[2]))


class DebugInfo(dict[Any, str]):
    """Debug-location suffix of each MLIR location attribute: ``info[location.attr]``.

    One instance serves one function: ``subprogram`` is its scope, and operations without a location
    get that of the function.
    """

    def __init__(self, metadata: Metadata, subprogram: str, where: SourceLocation):
        super().__init__()
        self._metadata = metadata
        self.subprogram = subprogram
        self._where = where

    def __missing__(self, attribute: Any) -> str:
        where = source_location(ir.Location.from_attr(attribute, attribute.context))
        scope = self.subprogram
        line, column = self._where.line, 0
        if where is not None:
            line, column = where.line, where.column
            if where.file != self._where.file:
                scope = self._metadata.block_file(self.subprogram, where.file)
        node = self._metadata.add(
            f"!DILocation(line: {line}, column: {min(column, 65535)}, scope: {scope})"
        )
        text = self[attribute] = f", !dbg {node}"
        return text


class Metadata:
    """The metadata of one module, as nodes numbered from ``!0``; equal nodes are shared."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self._known: dict[str, str] = {}
        self.unit = ""

    def add(self, text: str) -> str:
        """The name of a node with this text."""
        name = self._known.get(text)
        if name is None:
            name = self._known[text] = f"!{len(self.nodes)}"
            self.nodes.append(text)
        return name

    def file(self, path: str) -> str:
        """The node of a source file."""
        directory, name = os.path.split(path)
        return self.add(f'!DIFile(filename: "{escape(name)}", directory: "{escape(directory)}")')

    def block_file(self, subprogram: str, path: str) -> str:
        """A scope inside a function whose lines are those of another file."""
        file = self.file(path)
        return self.add(f"!DILexicalBlockFile(scope: {subprogram}, file: {file}, discriminator: 0)")

    def function(self, name: str, where: SourceLocation) -> DebugInfo:
        """Describes a function and returns the locations of its operations."""
        file = self.file(where.file)
        if not self.unit:
            self.unit = self.distinct(
                f'distinct !DICompileUnit(language: DW_LANG_C, file: {file}, producer: "pallasite",'
                " isOptimized: true, runtimeVersion: 0, emissionKind: DebugDirectivesOnly)"
            )
        kind = self.add("!DISubroutineType(types: !{})")
        subprogram = self.distinct(
            f'distinct !DISubprogram(name: "{escape(name)}", scope: {file}, file: {file},'
            f" line: {where.line}, type: {kind}, scopeLine: {where.line},"
            f" spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: {self.unit})"
        )
        return DebugInfo(self, subprogram, where)

    def lines(self) -> list[str]:
        """The text of all nodes and of the named metadata that LLVM needs to use them."""
        lines = [f"!{number} = {text}" for number, text in enumerate(self.nodes)]
        if self.unit:
            flag = f"!{len(self.nodes)}"
            lines += [
                f'{flag} = !{{i32 2, !"Debug Info Version", i32 3}}',
                f"!llvm.module.flags = !{{{flag}}}",
                f"!llvm.dbg.cu = !{{{self.unit}}}",
            ]
        return lines

    def distinct(self, text: str) -> str:
        """The name of a new node, even if there is one with the same text."""
        self.nodes.append(text)
        return f"!{len(self.nodes) - 1}"

    def loop(self, option: str) -> str:
        """The name of a new loop node, which refers to itself, with one option."""
        node = self.add(option)
        return self.distinct(f"distinct !{{!{len(self.nodes)}, {node}}}")
