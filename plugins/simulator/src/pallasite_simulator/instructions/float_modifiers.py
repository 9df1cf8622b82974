"""Which modifiers a floating-point instruction has: a choice, such as the rounding, and flags."""

from __future__ import annotations

from collections.abc import Collection

from pallasite_simulator.binder import Binder
from pallasite_simulator.types import TYPES

DIRECTIONS = ("rn", "rz", "rm", "rp")
"""Roundings: to the nearest even, towards zero, down, up (PTX ISA 9.7.3)."""


def read(
    binder: Binder,
    flags: Collection[str] = (),
    *,
    choices: Collection[str] = (),
    default: str | None = None,
) -> tuple[str, frozenset[str]]:
    """The modifiers of the instruction, apart from its types.

    Args:
      binder: of the instruction.
      flags: modifiers that it may have.
      choices: modifiers of which it has one.
      default: the choice where none is made; None if one must be.

    Returns:
      The choice (``""`` where there are none to choose from), and the flags that are there.

    Raises:
      PtxError: another modifier, one twice, two choices, or none.
    """
    chosen: list[str] = []
    found: list[str] = []
    for modifier in binder.instruction.modifiers:
        if modifier in choices:
            chosen.append(modifier)
        elif modifier in flags:
            found.append(modifier)
        elif modifier not in TYPES:
            raise binder.error(f"unknown modifier .{modifier}")
    if len(set(found)) != len(found) or len(chosen) > 1:
        raise binder.error(
            "modifiers that exclude each other", got=" ".join(f".{one}" for one in chosen + found)
        )
    if choices and not chosen:
        if default is None:
            raise binder.error(
                "a modifier is missing",
                expected="one of " + ", ".join(f".{choice}" for choice in choices),
            )
        chosen = [default]
    return chosen[0] if chosen else "", frozenset(found)
