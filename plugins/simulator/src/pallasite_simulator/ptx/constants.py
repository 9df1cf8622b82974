"""Constants and constant expressions (PTX ISA 4.5)."""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable
from typing import NoReturn

from pallasite_simulator.ptx.lexer import Reader
from pallasite_simulator.ptx.syntax import Immediate

WARP_SIZE = 32

_INTEGER = re.compile(
    r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<binary>[01]+)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9]\d*))"
    r"(?P<unsigned>U?)",
    re.ASCII,
)
_FLOAT_BITS = re.compile(r"0(?:[fF](?P<f32>[0-9a-fA-F]{8})|[dD](?P<f64>[0-9a-fA-F]{16}))")
_DECIMAL_FLOAT = re.compile(r"(?:\d+\.\d*|\d+(?=[eE])|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)

_MASK = (1 << 64) - 1

# Nested deeper than this, an expression is taken for nonsense rather than overflow the stack.
_DEEPEST = 100

_PRECEDENCE = {
    "||": 1,
    "&&": 2,
    "|": 3,
    "^": 4,
    "&": 5,
    "==": 6,
    "!=": 6,
    "<": 7,
    ">": 7,
    "<=": 7,
    ">=": 7,
    "<<": 8,
    ">>": 8,
    "+": 9,
    "-": 9,
    "*": 10,
    "/": 10,
    "%": 10,
}
ADDITIVE = _PRECEDENCE["+"]
MULTIPLICATIVE = _PRECEDENCE["*"]

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}
_FLOAT_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}


def wrap(value: int, unsigned: bool) -> int:
    """The value modulo 2**64, as ``.u64`` or ``.s64``."""
    value &= _MASK
    return value if unsigned or value < 1 << 63 else value - (1 << 64)


@functools.lru_cache(maxsize=4096)
def literal(word: str) -> tuple[Immediate, bool] | None:
    """The constant that one word stands for and whether it is unsigned; None if it is none.

    Integers are ``.s64``, or ``.u64`` with suffix ``U`` or where they do not fit (PTX ISA 4.5.1).
    """
    if len(word) > 400:
        return None
    if match := _INTEGER.fullmatch(word):
        if match["hex"]:
            value = int(match["hex"], 16)
        elif match["binary"]:
            value = int(match["binary"], 2)
        elif match["octal"]:
            value = int(match["octal"], 8)
        else:
            value = int(match["decimal"])
        if value > _MASK:
            return None
        return Immediate(value), bool(match["unsigned"]) or value >= 1 << 63
    if match := _FLOAT_BITS.fullmatch(word):
        kind = "f32" if match["f32"] else "f64"
        return Immediate(int(match[kind], 16), kind), False
    if _DECIMAL_FLOAT.fullmatch(word) and math.isfinite(float(word)):
        return _double(float(word)), False
    return None


def _double(value: float) -> Immediate:
    return Immediate(int.from_bytes(struct.pack(">d", value)), "f64")


def double_value(immediate: Immediate) -> float:
    """The value of an immediate of kind ``"f64"``."""
    return float(struct.unpack(">d", immediate.value.to_bytes(8))[0])


def plain_integer(reader: Reader, what: str) -> int:
    """Takes a non-negative integer of one word.

    Raises:
      PtxError: another word; the message says that ``what`` was expected.
    """
    known = literal(reader.words[reader.index])
    if known is None or known[0].kind != "int":
        reader.fail(f"expected {what}, found {reader.found()}")
    reader.index += 1
    return known[0].value


