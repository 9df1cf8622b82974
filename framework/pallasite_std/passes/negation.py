"""Negation of 16-bit integers in a form that every assembler compiles right.

Before CUDA 13.5 (seen with ptxas 12.9 and 13.0, for sm_90 and sm_100), ptxas joins two ``min`` or
``max`` of 16-bit integers to one instruction with three operands, and loses the ``neg`` of one of
them. A product with -1 is the same number, and takes as many machine instructions.
"""

from __future__ import annotations

import re
from typing import Any

_NEGATION = re.compile(r"\bneg\.s16([ \t]+)(%\w+), (%\w+);")
_EXTREME = re.compile(r"\b(?:min|max)\.[su]16\b")


def negate_by_products(ptx: str, context: Any) -> str:
    """Replaces ``neg.s16`` by a product with -1 in kernels that have ``min`` or ``max`` of 16-bit
    integers; other kernels stay as they are."""
    if "neg.s16" not in ptx or not _EXTREME.search(ptx):
        return ptx
    return _NEGATION.sub(r"mul.lo.s16\1\2, \3, -1;", ptx)
