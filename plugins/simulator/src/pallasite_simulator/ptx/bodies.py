"""Bodies of functions: statements, scopes and instructions (PTX ISA 11.1 and chapter 9)."""

from __future__ import annotations

import functools

from pallasite_simulator.ptx.declarations import (
    VARIABLE_SPACES,
    read_parameters,
    read_registers,
    read_variables,
)
from pallasite_simulator.ptx.headers import Header, read_directives, read_pragma
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
    Register,
    Statement,
    Symbol,
    Variable,
)

_LISTS = (BRANCH_TARGETS, CALL_TARGETS, CALL_PROTOTYPE)


@functools.lru_cache(maxsize=4096)
def _split(name: str) -> tuple[str, tuple[str, ...]]:
    opcode, *modifiers = name.split(".")
    return opcode, tuple(modifiers)


class Body:
    """Reads the body of a function.

    Args:
      reader: anywhere.
      header: of the function.
      opening: index of the brace that opens the body.
      module_names: what the module declares.
      module_unique: names of variables that are unique in the module.
      functions: the functions that can be called, by their names.
      locations: for ``.loc``.
      address_bytes: size of an address.
    """

    def __init__(
        self,
        reader: Reader,
        header: Header,
        opening: int,
        module_names: dict[str, Symbol],
        module_unique: UniqueNames,
        functions: dict[str, Symbol],
        locations: Locations,
        address_bytes: int,
    ):
        self._reader = reader
        self._header = header
        self._opening = opening
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
        reader.location = None
        for parameter, at in header.names:
            if isinstance(parameter, Register):
                self._registers.append(self._scopes.register(parameter.name, parameter.type, at))
            elif parameter.name == "_":
                reader.fail("a parameter without a name", index=at)
            else:
                self._scopes.formal(parameter.name, at)
        end = reader.closing[self._opening]
        reader.index = self._opening + 1
        self._declare_labels(self._opening)
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
            self._variables.extend(
                read_variables(reader, self._scopes.names, self._address_bytes, declare)
            )
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
        read_directives(reader)

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
