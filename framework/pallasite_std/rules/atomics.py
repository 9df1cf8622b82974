"""Atomic updates of memory: ``red`` for every element of an array, exactly once.

PTX ISA 9.7.13.8 (``red``). Updates are relaxed; what orders them are the barriers around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics, UnsupportedError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, gather, resolve
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.accesses import require_scalar
from pallasite_std.memory.array_indices import split_reference, write_at
from pallasite_std.memory.elements import once_per_element
from pallasite_std.memory.padding import where_elements
from pallasite_std.memory.proxies import note_store
from pallasite_std.memory.reference_types import MemoryReference, default_layout, fits_memory
from pallasite_std.memory.relayout import relayout
from pallasite_std.memory.transfers import access_addresses, check_window, scalar_address
from pallasite_std.primitives.arrays import atomic_p
from pallasite_std.rules.references import check_dtype

rules = RuleSet()

_HALVES = {np.dtype(np.float16): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}
_BITWISE = ("and", "or", "xor")
_CONSTRAINTS = {16: "h", 32: "r", 64: "l"}


@dataclasses.dataclass(frozen=True)
class Update:
    """One instruction form.

    Attributes:
      elements: how many consecutive elements it updates.
      suffix: the rest of the instruction's name, from the operation on.
      registers: how many registers the value takes; braces are needed for more than one.
      bits: width of each of them.
    """

    elements: int
    suffix: str
    registers: int
    bits: int


def updates(dtype: Any, operation: str, *, is_global: bool, vectors: bool) -> list[Update]:
    """The forms of ``red`` for a dtype, widest first; none if there are none.

    Maximum and minimum of floats of 32 and 64 bits are not among them, see :func:`_float_order`.

    Args:
      dtype: the element type.
      operation: add, max, min, and, or, xor.
      is_global: whether the memory is global.
      vectors: whether the target has vector forms (compute capability 9.0, global memory only).
    """
    dtype = np.dtype(dtype)
    vectors = vectors and is_global
    if dtype in _HALVES:
        name = _HALVES[dtype]
        if operation in _BITWISE:
            return []
        packed = [Update(n, f"{operation}.noftz.v{n // 2}.{name}x2", n // 2, 32) for n in (8, 4)]
        if operation == "add":
            plain = [
                Update(2, f"add.noftz.{name}x2", 1, 32),
                Update(1, f"add.noftz.{name}", 1, 16),
            ]
            return [*packed, *plain] if vectors else plain
        return [*packed, Update(2, f"{operation}.noftz.v2.{name}", 2, 16)] if vectors else []
    bits = types.bit_width(dtype)
    if types.is_float(dtype):
        if operation != "add" or bits not in (32, 64):
            return []
        wide = [Update(n, f"add.v{n}.f32", n, 32) for n in (4, 2)]
        plain = [Update(1, f"add.f{bits}", 1, bits)]
        return [*wide, *plain] if vectors and bits == 32 else plain
    if not types.is_integer(dtype) or bits not in (32, 64):
        return []
    if operation in _BITWISE:
        return [Update(1, f"{operation}.b{bits}", 1, bits)]
    # There is no signed 64-bit sum; the unsigned one has the same bits.
    signed = types.is_signed(dtype) and not (operation == "add" and bits == 64)
    return [Update(1, f"{operation}.{'s' if signed else 'u'}{bits}", 1, bits)]


def _unsupported(operation: str, memory: MemoryReference) -> UnsupportedError:
    where = "global memory" if memory.space.is_global else "shared memory"
    expected = {
        "add": "32- and 64-bit integers and floats, float16, bfloat16",
        "max": "32- and 64-bit integers and floats; in global memory also pairs of float16 or"
        " bfloat16",
    }
    expected["min"] = expected["max"]
    return UnsupportedError(
        f"atomic_{operation} of {memory.dtype} in {where}",
        expected=expected.get(operation, "integers of 32 or 64 bits"),
        hint="update a reference of a wider dtype",
    )


@rules.lowering(atomic_p, Semantics.LANE, Semantics.WARP)
def _atomic(ctx: RuleContext, *operands: Value, args_tree: Any, operation: str) -> Sequence[Value]:
    reference, value = args_tree.unflatten(operands)
    base, arrays = split_reference(reference)
    if arrays is not None:
        require_scalar(ctx, value.shape, "updates")
        write_at(ctx, base, *arrays, value, lambda memory: _emitter(ctx, memory, operation, 1))
        return ()
    memory = resolve(ctx, reference, other_blocks=True)
    check_dtype(value, memory.dtype, "the value and the reference differ in dtype")
    require_scalar(ctx, memory.shape, "updates")
    check_window(memory)
    note_store(ctx, memory)
    if ctx.auto_barriers:
        ctx.synchronize()
    if memory.layout.size == 1:
        with ops.when(ctx.leader):
            emit = _emitter(ctx, memory, operation, 1)
            emit(scalar_address(memory), value.scalar)
    else:
        update_array(ctx, memory, value, operation)
    if ctx.auto_barriers:
        ctx.synchronize()
    return ()


def update_array(
    ctx: RuleContext, memory: MemoryReference, array: RegisterArray, operation: str
) -> None:
    """Updates every element of memory with that of an array, by its first holder."""
    if array.is_splat:
        array = array.materialize(default_layout(memory))
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    if layout.flat and not fits_memory(layout, memory):
        layout = default_layout(memory)
        array = relayout(ctx, array, layout)
    plan = plan_access(layout, memory.layout, min(16, memory.offset_alignment))
    if plan.tail:  # All of these accesses are alike.
        array = relayout(ctx, array, default_layout(memory))
        layout = array.layout
        assert isinstance(layout, RegisterLayout)
        plan = plan_access(layout, memory.layout, min(16, memory.offset_alignment))
    element = types.memory_type(memory.dtype)
    with once_per_element(ctx.launch, layout):
        emit = _emitter(ctx, memory, operation, plan.width)
        address_of = access_addresses(ctx.launch, memory, plan)
        vectors = gather(array.registers, [list(access.parts) for access in plan.accesses])
        for access, vector in zip(plan.accesses, vectors, strict=True):
            with where_elements(ctx.launch, layout, access.guards):
                pointer = address_of(access)
                for start in range(0, plan.width, emit.elements):
                    part = ops.slice_vector(vector, start, emit.elements)
                    emit(ops.element_pointer(pointer, start, element), part)


def atomic_update(
    ctx: RuleContext, memory: MemoryReference, operation: str
) -> Callable[[ir.Value, ir.Value], None] | None:
    """A function of the address of an element and a value that updates the element atomically;
    None if there is no such instruction."""
    if operation not in ("add", "max", "min", "and", "or", "xor"):
        return None
    try:
        return _emitter(ctx, memory, operation, 1)
    except UnsupportedError:
        return None


class _Emitter:
    """Emits the update of ``elements`` consecutive elements."""

    def __init__(self, memory: MemoryReference, form: Update | None, operation: str, scope: str):
        shared = memory.space.is_shared
        self.elements = 1 if form is None else form.elements
        self.form = form
        self.operation = operation
        self.memory = memory
        space = "global"
        if shared:
            space = "shared::cta" if memory.remote is None else "shared::cluster"
        self.prefix = f"red.relaxed.{scope}.{space}"

    def _address(self, pointer: ir.Value) -> tuple[str, ir.Value]:
        if not self.memory.space.is_shared:
            return "l", pointer
        address = ops.shared_address(pointer)
        if self.memory.remote is not None:
            address = ops.inline_assembly(
                "mapa.shared::cluster.u32 $0, $1, $2;",
                "=r,r,r",
                address,
                self.memory.remote,
                results=[ops.i32()],
                side_effects=False,
            )
        return "r", address

    def __call__(self, pointer: ir.Value, value: ir.Value) -> None:
        letter, address = self._address(pointer)
        if self.form is None:
            text, words = self._float_order(value)
            constraint = _CONSTRAINTS[types.bit_width(self.memory.dtype)]
        else:
            words = _words(value, self.form)
            constraint = _CONSTRAINTS[self.form.bits]
            names = ", ".join(f"${i + 1}" for i in range(len(words)))
            value_text = names if len(words) == 1 else f"{{{names}}}"
            text = f"{self.prefix}.{self.form.suffix} [$0], {value_text};"
        constraints = ",".join([letter, *[constraint] * len(words), "~{memory}"])
        ops.inline_assembly(text, constraints, address, *words)

    def _float_order(self, value: ir.Value) -> tuple[str, list[ir.Value]]:
        """Maximum and minimum of floats by integer ones.

        Non-negative floats are ordered as signed integers, negative ones the other way round as
        unsigned integers. A value that is NaN wins; a NaN in memory wins if it has the sign bit of
        those that this function writes.
        """
        bits = types.bit_width(self.memory.dtype)
        integer = types.parse_type(f"i{bits}")
        is_number = ops.arith.cmpf(ops.arith.CmpFPredicate.ORD, value, value)
        nan = (1 << (bits - 1)) - 1 if self.operation == "max" else -1
        word = ops.bitcast(value, integer)
        word = ops.arith.select(is_number, word, ops.constant(nan, integer))
        opposite = "min" if self.operation == "max" else "max"
        text = (
            "{ .reg .pred positive;\n\t"
            f"setp.ge.s{bits} positive, $1, 0;\n\t"
            f"@positive {self.prefix}.{self.operation}.s{bits} [$0], $1;\n\t"
            f"@!positive {self.prefix}.{opposite}.u{bits} [$0], $1; }}"
        )
        return text, [word]


def _words(value: ir.Value, form: Update) -> list[ir.Value]:
    """A scalar or vector as integer registers of the form's width."""
    word = types.parse_type(f"i{form.bits}")
    if form.registers == 1:
        return [ops.bitcast(value, word)]
    vector = ops.bitcast(value, types.vector_type(word, form.registers))
    return [ops.extract(vector, position) for position in range(form.registers)]


def _emitter(ctx: RuleContext, memory: MemoryReference, operation: str, width: int) -> _Emitter:
    """The widest form for accesses of ``width`` elements."""
    if memory.peer is not None:
        scope = "sys"
    elif memory.remote is not None:
        scope = "cluster"
        ctx.launch.uses_cluster_memory = True
    else:
        scope = "gpu"
    is_global = memory.space.is_global
    if operation in ("max", "min") and memory.dtype in (np.float32, np.float64):
        return _Emitter(memory, None, operation, scope)
    forms = updates(
        memory.dtype,
        operation,
        is_global=is_global,
        vectors=ctx.target.compute_capability >= (9, 0),
    )
    for form in forms:
        if width % form.elements == 0:
            return _Emitter(memory, form, operation, scope)
    raise _unsupported(operation, memory)
