"""Copies by the TMA engine: descriptors, coordinates, instructions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import MemoryLayout, row_major
from pallasite.plugin.lowering import RuleContext, TensorMapParameter
from pallasite_std.copies.shared_tensor_maps import TensorInstruction, emit_later
from pallasite_std.copies.tensor_map_types import (
    SHARED_ALIGNMENT,
    STRIDE_ALIGNMENT,
    Issue,
    TensorMapPlan,
    WindowDimension,
)
from pallasite_std.copies.tensor_maps import plan_tensor_map, start_alignment
from pallasite_std.memory.divisibility import known_divisor
from pallasite_std.memory.reference_types import MemoryReference, WindowStart


def require_window(ctx: RuleContext, reference: MemoryReference) -> tuple[WindowStart, ...]:
    """The window of the kernel argument that a global reference views.

    Raises:
      UnsupportedError: the view is more than integers and slices.
    """
    if reference.window is None or reference.buffer is None:
        raise UnsupportedError(
            f"{ctx.primitive} works on a window of a kernel argument",
            expected="a reference in global memory with indices and slices only",
            hint="transposes, reshapes and bitcasts go to the shared-memory side",
        )
    return reference.window


@dataclasses.dataclass(frozen=True)
class TensorCopy:
    """A planned copy: the plan, its descriptor argument, and where the window starts."""

    plan: TensorMapPlan
    parameter: TensorMapParameter
    descriptor: ir.Value
    coordinates: tuple[ir.Value, ...]

    def issue_coordinates(self, issue: Issue, moved: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Coordinates of one instruction, minor to major as PTX wants them."""
        result = []
        for position, base in enumerate(self.coordinates):
            value = ops.add(base, issue.coordinates[position])
            shift = moved[position]
            result.append(value if shift is None else ops.add(value, shift))
        packed = 8 // self.plan.element_bits
        if packed > 1:
            # Tensor maps count bytes: see runtime/tensor_maps.py.
            places = ops.i32_constant(packed.bit_length() - 1)
            result[-1] = ops.arith.shrsi(result[-1], places)
        return result[::-1]


def start_value(start: WindowStart) -> ir.Value:
    """Where a window begins along a dimension (i32)."""
    total: ir.Value | None = None
    for part in start.dynamic:
        total = part if total is None else ops.add(total, part)
    return ops.i32_constant(start.static) if total is None else ops.add(total, start.static)


def plan_copy(
    ctx: RuleContext,
    source: MemoryReference,
    shared: MemoryLayout,
    *,
    blocks: int = 1,
    reduction: str | None = None,
) -> TensorCopy:
    """Plans the copy between a window of a kernel argument and shared memory of a layout.

    Args:
      ctx: the rule's context.
      source: the reference in global memory.
      shared: layout of the shared memory, of the same shape.
      blocks: how many blocks share the work by multicast.
      reduction: how a store combines with what is there.

    Raises:
      InvalidValueError: what the TMA engine cannot do.
    """
    window = require_window(ctx, source)
    buffer = source.buffer
    assert buffer is not None
    root = row_major(buffer.shape, source.element_bits)
    strides = [dim[0].stride if dim else 1 for dim in root.dims]
    plan = _plan(
        buffer.shape,
        _unit_strides(buffer.shape, strides),
        str(source.dtype),
        window,
        shared,
        blocks=blocks,
        reduction=reduction,
    )
    _check_begin(plan, window)
    parameter = TensorMapParameter(
        buffer=source.whole or buffer,
        element_type=plan.code,
        shape=plan.shape,
        strides=plan.strides,
        box=plan.box,
        swizzle=plan.swizzle,
        location=ctx.location,
    )
    if source.peer is None:
        descriptor = ctx.launch.parameter(parameter)
    else:
        descriptor = source.peer.descriptor(ctx, parameter)
    coordinates = []
    starts: dict[int, ir.Value] = {}
    for coordinate in plan.coordinates:
        total: ir.Value | None = None
        for term in coordinate.terms:
            if term.dim not in starts:
                starts[term.dim] = start_value(window[term.dim])
            # A window may begin before the array: the quotient of a negative start is negative.
            value = ops.divide_exactly(starts[term.dim], term.divisor)
            value = ops.multiply(value, term.scale)
            total = value if total is None else ops.add(total, value)
        if total is None:
            coordinates.append(ops.i32_constant(coordinate.constant))
        else:
            coordinates.append(ops.add(total, coordinate.constant))
    return TensorCopy(plan, parameter, descriptor, tuple(coordinates))


