"""Flags of instructions, read from the attributes of MLIR operations.

Each function takes an attribute map and returns words that end in a space, or nothing.
"""

from __future__ import annotations

from typing import Any

from pallasite.ir.types import remembered


def _words(attribute: Any) -> str:
    """``#arith.fastmath<nnan,contract>`` as ``"nnan contract "``."""
    inside = str(attribute).partition("<")[2].rpartition(">")[0]
    words = [word.strip() for word in inside.replace("|", ",").split(",")]
    return "".join(f"{word} " for word in words if word and word != "none")


def _flags(attributes: Any, name: str) -> str:
    if name not in attributes:
        return ""
    attribute = attributes[name]
    return str(remembered(attribute, _words, attribute.context))


def fast_math(attributes: Any) -> str:
    """Fast-math flags of an operation of arith or math."""
    return _flags(attributes, "fastmath")


def fast_math_llvm(attributes: Any) -> str:
    """Fast-math flags of an operation of the llvm dialect."""
    return _flags(attributes, "fastmathFlags")


def overflow(attributes: Any) -> str:
    """``nsw`` and ``nuw`` of an operation of arith."""
    return _flags(attributes, "overflowFlags")


def exact(attributes: Any) -> str:
    """``exact`` of a division or right shift."""
    return "exact " if "isExact" in attributes else ""


def disjoint(attributes: Any) -> str:
    """``disjoint`` of an or."""
    return "disjoint " if "isDisjoint" in attributes else ""


def non_negative(attributes: Any) -> str:
    """``nneg`` of a zero extension or a conversion from unsigned."""
    return "nneg " if "nonNeg" in attributes else ""
