"""Comparison instructions (PTX ISA 9.7.6 and 9.7.7): setp and set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.instructions.comparisons import NAMES, allowed, comparison
from pallasite_simulator.instructions.float_formats import FORMATS
from pallasite_simulator.instructions.float_modifiers import read
from pallasite_simulator.ptx.syntax import Pair, Sink
from pallasite_simulator.types import TYPES, PtxType, Values

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder, Source
    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.instruction_set import Step
    from pallasite_simulator.ptx.syntax import Instruction

instructions = InstructionSet()

PRED = TYPES["pred"]

_TYPES = (
    *(f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)),
    *("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"),
)
_COMBINATIONS: dict[str, Callable[[Values, Values], Values]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}
_FLUSHED = ("f16", "f16x2", "f32")

# Types of set's result by types of its operands, beside u32 and s32.
_RESULTS: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "bf16", "u16", "s16"),
    "bf16": ("bf16", "u16", "s16"),
    "f16x2": ("f16x2",),
    "bf16x2": ("bf16x2",),
}
_OTHER_RESULTS = ("f16", "bf16", "f32")


def _tests(binder: Binder, kind: PtxType) -> tuple[Callable[[Lanes], Values], str]:
    """What compares operands 1 and 2, and the combination with operand 3 (or an empty string)."""
    name, flags = read(binder, ("ftz", *_COMBINATIONS), choices=NAMES)
    if name not in allowed(kind):
        raise binder.error(f"there is no comparison .{name} of .{kind.name}")
    if "ftz" in flags and kind.name not in _FLUSHED:
        raise binder.error(f"modifier .ftz does not fit type .{kind.name}")
    combinations = [one for one in _COMBINATIONS if one in flags]
    if len(combinations) > 1:
        raise binder.error("more than one Boolean operation")
    binder.expect_operands(4 if combinations else 3)
    compare = comparison(name, kind, "ftz" in flags)
    first, second = binder.source(1, kind), binder.source(2, kind)
    combination = combinations[0] if combinations else ""
    return lambda lanes: compare(first(lanes), second(lanes)), combination


def _combined(
    binder: Binder, combination: str
) -> tuple[Callable[[Values, Values], Values], Source]:
    return _COMBINATIONS[combination], binder.source(3, PRED)


@instructions.register("setp")
def bind_setp(instruction: Instruction, binder: Binder) -> Step:
    """Compares, and sets predicates: PTX ISA 9.7.6.2 and 9.7.7.2, setp.

    The second predicate is the negation, or for packed types the comparison of the upper halves.
    """
    kind = binder.only_type(*_TYPES)
    test, combination = _tests(binder, kind)
    target = binder.operand(0)
    pair = target if isinstance(target, Pair) else Pair(target, Sink())
    if isinstance(target, Pair) and kind.name in ("f16", "bf16"):
        raise binder.error(f"setp of .{kind.name} has one predicate as its result")
    write_first = binder.destination(pair.first, PRED)
    write_second = binder.destination(pair.second, PRED)
    packed, single = kind.kind == "packed", isinstance(pair.second, Sink)
    if not combination:

        def step(lanes: Lanes) -> None:
            result = test(lanes)
            if packed:
                write_first(lanes, result[..., 0].copy())
                write_second(lanes, result[..., 1].copy())
                return
            if not single:
                write_second(lanes, np.logical_not(result))
            write_first(lanes, result)

        return step

    combine, read_third = _combined(binder, combination)

    def combining_step(lanes: Lanes) -> None:
        result, third = test(lanes), read_third(lanes)
        if packed:
            first, second = result[..., 0], result[..., 1]
        else:
            first, second = result, np.logical_not(result)
        # The third operand may be one of the destinations.
        first, second = combine(first, third), combine(second, third)
        write_first(lanes, first)
        write_second(lanes, second)

    return combining_step


@instructions.register("set")
def bind_set(instruction: Instruction, binder: Binder) -> Step:
    """Compares, and sets a register to all ones or 1.0, or to zero: PTX ISA 9.7.6.1 and 9.7.7.1,
    set."""
    types = binder.types
    if len(types) != 2 or types[1].name not in _TYPES:
        raise binder.error("set needs a type of its result and one of its operands")
    result, kind = types
    results = ("u32", "s32", *_RESULTS.get(kind.name, _OTHER_RESULTS))
    if result.name not in results:
        raise binder.error(
            f"set cannot give .{result.name} from .{kind.name}",
            expected="one of " + ", ".join(f".{one}" for one in results),
        )
    test, combination = _tests(binder, kind)
    write = binder.destination(0, TYPES[f"b{result.bits}"])
    choose = _packed_choice if kind.kind == "packed" else _choice
    form = FORMATS.get(result.name.removesuffix("x2"))
    width = result.bits // 2 if kind.kind == "packed" else result.bits
    true = form.one if form else (1 << width) - 1
    chosen = functools.partial(choose, np.dtype(f"u{width // 8}").type(true))
    if not combination:
        return lambda lanes: write(lanes, chosen(test(lanes)))
    combine, read_third = _combined(binder, combination)

    def step(lanes: Lanes) -> None:
        value, third = test(lanes), read_third(lanes)
        if kind.kind == "packed":
            third = np.expand_dims(third, -1)
        write(lanes, chosen(combine(value, third)))

    return step


def _choice(true: Values, value: Values) -> Values:
    return np.where(value, true, np.zeros_like(true))[()]


def _packed_choice(true: Values, value: Values) -> Values:
    return _choice(true, value).view(np.uint32)[..., 0]
