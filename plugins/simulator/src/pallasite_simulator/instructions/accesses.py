"""What the names of memory instructions say: state space, memory order, scope, cache hints, type.

PTX ISA 9.7.9.8 (ld), 9.7.9.11 (st), and the chapter on the memory consistency model (8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.ptx.syntax import Address, Instruction, Operand, Register, Symbol
from pallasite_simulator.types import TYPES, Array, PtxType, Values

SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "const",
    "param",
    "param::entry",
    "param::func",
)
SCOPES = ("cta", "cluster", "gpu", "sys")
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
PREFETCH_SIZES = ("L2::64B", "L2::128B", "L2::256B")
L1_PRIORITIES = (
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
)
L2_PRIORITIES = ("L2::evict_normal", "L2::evict_first", "L2::evict_last")
CACHE_HINT = "L2::cache_hint"

U64 = TYPES["u64"]


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """The modifiers of an instruction, by what they are about; ``""`` where there is none."""

    found: Mapping[str, str]

    def __getitem__(self, group: str) -> str:
        return self.found.get(group, "")


def sort_modifiers(binder: Binder, groups: Mapping[str, tuple[str, ...]]) -> Words:
    """Assigns each modifier to its group.

    Args:
      groups: the modifiers that an instruction may have, by group: at most one of each.

    Raises:
      PtxError: an unknown modifier, or two of one group.
    """
    found: dict[str, str] = {}
    for modifier in binder.instruction.modifiers:
        for group, allowed in groups.items():
            if modifier in allowed:
                if group in found:
                    raise binder.error(
                        "two modifiers that exclude each other", got=f".{found[group]}.{modifier}"
                    )
                found[group] = modifier
                break
        else:
            raise binder.error(f"unknown modifier .{modifier}")
    return Words(found)


def bind_address(
    binder: Binder, operand: Operand | int, space: str, allowed: tuple[str, ...] = SPACES
) -> tuple[str, Source]:
    """The address operand of an access.

    Args:
      space: as the instruction names it; ``""`` for generic addressing.
      allowed: the spaces that the instruction may name.

    Returns:
      The space for :class:`Memory`, in which the addresses are, and the addresses. Variables of
      ``.param`` space inside functions are in local memory.

    Raises:
      PtxError: a variable of another space.
    """
    if isinstance(operand, int):
        operand = binder.operand(operand)
    if space and space not in allowed:
        raise binder.error(f"the instruction does not take addresses of .{space}")
    source = binder.address(operand)
    assert isinstance(operand, Address)
    memory = space or "generic"
    if operand.coordinates is not None:
        raise binder.error("the address has coordinates", got=operand)
    if space.startswith("param"):
        memory = "local" if space == "param::func" else "param"
    if isinstance(operand.base, Symbol):
        actual, _ = binder.program.symbol(operand.base, binder.instruction)
        if space == "param" and actual == "local":
            memory = "local"
        elif space and memory.split("::")[0] != actual:
            raise binder.error(
                f"variable {operand.base.name!r} is in another state space",
                got=f".{actual}",
                expected=f".{space}",
            )
        elif not space:
            # Generic addressing of a variable by its name means the variable.
            if actual not in ("global", "const", "shared", "local"):
                raise binder.error(
                    f"{operand.base.name!r} has no generic address", got=f".{actual}"
                )
            memory = actual
    return memory, source


def bind_cache_policy(binder: Binder, number: int) -> None:
    """Checks that an operand is a cache policy, which has no effect (PTX ISA 9.7.9.19)."""
    binder.source(number, U64)


def raw_type(kind: PtxType) -> PtxType:
    """The type as which registers are read and written in loads and stores of a type.

    PTX ISA 9.4.1: registers may be wider than a float type, and then hold its bits.
    """
    return TYPES[f"b{kind.bits}"] if kind.kind in ("float", "packed") else kind


def bind_stored(binder: Binder, operand: Operand, kind: PtxType) -> Source:
    """A value to be stored, of the type or its bits."""
    return binder.source(operand, raw_type(kind) if isinstance(operand, Register) else kind)


def stored_bits(values: Values, kind: PtxType) -> Values:
    """Bits of values of a type, which may be bits already."""
    return values if values.dtype == kind.storage else values.view(kind.storage)


def to_memory(values: Values, kind: PtxType, count: int) -> Array:
    """Values of one type, one for each of ``count`` lanes or a scalar, as :meth:`Memory.store`
    takes them."""
    if kind.bits == 128:
        words = np.ascontiguousarray(np.broadcast_to(values, (count, 2)))
        return words.view(np.complex128).reshape(count)
    bits = stored_bits(values, kind)
    return bits if bits.ndim else np.full(count, bits)


def from_memory(raw: Array, kind: PtxType) -> Array:
    """Values of one type from what :meth:`Memory.load` returns."""
    if kind.bits == 128:
        return raw.view(np.uint64).reshape(-1, 2)
    return raw if raw.dtype == kind.dtype else raw.view(kind.dtype)


def split_vectors(raw: Array, kind: PtxType, count: int) -> Array:
    """Elements of vectors that were loaded: a row of values for each of ``count`` elements."""
    if kind.bits == 128:
        return np.ascontiguousarray(raw.view(np.uint64).reshape(-1, count, 2).swapaxes(0, 1))
    return np.ascontiguousarray(raw.view(kind.dtype).reshape(-1, count).T)


def join_vectors(elements: list[Values], kind: PtxType, count: int) -> Array:
    """Vectors of elements, as :meth:`Memory.store` takes them; ``count`` is that of lanes."""
    if kind.bits == 128:
        wide = np.empty((count, len(elements), 2), np.uint64)
        for number, values in enumerate(elements):
            wide[:, number] = values
        return wide.reshape(count, -1).view(np.complex128)
    joined = np.empty((count, len(elements)), kind.storage)
    for number, values in enumerate(elements):
        joined[:, number] = stored_bits(values, kind)
    size = kind.bytes * len(elements)
    if size == 32:
        return joined.view(np.complex128)
    return joined.view(np.complex128 if size == 16 else f"u{size}").reshape(count)


def check_addresses(
    lanes: Lanes,
    space: str,
    addresses: Values,
    size: int,
    instruction: Instruction,
    alignment: int = 1,
) -> None:
    """Checks addresses that an instruction names without an access to them.

    Raises:
      SimulationError: not all of the ``size`` bytes are in bounds, or misaligned.
    """
    memory = lanes.wave.memory
    for name, chosen, _, inner in by_space(lanes, space, addresses):
        memory.offsets(chosen, name, inner, size, instruction)
        memory.check_alignment(chosen, name, inner, size, alignment, instruction)


# Synchronization ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The memory order of an access and its scope."""

    acquires: bool = False
    releases: bool = False
    scope: str = "gpu"

    @classmethod
    def of(cls, semantics: str, scope: str) -> Order:
        """From the modifiers."""
        return cls(
            semantics in ("acquire", "acq_rel"), semantics in ("release", "acq_rel"), scope or "gpu"
        )


