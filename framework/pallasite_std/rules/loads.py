"""Loads that check their own speed, and loads and stores under a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import Layout, RegisterLayout, describe
from pallasite.plugin.lowering import (
    LayoutContext,
    RegisterArray,
    RuleContext,
    Value,
    relayout,
)
from pallasite_std.memory.access import AccessPlan, plan_access
from pallasite_std.memory.accesses import orders_stores, require_scalar, write
from pallasite_std.memory.matrix_access import MatrixPlan, plan_transfer
from pallasite_std.memory.matrix_transfers import LOAD, can_move_matrices
from pallasite_std.memory.overwrites import LEADER, order_store
from pallasite_std.memory.padding import fill_padding
from pallasite_std.memory.pieces import piece_of
from pallasite_std.memory.reference_types import MemoryReference, default_layout, fits_memory
from pallasite_std.memory.resolution import resolve
from pallasite_std.memory.transfers import (
    access_addresses,
    from_memory,
    load_array,
    remote_pointer,
    scalar_address,
    to_memory,
)
from pallasite_std.primitives.arrays import load_p

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)

CONFLICT_LIMIT = 4
"""From this factor of bank conflicts on, an optimized access is refused."""


# Checked loads ----------------------------------------------------------------------------------


def check_optimized(
    memory: MemoryReference, layout: Layout, what: str, *, matrices: bool = False
) -> None:
    """Raises if an access of shared memory is much slower than it could be; ``matrices`` tells
    whether it may move matrices (see :mod:`pallasite_std.memory.matrix_access`).

    It is if its accesses take :data:`CONFLICT_LIMIT` times the passes that they need without bank
    conflicts, and another layout would not: memory without holes can always be accessed in its own
    order, other memory is compared with its default layout.

    Raises:
      InvalidValueError: with the layouts of registers and memory.
    """
    if not memory.space.is_shared or not isinstance(layout, RegisterLayout):
        return
    plan = _access_plan(layout, memory, matrices=matrices)
    if plan.conflict_factor < CONFLICT_LIMIT:
        return
    if (
        not memory.layout.is_dense
        and _access_plan(default_layout(memory), memory).wavefronts * 2 > plan.wavefronts
    ):
        return
    raise InvalidValueError(
        f"{what} has bank conflicts: it takes {plan.conflict_factor:.0f} times as long as needed",
        got=f"layout {describe(layout)}, {memory.element_bits}-bit elements of shape"
        f" {list(memory.shape)} in memory laid out as {memory.layout}",
        expected="accesses distributed over the banks of shared memory",
        hint="give the allocation transforms=(TilingTransform(...), SwizzleTransform(...)), use"
        " another layout, or permit it with optimized=False",
    )


def _access_plan(
    layout: RegisterLayout, memory: MemoryReference, *, matrices: bool = False
) -> AccessPlan:
    alignment = min(16, memory.offset_alignment)
    plan = plan_transfer(layout, memory.layout, alignment, matrices=matrices)
    return plan.rows if isinstance(plan, MatrixPlan) else plan


@rules.lowering(load_p, *_ALL)
def _load(ctx: RuleContext, *operands: Value, args_tree: Any, optimized: bool) -> RegisterArray:
    (reference,) = args_tree.unflatten(operands)
    memory = resolve(ctx, reference, other_blocks=True, own_line=True)
    require_scalar(ctx, memory.shape, "reads")
    with memory.at_line:
        array = load_array(ctx.launch, memory, ctx.layout_hint, ctx.vector_limit)
    if optimized:
        matrices = can_move_matrices(ctx.target, memory, LOAD)
        check_optimized(memory, array.layout, "the load", matrices=matrices)
    return array


@rules.layout(load_p)
@rules.layout(_jax.masked_load_p)
def _load_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_load_layout.accesses_memory = lambda operands, results: results[0]  # type: ignore[attr-defined]


# Masked loads and stores ------------------------------------------------------------------------


class _Elements:
    """Elements of memory as the lanes of a register layout see them.

    Args:
      vectors: whether an access is of as many neighbours as lanes hold, instead of one.
    """

    def __init__(
        self,
        ctx: RuleContext,
        memory: MemoryReference,
        layout: RegisterLayout,
        *,
        vectors: bool = False,
    ):
        if memory.element_bits < 8:
            raise UnsupportedError(
                "an access under a mask to elements of less than a byte", got=str(memory.dtype)
            )
        self.bytes = memory.element_bits // 8
        self.layout = layout
        self.launch = ctx.launch
        self.plan = plan_access(layout, memory.layout, self.bytes)
        if vectors and memory.layout.swizzle == 16:
            alignment = max(self.bytes, min(16, memory.offset_alignment))
            plan = plan_access(layout, memory.layout, alignment)
            # Elements behind the last whole vector of a row are not among the accesses.
            self.plan = self.plan if plan.tail else plan
        self.address_of = access_addresses(ctx.launch, memory, self.plan)

    def each(self, function: Callable[[ir.Value, int, int], Any]) -> dict[tuple[int, int], Any]:
        """Calls ``function(address, register, vector element)`` for each element under the mask."""
        results = {}
        for access in self.plan.accesses:
            (part,) = access.parts
            results[part] = function(self.address_of(access), *part)
        return results

    def collect(
        self, function: Callable[[ir.Value, int, int], ir.Value], padding: ir.Value
    ) -> list[ir.Value]:
        """Registers made of the results of :meth:`each`, and of ``padding``."""
        found = self.each(function)
        length = self.layout.vector_length
        return [
            ops.from_elements(
                [found.get((register, element), padding) for element in range(length)]
            )
            for register in range(self.layout.registers)
        ]

    def masks(self, mask: RegisterArray) -> Sequence[ir.Value]:
        """The registers of a mask that leaves out padding, too."""
        return fill_padding(self.launch, mask, ops.constant(0, ops.i1())).registers


def _spread(
    ctx: RuleContext, value: Any, shape: tuple[int, ...], layout: RegisterLayout, what: str
) -> RegisterArray:
    """A scalar or an array of the access's shape, in its layout."""
    if value.shape == ():
        value = RegisterArray.splat(value.scalar, value.dtype, shape)
    if value.shape != shape:
        raise UnsupportedError(
            f"the {what} does not have the shape of what it applies to",
            got=f"shape {list(value.shape)} for {list(shape)}",
            expected="a scalar, or the same shape",
            hint="jax.numpy.broadcast_to",
        )
    return relayout(ctx, value, layout)


