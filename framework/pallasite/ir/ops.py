"""Short spellings of the MLIR operations that rules emit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as arith
from jaxlib.mlir.dialects import llvm, scf, vector

from pallasite.ir.types import parse_type, pointer_type, remembered
from pallasite.ir.types import vector_type as vector_type

_DYNAMIC = -(2**31)


def i1() -> ir.Type:
    """The 1-bit integer type."""
    return parse_type("i1")


def i8() -> ir.Type:
    """The 8-bit integer type."""
    return parse_type("i8")


def i32() -> ir.Type:
    """The 32-bit integer type."""
    return parse_type("i32")


def i64() -> ir.Type:
    """The 64-bit integer type."""
    return parse_type("i64")


def constant(value: Any, type: ir.Type) -> ir.Value:
    """A constant of a scalar or vector type (a vector gets it in every element)."""
    element = type.element_type if isinstance(type, ir.VectorType) else type
    if isinstance(element, ir.IntegerType):
        width = element.width
        integer = int(value) & ((1 << width) - 1)
        if integer >= 1 << (width - 1) and width > 1:
            integer -= 1 << width
        attribute: ir.Attribute = ir.IntegerAttr.get(element, integer)
    else:
        attribute = ir.FloatAttr.get(element, float(value))
    if isinstance(type, ir.VectorType):
        attribute = ir.DenseElementsAttr.get_splat(type, attribute)
    return _made("arith.constant", type, (), {"value": attribute})


def _made(
    name: str,
    type: ir.Type,
    operands: Sequence[ir.Value],
    attributes: dict[str, ir.Attribute] | None = None,
) -> ir.Value:
    """The only result of a new operation: three times as fast as the generated builders."""
    return ir.Operation.create(name, [type], operands, attributes).result


def i32_constant(value: int) -> ir.Value:
    """A constant i32."""
    return constant(value, i32())


def i64_constant(value: int) -> ir.Value:
    """A constant i64."""
    return constant(value, i64())


def i1_constant(value: bool) -> ir.Value:
    """A constant i1."""
    return constant(1 if value else 0, i1())


def add(x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Integer sum; adding the number 0 emits nothing."""
    if isinstance(y, int):
        if y == 0:
            return x
        y = constant(y, x.type)
    return _made("arith.addi", x.type, (x, y))


