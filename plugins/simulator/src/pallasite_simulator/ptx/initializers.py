"""Initial values of variables (PTX ISA 5.4.4)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from pallasite_simulator.ptx.constants import Expressions, double_value, literal, plain_integer
from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.scopes import Name
from pallasite_simulator.ptx.syntax import Immediate, Symbol
from pallasite_simulator.ptx.types import TYPE_BYTES


class Initializer:
    """Reads what stands after ``=``.

    Args:
      reader: at the first word after ``=``.
      names: what names mean: addresses of variables and functions may be taken.
      type_: of an element.
      address_bytes: size of an address.

    Attributes:
      data: the contents, up to the last byte that is given.
      addresses: byte offsets with the symbols whose addresses stand there.
      count: how many elements the outermost braces hold.
    """

    def __init__(self, reader: Reader, names: Mapping[str, Name], type_: str, address_bytes: int):
        self.data = bytearray()
        self.addresses: list[tuple[int, Symbol]] = []
        self.count = 0
        self._reader = reader
        self._names = names
        self._type = type_
        self._element = TYPE_BYTES[type_]
        self._address_bytes = address_bytes
        self._expressions = Expressions(reader)
        self._row_is_short = False
        # Of an address that is given byte by byte: its symbol and how many bytes are there.
        self._masked: Symbol | None = None
        self._masked_bytes = 0

    def read(self, dimensions: tuple[int | None, ...]) -> None:
        """Reads values for these dimensions; the first may be None for as many as are given.

        Raises:
          PtxError: too many values, braces that do not fit, or values that do not fit the type.
        """
        if dimensions:
            self._braces(0, dimensions, outermost=True)
        else:
            self._value(0)
        if self._masked is not None:
            self._reader.fail("an address is given in part")

    def _braces(
        self, offset: int, dimensions: tuple[int | None, ...], outermost: bool = False
    ) -> None:
        reader = self._reader
        reader.expect("{")
        stride = self._element * math.prod(one or 0 for one in dimensions[1:])
        count = 0
        while not reader.accept("}"):
            if count:
                reader.expect(",")
            if dimensions[0] is not None and count >= dimensions[0]:
                reader.fail(f"more than {dimensions[0]} initial values")
            if dimensions[1:]:
                self._braces(offset + count * stride, dimensions[1:])
            else:
                self._value(offset + count * stride)
            count += 1
        if outermost:
            self.count = count
        else:
            self._row_is_short |= count != dimensions[0]

    def _put(self, offset: int, data: bytes) -> None:
        self.data.extend(bytes(max(offset + len(data) - len(self.data), 0)))
        self.data[offset : offset + len(data)] = data

    def _value(self, offset: int) -> None:
        reader = self._reader
        word = reader.words[reader.index]
        if self._row_is_short:
            # ptxas moves the later rows up, which is hardly what is meant.
            reader.fail("a row of an array with too few values before other rows")
        if reader.words[reader.index + 1] == "(" and literal(word) is not None:
            self._masked_byte(offset)
            return
        if self._masked is not None:
            reader.fail("an address is given in part")
        if word == "generic" or word in self._names:
            symbol = self._symbol()
            if self._element != self._address_bytes or self._type[0] == "f":
                reader.fail(
                    f"an address of {self._address_bytes} bytes in an element of type "
                    f".{self._type}",
                    index=reader.index - 1,
                )
            self._put(offset, bytes(self._element))
            self.addresses.append((offset, symbol))
            return
        at = reader.index
        self._put(offset, self._encoded(self._expressions.constant(), at))

    def _symbol(self) -> Symbol:
        """Reads ``name``, ``name+4``, ``generic(name)`` or ``generic(name)+4``."""
        reader = self._reader
        generic = reader.accept("generic")
        if generic:
            reader.expect("(")
        at = reader.index
        name = reader.name("the name of a variable")
        symbol = self._names.get(name)
        if not isinstance(symbol, Symbol):
            reader.fail(f"{name!r} is not the name of a variable or function", index=at)
        if generic:
            reader.expect(")")
        offset = 0
        while reader.accept("+"):
            offset += plain_integer(reader, "an offset")
        return Symbol(symbol.name, offset, generic)

    def _masked_byte(self, offset: int) -> None:
        """Reads ``0xff00(name)``: one byte of an address (PTX ISA 5.4.4, mask operator).

        Only all bytes of an address in order have a meaning here.
        """
        reader = self._reader
        at = reader.index
        mask = plain_integer(reader, "a mask")
        reader.expect("(")
        symbol = self._symbol()
        reader.expect(")")
        if mask != 0xFF << 8 * self._masked_bytes or self._element != 1:
            reader.fail("only whole addresses, byte by byte in order, are supported", index=at)
        if self._masked is None:
            self.addresses.append((offset, symbol))
        elif symbol != self._masked:
            reader.fail("an address is given in part", index=at)
        self._put(offset, b"\0")
        self._masked = symbol
        self._masked_bytes += 1
        if self._masked_bytes == self._address_bytes:
            self._masked = None
            self._masked_bytes = 0

    def _encoded(self, value: Immediate, at: int) -> bytes:
        reader = self._reader
        bits = 8 * self._element
        if self._type in ("f32", "f64"):
            if value.kind == "int":
                reader.fail(f"an integer for the type .{self._type}", index=at)
            if value.kind == self._type:
                return value.value.to_bytes(self._element, "little")
            if value.kind == "f32":
                reader.fail("a constant of type .f32 for the type .f64", index=at)
            try:
                return struct.pack("<f", double_value(value))
            except OverflowError:
                # Beyond the largest float: rounding to nearest gives infinity.
                return struct.pack("<f", math.copysign(math.inf, double_value(value)))
        if value.kind != "int":
            # Bits are written as they are.
            if self._type == {"f32": "b32", "f64": "b64"}[value.kind]:
                return value.value.to_bytes(self._element, "little")
            reader.fail(f"a float for the type .{self._type}", index=at)
        if self._type in ("f16", "f16x2"):
            reader.fail(f"an integer for the type .{self._type}", index=at)
        # Small negative values may have become large ones of type .u64, as in ~1.
        if not -(1 << bits - 1) <= value.value < 1 << bits and (
            value.value < (1 << 64) - (1 << bits - 1)
        ):
            reader.fail(f"{value.value} does not fit the type .{self._type}", index=at)
        return (value.value & (1 << bits) - 1).to_bytes(self._element, "little")