def _layout_for(ctx: RuleContext, memory: MemoryReference, *arrays: Any) -> RegisterLayout:
    """The hinted layout, or that of an array that takes part, or the default one."""
    own = [
        array.layout
        for array in arrays
        if array is not None and array.shape == memory.shape and not array.is_splat
    ]
    for layout in (ctx.layout_hint, *own):
        if not isinstance(layout, RegisterLayout):
            continue
        if not layout.flat or fits_memory(layout, memory):
            return layout
    return default_layout(memory, ctx.vector_limit)


def _load_if(
    condition: ir.Value, pointer: ir.Value, memory: MemoryReference, otherwise: ir.Value
) -> ir.Value:
    kind = types.memory_type(memory.dtype)
    operation = scf.IfOp(condition, [otherwise.type], has_else=True)
    with ir.InsertionPoint(operation.then_block):
        value = ops.load(kind, pointer, alignment=memory.element_bits // 8)
        scf.yield_([from_memory(value, memory.dtype)])
    with ir.InsertionPoint(operation.else_block):
        scf.yield_([otherwise])
    result: ir.Value = operation.results[0]
    return result


def _masked_load(
    ctx: RuleContext, memory: MemoryReference, mask: RegisterArray, other: RegisterArray | None
) -> RegisterArray:
    """Elements that the mask leaves out are not accessed; they equal ``other``, or zero."""
    if other is None:
        other = RegisterArray.constant(0, memory.dtype)
    if memory.layout.size == 1:
        value = _load_if(mask.scalar, scalar_address(memory), memory, other.scalar)
        return RegisterArray.splat(value, memory.dtype, memory.shape)
    layout = _layout_for(ctx, memory, mask, other)
    elements = _Elements(ctx, memory, layout)
    masks = elements.masks(_spread(ctx, mask, memory.shape, layout, "mask"))
    others = _spread(ctx, other, memory.shape, layout, "value for masked elements").registers

    def load(pointer: ir.Value, register: int, element: int) -> ir.Value:
        condition = ops.extract(masks[register], element)
        return _load_if(condition, pointer, memory, ops.extract(others[register], element))

    registers = elements.collect(load, ops.constant(0, types.element_type(memory.dtype)))
    return RegisterArray(tuple(registers), layout, memory.dtype)


@rules.lowering(_jax.masked_load_p, *_ALL)
def _masked_load_rule(
    ctx: RuleContext, *operands: Value, args_tree: Any, **params: Any
) -> RegisterArray:
    reference, transforms, mask, other = jax.tree.unflatten(args_tree, operands)
    memory = resolve(ctx, reference, transforms, other_blocks=True, own_line=True)
    require_scalar(ctx, memory.shape, "reads")
    with memory.at_line:
        if mask is None:
            return load_array(ctx.launch, memory, ctx.layout_hint, ctx.vector_limit)
        return _masked_load(ctx, remote_pointer(memory), mask, other)


@rules.lowering(_jax.masked_swap_p, *_ALL)
def _masked_swap_rule(
    ctx: RuleContext, *operands: Value, args_tree: Any, **params: Any
) -> RegisterArray:
    reference, transforms, value, mask = jax.tree.unflatten(args_tree, operands)
    memory = resolve(ctx, reference, transforms, other_blocks=True, own_line=True)
    require_scalar(ctx, memory.shape, "writes")
    with memory.at_line:
        return _masked_swap(ctx, memory, value, mask)


def _masked_swap(
    ctx: RuleContext, memory: MemoryReference, value: RegisterArray, mask: RegisterArray | None
) -> RegisterArray:
    old: RegisterArray = value
    if any(ctx.used):
        if mask is None:
            old = load_array(ctx.launch, memory, None if value.is_splat else value.layout)
        else:
            old = _masked_load(ctx, remote_pointer(memory), mask, value)
    if mask is None:
        write(ctx, memory, value)
        return old
    ordered = orders_stores(ctx, memory)
    if ordered:
        ctx.synchronize()
    else:
        order_store(ctx, memory, _masked_lanes(ctx, memory, value, mask))
    _masked_store(ctx, remote_pointer(memory), value, mask)
    if ordered:
        ctx.synchronize()
    return old


def _masked_lanes(
    ctx: RuleContext, memory: MemoryReference, value: RegisterArray, mask: RegisterArray
) -> Hashable:
    """Which lanes store which elements under a mask."""
    return LEADER if memory.layout.size == 1 else _layout_for(ctx, memory, value, mask)


def _masked_store(
    ctx: RuleContext, memory: MemoryReference, value: RegisterArray, mask: RegisterArray
) -> None:
    size = memory.element_bits // 8
    if memory.layout.size == 1:
        with ops.when(ops.arith.andi(ctx.leader, mask.scalar)):
            ops.store(to_memory(value.scalar, memory.dtype), scalar_address(memory), alignment=size)
        return
    layout = _layout_for(ctx, memory, value, mask)
    elements = _Elements(ctx, memory, layout, vectors=True)
    masks = elements.masks(_spread(ctx, mask, memory.shape, layout, "mask"))
    values = _spread(ctx, value, memory.shape, layout, "value").registers
    values = tuple(to_memory(one, memory.dtype) for one in values)

    def store_single(pointer: ir.Value, place: tuple[int, int]) -> None:
        register, element = place
        with ops.when(ops.extract(masks[register], element)):
            ops.store(ops.extract(values[register], element), pointer, alignment=size)

    for access in elements.plan.accesses:
        pointer = elements.address_of(access)
        if len(access.parts) == 1:
            store_single(pointer, access.parts[0])
            continue
        conditions = [ops.extract(masks[register], element) for register, element in access.parts]
        whole = scf.IfOp(functools.reduce(ops.arith.andi, conditions), has_else=True)
        with ir.InsertionPoint(whole.then_block):
            vector = piece_of(values, access.parts, elements.plan.element_bits)
            ops.store(vector, pointer, alignment=access.bytes(elements.plan))
            scf.yield_([])
        with ir.InsertionPoint(whole.else_block):
            kind = types.memory_type(memory.dtype)
            for number, place in enumerate(access.parts):
                store_single(ops.element_pointer(pointer, number, kind), place)
            scf.yield_([])
