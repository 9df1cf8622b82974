"""What an integer MLIR value is known to be a multiple of.

Addresses are built from products with block sizes, so looking back through a few operations tells
how wide the accesses at an address can be.
"""

from __future__ import annotations

import math

from jaxlib.mlir import ir

_DEPTH = 12
ANY = 1 << 30
"""The divisor of zero: a multiple of everything that matters."""


def known_divisor(value: ir.Value, depth: int = _DEPTH) -> int:
    """A positive number that divides ``value`` (i32 or i64) whatever the inputs; at least 1."""
    if depth == 0:
        return 1
    owner = value.owner
    if isinstance(owner, ir.Block):
        return _loop_argument(value, owner, depth)
    name = owner.name
    operands = owner.operands
    if name == "arith.constant":
        number = abs(int(ir.IntegerAttr(owner.attributes["value"]).value))
        return number or ANY
    if name in ("arith.addi", "arith.subi", "arith.maxsi", "arith.minsi", "arith.ori"):
        return math.gcd(*(known_divisor(operand, depth - 1) for operand in operands))
    if name == "arith.muli":
        product = math.prod(known_divisor(operand, depth - 1) for operand in operands)
        return min(product, ANY)
    if name == "arith.shli":
        amount = _constant(operands[1])
        if amount is not None and 0 <= amount < 31:
            return min(known_divisor(operands[0], depth - 1) << amount, ANY)
        return known_divisor(operands[0], depth - 1)
    if name in ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast"):
        return known_divisor(operands[0], depth - 1)
    if name == "arith.select":
        return math.gcd(*(known_divisor(operand, depth - 1) for operand in list(operands)[1:]))
    if name in ("arith.remsi", "arith.remui"):
        return math.gcd(*(known_divisor(operand, depth - 1) for operand in operands))
    if name in ("arith.divsi", "arith.divui"):
        divisor = _constant(operands[1])
        dividend = known_divisor(operands[0], depth - 1)
        if divisor and dividend % divisor == 0:
            return max(1, dividend // abs(divisor))
    if name in ("arith.shrsi", "arith.shrui"):
        amount = _constant(operands[1])
        dividend = known_divisor(operands[0], depth - 1)
        if amount is not None and 0 <= amount < 31 and dividend % (1 << amount) == 0:
            return max(1, dividend >> amount)
    if name == "arith.andi":
        mask = _constant(operands[1])
        if mask:
            return mask & -mask
    return 1


def _constant(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    return int(ir.IntegerAttr(owner.attributes["value"]).value)


def _loop_argument(value: ir.Value, block: ir.Block, depth: int) -> int:
    """The induction variable of a for loop is a multiple of what its start and step are."""
    owner = block.owner
    if owner.name != "scf.for":
        return 1
    if ir.BlockArgument(value).arg_number != 0:
        return 1
    lower, _, step = list(owner.operands)[:3]
    return math.gcd(known_divisor(lower, depth - 1), known_divisor(step, depth - 1))
