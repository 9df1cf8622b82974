"""Lowering of loads from tensor memory and stores to it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import ConversionKind, RegisterLayout, SplatLayout, conversion
from pallasite.plugin.lowering import (
    LayoutContext,
    RegisterArray,
    RuleContext,
    Value,
    relayout,
)
from pallasite_blackwell.order import synchronize
from pallasite_blackwell.targets import LOAD_REDUCE, targets_with
from pallasite_blackwell.tensor_memory import primitives as prim
from pallasite_blackwell.tensor_memory.layouts import CELL_BITS
from pallasite_blackwell.tensor_memory.references import (
    TensorMemoryReference,
    resolve_tensor_memory,
)
from pallasite_blackwell.tensor_memory.transfers import (
    Transfer,
    candidates,
    default_registers,
    find_transfer,
    plan_transfer,
)

rules = RuleSet()

_FEATURE = ("tcgen05",)


@rules.lowering(prim.commit_tmem_p, Semantics.LANE, requires=_FEATURE)
def _commit(ctx: RuleContext) -> Sequence[Value]:
    synchronize(ctx, "st")
    return ()


@rules.lowering(prim.wait_load_tmem_p, Semantics.LANE, requires=_FEATURE)
def _wait_load(ctx: RuleContext) -> Sequence[Value]:
    synchronize(ctx, "ld")
    return ()


# Loads --------------------------------------------------------------------------------------------


@rules.lowering(prim.async_load_tmem_p, Semantics.LANE, requires=_FEATURE)
def _load(
    ctx: RuleContext, *operands: Value, args_tree: Any, reduce: str | None
) -> Sequence[RegisterArray]:
    (source,) = args_tree.unflatten(operands)
    memory = resolve_tensor_memory(ctx, source, "src")
    bits = types.bit_width(memory.dtype)
    if reduce is not None:
        if not ctx.target.has(LOAD_REDUCE):
            raise UnsupportedError(
                f"loads from tensor memory that reduce, on {ctx.target.name}",
                expected=f"a target that has them: {targets_with(LOAD_REDUCE)}",
                hint="load, and reduce in registers: jnp.max(x, axis=1)",
            )
        return _load_reduced(ctx, memory, reduce)
    if types.is_bool(memory.dtype):
        memory = dataclasses.replace(memory, dtype=np.dtype(np.int8))
        found = _load_arrays(ctx, memory, bits)
        return (_cast(found, ops.arith.trunci, 1, np.bool_),)
    return (_load_arrays(ctx, memory, bits),)


def _load_arrays(ctx: RuleContext, memory: TensorMemoryReference, bits: int) -> RegisterArray:
    """All matrices of a reference."""
    batch = memory.shape[:-2]
    wanted = ctx.layout_hint
    matrix = _matrix_of(wanted, memory) if isinstance(wanted, RegisterLayout) else None
    layout = _closest(wanted if not batch else None, memory)
    if matrix is not None and find_transfer(matrix, memory.layout, memory.matrix, bits) is not None:
        layout = matrix
    plan = plan_transfer(layout, memory.layout, memory.matrix, bits)
    found = [_load_matrix(memory, layout, plan, column) for _, column in memory.matrices()]
    return _stacked(ctx, found, tuple(batch)) if batch else found[0]


def _cast(array: RegisterArray, operation: Any, bits: int, dtype: Any) -> RegisterArray:
    """An array of integers of other bits: cells hold booleans as bytes."""
    target: ir.Type = ir.IntegerType.get_signless(bits)
    if array.vector_length > 1:
        target = types.vector_type(target, array.vector_length)
    registers = tuple(operation(target, register) for register in array.registers)
    return RegisterArray(registers, array.layout, np.dtype(dtype))


def _closest(wanted: Any, memory: TensorMemoryReference) -> RegisterLayout:
    """The layout to load in, if not that which is wanted: from which it is cheapest to make."""
    bits = types.bit_width(memory.dtype)
    best = default_registers(memory.layout, memory.matrix, bits)
    if not isinstance(wanted, RegisterLayout) or wanted.shape != memory.matrix:
        return best
    for one in candidates(memory.layout, memory.matrix, bits):
        if conversion(one, wanted).kind is not ConversionKind.SHARED_MEMORY:
            return one
    return best


def _matrix_of(layout: RegisterLayout, memory: TensorMemoryReference) -> RegisterLayout | None:
    """The layout of one matrix of a batch that has a layout."""
    batch = len(memory.shape) - 2
    if not batch:
        return layout
    try:
        part = layout.slice((0,) * len(memory.shape), (1,) * batch + memory.matrix)
        found = part.layout.reshape(memory.matrix).layout
    except InvalidValueError:
        return None
    return found if isinstance(found, RegisterLayout) else None


def _load_matrix(
    memory: TensorMemoryReference, layout: RegisterLayout, plan: Transfer, column: int
) -> RegisterArray:
    element = types.element_type(memory.dtype)
    bits = types.bit_width(memory.dtype)
    elements: dict[tuple[int, int], ir.Value] = {}
    whole: dict[int, ir.Value] = {}
    for move in plan.loads:
        address = memory.address(column + move.column, move.lane)
        words = load_words(plan, move.count, address, element)
        for word, places in zip(words, move.words, strict=True):
            _take_apart(word, places, element, bits, layout.vector_length, elements, whole)
    registers = []
    for number in range(layout.registers):
        if number in whole:
            registers.append(whole[number])
            continue
        parts = [elements[number, v] for v in range(layout.vector_length)]
        registers.append(ops.from_elements(parts) if len(parts) > 1 else parts[0])
    return RegisterArray(tuple(registers), layout, memory.dtype)


def load_words(
    plan: Transfer, count: int, address: ir.Value, element: ir.Type | None = None
) -> list[ir.Value]:
    """The registers that one instruction loads: f32 if that is what the elements are, else i32."""
    number = count * plan.shape.words
    is_float = element == ir.F32Type.get()
    names = ", ".join(f"${i}" for i in range(number))
    pack = ".pack::16b" if plan.packs else ""
    words = ops.inline_assembly(
        f"tcgen05.ld.sync.aligned.{plan.shape.name}.x{count}{pack}.b32 {{{names}}}, [${number}];",
        ",".join(["=f" if is_float else "=r"] * number + ["r"]),
        address,
        results=[ir.F32Type.get() if is_float else ops.i32()] * number,
    )
    return [words] if number == 1 else list(words)


def _take_apart(
    word: ir.Value,
    places: Sequence[tuple[int, int]],
    element: ir.Type,
    bits: int,
    vector_length: int,
    elements: dict[tuple[int, int], ir.Value],
    whole: dict[int, ir.Value],
) -> None:
    """Finds the elements in one register that was loaded."""
    if len(places) == 1:
        if bits < CELL_BITS:
            word = ops.cast_integer(word, ir.IntegerType.get_signless(bits))
        elements[places[0]] = ops.bitcast(word, element)
        return
    vector = ops.bitcast(word, types.vector_type(element, len(places)))
    register = places[0][0]
    if len(places) == vector_length and tuple(places) == tuple(
        (register, v) for v in range(vector_length)
    ):
        whole[register] = vector
        return
    for position, place in enumerate(places):
        elements[place] = ops.extract(vector, position)


def _stacked(
    ctx: RuleContext, matrices: Sequence[RegisterArray], batch: tuple[int, ...]
) -> RegisterArray:
    """Matrices one after the other along dimensions in front."""
    first = matrices[0].layout
    assert isinstance(first, RegisterLayout)
    layout = batched(first, batch)
    registers = tuple(itertools.chain.from_iterable(m.registers for m in matrices))
    return RegisterArray(registers, layout, matrices[0].dtype)


def batched(layout: RegisterLayout, batch: tuple[int, ...]) -> RegisterLayout:
    """A layout with dimensions in front along which only register numbers differ."""
    from pallasite.plugin.layouts import Digit, Owner

    step = layout.registers
    dims = []
    for size in reversed(batch):
        dims.append((Digit(size, Owner.REGISTER, step),))
        step *= size
    shape = (*batch, *layout.shape)
    if layout.flat:
        joined = tuple(digit for dim in reversed(dims) for digit in dim) + layout.dims[0]
        return RegisterLayout(shape, (joined,), layout.vector_length, flat=True)
    return RegisterLayout(shape, (*reversed(dims), *layout.dims), layout.vector_length)


# Loads that reduce --------------------------------------------------------------------------------


def _load_reduced(
    ctx: RuleContext, memory: TensorMemoryReference, reduce: str
) -> tuple[RegisterArray, RegisterArray]:
    from pallasite_blackwell.layouts import native

    if len(memory.shape) != 2:
        raise InvalidValueError(
            "a load that reduces is of more than one matrix", got=f"shape {list(memory.shape)}"
        )
    layouts = [native().layout(memory.matrix)] if memory.matrix[1] % 2 == 0 else []
    hint = ctx.layout_hint
    if isinstance(hint, RegisterLayout) and hint.shape == memory.matrix:
        layouts.insert(0, hint)  # What the matrix is used in, if that has whole rows as well.
    layout = plan = None
    for layout in layouts:
        plan = find_transfer(layout, memory.layout, memory.matrix, CELL_BITS)
        if plan is not None and plan.shape.rows == 32 and not plan.packs:
            break
    else:
        plan = None
    if layout is None or plan is None:
        raise InvalidValueError(
            "a load that reduces has whole rows in its lanes",
            got=f"matrix {list(memory.matrix)} in {memory.layout}",
            expected="128 rows in TMEM, an even number of columns, and no layout or"
            " plgpu.Layout.TCGEN05_TMEM_NATIVE",
        )
    dtype = memory.dtype
    is_float = dtype.kind == "f"
    element = types.element_type(dtype)
    operation = reduce[-3:]
    absolute = ".abs" if reduce.startswith("abs") else ""
    suffix = f"{absolute}.NaN.f32" if is_float else ".u32" if dtype.kind == "u" else ".s32"
    reduced: ir.Value | None = None
    elements: dict[tuple[int, int], ir.Value] = {}
    whole: dict[int, ir.Value] = {}
    for move in plan.moves:
        number = move.count * plan.shape.words
        # A single column is reduced by itself: it takes no such instruction.
        if move.count == 1:
            words = load_words(plan, 1, memory.address(move.column, move.lane))
            last = _absolute(words[0]) if absolute else words[0]
        else:
            names = ", ".join(f"${i}" for i in range(number))
            found = ops.inline_assembly(
                f"tcgen05.ld.red.sync.aligned.{plan.shape.name}.x{move.count}.{operation}{suffix}"
                f" {{{names}}}, ${number}, [${number + 1}];",
                ",".join(["=r"] * (number + 1) + ["r"]),
                memory.address(move.column, move.lane),
                results=[ops.i32()] * (number + 1),
            )
            words, last = list(found[:-1]), found[-1]
        for word, places in zip(words, move.words, strict=True):
            _take_apart(word, places, element, CELL_BITS, layout.vector_length, elements, whole)
        value = ops.bitcast(last, element)
        reduced = value if reduced is None else _combined(operation, dtype, reduced, value)
    assert reduced is not None
    registers = []
    for register in range(layout.registers):
        parts = [elements[register, v] for v in range(layout.vector_length)]
        registers.append(ops.from_elements(parts) if len(parts) > 1 else parts[0])
    result = RegisterArray(tuple(registers), layout, dtype)
    rest = layout.reduce((1,))
    return result, RegisterArray((reduced,), rest, dtype)


def _absolute(word: ir.Value) -> ir.Value:
    return ops.bitwise_and(word, 0x7FFFFFFF)


def _combined(operation: str, dtype: Any, x: ir.Value, y: ir.Value) -> ir.Value:
    if dtype.kind == "f":
        return (ops.arith.maximumf if operation == "max" else ops.arith.minimumf)(x, y)
    kinds = {
        ("max", "i"): ops.arith.maxsi,
        ("min", "i"): ops.arith.minsi,
        ("max", "u"): ops.arith.maxui,
        ("min", "u"): ops.arith.minui,
    }
    return kinds[operation, dtype.kind](x, y)


# Stores -------------------------------------------------------------------------------------------


@rules.lowering(prim.async_store_tmem_p, Semantics.LANE, requires=_FEATURE)
def _store(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    destination, value = args_tree.unflatten(operands)
    memory = resolve_tensor_memory(ctx, destination, "ref")
    bits = types.bit_width(memory.dtype)
    if types.is_bool(memory.dtype):
        memory = dataclasses.replace(memory, dtype=np.dtype(np.int8))
        value = _cast(value, ops.arith.extui, 8, np.int8)
    batch = memory.shape[:-2]
    for (index, column), part in zip(
        memory.matrices(), _matrices(ctx, value, memory, batch), strict=True
    ):
        del index
        layout = part.layout
        assert isinstance(layout, RegisterLayout)
        plan = plan_transfer(layout, memory.layout, memory.matrix, bits)
        _store_matrix(memory, part, plan, column)
    return ()


def _matrices(
    ctx: RuleContext, value: RegisterArray, memory: TensorMemoryReference, batch: tuple[int, ...]
) -> list[RegisterArray]:
    """The matrices of a value, in layouts that can be stored."""
    bits = types.bit_width(memory.dtype)
    count = len(memory.matrices())
    if isinstance(value.layout, SplatLayout):
        layout = default_registers(memory.layout, memory.matrix, bits)
        one = RegisterArray.splat(value.scalar, value.dtype, memory.matrix).materialize(layout)
        return [one] * count
    assert isinstance(value.layout, RegisterLayout)
    matrix = _matrix_of(value.layout, memory)
    if matrix is None or find_transfer(matrix, memory.layout, memory.matrix, bits) is None:
        matrix = default_registers(memory.layout, memory.matrix, bits)
        for one_layout in candidates(memory.layout, memory.matrix, bits):
            kind = conversion(value.layout, batched(one_layout, batch)).kind
            if kind is not ConversionKind.SHARED_MEMORY:
                matrix = one_layout
                break
    value = relayout(ctx, value, batched(matrix, batch))
    size = matrix.registers
    return [
        RegisterArray(value.registers[i * size : (i + 1) * size], matrix, value.dtype)
        for i in range(count)
    ]


def _store_matrix(
    memory: TensorMemoryReference, value: RegisterArray, plan: Transfer, column: int
) -> None:
    element = types.element_type(memory.dtype)
    bits = types.bit_width(memory.dtype)
    for move in plan.moves:
        words = [
            _joined(value.registers, places, element, bits, value.vector_length)
            for places in move.words
        ]
        number = len(words)
        names = ", ".join(f"${i + 1}" for i in range(number))
        unpack = ".unpack::16b" if plan.packs else ""
        ops.inline_assembly(
            f"tcgen05.st.sync.aligned.{plan.shape.name}.x{move.count}{unpack}.b32"
            f" [$0], {{{names}}};",
            ",".join(["r"] * (number + 1)),
            memory.address(column + move.column, move.lane),
            *words,
        )


def _joined(
    registers: Sequence[ir.Value],
    places: Sequence[tuple[int, int]],
    element: ir.Type,
    bits: int,
    vector_length: int,
) -> ir.Value:
    """A word (i32) of some elements."""
    first, start = places[0]
    if len(places) == 1:
        value = registers[first] if vector_length == 1 else ops.extract(registers[first], start)
        if bits < CELL_BITS:
            value = ops.bitcast(value, ir.IntegerType.get_signless(bits))
            return ops.cast_integer(value, ops.i32(), signed=False)
        return ops.bitcast(value, ops.i32())
    run = tuple((first, start + i) for i in range(len(places)))
    if tuple(places) == run and vector_length == len(places):
        return ops.bitcast(registers[first], ops.i32())
    if tuple(places) == run:
        return ops.bitcast(ops.slice_vector(registers[first], start, len(places)), ops.i32())
    parts = [
        registers[r] if vector_length == 1 else ops.extract(registers[r], v) for r, v in places
    ]
    return ops.bitcast(ops.from_elements(parts), ops.i32())


# Layouts ------------------------------------------------------------------------------------------


@rules.layout(prim.async_load_tmem_p)
def _load_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


@rules.layout(prim.async_store_tmem_p)
def _store_layout(ctx: LayoutContext, wanted: Any, *, args_tree: Any) -> list[Any]:
    """An array that is stored should come in a layout that can be."""
    target, position = args_tree.unflatten(list(range(len(ctx.avals_in))))
    proposals: list[Any] = [None] * len(ctx.avals_in)
    aval = ctx.avals_in[position]
    layout = memory_layout(ctx.avals_in[target.ref], target.transforms)
    shape = tuple(aval.shape)
    if layout is not None and not layout.is_opaque:
        try:
            matrix = default_registers(layout, shape[-2:], types.bit_width(aval.dtype))
        except InvalidValueError:
            return proposals
        proposals[position] = batched(matrix, shape[:-2])
    return proposals


def memory_layout(aval: Any, transforms: Sequence[Any]) -> Any:
    """The layout of tensor memory behind a reference and its views."""
    layout = getattr(aval, "layout", None)
    for transform in transforms:
        if getattr(transform, "layout", None) is not None:
            layout = transform.layout[0]
    return layout


def _load_results(
    avals_in: Sequence[Any], layouts: Any, *, args_tree: Any, reduce: str | None
) -> list[RegisterLayout | None]:
    """A load makes the layout that a cast asks for, so nothing is fixed."""
    return [None] if reduce is None else [None, None]


_load_layout.result_layouts = _load_results  # type: ignore[attr-defined]