def multiply(x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Integer product; multiplying by the number 1 emits nothing."""
    if isinstance(y, int):
        if y == 1:
            return x
        if y > 0 and y & (y - 1) == 0:
            return _made("arith.shli", x.type, (x, constant(y.bit_length() - 1, x.type)))
        y = constant(y, x.type)
    return _made("arith.muli", x.type, (x, y))


def divide_unsigned(x: ir.Value, divisor: int) -> ir.Value:
    """Unsigned quotient by a positive number; a power of two becomes a shift."""
    if divisor == 1:
        return x
    if divisor & (divisor - 1) == 0:
        return _made("arith.shrui", x.type, (x, constant(divisor.bit_length() - 1, x.type)))
    return _made("arith.divui", x.type, (x, constant(divisor, x.type)))


def divide_exactly(x: ir.Value, divisor: int) -> ir.Value:
    """Signed quotient of a multiple of a positive number; a power of two becomes a shift."""
    if divisor == 1:
        return x
    if divisor & (divisor - 1) == 0:
        return _made("arith.shrsi", x.type, (x, constant(divisor.bit_length() - 1, x.type)))
    return _made("arith.divsi", x.type, (x, constant(divisor, x.type)))


def remainder_unsigned(x: ir.Value, divisor: int) -> ir.Value:
    """Unsigned remainder by a positive number; a power of two becomes a mask."""
    if divisor & (divisor - 1) == 0:
        return _made("arith.andi", x.type, (x, constant(divisor - 1, x.type)))
    return _made("arith.remui", x.type, (x, constant(divisor, x.type)))


def bitwise_and(x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Bitwise and with a value or a number."""
    return _made("arith.andi", x.type, (x, constant(y, x.type) if isinstance(y, int) else y))


def bitwise_xor(x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Bitwise exclusive or with a value or a number; 0 emits nothing."""
    if isinstance(y, int):
        if y == 0:
            return x
        y = constant(y, x.type)
    return _made("arith.xori", x.type, (x, y))


_PREDICATES = {
    "eq": arith.CmpIPredicate.eq,
    "ne": arith.CmpIPredicate.ne,
    "slt": arith.CmpIPredicate.slt,
    "sle": arith.CmpIPredicate.sle,
    "sgt": arith.CmpIPredicate.sgt,
    "sge": arith.CmpIPredicate.sge,
    "ult": arith.CmpIPredicate.ult,
    "ule": arith.CmpIPredicate.ule,
    "ugt": arith.CmpIPredicate.ugt,
    "uge": arith.CmpIPredicate.uge,
}


def compare(predicate: str, x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Integer comparison, by MLIR's name of the predicate (``"eq"``, ``"slt"``, ``"ult"``...)."""
    return arith.cmpi(_PREDICATES[predicate], x, constant(y, x.type) if isinstance(y, int) else y)


def cast_integer(x: ir.Value, type: ir.Type, *, signed: bool = True) -> ir.Value:
    """Widens or narrows an integer; the same type emits nothing."""
    if x.type == type:
        return x
    source, target = ir.IntegerType(x.type).width, ir.IntegerType(type).width
    if target < source:
        return arith.trunci(type, x)
    return arith.extsi(type, x) if signed else arith.extui(type, x)


# Memory ---------------------------------------------------------------------------------------


def element_pointer(pointer: ir.Value, offset: ir.Value | int, element: ir.Type) -> ir.Value:
    """``pointer`` advanced by ``offset`` elements of type ``element``."""
    if isinstance(offset, int):
        if offset == 0:
            return pointer
        if -(2**31) < offset < 2**31:
            attributes = remembered(("element", offset, element), _element)
            return _made("llvm.getelementptr", pointer.type, (pointer,), attributes)
        offset = i64_constant(offset)
    attributes = remembered(("element", _DYNAMIC, element), _element)
    return _made("llvm.getelementptr", pointer.type, (pointer, offset), attributes)


def _element(key: tuple[str, int, ir.Type]) -> dict[str, ir.Attribute]:
    _, offset, element = key
    return {
        "rawConstantIndices": ir.DenseI32ArrayAttr.get([offset]),
        "elem_type": ir.TypeAttr.get(element),
    }


def byte_pointer(pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """``pointer`` advanced by ``offset`` bytes."""
    return element_pointer(pointer, offset, i8())


def load(
    type: ir.Type, pointer: ir.Value, *, alignment: int | None = None, constant: bool = False
) -> ir.Value:
    """Loads one value of a scalar or vector type; ``alignment`` in bytes.

    Memory that is ``constant`` is not written while the kernel runs.
    """
    return llvm.load(type, pointer, alignment=alignment, invariant=constant or None)


def store(value: ir.Value, pointer: ir.Value, *, alignment: int | None = None) -> None:
    """Stores one scalar or vector; ``alignment`` in bytes."""
    llvm.store(value, pointer, alignment=alignment)


def shared_address(pointer: ir.Value) -> ir.Value:
    """The 32-bit shared-memory address of a pointer in address space 3."""
    return llvm.ptrtoint(i32(), pointer)


def generic_pointer(pointer: ir.Value) -> ir.Value:
    """The generic address of a pointer in any address space."""
    if pointer.type == pointer_type(0):
        return pointer
    return llvm.addrspacecast(pointer_type(0), pointer)


# Vectors --------------------------------------------------------------------------------------


def vector_length(value: ir.Value) -> int:
    """Number of elements of a 1-D vector; 1 for a scalar."""
    return int(value.type.shape[0]) if isinstance(value.type, ir.VectorType) else 1


def extract(value: ir.Value, position: int) -> ir.Value:
    """Element ``position`` of a vector; a scalar is its own element 0."""
    if not isinstance(value.type, ir.VectorType):
        return value
    attributes = remembered(("extract", position), _position)
    return _made("vector.extract", value.type.element_type, (value,), attributes)


def _position(key: tuple[str, int]) -> dict[str, ir.Attribute]:
    return {"static_position": ir.DenseI64ArrayAttr.get([key[1]])}


def from_elements(elements: Sequence[ir.Value]) -> ir.Value:
    """A vector of the elements given; a single one stays a scalar."""
    if len(elements) == 1:
        return elements[0]
    type = ir.VectorType.get((len(elements),), elements[0].type)
    return _made("vector.from_elements", type, elements)


def broadcast(value: ir.Value, length: int) -> ir.Value:
    """A vector of ``length`` copies; length 1 emits nothing."""
    if length == 1:
        return value
    return vector.broadcast(ir.VectorType.get((length,), value.type), value)


def slice_vector(value: ir.Value, start: int, length: int) -> ir.Value:
    """Elements ``start`` to ``start + length - 1`` of a vector; a scalar if ``length`` is 1."""
    if vector_length(value) == length:
        return value
    if length == 1:
        return extract(value, start)
    return vector.shuffle(value, value, list(range(start, start + length)))


def concatenate(parts: Sequence[ir.Value]) -> ir.Value:
    """The elements of all parts (scalars or vectors) as one vector."""
    if len(parts) == 1:
        return parts[0]
    lengths = {vector_length(part) for part in parts}
    if len(lengths) == 1 and lengths != {1} and len(parts) & (len(parts) - 1) == 0:
        parts = list(parts)
        while len(parts) > 1:
            total = 2 * vector_length(parts[0])
            parts = [
                vector.shuffle(low, high, list(range(total)))
                for low, high in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]
    return from_elements([extract(p, i) for p in parts for i in range(vector_length(p))])


def bitcast(value: ir.Value, type: ir.Type) -> ir.Value:
    """Reinterprets the bits of a scalar or vector as another type of the same total width."""
    return value if value.type == type else _made("llvm.bitcast", type, (value,))


# Hardware -------------------------------------------------------------------------------------


def intrinsic(result: ir.Type | None, name: str, *operands: ir.Value) -> Any:
    """Calls an LLVM intrinsic by its full name; returns its result, if it has one."""
    attributes = remembered(("intrinsic", name, len(operands)), _call)
    results = [] if result is None else [result]
    made = ir.Operation.create("llvm.call_intrinsic", results, operands, attributes)
    return made.opview if result is None else made.result


def _call(key: tuple[str, str, int]) -> dict[str, ir.Attribute]:
    _, name, operands = key
    return {
        "intrin": ir.StringAttr.get(name),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([operands, 0]),
        "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
    }


def inline_assembly(
    text: str,
    constraints: str,
    *operands: ir.Value,
    results: Sequence[ir.Type] = (),
    side_effects: bool = True,
) -> Any:
    """Inline PTX: ``$0``... name results, then operands.

    Returns None, the result, or a tuple of them. ``side_effects`` also keeps it from being moved
    or removed; memory is clobbered only if the constraints say ``~{memory}``.
    """
    types = list(results)
    if len(types) > 1:
        types = [llvm.StructType.get_literal(types)]
    attributes = remembered(("assembly", text, constraints, side_effects), _assembly)
    made = ir.Operation.create("llvm.inline_asm", types, operands, attributes)
    if len(types) == len(results):
        return made.result if results else None
    return tuple(
        _made("llvm.extractvalue", result, (made.result,), remembered(("member", at), _member))
        for at, result in enumerate(results)
    )


def _assembly(key: tuple[str, str, str, bool]) -> dict[str, ir.Attribute]:
    found = {"asm_string": ir.StringAttr.get(key[1]), "constraints": ir.StringAttr.get(key[2])}
    return found | ({"has_side_effects": ir.UnitAttr.get()} if key[3] else {})


def _member(key: tuple[str, int]) -> dict[str, ir.Attribute]:
    return {"position": ir.DenseI64ArrayAttr.get([key[1]])}


# Control flow ---------------------------------------------------------------------------------


@contextlib.contextmanager
def when(predicate: ir.Value) -> Iterator[None]:
    """Emits the following code under a predicate (no results)."""
    operation = scf.IfOp(predicate)
    with ir.InsertionPoint(operation.then_block):
        yield
        scf.yield_([])


def for_loop(
    lower: ir.Value,
    upper: ir.Value,
    carries: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
    *,
    rolled: bool = False,
) -> list[ir.Value]:
    """``for index in [lower, upper)`` with carried values; returns their final values.

    If it is to stay ``rolled``, neither LLVM nor ptxas unrolls it.
    """
    operation = scf.ForOp(lower, upper, constant(1, lower.type), list(carries))
    if rolled:
        operation.attributes["unroll"] = ir.IntegerAttr.get(i32(), 1)
    with ir.InsertionPoint(operation.body):
        results = body(operation.induction_variable, list(operation.inner_iter_args))
        scf.yield_(list(results))
    return list(operation.results)
