"""Operations of inlined code that our lowering expands, because no later stage does.

Functions of the ``math`` dialect that the hardware has no accurate instruction for, and printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallasite.plugin import UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.math.table import BINARY, UNARY
from pallasite_std.rules import device_print

_FLOATS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
_SAME_NAMES = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "erf", "erfc", "rsqrt", "cbrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
_FUNCTIONS: dict[str, Callable[..., ir.Value]] = {
    **{f"math.{name}": UNARY[name] for name in _SAME_NAMES},
    "math.atan2": BINARY["atan2"],
    "math.powf": BINARY["pow"],
}


def begin() -> ir.Operation:
    """Marks where code begins, for :func:`expand`."""
    operation: ir.Operation = ops.i32_constant(0).owner.operation
    return operation


def expand(
    ctx: RuleContext, first: ir.Operation, results: Sequence[RegisterArray]
) -> list[RegisterArray]:
    """Expands what has been emitted at the insertion point.

    Args:
      ctx: the rule's context.
      first: where the code begins.
      results: arrays that the code has made.

    Returns:
      ``results``, with the values that took the place of others.
    """
    last = ir.InsertionPoint.current.ref_operation
    inside = False
    expansion = _Expansion(ctx)
    for operation in list(ir.InsertionPoint.current.block.operations):
        if operation.operation == first:
            inside = True
        elif inside and last is not None and operation.operation == last.operation:
            break
        elif inside:
            expansion.visit(operation)
    values = expansion.values
    arrays = [array.map(lambda register: values.get(register, register)) for array in results]
    for operation in expansion.done:
        operation.erase()
    return arrays


class _Expansion:
    """What is expanded: ``values`` by those that they replace, and operations that have no use."""

    def __init__(self, ctx: RuleContext):
        self._ctx = ctx
        self.values: dict[ir.Value, ir.Value] = {}
        self.done: list[Any] = []

    def visit(self, operation: Any) -> None:
        """Expands an operation and those inside of it."""
        name = operation.operation.name
        if name in _FUNCTIONS:
            with ir.InsertionPoint(operation), operation.location:
                value = _function(operation, _FUNCTIONS[name])
            old = operation.operation.result
            old.replace_all_uses_with(value)
            self.values[old] = value
            self.done.append(operation.operation)
        elif name == "gpu.printf":
            with ir.InsertionPoint(operation), operation.location:
                values = [_promoted(value) for value in operation.operation.operands]
                device_print.printf(self._ctx.kernel, operation.attributes["format"].value, values)
            self.done.append(operation.operation)
        elif name == "nvvm.mapa":
            self._ctx.launch.uses_cluster_memory = True
            self._ctx.launch.shares_memory_in_cluster = True
        for region in operation.operation.regions:
            for block in region.blocks:
                for inner in list(block.operations):
                    self.visit(inner)


def _function(operation: Any, function: Callable[..., ir.Value]) -> ir.Value:
    operands = list(operation.operation.operands)
    type_ = operands[0].type
    element = type_.element_type if isinstance(type_, ir.VectorType) else type_
    dtype = _FLOATS.get(str(element))
    if dtype is None:
        raise UnsupportedError(
            f"{operation.operation.name} of {element}", expected=", ".join(_FLOATS)
        )
    flags = str(operation.attributes["fastmath"]) if "fastmath" in operation.attributes else ""
    approximate = "afn" in flags or "fast>" in flags
    if isinstance(type_, ir.VectorType) and list(type_.shape) == [1]:
        # Our functions take vectors of two elements and more.
        result = function(*(ops.extract(x, 0) for x in operands), dtype, approximate)
        return vector.broadcast(type_, result)
    return function(*operands, dtype, approximate)


def _promoted(value: ir.Value) -> ir.Value:
    """A value as C passes it to a variadic function."""
    type_ = value.type
    if isinstance(type_, ir.IndexType):
        return ops.arith.index_cast(ops.i64(), value)
    if isinstance(type_, ir.FloatType) and type_.width < 64:
        return ops.arith.extf(ir.F64Type.get(), value)
    if isinstance(type_, ir.IntegerType) and type_.width < 32:
        return ops.cast_integer(value, ops.i32(), signed=False)
    return value
