"""Translation of the ``math`` dialect: what the NVPTX back end has instructions for.

Everything else must have been expanded before. The back end aborts the process on an
intrinsic that it cannot select, so that each operation is checked against the element types with
which it works.
"""

from __future__ import annotations

from typing import Any

from pallasite.plugin import CompilationError
from pallasite.plugin.codegen import (
    Emitter,
    Handler,
    element_type,
    fast_math,
    intrinsic,
    intrinsic_suffix,
    pairs,
    splat_text,
)

_EXACT = "sqrt fma absf=fabs floor ceil trunc round roundeven copysign"
_APPROXIMATE: dict[str, tuple[str, tuple[str, ...]]] = {
    "math.exp2": ("exp2", ("float", "half", "bfloat")),
    "math.sin": ("sin", ("float", "half", "bfloat")),
    "math.cos": ("cos", ("float", "half", "bfloat")),
    "math.tanh": ("tanh", ("float", "half", "bfloat")),
}


def _unsupported(operation: Any, type_: str) -> CompilationError:
    return CompilationError(
        f"{operation.operation.name} of type {type_} has no instruction",
        hint="expand it into other operations before code generation",
    )


def _approximate(emitter: Emitter, operation: Any) -> None:
    """An instruction that approximates a function, chosen by the flag ``afn``."""
    name, elements = _APPROXIMATE[operation.operation.name]
    (type_, operand) = emitter.operands(operation)[0]
    if emitter.device and element_type(type_) not in elements:
        raise _unsupported(operation, type_)
    words = fast_math(operation.attributes)
    if emitter.device and "afn" not in words and "fast" not in words:
        words += "afn "
    callee = f"@llvm.{name}.{intrinsic_suffix(type_)}"
    emitter.define(operation, type_, f"call {words}{type_} {callee}({type_} {operand})")


def _log2(emitter: Emitter, operation: Any) -> None:
    if not emitter.device:
        return intrinsic("log2", fast_math)(emitter, operation)
    return _each_float(emitter, operation, "lg2.approx.f")


def _rsqrt(emitter: Emitter, operation: Any) -> None:
    ((type_, operand),) = emitter.operands(operation)
    if emitter.device and element_type(type_) == "float":
        return _each_float(emitter, operation, "rsqrt.approx.f")
    root = emitter.instruction(
        f"call {type_} @llvm.sqrt.{intrinsic_suffix(type_)}({type_} {operand})"
    )
    one = splat_text({"half": "0xH3C00", "bfloat": "0xR3F80"}.get(
        element_type(type_), "1.000000e+00"), type_)  # fmt: skip
    return emitter.define(operation, type_, f"fdiv {type_} {one}, {root}")


def _each_float(emitter: Emitter, operation: Any, name: str) -> None:
    """Calls an intrinsic of ``float`` for each element."""
    ((type_, operand),) = emitter.operands(operation)
    if element_type(type_) != "float":
        raise _unsupported(operation, type_)
    callee = f"call float @llvm.nvvm.{name}"
    if type_ == "float":
        emitter.define(operation, type_, f"{callee}(float {operand})")
        return
    result = "poison"
    for index in range(int(type_[1:].split(" ", 1)[0])):
        element = emitter.instruction(f"extractelement {type_} {operand}, i64 {index}")
        element = emitter.instruction(f"{callee}(float {element})")
        text = f"insertelement {type_} {result}, float {element}, i64 {index}"
        result = emitter.instruction(text)
    emitter.bind(operation, type_, result)


def _classify(mask: int) -> Handler:
    """``llvm.is.fpclass`` with a mask of classes."""

    def handle(emitter: Emitter, operation: Any) -> None:
        ((type_, operand),) = emitter.operands(operation)
        result = emitter.result_type(operation)
        callee = f"@llvm.is.fpclass.{intrinsic_suffix(type_)}"
        text = f"call {result} {callee}({type_} {operand}, i32 {mask})"
        emitter.define(operation, result, text)

    return handle


MATH: dict[str, Handler] = {
    **{f"math.{name}": intrinsic(llvm, fast_math) for name, llvm in pairs(_EXACT)},
    **dict.fromkeys(_APPROXIMATE, _approximate),
    "math.log2": _log2,
    "math.rsqrt": _rsqrt,
    "math.absi": intrinsic("abs", extra=", i1 false"),
    "math.ctpop": intrinsic("ctpop"),
    "math.ctlz": intrinsic("ctlz", extra=", i1 false"),
    "math.cttz": intrinsic("cttz", extra=", i1 false"),
    "math.isnan": _classify(0x003),
    "math.isinf": _classify(0x204),
    "math.isfinite": _classify(0x1F8),
}
