"""Instructions of the lanes of a warp: shuffles, votes, reductions (PTX ISA 9.7.9 and 9.7.13).

All but ``activemask`` are executed when all lanes are there that the member mask names and that
have not ended. Lanes of one warp may form several groups at once, each with a mask of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Operand, Pair, Register
from pallasite_simulator.types import TYPES, Array, Values

instructions = InstructionSet()

ALL_LANES = np.uint32(0xFFFFFFFF)


class Rows:
    """Values of lanes, in rows of a warp each.

    Attributes:
      lanes: whose values.
      count: how many rows: warps of these lanes, or all of the wave.
      places: for each lane, its place in the flattened rows; None if each row is full.
    """

    def __init__(self, lanes: Lanes):
        self.lanes = lanes
        self.places: Array | None = None
        if lanes.whole_warps:
            self.count = lanes.count // WARP
        else:
            self.count = lanes.wave.lane_count // WARP
            self.places = lanes.numbers

    def scatter(self, values: Values, missing: Any = 0) -> Array:
        """One value for each lane as rows, with ``missing`` for lanes that are not there."""
        if self.places is None:
            row = np.broadcast_to(values, (self.lanes.count,))
            return np.ascontiguousarray(row).reshape(-1, WARP)
        rows = np.full(self.count * WARP, missing, values.dtype)
        rows[self.places] = values
        return rows.reshape(-1, WARP)

    def collect(self, rows: Array) -> Array:
        """From values in rows (or one for each row), a new array with the value of each lane."""
        if rows.ndim == 1 or rows.shape[1] == 1:
            rows = np.repeat(rows.reshape(-1, 1), WARP, axis=1)
        flat = np.ascontiguousarray(rows).reshape(-1)
        return flat if self.places is None else flat[self.places]

    def ballot(self, values: Values) -> Array:
        """The truth values of each warp's lanes, as a word for each warp."""
        return pack_bits(self.scatter(values, False))[:, 0]

    @property
    def own(self) -> Array:
        """The place of each lane in the flattened rows."""
        return np.arange(self.count * WARP) if self.places is None else self.places

    @property
    def present(self) -> Values:
        """For each warp, which lanes are there."""
        if self.places is None:
            return ALL_LANES
        return self.ballot(np.bool_(True))


def pack_bits(values: Array) -> Array:
    """32 truth values in the last dimension, as one word."""
    return np.packbits(values, axis=-1, bitorder="little").view(np.uint32)


def equal_lanes(rows: Array) -> Array:
    """For each lane of each row, which lanes of the row have the same value."""
    return pack_bits(rows[:, :, None] == rows[:, None, :])[:, :, 0]


@dataclasses.dataclass(slots=True)
class Group:
    """The lanes that execute an instruction, and with whom.

    Attributes:
      rows: their arrangement.
      members: for each lane, or for all alike, which lanes of its warp take part with it.
      whole: whether all lanes of a warp that are there take part together.
    """

    rows: Rows
    members: Values
    whole: bool


def _bind_members(binder: Binder, operand: int) -> Callable[[Lanes], Group]:
    """Makes the step wait for the lanes that an operand names.

    Raises, at run time:
      SimulationError: lanes that wait for one another name different members.
    """
    binder.converge_by(operand)
    mask, instruction = binder.source(operand, U32), binder.instruction

    def group(lanes: Lanes) -> Group:
        rows, masks = Rows(lanes), mask(lanes)
        if masks.ndim and (masks == masks[0]).all():
            masks = masks[0]
        if masks.ndim == 0 and masks == ALL_LANES and rows.places is None:
            return Group(rows, ALL_LANES, True)
        present = rows.present
        there = present if rows.places is None else rows.collect(present)
        members = masks & there
        if masks.ndim:
            outside = members & ~rows.collect(equal_lanes(rows.scatter(masks)))
            if outside.any():
                lane = int(lanes.numbers[outside != 0][0])
                raise SimulationError(
                    f"{lanes.wave.thread_name(lane)} executes an instruction with another member"
                    f" mask than lanes that the mask names, in: {instruction.text}",
                    location=instruction.location,
                )
        return Group(rows, members, bool((members == there).all()))

    return group


