"""Translation of the ``arith`` dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallasite.codegen.translation.constants import constant_text, splat_text
from pallasite.codegen.translation.emitter import Emitter, Handler
from pallasite.codegen.translation.flags import fast_math, overflow
from pallasite.codegen.translation.types import (
    element_type,
    integer_width,
    intrinsic_suffix,
    vector_length,
    with_element,
)
from pallasite.errors import CompilationError

INTEGER_PREDICATES = ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"]
FLOAT_PREDICATES = [
    *("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"),
    *("ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"),
]


def binary(mnemonic: str, flags: Callable[[Any], str] | None = None) -> Handler:
    """An instruction of two operands and a result of one type; ``flags`` reads its attributes."""

    def handle(emitter: Emitter, operation: Any) -> None:
        left, right = operation.operation.operands
        type_, name = emitter.values[left]
        words = flags(operation.attributes) if flags is not None else ""
        text = f"{mnemonic} {words}{type_} {name}, {emitter.values[right][1]}"
        emitter.define(operation, type_, text)

    return handle


def cast(mnemonic: str, flags: Callable[[Any], str] | None = None) -> Handler:
    """A conversion to the type of the result; between equal types it emits nothing."""

    def handle(emitter: Emitter, operation: Any) -> None:
        type_, name = emitter.values[operation.operation.operands[0]]
        result = emitter.result_type(operation)
        if result == type_:
            emitter.bind(operation, type_, name)
            return
        words = flags(operation.attributes) if flags is not None else ""
        emitter.define(operation, result, f"{mnemonic} {words}{type_} {name} to {result}")

    return handle


def intrinsic(name: str, flags: Callable[[Any], str] | None = None, extra: str = "") -> Handler:
    """A call of ``llvm.<name>`` overloaded on the result's type; ``extra`` is appended."""

    def handle(emitter: Emitter, operation: Any) -> None:
        operands = [emitter.values[value] for value in operation.operation.operands]
        type_ = operands[0][0]
        words = flags(operation.attributes) if flags is not None else ""
        arguments = ", ".join([f"{t} {n}" for t, n in operands])
        call = f"call {words}{type_} @llvm.{name}.{intrinsic_suffix(type_)}({arguments}{extra})"
        emitter.define(operation, type_, call)

    return handle


def _constant(emitter: Emitter, operation: Any) -> None:
    type_ = emitter.result_type(operation)
    emitter.bind(operation, type_, constant_text(operation.attributes["value"], type_))


def _compare_integers(emitter: Emitter, operation: Any) -> None:
    left, right = operation.operation.operands
    type_, name = emitter.values[left]
    predicate = INTEGER_PREDICATES[operation.attributes["predicate"].value]
    text = f"icmp {predicate} {type_} {name}, {emitter.values[right][1]}"
    emitter.define(operation, with_element(type_, "i1"), text)


def _compare_floats(emitter: Emitter, operation: Any) -> None:
    left, right = operation.operation.operands
    type_, name = emitter.values[left]
    words = fast_math(operation.attributes)
    predicate = FLOAT_PREDICATES[operation.attributes["predicate"].value]
    text = f"fcmp {words}{predicate} {type_} {name}, {emitter.values[right][1]}"
    emitter.define(operation, with_element(type_, "i1"), text)


def _select(emitter: Emitter, operation: Any) -> None:
    condition, yes, no = operation.operation.operands
    condition_type, condition_name = emitter.values[condition]
    type_, name = emitter.values[yes]
    text = f"{condition_type} {condition_name}, {type_} {name}, {type_} {emitter.values[no][1]}"
    emitter.define(operation, type_, "select " + text)


def _negate(emitter: Emitter, operation: Any) -> None:
    type_, name = emitter.values[operation.operation.operands[0]]
    emitter.define(operation, type_, f"fneg {fast_math(operation.attributes)}{type_} {name}")


