"""Floating-point arithmetic (PTX ISA 9.7.3, 9.7.4 and 9.7.5).

``bind_add`` and its like are called for the floating-point types of instructions that integers have
as well; ``copysign`` and ``testp`` are rules of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.instructions.approximations import divide
from pallasite_simulator.instructions.float_arithmetic import PACKED, arithmetic
from pallasite_simulator.instructions.float_formats import FORMATS, Format
from pallasite_simulator.instructions.float_modifiers import DIRECTIONS, read
from pallasite_simulator.instructions.float_selection import extremum, sign_change
from pallasite_simulator.types import TYPES, PtxType, Values

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder
    from pallasite_simulator.instruction_set import Step
    from pallasite_simulator.ptx.syntax import Instruction

instructions = InstructionSet()

_SMALL = ("f16", "bf16")

# Modifiers other than roundings, by type.
_FLAGS: dict[str, tuple[str, ...]] = {
    "f16": ("ftz", "sat"),
    "f16x2": ("ftz", "sat"),
    "bf16": (),
    "bf16x2": (),
    "f32": ("ftz", "sat"),
    "f32x2": ("ftz",),
    "f64": (),
}
_FUSED_FLAGS: dict[str, tuple[str, ...]] = {
    **_FLAGS,
    "f16": ("ftz", "sat", "relu", "oob"),
    "f16x2": ("ftz", "sat", "relu", "oob"),
    "bf16": ("relu", "oob"),
    "bf16x2": ("relu", "oob"),
}


def _float_type(binder: Binder, *allowed: str) -> PtxType:
    return binder.only_type(*(allowed or PACKED))


def _directions(kind: str) -> tuple[str, ...]:
    """Roundings of sums and products: of f16 and bf16 only one."""
    return DIRECTIONS if kind in ("f32", "f32x2", "f64") else ("rn",)


def _mixed(binder: Binder) -> str | None:
    """The type of the narrow operands of an instruction such as ``add.f32.bf16``, or None."""
    names = tuple(one.name for one in binder.types)
    return names[1] if len(names) == 2 and names[0] == "f32" and names[1] in _SMALL else None


def _bind_rounded(operation: str, binder: Binder) -> Step:
    """Sums, differences and products."""
    narrow = _mixed(binder) if operation != "mul" else None
    if narrow is not None:
        mode, flags = read(binder, ("sat",), choices=DIRECTIONS, default="rn")
        function = arithmetic(operation, "f32", mode, flags, narrow)
        return binder.elementwise(function, TYPES["f32"], TYPES[narrow], TYPES["f32"])
    kind = _float_type(binder)
    mode, flags = read(binder, _FLAGS[kind.name], choices=_directions(kind.name), default="rn")
    return binder.elementwise(arithmetic(operation, kind.name, mode, flags), kind, kind, kind)


def bind_add(instruction: Instruction, binder: Binder) -> Step:
    """Sum: PTX ISA 9.7.3.3, 9.7.4.1 and 9.7.5.1, add; the last one adds f16 or bf16 to f32."""
    return _bind_rounded("add", binder)


def bind_sub(instruction: Instruction, binder: Binder) -> Step:
    """Difference: PTX ISA 9.7.3.4, 9.7.4.2 and 9.7.5.2, sub."""
    return _bind_rounded("sub", binder)


def bind_mul(instruction: Instruction, binder: Binder) -> Step:
    """Product: PTX ISA 9.7.3.5 and 9.7.4.3, mul."""
    return _bind_rounded("mul", binder)


def bind_fma(instruction: Instruction, binder: Binder) -> Step:
    """Product and sum, rounded once: PTX ISA 9.7.3.6, 9.7.4.4 and 9.7.5.3, fma."""
    narrow = _mixed(binder)
    if narrow is not None:
        mode, flags = read(binder, ("sat",), choices=DIRECTIONS)
        function, small = arithmetic("fma", "f32", mode, flags, narrow), TYPES[narrow]
        return binder.elementwise(function, TYPES["f32"], small, small, TYPES["f32"])
    kind = _float_type(binder)
    mode, flags = read(
        binder,
        _FUSED_FLAGS[kind.name],
        choices=_directions(kind.name),
        exclusive=[("sat", "relu"), ("oob", "sat"), ("oob", "ftz")],
    )
    return binder.elementwise(arithmetic("fma", kind.name, mode, flags), kind, kind, kind, kind)


def bind_mad(instruction: Instruction, binder: Binder) -> Step:
    """The same as fma: PTX ISA 9.7.3.7, mad."""
    kind = _float_type(binder, "f32", "f64")
    mode, flags = read(binder, _FLAGS[kind.name], choices=DIRECTIONS)
    return binder.elementwise(arithmetic("fma", kind.name, mode, flags), kind, kind, kind, kind)


def bind_div(instruction: Instruction, binder: Binder) -> Step:
    """Quotient: PTX ISA 9.7.3.8, div."""
    kind = _float_type(binder, "f32", "f64")
    if kind.name == "f64":
        mode, flags = read(binder, choices=DIRECTIONS)
    else:
        mode, flags = read(binder, ("ftz",), choices=("approx", "full", *DIRECTIONS))
    if mode in ("approx", "full"):
        return binder.elementwise(divide(mode, "ftz" in flags), kind, kind, kind)
    return binder.elementwise(arithmetic("div", kind.name, mode, flags), kind, kind, kind)


def _bind_sign_change(operation: str, binder: Binder) -> Step:
    kind = _float_type(binder, "f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
    allowed = ("ftz",) if kind.name in ("f16", "f16x2", "f32") else ()
    _, flags = read(binder, allowed)
    return binder.elementwise(sign_change(operation, kind.name, "ftz" in flags), kind, kind)


def bind_abs(instruction: Instruction, binder: Binder) -> Step:
    """Absolute value: PTX ISA 9.7.3.9 and 9.7.4.6, abs."""
    return _bind_sign_change("abs", binder)


def bind_neg(instruction: Instruction, binder: Binder) -> Step:
    """Negation: PTX ISA 9.7.3.10 and 9.7.4.5, neg."""
    return _bind_sign_change("neg", binder)


def _bind_extremum(operation: str, binder: Binder) -> Step:
    kind = _float_type(binder, "f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
    binder.expect_operands(3, 4)
    count = len(binder.instruction.operands) - 1
    if count == 3 and kind.name != "f32":
        raise binder.error("three numbers can be compared in .f32 only", got=f".{kind.name}")
    if kind.name == "f64":
        allowed: tuple[str, ...] = ()
    elif count == 3:
        allowed = ("ftz", "NaN", "abs")
    else:
        allowed = ("NaN", "xorsign", "abs")
        if not kind.name.startswith("bf16"):
            allowed += ("ftz",)
    _, flags = read(binder, allowed)
    if count == 2 and ("abs" in flags) != ("xorsign" in flags):
        raise binder.error("modifiers .xorsign and .abs belong together")
    return binder.elementwise(extremum(operation, kind.name, flags, count), kind, *[kind] * count)


def bind_min(instruction: Instruction, binder: Binder) -> Step:
    """Minimum: PTX ISA 9.7.3.11 and 9.7.4.7, min."""
    return _bind_extremum("min", binder)


def bind_max(instruction: Instruction, binder: Binder) -> Step:
    """Maximum: PTX ISA 9.7.3.12 and 9.7.4.8, max."""
    return _bind_extremum("max", binder)


@instructions.register("copysign")
def bind_copysign(instruction: Instruction, binder: Binder) -> Step:
    """The second operand with the sign of the first: PTX ISA 9.7.3.2, copysign."""
    kind = _float_type(binder, "f32", "f64")
    read(binder)
    return binder.elementwise(lambda a, b: np.copysign(b, a), kind, kind, kind)


@instructions.register("testp")
def bind_testp(instruction: Instruction, binder: Binder) -> Step:
    """A property of a number: PTX ISA 9.7.3.1, testp. Zeros count as normal."""
    kind = _float_type(binder, "f32", "f64")
    properties = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    wanted, _ = read(binder, choices=properties)
    form = FORMATS[kind.name]
    return binder.elementwise(lambda a: _has_property(wanted, form, a), TYPES["pred"], kind)


def _has_property(wanted: str, form: Format, values: Values) -> Values:
    dtype = np.dtype(f"u{form.bits // 8}").type
    magnitude = values.view(dtype) & dtype(form.magnitude)
    infinity, normal = dtype(form.infinity), dtype(form.smallest_normal)
    if wanted == "finite":
        return magnitude < infinity
    if wanted == "infinite":
        return magnitude == infinity
    if wanted == "number":
        return magnitude <= infinity
    if wanted == "notanumber":
        return magnitude > infinity
    subnormal = (magnitude < normal) & (magnitude != 0)
    if wanted == "subnormal":
        return subnormal
    return (magnitude < infinity) & ~subnormal
