"""Stores to all devices, and loads that reduce what they have (PTX ISA, ``multimem``)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext, Value, resolve
from pallasite_multigpu import protocol
from pallasite_multigpu.language import multimem as prim
from pallasite_multigpu.rules.devices import check_all_axes
from pallasite_multigpu.views.peers import everywhere
from pallasite_std.api import MemoryReference, transfers

rules = RuleSet()

_SMALL_FLOATS = {
    np.dtype(ml_dtypes.float8_e5m2): "e5m2",
    np.dtype(ml_dtypes.float8_e4m3fn): "e4m3",
}
_HALVES = {np.dtype(np.float16): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}
_REGISTERS = {32: "r", 64: "l"}


def _memory(
    ctx: RuleContext, reference: Value, axes: Sequence[Hashable], what: str
) -> MemoryReference:
    check_all_axes(ctx.kernel, axes, what)
    own = resolve(ctx, reference)
    protocol.communicates(ctx.kernel, reads=what == "multimem_load_reduce")
    return everywhere(ctx, own, what)


def _words(value: ir.Value, bits: int, count: int) -> list[ir.Value]:
    """A scalar or vector as registers of so many bits."""
    word = types.parse_type(f"i{bits}")
    if count == 1:
        return [ops.bitcast(value, word)]
    vector = ops.bitcast(value, types.vector_type(word, count))
    return [ops.extract(vector, position) for position in range(count)]


def _joined(words: Sequence[ir.Value], kind: ir.Type) -> ir.Value:
    """The inverse of :func:`_words`."""
    return ops.bitcast(words[0] if len(words) == 1 else ops.from_elements(list(words)), kind)


def _bits(kind: ir.Type) -> int:
    """Bits of a scalar or vector type."""
    if isinstance(kind, ir.VectorType):
        return int(kind.shape[0]) * _bits(kind.element_type)
    return int(kind.width)


def _check_width(memory: MemoryReference, bits: int, what: str) -> None:
    """The instructions access at least 32 bits."""
    if bits >= 32:
        return
    raise InvalidValueError(
        f"{what} of {memory.dtype} elements one by one",
        got=f"accesses of {bits} bits",
        expected="at least 32 bits next to each other",
        hint="use arrays whose last dimension is a multiple of 4 bytes",
    )


# Stores -------------------------------------------------------------------------------------------


@rules.lowering(prim.multimem_store_p, Semantics.LANE)
def _store(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axes: tuple[Hashable, ...]
) -> Sequence[Value]:
    value, reference = args_tree.unflatten(operands)
    memory = _memory(ctx, reference, collective_axes, "multimem_store")

    def store(contents: ir.Value, pointer: ir.Value, *, alignment: int) -> None:
        bits = _bits(contents.type)
        _check_width(memory, bits, "multimem_store")
        count = bits // 32
        names = ", ".join(f"${1 + place}" for place in range(count))
        words, register = _words(contents, 32, count), "r"
        if count > 1:
            # Of vectors there are only floats; what they hold does not matter.
            words, register = [ops.bitcast(word, ir.F32Type.get()) for word in words], "f"
            text = f"multimem.st.relaxed.sys.global.v{count}.f32 [$0], {{{names}}};"
        else:
            text = "multimem.st.relaxed.sys.global.b32 [$0], $1;"
        constraints = "l," + f"{register}," * len(words) + "~{memory}"
        ops.inline_assembly(text, constraints, pointer, *words)

    if memory.layout.size == 1:
        # One lane stores for all.
        with ops.when(ctx.leader):
            transfers.store_array(ctx.launch, memory, value, store=store)
    else:
        transfers.store_array(ctx.launch, memory, value, store=store)
    if ctx.auto_barriers:
        ctx.synchronize()
    return ()


@rules.inference(prim.multimem_store_p)
def _infer_store(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    collective_axes: tuple[Hashable, ...],
) -> list[AbstractValue]:
    value, reference = args_tree.unflatten(operands)
    ctx.store(reference, value)
    return []


# Loads --------------------------------------------------------------------------------------------


def _instruction(dtype: np.dtype[Any], operation: str, elements: int) -> tuple[str, int, int]:
    """What loads the next of so many elements: the end of its name, the bits of a register, and how
    many registers it loads."""
    bits = types.bit_width(dtype)
    if dtype == np.float32:
        count = min(elements, 4)
        return f"{operation}{_vector(count)}.f32", 32, count
    if dtype == np.float64:
        return f"{operation}.f64", 64, 1
    if dtype in _HALVES:
        accumulated = ".acc::f32" if operation == "add" else ""
        name = _HALVES[dtype]
        count = min(elements // 2, 4)
        return f"{operation}{accumulated}{_vector(count)}.{name}x2", 32, count
    if dtype in _SMALL_FLOATS:
        accumulated = ".acc::f16" if operation == "add" else ""
        count = min(elements // 4, 4)
        return f"{operation}{accumulated}{_vector(count)}.{_SMALL_FLOATS[dtype]}x4", 32, count
    if operation in ("and", "or", "xor"):
        return f"{operation}.b{bits}", bits, 1
    signed = dtype.kind == "i" and not (bits == 64 and operation == "add")
    return f"{operation}.{'s' if signed else 'u'}{bits}", bits, 1


def _vector(count: int) -> str:
    return f".v{count}" if count > 1 else ""


@rules.lowering(prim.multimem_load_reduce_p, Semantics.LANE)
def _load(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    collective_axes: tuple[Hashable, ...],
    reduction_op: str,
) -> RegisterArray:
    (reference,) = args_tree.unflatten(operands)
    memory = _memory(ctx, reference, collective_axes, "multimem_load_reduce")
    if memory.dtype in _SMALL_FLOATS and ctx.target.compute_capability < (10, 0):
        raise UnsupportedError(
            f"multimem_load_reduce of {memory.dtype} on {ctx.target.name}",
            expected="sm_100a or later for 8-bit floats",
        )
    element = types.bit_width(memory.dtype)

    def load(kind: ir.Type, pointer: ir.Value, *, alignment: int) -> ir.Value:
        width = _bits(kind) // element
        _check_width(memory, _bits(kind), "multimem_load_reduce")
        words: list[ir.Value] = []
        done = 0
        while done < width:
            name, bits, count = _instruction(memory.dtype, reduction_op, width - done)
            place = ops.byte_pointer(pointer, done * element // 8)
            words += _reduced(name, bits, count, place)
            done += bits * count // element
        return _joined(words, kind)

    return transfers.load_array(ctx.launch, memory, ctx.layout_hint, ctx.vector_limit, load=load)


def _reduced(name: str, bits: int, count: int, pointer: ir.Value) -> list[ir.Value]:
    word = types.parse_type(f"i{bits}")
    kind = word
    register = _REGISTERS[bits]
    if name.endswith((".f32", ".f64")):
        kind = types.parse_type(f"f{bits}")
        register = "f" if bits == 32 else "d"
    outputs = ", ".join(f"${place}" for place in range(count))
    target = f"{{{outputs}}}" if count > 1 else outputs
    found = ops.inline_assembly(
        f"multimem.ld_reduce.relaxed.sys.global.{name} {target}, [${count}];",
        f"={register}," * count + "l,~{memory}",
        pointer,
        results=[kind] * count,
    )
    values = [found] if count == 1 else list(found)
    return [ops.bitcast(value, word) for value in values]


@rules.layout(prim.multimem_load_reduce_p)
def _load_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


@rules.inference(prim.multimem_load_reduce_p)
def _infer_load(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    collective_axes: tuple[Hashable, ...],
    reduction_op: str,
) -> AbstractValue:
    (reference,) = args_tree.unflatten(operands)
    result = ctx.result()
    ctx.load(reference, result)
    return result