def _check_begin(plan: TensorMapPlan, window: Sequence[WindowStart]) -> None:
    """Boxes begin at multiples of 16 bytes in the rows of the array: the engine stops at others."""
    begin = plan.coordinates[-1]
    unit = 8 * STRIDE_ALIGNMENT // math.gcd(8 * STRIDE_ALIGNMENT, plan.element_bits)
    behind = begin.constant
    for term in begin.terms:
        start = window[term.dim]
        unknown = any(known_divisor(part) * term.scale % unit for part in start.dynamic)
        if unknown or term.divisor != 1:
            return
        behind += start.static * term.scale
    if rest := behind % unit:
        raise InvalidValueError(
            f"the copy begins {rest * plan.element_bits // 8} bytes behind a multiple of"
            f" {STRIDE_ALIGNMENT} bytes in the rows of the array",
            expected=f"a start that is a multiple of {unit} along the contiguous dimension",
        )


def _plan(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: str,
    window: Sequence[WindowStart],
    shared: MemoryLayout,
    **options: Any,
) -> TensorMapPlan:
    """The plan that is right for every start that the kernel may compute.

    Raises:
      InvalidValueError: there is none; if there were one with starts that are multiples of the
        tiles in shared memory, the message says so.
    """
    dims = [
        WindowDimension(start.static, start.size, start.squeezed)
        if not start.dynamic
        else WindowDimension(None, start.size, start.squeezed, multiple_of=start.divisor)
        for start in window
    ]
    try:
        return plan_tensor_map(shape, strides, dtype, dims, shared, **options)
    except InvalidValueError as error:
        needed = start_alignment(dims, shared)
        unknown = [dim for dim, part in enumerate(dims) if not part.aligned(needed[dim])]
        aligned = [dataclasses.replace(part, multiple_of=None) for part in dims]
        try:
            plan_tensor_map(shape, strides, dtype, aligned, shared, **options)
        except InvalidValueError:
            raise error from None
        unknown = [dim for dim in unknown if dims[dim].start is None]
        raise InvalidValueError(
            f"TMA cannot copy this window from every start along {_dimensions(unknown)}:"
            f" {error.message}",
            got=", ".join(_multiples(dims[dim].multiple_of or 1) for dim in unknown),
            expected=", ".join(_multiples(needed[dim]) for dim in unknown),
            hint="if a start always is one, say so where it is computed: "
            + " and ".join(f"pl.multiple_of(start, {needed[dim]})" for dim in unknown),
        ) from None


def _multiples(divisor: int) -> str:
    return "any number" if divisor == 1 else f"multiples of {divisor}"


def _dimensions(numbers: Sequence[int]) -> str:
    text = " and ".join(map(str, numbers))
    return f"dimension {text}" if len(numbers) == 1 else f"dimensions {text}"


