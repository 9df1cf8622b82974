"""Negations of integers in a form that every assembler compiles right.

Before CUDA 13.5 (seen with ptxas 12.9 and 13.0, for sm_90 and sm_100), ptxas joins two ``min`` or
``max`` of signed integers of 16 or 32 bits to one instruction with three operands, and loses the
negation of one of them, be it a ``neg`` or a difference from 0, for 32 bits a product with -1, too.
Products with -1 of 16 bits, and complements with 1 added of 32 bits, are compiled right.
"""

from __future__ import annotations

import re
from typing import Any

# Each begins with fixed text, for which whole kernels are searched fast.
_NEGATIONS = {
    bits: tuple(
        re.compile(rf"{name}\.s{bits}[ \t]+(%\w+), {zero}(%\w+);")
        for name, zero in (("neg", ""), ("sub", "0, "))
    )
    for bits in (16, 32)
}
_GUARD = re.compile(r"@!?%\w+[ \t]+\Z")
_LONGEST_GUARD = 64


def exact_negations(ptx: str, context: Any) -> str:
    """Writes negations in a form that no assembler loses, in kernels that have two ``min`` or
    ``max`` of signed integers of the same width; other kernels stay as they are."""
    del context
    for bits, negations in _NEGATIONS.items():
        if sum(ptx.count(f"{name}.s{bits}") for name in ("min", "max")) > 1:
            for negation in negations:
                ptx = negation.sub(_by_product if bits == 16 else _by_complement, ptx)
    return ptx


def _by_product(match: re.Match[str]) -> str:
    return f"mul.lo.s16 \t{match[1]}, {match[2]}, -1;"


def _by_complement(match: re.Match[str]) -> str:
    before = match.string[max(match.start() - _LONGEST_GUARD, 0) : match.start()]
    found = _GUARD.search(before)
    guard = found[0] if found is not None else ""
    return f"not.b32 \t{match[1]}, {match[2]};\n\t{guard}add.s32 \t{match[1]}, {match[1]}, 1;"
