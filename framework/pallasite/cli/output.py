"""What commands print and write: tables, JSON, and files that are never half-written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pallasite import files
from pallasite.errors import InvalidValueError, SourceLocation

GAP = "  "


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with aligned columns; columns of numbers align to the right, empty ones are left
    out."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = [
        (header, [row[number] for row in cells])
        for number, header in enumerate(headers)
        if any(row[number] for row in cells)
    ]
    lines = [""] * (len(cells) + 1)
    for header, column in columns:
        width = max(len(text) for text in (header, *column))
        right = all(text.replace(".", "", 1).isdigit() for text in column if text)
        for number, text in enumerate((header, *column)):
            lines[number] += (text.rjust(width) if right else text.ljust(width)) + GAP
    return "\n".join(line.rstrip() for line in lines)


def print_json(value: Any) -> None:
    """Prints a value as JSON for other programs."""
    print(json.dumps(value, indent=2))


def indented(text: str, by: int = 2) -> str:
    """The text with each line moved to the right."""
    return "\n".join(" " * by + line if line else line for line in text.splitlines())


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of one length with aligned columns, without headers; the last column stays ragged."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def relative_path(file: str) -> str:
    """A path from the present folder if the file is inside it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def location_text(location: SourceLocation | None) -> str:
    """``file:line``, with a path from the present folder if it is inside it; may be empty."""
    return "" if location is None else f"{relative_path(location.file)}:{location.line}"


def location_json(location: SourceLocation | None) -> dict[str, Any] | None:
    """File, line and function, for programs."""
    if location is None:
        return None
    return {"file": location.file, "line": location.line, "function": location.function}


def size(count: int) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def write(data: bytes, path: str | None) -> None:
    """Writes to a file, or to standard output for None and ``-``.

    A file is replaced as a whole when its content is complete, and keeps its permissions; what is
    not a regular file, such as a pipe, is written to directly.

    Raises:
      InvalidValueError: the file cannot be written.
    """
    if path is None or path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        files.write(path, data)
    except OSError as error:
        raise InvalidValueError(
            f"cannot write {path}: {error.strerror}", expected="a file in a folder that exists"
        ) from error
