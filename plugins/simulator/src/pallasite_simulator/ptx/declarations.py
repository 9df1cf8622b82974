"""Declarations of variables, registers and parameters (PTX ISA chapter 5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from pallasite_simulator.ptx.constants import plain_integer
from pallasite_simulator.ptx.initializers import Initializer
from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.scopes import Name, Scopes
from pallasite_simulator.ptx.syntax import Position, Register, Symbol, Variable
from pallasite_simulator.ptx.types import TYPE_BYTES, type_name

#: Spaces of variables that a module or a function declares.
VARIABLE_SPACES = (".global", ".const", ".shared", ".local", ".param")
_ATTRIBUTES = (".managed", ".unified")
_POINTER_SPACES = (".global", ".const", ".shared", ".local")

# More registers than any compiler makes, and larger variables than any memory, are nonsense.
_MOST_REGISTERS = 1 << 20
_MOST_BYTES = 1 << 48

_LARGEST_VECTOR = 16
_MOST_DIMENSIONS = 32


def read_alignment(reader: Reader) -> int:
    """Reads the number after ``.align``: a power of two (PTX ISA 5.4.5)."""
    value = plain_integer(reader, "an alignment")
    if value <= 0 or value & (value - 1):
        reader.fail(f"alignment {value} is not a power of two", index=reader.index - 1)
    return value


def skip_attribute(reader: Reader, known: tuple[str, ...]) -> None:
    """Skips ``.attribute(.managed)`` and the like, which change nothing here (PTX ISA 5.4.8)."""
    reader.expect(".attribute")
    reader.expect("(")
    while True:
        if reader.words[reader.index] not in known:
            reader.fail(f"unknown attribute {reader.found()}")
        reader.index += 1
        if reader.accept("("):
            plain_integer(reader, "a number")
            reader.expect(",")
            plain_integer(reader, "a number")
            reader.expect(")")
        if reader.accept(")"):
            return
        reader.expect(",")


@dataclasses.dataclass(slots=True)
class _Specifiers:
    """What stands before the names of a declaration."""

    type: str = ""
    alignment: int = 0
    vector: int = 1


def _read_vector_length(reader: Reader) -> int:
    word = reader.words[reader.index]
    if word not in (".v2", ".v4"):
        return 1
    reader.index += 1
    return int(word[2:])


def _specifiers(reader: Reader) -> _Specifiers:
    """Reads alignment, attributes, vector length and type."""
    found = _Specifiers()
    while True:
        word = reader.words[reader.index]
        if word == ".align":
            reader.index += 1
            found.alignment = read_alignment(reader)
        elif word == ".attribute":
            skip_attribute(reader, _ATTRIBUTES)
        elif word in (".v2", ".v4"):
            found.vector = _read_vector_length(reader)
        else:
            break
    at = reader.index
    found.type = type_name(reader)
    if found.type == "pred":
        reader.fail("predicates can only be registers", index=at)
    size = TYPE_BYTES[found.type] * found.vector
    if found.vector > 1 and size > _LARGEST_VECTOR:
        reader.fail(f"a vector of {size} bytes: at most {_LARGEST_VECTOR} are possible", index=at)
    found.alignment = found.alignment or size
    return found


def _dimensions(reader: Reader) -> tuple[int | None, ...]:
    """Reads ``[4][2]``; None for ``[]``, which only the first may be."""
    dimensions: list[int | None] = []
    while reader.accept("["):
        if reader.words[reader.index] == "]" and not dimensions:
            dimensions.append(None)
        else:
            dimensions.append(plain_integer(reader, "the length of an array"))
        reader.expect("]")
        if len(dimensions) > _MOST_DIMENSIONS:
            reader.fail(f"more than {_MOST_DIMENSIONS} dimensions")
    return tuple(dimensions)


def _bytes(
    reader: Reader, specifiers: _Specifiers, dimensions: tuple[int | None, ...], at: int
) -> int:
    size = TYPE_BYTES[specifiers.type] * specifiers.vector
    size *= math.prod(0 if one is None else one for one in dimensions)
    if size > _MOST_BYTES:
        reader.fail(f"a variable of {size} bytes", index=at)
    return size


def read_variables(
    reader: Reader,
    names: Mapping[str, Name],
    address_bytes: int,
    declare: Callable[[str, int], str],
    *,
    external: bool = False,
) -> list[Variable]:
    """Reads a declaration from its space to its semicolon (PTX ISA 5.4).

    Args:
      reader: at the space, such as ``.global``, or an attribute before it.
      names: what the names mean that initializers may hold.
      address_bytes: size of an address.
      declare: called with each name and the index of its word; gives the unique name.
      external: whether ``.extern`` stands before the declaration.
    """
    if reader.words[reader.index] == ".attribute":
        skip_attribute(reader, _ATTRIBUTES)
    if reader.words[reader.index] not in VARIABLE_SPACES:
        reader.fail(f"expected a state space such as .global, found {reader.found()}")
    space = reader.next()[1:]
    specifiers = _specifiers(reader)
    variables: list[Variable] = []
    while True:
        at = reader.index
        name = declare(reader.name("the name of a variable"), at)
        dimensions = _dimensions(reader)
        size = _bytes(reader, specifiers, dimensions, at)
        initial: bytes | None = None
        addresses: tuple[tuple[int, Symbol], ...] = ()
        if reader.accept("="):
            if external:
                reader.fail(f"an initial value for the .extern variable {name!r}", index=at)
            if space not in ("global", "const"):
                reader.fail(f"variables in .{space} cannot have initial values", index=at)
            if specifiers.vector > 1:
                dimensions = (*dimensions, specifiers.vector)
            initializer = Initializer(reader, names, specifiers.type, address_bytes)
            initializer.read(dimensions)
            if dimensions and dimensions[0] is None:
                dimensions = (initializer.count, *dimensions[1:])
                size = TYPE_BYTES[specifiers.type] * math.prod(one or 0 for one in dimensions)
            initial = bytes(initializer.data)
            addresses = tuple(initializer.addresses)
        elif size == 0 and not external:
            reader.fail(f"the array {name!r} has no length", index=at)
        variables.append(
            Variable(
                name=name,
                space=space,
                type=specifiers.type,
                bytes=size,
                alignment=specifiers.alignment,
                position=reader.position(at),
                initial=initial,
                addresses=addresses,
                external=external,
            )
        )
        if reader.accept(";"):
            return variables
        if not reader.accept(","):
            reader.fail(f"expected ',' or ';' after {name!r}, found {reader.found()}")


def read_registers(reader: Reader, scopes: Scopes) -> list[Register]:
    """Reads ``.reg .b32 a, %r<10>;`` (PTX ISA 5.1.1 and 5.4.7, parameterized names).

    A vector register ``v`` becomes registers ``v.x``, ``v.y`` and so on (PTX ISA 5.4.2).
    """
    reader.expect(".reg")
    length = _read_vector_length(reader)
    at = reader.index
    type_ = type_name(reader)
    if length > 1 and (type_ == "pred" or length * TYPE_BYTES[type_] > _LARGEST_VECTOR):
        reader.fail(f"vectors of {length} elements of type .{type_}", index=at)
    registers: list[Register] = []
    while True:
        at = reader.index
        name = reader.name("the name of a register")
        names = [name]
        if reader.accept("<"):
            count = plain_integer(reader, "how many registers")
            if count > _MOST_REGISTERS:
                reader.fail(f"{count} registers", index=at)
            reader.expect(">")
            names = [f"{name}{number}" for number in range(count)]
        if length == 1:
            registers += scopes.registers(names, type_, at)
        for one in names if length > 1 else ():
            registers += scopes.vector_register(one, type_, length, at)
        if reader.accept(";"):
            return registers
        if not reader.accept(","):
            reader.fail(f"expected ',' or ';' after {name!r}, found {reader.found()}")


def _read_parameter(
    reader: Reader, entry: bool, define: bool, prototype: bool
) -> tuple[Variable | Register, int]:
    """Reads one parameter and gives it with the index of its name."""
    position: Position = reader.position()
    if reader.accept(".reg"):
        if entry:
            reader.fail("parameters of kernels are in .param", index=reader.index - 1)
        if reader.words[reader.index] in (".v2", ".v4"):
            reader.fail("parameters that are vectors are not supported")
        type_ = type_name(reader)
        at = reader.index
        if prototype and reader.accept("_"):
            return Register("_", type_), at
        return Register(reader.name("the name of a parameter"), type_), at
    if not reader.accept(".param"):
        reader.fail(f"expected '.param', found {reader.found()}")
    specifiers = _specifiers(reader)
    if specifiers.vector > 1:
        reader.fail("parameters that are vectors are not supported", index=reader.index - 1)
    if reader.accept(".ptr"):
        if reader.words[reader.index] in _POINTER_SPACES:
            reader.index += 1
        # How far the array is aligned that the pointer points to: the parameter itself is not.
        if reader.accept(".align"):
            read_alignment(reader)
    at = reader.index
    if not define and reader.accept("_"):
        name = "_"
    else:
        name = reader.name("the name of a parameter")
    dimensions = _dimensions(reader)
    if entry and any(one in (None, 0) for one in dimensions):
        reader.fail(f"the array {name!r} has no length", index=at)
    variable = Variable(
        name=name,
        space="param",
        type=specifiers.type,
        bytes=_bytes(reader, specifiers, dimensions, at),
        alignment=specifiers.alignment,
        position=position,
    )
    return variable, at


def read_parameters(
    reader: Reader, *, entry: bool, prototype: bool = False
) -> list[tuple[Variable | Register, int]]:
    """Reads parameters or results in parentheses (PTX ISA 5.1.6).

    Args:
      reader: at the opening parenthesis.
      entry: whether they are those of a kernel.
      prototype: whether they belong to ``.callprototype``.

    Returns:
      Each with the index of the word of its name. A name may be ``_`` in functions.
    """
    reader.expect("(")
    parameters: list[tuple[Variable | Register, int]] = []
    if reader.accept(")"):
        return parameters
    while True:
        parameters.append(_read_parameter(reader, entry, entry, prototype))
        if reader.accept(")"):
            return parameters
        if not reader.accept(","):
            reader.fail(f"expected ',' or ')' after a parameter, found {reader.found()}")