# Shuffles -----------------------------------------------------------------------------------------


@instructions.register("shfl")
def bind_shfl(instruction: Instruction, binder: Binder) -> Step:
    """Gets a register of another lane: PTX ISA 9.7.9, shfl.sync.

    From a lane that does not execute the instruction, PTX promises nothing; GPUs (seen on an H200)
    give zero.
    """
    form = choose(binder, "sync", mode=("up", "down", "bfly", "idx"), type=("b32",))
    binder.expect_operands(5)
    first, second = _pair(binder.operand(0))
    write = binder.destination(first, U32)
    write_predicate = None if second is None else binder.destination(second, PRED)
    read, group = binder.source(1, U32), _bind_members(binder, 4)
    sources = _bind_sources(binder, form["mode"])
    moved, into = binder.operand(1), first
    registers = None
    if isinstance(moved, Register) and isinstance(into, Register):
        registers = binder.program.register(moved), binder.program.register(into)

    def step(lanes: Lanes) -> None:
        here = group(lanes)
        origins, valid = sources(here.rows)
        write(lanes, here.rows.scatter(read(lanes)).reshape(-1)[origins])
        observer = lanes.wave.observer
        if observer is not None and registers is not None:
            absent = valid & (here.members >> (origins % WARP).astype(np.uint32) & 1 == 0)
            if absent.any() or lanes.wave.follow:
                numbers = lanes.numbers[origins] if here.rows.places is None else origins
                observer.shuffled(lanes, registers, numbers, absent, instruction)
        if write_predicate is not None:
            write_predicate(lanes, valid.copy())

    return step


