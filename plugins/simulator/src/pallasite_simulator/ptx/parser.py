"""The parser of PTX: text to :class:`~pallasite_simulator.ptx.syntax.Module` (PTX ISA 7 to 9)."""

from __future__ import annotations

import dataclasses
import functools
import re

from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.bodies import Body
from pallasite_simulator.ptx.constants import plain_integer
from pallasite_simulator.ptx.declarations import VARIABLE_SPACES, read_variables
from pallasite_simulator.ptx.headers import Header, read_header, read_pragma
from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.locations import (
    Locations,
    collect_files,
    read_file,
    read_section,
)
from pallasite_simulator.ptx.scopes import UniqueNames
from pallasite_simulator.ptx.syntax import Function, Module, Register, Symbol, Variable

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)
_TARGET = re.compile(r"sm_\d+[af]?|compute_\d+[af]?", re.ASCII)
_TARGET_OPTIONS = ("debug", "texmode_unified", "texmode_independent", "map_f64_to_f32")
_LINKING = (".extern", ".visible", ".weak", ".common")


@functools.lru_cache(maxsize=32)
def parse(text: str, *, tolerant: bool = False) -> Module:
    """The syntax tree of a PTX module.

    Modules are kept for the latest texts, so that the same text gives the same module again: it
    must not be changed.

    Args:
      text: a whole module, from ``.version`` on.
      tolerant: whether functions that cannot be read are kept with their errors, so that others of
        the module can be used.

    Raises:
      PtxError: the text is no PTX, uses a name that it does not declare, or has something that the
        simulator cannot represent.
    """
    return _Parser(text, tolerant).module()


