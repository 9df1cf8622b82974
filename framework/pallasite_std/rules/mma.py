"""Warp-level MMA (PTX ISA, ``mma.sync.aligned.m16n8k*``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import InvalidValueError, RuleSet, Semantics
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import (
    ConversionKind,
    Layout,
    RegisterLayout,
    conversion,
    describe,
)
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext, relayout
from pallasite_std.layouts import mma_accumulator, mma_left, mma_right
from pallasite_std.primitives.matrix import mma_p, warps_along_rows

rules = RuleSet()

_NAMES = ("MMA_ACC", "MMA_LHS", "MMA_RHS")
_MAKERS = dict(zip(_NAMES, (mma_accumulator, mma_left, mma_right), strict=True))
_PTX_TYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}


@rules.lowering(mma_p, Semantics.LANE)
def _mma(ctx: RuleContext, acc: RegisterArray, a: RegisterArray, b: RegisterArray) -> RegisterArray:
    bits = types.bit_width(a.dtype)
    m_warps = _rows_of_warps(acc, a, b, bits)
    layouts = {
        name: _layout(name, array.shape, bits, m_warps)
        for name, array in zip(_NAMES, (acc, a, b), strict=True)
    }
    acc, a, b = (
        _in_layout(ctx, array, layouts[name], name, what, m_warps, str(a.dtype))
        for name, what, array in zip(_NAMES, ("acc", "a", "b"), (acc, a, b), strict=True)
    )
    (m, n), depth = acc.shape, a.shape[1]
    step = 256 // bits
    registers = list(acc.registers)
    element = types.element_type(acc.dtype)
    text, constraints = _instruction(str(a.dtype), str(b.dtype), str(acc.dtype) == "int32", step)
    left = [ops.bitcast(register, ops.i32()) for register in a.registers]
    right = [ops.bitcast(register, ops.i32()) for register in b.registers]
    acc_places, left_places, right_places = (_places(layouts[name]) for name in _NAMES)
    # The first warp's part of each tile says which registers every warp names.
    for k in range(0, depth, step):
        for row in range(0, m, 16 * m_warps):
            lefts = [
                left[left_places[row + 8 * half, k + part * step // 2]]
                for part in range(2)
                for half in range(2)
            ]
            for column in range(0, n, 8 * (4 // m_warps)):
                rights = [right[right_places[k + part * step // 2, column]] for part in range(2)]
                held = [acc_places[row + 8 * half, column] for half in range(2)]
                sums = [ops.extract(registers[one], i) for one in held for i in range(2)]
                results = ops.inline_assembly(
                    text,
                    constraints,
                    *lefts,
                    *rights,
                    *sums,
                    results=[element] * 4,
                    side_effects=False,
                )
                for half, one in enumerate(held):
                    registers[one] = ops.from_elements(results[2 * half : 2 * half + 2])
    return RegisterArray(tuple(registers), acc.layout, acc.dtype)


def _layout(name: str, shape: tuple[int, ...], bits: int, m_warps: int) -> RegisterLayout:
    return _MAKERS[name](bits, m_warps).layout(shape)


def _fits(shape: tuple[int, ...], m_warps: int) -> bool:
    m, n = shape
    return m % (16 * m_warps) == 0 and n % (8 * (4 // m_warps)) == 0


def _rows_of_warps(acc: RegisterArray, a: RegisterArray, b: RegisterArray, bits: int) -> int:
    """How the operands are distributed over the warps: the first that has such a layout decides."""
    for name, array in zip(_NAMES, (acc, a, b), strict=True):
        for m_warps in (4, 2, 1):
            if _fits(acc.shape, m_warps) and array.layout == _layout(
                name, array.shape, bits, m_warps
            ):
                return m_warps
    default = warps_along_rows(acc.shape)
    assert default is not None  # The primitive has checked the shape.
    return default


def _in_layout(
    ctx: RuleContext,
    array: RegisterArray,
    layout: RegisterLayout,
    name: str,
    what: str,
    m_warps: int,
    dtype: str,
) -> RegisterArray:
    if array.is_splat:
        return array.materialize(layout)
    assert isinstance(array.layout, RegisterLayout)
    if conversion(array.layout, layout).kind is ConversionKind.SHARED_MEMORY:
        raise InvalidValueError(
            f"{what} is distributed over the lanes in another way than mma reads it",
            got=f"{array.dtype}{list(array.shape)} with layout {describe(array.layout)}",
            expected=f"layout {name}({dtype}, m_warps={m_warps})",
            hint=f"plgpu.layout_cast({what}, plgpu.Layout.{name}(jnp.{dtype},"
            f" m_warps={m_warps})), best right where it is loaded",
        )
    return relayout(ctx, array, layout)


@functools.lru_cache(maxsize=256)
def _places(layout: RegisterLayout) -> dict[tuple[int, ...], int]:
    """The register in which the first lane holds what begins at an index."""
    return {layout.element_at(0, 0, number, 0): number for number in range(layout.registers)}


@functools.lru_cache(maxsize=64)
def _instruction(a: str, b: str, integers: bool, depth: int) -> tuple[str, str]:
    """Text and constraints: results 0 to 3, a 4 to 7, b 8 and 9, accumulator 10 to 13."""
    kind, letter = ("s32", "r") if integers else ("f32", "f")

    def listed(start: int, count: int) -> str:
        return "{" + ", ".join(f"${start + i}" for i in range(count)) + "}"

    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.{kind}.{_PTX_TYPES[a]}.{_PTX_TYPES[b]}.{kind}"
        f" {listed(0, 4)}, {listed(4, 4)}, {listed(8, 2)}, {listed(10, 4)};"
    )
    constraints = ",".join([*[f"={letter}"] * 4, *["r"] * 6, *[letter] * 4])
    return text, constraints


def operand_layouts(shapes: Sequence[tuple[int, ...]], bits: int) -> list[RegisterLayout]:
    """The layouts of the accumulator, a and b for which no warp does another one's work.

    Args:
      shapes: of the three.
      bits: of an element of a and b.
    """
    m_warps = next(m_warps for m_warps in (4, 2, 1) if _fits(shapes[0], m_warps))
    return [_layout(name, shape, bits, m_warps) for name, shape in zip(_NAMES, shapes, strict=True)]


@rules.layout(mma_p)
def _mma_hints(ctx: LayoutContext, wanted: Any, **params: Any) -> list[Layout | None]:
    """What makes an operand makes it in the layout that the product reads, for the ``m_warps`` of
    the result that is wanted, or else the largest."""
    acc, a, b = ctx.avals_in
    bits = types.bit_width(a.dtype)
    choices = [m_warps for m_warps in (4, 2, 1) if _fits(acc.shape, m_warps)]
    for m_warps in choices:
        if wanted and wanted[0] == _layout("MMA_ACC", acc.shape, bits, m_warps):
            choices = [m_warps]
    return [
        _layout(name, aval.shape, bits, choices[0])
        for name, aval in zip(_NAMES, (acc, a, b), strict=True)
    ]


def _mma_result(avals_in: Any, layouts: Any) -> list[Layout | None]:
    """The result has the layout of the accumulator."""
    acc, a, _ = avals_in
    bits = types.bit_width(a.dtype)
    for m_warps in (4, 2, 1):
        if _fits(acc.shape, m_warps):
            layout = _layout("MMA_ACC", acc.shape, bits, m_warps)
            if layouts[0] is None or layouts[0] == layout:
                return [layout]
    return [None]


_mma_hints.result_layouts = _mma_result  # type: ignore[attr-defined]
