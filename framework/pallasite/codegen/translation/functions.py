"""Translation of functions and global variables."""

from __future__ import annotations

from typing import Any

from pallasite.codegen.translation.constants import constant_text, escape
from pallasite.codegen.translation.control import run_blocks
from pallasite.codegen.translation.emitter import Emitter
from pallasite.codegen.translation.llvm_ops import symbol
from pallasite.codegen.translation.types import TypeTable, function_type

ATTRIBUTE_GROUPS = (
    "attributes #0 = { convergent nounwind }",
    "attributes #1 = { nounwind willreturn memory(none) }",
    "attributes #2 = { convergent nounwind willreturn }",
    "attributes #3 = { convergent nounwind willreturn memory(none) }",
)
"""Of inline assembly that may end the thread, of that without side effects, and of all other."""

_FLAG_PARAMETERS = {
    "llvm.noalias": "noalias",
    "llvm.readonly": "readonly",
    "llvm.readnone": "readnone",
    "llvm.writeonly": "writeonly",
    "llvm.nonnull": "nonnull",
    "llvm.noundef": "noundef",
    "llvm.nocapture": "captures(none)",
    "llvm.nofree": "nofree",
    "llvm.inreg": "inreg",
    "llvm.signext": "signext",
    "llvm.zeroext": "zeroext",
    "nvvm.grid_constant": '"nvvm.grid_constant"',
}
_FUNCTION_STRINGS = (
    "nvvm.reqntid",
    "nvvm.maxntid",
    "nvvm.minctasm",
    "nvvm.maxnreg",
    "nvvm.cluster_dim",
    "nvvm.cluster_max_blocks",
)
_RENAMED = {"nvvm.cluster_max_blocks": "nvvm.maxclusterrank"}


def parameter_attributes(attributes: Any, types: TypeTable) -> str:
    """Words before the name of a parameter, from its dictionary of MLIR attributes."""
    words: list[str] = []
    for name in sorted(one if isinstance(one, str) else one.name for one in attributes):
        value = attributes[name]
        if name == "llvm.byval":
            words.insert(0, f"byval({types[value.value]})")
        elif name == "llvm.align":
            words.append(f"align {value.value}")
        elif name == "llvm.dereferenceable":
            words.append(f"dereferenceable({value.value})")
        elif name in _FLAG_PARAMETERS:
            words.append(_FLAG_PARAMETERS[name])
    return "".join(f" {word}" for word in words)


def function_attributes(operation: Any) -> str:
    """Words after the parameter list, from the MLIR attributes of an ``llvm.func``."""
    attributes = operation.attributes
    words: list[str] = []
    if "passthrough" in attributes:
        for one in attributes["passthrough"]:
            if type(one).__name__ == "ArrayAttr":
                key, value = one
                words.append(f'"{escape(key.value)}"="{escape(value.value)}"')
            else:
                words.append(one.value)
    for name in _FUNCTION_STRINGS:
        if name in attributes:
            value = attributes[name]
            numbers = [value.value] if hasattr(value, "value") else [_number(v) for v in value]
            text = ",".join(str(number) for number in numbers)
            words.append(f'"{_RENAMED.get(name, name)}"="{text}"')
    return "".join(f" {word}" for word in words)


def _number(value: Any) -> int:
    return int(getattr(value, "value", value))


def _linkage(operation: Any) -> str:
    word = str(operation.attributes["linkage"]).partition("<")[2].rstrip(">")
    return word if word in ("internal", "private", "weak", "linkonce_odr", "weak_odr") else ""


def _parameters(operation: Any, kinds: list[str], types: TypeTable) -> list[str]:
    attributes = operation.attributes
    if "arg_attrs" not in attributes:
        return list(kinds)
    return [
        kind + parameter_attributes(entry, types)
        for kind, entry in zip(kinds, attributes["arg_attrs"], strict=True)
    ]


def declare(operation: Any, types: TypeTable) -> str:
    """The declaration of a function that has no body."""
    attributes = operation.attributes
    result, kinds, variadic = function_type(str(attributes["function_type"].value))
    parameters = _parameters(operation, kinds, types) + (["..."] if variadic else [])
    name = symbol(attributes["sym_name"].value)
    words = function_attributes(operation)
    return f"declare {result} {name}({', '.join(parameters)}){words}"


def define(operation: Any, emitter: Emitter, subprogram: str | None) -> None:
    """Emits a function with its body."""
    attributes = operation.attributes
    result, kinds, _ = function_type(str(attributes["function_type"].value))
    blocks = list(operation.regions[0].blocks)
    parameters = []
    for index, (kind, words, value) in enumerate(
        zip(
            kinds,
            _parameters(operation, kinds, emitter.types),
            blocks[0].arguments,
            strict=True,
        )
    ):
        emitter.values[value] = (kind, f"%a{index}")
        parameters.append(f"{words} %a{index}")
    words = function_attributes(operation)
    for extents, name in (("ntid", "nvvm.reqntid"), ("cluster.nctaid", "nvvm.cluster_dim")):
        if name in attributes:
            sizes = tuple(map(_number, attributes[name]))
            emitter.extents[extents] = (*sizes, 1, 1)[:3]
    kernel = emitter.device and "nvvm.kernel" in attributes
    head = ["define"]
    if linkage := _linkage(operation):
        head.append(linkage)
    if kernel:
        head.append("ptx_kernel")
    name = symbol(attributes["sym_name"].value)
    if emitter.device:
        words += " convergent"
    debug = f" !dbg {subprogram}" if subprogram else ""
    emitter.lines.append(
        f"{' '.join(head)} {result} {name}({', '.join(parameters)}){words}{debug} {{"
    )
    emitter.start("entry")
    first = len(emitter.lines)
    run_blocks(emitter, blocks, "entry")
    emitter.lines[first:first] = emitter.allocations
    emitter.lines.append("}")


def global_variable(operation: Any, types: TypeTable) -> str:
    """The definition or declaration of a global variable."""
    attributes = operation.attributes
    type_ = types[attributes["global_type"].value]
    space = attributes["addr_space"].value if "addr_space" in attributes else 0
    words = [f"{symbol(attributes['sym_name'].value)} ="]
    linkage = _linkage(operation)
    if "value" in attributes:
        initial = constant_text(attributes["value"], type_)
    elif "external" in str(attributes["linkage"]):
        linkage, initial = "external", ""
    else:
        initial = "undef"
    words += [linkage] if linkage else []
    words += [f"addrspace({space})"] if space else []
    words += ["constant" if "constant" in attributes else "global", type_]
    words += [initial] if initial else []
    text = " ".join(words)
    if "alignment" in attributes:
        text += f", align {attributes['alignment'].value}"
    return text
