"""Operands of instructions (PTX ISA chapter 6)."""

from __future__ import annotations

import re
from typing import NoReturn

from pallasite_simulator.ptx.constants import (
    ADDITIVE,
    MULTIPLICATIVE,
    Expressions,
    literal,
)
from pallasite_simulator.ptx.lexer import Reader, is_name
from pallasite_simulator.ptx.scopes import (
    BRANCH_TARGETS,
    CALL_PROTOTYPE,
    CALL_TARGETS,
    LABEL,
    CodeName,
    Name,
)
from pallasite_simulator.ptx.special_registers import SPECIAL_REGISTERS, VECTOR_NAMES
from pallasite_simulator.ptx.syntax import (
    Address,
    Arguments,
    Immediate,
    Negated,
    Operand,
    Pair,
    Part,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

_SINK = Sink()
_PARTS = re.compile("b[0-7]{1,4}|h[0-3]{1,2}")
_AFTER_CONSTANT = frozenset((",", ";", "}", "]", ")"))


class Operands:
    """Reads operands.

    Args:
      reader: at the operands.
      names: the names that can be seen, kept up to date by the caller.
      functions: the functions that can be called, by their names.
    """

    def __init__(self, reader: Reader, names: dict[str, Name], functions: dict[str, Symbol]):
        self.reader = reader
        self.names = names
        self.functions = functions
        self.expressions = Expressions(reader)
        self._opcode = ""
        self._start = 0

    def read(self, opcode: str, start: int) -> tuple[Operand, ...]:
        """Reads all operands up to the semicolon, which is taken too.

        Args:
          opcode: of the instruction: branches and calls have operands of their own.
          start: index of the word where the instruction begins, for errors.
        """
        self._opcode = opcode
        self._start = start
        reader = self.reader
        words = reader.words
        names = self.names
        index = reader.index
        if words[index] == ";":
            reader.index = index + 1
            if opcode in _SPECIAL_OPCODES:
                self._fail(f"{opcode} without operands", index=start)
            return ()
        if opcode in _SPECIAL_OPCODES:
            return _SPECIAL_OPCODES[opcode](self)
        operands: list[Operand] = []
        while True:
            meaning = names.get(words[index])
            following = words[index + 1]
            if isinstance(meaning, Register) and (following == "," or following == ";"):
                operands.append(meaning)
                index += 1
            else:
                reader.index = index
                operands.append(self.operand())
                index = reader.index
                following = words[index]
            if following == ";":
                reader.index = index + 1
                return tuple(operands)
            if following != ",":
                reader.index = index
                self._no_separator()
            index += 1

    def _fail(self, message: str, *, index: int | None = None, hint: str | None = None) -> NoReturn:
        self.reader.fail(message, index=index, start=self._start, hint=hint)

    def _no_separator(self) -> NoReturn:
        reader = self.reader
        before = reader.words[reader.index - 1]
        self._fail(f"expected ',' or ';' after {before!r}, found {reader.found()}")

    def _end(self) -> None:
        if not self.reader.accept(";"):
            self._no_separator()

    # Operands of any instruction ------------------------------------------------------------------

    def operand(self) -> Operand:
        """Reads one operand."""
        reader = self.reader
        word = reader.words[reader.index]
        meaning = self.names.get(word)
        if meaning is not None:
            reader.index += 1
            if isinstance(meaning, Register):
                return self._pair(meaning)
            if isinstance(meaning, CodeName):
                reader.index -= 1
                self._fail(f"the {meaning.kind} {word!r} cannot be an operand of {self._opcode}")
            if isinstance(meaning, Vector):
                return meaning
            return self._symbol(meaning)
        first = word[:1]
        if first.isdigit():
            known = literal(word)
            if known is not None and reader.words[reader.index + 1] in _AFTER_CONSTANT:
                reader.index += 1
                return known[0]
            return self._constant()
        if first == "[":
            return self._address()
        if first == "{":
            return self._vector()
        if word == "_":
            reader.index += 1
            return self._pair(_SINK)
        if first == "!" or first == "-":
            return self._negated()
        if first in "(+~." or word == "WARP_SZ":
            return self._constant()
        if word in SPECIAL_REGISTERS:
            reader.index += 1
            return SPECIAL_REGISTERS[word]
        base, _, selection = word.partition(".")
        register = self.names.get(base)
        if isinstance(register, Register) and _PARTS.fullmatch(selection):
            if self._opcode[0] != "v":
                self._fail(f"only video instructions take parts of registers such as {word!r}")
            reader.index += 1
            return Part(register, selection)
        return self._unknown(word)

    def _unknown(self, word: str) -> NoReturn:
        if word in VECTOR_NAMES:
            self._fail(f"{word} is a vector", hint=f"name a component, such as {word}.x")
        if word in (";", ",", "", "}", ")", "]") or not is_name(word.split(".", 1)[0]):
            self._fail(f"expected an operand, found {self.reader.found()}")
        if "." in word:
            base = word.split(".", 1)[0]
            if isinstance(self.names.get(base), Register):
                self._fail(f"there is no part of registers such as {word!r}")
            self._fail(f"expected an operand, found {word!r}", hint="is a semicolon missing?")
        what = "register" if word[0] == "%" else "name"
        self._fail(f"undeclared {what} {word!r}")

    def _constant(self) -> Immediate:
        reader = self.reader
        if reader.words[reader.index][:1] == "." and (literal(reader.words[reader.index]) is None):
            self._fail(f"expected an operand, found {reader.found()}")
        return self.expressions.constant()

    def _pair(self, first: Register | Sink) -> Operand:
        reader = self.reader
        if not reader.accept("|"):
            return first
        word = reader.words[reader.index]
        if word == "_":
            reader.index += 1
            return Pair(first, _SINK)
        return Pair(first, self._register("a register after '|'"))

    def _register(self, what: str) -> Register:
        reader = self.reader
        word = reader.words[reader.index]
        meaning = self.names.get(word)
        if not isinstance(meaning, Register):
            if meaning is None and is_name(word):
                self._unknown(word)
            self._fail(f"expected {what}, found {reader.found()}")
        reader.index += 1
        return meaning

    def _negated(self) -> Operand:
        reader = self.reader
        word = reader.words[reader.index + 1]
        if isinstance(self.names.get(word), Register):
            reader.index += 1
            return Negated(self._register("a register"))
        if isinstance(self.names.get(word.partition(".")[0]), Register):
            reader.index += 1
            return Negated(self.operand())
        return self._constant()

    def _symbol(self, symbol: Symbol) -> Symbol:
        reader = self.reader
        if reader.words[reader.index] == "[":
            self._fail(
                f"indices of arrays such as {symbol.name}[1] are not supported",
                hint=f"write an address such as [{symbol.name}+4]",
            )
        offset = self._offset()
        return Symbol(symbol.name, offset) if offset else symbol

    def _offset(self) -> int:
        """Reads ``+8`` after a name: nothing, or sums of constants."""
        reader = self.reader
        offset = 0
        while reader.words[reader.index] == "+":
            reader.index += 1
            word = reader.words[reader.index]
            if word in self.names:
                self._fail(f"expected a constant offset, found {reader.found()}")
            offset += self.expressions.integer("a constant offset", MULTIPLICATIVE)
        if reader.words[reader.index] == "-":
            self._fail("offsets are added in PTX", hint="write +-8 for -8")
        return offset

    def _vector(self) -> Vector:
        reader = self.reader
        reader.index += 1
        elements: list[Operand] = []
        while True:
            if reader.words[reader.index] in ("{", "["):
                self._fail(f"{reader.found()} inside a vector")
            elements.append(self.operand())
            if reader.accept("}"):
                return Vector(tuple(elements))
            if not reader.accept(","):
                self._fail(f"expected ',' or '}}' in a vector, found {reader.found()}")

    def _address(self) -> Address:
        reader = self.reader
        reader.index += 1
        base, offset = self._base()
        if reader.accept("]"):
            return Address(base, offset)
        if not reader.accept(","):
            self._fail(f"expected ']' after an address, found {reader.found()}")
        if reader.words[reader.index] != "{":
            self._fail(f"expected coordinates in braces, found {reader.found()}")
        coordinates = self._vector().elements
        extra: list[Operand] = []
        while reader.accept(","):
            if reader.words[reader.index] == "[":
                self._fail("'[' inside an address")
            extra.append(self.operand())
        if not reader.accept("]"):
            self._fail(f"expected ']' after coordinates, found {reader.found()}")
        return Address(base, offset, coordinates, tuple(extra))

    def _base(self) -> tuple[Register | Symbol | Special | None, int]:
        reader = self.reader
        word = reader.words[reader.index]
        meaning = self.names.get(word)
        if isinstance(meaning, CodeName | Vector):
            self._fail(f"{word!r} is no address")
        if meaning is not None:
            reader.index += 1
            return meaning, self._offset()
        if is_name(word.split(".", 1)[0]) and word != "WARP_SZ":
            if word in SPECIAL_REGISTERS:
                self._fail(f"the special register {word} cannot be an address")
            self._unknown(word)
        if word in ("]", ";", ""):
            self._fail(f"expected an address, found {reader.found()}")
        return None, self.expressions.integer("an address", ADDITIVE)

    # Branches and calls ---------------------------------------------------------------------------

    def _target(self, kind: str) -> Symbol:
        reader = self.reader
        word = reader.words[reader.index]
        meaning = self.names.get(word)
        if not isinstance(meaning, CodeName) or meaning.kind != kind:
            if meaning is None and is_name(word):
                self._fail(f"undeclared {kind} {word!r}")
            self._fail(f"expected the name of a {kind}, found {reader.found()}")
        reader.index += 1
        return Symbol(meaning.name)

    def _branch(self) -> tuple[Operand, ...]:
        target = self._target(LABEL)
        self._end()
        return (target,)

    def _indexed_branch(self) -> tuple[Operand, ...]:
        index = self.operand()
        self.reader.expect(",", start=self._start)
        targets = self._target(BRANCH_TARGETS)
        self._end()
        return index, targets

    def _arguments(self) -> Arguments:
        reader = self.reader
        reader.expect("(", start=self._start)
        if reader.accept(")"):
            return Arguments(())
        elements: list[Operand] = []
        while True:
            elements.append(self.operand())
            if reader.accept(")"):
                return Arguments(tuple(elements))
            if not reader.accept(","):
                self._fail(f"expected ',' or ')' in arguments, found {reader.found()}")

    def _call(self) -> tuple[Operand, ...]:
        """PTX ISA 9.7.12.5: ``call (results), function, (arguments), prototype or targets;``."""
        reader = self.reader
        operands: list[Operand] = []
        if reader.words[reader.index] == "(":
            operands.append(self._arguments())
            reader.expect(",", start=self._start)
        word = reader.words[reader.index]
        meaning = self.names.get(word)
        if isinstance(meaning, Symbol) and self.functions.get(word) is not meaning:
            self._fail(f"{word!r} is not a function that can be called")
        if meaning is None and is_name(word):
            self._fail(f"undeclared function {word!r}")
        if not isinstance(meaning, Register | Symbol):
            self._fail(f"expected a function or a register, found {reader.found()}")
        reader.index += 1
        operands.append(meaning)
        if reader.words[reader.index] == "," and reader.words[reader.index + 1] == "(":
            reader.index += 1
            operands.append(self._arguments())
        if isinstance(meaning, Register):
            reader.expect(",", start=self._start)
            word = reader.words[reader.index]
            known = self.names.get(word)
            if not isinstance(known, CodeName) or known.kind not in (CALL_PROTOTYPE, CALL_TARGETS):
                # An array of the functions that may be called.
                if not isinstance(known, Symbol):
                    self._fail(f"expected a prototype or call targets, found {reader.found()}")
                operands.append(known)
            else:
                operands.append(Symbol(known.name))
            reader.index += 1
        self._end()
        return tuple(operands)


_SPECIAL_OPCODES = {
    "bra": Operands._branch,
    "brx": Operands._indexed_branch,
    "call": Operands._call,
}
