"""Translation of the ``vector`` dialect: one-dimensional vectors and static positions."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import CompilationError
from pallasite.plugin.codegen import (
    Emitter,
    Handler,
    cast,
    element_type,
    shuffle_mask,
    splat_text,
    vector_length,
)


def _is_constant(name: str) -> bool:
    return name[0] != "%"


def _shuffled(
    emitter: Emitter, operation: Any, type_: str, left: str, right: str, mask: list[int]
) -> None:
    result = f"<{len(mask)} x {element_type(type_)}>"
    text = f"shufflevector {type_} {left}, {type_} {right}, {shuffle_mask(mask)}"
    emitter.define(operation, result, text)


def _broadcast(emitter: Emitter, operation: Any) -> None:
    ((type_, name),) = emitter.operands(operation)
    result = emitter.result_type(operation)
    length = vector_length(result) or 1
    if type_ == result:
        emitter.bind(operation, type_, name)
    elif type_[0] == "<":
        _shuffled(emitter, operation, type_, name, "poison", [0] * length)
    elif _is_constant(name):
        emitter.bind(operation, result, splat_text(name, result))
    else:
        first = emitter.instruction(f"insertelement {result} poison, {type_} {name}, i64 0")
        if length == 1:
            emitter.bind(operation, result, first)
        else:
            _shuffled(emitter, operation, result, first, "poison", [0] * length)


def _position(operation: Any, operands: list[str]) -> str | None:
    """The index of an extract or insert, or None if it concerns the whole vector."""
    positions = list(operation.attributes["static_position"])
    if not positions:
        return None
    if len(positions) > 1:
        raise CompilationError("a vector with more than one dimension")
    return operands[0] if operands else f"i64 {positions[0]}"


def _extract(emitter: Emitter, operation: Any) -> None:
    (type_, name), *indices = emitter.operands(operation)
    position = _position(operation, [" ".join(index) for index in indices])
    result = emitter.result_type(operation)
    if position is None and result == type_:
        emitter.bind(operation, type_, name)
    else:
        text = f"extractelement {type_} {name}, {position or 'i64 0'}"
        emitter.define(operation, element_type(type_), text)


def _insert(emitter: Emitter, operation: Any) -> None:
    (element, value), (type_, name), *indices = emitter.operands(operation)
    position = _position(operation, [" ".join(index) for index in indices])
    if element == type_:
        emitter.bind(operation, type_, value)
    else:
        text = f"insertelement {type_} {name}, {element} {value}, {position or 'i64 0'}"
        emitter.define(operation, type_, text)


def _from_elements(emitter: Emitter, operation: Any) -> None:
    operands = emitter.operands(operation)
    type_ = emitter.result_type(operation)
    names = [name for _, name in operands]
    if all(map(_is_constant, names)):
        body = ", ".join(f"{kind} {name}" for kind, name in operands)
        emitter.bind(operation, type_, f"<{body}>")
        return
    value = "poison"
    last = len(operands) - 1
    for index, (kind, name) in enumerate(operands):
        text = f"insertelement {type_} {value}, {kind} {name}, i64 {index}"
        if index == last:
            emitter.define(operation, type_, text)
        else:
            value = emitter.instruction(text)


def _to_elements(emitter: Emitter, operation: Any) -> None:
    ((type_, name),) = emitter.operands(operation)
    element = element_type(type_)
    for index, result in enumerate(operation.operation.results):
        part = emitter.instruction(f"extractelement {type_} {name}, i64 {index}")
        emitter.values[result] = (element, part)


def _resized(emitter: Emitter, type_: str, name: str, length: int) -> str:
    """A vector with ``length`` elements: the given ones, then poison."""
    have = vector_length(type_) or 1
    if have == length:
        return name
    mask = shuffle_mask([index if index < have else -1 for index in range(length)])
    return emitter.instruction(f"shufflevector {type_} {name}, {type_} poison, {mask}")


def _shuffle(emitter: Emitter, operation: Any) -> None:
    (left_type, left), (right_type, right) = emitter.operands(operation)
    first, second = vector_length(left_type) or 1, vector_length(right_type) or 1
    length = max(first, second)
    left = _resized(emitter, left_type, left, length)
    right = _resized(emitter, right_type, right, length)
    mask = [
        index if index < first else index - first + length for index in operation.attributes["mask"]
    ]
    _shuffled(emitter, operation, f"<{length} x {element_type(left_type)}>", left, right, mask)


def _slice(emitter: Emitter, operation: Any) -> None:
    ((type_, name),) = emitter.operands(operation)
    attributes = operation.attributes
    offset, size, stride = (attributes[key][0].value for key in ("offsets", "sizes", "strides"))
    mask = [offset + stride * index for index in range(size)]
    _shuffled(emitter, operation, type_, name, "poison", mask)


def _insert_slice(emitter: Emitter, operation: Any) -> None:
    (part_type, part), (type_, name) = emitter.operands(operation)
    attributes = operation.attributes
    offset, stride = (attributes[key][0].value for key in ("offsets", "strides"))
    length, size = vector_length(type_) or 1, vector_length(part_type) or 1
    wide = _resized(emitter, part_type, part, length)
    mask = list(range(length))
    for index in range(size):
        mask[offset + stride * index] = length + index
    _shuffled(emitter, operation, type_, name, wide, mask)


def _interleave(emitter: Emitter, operation: Any) -> None:
    """The elements of two vectors in turn."""
    (left_type, left), (_, right) = emitter.operands(operation)
    length = vector_length(left_type) or 1
    mask = [index // 2 + index % 2 * length for index in range(2 * length)]
    _shuffled(emitter, operation, left_type, left, right, mask)


VECTOR: dict[str, Handler] = {
    "vector.broadcast": _broadcast,
    "vector.extract": _extract,
    "vector.insert": _insert,
    "vector.from_elements": _from_elements,
    "vector.to_elements": _to_elements,
    "vector.shuffle": _shuffle,
    "vector.interleave": _interleave,
    "vector.bitcast": cast("bitcast"),
    "vector.shape_cast": cast("bitcast"),
    "vector.extract_strided_slice": _slice,
    "vector.insert_strided_slice": _insert_slice,
}
