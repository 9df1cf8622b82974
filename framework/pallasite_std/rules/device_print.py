"""Printing from the device: the ``vprintf`` function that the driver provides.

Its arguments are a C format string and a buffer that holds the values, each aligned to its size,
after C's promotions: integers of 4 or 8 bytes, floating-point numbers as doubles, strings as
pointers. Its output appears when the host next waits for the device.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import KernelContext, StateKey

_FLOAT_DIGITS = {2: 5, 4: 9, 8: 17}
"""Decimal digits that tell all values apart, by the size of a floating-point number in bytes."""


def _no_strings(kernel: KernelContext) -> dict[str, str]:
    return {}


def _no_functions(kernel: KernelContext) -> set[str]:
    return set()


_STRINGS = StateKey("standard.strings", _no_strings)
"""Names of the string constants of the kernel's module, by their text."""
_EXTERNAL_FUNCTIONS = StateKey("standard.external-functions", _no_functions)
"""Names of the functions of the driver that the kernel's module declares."""


def string_pointer(kernel: KernelContext, text: str) -> ir.Value:
    """The generic address of a constant string, ended by a zero byte; equal ones are shared."""
    names = kernel.state(_STRINGS)
    name = names.get(text)
    if name is None:
        name = names[text] = f"pallasite_string_{len(names)}"
        data = text.encode() + b"\0"
        with ir.InsertionPoint.at_block_begin(kernel.launch.module.body):
            llvm.GlobalOp(
                types.parse_type(f"!llvm.array<{len(data)} x i8>"),
                name,
                ir.Attribute.parse("#llvm.linkage<internal>"),
                constant=True,
                value=ir.StringAttr.get(data),
                addr_space=1,
                alignment=1,
            )
    symbol = ir.FlatSymbolRefAttr.get(name)
    return ops.generic_pointer(llvm.mlir_addressof(types.pointer_type(1), symbol))


def call_external(
    kernel: KernelContext, name: str, signature: str, *operands: ir.Value
) -> ir.Value | None:
    """Calls a function that the driver provides; ``signature`` is its MLIR function type."""
    declared = kernel.state(_EXTERNAL_FUNCTIONS)
    if name not in declared:
        declared.add(name)
        with ir.InsertionPoint.at_block_begin(kernel.launch.module.body):
            llvm.LLVMFuncOp(name, ir.TypeAttr.get(types.parse_type(f"!llvm.func<{signature}>")))
    result = signature.partition(" ")[0]
    kind = None if result == "void" else types.parse_type(result)
    operation = llvm.CallOp(kind, list(operands), [], [], callee=name)
    return None if kind is None else operation.result


def promoted(kernel: KernelContext, value: ir.Value, dtype: np.dtype[Any]) -> tuple[str, ir.Value]:
    """The format directive of a scalar, and the value as C passes it to a variadic function."""
    if types.is_bool(dtype):
        words = string_pointer(kernel, "True"), string_pointer(kernel, "False")
        return "%s", ops.arith.select(value, *words)
    if types.is_float(dtype):
        digits = _FLOAT_DIGITS.get(dtype.itemsize, 4)
        if dtype.itemsize < 4:
            from pallasite_std.math.conversion import convert

            value = convert(value, dtype, np.dtype(np.float32))
        if dtype.itemsize < 8:
            value = ops.arith.extf(types.parse_type("f64"), value)
        return f"%.{digits}g", value
    signed = types.is_signed(dtype)
    if types.bit_width(dtype) == 64:
        return "%lld" if signed else "%llu", value
    return "%d" if signed else "%u", ops.cast_integer(value, ops.i32(), signed=signed)


def _size(value: ir.Value) -> int:
    return 4 if value.type == ops.i32() else 8


def printf(kernel: KernelContext, text: str, values: Sequence[ir.Value]) -> None:
    """Prints in every lane that gets here. ``values`` are promoted already."""
    offsets = []
    end = 0
    for value in values:
        start = -(-end // _size(value)) * _size(value)
        offsets.append(start)
        end = start + _size(value)
    size = max(8, -(-end // 8) * 8)

    def allocate() -> ir.Value:
        return llvm.alloca(types.pointer_type(0), ops.i32_constant(size), ops.i8(), alignment=8)

    # One buffer for each size serves all prints: vprintf has read it when it returns.
    buffer = kernel.launch.emit_once(f"printf_buffer.{size}", allocate)
    for offset, value in zip(offsets, values, strict=True):
        ops.store(value, ops.byte_pointer(buffer, offset), alignment=_size(value))
    call_external(kernel, "vprintf", "i32 (ptr, ptr)", string_pointer(kernel, text), buffer)


def literal_pieces(fmt: str, arguments: int) -> list[str]:
    """The literal text around the placeholders of a Python format string.

    Raises:
      InvalidValueError: not exactly ``arguments`` placeholders, or one that says more than ``{}``.
    """
    pieces = [""]
    try:
        for literal, field, spec, conversion in string.Formatter().parse(fmt):
            pieces[-1] += literal
            if field is None:
                continue
            if field or spec or conversion:
                raise InvalidValueError(
                    "a placeholder of a device-side format string says more than {}",
                    got=repr(fmt),
                    expected="plain {} placeholders, filled in order",
                )
            pieces.append("")
    except InvalidValueError:
        raise
    except ValueError as error:
        raise InvalidValueError(f"a wrong format string: {error}", got=repr(fmt)) from error
    if len(pieces) - 1 != arguments:
        raise InvalidValueError(
            f"the format string has {len(pieces) - 1} placeholders for {arguments} values",
            got=repr(fmt),
            expected="one {} for each value; {{ and }} for braces",
        )
    return pieces


def escaped(text: str) -> str:
    """Literal text inside a C format string."""
    return text.replace("%", "%%")
