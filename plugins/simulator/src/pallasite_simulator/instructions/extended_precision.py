"""Extended-precision integer arithmetic (PTX ISA 9.7.2): a carry flag for each lane.

The flag is what GPUs (seen on an H200) keep: the carry of a sum, where ``a - b`` is the sum
``a + ~b + 1``. So subtraction clears the flag where it borrows, as only a program notices that
subtracts with the flag of an addition.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.integers import product
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, Array, Values

instructions = InstructionSet()

TYPE_NAMES = ("u32", "s32", "u64", "s64")

_FLAG = "CC.CF"


@dataclasses.dataclass(slots=True)
class CarryFlags:
    """The flag of each lane of a wave, and whether any instruction has set it."""

    values: Array
    known: Array

    @classmethod
    def of(cls, wave: Wave) -> CarryFlags:
        """Those of a wave."""
        found = wave.resources.get(_FLAG)
        if found is None:
            count = wave.lane_count
            found = wave.resources[_FLAG] = cls(
                np.zeros(count, np.bool_), np.zeros(count, np.bool_)
            )
        assert isinstance(found, cls)
        return found


@instructions.register("add.cc")
def bind_add_cc(instruction: Instruction, binder: Binder) -> Step:
    """Addition that sets the carry flag: PTX ISA 9.7.2.1, add.cc."""
    return _bind_sum(binder, takes=False, negates=False)


@instructions.register("addc")
def bind_addc(instruction: Instruction, binder: Binder) -> Step:
    """Addition of the carry flag too, which ``.cc`` sets again: PTX ISA 9.7.2.2, addc."""
    return _bind_sum(binder, takes=True, negates=False)


@instructions.register("sub.cc")
def bind_sub_cc(instruction: Instruction, binder: Binder) -> Step:
    """Subtraction that sets the carry flag: PTX ISA 9.7.2.3, sub.cc."""
    return _bind_sum(binder, takes=False, negates=True)


@instructions.register("subc")
def bind_subc(instruction: Instruction, binder: Binder) -> Step:
    """Subtraction of the borrow too; ``.cc`` sets the carry flag: PTX ISA 9.7.2.4, subc."""
    return _bind_sum(binder, takes=True, negates=True)


@instructions.register("mad.lo.cc", "mad.hi.cc")
def bind_mad_cc(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication and an addition that sets the carry flag: PTX ISA 9.7.2.5, mad.cc."""
    return _bind_product_sum(binder, takes=False)


@instructions.register("madc")
def bind_madc(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication and addition, of the carry flag too, which ``.cc`` sets again: PTX ISA
    9.7.2.6, madc."""
    return _bind_product_sum(binder, takes=True)


def _bind_sum(binder: Binder, takes: bool, negates: bool) -> Step:
    form = choose(binder, sets=("cc", OPTIONAL) if takes else ("cc",), type=TYPE_NAMES)
    binder.expect_operands(3)
    # The bits of sums do not depend on the sign.
    kind = TYPES["u" + form["type"][1:]]
    first, second = binder.source(1, kind), binder.source(2, kind)

    def negated(lanes: Lanes) -> Values:
        return ~second(lanes)

    return _bind_carrying(
        binder, first, negated if negates else second, takes, form["sets"] != "", negates
    )


def _bind_product_sum(binder: Binder, takes: bool) -> Step:
    form = choose(
        binder, mode=("lo", "hi"), sets=("cc", OPTIONAL) if takes else ("cc",), type=TYPE_NAMES
    )
    binder.expect_operands(4)
    kind, bits = TYPES[form["type"]], TYPES["u" + form["type"][1:]]
    multiply = product(form["mode"], kind)
    first, second = binder.source(1, kind), binder.source(2, kind)

    def factor(lanes: Lanes) -> Values:
        return multiply(first(lanes), second(lanes)).view(bits.dtype)

    return _bind_carrying(binder, factor, binder.source(3, bits), takes, form["sets"] != "", False)


def _bind_carrying(
    binder: Binder, first: Source, second: Source, takes: bool, sets: bool, carry: bool
) -> Step:
    """The sum of two unsigned numbers and of a carry.

    Args:
      takes: whether the carry is the flag; else it is ``carry``.
      sets: whether the sum sets the flag.
    """
    kind = TYPES["u" + binder.types[0].name[1:]]
    write, instruction = binder.destination(0, kind), binder.instruction

    def step(lanes: Lanes) -> None:
        flags = CarryFlags.of(lanes.wave)
        incoming: Values = np.bool_(carry)
        if takes:
            incoming = lanes.of(flags.values)
            if lanes.wave.observer is not None and not (known := lanes.of(flags.known)).all():
                lanes.wave.observer.undefined_register(lanes.numbers[~known], _FLAG, instruction)
        a = first(lanes)
        total = a + second(lanes) + incoming
        if sets:
            flags.values[lanes.index] = (total < a) | (incoming & (total == a))
            flags.known[lanes.index] = True
        write(lanes, total)

    return step
