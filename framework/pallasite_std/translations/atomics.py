"""Translation of atomic read-modify-write operations of the ``llvm`` dialect.

The NVPTX back end ignores the scope of ``atomicrmw``, and its ordering too: it always emits a
relaxed instruction of the scope of the GPU. On a device, whatever needs more is therefore written
as inline assembly.
"""

from __future__ import annotations

from typing import Any

from pallasite.plugin import CompilationError
from pallasite.plugin.codegen import ORDERINGS, Emitter, Handler, alignment, ordering

_NAMES = [
    *("xchg", "add", "sub", "and", "nand", "or", "xor", "max", "min", "umax", "umin"),
    *("fadd", "fsub", "fmax", "fmin", "uinc_wrap", "udec_wrap", "usub_cond", "usub_sat"),
    *("fmaximum", "fminimum"),
]
_INSTRUCTIONS = {
    **{("xchg", f"i{bits}"): f"exch.b{bits}" for bits in (32, 64)},
    **{("add", f"i{bits}"): f"add.u{bits}" for bits in (32, 64)},
    **{("and", f"i{bits}"): f"and.b{bits}" for bits in (32, 64)},
    **{("or", f"i{bits}"): f"or.b{bits}" for bits in (32, 64)},
    **{("xor", f"i{bits}"): f"xor.b{bits}" for bits in (32, 64)},
    **{("max", f"i{bits}"): f"max.s{bits}" for bits in (32, 64)},
    **{("min", f"i{bits}"): f"min.s{bits}" for bits in (32, 64)},
    **{("umax", f"i{bits}"): f"max.u{bits}" for bits in (32, 64)},
    **{("umin", f"i{bits}"): f"min.u{bits}" for bits in (32, 64)},
    ("fadd", "float"): "add.f32",
    ("fadd", "double"): "add.f64",
}
_CONSTRAINTS = {"i32": "r", "i64": "l", "float": "f", "double": "d"}
_SCOPES = {"": "sys", "device": "gpu", "agent": "gpu", "cluster": "cluster", "block": "cta"}
_SEMANTICS = {"acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}
_SPACES = {"ptr": "", "ptr addrspace(1)": ".global", "ptr addrspace(3)": ".shared"}
_SHARED = "ptr addrspace(3)"


def _read_modify_write(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    name = _NAMES[attributes["bin_op"].value]
    (pointer_type, pointer), (type_, value) = emitter.operands(operation)
    order = ORDERINGS[attributes["ordering"].value]
    scope = attributes["syncscope"].value if "syncscope" in attributes else ""
    enough = order in ("unordered", "monotonic") and (
        pointer_type == _SHARED or _SCOPES.get(scope) in ("gpu", "cluster", "cta")
    )
    if not emitter.device or enough:
        volatile = "volatile " if "volatile_" in attributes else ""
        rest = ordering(attributes) + alignment(attributes)
        text = f"atomicrmw {volatile}{name} {pointer_type} {pointer}, {type_} {value}{rest}"
        emitter.define(operation, type_, text)
        return
    instruction = _INSTRUCTIONS.get((name, type_))
    if instruction is None or pointer_type not in _SPACES or scope not in _SCOPES:
        raise CompilationError(
            f"atomicrmw {name} of type {type_} with ordering {order} and scope {scope or 'system'}",
            expected='ordering monotonic and syncscope("device") for this operation and type',
        )
    semantics = _SEMANTICS.get(order, "relaxed")
    space = _SPACES[pointer_type]
    if order == "seq_cst":
        emitter.statement(f"fence{_scope_text(scope)} seq_cst")
        semantics = "acquire"
    letter = _CONSTRAINTS[type_]
    assembly = f"atom.{semantics}.{_SCOPES[scope]}{space}.{instruction} $0, [$1], $2;"
    call = f'"{assembly}", "={letter},l,{letter},~{{memory}}"({pointer_type} {pointer}, {type_}'
    emitter.define(operation, type_, f"call {type_} asm sideeffect {call} {value}) #0")


def _scope_text(scope: str) -> str:
    return f' syncscope("{scope}")' if scope else ""


def _compare_exchange(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    (pointer_type, pointer), (type_, expected), (_, value) = emitter.operands(operation)
    weak = "weak " if "weak" in attributes else ""
    volatile = "volatile " if "volatile_" in attributes else ""
    success = ordering(attributes, "success_ordering")
    failure = ORDERINGS[attributes["failure_ordering"].value]
    text = (
        f"cmpxchg {weak}{volatile}{pointer_type} {pointer}, {type_} {expected}, {type_} {value}"
        f"{success} {failure}{alignment(attributes)}"
    )
    emitter.define(operation, f"{{{type_}, i1}}", text)


ATOMICS: dict[str, Handler] = {
    "llvm.atomicrmw": _read_modify_write,
    "llvm.cmpxchg": _compare_exchange,
}
