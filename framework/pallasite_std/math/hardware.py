"""The instructions of the hardware that the functions rely on, as an injectable table.

:data:`PTX` emits them. Tests on a machine without a GPU give functions an object with the same
methods. Error bounds are those of the PTX ISA, sections "Floating Point Instructions" and
"Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops, parse_type
from pallasite_std.math.values import Real, Word, length, map_elements, type_like


class Hardware:
    """Instructions of f32, element by element for vectors.

    Methods whose name ends in ``_flush`` take denormal operands as zeros of the same sign and
    give such a zero instead of a denormal.
    """

    float8_pairs = True
    """Whether pairs of 8-bit floats have conversion instructions."""

    def _call(self, name: str, *operands: Real) -> Real:
        values = [operand.value for operand in operands]
        f32 = parse_type("f32")
        return Real(map_elements(lambda *scalars: ops.intrinsic(f32, name, *scalars), *values))

    def exp2(self, x: Real) -> Real:
        """``ex2.approx.f32``: relative error at most 2**-22.5 (2 ulp), denormals kept."""
        return self._call("llvm.nvvm.ex2.approx.f", x)

    def exp2_flush(self, x: Real) -> Real:
        """``ex2.approx.ftz.f32``: as :meth:`exp2`."""
        return self._call("llvm.nvvm.ex2.approx.ftz.f", x)

    def assembled(self, text: str, x: Real) -> Real | None:
        """Assembly of several instructions that gives ``$0`` for ``$1``, where it takes no more
        instructions than those of LLVM do; else None."""
        return None

    def log2_flush(self, x: Real) -> Real:
        """``lg2.approx.ftz.f32``: absolute error 2**-22 in (0.5, 2), else relative 2**-22."""
        return self._call("llvm.nvvm.lg2.approx.ftz.f", x)

    def sin(self, x: Real) -> Real:
        """``sin.approx.f32``: absolute error 2**-20.5 in [-2 pi, 2 pi], growing beyond."""
        return self._call("llvm.nvvm.sin.approx.f", x)

    def cos(self, x: Real) -> Real:
        """``cos.approx.f32``: absolute error 2**-20.5 in [-2 pi, 2 pi], growing beyond."""
        return self._call("llvm.nvvm.cos.approx.f", x)

    def tanh(self, x: Real) -> Real:
        """``tanh.approx.f32``: relative error 2**-11."""
        return self._call("llvm.nvvm.tanh.approx.f32", x)

    def rsqrt(self, x: Real) -> Real:
        """``rsqrt.approx.f32``: relative error 2**-22.9, denormals kept."""
        return self._call("llvm.nvvm.rsqrt.approx.f", x)

    def rsqrt_flush(self, x: Real) -> Real:
        """``rsqrt.approx.ftz.f32``: as :meth:`rsqrt`."""
        return self._call("llvm.nvvm.rsqrt.approx.ftz.f", x)

    def sqrt_flush(self, x: Real) -> Real:
        """``sqrt.approx.ftz.f32``: relative error 2**-23."""
        return self._call("llvm.nvvm.sqrt.approx.ftz.f", x)

    def reciprocal_flush(self, x: Real) -> Real:
        """``rcp.approx.ftz.f32``: 1 ulp."""
        return self._call("llvm.nvvm.rcp.approx.ftz.f", x)

    def divide(self, x: Real, y: Real) -> Real:
        """``div.full.f32``: 2 ulp over the full range."""
        return self._call("llvm.nvvm.div.full", x, y)

    def fma_saturate(self, x: Real, y: Real, z: Real) -> Real:
        """``fma.rn.sat.f32``: ``x * y + z`` clamped to [0, 1]; NaN becomes 0."""
        return self._call("llvm.nvvm.fma.rn.sat.f", x, y, z)

    def fma_down(self, x: Real, y: Real, z: Real) -> Real:
        """``fma.rm.f32``: ``x * y + z`` rounded towards minus infinity."""
        return self._call("llvm.nvvm.fma.rm.f", x, y, z)

    def to_int32(self, x: Real, signed: bool) -> Word:
        """``cvt.rzi`` from f32 to 32 bits, which saturates and takes NaN to 0."""
        name = "llvm.nvvm.f2i.rz" if signed else "llvm.nvvm.f2ui.rz"
        return Word(map_elements(lambda s: ops.intrinsic(ops.i32(), name, s), x.value))

    def funnel_left(self, high: Word, low: Word, count: Word) -> Word:
        """The upper half of ``high:low`` shifted left by ``count`` modulo 32 (``shf.l.wrap``)."""
        vector = isinstance(high.value.type, ir.VectorType)
        name = f"llvm.fshl.v{length(high.value)}i32" if vector else "llvm.fshl.i32"
        return Word(ops.intrinsic(high.value.type, name, high.value, low.value, count.value))

    def below_byte(self, x: ir.Value, above: int) -> Word:
        """An even number of ``i8``, each widened to 16 bits with ``above`` as the upper byte."""
        pair = parse_type("vector<2xi16>")

        def interleaved(two: ir.Value) -> ir.Value:
            word = ops.cast_integer(ops.bitcast(two, parse_type("i16")), ops.i32(), signed=False)
            result = ops.inline_assembly(
                f"prmt.b32 $0, $1, {above * 0x01010101:#x}, 0x4140;",
                "=r,r",
                word,
                results=[ops.i32()],
                side_effects=False,
            )
            return ops.bitcast(result, pair)

        return Word(_by_pairs(interleaved, x))

    def mask_and_flip(self, x: Word, mask: int, flipped: int) -> Word:
        """``(x & mask) ^ flipped`` of an ``i32`` (``lop3``): ptxas takes two instructions."""
        result = ops.inline_assembly(
            f"lop3.b32 $0, $1, {mask:#x}, {flipped:#x}, 0x6a;",
            "=r,r",
            x.value,
            results=[ops.i32()],
            side_effects=False,
        )
        return Word(result)

    def float8_to_half(self, x: ir.Value, kind: str) -> Real:
        """``cvt.rn.f16x2.{e4m3x2,e5m2x2}`` of an even number of ``i8``; exact."""
        pair = parse_type("vector<2xf16>")

        def convert(two: ir.Value) -> ir.Value:
            result = ops.inline_assembly(
                f"cvt.rn.f16x2.{kind}x2 $0, $1;",
                "=r,h",
                ops.bitcast(two, parse_type("i16")),
                results=[ops.i32()],
                side_effects=False,
            )
            return ops.bitcast(result, pair)

        return Real(_by_pairs(convert, x))

    def float8_from_single(self, x: Real, kind: str) -> ir.Value:
        """``cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32`` of an even number of elements.

        Numbers out of range, infinities too, become the largest finite number; NaN stays.
        """
        pair = parse_type("vector<2xi8>")

        def convert(two: ir.Value) -> ir.Value:
            result = ops.inline_assembly(
                f"cvt.rn.satfinite.{kind}x2.f32 $0, $1, $2;",
                "=h,f,f",
                ops.extract(two, 1),
                ops.extract(two, 0),
                results=[parse_type("i16")],
                side_effects=False,
            )
            return ops.bitcast(result, pair)

        return _by_pairs(convert, x.value)


def single(number: float) -> str:
    """An f32 as an immediate operand."""
    return f"0f{np.float32(number).view(np.uint32):08X}"


class SingleHardware(Hardware):
    """The instructions of chips that have none for pairs of f32, which LLVM would use."""

    def assembled(self, text: str, x: Real) -> Real | None:
        """As for all chips; LLVM takes a fifth of the time for what it does not look into."""
        f32 = parse_type("f32")

        def one(scalar: ir.Value) -> ir.Value:
            return ops.inline_assembly(text, "=f,f", scalar, results=[f32], side_effects=False)

        return Real(map_elements(one, x.value))


def _by_pairs(function: Callable[[ir.Value], ir.Value], value: ir.Value) -> ir.Value:
    count = length(value)
    return ops.concatenate([function(ops.slice_vector(value, i, 2)) for i in range(0, count, 2)])


def float_to_integer(x: Real, width: int, signed: bool) -> Word:
    """Truncation that saturates and takes NaN to 0, for any widths (``llvm.fpto[su]i.sat``)."""
    vector = isinstance(x.value.type, ir.VectorType)
    prefix = f"v{length(x.value)}" if vector else ""
    sign = "s" if signed else "u"
    name = f"llvm.fpto{sign}i.sat.{prefix}i{width}.{prefix}{x.format.name}"
    return Word(ops.intrinsic(type_like(x.value, f"i{width}"), name, x.value))


PTX = Hardware()
"""The instructions of all GPUs."""

_WITHOUT_PAIRS = SingleHardware()


def hardware_of(capability: tuple[int, int]) -> Hardware:
    """The instructions of chips of a compute capability."""
    return PTX if capability >= (10, 0) else _WITHOUT_PAIRS
