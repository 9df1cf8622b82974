"""Cubins, which are ELF files: their sections and symbols, to compare with what ptxas made."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
from pathlib import Path

import pytest
from tests import tool_results

from pallasite.codegen.tools import find_tool

_NO_BITS = 8


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Section contents by name, and (section, offset, size) of each symbol by name."""

    sections: dict[str, bytes]
    symbols: dict[str, tuple[str, int, int]]

    def contents(self, symbol: str) -> bytes:
        """The initial contents of a variable."""
        section, offset, size = self.symbols[symbol]
        return self.sections[section][offset : offset + size]

    def code(self) -> dict[str, bytes]:
        """The machine code of each function."""
        return {name: data for name, data in self.sections.items() if name.startswith(".text.")}


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def read_cubin(data: bytes) -> Cubin:
    table_offset = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, table_offset + number * size)
        for number in range(count)
    ]
    contents = [
        bytes(header[5]) if header[1] == _NO_BITS else data[header[4] : header[4] + header[5]]
        for header in headers
    ]
    names = [_text(contents[names_index], header[0]) for header in headers]
    symbols: dict[str, tuple[str, int, int]] = {}
    strings, table = contents[names.index(".strtab")], contents[names.index(".symtab")]
    for name, _, _, section, value, length in struct.iter_unpack("<IBBHQQ", table):
        if 0 < section < count:
            symbols[_text(strings, name)] = (names[section], value, length)
    return Cubin(dict(zip(names, contents, strict=True)), symbols)


def ptxas(
    ptx: str, directory: Path, target: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs ptxas on a module; where there is none the test is skipped."""
    assembler = find_tool("ptxas").path
    if assembler is None:
        pytest.skip("ptxas is not installed")
    (directory / "module.ptx").write_text(ptx)
    command = [assembler, f"-arch={target}", *options, "-o", "module.cubin", "module.ptx"]
    return tool_results.run(command, directory)


def assemble(ptx: str, directory: Path, target: str = "sm_90a", *options: str) -> Cubin:
    """What ptxas makes of a module, which it must accept."""
    result = ptxas(ptx, directory, target, *options)
    assert result.returncode == 0, result.stderr
    return read_cubin((directory / "module.cubin").read_bytes())