def location_key(space: str, offset: int) -> Hashable:
    """The observer's name of a place in memory through which threads synchronize.

    ``offset`` is that in the memory of the space, as in :class:`Access`.
    """
    return ("location", space, offset)


def tell_order(
    lanes: Lanes, space: str, addresses: Values, order: Order, instruction: Instruction
) -> None:
    """Tells the observer of an access that acquires, releases or does both.

    Of lanes that access one place, each sees what those before it released.
    """
    observer = lanes.wave.observer
    if observer is None or not (order.acquires or order.releases):
        return
    for name, chosen, offsets in places(lanes, space, addresses, instruction):
        numbers = chosen.numbers
        both = order.acquires and order.releases
        _, inverse = np.unique(offsets, return_inverse=True)
        groups = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
        for group in groups:
            key = location_key(name, int(offsets[group[0]]))
            steps = [[one] for one in group] if both else [group]
            for members in steps:
                if order.acquires:
                    observer.acquire(numbers[members], key, order.scope)
                if order.releases:
                    observer.release(numbers[members], key, order.scope)


def places(
    lanes: Lanes, space: str, addresses: Values, instruction: Instruction
) -> list[tuple[str, Lanes, Array]]:
    """Byte offsets in the memories of the spaces, of addresses that an access has checked."""
    memory = lanes.wave.memory
    return [
        (name.split("::")[0], chosen, memory.offsets(chosen, name, inner, 1, instruction))
        for name, chosen, _, inner in by_space(lanes, space, addresses)
    ]


def by_space(
    lanes: Lanes, space: str, addresses: Values
) -> list[tuple[str, Lanes, Array | None, Array]]:
    """Addresses of lanes by the state space where they are.

    Returns:
      For each space: its name, the lanes, which of the given lanes they are (None: all), and their
      addresses in that space, one for each.
    """
    parts: list[tuple[str, Array | None, Values]] = [(space, None, addresses)]
    if space == "generic":
        parts = lanes.wave.memory.resolve(lanes, addresses)
    found = []
    for name, mask, inner in parts:
        chosen = lanes if mask is None else lanes.where(mask)
        assert chosen is not None
        found.append((name, chosen, mask, np.broadcast_to(inner, (chosen.count,))))
    return found
