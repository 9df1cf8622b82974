"""Reciprocals, roots and elementary functions: PTX ISA 9.7.3.13 to 9.7.3.22, 9.7.4.9, 9.7.4.10."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.instructions.approximations import (
    coarse,
    double_reciprocal_root,
    function,
    reciprocal_root,
    table,
)
from pallasite_simulator.instructions.float_arithmetic import arithmetic
from pallasite_simulator.instructions.float_modifiers import DIRECTIONS, read

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder
    from pallasite_simulator.instruction_set import Step
    from pallasite_simulator.ptx.syntax import Instruction

instructions = InstructionSet()

_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def _is_coarse(binder: Binder) -> bool:
    return binder.instruction.has("approx", "ftz", "f64")


@instructions.register("rcp")
def bind_rcp(instruction: Instruction, binder: Binder) -> Step:
    """Reciprocal: PTX ISA 9.7.3.13, rcp, and 9.7.3.14, rcp.approx.ftz.f64."""
    kind = binder.only_type("f32", "f64")
    if kind.name == "f32":
        mode, flags = read(binder, ("ftz",), choices=("approx", *DIRECTIONS))
        mode = "rn" if mode == "approx" else mode
        return binder.elementwise(arithmetic("rcp", "f32", mode, flags), kind, kind)
    if _is_coarse(binder):
        read(binder, ("approx", "ftz"))
        return binder.elementwise(coarse(root=False), kind, kind)
    mode, flags = read(binder, choices=DIRECTIONS)
    return binder.elementwise(arithmetic("rcp", "f64", mode, flags), kind, kind)


@instructions.register("sqrt")
def bind_sqrt(instruction: Instruction, binder: Binder) -> Step:
    """Square root: PTX ISA 9.7.3.15, sqrt."""
    kind = binder.only_type("f32", "f64")
    if kind.name == "f32":
        mode, flags = read(binder, ("ftz",), choices=("approx", *DIRECTIONS))
    else:
        mode, flags = read(binder, choices=DIRECTIONS)
    mode = "rn" if mode == "approx" else mode
    return binder.elementwise(arithmetic("sqrt", kind.name, mode, flags), kind, kind)


@instructions.register("rsqrt")
def bind_rsqrt(instruction: Instruction, binder: Binder) -> Step:
    """Reciprocal of the root: PTX ISA 9.7.3.16, rsqrt, and 9.7.3.17, rsqrt.approx.ftz.f64."""
    kind = binder.only_type("f32", "f64")
    _, flags = read(binder, ("ftz",), choices=("approx",))
    if kind.name == "f32":
        return binder.elementwise(reciprocal_root("ftz" in flags), kind, kind)
    if "ftz" in flags:
        return binder.elementwise(coarse(root=True), kind, kind)
    return binder.elementwise(double_reciprocal_root(), kind, kind)


def _bind_function(name: str, binder: Binder) -> Step:
    kind = binder.only_type("f32")
    _, flags = read(binder, ("ftz",), choices=("approx",))
    return binder.elementwise(function(name, "ftz" in flags), kind, kind)


@instructions.register("sin")
def bind_sin(instruction: Instruction, binder: Binder) -> Step:
    """Sine: PTX ISA 9.7.3.18, sin."""
    return _bind_function("sin", binder)


@instructions.register("cos")
def bind_cos(instruction: Instruction, binder: Binder) -> Step:
    """Cosine: PTX ISA 9.7.3.19, cos."""
    return _bind_function("cos", binder)


@instructions.register("lg2")
def bind_lg2(instruction: Instruction, binder: Binder) -> Step:
    """Logarithm to base 2: PTX ISA 9.7.3.20, lg2."""
    return _bind_function("lg2", binder)


@instructions.register("ex2")
def bind_ex2(instruction: Instruction, binder: Binder) -> Step:
    """Power of 2: PTX ISA 9.7.3.21 and 9.7.4.10, ex2."""
    if not any(one.name in _HALVES for one in binder.types):
        return _bind_function("ex2", binder)
    kind = binder.only_type(*_HALVES)
    small = kind.name.removesuffix("x2")
    _, flags = read(binder, ("ftz",), choices=("approx",))
    if (small == "bf16") != ("ftz" in flags):
        raise binder.error(f"ex2.approx of .{kind.name} is there only with or only without .ftz")
    return binder.elementwise(table("ex2", small, "ftz" in flags), kind, kind)


@instructions.register("tanh")
def bind_tanh(instruction: Instruction, binder: Binder) -> Step:
    """Hyperbolic tangent: PTX ISA 9.7.3.22 and 9.7.4.9, tanh."""
    kind = binder.only_type("f32", *_HALVES)
    read(binder, choices=("approx",))
    if kind.name == "f32":
        return binder.elementwise(function("tanh"), kind, kind)
    return binder.elementwise(table("tanh", kind.name.removesuffix("x2")), kind, kind)
