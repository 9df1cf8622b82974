"""Which modifiers an instruction has: one of each group that it knows (PTX ISA 9.7)."""

from __future__ import annotations

from collections.abc import Mapping

from pallasite_simulator.binder import Binder
from pallasite_simulator.types import TYPES, PtxType

OPTIONAL = ""
"""In a group: the modifier may be left out."""


def choose(binder: Binder, *ignored: str, **groups: tuple[str, ...]) -> Mapping[str, str]:
    """Assigns each modifier of the instruction to a group.

    Args:
      *ignored: modifiers that must be there and say nothing more (``"sync"``).
      **groups: for each group, the modifiers of which there is one. A group with ``OPTIONAL`` may
        have none.

    Returns:
      The modifier of each group; ``""`` where there is none.

    Raises:
      PtxError: an unknown modifier, two of one group, or none of a group that needs one.
    """
    all_groups = groups | {word: (word,) for word in ignored}
    found: dict[str, str] = {}
    for modifier in binder.instruction.modifiers:
        group = next((name for name, known in all_groups.items() if modifier in known), None)
        if group is None and modifier in TYPES and "type" in groups:
            raise binder.error(
                f"the instruction has no type .{modifier}", expected=_listed(groups["type"])
            )
        if group is None:
            raise binder.error(f"unknown modifier .{modifier}")
        if group in found:
            raise binder.error(
                "two modifiers that exclude each other", got=f".{found[group]}.{modifier}"
            )
        found[group] = modifier
    for group, known in all_groups.items():
        if group not in found and OPTIONAL not in known:
            raise binder.error("a modifier is missing", expected=_listed(known))
    return {group: found.get(group, "") for group in groups}


def only_for(binder: Binder, modifier: str, name: str, *allowed: str) -> None:
    """Raises :class:`PtxError` if a modifier is there (is not ``""``) with another type.

    Args:
      modifier: as :func:`choose` found it.
      name: of the instruction's type.
      *allowed: names of the types that have the modifier.
    """
    if modifier and name not in allowed:
        raise binder.error(
            f".{name} has no .{modifier}", expected=f".{modifier} with {_listed(allowed)}"
        )


def with_bits(kind: PtxType, bits: int) -> PtxType:
    """The integer type of the same signedness and another size."""
    return TYPES[f"{kind.name[0]}{bits}"]


def _listed(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(f".{name}" for name in names if name)
