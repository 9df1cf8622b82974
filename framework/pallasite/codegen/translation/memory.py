"""Translation of the ``llvm`` dialect: addresses, loads, stores, atomics and fences."""

from __future__ import annotations

from typing import Any

from pallasite.codegen.translation.constants import escape
from pallasite.codegen.translation.emitter import Emitter, Handler

_DYNAMIC = -(2**31)
_ORDERINGS = {
    0: "",
    1: "unordered",
    2: "monotonic",
    4: "acquire",
    5: "release",
    6: "acq_rel",
    7: "seq_cst",
}
_ATOMICS = (
    "xchg add sub and nand or xor max min umax umin fadd fsub fmax fmin uinc_wrap udec_wrap"
    " usub_cond usub_sat fmaximum fminimum"
).split()


def _element_pointer(emitter: Emitter, operation: Any) -> None:
    """An address. The MLIR bindings do not show ``inbounds``; a unit attribute of this name does."""
    attributes = operation.attributes
    base, *dynamic = [emitter.values[value] for value in operation.operation.operands]
    remaining = iter(dynamic)
    indices = [
        " ".join(next(remaining)) if index == _DYNAMIC else f"i32 {index}"
        for index in attributes["rawConstantIndices"]
    ]
    element = emitter.types[attributes["elem_type"].value]
    words = "inbounds " if "inbounds" in attributes else ""
    text = f"getelementptr {words}{element}, {base[0]} {base[1]}, {', '.join(indices)}"
    emitter.define(operation, base[0], text)


def _ordering(attributes: Any, name: str = "ordering") -> str:
    """``" syncscope(...) ordering"``, or nothing for an access that is not atomic."""
    word = _ORDERINGS[attributes[name].value] if name in attributes else ""
    if not word:
        return ""
    return f"{_scope(attributes)} {word}"


def _scope(attributes: Any) -> str:
    if "syncscope" not in attributes:
        return ""
    return f' syncscope("{escape(attributes["syncscope"].value)}")'


def _alignment(attributes: Any) -> str:
    return f", align {attributes['alignment'].value}" if "alignment" in attributes else ""


def _access(emitter: Emitter, attributes: Any) -> tuple[str, str]:
    """Words before and after the operands of a load or store."""
    ordering = _ordering(attributes)
    before = ("atomic " if ordering else "") + ("volatile " if "volatile_" in attributes else "")
    after = ordering + _alignment(attributes)
    if "nontemporal" in attributes:
        after += f", !nontemporal {emitter.metadata.add('!{i32 1}')}"
    if "invariant" in attributes:
        after += f", !invariant.load {emitter.metadata.add('!{}')}"
    return before, after


def _load(emitter: Emitter, operation: Any) -> None:
    before, after = _access(emitter, operation.attributes)
    pointer_type, pointer = emitter.values[operation.operation.operands[0]]
    type_ = emitter.result_type(operation)
    emitter.define(operation, type_, f"load {before}{type_}, {pointer_type} {pointer}{after}")


def _store(emitter: Emitter, operation: Any) -> None:
    before, after = _access(emitter, operation.attributes)
    (type_, value), (pointer_type, pointer) = emitter.operands(operation)
    emitter.statement(f"store {before}{type_} {value}, {pointer_type} {pointer}{after}")


def _allocate(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    ((count_type, count),) = emitter.operands(operation)
    element = emitter.types[attributes["elem_type"].value]
    text = f"alloca {element}, {count_type} {count}{_alignment(attributes)}"
    result = emitter.result_type(operation)
    if result != "ptr":
        text += ", " + result.removeprefix("ptr ")
    emitter.define(operation, result, text)


def _atomic(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    (pointer_type, pointer), (type_, value) = emitter.operands(operation)
    volatile = "volatile " if "volatile_" in attributes else ""
    name = _ATOMICS[attributes["bin_op"].value]
    order = _ordering(attributes) + _alignment(attributes)
    text = f"atomicrmw {volatile}{name} {pointer_type} {pointer}, {type_} {value}{order}"
    emitter.define(operation, type_, text)


def _compare_exchange(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    (pointer_type, pointer), (type_, expected), (_, value) = emitter.operands(operation)
    weak = "weak " if "weak" in attributes else ""
    volatile = "volatile " if "volatile_" in attributes else ""
    success = _ordering(attributes, "success_ordering")
    failure = _ORDERINGS[attributes["failure_ordering"].value]
    text = (
        f"cmpxchg {weak}{volatile}{pointer_type} {pointer}, {type_} {expected}, {type_} {value}"
        f"{success} {failure}{_alignment(attributes)}"
    )
    emitter.define(operation, f"{{{type_}, i1}}", text)


def _fence(emitter: Emitter, operation: Any) -> None:
    emitter.statement(f"fence{_ordering(operation.attributes)}")


MEMORY: dict[str, Handler] = {
    "llvm.getelementptr": _element_pointer,
    "llvm.load": _load,
    "llvm.store": _store,
    "llvm.alloca": _allocate,
    "llvm.atomicrmw": _atomic,
    "llvm.cmpxchg": _compare_exchange,
    "llvm.fence": _fence,
}
