"""What is said about caches (PTX ISA 9.7.9.15 to 9.7.9.19).

The simulator has no caches: these instructions only check their addresses.
"""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import bind_address, check_addresses
from pallasite_simulator.ptx.syntax import Immediate, Instruction
from pallasite_simulator.types import TYPES

instructions = InstructionSet()

LINE_BYTES = 128
"""Bytes that ``discard`` and ``applypriority`` are about."""

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64

_PREFETCHES = {
    "L1": ("global", "local"),
    "L2": ("global", "local"),
    "L2::evict_last": ("global",),
    "L2::evict_normal": ("global",),
    "tensormap": ("const", "param"),
}

_PRIMARY = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")
_SECONDARY = ("L2::evict_first", "L2::evict_unchanged")


def _checked(
    instruction: Instruction, binder: Binder, space: str, size: int, alignment: int = 1
) -> Step:
    """A step that does nothing but check the addresses of operand 0."""
    memory, address = bind_address(binder, 0, space)

    def step(lanes: Lanes) -> None:
        check_addresses(lanes, memory, address(lanes), size, instruction, alignment)

    return step


def _space(binder: Binder, modifiers: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """The one state space among modifiers, or ``""``."""
    if len(modifiers) > 1 or not set(modifiers) <= set(allowed):
        raise binder.error("unknown modifier", got="." + ".".join(modifiers))
    return modifiers[0] if modifiers else ""


@instructions.register("prefetch")
def bind_prefetch(instruction: Instruction, binder: Binder) -> Step:
    """Prefetch of a cache line or a tensor map: PTX ISA 9.7.9.15 (prefetch)."""
    binder.expect_operands(1)
    *spaces, what = instruction.modifiers or ("",)
    if what not in _PREFETCHES:
        raise binder.error("unknown prefetch", expected=".L1, .L2 or .tensormap")
    space = _space(binder, tuple(spaces), _PREFETCHES[what])
    if what == "tensormap":
        return _checked(instruction, binder, space, TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
    return _checked(instruction, binder, space, 1)


@instructions.register("prefetchu")
def bind_uniform_prefetch(instruction: Instruction, binder: Binder) -> Step:
    """Prefetch into the uniform cache: PTX ISA 9.7.9.15 (prefetchu.L1)."""
    binder.expect_operands(1)
    if instruction.modifiers != ("L1",):
        raise binder.error("unknown prefetch", expected="prefetchu.L1")
    return _checked(instruction, binder, "", 1)


@instructions.register("discard", "applypriority")
def bind_line(instruction: Instruction, binder: Binder) -> Step:
    """Discard of a cache line, whose contents are then not defined, and its eviction priority:
    PTX ISA 9.7.9.16 (applypriority) and 9.7.9.17 (discard)."""
    binder.expect_operands(2)
    *spaces, what = instruction.modifiers or ("",)
    expected = {"discard": "L2", "applypriority": "L2::evict_normal"}[instruction.opcode]
    if what != expected:
        raise binder.error(f"unknown {instruction.opcode}", expected=f".{expected}")
    if binder.operand(1) != Immediate(LINE_BYTES):
        raise binder.error("the size must be that of a cache line", expected=str(LINE_BYTES))
    space = _space(binder, tuple(spaces), ("global",))
    return _checked(instruction, binder, space, LINE_BYTES, LINE_BYTES)


@instructions.register("createpolicy")
def bind_policy(instruction: Instruction, binder: Binder) -> Step:
    """Creation of a cache policy, which has no effect here: PTX ISA 9.7.9.18 (createpolicy).

    All policies are zero.
    """
    what, *rest = instruction.modifiers or ("",)
    binder.only_type("b64")
    if not rest or rest[-1] != "b64":
        raise binder.error("the type must be the last modifier")
    modifiers = rest[:-1]
    if what == "cvt":
        binder.expect_operands(2)
        if modifiers != ["L2"]:
            raise binder.error("unknown policy", expected="createpolicy.cvt.L2.b64")
        binder.source(1, TYPES["b64"])
    elif what == "fractional":
        binder.expect_operands(1, 2)
        _check_priorities(binder, modifiers)
        if len(instruction.operands) == 2:
            binder.source(1, TYPES["f32"])
    elif what == "range":
        binder.expect_operands(4)
        space = modifiers.pop(0) if modifiers[:1] == ["global"] else ""
        _check_priorities(binder, modifiers)
        bind_address(binder, 1, space)
        binder.source(2, TYPES["u32"])
        binder.source(3, TYPES["u32"])
    else:
        raise binder.error("unknown policy", expected=".fractional, .range or .cvt")
    write = binder.destination(0, TYPES["b64"])
    policy = np.uint64(0)
    return lambda lanes: write(lanes, policy)


def _check_priorities(binder: Binder, modifiers: list[str]) -> None:
    if not (
        1 <= len(modifiers) <= 2
        and modifiers[0] in _PRIMARY
        and set(modifiers[1:]) <= {*_SECONDARY}
    ):
        raise binder.error("unknown priorities", got="." + ".".join(modifiers))
