"""Negations of integers in a form that every assembler compiles right.

Before CUDA 13.5 (seen with ptxas 12.9 and 13.0, for sm_90 and sm_100), ptxas joins two ``min`` or
``max`` of signed integers of 16 or 32 bits to one instruction with three operands, and loses the
negation of one of them, be it a ``neg`` or a difference from 0, for 32 bits a product with -1, too.
Products with -1 of 16 bits, and complements with 1 added of 32 bits, are compiled right.
"""

from __future__ import annotations

import re
from typing import Any

_EXTREMES = {bits: re.compile(rf"\b(?:min|max)\.s{bits}\b") for bits in (16, 32)}
_NEGATIONS = {
    bits: re.compile(
        rf"(?P<guard>@!?%\w+[ \t]+)?\b"
        rf"(?:neg\.s{bits}[ \t]+(?P<neg>%\w+), "
        rf"|sub\.s{bits}[ \t]+(?P<sub>%\w+), 0, )(?P<operand>%\w+);"
    )
    for bits in (16, 32)
}


def exact_negations(ptx: str, context: Any) -> str:
    """Writes negations in a form that no assembler loses, in kernels that have two ``min`` or
    ``max`` of signed integers of the same width; other kernels stay as they are."""
    for bits, negation in _NEGATIONS.items():
        if len(_EXTREMES[bits].findall(ptx)) > 1:
            ptx = negation.sub(_by_product if bits == 16 else _by_complement, ptx)
    return ptx


def _by_product(match: re.Match[str]) -> str:
    guard, result = match["guard"] or "", match["neg"] or match["sub"]
    return f"{guard}mul.lo.s16 \t{result}, {match['operand']}, -1;"


def _by_complement(match: re.Match[str]) -> str:
    guard, result = match["guard"] or "", match["neg"] or match["sub"]
    return (
        f"{guard}not.b32 \t{result}, {match['operand']};\n\t{guard}add.s32 \t{result}, {result}, 1;"
    )