class Expressions:
    """Reads constant expressions: C's operators on 64-bit integers (PTX ISA 4.5.4 to 4.5.6).

    Where ptxas gives a result another type than the manual does (those of ``& | ^ % ?:``), the type
    is that of ptxas. A value is an :class:`Immediate` and whether it is of type ``.u64``, not
    ``.s64``. Floats have the four basic operations in double precision; hexadecimal ``.f32`` ones
    stand alone.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self._depth = 0

    def constant(self, lowest: int = 0) -> Immediate:
        """Reads an expression whose operators bind at least as strongly as ``lowest``.

        Raises:
          PtxError: no constant expression, or one without a value (a division by zero).
        """
        return self._expression(lowest)[0]

    def integer(self, what: str, lowest: int = 0) -> int:
        """Reads an integer expression, as :meth:`constant`.

        Raises:
          PtxError: another thing; the message calls the expected one ``what``.
        """
        start = self.reader.index
        value = self.constant(lowest)
        if value.kind != "int":
            self.reader.fail(
                f"expected {what}, found the float {self.reader.found(start)}", index=start
            )
        return value.value

    def _expression(self, lowest: int) -> tuple[Immediate, bool]:
        self._depth += 1
        if self._depth > _DEEPEST:
            self.reader.fail("a constant expression is nested too deeply")
        left = self._unary()
        reader = self.reader
        while True:
            operator = reader.words[reader.index]
            strength = _PRECEDENCE.get(operator, 0)
            if strength and strength >= lowest:
                at = reader.index
                reader.index += 1
                left = self._apply(operator, left, self._expression(strength + 1), at)
            elif operator == "?" and lowest == 0:
                at = reader.index
                reader.index += 1
                chosen = self._expression(0)
                reader.expect(":")
                other = self._expression(0)
                if any(one[0].kind != "int" for one in (left, chosen, other)):
                    self._no_floats("?:", at)
                left = chosen if left[0].value else other
            else:
                self._depth -= 1
                return left

    def _unary(self) -> tuple[Immediate, bool]:
        reader = self.reader
        at = reader.index
        word = reader.words[at]
        if known := literal(word):
            reader.index += 1
            return known
        if word == "WARP_SZ":
            reader.index += 1
            return Immediate(WARP_SIZE), False
        if word == "(":
            return self._parenthesized()
        if word in ("-", "+", "~", "!"):
            reader.index += 1
            # Only unary operators bind as strongly as this.
            value, unsigned = self._expression(MULTIPLICATIVE + 1)
            return self._negated(word, value, unsigned, at)
        if word[:1].isdigit():
            reader.fail(f"malformed number {word!r}")
        reader.fail(f"expected a constant, found {reader.found()}")

    def _negated(
        self, operator: str, value: Immediate, unsigned: bool, at: int
    ) -> tuple[Immediate, bool]:
        if value.kind == "f64" and operator in ("-", "+"):
            return (_double(-double_value(value)) if operator == "-" else value), False
        if value.kind != "int":
            self._no_floats(operator, at)
        if operator == "!":
            return Immediate(int(not value.value)), False
        if operator == "~":
            return Immediate(wrap(~value.value, True)), True
        if operator == "+":
            return value, unsigned
        return Immediate(wrap(-value.value, unsigned)), unsigned

    def _parenthesized(self) -> tuple[Immediate, bool]:
        reader = self.reader
        reader.expect("(")
        cast = reader.words[reader.index]
        if cast in (".s64", ".u64"):
            at = reader.index
            reader.index += 1
            reader.expect(")")
            value, _ = self._expression(MULTIPLICATIVE + 1)
            if value.kind != "int":
                self._no_floats(cast, at)
            return Immediate(wrap(value.value, cast == ".u64")), cast == ".u64"
        inner = self._expression(0)
        reader.expect(")")
        return inner

    def _apply(
        self, operator: str, left: tuple[Immediate, bool], right: tuple[Immediate, bool], at: int
    ) -> tuple[Immediate, bool]:
        if left[0].kind == right[0].kind == "f64" and operator in _FLOAT_ARITHMETIC:
            x, y = double_value(left[0]), double_value(right[0])
            if operator == "/" and y == 0:
                self.reader.fail("division by zero in a constant expression", index=at)
            return _double(_FLOAT_ARITHMETIC[operator](x, y)), False
        if left[0].kind != "int" or right[0].kind != "int":
            self._no_floats(operator, at)
        a, b = left[0].value, right[0].value
        if operator in ("<<", ">>"):
            if not 0 <= b < 64:
                self.reader.fail(f"shift by {b} in a constant expression", index=at)
            shifted = a << b if operator == "<<" else a >> b
            return Immediate(wrap(shifted, left[1])), left[1]
        # The remainder is always that of .u64.
        unsigned = left[1] or right[1] or operator == "%"
        a, b = wrap(a, unsigned), wrap(b, unsigned)
        if operator in _COMPARISONS:
            return Immediate(int(_COMPARISONS[operator](a, b))), False
        if operator in _ARITHMETIC:
            return Immediate(wrap(_ARITHMETIC[operator](a, b), unsigned)), unsigned
        if b == 0:
            self.reader.fail("division by zero in a constant expression", index=at)
        if operator == "%":
            return Immediate(a % b), True
        # As in C, the quotient is rounded towards zero.
        quotient = abs(a) // abs(b) if (a < 0) == (b < 0) else -(abs(a) // abs(b))
        return Immediate(wrap(quotient, unsigned)), unsigned

    def _no_floats(self, operator: str, at: int) -> NoReturn:
        self.reader.fail(f"{operator!r} cannot be applied to these constants", index=at)
