"""Asynchronous barriers in shared memory: PTX ISA 9.7.13.15, mbarrier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallasite_simulator.binder import PRED, U32, U64, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import mbarriers, pending_count
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import bind_address
from pallasite_simulator.ptx.syntax import Instruction, Operand, Sink
from pallasite_simulator.types import Array

instructions = InstructionSet()

type Locate = Callable[[Lanes], Array]
"""The slots of the barriers that lanes use."""

_LOCAL = ("shared", "shared::cta")
_SPACES = (*_LOCAL, "shared::cluster")


def bind_barrier(
    binder: Binder,
    operand: Operand | int,
    allowed: tuple[str, ...] = _LOCAL,
    *,
    space: str | None = None,
    kind: str = "atomic",
    local: bool = True,
) -> Locate:
    """The barriers whose addresses an operand gives.

    Args:
      operand: the address.
      allowed: the state spaces that the instruction may name.
      space: the state space that the instruction names, or ``""``; None to look for it among the
        modifiers.
      kind: of the access, for the observer.
      local: whether they must be those of the thread's own block.
    """
    instruction = binder.instruction
    if space is None:
        found = [one for one in instruction.modifiers if one in _SPACES]
        if len(found) > 1 or not set(found) <= set(allowed):
            raise binder.error(
                "wrong state space of an mbarrier",
                expected="one of " + ", ".join(f".{one}" for one in allowed),
            )
        space = found[0] if found else ""
    memory, address = bind_address(binder, operand, space, allowed)

    def locate(lanes: Lanes) -> Array:
        barriers = mbarriers(lanes.wave)
        return barriers.locate(lanes, memory, address(lanes), instruction, kind=kind, local=local)

    return locate


def _semantics(instruction: Instruction, binder: Binder, strong: str | None) -> str | None:
    """The scope of an acquire or release, or None for ``.relaxed``.

    Args:
      strong: ``"acquire"`` or ``"release"``, which is the default; None where only ``.relaxed`` is.
    """
    allowed = ("relaxed",) if strong is None else (strong, "relaxed")
    found = [o for o in instruction.modifiers if o in ("acquire", "release", "relaxed", "weak")]
    scopes = [one for one in instruction.modifiers if one in ("cta", "cluster")]
    if len(found) > 1 or len(scopes) > 1 or (found and found[0] not in allowed):
        raise binder.error("wrong memory semantics", expected=f"one of {allowed}")
    if bool(found) != bool(scopes):
        raise binder.error("memory semantics and scope must be given together")
    if strong is None or (found and found[0] == "relaxed"):
        return None
    return scopes[0] if scopes else "cta"


@instructions.register("mbarrier.init")
def bind_init(instruction: Instruction, binder: Binder) -> Step:
    """Makes an mbarrier: PTX ISA 9.7.13.15.9, mbarrier.init."""
    binder.only_modifiers("init", *_LOCAL)
    binder.only_type("b64")
    binder.expect_operands(2)
    slots = bind_barrier(binder, 0, kind="write")
    count = binder.source(1, U32)

    def step(lanes: Lanes) -> None:
        mbarriers(lanes.wave).initialize(lanes, slots(lanes), count(lanes), instruction)

    return step


@instructions.register("mbarrier.inval")
def bind_inval(instruction: Instruction, binder: Binder) -> Step:
    """Ends an mbarrier: PTX ISA 9.7.13.15.10, mbarrier.inval."""
    binder.only_modifiers("inval", *_LOCAL)
    binder.only_type("b64")
    binder.expect_operands(1)
    slots = bind_barrier(binder, 0)

    def step(lanes: Lanes) -> None:
        mbarriers(lanes.wave).invalidate(lanes, slots(lanes), instruction)

    return step


@instructions.register("mbarrier.expect_tx", "mbarrier.complete_tx")
def bind_transactions(instruction: Instruction, binder: Binder) -> Step:
    """Changes the number of bytes that a phase lacks: PTX ISA 9.7.13.15.11 and 12,
    mbarrier.expect_tx and mbarrier.complete_tx."""
    binder.only_modifiers("expect_tx", "complete_tx", "relaxed", "cta", "cluster", *_SPACES)
    binder.only_type("b64")
    binder.expect_operands(2)
    _semantics(instruction, binder, None)
    local = instruction.has("shared") or instruction.has("shared::cta")
    slots = bind_barrier(binder, 0, _SPACES, local=local)
    amount = binder.source(1, U32)
    complete = instruction.has("complete_tx")
    scope = "cluster" if instruction.has("cluster") else "cta"

    def step(lanes: Lanes) -> None:
        barriers = mbarriers(lanes.wave)
        if complete:
            barriers.complete(lanes.numbers, slots(lanes), amount(lanes), instruction, scope)
        else:
            barriers.expect(lanes, slots(lanes), amount(lanes), instruction)

    return step


@instructions.register("mbarrier.arrive", "mbarrier.arrive_drop")
def bind_arrive(instruction: Instruction, binder: Binder) -> Step:
    """Arrives at an mbarrier: PTX ISA 9.7.13.15.13 and 14, mbarrier.arrive and
    mbarrier.arrive_drop."""
    names = ("arrive", "arrive_drop", "expect_tx", "noComplete", "release", "relaxed")
    binder.only_modifiers(*names, "cta", "cluster", *_SPACES)
    binder.only_type("b64")
    expects, drop = instruction.has("expect_tx"), instruction.has("arrive_drop")
    may_complete = not instruction.has("noComplete")
    if expects and not may_complete:
        raise binder.error(".expect_tx and .noComplete do not go together")
    binder.expect_operands(*((3,) if expects or not may_complete else (2, 3)))
    release = _semantics(instruction, binder, "release")
    wants_state = not isinstance(binder.operand(0), Sink)
    if wants_state and instruction.has("shared::cluster"):
        raise binder.error("the state of a barrier of another block cannot be had", expected="_")
    write = binder.destination(0, U64)
    local = wants_state or instruction.has("shared") or instruction.has("shared::cta")
    slots = bind_barrier(binder, 1, _SPACES, local=local)
    operand = binder.source(2, U32) if len(instruction.operands) == 3 else None
    one = np.uint32(1)

    def step(lanes: Lanes) -> None:
        value = one if operand is None else operand(lanes)
        states = mbarriers(lanes.wave).arrive(
            lanes,
            slots(lanes),
            one if expects else value,
            instruction,
            transactions=value if expects else None,
            drop=drop,
            may_complete=may_complete,
            release=release,
            states=wants_state,
        )
        if wants_state:
            write(lanes, states)

    return step


@instructions.register("mbarrier.test_wait", "mbarrier.try_wait")
def bind_wait(instruction: Instruction, binder: Binder) -> Step:
    """Asks whether a phase is complete; ``try_wait`` waits for it: PTX ISA 9.7.13.15.16,
    mbarrier.test_wait and mbarrier.try_wait.

    The hint for how long to wait does not matter: threads wait as long as others can go on.
    """
    names = ("test_wait", "try_wait", "parity", "acquire", "relaxed", "cta", "cluster")
    binder.only_modifiers(*names, *_LOCAL)
    binder.only_type("b64")
    blocks = instruction.has("try_wait")
    binder.expect_operands(*((3, 4) if blocks else (3,)))
    acquire = _semantics(instruction, binder, "acquire")
    write = binder.destination(0, PRED)
    slots = bind_barrier(binder, 1)
    by_parity = instruction.has("parity")
    value = binder.source(2, U32 if by_parity else U64)
    if len(instruction.operands) == 4:
        binder.source(3, U32)

    def parity_of(lanes: Lanes) -> Array:
        given = np.asarray(value(lanes))
        # The hardware takes the lowest bit of any parity: compilers emit -1 for 1.
        return given if by_parity else given >> np.uint64(63)

    def test(lanes: Lanes) -> None:
        places = slots(lanes)
        found = mbarriers(lanes.wave).completed(
            lanes, places, parity_of(lanes), instruction, acquire
        )
        lanes.wave.poll()
        write(lanes, found)

    def wait(lanes: Lanes) -> list[Wait] | None:
        wave = lanes.wave
        barriers = mbarriers(wave)
        places = slots(lanes)
        found = barriers.completed(lanes, places, parity_of(lanes), instruction, acquire)
        numbers = lanes.numbers
        if found.all():
            barriers.released(numbers)
            wave.giving_up[numbers] = False
            write(lanes, found)
            return None
        goes_on = found | lanes.of(wave.giving_up)
        waits = ~goes_on
        there = lanes.where(goes_on)
        if there is not None:
            barriers.released(there.numbers)
            wave.giving_up[there.numbers] = False
            write(there, found[goes_on])
        return barriers.block(numbers[waits], places[waits]) if waits.any() else None

    return wait if blocks else test


@instructions.register("mbarrier.pending_count")
def bind_pending_count(instruction: Instruction, binder: Binder) -> Step:
    """The pending arrivals that a state holds: PTX ISA 9.7.13.15.17, mbarrier.pending_count."""
    binder.only_modifiers("pending_count")
    binder.only_type("b64")
    return binder.elementwise(lambda states: pending_count(np.asarray(states)), U32, U64)
