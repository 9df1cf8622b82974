"""Functions: headers and bodies (PTX ISA 11.1 to 11.4)."""

from __future__ import annotations

import dataclasses
import functools

from pallasite_simulator.ptx.constants import plain_integer
from pallasite_simulator.ptx.declarations import (
    VARIABLE_SPACES,
    read_parameters,
    read_registers,
    read_variables,
    skip_attribute,
)
from pallasite_simulator.ptx.lexer import Reader, is_name
from pallasite_simulator.ptx.locations import Locations
from pallasite_simulator.ptx.operands import Operands
from pallasite_simulator.ptx.scopes import (
    BRANCH_TARGETS,
    CALL_PROTOTYPE,
    CALL_TARGETS,
    LABEL,
    CodeName,
    Scopes,
    UniqueNames,
)
from pallasite_simulator.ptx.syntax import (
    BranchTargets,
    Function,
    ImplicitDefinition,
    Instruction,
    Label,
    Position,
    Register,
    Statement,
    Symbol,
    Variable,
)

# How many numbers a directive has at least and at most (PTX ISA 11.4). Missing sizes are 1.
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
_LISTS = (BRANCH_TARGETS, CALL_TARGETS, CALL_PROTOTYPE)


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


@functools.lru_cache(maxsize=4096)
def _split(name: str) -> tuple[str, tuple[str, ...]]:
    opcode, *modifiers = name.split(".")
    return opcode, tuple(modifiers)


def read_pragma(reader: Reader) -> None:
    """Skips ``.pragma "nounroll";``: pragmas are hints (PTX ISA 11.4, .pragma)."""
    reader.expect(".pragma")
    reader.string()
    while reader.accept(","):
        reader.string()
    reader.expect(";")


def _read_directives(reader: Reader) -> dict[str, tuple[int, ...]]:
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


def read_header(reader: Reader) -> Header:
    """Reads a function from ``.entry`` or ``.func`` up to its body, or past its semicolon."""
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
    directives = _read_directives(reader)
    body: int | None = None
    if reader.words[reader.index] == "{":
        body = reader.index
        reader.index = reader.closing[body] + 1
    elif not reader.accept(";"):
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


