"""Translation of the ``llvm`` dialect: values, aggregates and calls."""

from __future__ import annotations

from typing import Any

from pallasite.codegen.translation.arith import (
    FLOAT_PREDICATES,
    INTEGER_PREDICATES,
    binary,
    cast,
    intrinsic,
    pairs,
)
from pallasite.codegen.translation.constants import constant_text, escape, split_types
from pallasite.codegen.translation.emitter import Emitter, Handler
from pallasite.codegen.translation.flags import disjoint, exact, fast_math_llvm, non_negative
from pallasite.codegen.translation.types import (
    element_type,
    function_type,
    intrinsic_suffix,
    with_element,
)
from pallasite.errors import CompilationError


def _constant(emitter: Emitter, operation: Any) -> None:
    type_ = emitter.result_type(operation)
    emitter.bind(operation, type_, constant_text(operation.attributes["value"], type_))


def _literal(name: str) -> Handler:
    def handle(emitter: Emitter, operation: Any) -> None:
        type_ = emitter.result_type(operation)
        null = name == "zeroinitializer" and type_.startswith("ptr")
        emitter.bind(operation, type_, "null" if null else name)

    return handle


def _address_of(emitter: Emitter, operation: Any) -> None:
    name = symbol(operation.attributes["global_name"].value)
    emitter.bind(operation, emitter.result_type(operation), name)


def symbol(name: str) -> str:
    """A global name, quoted where LLVM needs it."""
    plain = name.replace("_", "a").replace(".", "a").replace("$", "a")
    return f"@{name}" if plain.isalnum() and plain.isascii() else f'@"{escape(name)}"'


def member_type(type_: str, position: list[int]) -> str:
    """Type of the member of an aggregate that is reached by indices."""
    for index in position:
        if type_[0] == "[":
            type_ = type_[1:-1].split(" x ", 1)[1]
        else:
            type_ = _members(type_)[index]
    return type_


_split: dict[str, list[str]] = {}


def _members(type_: str) -> list[str]:
    found = _split.get(type_)
    if found is None:
        inside = type_[2:-2] if type_[0] == "<" else type_[1:-1]
        found = _split[type_] = split_types(inside)
    return found


def _extract_value(emitter: Emitter, operation: Any) -> None:
    type_, name = emitter.values[operation.operation.operands[0]]
    position = list(operation.attributes["position"])
    text = f"extractvalue {type_} {name}, {', '.join(map(str, position))}"
    emitter.define(operation, member_type(type_, position), text)


def _insert_value(emitter: Emitter, operation: Any) -> None:
    (type_, name), (element, value) = emitter.operands(operation)
    position = ", ".join(map(str, operation.attributes["position"]))
    text = f"insertvalue {type_} {name}, {element} {value}, {position}"
    emitter.define(operation, type_, text)


def _extract_element(emitter: Emitter, operation: Any) -> None:
    vector, index = emitter.operands(operation)
    text = f"extractelement {' '.join(vector)}, {' '.join(index)}"
    emitter.define(operation, element_type(vector[0]), text)


def _insert_element(emitter: Emitter, operation: Any) -> None:
    vector, value, index = emitter.operands(operation)
    text = f"insertelement {' '.join(vector)}, {' '.join(value)}, {' '.join(index)}"
    emitter.define(operation, vector[0], text)


def shuffle_mask(mask: list[int]) -> str:
    """The mask operand of ``shufflevector``; negative entries are poison."""
    words = ", ".join(f"i32 {one}" if one >= 0 else "i32 poison" for one in mask)
    return f"<{len(mask)} x i32> <{words}>"


def _shuffle_vector(emitter: Emitter, operation: Any) -> None:
    (type_, left), (_, right) = emitter.operands(operation)
    mask = list(operation.attributes["mask"])
    text = f"shufflevector {type_} {left}, {type_} {right}, {shuffle_mask(mask)}"
    emitter.define(operation, f"<{len(mask)} x {element_type(type_)}>", text)


def _compare(instruction: str, predicates: list[str]) -> Handler:
    def handle(emitter: Emitter, operation: Any) -> None:
        (type_, left), (_, right) = emitter.operands(operation)
        predicate = predicates[operation.attributes["predicate"].value]
        words = fast_math_llvm(operation.attributes)
        text = f"{instruction} {words}{predicate} {type_} {left}, {right}"
        emitter.define(operation, with_element(type_, "i1"), text)

    return handle


def _select(emitter: Emitter, operation: Any) -> None:
    condition, yes, no = emitter.operands(operation)
    words = fast_math_llvm(operation.attributes)
    text = f"select {words}{' '.join(condition)}, {' '.join(yes)}, {' '.join(no)}"
    emitter.define(operation, yes[0], text)


def _unary(mnemonic: str) -> Handler:
    def handle(emitter: Emitter, operation: Any) -> None:
        ((type_, name),) = emitter.operands(operation)
        words = fast_math_llvm(operation.attributes)
        emitter.define(operation, type_, f"{mnemonic} {words}{type_} {name}")

    return handle


