"""Angles of f64 in quarter turns, exact over the whole range.

This is the reduction of M. H. Payne and R. N. Hanek ("Radian reduction for trigonometric
functions", ACM SIGNUM Newsletter 18, 1983): of the bits of 2/pi, 192 decide, which the exponent
chooses. Those before them give whole multiples of four quarter turns; those behind them change what
is left, which is never below 2**-62 quarter turns, by less than 2**-64 of it.

It is a function of its own in the kernel's code, since few arguments need it.
"""

from __future__ import annotations

import math

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, scf

from pallasite.plugin.ir import ops, parse_type
from pallasite_std.math.constants import HALF_PI, parts
from pallasite_std.math.values import F64, Mask, Real, Word, map_elements

_NAME = "pallasite_large_angle"

_FIRST = 1013
"""The exponent, with its bias, of numbers for which the window begins with the first word."""

_WORDS = (
    *(0x0000000000000000, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041),
    *(0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0, 0x06492EEA09D1921C, 0xFE1DEB1CB129A73E),
    *(0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4, 0x9C845F8BBDF9283B),
    *(0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D),
    *(0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB),
)
"""A word of zeros, and 2/pi times 2**1216, 64 bits at a time."""

_MASK = 2**32 - 1


def reduce_large(x: Real, far: Mask, near: tuple[Real, Real, Word]) -> tuple[Real, Real, Word]:
    """``near``, or where ``far`` is true what :func:`_reduce` has for x; if there is any such x."""
    values = [one.value for one in near]
    conditions = [ops.extract(far.value, at) for at in range(ops.vector_length(far.value))]
    some = conditions[0]
    for one in conditions[1:]:
        some = ops.arith.ori(some, one)
    branch = scf.IfOp(some, [one.type for one in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        columns = [list[ir.Value](), list[ir.Value](), list[ir.Value]()]

        def call(element: ir.Value) -> ir.Value:
            results = _call(element)
            for column, result in zip(columns, results, strict=True):
                column.append(result)
            return element

        map_elements(call, x.value)
        found = [_joined(column, one.type) for column, one in zip(columns, values, strict=True)]
        scf.yield_([ops.arith.select(far.value, *two) for two in zip(found, values, strict=True)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    reduced, low, quarter = branch.results
    return Real(reduced), Real(low), Word(quarter)


def _joined(elements: list[ir.Value], type: ir.Type) -> ir.Value:
    if not isinstance(type, ir.VectorType):
        return elements[0]
    return ir.Operation.create("vector.from_elements", [type], elements).result


def _call(x: ir.Value) -> list[ir.Value]:
    """The function's results for a number; the function is added to the module if it lacks it."""
    module = ir.InsertionPoint.current.block.owner
    while module.operation.name != "builtin.module":
        module = module.operation.parent
    body = module.regions[0].blocks[0]
    names = {
        ir.StringAttr(one.attributes["sym_name"]).value
        for one in body.operations
        if "sym_name" in one.attributes
    }
    results = parse_type("!llvm.struct<(f64, f64, i32)>")
    if _NAME not in names:
        with ir.InsertionPoint.at_block_begin(body):
            _define(results)
    made = llvm.CallOp(results, [x], [], [], callee=_NAME).result
    kinds = [parse_type(one) for one in ("f64", "f64", "i32")]
    return [
        llvm.extractvalue(kind, made, ir.DenseI64ArrayAttr.get([at]))
        for at, kind in enumerate(kinds)
    ]


def _define(results: ir.Type) -> None:
    function = llvm.LLVMFuncOp(
        _NAME,
        ir.TypeAttr.get(parse_type("!llvm.func<struct<(f64, f64, i32)> (f64)>")),
        linkage=ir.Attribute.parse("#llvm.linkage<internal>"),
    )
    function.attributes["passthrough"] = ir.ArrayAttr.get([ir.StringAttr.get("noinline")])
    block = function.body.blocks.append(parse_type("f64"))
    with ir.InsertionPoint(block):
        whole = llvm.mlir_undef(results)
        made: tuple[Real | Word, ...] = _reduce(Real(block.arguments[0]))
        for at, one in enumerate(made):
            whole = llvm.insertvalue(whole, one.value, ir.DenseI64ArrayAttr.get([at]))
        llvm.return_(arg=whole)


def _reduce(x: Real) -> tuple[Real, Real, Word]:
    """(r, low, q) with ``x = q pi/2 + r + low`` modulo 2 pi, for numbers of at least 2**48."""
    bits = x.bits()
    place = (bits.shift_logical(F64.fraction) & 2047) - _FIRST
    window = _window(place)
    significand = ((bits & (1 << F64.fraction) - 1) | 1 << F64.fraction).extend_unsigned(128)
    # The angle in units of 2**-126 quarter turns, modulo four of these.
    first, second, third = (word.extend_unsigned(128) for word in window)
    turns = (significand * first) << 64
    turns = turns + significand * second + (significand * third).shift_logical(64)
    quarter = turns.shift_logical(125).truncate(32)
    quarter = (quarter + 1).shift_logical(1)
    # To both sides of the nearest quarter, in four parts, which are floats.
    fraction = turns << 2
    high, rest = fraction.shift_logical(64).truncate(64), fraction.truncate(64)
    digits = ((high >> 32), high & _MASK, rest.shift_logical(32), rest & _MASK)
    a, b, c, d = (one.to_real(F64) * 2.0 ** (-32 * n) for n, one in enumerate(digits, 1))
    total = a + b
    behind = (b - (total - a)) + c
    angle = total + behind
    error = (behind - (angle - total)) + d
    head, tail = parts(HALF_PI, F64, 2)
    reduced = angle * head
    low = angle.times_plus(head, -reduced) + angle.times_plus(tail, error * head)
    reduced = (abs(x) < math.inf).choose(reduced, math.nan)
    negative = bits < 0
    return (
        negative.choose(-reduced, reduced),
        negative.choose(-low, low),
        negative.choose(0 - quarter, quarter),
    )


def _window(place: Word) -> list[Word]:
    """192 bits of 2/pi from a place on; those before the first word are zeros."""
    number = place.shift_logical(6)
    words = [place.constant(word - (word >> 63 << 64)) for word in _WORDS]
    for step in (16, 8, 4, 2, 1):
        farther = (number & step).differs(0)
        words = [
            farther.choose(words[at + step], words[at]) if at + step < len(words) else words[at]
            for at in range(3 + step)
        ]
    shift = place & 63
    return [
        (one << shift) | other.shift_logical(1).shift_logical(63 - shift)
        for one, other in zip(words, words[1:], strict=False)
    ]
