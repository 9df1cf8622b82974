"""Fundamental types of PTX (PTX ISA 5.2)."""

from __future__ import annotations

from pallasite_simulator.ptx.lexer import Reader

TYPE_BYTES = {
    "b8": 1,
    "b16": 2,
    "b32": 4,
    "b64": 8,
    "b128": 16,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "s8": 1,
    "s16": 2,
    "s32": 4,
    "s64": 8,
    "f16": 2,
    "f16x2": 4,
    "f32": 4,
    "f64": 8,
}
_OPAQUE = ("texref", "samplerref", "surfref")


def type_name(reader: Reader) -> str:
    """Takes the type of a register or variable, such as ``.b32``, and gives it without the dot.

    Raises:
      PtxError: another word, or a type that the simulator does not have.
    """
    word = reader.words[reader.index]
    name = word[1:]
    if word[:1] != "." or (name != "pred" and name not in TYPE_BYTES):
        if name in _OPAQUE:
            reader.fail(f"textures and surfaces ({word}) are not supported")
        reader.fail(f"expected a type such as .b32, found {reader.found()}")
    reader.index += 1
    return name
