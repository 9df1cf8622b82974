"""Lines of the user's source: ``.file``, ``.loc`` and ``.debug_str`` (PTX ISA 11.5)."""

from __future__ import annotations

import os.path

from pallasite.plugin import SourceLocation
from pallasite_simulator.ptx.constants import literal, plain_integer
from pallasite_simulator.ptx.lexer import Reader


def read_file(reader: Reader) -> tuple[int, str]:
    """Reads ``.file 1 "path" [, time stamp, size];`` and gives the number and the path.

    A directory may stand before the name, as assemblers other than ptxas take it.
    """
    reader.expect(".file")
    number = plain_integer(reader, "the number of a file")
    path = reader.string()
    if reader.words[reader.index][:1] == '"':
        path = os.path.join(path, reader.string())
    if reader.accept(","):
        plain_integer(reader, "a time stamp")
        reader.expect(",")
        plain_integer(reader, "the size of a file")
    return number, path


def collect_files(reader: Reader) -> dict[int, str]:
    """All files that the module names: LLVM names them after their use."""
    files: dict[int, str] = {}
    at = reader.index
    words = reader.words
    start = 0
    while True:
        try:
            reader.index = words.index(".file", start)
        except ValueError:
            break
        begin = reader.index
        number, path = read_file(reader)
        if files.setdefault(number, path) != path:
            reader.fail(f"file {number} is declared twice", index=begin)
        start = reader.index
    reader.index = at
    return files


def read_section(reader: Reader) -> dict[str, str]:
    """Skips ``.section .debug_info { ... }``, but gives the strings of ``.debug_str`` by label."""
    reader.expect(".section")
    if reader.words[reader.index][:1] != ".":
        reader.fail(f"expected the name of a section, found {reader.found()}")
    name = reader.next()
    opening = reader.index
    reader.skip_block()
    strings: dict[str, str] = {}
    if name == ".debug_str":
        labels = reader.labels.get(opening, [])
        ends = [*labels[1:], reader.index - 1]
        for start, end in zip(labels, ends, strict=False):
            values = (literal(word) for word in reader.words[start + 2 : end])
            data = bytes(value[0].value & 0xFF for value in values if value is not None)
            strings[reader.words[start]] = data.split(b"\0", 1)[0].decode(errors="replace")
    return strings


class Locations:
    """Reads ``.loc`` and gives the source lines that they stand for.

    Args:
      reader: at ``.loc`` whenever :meth:`read` is called.
      files: the names of files by their numbers.
      strings: the strings of ``.debug_str`` by their labels.
    """

    def __init__(self, reader: Reader, files: dict[int, str], strings: dict[str, str]):
        self._reader = reader
        self._files = files
        self._strings = strings
        self._made: dict[tuple[int, int, int, str], SourceLocation] = {}

    def read(self, previous: SourceLocation | None) -> SourceLocation | None:
        """Reads one ``.loc``.

        The inlined line itself is given, not where it was inlined. Line 0 stands for code without a
        line of its own and keeps ``previous``; a file that is not declared gives None.
        """
        reader = self._reader
        reader.expect(".loc")
        number = plain_integer(reader, "the number of a file")
        line = plain_integer(reader, "a line")
        column = plain_integer(reader, "a column")
        function = ""
        if reader.accept(","):
            if not reader.accept("function_name"):
                reader.fail(f"expected 'function_name', found {reader.found()}")
            label = reader.name("a label of .debug_str")
            if reader.accept("+"):
                plain_integer(reader, "an offset")
            else:
                function = self._strings.get(label, "")
            reader.expect(",")
            if not reader.accept("inlined_at"):
                reader.fail(f"expected 'inlined_at', found {reader.found()}")
            for what in ("the number of a file", "a line", "a column"):
                plain_integer(reader, what)
        if line == 0:
            return previous
        if number not in self._files:
            return None
        key = (number, line, column, function)
        if key not in self._made:
            self._made[key] = SourceLocation(self._files[number], line, column, function)
        return self._made[key]
