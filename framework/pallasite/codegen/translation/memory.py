"""Translation of the ``llvm`` dialect: addresses, loads, stores and fences."""

from __future__ import annotations

from typing import Any

from pallasite.codegen.translation.constants import escape
from pallasite.codegen.translation.emitter import Emitter, Handler

_DYNAMIC = -(2**31)
ORDERINGS = {
    0: "",
    1: "unordered",
    2: "monotonic",
    4: "acquire",
    5: "release",
    6: "acq_rel",
    7: "seq_cst",
}
"""Memory orders of the dialect ``llvm`` by number, as LLVM IR spells them."""


def _element_pointer(emitter: Emitter, operation: Any) -> None:
    """An address; a unit attribute ``inbounds`` stands for the flag, which the bindings hide."""
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


def ordering(attributes: Any, name: str = "ordering") -> str:
    """``" syncscope(...) ordering"``, or nothing for an access that is not atomic."""
    word = ORDERINGS[attributes[name].value] if name in attributes else ""
    if not word:
        return ""
    return f"{_scope(attributes)} {word}"


def _scope(attributes: Any) -> str:
    if "syncscope" not in attributes:
        return ""
    return f' syncscope("{escape(attributes["syncscope"].value)}")'


def alignment(attributes: Any) -> str:
    """``", align n"``, or nothing."""
    return f", align {attributes['alignment'].value}" if "alignment" in attributes else ""


def _access(emitter: Emitter, attributes: Any) -> tuple[str, str]:
    """Words before and after the operands of a load or store."""
    order = ordering(attributes)
    before = ("atomic " if order else "") + ("volatile " if "volatile_" in attributes else "")
    after = order + alignment(attributes)
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
    text = f"alloca {element}, {count_type} {count}{alignment(attributes)}"
    result = emitter.result_type(operation)
    if result != "ptr":
        text += ", " + result.removeprefix("ptr ")
    if count.isdigit():
        emitter.bind(operation, result, emitter.allocate(text))
    else:
        emitter.define(operation, result, text)


def _fence(emitter: Emitter, operation: Any) -> None:
    emitter.statement(f"fence{ordering(operation.attributes)}")


MEMORY: dict[str, Handler] = {
    "llvm.getelementptr": _element_pointer,
    "llvm.load": _load,
    "llvm.store": _store,
    "llvm.alloca": _allocate,
    "llvm.fence": _fence,
}