class Body:
    """Reads the body of a function.

    Args:
      reader: anywhere.
      header: of the function; it has a body.
      scopes: with the names of the module.
      functions: the names of all functions.
      locations: for ``.loc``.
      address_bytes: size of an address.
    """

    def __init__(
        self,
        reader: Reader,
        header: Header,
        module_names: dict[str, Symbol],
        module_unique: UniqueNames,
        functions: frozenset[str],
        locations: Locations,
        address_bytes: int,
    ):
        self._reader = reader
        self._header = header
        self._scopes = Scopes(reader, module_names, module_unique)
        self._operands = Operands(reader, self._scopes.names, functions)
        self._locations = locations
        self._address_bytes = address_bytes
        self._registers: list[Register] = []
        self._variables: list[Variable] = []
        self._statements: list[Statement] = []

    def read(self) -> Function:
        """Reads all statements.

        Raises:
          PtxError: anything that is not PTX, or a name that is not declared.
        """
        reader = self._reader
        header = self._header
        assert header.body is not None
        reader.location = None
        for parameter, at in header.names:
            if isinstance(parameter, Register):
                self._registers.append(self._scopes.register(parameter.name, parameter.type, at))
            elif parameter.name == "_":
                reader.fail("a parameter without a name", index=at)
            else:
                self._scopes.formal(parameter.name, at)
        end = reader.closing[header.body]
        reader.index = header.body + 1
        self._declare_labels(header.body)
        while reader.index < end:
            self._statement()
        reader.location = None
        return Function(
            name=header.name,
            entry=header.entry,
            parameters=header.parameters,
            results=header.results,
            directives=header.directives,
            registers=tuple(self._registers),
            variables=tuple(self._variables),
            body=tuple(self._statements),
            position=header.position,
        )

    def _declare_labels(self, brace: int) -> None:
        """Declares the labels of a scope, which may be used before they stand."""
        reader = self._reader
        for index in reader.labels.get(brace, ()):
            following = reader.words[index + 2]
            kind = following if following in _LISTS else LABEL
            self._scopes.code(reader.words[index], kind, index)

    def _statement(self) -> None:
        reader = self._reader
        index = reader.index
        if index in reader.implicit_definitions:
            for name, offset in reader.implicit_definitions[index]:
                meaning = self._scopes.names.get(name)
                if isinstance(meaning, Register):
                    self._statements.append(ImplicitDefinition(meaning, reader.position_at(offset)))
        word = reader.words[index]
        first = word[0]
        if first == ".":
            self._directive(word)
        elif word == "{":
            self._scopes.enter()
            self._declare_labels(index)
            reader.index += 1
        elif word == "}":
            self._scopes.leave()
            reader.index += 1
        elif reader.words[index + 1] == ":" and is_name(word):
            self._label(word)
        else:
            self._instruction()

    def _directive(self, word: str) -> None:
        reader = self._reader
        if word == ".loc":
            reader.location = self._locations.read(reader.location)
        elif word == ".reg":
            self._registers.extend(read_registers(reader, self._scopes))
        elif word in VARIABLE_SPACES:
            declare = self._scopes.parameter if word == ".param" else self._scopes.variable
            symbols = {
                name: meaning
                for name, meaning in self._scopes.names.items()
                if isinstance(meaning, Symbol)
            }
            self._variables.extend(read_variables(reader, symbols, self._address_bytes, declare))
        elif word == ".extern" and reader.words[reader.index + 1] in VARIABLE_SPACES:
            reader.fail(".extern inside a function")
        elif word == ".pragma":
            read_pragma(reader)
        elif word in _LISTS:
            reader.fail(f"{word} without a label")
        else:
            reader.fail(f"unknown directive {word!r} in a function")

    def _label(self, word: str) -> None:
        reader = self._reader
        position = reader.position()
        meaning = self._scopes.names[word]
        assert isinstance(meaning, CodeName)
        reader.index += 2
        if meaning.kind == LABEL:
            self._statements.append(Label(meaning.name, position))
            return
        reader.index += 1
        if meaning.kind == BRANCH_TARGETS:
            labels = self._branch_targets()
            self._statements.append(BranchTargets(meaning.name, labels, position))
        elif meaning.kind == CALL_TARGETS:
            self._call_targets()
        else:
            self._call_prototype()
        reader.expect(";")

    def _branch_targets(self) -> tuple[str, ...]:
        reader = self._reader
        labels: list[str] = []
        while True:
            at = reader.index
            meaning = self._scopes.names.get(reader.name("a label"))
            if not isinstance(meaning, CodeName) or meaning.kind != LABEL:
                reader.fail(f"undeclared label {reader.found(at)}", index=at)
            labels.append(meaning.name)
            if not reader.accept(","):
                return tuple(labels)

    def _call_targets(self) -> None:
        reader = self._reader
        while True:
            at = reader.index
            name = reader.name("a function")
            if name not in self._operands.functions:
                reader.fail(f"undeclared function {name!r}", index=at)
            if not reader.accept(","):
                return

    def _call_prototype(self) -> None:
        """PTX ISA 11.3.3: the signature of an indirect call, which the callee gives as well."""
        reader = self._reader
        if reader.words[reader.index] == "(":
            read_parameters(reader, entry=False, prototype=True)
        reader.expect("_")
        if reader.words[reader.index] == "(":
            read_parameters(reader, entry=False, prototype=True)
        _read_directives(reader)

    def _instruction(self) -> None:
        reader = self._reader
        words = reader.words
        start = reader.index
        predicate: Register | None = None
        negated = False
        if words[start] == "@":
            reader.index += 1
            negated = reader.accept("!")
            guard = words[reader.index]
            meaning = self._scopes.names.get(guard)
            if not isinstance(meaning, Register) or meaning.type != "pred":
                if meaning is None and is_name(guard):
                    reader.fail(f"undeclared predicate {guard!r}", start=start)
                reader.fail(f"expected a predicate after '@', found {guard!r}", start=start)
            predicate = meaning
            start = reader.index = reader.index + 1
        name = words[start]
        if not name[:1].isalpha():
            reader.fail(f"expected an instruction, found {reader.found(start)}", start=start)
        index = start + 1
        while words[index][:1] == ".":
            name += words[index]
            index += 1
        opcode, modifiers = _split(name)
        reader.index = index
        operands = self._operands.read(opcode, start)
        self._statements.append(
            Instruction(
                opcode,
                modifiers,
                operands,
                reader.position(start),
                reader.source(start, reader.index - 1),
                predicate,
                negated,
                reader.location,
            )
        )
