"""LLVM IR spelling of MLIR types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pallasite.errors import CompilationError

_SCALARS = {
    "index": "i64",
    "f16": "half",
    "bf16": "bfloat",
    "f32": "float",
    "f64": "double",
    "void": "void",
    "ptr": "ptr",
}


_NARROW_FLOAT = re.compile(r"f(8|4)E\dM\d\w*")
_MEMORY_SPACE = re.compile(
    r", (?:#gpu\.address_space<)?(global|workgroup|private|\d+)(?:>| : i\d+)?>$"
)
_NAMED_MEMBERS = 16
"""How many members a structure has that gets a name."""
_SPACES = {"global": 1, "workgroup": 3, "private": 5}


class TypeTable(dict[Any, str]):
    """Spelling of each MLIR type in LLVM IR, computed at the first use: ``table[type]``."""

    def __missing__(self, type_: Any) -> str:
        text = self[type_] = llvm_type(str(type_))
        return text


def name_wide_structures(lines: Sequence[str], types: TypeTable) -> str:
    """LLVM IR of functions in which structures of many members have names, which makes it shorter.

    The result of a matrix instruction has one member for each register, and there is an
    ``extractvalue`` for each of them that spells the type.
    """
    text = "\n".join(lines)
    found = {one for one in types.values() if one[0] == "{" and one.count(",") >= _NAMED_MEMBERS}
    if not found:
        return text
    # An intrinsic returns a structure without a name.
    kept = "\n".join(line for line in lines if line.startswith("declare"))
    definitions = []
    for number, type_ in enumerate(sorted(found, key=lambda one: (-len(one), one))):
        if type_ not in kept:
            text = text.replace(type_, f"%wide{number}")
            definitions.append(f"%wide{number} = type {type_}")
    return "\n".join([*definitions, text])


def llvm_type(text: str) -> str:
    """LLVM IR spelling of an MLIR type given as text, such as ``!llvm.struct<(i32, ptr<3>)>``.

    A memref is a pointer in its address space.
    """
    if text.startswith("memref<"):
        found = _MEMORY_SPACE.search(text)
        space = 0 if found is None else _SPACES.get(found[1]) or int(found[1])
        return f"ptr addrspace({space})" if space else "ptr"
    parser = _TypeParser(text)
    result = parser.parse()
    if parser.position != len(text):
        raise parser.error()
    return result


def function_type(text: str) -> tuple[str, list[str], bool]:
    """Result type, parameter types and variadicity of ``!llvm.func<...>``."""
    parser = _TypeParser(text)
    parser.expect("!llvm.func<")
    result = parser.parse()
    parser.expect("(")
    parameters: list[str] = []
    variadic = False
    while not parser.accept(")"):
        if parser.accept("..."):
            variadic = True
        else:
            parameters.append(parser.parse())
        parser.accept(",")
    return result, parameters, variadic


def element_type(type_: str) -> str:
    """Element of a vector type in LLVM's spelling; a scalar type is its own element."""
    return type_[1:-1].split(" x ", 1)[1] if type_[0] == "<" else type_


def vector_length(type_: str) -> int | None:
    """Length of a vector type in LLVM's spelling, or None for a scalar type."""
    return int(type_[1:].split(" x ", 1)[0]) if type_[0] == "<" else None


def with_element(type_: str, element: str) -> str:
    """The type of the same shape with another element type."""
    length = vector_length(type_)
    return element if length is None else f"<{length} x {element}>"


def integer_width(type_: str) -> int:
    """Bits of an integer (element) type."""
    return int(element_type(type_)[1:])


def intrinsic_suffix(type_: str) -> str:
    """How an overloaded intrinsic's name spells a type: ``f32``, ``v2bf16``, ``i64``, ``p3``."""
    if type_[0] == "<":
        return f"v{vector_length(type_)}{intrinsic_suffix(element_type(type_))}"
    if type_.startswith("ptr"):
        return "p" + (type_[len("ptr addrspace(") : -1] if type_ != "ptr" else "0")
    return {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}.get(type_, type_)


class _TypeParser:
    """Recursive-descent parser of the types that code generation accepts."""

    def __init__(self, text: str):
        self.text = text
        self.position = 0

    def error(self) -> CompilationError:
        return CompilationError(
            "a type that cannot be expressed in LLVM IR",
            got=self.text,
            expected="integers, index, floats of 4 to 64 bits, !llvm.ptr, !llvm.array, literal"
            " !llvm.struct, memrefs, or vectors with at most one dimension",
        )

    def accept(self, token: str) -> bool:
        while self.text.startswith(" ", self.position):
            self.position += 1
        if self.text.startswith(token, self.position):
            self.position += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error()

    def word(self) -> str:
        self.accept("")
        start = end = self.position
        while end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"):
            end += 1
        self.position = end
        return self.text[start:end]

    def parse(self) -> str:
        self.accept("!llvm.")
        word = self.word()
        if word == "vector" or word == "vec":
            return self.vector()
        if word == "array":
            self.expect("<")
            length = self.word()
            self.expect("x")
            element = self.parse()
            self.expect(">")
            return f"[{length} x {element}]"
        if word == "struct":
            return self.struct()
        if word == "ptr" and self.accept("<"):
            space = self.word()
            self.expect(">")
            return f"ptr addrspace({space})" if space != "0" else "ptr"
        if word in _SCALARS:
            return _SCALARS[word]
        if word[:1] == "i" and word[1:].isdigit():
            return word
        if narrow := _NARROW_FLOAT.fullmatch(word):
            return f"i{narrow[1]}"
        raise self.error()

    def vector(self) -> str:
        self.expect("<")
        length, separator, rest = self.text[self.position :].partition("x")
        if separator and length.strip().isdigit():
            self.position = len(self.text) - len(rest)
        else:
            length = "1"
        element = self.parse()
        self.expect(">")
        if element[0] in "<[{":
            raise self.error()
        return f"<{length.strip()} x {element}>"

    def struct(self) -> str:
        self.expect("<")
        packed = self.accept("packed")
        self.expect("(")
        elements: list[str] = []
        while not self.accept(")"):
            elements.append(self.parse())
            self.accept(",")
        self.expect(">")
        body = "{" + ", ".join(elements) + "}"
        return f"<{body}>" if packed else body