class _Parser:
    """Reads the directives of a module; bodies of functions come last, when all names are known."""

    def __init__(self, text: str, tolerant: bool):
        self.reader = Reader(text)
        self.tolerant = tolerant
        self.address_size = 32
        self.variables: dict[str, Variable] = {}
        self.headers: dict[str, Header] = {}
        self.aliases: dict[str, str] = {}
        self.names: dict[str, Symbol] = {}
        self.strings: dict[str, str] = {}

    def module(self) -> Module:
        reader = self.reader
        version = self._version()
        target = self._target()
        if reader.accept(".address_size"):
            self.address_size = plain_integer(reader, "32 or 64")
            if self.address_size not in (32, 64):
                reader.fail(
                    f"address size {self.address_size}",
                    index=reader.index - 1,
                    expected="32 or 64",
                )
        files = collect_files(reader)
        while reader.words[reader.index]:
            self._directive()
        functions = self._functions(files)
        return Module(
            version=version,
            target=target,
            address_size=self.address_size,
            variables=tuple(self.variables.values()),
            functions=functions,
            files=files,
        )

    def _version(self) -> tuple[int, int]:
        reader = self.reader
        if not reader.accept(".version"):
            reader.fail(f"expected '.version', found {reader.found()}")
        match = _VERSION.fullmatch(reader.words[reader.index])
        if match is None:
            reader.fail(f"expected a version such as 8.6, found {reader.found()}")
        reader.index += 1
        return int(match[1]), int(match[2])

    def _target(self) -> str:
        reader = self.reader
        if not reader.accept(".target"):
            reader.fail(f"expected '.target', found {reader.found()}")
        target = reader.next()
        if not _TARGET.fullmatch(target):
            reader.fail(
                f"expected a target such as sm_90a, found {target!r}", index=reader.index - 1
            )
        while reader.accept(","):
            if reader.words[reader.index] not in _TARGET_OPTIONS:
                reader.fail(f"unknown option {reader.found()} of a target")
            reader.index += 1
        return target

    def _directive(self) -> None:
        reader = self.reader
        word = reader.words[reader.index]
        start = reader.index
        linking = ""
        if word in _LINKING:
            linking = word
            reader.index += 1
            word = reader.words[reader.index]
        if word in (".entry", ".func"):
            self._function(external=linking == ".extern")
        elif word in VARIABLE_SPACES or word == ".attribute":
            self._variables(external=linking == ".extern")
        elif linking:
            reader.fail(f"expected a function or a variable after {linking}, found {word!r}")
        elif word == ".file":
            read_file(reader)
        elif word == ".section":
            self.strings.update(read_section(reader))
        elif word == ".pragma":
            read_pragma(reader)
        elif word == ".alias":
            self._alias()
        elif word in (".tex", ".sreg", ".surf", ".sampler"):
            reader.fail(f"textures and the like ({word}) are not supported", index=start)
        elif word in (".version", ".target", ".address_size"):
            reader.fail(f"{word} a second time or in the wrong place", index=start)
        elif word[:1] == ".":
            reader.fail(f"unknown directive {word!r}", index=start)
        else:
            reader.fail(f"expected a directive, found {reader.found(start)}", index=start)

    def _declare(self, external: bool, name: str, index: int) -> str:
        known = self.variables.get(name)
        # An external variable may be declared again, and then be defined.
        if name in self.headers or (known and not known.external and not external):
            self.reader.fail(f"{name!r} is declared twice", index=index)
        self.names[name] = Symbol(name)
        return name

    def _variables(self, external: bool) -> None:
        reader = self.reader
        at = reader.index
        declare = functools.partial(self._declare, external)
        for variable in read_variables(
            reader, self.names, self.address_size // 8, declare, external=external
        ):
            if variable.space in ("local", "param"):
                reader.fail(f"a variable in .{variable.space} outside of a function", index=at)
            if variable.name not in self.variables or not external:
                self.variables[variable.name] = variable

    def _function(self, external: bool) -> None:
        reader = self.reader
        start = reader.index
        header = read_header(reader, external)
        name = header.name
        known = self.headers.get(name)
        if name in self.variables or (known and known.body and header.body):
            reader.fail(f"{name!r} is declared twice", index=start)
        if known is not None and _signature(known) != _signature(header):
            reader.fail(f"{name!r} was declared with other parameters or results", index=start)
        if known is None or header.body is not None:
            self.headers[name] = header
        self.names[name] = Symbol(name)

    def _alias(self) -> None:
        """PTX ISA 11.6.6: ``.alias name, function;``: another name of a function."""
        reader = self.reader
        reader.expect(".alias")
        at = reader.index
        alias = reader.name("the name of a function")
        reader.expect(",")
        function = reader.name("the name of a function")
        if alias not in self.headers or self.headers[alias].body is not None:
            reader.fail(f"{alias!r} is not declared as a function without a body", index=at)
        if function not in self.headers or self.headers[function].body is None:
            reader.fail(f"{function!r} is not a function with a body", index=at + 2)
        if _signature(self.headers[alias]) != _signature(self.headers[function]):
            reader.fail(
                f"{alias!r} and {function!r} have different parameters or results", index=at - 1
            )
        reader.expect(";")
        self.aliases[alias] = function

    def _functions(self, files: dict[int, str]) -> tuple[Function, ...]:
        reader = self.reader
        locations = Locations(reader, files, self.strings)
        unique = UniqueNames(self.names)
        callable_ = {
            name: self.names[name] for name, header in self.headers.items() if not header.entry
        }
        functions: dict[str, Function] = {}
        for name, header in self.headers.items():
            if header.body is None:
                functions[name] = _declaration(header)
            else:
                body = Body(
                    reader,
                    header,
                    header.body,
                    self.names,
                    unique,
                    callable_,
                    locations,
                    self.address_size // 8,
                )
                try:
                    functions[name] = body.read()
                except PtxError as error:
                    if not self.tolerant:
                        raise
                    functions[name] = dataclasses.replace(
                        _declaration(header), body=(), error=error
                    )
        for alias, name in self.aliases.items():
            functions[alias] = dataclasses.replace(functions[name], name=alias)
        return tuple(functions.values())


def _signature(header: Header) -> tuple[bool, list[object], list[object]]:
    """What has to be the same wherever a function is declared."""

    def shapes(parameters: tuple[Variable | Register, ...]) -> list[object]:
        return [
            one.type if isinstance(one, Register) else (one.type, one.bytes, one.alignment)
            for one in parameters
        ]

    return header.entry, shapes(header.parameters), shapes(header.results)


def _declaration(header: Header) -> Function:
    return Function(
        name=header.name,
        entry=header.entry,
        parameters=header.parameters,
        results=header.results,
        directives=header.directives,
        registers=(),
        variables=(),
        body=None,
        position=header.position,
    )
