"""Translation of ``memref``, and of loads and stores of ``vector``.

A memref is a pointer to the first of its elements, in the address space of its type; its strides
are those of its type, and static. What a type says about an offset is already in the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import CompilationError, UnsupportedError
from pallasite.plugin.codegen import Emitter, Handler, Operand, vector_length, with_element
from pallasite_std.memory.divisibility import MEMREF_ALIGNMENT, known_divisor

_DYNAMIC = -(2**63)


def _is_memref(type_: Any) -> bool:
    return type(type_).__name__ == "MemRefType"


def _strides(type_: Any) -> tuple[list[int], int | None]:
    """Strides and offset in elements; an offset that is not static is None."""
    strides, offset = type_.get_strides_and_offset()
    if any(stride == _DYNAMIC for stride in strides):
        raise UnsupportedError(
            "a memref with strides that are computed in the kernel",
            got=str(type_),
            expected="static strides",
        )
    return list(strides), None if offset == _DYNAMIC else int(offset)


def _element(emitter: Emitter, type_: Any) -> tuple[str, int]:
    """LLVM type of an element in memory, and its bits; a boolean takes a byte."""
    element = emitter.types[type_.element_type]
    if element == "i1":
        return "i8", 8
    bits = {"half": 16, "bfloat": 16, "float": 32, "double": 64}.get(element)
    return element, int(element[1:]) if bits is None else bits


def _known(name: str) -> int | None:
    return int(name) if name.lstrip("-").isdigit() else None


def _linear(emitter: Emitter, indices: Sequence[Operand], strides: Sequence[int]) -> str:
    """The sum of products of indices (i64) and strides: a number, or the name of a value."""
    constant = 0
    total = ""
    for (_, name), stride in zip(indices, strides, strict=True):
        known = _known(name)
        if known is not None:
            constant += known * stride
            continue
        term = name if stride == 1 else emitter.instruction(f"mul i64 {name}, {stride}")
        total = term if not total else emitter.instruction(f"add i64 {total}, {term}")
    if not total:
        return str(constant)
    return emitter.instruction(f"add i64 {total}, {constant}") if constant else total


def _moved(emitter: Emitter, pointer: Operand, element: tuple[str, int], offset: str) -> str:
    """A pointer so many elements behind another one."""
    if offset == "0":
        return pointer[1]
    kind, bits = element
    if bits < 8:
        packed = 8 // bits
        known = _known(offset)
        if known is not None and known % packed:
            raise UnsupportedError(
                f"elements of {bits} bits at offset {known}, inside a byte",
                expected=f"offsets that are multiples of {packed}",
            )
        kind = "i8"
        shift = packed.bit_length() - 1
        offset = (
            emitter.instruction(f"ashr exact i64 {offset}, {shift}")
            if known is None
            else str(known // packed)
        )
    return emitter.instruction(f"getelementptr {kind}, {' '.join(pointer)}, i64 {offset}")


def _divisor(values: Sequence[Any], strides: Sequence[int], numbers: Sequence[int]) -> int:
    """What an offset is a multiple of, in elements; 0 if it is 0.

    Args:
      values: the dynamic indices, as MLIR values, with ``strides``.
      strides: of ``values``.
      numbers: static parts of the offset.
    """
    parts = [known_divisor(value) * stride for value, stride in zip(values, strides, strict=True)]
    return math.gcd(*parts, *numbers)


def _aligned(alignment: int, divisor: int, bits: int) -> int:
    """The alignment in bytes behind an offset that is a multiple of ``divisor`` elements."""
    return math.gcd(alignment, divisor * bits // 8) if divisor else alignment


def _alignment(emitter: Emitter, value: Any, bits: int) -> int:
    return emitter.alignments.get(value, max(1, bits // 8))


# Accesses -------------------------------------------------------------------------------------


def _place(emitter: Emitter, memory: Any, indices: Sequence[Any], count: int) -> tuple[str, str]:
    """The pointer to an element, typed, and the words that say how ``count`` of them lie."""
    kind, bits = _element(emitter, memory.type)
    if bits < 8:
        raise UnsupportedError(
            f"single elements of {bits} bits in memory",
            got=str(memory.type),
            expected="elements of whole bytes",
        )
    strides, _ = _strides(memory.type)
    if count > 1 and strides[-1] != 1:
        raise CompilationError(
            "a vector that is not contiguous in memory",
            got=str(memory.type),
            expected="a stride of 1 in the last dimension",
        )
    pointer = emitter.values[memory]
    offset = _linear(emitter, [emitter.values[index] for index in indices], strides)
    name = _moved(emitter, pointer, (kind, bits), offset)
    divisor = _divisor(indices, strides, ())
    alignment = _aligned(_alignment(emitter, memory, bits), divisor, bits)
    return f"{pointer[0]} {name}", f", align {max(alignment & -alignment, bits // 8)}"


def _load(emitter: Emitter, operation: Any) -> None:
    memory, *indices = operation.operation.operands
    type_ = emitter.result_type(operation)
    pointer, after = _place(emitter, memory, indices, vector_length(type_) or 1)
    stored = _in_memory(type_)
    if stored == type_:
        emitter.define(operation, type_, f"load {type_}, {pointer}{after}")
    else:
        value = emitter.instruction(f"load {stored}, {pointer}{after}")
        emitter.define(operation, type_, f"trunc {stored} {value} to {type_}")


def _store(emitter: Emitter, operation: Any) -> None:
    stored_value, memory, *indices = operation.operation.operands
    type_, value = emitter.values[stored_value]
    pointer, after = _place(emitter, memory, indices, vector_length(type_) or 1)
    stored = _in_memory(type_)
    if stored != type_:
        value = emitter.instruction(f"zext {type_} {value} to {stored}")
    emitter.statement(f"store {stored} {value}, {pointer}{after}")


def _in_memory(type_: str) -> str:
    """The type in memory: a boolean takes a byte."""
    return with_element(type_, "i8") if with_element(type_, "i1") == type_ else type_


# Views ----------------------------------------------------------------------------------------


def _same_place(emitter: Emitter, operation: Any) -> None:
    """Another view of memory that begins with the same element."""
    source = operation.operation.operands[0]
    result = operation.operation.result
    type_, name = emitter.values[source]
    if emitter.types[result.type] != type_:
        raise CompilationError(
            "a view in another address space", got=str(result.type), expected=str(source.type)
        )
    _strides(result.type)
    emitter.values[result] = (type_, name)
    if source in emitter.alignments:
        emitter.alignments[result] = emitter.alignments[source]


def _subview(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    source, *operands = operation.operation.operands
    result = operation.operation.result
    _strides(result.type)
    strides, _ = _strides(source.type)
    offsets = list(attributes["static_offsets"])
    dynamic = [position for position, offset in enumerate(offsets) if offset == _DYNAMIC]
    values = operands[: len(dynamic)]
    indices: list[Operand] = [("i64", str(offset)) for offset in offsets]
    for position, value in zip(dynamic, values, strict=True):
        indices[position] = emitter.values[value]
    element = _element(emitter, source.type)
    pointer = emitter.values[source]
    name = _moved(emitter, pointer, element, _linear(emitter, indices, strides))
    emitter.values[result] = (pointer[0], name)
    divisor = _divisor(
        values,
        [strides[position] for position in dynamic],
        [
            offset * stride
            for offset, stride in zip(offsets, strides, strict=True)
            if offset != _DYNAMIC
        ],
    )
    before = _alignment(emitter, source, element[1])
    emitter.alignments[result] = _aligned(before, divisor, element[1])


# Casts ----------------------------------------------------------------------------------------


def _cast(emitter: Emitter, operation: Any) -> None:
    """Between a memref and its pointer, or the structure that describes it."""
    operands = list(operation.operation.operands)
    results = list(operation.operation.results)
    if len(operands) != 1 or len(results) != 1:
        raise _unknown_cast(operation)
    (source,), (result,) = operands, results
    type_, name = emitter.values[source]
    target = emitter.types[result.type]
    if type_ == target:
        emitter.values[result] = (type_, name)
    elif type_.startswith("ptr") and target.startswith("ptr"):
        text = f"addrspacecast {type_} {name} to {target}"
        emitter.values[result] = (target, emitter.instruction(text))
    elif _is_memref(source.type) and target.startswith("{ptr"):
        emitter.values[result] = (target, _description(emitter, source, target))
    elif _is_memref(result.type) and type_.startswith("{ptr"):
        space = emitter.types[result.type]
        base = emitter.instruction(f"extractvalue {type_} {name}, 1")
        offset = emitter.instruction(f"extractvalue {type_} {name}, 2")
        element = _element(emitter, result.type)
        emitter.values[result] = (space, _moved(emitter, (space, base), element, offset))
    else:
        raise _unknown_cast(operation)
    if _is_memref(result.type):
        if MEMREF_ALIGNMENT in operation.attributes:
            emitter.alignments[result] = operation.attributes[MEMREF_ALIGNMENT].value
        elif source in emitter.alignments:
            emitter.alignments[result] = emitter.alignments[source]


def _unknown_cast(operation: Any) -> CompilationError:
    types = [str(value.type) for value in operation.operation.operands]
    results = [str(value.type) for value in operation.operation.results]
    return CompilationError(
        f"a cast from {', '.join(types)} to {', '.join(results)}",
        expected="a cast between a memref and a pointer or its description, or index and i64",
    )


def _description(emitter: Emitter, source: Any, target: str) -> str:
    """The structure of a memref: two pointers, an offset, sizes and strides.

    The pointers come before the offset that the type says, if it says one.
    """
    if emitter.types[source.type.element_type] == "i1":
        raise UnsupportedError(
            "the address of booleans",
            got=str(source.type),
            expected="loads and stores of single booleans",
            hint="keep them as integers of 8 bits in memory",
        )
    strides, offset = _strides(source.type)
    pointer = emitter.values[source]
    base = _moved(emitter, pointer, _element(emitter, source.type), str(-(offset or 0)))
    whole = "poison"
    members = [(pointer[0], base, "0"), (pointer[0], base, "1"), ("i64", str(offset or 0), "2")]
    for number, values in enumerate((source.type.shape, strides), 3):
        members += [("i64", str(value), f"{number}, {i}") for i, value in enumerate(values)]
    for type_, name, position in members:
        whole = emitter.instruction(f"insertvalue {target} {whole}, {type_} {name}, {position}")
    return whole


def _address(emitter: Emitter, operation: Any) -> None:
    """The address that goes with :func:`_metadata`, as an integer."""
    source = operation.operation.operands[0]
    pointer = emitter.values[source]
    _, offset = _strides(source.type)
    base = _moved(emitter, pointer, _element(emitter, source.type), str(-(offset or 0)))
    emitter.define(operation, "i64", f"ptrtoint {pointer[0]} {base} to i64")


def _metadata(emitter: Emitter, operation: Any) -> None:
    """The memory as one element, then offset, sizes and strides."""
    source = operation.operation.operands[0]
    base, *numbers = operation.operation.results
    pointer = emitter.values[source]
    strides, offset = _strides(source.type)
    first = _moved(emitter, pointer, _element(emitter, source.type), str(-(offset or 0)))
    emitter.values[base] = (pointer[0], first)
    for result, number in zip(numbers, [offset or 0, *source.type.shape, *strides], strict=True):
        emitter.values[result] = ("i64", str(number))


MEMREF: dict[str, Handler] = {
    "memref.load": _load,
    "memref.store": _store,
    "vector.load": _load,
    "vector.store": _store,
    "memref.subview": _subview,
    "memref.collapse_shape": _same_place,
    "memref.expand_shape": _same_place,
    "memref.transpose": _same_place,
    "memref.cast": _same_place,
    "memref.extract_aligned_pointer_as_index": _address,
    "memref.extract_strided_metadata": _metadata,
    "builtin.unrealized_conversion_cast": _cast,
}