def _truncate_float(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    if "roundingmode" in attributes and attributes["roundingmode"].value != 0:
        raise CompilationError(
            "arith.truncf with a rounding mode other than to nearest even",
            hint="use the conversion instruction of the target through inline assembly",
        )
    if element_type(emitter.result_type(operation))[0] == "i":
        raise _narrow(operation, operation.operation.result.type)
    _TRUNCATE(emitter, operation)


def _of_floats(handler: Handler) -> Handler:
    """An operation on floats that LLVM knows; those of 8 bits and less are integers to it."""

    def handle(emitter: Emitter, operation: Any) -> None:
        first = operation.operation.operands[0]
        if element_type(emitter.values[first][0])[0] == "i":
            raise _narrow(operation, first.type)
        handler(emitter, operation)

    return handle


def _narrow(operation: Any, type_: Any) -> CompilationError:
    return CompilationError(
        f"{operation.operation.name}: arithmetic of floats of 8 bits and less",
        got=str(type_),
        expected="f16, bf16, f32 or f64",
        hint="convert by an instruction of the target, as FragmentedArray.astype does",
    )


_TRUNCATE = cast("fptrunc", fast_math)


def _index_cast(extension: str) -> Handler:
    def handle(emitter: Emitter, operation: Any) -> None:
        type_, name = emitter.values[operation.operation.operands[0]]
        result = emitter.result_type(operation)
        if type_ == result:
            emitter.bind(operation, type_, name)
            return
        mnemonic = extension if integer_width(type_) < integer_width(result) else "trunc"
        emitter.define(operation, result, f"{mnemonic} {type_} {name} to {result}")

    return handle


def _rounded_division(kind: str, signed: bool) -> Handler:
    """Division that rounds towards minus (``floor``) or plus (``ceil``) infinity."""
    prefix = "s" if signed else "u"

    def handle(emitter: Emitter, operation: Any) -> None:
        (type_, left), (_, right) = emitter.operands(operation)
        flag = with_element(type_, "i1")
        zero = splat_text("0", type_)
        quotient = emitter.instruction(f"{prefix}div {type_} {left}, {right}")
        remainder = emitter.instruction(f"{prefix}rem {type_} {left}, {right}")
        adjust = emitter.instruction(f"icmp ne {type_} {remainder}, {zero}")
        if signed:
            signs = emitter.instruction(f"xor {type_} {left}, {right}")
            predicate = "slt" if kind == "floor" else "sge"
            side = emitter.instruction(f"icmp {predicate} {type_} {signs}, {zero}")
            adjust = emitter.instruction(f"and {flag} {adjust}, {side}")
        extension = "sext" if kind == "floor" else "zext"
        step = emitter.instruction(f"{extension} {flag} {adjust} to {type_}")
        emitter.define(operation, type_, f"add {type_} {quotient}, {step}")

    return handle


def _extended_add(name: str) -> Handler:
    """Unsigned sum or difference with its carry, as two results."""

    def handle(emitter: Emitter, operation: Any) -> None:
        (type_, left), (_, right) = emitter.operands(operation)
        flag = with_element(type_, "i1")
        pair = f"{{{type_}, {flag}}}"
        callee = f"@llvm.{name}.with.overflow.{intrinsic_suffix(type_)}"
        both = emitter.instruction(f"call {pair} {callee}({type_} {left}, {type_} {right})")
        for index, (value, kind) in enumerate(zip(operation.results, (type_, flag), strict=True)):
            part = emitter.instruction(f"extractvalue {pair} {both}, {index}")
            emitter.values[value] = (kind, part)

    return handle


def _extended_multiply(extension: str) -> Handler:
    """The low and the high half of a product, as two results."""

    def handle(emitter: Emitter, operation: Any) -> None:
        (type_, left), (_, right) = emitter.operands(operation)
        width = integer_width(type_)
        wide = with_element(type_, f"i{2 * width}")
        first = emitter.instruction(f"{extension} {type_} {left} to {wide}")
        second = emitter.instruction(f"{extension} {type_} {right} to {wide}")
        product = emitter.instruction(f"mul {wide} {first}, {second}")
        shift = splat_text(str(width), wide)
        upper = emitter.instruction(f"lshr {wide} {product}, {shift}")
        for value, half in zip(operation.results, (product, upper), strict=True):
            part = emitter.instruction(f"trunc {wide} {half} to {type_}")
            emitter.values[value] = (type_, part)

    return handle


def _bitcast(emitter: Emitter, operation: Any) -> None:
    type_, name = emitter.values[operation.operation.operands[0]]
    result = emitter.result_type(operation)
    if type_ == result:
        emitter.bind(operation, type_, name)
    elif vector_length(type_) is not None and type_.startswith("<1 x "):
        scalar = emitter.instruction(f"extractelement {type_} {name}, i64 0")
        inner = type_[5:-1]
        if inner == result:
            emitter.bind(operation, result, scalar)
        else:
            emitter.define(operation, result, f"bitcast {inner} {scalar} to {result}")
    else:
        emitter.define(operation, result, f"bitcast {type_} {name} to {result}")


_BINARY = "andi=and ori=or xori=xor divsi=sdiv divui=udiv remsi=srem remui=urem"
_WRAPPING = "addi=add subi=sub muli=mul shli=shl"
_EXACT = "shrsi=ashr shrui=lshr"
_FLOAT = "addf=fadd subf=fsub mulf=fmul divf=fdiv remf=frem"
_CASTS = "extsi=sext extui=zext sitofp=sitofp uitofp=uitofp fptosi=fptosi fptoui=fptoui"
_INTRINSICS = "maxsi=smax maxui=umax minsi=smin minui=umin"
_FLOAT_INTRINSICS = "maximumf=maximum minimumf=minimum maxnumf=maxnum minnumf=minnum"


def pairs(text: str) -> list[tuple[str, str]]:
    """``"a=b c=d"`` as pairs; a word without ``=`` stands for itself."""
    return [(one.split("=")[0], one.split("=")[-1]) for one in text.split()]


ARITH: dict[str, Handler] = {
    "arith.constant": _constant,
    "arith.cmpi": _compare_integers,
    "arith.cmpf": _of_floats(_compare_floats),
    "arith.select": _select,
    "arith.negf": _of_floats(_negate),
    "arith.truncf": _of_floats(_truncate_float),
    "arith.extf": _of_floats(cast("fpext", fast_math)),
    "arith.trunci": cast("trunc", overflow),
    "arith.bitcast": _bitcast,
    "arith.index_cast": _index_cast("sext"),
    "arith.index_castui": _index_cast("zext"),
    "arith.floordivsi": _rounded_division("floor", signed=True),
    "arith.ceildivsi": _rounded_division("ceil", signed=True),
    "arith.ceildivui": _rounded_division("ceil", signed=False),
    "arith.addui_extended": _extended_add("uadd"),
    "arith.subui_extended": _extended_add("usub"),
    "arith.mulsi_extended": _extended_multiply("sext"),
    "arith.mului_extended": _extended_multiply("zext"),
    **{f"arith.{name}": binary(llvm) for name, llvm in pairs(_BINARY)},
    **{f"arith.{name}": binary(llvm, overflow) for name, llvm in pairs(_WRAPPING)},
    **{f"arith.{name}": binary(llvm) for name, llvm in pairs(_EXACT)},
    **{f"arith.{name}": _of_floats(binary(llvm, fast_math)) for name, llvm in pairs(_FLOAT)},
    **{f"arith.{name}": cast(llvm) for name, llvm in pairs(_CASTS)},
    **{f"arith.{name}": intrinsic(llvm) for name, llvm in pairs(_INTRINSICS)},
    **{
        f"arith.{name}": _of_floats(intrinsic(llvm, fast_math))
        for name, llvm in pairs(_FLOAT_INTRINSICS)
    },
}
