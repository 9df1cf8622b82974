"""Modules that differ from the library's in some lines: the differences, applied when imported.

python benchmarks/explicit_layouts --write folder    # the whole sources, to be changed there
python benchmarks/explicit_layouts --compare folder  # the differences, made anew

"""

from __future__ import annotations

import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType

FOLDER = pathlib.Path(__file__).parent
LIBRARY = "pallasite_hopper.ops"

ORIGINALS = {
    "dense": f"{LIBRARY}.dense.kernel",
    "epilogue": "pallasite_std.ops.dense.epilogue",
    "exchange": f"{LIBRARY}.exchange",
    "mixed": f"{LIBRARY}.mixed.kernel",
    "ragged_common": f"{LIBRARY}.ragged.common",
    "ragged": f"{LIBRARY}.ragged.kernel",
    "transposed_ragged": f"{LIBRARY}.ragged.transposed_kernel",
    "transposed_tiles": f"{LIBRARY}.ragged.transposed_tiles",
    "forward": f"{LIBRARY}.flash.forward",
    "backward_tiles": f"{LIBRARY}.flash.backward_tiles",
    "backward_rows": f"{LIBRARY}.flash.backward_rows",
    "backward_worker": f"{LIBRARY}.flash.backward_worker",
    "decode": f"{LIBRARY}.decode.kernel",
    "combine": f"{LIBRARY}.decode.combine",
}
"""For each module here that of the library."""

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def source(name: str) -> str:
    """The source of a module.

    Raises:
      ValueError: the library's module is not the one that the differences were made for.
    """
    return patched(_original(name), (FOLDER / f"{name}.diff").read_text(), name)


def _original(name: str) -> str:
    spec = importlib.util.find_spec(ORIGINALS[name])
    assert spec is not None and spec.origin is not None
    return pathlib.Path(spec.origin).read_text()


def patched(original: str, differences: str, name: str) -> str:
    """A text with unified differences applied.

    Lines may have moved since the differences were made: each group of changes is applied where
    its old lines are, after the group before it and nearest to where they were expected.

    Raises:
      ValueError: a line that is taken away or kept is another one in the text.
    """
    lines = original.splitlines(keepends=True)
    result: list[str] = []
    place = moved = 0
    for start, changes in _hunks(differences):
        old = [change[1:] for change in changes if change[0] in " -"]
        found = _nearest(lines, old, start + moved, place)
        if found is None:
            line = _first_difference(lines, old, start + moved)
            raise ValueError(
                f"{ORIGINALS.get(name, name)} has changed at line {line}:"
                f" carry the change over to {name}.diff"
            )
        result += lines[place:found]
        result += [change[1:] for change in changes if change[0] in " +"]
        place, moved = found + len(old), found - start
    return "".join(result + lines[place:])


def _nearest(lines: Sequence[str], old: list[str], expected: int, least: int) -> int | None:
    """The index nearest to the expected one, but not before the least, where old lines are."""
    if not old:
        return expected if least <= expected <= len(lines) else None
    places = (
        index
        for index in range(least, len(lines) - len(old) + 1)
        if lines[index : index + len(old)] == old
    )
    return min(places, key=lambda index: abs(index - expected), default=None)


def _first_difference(lines: Sequence[str], old: list[str], expected: int) -> int:
    """The number of the first line that is not the one that was expected there."""
    pairs = itertools.zip_longest(lines[expected : expected + len(old)], old)
    index = next((index for index, (is_, was) in enumerate(pairs) if is_ != was), 0)
    return expected + index + 1


def _hunks(differences: str) -> Iterator[tuple[int, Sequence[str]]]:
    """Where each group of changes begins, as an index of lines, and its lines."""
    lines = differences.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if _HUNK.match(line)]
    for number, end in itertools.pairwise([*starts, len(lines)]):
        header = _HUNK.match(lines[number])
        assert header is not None
        # Where nothing is taken away, the number is that of the line before.
        yield int(header[1]) - (header[2] != "0"), lines[number + 1 : end]


def write(folder: pathlib.Path) -> None:
    """Writes the sources of all modules."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ORIGINALS:
        (folder / f"{name}.py").write_text(source(name))


def compare(folder: pathlib.Path, target: pathlib.Path = FOLDER) -> None:
    """Makes the differences to the sources in a folder."""
    for name, original in ORIGINALS.items():
        old, new = _original(name), (folder / f"{name}.py").read_text()
        lines = difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            original,
            f"explicit_layouts.{name}",
            n=1,
        )
        (target / f"{name}.diff").write_text("".join(lines))


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the modules of this package that are given by differences."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __package__ or name not in ORIGINALS:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(_path(fullname)))
        spec.has_location = True
        return spec

    def get_source(self, fullname: str) -> str:
        return source(fullname.rpartition(".")[2])

    def get_code(self, fullname: str) -> CodeType:
        code = compile(self.get_source(fullname), _path(fullname), "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code


def _path(fullname: str) -> pathlib.Path:
    """What messages call the source, which is in no file."""
    return FOLDER / f"{fullname.rpartition('.')[2]}.py"


def install() -> None:
    """Lets the modules be imported."""
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.append(_Modules())
