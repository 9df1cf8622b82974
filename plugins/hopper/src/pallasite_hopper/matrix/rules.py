"""Lowering of warpgroup MMA.

One call becomes a fence, a piece of inline assembly for each 64 rows and up to 256 columns that
steps through K, and a commit. The accumulator's registers are operands of the assembly that its
results replace, so the register allocator leaves them in place from one wgmma to the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, InvalidValueError, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import ConversionKind, RegisterLayout, conversion, describe
from pallasite.plugin.lowering import (
    LayoutContext,
    RegisterArray,
    RuleContext,
    Value,
    relayout,
    resolve,
)
from pallasite_hopper.matrix import products as prim
from pallasite_hopper.matrix.descriptors import (
    CHUNK,
    MatrixOperand,
    plan_operand,
)
from pallasite_hopper.matrix.fragments import (
    accumulator_layout,
    accumulator_registers,
    left_layout,
    left_layout_name,
    left_registers,
    result_layout,
)
from pallasite_hopper.matrix.types import (
    accumulator_type,
    column_counts,
    depth_of,
    ptx_type,
)
from pallasite_hopper.matrix.values import (
    mark_product,
    need,
    own_registers,
    pass_through,
    read,
    settled,
    tied_assembly,
    wait_text,
)
from pallasite_std.api import DynamicOffset, MatrixStep, MemoryReference, check_matrix_starts

rules = RuleSet()

ROWS = 64
"""Of one instruction."""

_FEATURE = ("wgmma",)


# Operands in shared memory ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shared:
    """An operand in shared memory: its plan, and the descriptor of its first element."""

    plan: MatrixOperand
    descriptor: ir.Value


def _shared(
    ctx: RuleContext,
    memory: MemoryReference,
    rows: Sequence[tuple[int, int]],
    depth: int,
    what: str,
) -> _Shared:
    if memory.remote is not None:
        raise InvalidValueError(
            f"{what} is in the shared memory of another block",
            expected="the block's own shared memory",
        )
    plan = plan_operand(memory.layout, tuple(rows), depth, what)
    size = memory.element_bits // 8
    steps = [_step(part, size) for part in memory.dynamic]
    check_matrix_starts(memory.layout, plan.starts, memory.offset * size, steps, what)
    address = ops.shared_address(memory.pointer)
    offset = memory.byte_offset(memory.element_offset())
    address = ops.add(address, offset)
    field = ops.bitwise_and(ops.divide_unsigned(address, CHUNK), (1 << 14) - 1)
    descriptor = ops.arith.ori(
        ops.cast_integer(field, ops.i64(), signed=False), ops.i64_constant(plan.constant)
    )
    return _Shared(plan, descriptor)


def _step(part: DynamicOffset, size: int) -> MatrixStep:
    """What a part of the offset that is computed in the kernel adds, in bytes."""
    values, stride = part.term.values, part.term.stride * size
    return MatrixStep(part.divisor * size, None if values is None else values * stride)


def _transposed_layout(memory: MemoryReference) -> MemoryReference:
    return memory.with_layout(memory.layout.transpose((1, 0)))


# MMAs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Block:
    """What the instructions along K add to: up to 64 rows and 256 columns of the accumulator.

    Attributes:
      row_number, column_number: which part of a and of b they read.
      row: the first one, in a.
      columns: their number.
      numbers: of the accumulator's registers, in the order of the instruction.
      flag: whether the first wgmma accumulates: a value (i1), False, or None for yes.
    """

    row_number: int
    column_number: int
    row: int
    columns: int
    numbers: tuple[int, ...]
    flag: ir.Value | bool | None


def column_blocks(total: int, kind: str) -> list[tuple[int, int]]:
    """(first, number) of the columns of each instruction: as many as it can take."""
    blocks, start = [], 0
    counts = column_counts(kind)
    while start < total:
        count = next(
            (n for n in counts if n <= total - start and _rest_fits(total - start - n, kind)), 0
        )
        if not count:
            raise InvalidValueError(
                f"no instructions make {total} columns of {kind}",
                expected="8, 24 or a multiple of 16 columns",
            )
        blocks.append((start, count))
        start += count
    return blocks


def _rest_fits(rest: int, kind: str) -> bool:
    return kind != "s32" or rest % 16 == 0 or rest % 16 == 8 and rest >= 8


@rules.lowering(prim.wgmma_p, Semantics.LANE, requires=_FEATURE)
def _wgmma(ctx: RuleContext, *operands: Value, args_tree: Any) -> RegisterArray:
    acc, a, b, accumulate = args_tree.unflatten(operands)
    whole = acc.ref
    if not isinstance(whole, RegisterArray):
        raise InvalidTypeError("the accumulator is not a value here", got=type(whole).__name__)
    layout = accumulator_layout(whole.shape, whole.dtype)
    if whole.layout != layout:
        whole = relayout(ctx, whole, layout)
    first_row, first_column, m, n = part_of(whole.shape, acc.transforms)
    right = _transposed_layout(resolve(ctx, b, other_blocks=True))
    kind = accumulator_type(whole.dtype)
    depth = depth_of(right.dtype)
    row_blocks = [(row, ROWS) for row in range(0, m, ROWS)]
    columns_of = column_blocks(n, kind)
    left: _Shared | RegisterArray
    if isinstance(a, _jax.TransformedRef):
        memory = resolve(ctx, a, other_blocks=True)
        left, left_dtype = _shared(ctx, memory, row_blocks, depth, "a"), memory.dtype
    else:
        left, left_dtype = _in_registers(ctx, a), a.dtype
    right_shared = _shared(ctx, right, columns_of, depth, "b")
    registers = list(whole.registers)
    flag = None if accumulate is None else _known(ctx.scalar(accumulate))
    blocks = []
    for (row_number, (row, _)), (column_number, (column, columns)) in itertools.product(
        enumerate(row_blocks), enumerate(columns_of)
    ):
        numbers = accumulator_registers(layout, first_row + row, first_column + column, columns)
        zero = _is_zero([registers[number] for number in numbers])
        blocks.append(
            _Block(row_number, column_number, row, columns, numbers, False if zero else flag)
        )
    registers, left = _fence(registers, blocks, left)
    instruction = _Instruction(
        f"wgmma.mma_async.sync.aligned.m64n{{n}}k{depth}.{kind}"
        f".{ptx_type(left_dtype)}.{ptx_type(right.dtype)}",
        depth=depth,
        steps=right.layout.shape[1] // depth,
        bits=right.element_bits,
    )
    for block in blocks:
        results = instruction.emit(block, registers, left, right_shared)
        for number, result in zip(block.numbers, results, strict=True):
            registers[number] = result
    ops.inline_assembly("wgmma.commit_group.sync.aligned;", "~{memory}")
    return RegisterArray(tuple(registers), layout, whole.dtype)


@rules.lowering(prim.wgmma_ref_p, Semantics.LANE, requires=_FEATURE)
@rules.lowering(prim.wgmma_accumulator_deref_p, Semantics.LANE, requires=_FEATURE)
def _outside(ctx: RuleContext, *operands: Value, **params: Any) -> RegisterArray:
    """Within the scope that allocates it, an accumulator has become a value."""
    raise InvalidValueError(
        "an accumulator is used outside of the scope that allocates it",
        expected="uses in the function that pl.run_scoped or pl.run_state calls",
    )


def position_of_a(args_tree: Any, count: int) -> int:
    """The operand that is, or is viewed as, a."""
    _, a, _, _ = args_tree.unflatten(list(range(count)))
    position: int = a.ref if isinstance(a, _jax.TransformedRef) else a
    return position


def part_of(shape: tuple[int, ...], transforms: Sequence[Any]) -> tuple[int, int, int, int]:
    """First row and column, and extents, of the part of the accumulator that is added to."""
    starts, sizes = [0, 0], list(shape)
    for view in transforms:
        for dimension, index in enumerate(view.indices):
            starts[dimension] += index.start
            sizes[dimension] = index.size
    if starts[0] % ROWS or sizes[0] % ROWS or starts[1] % 8 or sizes[1] % 8:
        raise InvalidValueError(
            "a part of an accumulator cuts an instruction's registers apart",
            got=f"rows {starts[0]}:{starts[0] + sizes[0]}, columns"
            f" {starts[1]}:{starts[1] + sizes[1]}",
            expected="rows in multiples of 64, columns in multiples of 8",
        )
    return starts[0], starts[1], sizes[0], sizes[1]


def _known(flag: ir.Value) -> ir.Value | bool:
    """A flag that is a constant, as that."""
    owner = flag.owner
    if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
        return bool(ir.IntegerAttr(owner.attributes["value"]).value)
    return flag


def _is_zero(registers: Sequence[ir.Value]) -> bool:
    """Whether all registers are known to be zero: then there is nothing to add to."""
    if any(register != registers[0] for register in registers):
        return False
    owner = registers[0].owner
    if isinstance(owner, ir.Block):
        return False
    while owner.name in ("vector.broadcast", "vector.splat"):
        inner = owner.operands[0].owner
        if isinstance(inner, ir.Block):
            return False
        owner = inner
    if owner.name != "arith.constant":
        return False
    value = owner.attributes["value"]
    if isinstance(value, ir.DenseElementsAttr):
        value = value.get_splat_value() if value.is_splat else None
    if isinstance(value, ir.FloatAttr | ir.IntegerAttr):
        return bool(value.value == 0)
    return False


# Operands in registers ----------------------------------------------------------------------------


def _in_registers(ctx: RuleContext, a: RegisterArray) -> RegisterArray:
    bits = types.bit_width(a.dtype)
    layout = left_layout(a.shape, bits)
    if a.is_splat:
        return a.materialize(layout)
    assert isinstance(a.layout, RegisterLayout)
    if conversion(a.layout, layout).kind is ConversionKind.SHARED_MEMORY:
        name = left_layout_name(bits)
        raise InvalidValueError(
            "a is distributed over the lanes in another way than the tensor cores read it",
            got=f"{a.dtype}{list(a.shape)} with layout {describe(a.layout)}",
            expected=f"layout {name}",
            hint=f"plgpu.layout_cast(a, plgpu.Layout.{name}), best right where it is loaded",
        )
    return relayout(ctx, a, layout)


def _left_words(left: _Shared | RegisterArray, block: _Block, steps: int, depth: int) -> _Left:
    if isinstance(left, _Shared):
        starts = left.plan.starts[block.row_number]
        return _Left([left.descriptor], "l", starts, left.plan.transposed, in_memory=True)
    bits = types.bit_width(left.dtype)
    assert isinstance(left.layout, RegisterLayout)
    words = [
        left.registers[number]
        for step in range(steps)
        for number in left_registers(left.layout, block.row, step * depth, bits)
    ]
    return _Left(words, "r", (), False, in_memory=False)


@dataclasses.dataclass(frozen=True)
class _Left:
    """The left operand of one block of rows, as operands of the assembly."""

    values: list[ir.Value]
    code: str
    starts: tuple[int, ...]
    transposed: bool
    in_memory: bool


def _fence(
    registers: Sequence[ir.Value], blocks: Sequence[_Block], left: _Shared | RegisterArray
) -> tuple[list[ir.Value], _Shared | RegisterArray]:
    """``wgmma.fence``: registers written before are visible to the wgmma after.

    Registers that ordinary code computes are tied to the fence, else LLVM could move that code
    behind it. Those that come out of a wgmma, or are carried by a loop, need not.
    """
    places = [
        number
        for block in blocks
        if block.flag is not False
        for number in block.numbers
        if not _is_settled(registers[number])
    ]
    if isinstance(left, RegisterArray):
        # They are only read, so what is computed before the fence may be used behind it.
        words = own_registers(left.registers)
        need(words)
        left = RegisterArray(words, left.layout, left.dtype)
    results = pass_through("wgmma.fence.sync.aligned;", [registers[n] for n in places], last=True)
    new = list(registers)
    for place, result in zip(places, results, strict=True):
        new[place] = result
    return new, left


def _is_settled(register: ir.Value) -> bool:
    """Whether nothing but assembly, in order with the fence, computes a register.

    What enters an accumulator from ordinary code goes through assembly of its own (see
    values.py), so what is left are constants, and branches that choose between these and others.
    """
    owner = register.owner
    if isinstance(owner, ir.Block):
        return True
    if owner.name == "scf.if":
        number = ir.OpResult(register).result_number
        yields = [region.blocks[0].operations[-1] for region in owner.regions]
        return all(_is_settled(one.operands[number]) for one in yields)
    if owner.name in ("llvm.bitcast", "llvm.extractvalue"):
        return _is_settled(owner.operands[0])
    return owner.name in ("llvm.inline_asm", "scf.for", "scf.while")


# Emission -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """What the instructions of one call have in common.

    Attributes:
      name: with a place for the number of columns.
      depth: of one instruction, in elements.
      steps: instructions along K.
      bits: of an operand's element.
    """

    name: str
    depth: int
    steps: int
    bits: int

    def emit(
        self,
        block: _Block,
        registers: Sequence[ir.Value],
        left: _Shared | RegisterArray,
        right: _Shared,
    ) -> list[ir.Value]:
        """The instructions for one part of the accumulator; returns its new registers."""
        words = _left_words(left, block, self.steps, self.depth)
        accumulator = [registers[number] for number in block.numbers]
        count = len(accumulator)
        overwrites = block.flag is False
        first_input = count if overwrites else 2 * count
        # In the text a tied operand shares the number of its result, but takes one as well.
        values = [*words.values, right.descriptor]
        codes = [words.code] * len(words.values) + ["l"]
        if isinstance(block.flag, ir.Value):
            values.append(ops.cast_integer(block.flag, ops.i32(), signed=False))
            codes.append("r")
        names = ", ".join(f"${number}" for number in range(count))
        lines = ["{", ".reg .b64 a, b;", ".reg .pred p;"]
        lines.append(_predicate(block.flag, first_input + len(values) - 1))
        name = self.name.format(n=block.columns)
        modifiers = self._modifiers(words, right)
        for step in range(self.steps):
            if words.in_memory:
                lines.append(f"add.s64 a, ${first_input}, {words.starts[step] // CHUNK};")
                operand = "a"
            else:
                four = ", ".join(f"${first_input + 4 * step + i}" for i in range(4))
                operand = f"{{{four}}}"
            start = right.plan.starts[block.column_number][step] // CHUNK
            lines.append(f"add.s64 b, ${first_input + len(words.values)}, {start};")
            scale = "p" if step == 0 else "1"
            lines.append(f"{name} {{{names}}}, {operand}, b, {scale}{modifiers};")
        lines.append("}")
        text = "\n\t".join(lines)
        if overwrites:
            results = _fresh_assembly(text, accumulator, values, codes)
        else:
            results = tied_assembly(text, accumulator, values, ",".join(codes))
        mark_product(results[0], fragments=not words.in_memory)
        return results

    def _modifiers(self, left: _Left, right: _Shared) -> str:
        if ".s32." in self.name:
            return ""
        text = ", 1, 1"
        if self.bits == 16:
            if left.in_memory:
                text += f", {int(left.transposed)}"
            text += f", {int(right.plan.transposed)}"
        return text


def _predicate(flag: ir.Value | bool | None, number: int) -> str:
    """Sets p to whether the first wgmma accumulates; ``number`` is the operand of a flag."""
    if isinstance(flag, ir.Value):
        return f"setp.ne.b32 p, ${number}, 0;"
    return f"setp.{'ne' if flag is False else 'eq'}.b32 p, 0, 0;"


def _fresh_assembly(
    text: str, registers: Sequence[ir.Value], inputs: Sequence[ir.Value], codes: Sequence[str]
) -> list[ir.Value]:
    """Assembly whose results do not depend on what the registers held."""
    f32 = types.parse_type("f32")
    result_types = [f32 if register.type == f32 else ops.i32() for register in registers]
    outputs = ["=f" if kind == f32 else "=r" for kind in result_types]
    constraints = ",".join([*outputs, *codes, "~{memory}"])
    values = ops.inline_assembly(text, constraints, *inputs, results=result_types)
    found = [values] if isinstance(values, ir.Value) else list(values)
    return [ops.bitcast(v, register.type) for v, register in zip(found, registers, strict=True)]


# Waiting, reading, writing ------------------------------------------------------------------------


@rules.lowering(prim.wgmma_wait_p, Semantics.LANE, requires=_FEATURE)
@rules.lowering(prim.wgmma_added_wait_p, Semantics.LANE, requires=_FEATURE)
def _wait(ctx: RuleContext, *, n: int, before: str = "") -> Sequence[Value]:
    ops.inline_assembly(wait_text(n), "~{memory}")
    return ()


@rules.lowering(prim.wgmma_accumulator_read_p, Semantics.LANE, requires=_FEATURE)
def _read(
    ctx: RuleContext, acc: RegisterArray, *, wait_n: int | None
) -> tuple[RegisterArray, RegisterArray]:
    return read(ctx, acc, wait_n)


@rules.lowering(prim.wgmma_accumulator_store_p, Semantics.LANE, requires=_FEATURE)
def _store(ctx: RuleContext, acc: Value, value: RegisterArray) -> RegisterArray:
    return settled(
        relayout(ctx, value, accumulator_layout(tuple(value.shape), np.dtype(value.dtype)))
    )


# Layouts ------------------------------------------------------------------------------------------


@rules.layout(prim.wgmma_ref_p)
@rules.layout(prim.wgmma_p)
def _wgmma_layout(ctx: LayoutContext, wanted: Any, *, args_tree: Any) -> list[Any]:
    """A left operand in registers should come in the layout that the instruction reads."""
    proposals: list[Any] = [None] * len(ctx.avals_in)
    position = position_of_a(args_tree, len(ctx.avals_in))
    aval = ctx.avals_in[position]
    if not isinstance(aval, _jax.AbstractRef):
        proposals[position] = left_layout(tuple(aval.shape), types.bit_width(aval.dtype))
    return proposals


@rules.layout(prim.wgmma_accumulator_store_p)
def _store_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[Any]:
    return [None, result_layout(tuple(ctx.avals_in[1].shape))]


@rules.layout(prim.wgmma_accumulator_read_p)
def _read_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


def _read_results(
    avals_in: Sequence[Any], layouts: Any, **params: Any
) -> list[RegisterLayout | None]:
    return [None, result_layout(tuple(avals_in[0].shape))]


_read_layout.result_layouts = _read_results  # type: ignore[attr-defined]


@rules.layout(prim.wgmma_accumulator_deref_p)
def _deref_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


def _deref_results(
    avals_in: Sequence[Any], layouts: Any, **params: Any
) -> list[RegisterLayout | None]:
    return [result_layout(tuple(avals_in[0].shape))]


_deref_layout.result_layouts = _deref_results  # type: ignore[attr-defined]
