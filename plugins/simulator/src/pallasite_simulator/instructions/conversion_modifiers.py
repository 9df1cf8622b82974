"""Which modifiers cvt takes for which types: PTX ISA 9.7.9.21."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.instructions.float_modifiers import DIRECTIONS, read
from pallasite_simulator.types import PtxType

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder

type Modifiers = tuple[str, frozenset[str]]
"""The rounding, or an empty string, and the other modifiers."""

INTEGRAL = ("rni", "rzi", "rmi", "rpi")

_FLOATS = ("f16", "bf16", "f32", "f64")
_NARROW = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the modifiers of a conversion may be.

    Attributes:
      roundings: of which there is one at most.
      needed: whether there must be one.
      flags: modifiers that may be there.
      demanded: a flag that must be there.
      exclusive: pairs of flags that may not be there together.
      undirected: flags that need one of the roundings rn, rz and rna.
    """

    roundings: tuple[str, ...] = ()
    needed: bool = True
    flags: tuple[str, ...] = ()
    demanded: str = ""
    exclusive: tuple[tuple[str, str], ...] = ()
    undirected: tuple[str, ...] = ()


def read_modifiers(binder: Binder, target: PtxType, source: PtxType) -> Modifiers:
    """The modifiers of a ``cvt`` between two types.

    Raises:
      PtxError: there is no such conversion, or the modifiers do not fit it.
    """
    rule = _rule(target, source)
    if rule is None:
        raise binder.error(f"there is no conversion to .{target.name} from .{source.name}")
    rounding, flags = read(
        binder,
        rule.flags,
        choices=rule.roundings,
        default=None if rule.needed else "",
        exclusive=rule.exclusive,
    )
    if rule.demanded and rule.demanded not in flags:
        raise binder.error(f"the conversion needs modifier .{rule.demanded}")
    for flag in rule.undirected:
        if flag in flags and rounding in ("rm", "rp"):
            raise binder.error(f"modifier .{flag} does not go with rounding .{rounding}")
    if rounding == "rna" and "relu" in flags:
        raise binder.error("modifier .relu does not go with rounding .rna")
    return rounding, flags


def _rule(target: PtxType, source: PtxType) -> Rule | None:
    to, of = target.name, source.name
    if "packed" in (target.kind, source.kind):
        return _packed_rule(to, of)
    if to == "tf32":
        return Rule(("rn", "rz", "rna"), flags=("relu", "satfinite")) if of == "f32" else None
    if to in _FLOATS and of in _FLOATS:
        return _float_rule(to, of)
    numbers = ("unsigned", "signed")
    if to in _FLOATS and source.kind in numbers:
        return Rule(DIRECTIONS, flags=_sat(to) + _ftz(to))
    if of in _FLOATS and target.kind in numbers:
        return Rule(INTEGRAL, flags=_sat(of) + _ftz(of))
    if target.kind in numbers and source.kind in numbers:
        wide, narrow = np.iinfo(target.dtype), np.iinfo(source.dtype)
        superset = wide.min <= narrow.min and wide.max >= narrow.max
        return Rule(flags=() if superset else ("sat",))
    return None


def _sat(*names: str) -> tuple[str, ...]:
    """``.sat``, which bf16 does not have."""
    return () if "bf16" in names else ("sat",)


def _ftz(*names: str) -> tuple[str, ...]:
    """``.ftz``, if one of the types is f32."""
    return ("ftz",) if "f32" in names else ()


def _float_rule(to: str, of: str) -> Rule:
    flags = _sat(to, of) + _ftz(to, of)
    if to == of:
        return Rule(INTEGRAL, needed=False, flags=flags)
    if of == "f32" and to in ("f16", "bf16"):
        exclusive = tuple((one, other) for one in ("relu", "satfinite") for other in ("ftz", "sat"))
        finite = ("relu", "satfinite")
        if to == "bf16":
            exclusive = (("satfinite", "ftz"), ("relu", "ftz"))
        return Rule(DIRECTIONS, flags=flags + finite, exclusive=exclusive, undirected=finite)
    if "bf16" in (to, of):
        # A rounding is needed where bits are lost; where none are, it may be there.
        return Rule(DIRECTIONS, needed=of == "f64", flags=flags)
    if _FLOATS.index(to) < _FLOATS.index(of):
        return Rule(DIRECTIONS, flags=flags)
    return Rule(flags=flags)


def _packed_rule(to: str, of: str) -> Rule | None:
    if to in ("f16x2", "bf16x2") and of == "f32":
        return Rule(("rn", "rz"), flags=("relu", "satfinite"))
    if to in _NARROW and of in ("f32", "f16x2", "bf16x2"):
        return Rule(("rn",), flags=("relu", "satfinite"), demanded="satfinite")
    if to == "f16x2" and of in _NARROW:
        return Rule(("rn",), flags=("relu",))
    if to == "ue8m0x2" and of in ("f32", "bf16x2"):
        return Rule(("rz", "rp"), flags=("satfinite",))
    if to == "bf16x2" and of == "ue8m0x2":
        return Rule(("rn",))
    return None