def _unit_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Row-major strides where extents of 1 dropped out of the layout."""
    result = list(strides)
    for dim, extent in enumerate(shape):
        if extent == 1:
            result[dim] = math.prod(shape[dim + 1 :])
    return result


def check_shared_alignment(reference: MemoryReference) -> None:
    """Shared memory of a TMA copy begins at a multiple of 128 bytes.

    The pattern of a swizzle is fixed to addresses, so a copy may begin with any of its rows (which
    128 bytes are at least one of).

    Raises:
      InvalidValueError: it does not.
    """
    needed = SHARED_ALIGNMENT
    if not reference.space.is_shared or reference.offset_alignment % needed:
        raise InvalidValueError(
            "the shared memory of an asynchronous copy is not aligned",
            got=f"a multiple of {reference.offset_alignment} bytes",
            expected=f"a multiple of {needed} bytes",
            hint="index the shared reference by whole rows or tiles of that size",
        )


def issue_load(
    ctx: RuleContext,
    copy: TensorCopy,
    destination: MemoryReference,
    barrier: ir.Value,
    *,
    collective: Sequence[int] = (),
    space: str = "shared::cluster",
    modifier: str = "",
    evict_first: bool = False,
) -> None:
    """Emits the load instructions; the caller elects one lane.

    Args:
      ctx: the rule's context.
      copy: the plan.
      destination: the shared memory.
      barrier: 32-bit shared address of the mbarrier.
      collective: CUDA cluster dimensions whose blocks share the copy by multicast.
      space: the state space of the destination.
      modifier: what a generation adds to the instruction, such as ``.cta_group::2``.
      evict_first: whether the L2 cache gives up first what is read; only without multicast.
    """
    plan = copy.plan
    multicast = plan.blocks > 1
    evict_first = evict_first and not multicast
    address = ops.shared_address(destination.address())
    moved: list[ir.Value | None] = [None] * plan.rank
    if multicast:
        index = ctx.launch.cluster_index(collective)
        for term in plan.block_terms:
            place = ops.remainder_unsigned(ops.divide_unsigned(index, term.divisor), term.modulus)
            step = ops.multiply(place, term.coordinate_step)
            old = moved[term.tensor_dim]
            moved[term.tensor_dim] = step if old is None else ops.add(old, step)
            bits = plan.element_bits
            address = ops.add(address, ops.multiply(place, term.shared_stride * bits // 8))
    rank = plan.rank
    names = ", ".join(f"${2 + i}" for i in range(rank))
    suffix = ".multicast::cluster" if multicast else ""
    hint = ".L2::cache_hint" if evict_first else ""
    last = f", ${3 + rank};" if multicast or evict_first else ";"
    text = (
        f"cp.async.bulk.tensor.{rank}d.{space}.global.mbarrier::complete_tx::bytes"
        f"{suffix}{modifier}{hint} [$0], [$1, {{{names}}}], [${2 + rank}]{last}"
    )
    kind = "h," if multicast else "l," if evict_first else ""
    constraints = "r,l," + "r," * (rank + 1) + kind + "~{memory}"
    extra = [ctx.launch.multicast_mask(collective)] if multicast else []
    if evict_first:
        extra = [_evict_first_policy()]
    for issue in plan.issues:
        target = ops.add(address, issue.shared_offset * plan.element_bits // 8)
        operands = (
            target,
            descriptor_address(copy.descriptor),
            *copy.issue_coordinates(issue, moved),
            barrier,
            *extra,
        )
        emit_later(
            ctx.kernel,
            TensorInstruction(text, constraints, operands, copy.parameter, shared=0, coordinates=2),
        )


def _evict_first_policy() -> ir.Value:
    """The policy of what the L2 cache gives up first: PTX ISA, ``createpolicy``."""
    policy: ir.Value = ops.inline_assembly(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        "=l",
        results=[ops.i64()],
        side_effects=False,
    )
    return policy


def descriptor_address(descriptor: ir.Value) -> ir.Value:
    """The 64-bit generic address of a descriptor in parameter space."""
    return llvm.ptrtoint(ops.i64(), descriptor)


def issue_store(
    ctx: RuleContext, copy: TensorCopy, source: MemoryReference, operator: str | None
) -> None:
    """Emits the store instructions; the caller elects one lane and commits the group."""
    plan = copy.plan
    address = ops.shared_address(source.address())
    rank = plan.rank
    names = ", ".join(f"${2 + i}" for i in range(rank))
    if operator is None:
        name = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    else:
        name = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operator}.tile.bulk_group"
    for issue in plan.issues:
        operands = (
            ops.add(address, issue.shared_offset * plan.element_bits // 8),
            descriptor_address(copy.descriptor),
            *copy.issue_coordinates(issue, [None] * rank),
        )
        emit_later(
            ctx.kernel,
            TensorInstruction(
                f"{name} [$1, {{{names}}}], [$0];",
                "r,l," + "r," * rank + "~{memory}",
                operands,
                copy.parameter,
                shared=0,
                coordinates=2,
            ),
        )


def issue_prefetch(
    ctx: RuleContext, copy: TensorCopy, collective: Sequence[int], blocks: int
) -> None:
    """Emits prefetches to L2; the issues are distributed over the blocks that share the work."""
    plan = copy.plan
    rank = plan.rank
    names = ", ".join(f"${1 + i}" for i in range(rank))
    text = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [$0, {{{names}}}];"
    index: Any = ctx.launch.cluster_index(collective) if blocks > 1 else None
    for number, issue in enumerate(plan.issues):
        coordinates = copy.issue_coordinates(issue, [None] * rank)
        arguments = (descriptor_address(copy.descriptor), *coordinates)
        constraints = "l," + "r," * rank + "~{memory}"
        instruction = TensorInstruction(
            text, constraints, arguments, copy.parameter, shared=None, coordinates=1
        )
        if index is None:
            emit_later(ctx.kernel, instruction)
        else:
            with ops.when(ops.compare("eq", index, number % blocks)):
                emit_later(ctx.kernel, instruction)
