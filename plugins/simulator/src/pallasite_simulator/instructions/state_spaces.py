"""Addresses of the generic space and of others (PTX ISA 9.7.9, cvta to getctarank)."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import PRED, U32, U64, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.memory import (
    RANK_MASK,
    RANK_SHIFT,
    WINDOW_SHIFT,
    WINDOWS,
)
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Instruction, Register, Symbol
from pallasite_simulator.types import TYPES, Values

instructions = InstructionSet()

SPACES = (
    "const",
    "global",
    "local",
    "shared",
    "shared::cta",
    "shared::cluster",
    "param",
    "param::entry",
)

_LOW_32 = np.uint64(0xFFFFFFFF)
_WITHIN_BLOCK = np.uint64(RANK_MASK)
_RANK_BITS = 0xFF


@instructions.register("cvta")
def bind_cvta(instruction: Instruction, binder: Binder) -> Step:
    """Address in a state space to generic address, or with ``.to`` back: PTX ISA 9.7.9, cvta.

    Generic addresses of shared memory keep the rank of the block in its cluster. An address outside
    of a window loses its upper half, as on hardware.
    """
    form = choose(binder, direction=(OPTIONAL, "to"), space=SPACES, type=("u64",))
    binder.expect_operands(2)
    space = form["space"].split("::")[0]
    origin = binder.operand(1)
    if isinstance(origin, Symbol):
        if form["direction"]:
            raise binder.error("a variable has no generic address here", expected="a register")
        _check_space(binder, origin, space)
    write, read = binder.destination(0, U64), binder.source(origin, U64)
    window = WINDOWS.get(space)
    if window is None:
        # Generic addresses of global memory, and of constants, are their addresses.
        return lambda lanes: write(lanes, +read(lanes))
    if form["direction"]:
        return lambda lanes: write(lanes, read(lanes) & _LOW_32)
    start = np.uint64(window)
    return lambda lanes: write(lanes, (read(lanes) & _LOW_32) + start)


def _check_space(binder: Binder, symbol: Symbol, space: str) -> None:
    actual, _ = binder.program.symbol(symbol, binder.instruction)
    if actual != space:
        raise binder.error(
            f"variable {symbol.name!r} is in another state space",
            got=f".{actual}",
            expected=f".{space}",
        )


@instructions.register("isspacep")
def bind_isspacep(instruction: Instruction, binder: Binder) -> Step:
    """Whether a generic address is in the window of a state space: PTX ISA 9.7.9, isspacep.

    The global window is what no other has, and kernel parameters. ``.shared`` is the memory of the
    thread's own block, ``.shared::cluster`` that of its cluster.
    """
    space = choose(binder, space=SPACES)["space"]
    binder.expect_operands(2)
    origin = binder.operand(1)
    wide = not isinstance(origin, Register) or TYPES[origin.type].bits == 64
    if isinstance(origin, Symbol):
        raise binder.error("the operand must be an address in a register", got=origin.name)
    write, read = binder.destination(0, PRED), binder.source(origin, U64 if wide else U32)
    constants = _constants(binder)

    def inside(lanes: Lanes) -> Values:
        address = read(lanes).astype(np.uint64)
        if space == "const":
            return _within(address, constants)
        window = address >> WINDOW_SHIFT
        if space == "global":
            others = window == WINDOWS["shared"] >> WINDOW_SHIFT
            others = others | (window == WINDOWS["local"] >> WINDOW_SHIFT)
            return ~(others | _within(address, constants))
        found = window == WINDOWS[space.split("::")[0]] >> WINDOW_SHIFT
        if space in ("shared", "shared::cta"):
            own = (lanes.of(lanes.wave.lane_block) % lanes.wave.cluster_size).astype(np.uint64)
            found = found & (address >> RANK_SHIFT & _RANK_BITS == own)
        return found

    return lambda lanes: write(lanes, inside(lanes))


def _constants(binder: Binder) -> list[tuple[int, int]]:
    """First and last addresses of the variables in constant memory."""
    program = binder.program
    found = []
    for variable in (*program.module.variables, *program.function.variables):
        if variable.space == "const" and variable.bytes:
            _, address = program.symbol(Symbol(variable.name), binder.instruction)
            found.append((address, address + variable.bytes - 1))
    return found


def _within(addresses: Values, ranges: list[tuple[int, int]]) -> Values:
    found = addresses < 0
    for first, last in ranges:
        found = found | ((addresses >= first) & (addresses <= last))
    return found


@instructions.register("mapa")
def bind_mapa(instruction: Instruction, binder: Binder) -> Step:
    """The address of the same place in the shared memory of a block of the cluster: PTX ISA 9.7.9,
    mapa.

    Addresses are generic ones without ``.shared::cluster``.
    """
    form = choose(binder, space=(OPTIONAL, "shared::cluster"), type=("u32", "u64"))
    binder.expect_operands(3)
    read = _shared_address(binder, form["space"], form["type"])
    kind = TYPES[form["type"]]
    write, rank = binder.destination(0, kind), binder.source(2, U32)
    kept = kind.dtype.type(~(_RANK_BITS << RANK_SHIFT) & (2**kind.bits - 1))

    def step(lanes: Lanes) -> None:
        block = rank(lanes).astype(kind.dtype) << RANK_SHIFT
        write(lanes, read(lanes) & kept | block)

    return step


@instructions.register("getctarank")
def bind_getctarank(instruction: Instruction, binder: Binder) -> Step:
    """The rank in the cluster of the block whose shared memory an address is in: PTX ISA 9.7.9,
    getctarank.

    Addresses are generic ones without ``.shared::cluster``.
    """
    form = choose(binder, space=(OPTIONAL, "shared::cluster"), type=("u32", "u64"))
    binder.expect_operands(2)
    read, write = _shared_address(binder, form["space"], form["type"]), binder.destination(0, U32)

    def step(lanes: Lanes) -> None:
        write(lanes, (read(lanes) >> RANK_SHIFT & _RANK_BITS).astype(np.uint32))

    return step


def _shared_address(binder: Binder, space: str, name: str) -> Source:
    """Operand 1 of ``mapa`` and ``getctarank``."""
    if not space and name != "u64":
        raise binder.error("generic addresses have 64 bits", got=f".{name}", expected=".u64")
    origin = binder.operand(1)
    if isinstance(origin, Symbol):
        if not space:
            raise binder.error(
                "a variable's name is no generic address", expected=".shared::cluster"
            )
        _check_space(binder, origin, "shared")
    return binder.source(origin, TYPES[name])