def _bit_count(name: str) -> Handler:
    """``ctlz``, ``cttz`` and ``abs``, whose second argument says whether an input is poison."""

    def handle(emitter: Emitter, operation: Any) -> None:
        ((type_, operand),) = emitter.operands(operation)
        attributes = operation.attributes
        poison = any(
            key in attributes and attributes[key].value
            for key in ("is_zero_poison", "is_int_min_poison")
        )
        callee = f"@llvm.{name}.{intrinsic_suffix(type_)}"
        flag = "true" if poison else "false"
        text = f"call {type_} {callee}({type_} {operand}, i1 {flag})"
        emitter.define(operation, type_, text)

    return handle


def _call_text(emitter: Emitter, operation: Any, callee: str, words: str = "") -> None:
    arguments = ", ".join(emitter.typed(operation))
    results = list(operation.operation.results)
    type_ = emitter.types[results[0].type] if results else "void"
    attributes = operation.attributes
    variadic = ""
    if "var_callee_type" in attributes:
        result, parameters, _ = function_type(str(attributes["var_callee_type"].value))
        variadic = f"{result} ({', '.join([*parameters, '...'])})"
    text = f"call {words}{variadic or type_} {callee}({arguments})"
    if results:
        emitter.define(operation, type_, text)
    else:
        emitter.statement(text)


def _call_intrinsic(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    name = attributes["intrin"].value
    _call_text(emitter, operation, f"@{name}", fast_math_llvm(attributes))


def _call(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    if "callee" not in attributes:
        raise CompilationError("an indirect call", hint="call functions by name")
    callee = symbol(attributes["callee"].value)
    _call_text(emitter, operation, callee, fast_math_llvm(attributes))


def _return(emitter: Emitter, operation: Any) -> None:
    operands = emitter.typed(operation)
    emitter.statement(f"ret {operands[0] if operands else 'void'}")


def _statement(text: str) -> Handler:
    return lambda emitter, operation: emitter.statement(text)


_BINARY = "add sub mul shl and xor srem urem"
_EXACT = "sdiv udiv lshr ashr"
_FLOAT = "fadd fsub fmul fdiv frem"
_CASTS = "trunc sext sitofp fptosi fptoui ptrtoint inttoptr bitcast addrspacecast fptrunc fpext"
_INTRINSICS = (
    "smax smin umax umin fshl fshr ctpop bitreverse bswap sadd.sat uadd.sat ssub.sat usub.sat"
)
_FLOAT_INTRINSICS = (
    "fma fmuladd fabs floor ceil trunc round roundeven rint nearbyint sqrt copysign minnum maxnum"
    " minimum maximum canonicalize"
)

LLVM: dict[str, Handler] = {
    "llvm.mlir.constant": _constant,
    "llvm.mlir.undef": _literal("undef"),
    "llvm.mlir.poison": _literal("poison"),
    "ub.poison": _literal("poison"),
    "llvm.mlir.zero": _literal("zeroinitializer"),
    "llvm.mlir.addressof": _address_of,
    "llvm.extractvalue": _extract_value,
    "llvm.insertvalue": _insert_value,
    "llvm.extractelement": _extract_element,
    "llvm.insertelement": _insert_element,
    "llvm.shufflevector": _shuffle_vector,
    "llvm.icmp": _compare("icmp", INTEGER_PREDICATES),
    "llvm.fcmp": _compare("fcmp", FLOAT_PREDICATES),
    "llvm.select": _select,
    "llvm.fneg": _unary("fneg"),
    "llvm.freeze": _unary("freeze"),
    "llvm.or": binary("or", disjoint),
    "llvm.zext": cast("zext", non_negative),
    "llvm.uitofp": cast("uitofp", non_negative),
    "llvm.intr.ctlz": _bit_count("ctlz"),
    "llvm.intr.cttz": _bit_count("cttz"),
    "llvm.intr.abs": _bit_count("abs"),
    "llvm.intr.trap": _statement("call void @llvm.trap()"),
    "llvm.call_intrinsic": _call_intrinsic,
    "llvm.call": _call,
    "llvm.return": _return,
    "llvm.unreachable": _statement("unreachable"),
    **{f"llvm.{name}": binary(llvm) for name, llvm in pairs(_BINARY)},
    **{f"llvm.{name}": binary(llvm, exact) for name, llvm in pairs(_EXACT)},
    **{f"llvm.{name}": binary(llvm, fast_math_llvm) for name, llvm in pairs(_FLOAT)},
    **{f"llvm.{name}": cast(llvm) for name, llvm in pairs(_CASTS)},
    **{f"llvm.intr.{name}": intrinsic(llvm) for name, llvm in pairs(_INTRINSICS)},
    **{
        f"llvm.intr.{name}": intrinsic(llvm, fast_math_llvm)
        for name, llvm in pairs(_FLOAT_INTRINSICS)
    },
}
