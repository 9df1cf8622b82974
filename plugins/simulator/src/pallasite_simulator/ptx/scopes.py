"""Names of a function: what they mean where, and unique ones where they are declared again.

PTX ISA 4.4 and 11.1: braces make scopes; a name hides the same name of an outer scope, and labels
are seen only inside the scope that holds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.syntax import Register, Symbol, Vector

LABEL = "label"
BRANCH_TARGETS = ".branchtargets"
CALL_TARGETS = ".calltargets"
CALL_PROTOTYPE = ".callprototype"

# Parts of vector registers can be called as coordinates or as colors (PTX ISA 6.4.3).
_PARTS = ("xr", "yg", "zb", "wa")


@dataclasses.dataclass(frozen=True, slots=True)
class CodeName:
    """A name before a colon: of a label, or of a list that a branch or call refers to."""

    name: str
    kind: str


Name = Register | Vector | Symbol | CodeName


@functools.lru_cache(maxsize=1 << 16)
def _register(name: str, type_: str) -> Register:
    """The register of a name and a type: programs have the same ones."""
    return Register(name, type_)


class UniqueNames:
    """Gives out names that differ from all earlier ones, by adding ``#`` and a number."""

    def __init__(self, taken: Iterable[str] = ()):
        self._counts: dict[str, int] = dict.fromkeys(taken, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def take(self, name: str) -> str:
        """This name, or the next free one made from it."""
        count = self._counts.get(name)
        if count is None:
            self._counts[name] = 0
            return name
        # Identifiers hold no "#", so that a generated name cannot clash with a written one.
        self._counts[name] = count + 1
        return f"{name}#{count + 1}"


class Scopes:
    """The names that can be seen at one place of a function.

    Args:
      reader: for errors.
      module_names: what the module declares.
      module_unique: names of variables that are unique in the module; variables of the function
        other than parameters are added.

    Attributes:
      names: the meaning of each name in the innermost scope.
    """

    def __init__(self, reader: Reader, module_names: dict[str, Symbol], module_unique: UniqueNames):
        self.names: dict[str, Name] = dict(module_names)
        self._reader = reader
        self._module_names = module_names
        self._module_unique = module_unique
        self._unique = UniqueNames()
        self._hidden: list[dict[str, Name | None]] = [{}]

    def enter(self) -> None:
        """Opens a scope."""
        self._hidden.append({})

    def leave(self) -> None:
        """Closes the innermost scope: its names are forgotten."""
        for name, previous in self._hidden.pop().items():
            if previous is None:
                del self.names[name]
            else:
                self.names[name] = previous

    def _declare(self, name: str, meaning: Name, index: int | None) -> None:
        hidden = self._hidden[-1]
        if name in hidden:
            self._reader.fail(f"{name!r} is declared twice", index=index)
        hidden[name] = self.names.get(name)
        self.names[name] = meaning

    def register(self, name: str, type_: str, index: int | None = None) -> Register:
        """Declares a register; ``index`` is the word for errors."""
        register = Register(self._unique.take(name), type_)
        self._declare(name, register, index)
        return register

    def registers(
        self, names: Iterable[str], type_: str, index: int | None = None
    ) -> list[Register]:
        """:meth:`register` for many names of one type."""
        hidden, known = self._hidden[-1], self.names
        made: list[Register] = []
        for name in names:
            if name in hidden:
                made.append(self.register(name, type_, index))  # Says what is wrong.
                continue
            register = _register(self._unique.take(name), type_)
            hidden[name] = known.get(name)
            known[name] = register
            made.append(register)
        return made

    def vector_register(
        self, name: str, type_: str, length: int, index: int | None = None
    ) -> list[Register]:
        """Declares a register for each element of a vector register."""
        elements: list[Register] = []
        for parts in _PARTS[:length]:
            element = self.register(f"{name}.{parts[0]}", type_, index)
            self._declare(f"{name}.{parts[1]}", element, index)
            elements.append(element)
        self._declare(name, Vector(tuple(elements)), index)
        return elements

    def variable(self, name: str, index: int | None = None) -> str:
        """Declares a variable of the function, unique in the module, and gives its unique name."""
        unique = self._module_unique.take(name)
        while unique in self._unique:
            unique = self._module_unique.take(name)
        self._unique.take(unique)
        self._declare(name, Symbol(unique), index)
        return unique

    def parameter(self, name: str, index: int | None = None) -> str:
        """Declares a variable of space ``.param`` in the body, unique in the function."""
        unique = self._unique.take(name)
        while unique in self._module_names:
            unique = self._unique.take(name)
        self._declare(name, Symbol(unique), index)
        return unique

    def formal(self, name: str, index: int | None = None) -> None:
        """Declares a parameter or result of the function, which keeps its name."""
        self._unique.take(name)
        self._declare(name, Symbol(name), index)

    def code(self, name: str, kind: str, index: int | None = None) -> None:
        """Declares a label or a list of targets."""
        self._declare(name, CodeName(self._unique.take(name), kind), index)
