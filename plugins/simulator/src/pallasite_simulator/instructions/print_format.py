"""Formats of ``printf`` in device code (CUDA C++ Programming Guide, Formatted Output).

They are those of C with less: see :func:`parse_format`.
"""

from __future__ import annotations

import dataclasses
import math
import re

_CONVERSION = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\d*))?"
    rb"(?P<size>h|ll|l)?(?P<type>[cdiouxXpeEfFgGaAs%])"
)

_VERBATIM = re.compile(rb"%[-+ #0]*(\*|\d+)?(\.\*(h|ll|l)?[diouxXeEfFgGaAs]|[zjt][diouxX])")
"""What an H200 prints as it is: C takes it as a conversion, but device code does not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """One ``%...`` of a format.

    Attributes:
      flags: of ``-+ #0``.
      width: a number; ``"*"`` if an argument of type ``int`` gives it; None if absent.
      precision: a number, or None.
      bits: of an integer argument, 64 for others.
      type: the letter.
      offset: of the argument in the argument buffer; ``width_offset`` that of the width, if an
        argument gives it.
    """

    flags: bytes
    width: int | str | None
    precision: int | None
    bits: int
    type: str
    offset: int
    width_offset: int | None

    @property
    def bytes(self) -> int:
        """Size of the argument."""
        return 8 if self.bits == 64 else 4


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A format: literal text, and conversions between its pieces.

    Attributes:
      literals: one more than there are conversions.
      conversions: in order.
      arguments: how many arguments it takes.
    """

    literals: tuple[bytes, ...]
    conversions: tuple[Conversion, ...]
    arguments: int


def parse_format(text: bytes) -> Format:
    """Reads a format, and lays out its arguments: each is aligned to its size.

    Sizes are ``h``, ``l`` and ``ll``. A precision ``.*`` and the sizes ``z``, ``j`` and ``t`` are
    no conversions but text.

    Raises:
      ValueError: another conversion that CUDA does not have; the message names it.
    """
    literals = [b""]
    conversions: list[Conversion] = []
    place = offset = arguments = 0

    def argument(size: int) -> int:
        nonlocal offset, arguments
        start = -(-offset // size) * size
        offset = start + size
        arguments += 1
        return start

    while (percent := text.find(b"%", place)) >= 0:
        literals[-1] += text[place:percent]
        verbatim = _VERBATIM.match(text, percent)
        if verbatim is not None:
            place = verbatim.end()
            literals[-1] += verbatim[0]
            continue
        found = _CONVERSION.match(text, percent)
        if found is None:
            raise ValueError(text[percent : percent + 8].decode(errors="replace"))
        place = found.end()
        kind = found["type"].decode()
        if kind == "%":
            literals[-1] += b"%"
            continue
        width, precision = found["width"], found["precision"]
        width_offset = argument(4) if width == b"*" else None
        bits = 64
        if kind in "diouxX" and found["size"] not in (b"l", b"ll"):
            bits = 16 if found["size"] == b"h" else 32
        elif kind == "c":
            bits = 32
        conversions.append(
            Conversion(
                found["flags"],
                None if width is None else "*" if width == b"*" else int(width),
                None if precision is None else int(precision or b"0"),
                bits,
                kind,
                argument(8 if bits == 64 else 4),
                width_offset,
            )
        )
        literals.append(b"")
    literals[-1] += text[place:]
    return Format(tuple(literals), tuple(conversions), arguments)


def convert(conversion: Conversion, value: int | float | bytes | None, width: int = 0) -> bytes:
    """Formats one argument.

    Args:
      conversion: what to do.
      value: bits of an integer, character or pointer as an unsigned number, a float, or a string
        (None for a null pointer).
      width: if an argument gives it.
    """
    flags, precision = conversion.flags, conversion.precision
    if isinstance(conversion.width, int):
        width = conversion.width
    if width < 0:
        flags, width = flags + b"-", -width
    kind = conversion.type
    zeros = b"0" in flags and b"-" not in flags
    if isinstance(value, float):
        prefix, text = _float(value, kind, flags, precision)
        zeros = zeros and math.isfinite(value)
    elif kind == "s":
        assert not isinstance(value, int)
        prefix, text, zeros = b"", (b"(null)" if value is None else value)[:precision], False
    else:
        assert isinstance(value, int)
        if kind == "c":
            prefix, text, zeros = b"", bytes([value & 0xFF]), False
        elif kind == "p" and not value:
            prefix, text, zeros = b"", b"(nil)", False
        else:
            prefix, text = _integer(value, kind, flags, precision, conversion.bits)
            zeros = zeros and precision is None
    missing = max(0, width - len(prefix) - len(text))
    if zeros:
        return prefix + b"0" * missing + text
    if b"-" in flags:
        return prefix + text + b" " * missing
    return b" " * missing + prefix + text


def _sign(negative: bool, flags: bytes) -> bytes:
    if negative:
        return b"-"
    return b"+" if b"+" in flags else b" " if b" " in flags else b""


def _integer(
    value: int, kind: str, flags: bytes, precision: int | None, bits: int
) -> tuple[bytes, bytes]:
    """Sign or prefix, and digits."""
    value &= (1 << bits) - 1
    prefix = b""
    if kind in "di":
        if value >> (bits - 1):
            value -= 1 << bits
        prefix = _sign(value < 0, flags)
    base = {"o": "o", "x": "x", "X": "X", "p": "x"}.get(kind, "d")
    digits = format(abs(value), base).encode()
    if precision == 0 and not value:
        digits = b""
    digits = digits.rjust(precision or 0, b"0")
    if kind == "p" or (kind in "xX" and b"#" in flags and value):
        prefix = b"0X" if kind == "X" else b"0x"
    elif kind == "o" and b"#" in flags and not digits.startswith(b"0"):
        digits = b"0" + digits
    return prefix, digits


def _float(value: float, kind: str, flags: bytes, precision: int | None) -> tuple[bytes, bytes]:
    """Sign (with ``0x`` of ``%a``), and digits."""
    sign = _sign(math.copysign(1.0, value) < 0, flags)
    magnitude = abs(value)
    if kind in "aA" and math.isfinite(value):
        digits = _hexadecimal(magnitude, precision, b"#" in flags)
        prefix = sign + b"0x"
        return (prefix.upper(), digits.upper()) if kind == "A" else (prefix, digits)
    if kind in "aA":
        kind = "f" if kind == "a" else "F"
    alternate = "#" if b"#" in flags else ""
    places = "" if precision is None else f".{precision}"
    return sign, f"{magnitude:{alternate}{places}{kind}}".encode()


def _hexadecimal(magnitude: float, precision: int | None, point: bool) -> bytes:
    """Digits of ``%a``, without ``0x``."""
    fraction, exponent = math.frexp(magnitude)
    bits = int(fraction * 2**53)
    exponent -= 1
    if not magnitude:
        exponent = 0
    elif exponent < -1022:
        bits >>= -1022 - exponent
        exponent = -1022
    if precision is not None and precision < 13:
        unit = 1 << 4 * (13 - precision)
        rest = bits % unit
        up = rest * 2 > unit or (rest * 2 == unit and bits // unit % 2 == 1)
        bits += unit - rest if up else -rest
    digits = f"{bits & (1 << 52) - 1:013x}"
    digits = digits.rstrip("0") if precision is None else digits.ljust(precision, "0")[:precision]
    dot = "." if digits or point else ""
    return f"{bits >> 52}{dot}{digits}p{exponent:+d}".encode()
