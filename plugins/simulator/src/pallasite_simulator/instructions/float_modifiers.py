"""Which modifiers a floating-point instruction has: a choice, such as the rounding, and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallasite_simulator.types import TYPES

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder

DIRECTIONS = ("rn", "rz", "rm", "rp")
"""Roundings: to the nearest even, towards zero, down, up (PTX ISA 9.7.3)."""


def read(
    binder: Binder,
    flags: Sequence[str] = (),
    *,
    choices: Sequence[str] = (),
    default: str | None = None,
    exclusive: Sequence[tuple[str, str]] = (),
) -> tuple[str, frozenset[str]]:
    """The modifiers of the instruction, apart from its types.

    Args:
      binder: of the instruction.
      flags: modifiers that it may have.
      choices: modifiers of which it has one.
      default: the choice where none is made; None if one must be.
      exclusive: pairs of flags that it may not have together.

    Returns:
      The choice (``""`` where there are none to choose from), and the flags that are there.

    Raises:
      PtxError: another modifier, one twice, two choices, or none.
    """
    chosen: list[str] = []
    found: set[str] = set()
    for modifier in binder.instruction.modifiers:
        if modifier in TYPES:
            continue
        if modifier not in choices and modifier not in flags:
            raise binder.error(f"modifier .{modifier} does not fit the instruction and its type")
        if modifier in chosen or modifier in found:
            raise binder.error(f"modifier .{modifier} is given twice")
        if modifier in choices:
            chosen.append(modifier)
        else:
            found.add(modifier)
    if len(chosen) > 1:
        raise binder.error(f"modifiers .{chosen[0]} and .{chosen[1]} exclude each other")
    for one, other in exclusive:
        if one in found and other in found:
            raise binder.error(f"modifiers .{one} and .{other} exclude each other")
    if choices and not chosen and default is None:
        listed = ", ".join(f".{one}" for one in choices)
        raise binder.error("a modifier is missing", expected=f"one of {listed}")
    return (chosen[0] if chosen else default or ""), frozenset(found)