def _pair(operand: Operand) -> tuple[Operand, Operand | None]:
    """``d|p`` as its parts, or ``d`` alone."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def _bind_sources(binder: Binder, mode: str) -> Callable[[Rows], tuple[Array, Array]]:
    """For each lane, the place in the flattened rows from which a shuffle reads, and whether it is
    within bounds (else it is the lane's own)."""
    offset, bounds = binder.source(2, U32), binder.source(3, U32)
    operands = binder.operand(2), binder.operand(3)
    if not all(isinstance(one, Immediate) for one in operands):

        def find(rows: Rows) -> tuple[Array, Array]:
            lane, lanes = rows.own % WARP, rows.lanes
            origin, valid = shuffle_sources(mode, lane, offset(lanes), bounds(lanes))
            return rows.own - lane + origin, valid

        return find
    values = [binder.constant(one, U32) for one in operands if isinstance(one, Immediate)]
    fixed, fixed_valid = shuffle_sources(mode, np.arange(WARP), *values)

    @functools.lru_cache(maxsize=4)
    def whole(count: int) -> tuple[Array, Array]:
        starts = np.arange(count)[:, None] * WARP
        return (starts + fixed).reshape(-1), np.tile(fixed_valid, count)

    def find_fixed(rows: Rows) -> tuple[Array, Array]:
        if rows.places is None:
            return whole(rows.count)
        lane = rows.places % WARP
        return rows.places - lane + fixed[lane], fixed_valid[lane]

    return find_fixed


def shuffle_sources(mode: str, lane: Array, offset: Values, bounds: Values) -> tuple[Array, Array]:
    """From which lane of the warp lanes read, and whether it is within their segment's bounds.

    Args:
      mode: of the shuffle.
      lane: numbers of the lanes in the warp (int64).
      offset: operand ``b``.
      bounds: operand ``c``: the clamp value in bits 4 to 0, the segment's mask in bits 12 to 8.
    """
    offset, bounds = (offset & 31).astype(np.int64), bounds.astype(np.int64)
    clamp, segment = bounds & 31, bounds >> 8 & 31
    lowest = lane & segment
    last = lowest | clamp & ~segment
    if mode == "up":
        origin = lane - offset
        valid = origin >= last
    else:
        if mode == "down":
            origin = lane + offset
        elif mode == "bfly":
            origin = lane ^ offset
        else:
            origin = lowest | offset & ~segment
        valid = origin <= last
    return np.where(valid, origin, lane), valid


# Votes --------------------------------------------------------------------------------------------


@instructions.register("vote")
def bind_vote(instruction: Instruction, binder: Binder) -> Step:
    """Vote of the member lanes on a predicate: PTX ISA 9.7.13.9, vote.sync."""
    form = choose(binder, "sync", mode=("all", "any", "uni", "ballot"), type=("pred", "b32"))
    mode = form["mode"]
    if (mode == "ballot") != (form["type"] == "b32"):
        raise binder.error("wrong type", expected=".b32 for .ballot, .pred for others")
    binder.expect_operands(3)
    write = binder.destination(0, TYPES[form["type"]])
    predicate, group = binder.source(1, PRED), _bind_members(binder, 2)

    def step(lanes: Lanes) -> None:
        here = group(lanes)
        votes = here.rows.collect(here.rows.ballot(predicate(lanes))) & here.members
        if mode == "ballot":
            write(lanes, votes)
        elif mode == "all":
            write(lanes, votes == here.members)
        elif mode == "any":
            write(lanes, votes != 0)
        else:
            write(lanes, (votes == 0) | (votes == here.members))

    return step


@instructions.register("match")
def bind_match(instruction: Instruction, binder: Binder) -> Step:
    """Finds member lanes with the same value: PTX ISA 9.7.13.10, match.sync.

    ``.any`` gives the mask of those with the lane's own value; ``.all`` the mask of all members if
    they have the same, else zero.
    """
    form = choose(binder, "sync", mode=("any", "all"), type=("b32", "b64"))
    binder.expect_operands(3)
    first, second = _pair(binder.operand(0))
    if form["mode"] == "any" and second is not None:
        raise binder.error("match.any has no predicate", got="d|p", expected="d")
    write = binder.destination(first, U32)
    write_predicate = None if second is None else binder.destination(second, PRED)
    read, group = binder.source(1, TYPES[form["type"]]), _bind_members(binder, 2)

    def step(lanes: Lanes) -> None:
        here = group(lanes)
        same = here.rows.collect(equal_lanes(here.rows.scatter(read(lanes)))) & here.members
        if form["mode"] == "any":
            write(lanes, same)
            return
        agreed = same == here.members
        write(lanes, np.where(agreed, same, np.uint32(0)))
        if write_predicate is not None:
            write_predicate(lanes, agreed)

    return step


@instructions.register("activemask")
def bind_activemask(instruction: Instruction, binder: Binder) -> Step:
    """The lanes of the warp that execute the instruction now: PTX ISA 9.7.13.11, activemask."""
    choose(binder, type=("b32",))
    binder.expect_operands(1)
    write = binder.destination(0, U32)

    def step(lanes: Lanes) -> None:
        rows = Rows(lanes)
        present = rows.present
        write(lanes, present if rows.places is None else rows.collect(present))

    return step


# Reductions ---------------------------------------------------------------------------------------

_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _neutral(operation: str, dtype: np.dtype[Any]) -> int:
    limits = np.iinfo(dtype)
    return int({"min": limits.max, "max": limits.min, "and": limits.max}.get(operation, 0))


def reduce_members(here: Group, values: Values, operation: str) -> Array:
    """For each lane, the reduction of the members' integers."""
    function, neutral = _REDUCTIONS[operation], _neutral(operation, values.dtype)
    rows = here.rows.scatter(values, neutral)
    if here.whole:
        return here.rows.collect(function.reduce(rows, axis=1, dtype=rows.dtype))
    members = np.broadcast_to(here.members, (here.rows.lanes.count,))
    bits = here.rows.scatter(members)[:, :, None] >> np.arange(WARP, dtype=np.uint32) & 1
    each = np.where(bits != 0, rows[:, None, :], rows.dtype.type(neutral))
    return here.rows.collect(function.reduce(each, axis=2, dtype=rows.dtype))


@instructions.register("redux")
def bind_redux(instruction: Instruction, binder: Binder) -> Step:
    """Reduction of the member lanes' values: PTX ISA 9.7.13.12, redux.sync."""
    form = choose(
        binder,
        "sync",
        operation=tuple(_REDUCTIONS),
        absolute=(OPTIONAL, "abs"),
        nan=(OPTIONAL, "NaN"),
        type=("u32", "s32", "b32", "f32"),
    )
    operation, name = form["operation"], form["type"]
    allowed = {"u32": ("add", "min", "max"), "b32": ("and", "or", "xor"), "f32": ("min", "max")}
    if operation not in allowed.get(name, allowed["u32"]):
        raise binder.error(f"redux.{operation} has no type .{name}")
    if name != "f32" and (form["absolute"] or form["nan"]):
        raise binder.error(".abs and .NaN are only for .f32")
    binder.expect_operands(3)
    if name == "f32":
        return _bind_float_redux(binder, operation, bool(form["absolute"]), bool(form["nan"]))
    kind = TYPES[name]
    write, read = binder.destination(0, kind), binder.source(1, kind)
    group = _bind_members(binder, 2)
    return lambda lanes: write(lanes, reduce_members(group(lanes), read(lanes), operation))


_CANONICAL_NAN = np.int32(0x7FFFFFFF)
_INFINITY = 0x7F800000


def _bind_float_redux(binder: Binder, operation: str, absolute: bool, nan: bool) -> Step:
    """PTX ISA 9.7.13.12: NaNs are passed over, unless ``.NaN`` makes them the result; -0 is less
    than +0."""
    write, read = binder.destination(0, U32), binder.source(1, TYPES["b32"])
    group = _bind_members(binder, 2)
    neutral = np.int32(_neutral(operation, np.dtype(np.int32)))

    def step(lanes: Lanes) -> None:
        here = group(lanes)
        bits = read(lanes).view(np.int32)
        magnitude = bits & 0x7FFFFFFF
        missing = magnitude > _INFINITY
        # Integers in the order of the floats; the neutral ones are those of NaNs.
        ordered = magnitude if absolute else bits ^ (bits >> 31 & 0x7FFFFFFF)
        found = reduce_members(here, np.where(missing, neutral, ordered), operation)
        result = np.where(found == neutral, _CANONICAL_NAN, found ^ (found >> 31 & 0x7FFFFFFF))
        if nan:
            any_missing = reduce_members(here, missing.astype(np.int32), "or")
            result = np.where(any_missing != 0, _CANONICAL_NAN, result)
        write(lanes, result.view(np.uint32))

    return step


# Election and barrier -----------------------------------------------------------------------------


@instructions.register("elect")
def bind_elect(instruction: Instruction, binder: Binder) -> Step:
    """Elects one of the member lanes: PTX ISA 9.7.13.14, elect.sync.

    PTX does not say which; it is the first, as on hardware (seen on an H200).
    """
    choose(binder, "sync")
    binder.expect_operands(2)
    first, second = _pair(binder.operand(0))
    if second is None:
        raise binder.error("the predicate for the elected lane is missing", expected="d|p")
    write, write_predicate = binder.destination(first, U32), binder.destination(second, PRED)
    group = _bind_members(binder, 1)

    def step(lanes: Lanes) -> None:
        members = group(lanes).members
        leader = np.bitwise_count((members & -members) - np.uint32(1)).astype(np.uint32)
        write(lanes, leader)
        write_predicate(lanes, lanes.wave.special("%laneid", "", lanes) == leader)

    return step


@instructions.register("bar.warp")
def bind_bar_warp(instruction: Instruction, binder: Binder) -> Step:
    """Barrier of the member lanes, wherever they are: PTX ISA 9.7.13.2, bar.warp.sync."""
    choose(binder, "warp", "sync")
    binder.expect_operands(1)
    members = binder.source(0, U32)
    return lambda lanes: lanes.wave.warp_barriers.arrive(lanes, members(lanes), instruction)
