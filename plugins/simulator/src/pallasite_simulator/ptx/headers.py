"""Headers of functions: names, parameters and performance directives (PTX ISA 11.1 to 11.4)."""

from __future__ import annotations

import dataclasses

from pallasite_simulator.ptx.constants import plain_integer
from pallasite_simulator.ptx.declarations import read_parameters, skip_attribute
from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.syntax import Position, Register, Variable

# How many numbers a directive has at least and at most (PTX ISA 11.4).
_DIRECTIVES = {
    ".maxnreg": (1, 1),
    ".maxntid": (1, 3),
    ".reqntid": (1, 3),
    ".minnctapersm": (1, 1),
    ".maxnctapersm": (1, 1),
    ".reqnctapercluster": (1, 3),
    ".maxclusterrank": (1, 1),
    ".explicitcluster": (0, 0),
    ".blocksareclusters": (0, 0),
    ".noreturn": (0, 0),
    ".abi_preserve": (1, 1),
    ".abi_preserve_control": (1, 1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What stands before the body of a function.

    Attributes:
      body: index of the ``{``, or None for a declaration.
      names: the parameters and results with the indices of their names.
    """

    name: str
    entry: bool
    parameters: tuple[Variable | Register, ...]
    results: tuple[Variable | Register, ...]
    directives: dict[str, tuple[int, ...]]
    position: Position
    body: int | None
    names: tuple[tuple[Variable | Register, int], ...]


def read_pragma(reader: Reader) -> None:
    """Skips ``.pragma "nounroll";``: pragmas are hints (PTX ISA 11.4, .pragma)."""
    reader.expect(".pragma")
    reader.string()
    while reader.accept(","):
        reader.string()
    reader.expect(";")


def read_directives(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Reads ``.reqntid 128`` and the like by their names; sizes that are left out are 1."""
    directives: dict[str, tuple[int, ...]] = {}
    while True:
        word = reader.words[reader.index]
        if word == ".pragma":
            read_pragma(reader)
            continue
        if word not in _DIRECTIVES:
            return directives
        at = reader.index
        if word[1:] in directives:
            reader.fail(f"{word} is given twice", index=at)
        reader.index += 1
        least, most = _DIRECTIVES[word]
        numbers: list[int] = []
        if least:
            numbers.append(plain_integer(reader, "a number"))
            while reader.accept(","):
                numbers.append(plain_integer(reader, "a number"))
        if len(numbers) > most:
            reader.fail(f"{word} takes at most {most} numbers", index=at)
        directives[word[1:]] = (*numbers, *[1] * (most - len(numbers)))


def read_header(reader: Reader, external: bool) -> Header:
    """Reads a function from ``.entry`` or ``.func`` to behind its body or its semicolon.

    After ``.extern`` the semicolon may be missing, and there cannot be a body.
    """
    position = reader.position()
    entry = reader.next() == ".entry"
    results: list[tuple[Variable | Register, int]] = []
    if not entry:
        if reader.words[reader.index] == ".attribute":
            skip_attribute(reader, (".unified",))
        if reader.words[reader.index] == "(":
            results = read_parameters(reader, entry=False)
    name = reader.name("the name of a function")
    parameters: list[tuple[Variable | Register, int]] = []
    if reader.words[reader.index] == "(":
        parameters = read_parameters(reader, entry=entry)
    directives = read_directives(reader)
    body: int | None = None
    if reader.words[reader.index] == "{":
        if external:
            reader.fail(f"a body of the .extern function {name!r}")
        body = reader.index
        reader.index = reader.closing[body] + 1
    elif not reader.accept(";") and not (external and reader.words[reader.index][:1] in (".", "")):
        reader.fail(
            f"expected the body of {name!r} or ';', found {reader.found()}",
            expected="one of " + ", ".join(_DIRECTIVES),
        )
    return Header(
        name=name,
        entry=entry,
        parameters=tuple(one for one, _ in parameters),
        results=tuple(one for one, _ in results),
        directives=directives,
        position=position,
        body=body,
        names=(*parameters, *results),
    )
