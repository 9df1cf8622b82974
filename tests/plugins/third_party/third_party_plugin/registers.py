"""What several rules do with registers."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin.ir import ops


def add_to_registers(x, number):
    """Adds a float32 scalar, an MLIR value, to every element of an array."""

    def add(register):
        if not isinstance(register.type, ir.VectorType):
            return arith.addf(register, number)
        return arith.addf(register, ops.broadcast(number, x.vector_length))

    return x.map(add)
