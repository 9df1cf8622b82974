"""Copies that gather rows of an array in global memory, or scatter them there.

The TMA engine copies four rows at once, whose numbers are in registers (PTX ISA,
``cp.async.bulk.tensor`` with ``.tile::gather4`` and ``.tile::scatter4``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import MemoryLayout, RegisterLayout, Replicated, tiled_specification
from pallasite.plugin.lowering import (
    RegisterArray,
    RuleContext,
    TensorMapParameter,
    Value,
    relayout,
    resolve,
    resolve_barrier,
)
from pallasite_blackwell.targets import targets_with
from pallasite_std.api import (
    MemoryReference,
    acquire_stores,
    copy_gmem_to_smem_p,
    copy_smem_to_gmem_p,
    element_code,
    places_of,
    tensor_copies,
)
from pallasite_std.api import copy_rules as copies

rules = RuleSet()

ROWS = 4
"""Of one instruction."""

INDICES = tiled_specification(((16,), (4,)), (-2,), (Replicated(32),))
INDICES_OF_ALL = tiled_specification(((4,),), (Replicated(4),), (Replicated(32),))
"""Numbers of rows: each warp has those that it copies, or all."""

_WARPS = 4
_MOST_COLUMNS = 256
_LEAST_BYTES = 32
"""Of a part of a row: parts of four rows begin at multiples of 128 bytes."""


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """Which instructions copy rows.

    Attributes:
      columns: of each instruction.
      starts: for each four rows, the element offset in shared memory of each part of columns.
    """

    columns: int
    starts: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=128)
def plan_gather(layout: MemoryLayout) -> GatherPlan:
    """The instructions for all rows of a matrix in shared memory.

    Raises:
      InvalidValueError: no instructions write rows as they lie there.
    """
    count, width = layout.shape
    bits = layout.element_bits
    _check_count(count)
    places = places_of(layout)
    columns = min(layout.contiguous_run(1), _MOST_COLUMNS)
    if layout.swizzle != 16:
        columns = min(columns, layout.swizzle * 8 // bits)
    while columns > 1 and width % columns:
        columns -= 1
    firsts = places[::ROWS, ::columns]
    fits = columns * bits // 8 >= _LEAST_BYTES and bits >= 8
    for row in range(ROWS):
        for column in range(columns) if row == 0 else (0, columns - 1):
            part = places[row::ROWS, column::columns]
            fits = fits and bool((part == firsts + row * columns + column).all())
    if not fits:
        raise InvalidValueError(
            "rows that are gathered or scattered lie in shared memory in another way than the TMA"
            " engine copies them",
            got=str(layout),
            expected="rows one behind the other, or tiles of them: of at least 32 bytes, and of at"
            " most 256 elements",
        )
    return GatherPlan(columns, tuple(tuple(map(int, row)) for row in firsts))


def _check_count(count: int) -> None:
    if count % ROWS:
        raise InvalidValueError(
            "the TMA engine gathers and scatters four rows at a time",
            got=f"{count} rows",
            expected="a multiple of 4",
        )


def _array_of(reference: Any) -> Any:
    """The view that is indexed by an array, or None."""
    for view in getattr(reference, "transforms", ()):
        if getattr(view, "int_indexer_shape", ()):
            return view
    return None


def _indexes_by_arrays(avals: Sequence[Any]) -> bool:
    """Whether a copy has operands that are arrays; without, it selects no rows."""
    return any(isinstance(aval, _jax.ShapedArray) and aval.shape for aval in avals)


def _gathers(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    if not _indexes_by_arrays(avals):
        return False
    source, *_ = params["args_tree"].unflatten(list(avals))
    return params.get("leader_tracked") is None and _array_of(source) is not None


def _scatters(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    if not _indexes_by_arrays(avals):
        return False
    _, destination, *_ = params["args_tree"].unflatten(list(avals))
    return _array_of(destination) is not None


def _parts(reference: Any) -> tuple[Any, Any, Any]:
    """The array of which rows are selected, their numbers, and the slice of columns."""
    (view, *others) = reference.transforms
    shape: Sequence[int] = getattr(view, "shape", ())
    indices: Sequence[Any] = getattr(view, "indices", ())
    if others or len(shape) != 2 or not isinstance(indices[1], _jax.Slice):
        raise UnsupportedError(
            "a copy that gathers or scatters something else than rows of a matrix",
            expected="ref.at[rows, start:stop], of a matrix in global memory",
        )
    numbers, columns = indices
    if columns.stride not in (1, None):
        raise UnsupportedError("rows that are gathered with a stride", got=columns.stride)
    return reference.ref, numbers, columns


def _layout_of(count: int) -> RegisterLayout:
    """How the numbers of rows lie in registers: each warp has those of the rows that it copies."""
    return (INDICES if count % (ROWS * _WARPS) == 0 else INDICES_OF_ALL).layout((count,))


@dataclasses.dataclass(frozen=True)
class _Copy:
    """What a gather and a scatter have in common."""

    plan: GatherPlan
    numbers: RegisterArray
    by_warps: bool
    descriptor: ir.Value
    first_column: ir.Value
    memory: MemoryReference

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return self.memory.layout.size * self.memory.element_bits // 8

    def issue(self, ctx: RuleContext, text: str, constraints: str, *more: ir.Value) -> None:
        """Emits the instructions; the caller elects a lane of each warp, or of the first."""
        address = ops.shared_address(self.memory.address())
        size = self.memory.element_bits // 8
        warps = _WARPS if self.by_warps else 1
        for number, register in enumerate(self.numbers.registers):
            rows = [
                ops.cast_integer(ops.extract(register, row), ops.i32(), signed=False)
                for row in range(ROWS)
            ]
            starts = self.plan.starts[number * warps : (number + 1) * warps]
            for part in range(len(starts[0])):
                offset = _of_warp(ctx, [one[part] * size for one in starts])
                target = ops.add(address, offset)
                column = ops.add(self.first_column, part * self.plan.columns)
                ops.inline_assembly(
                    text, constraints, target, self.descriptor, column, *rows, *more
                )


def _of_warp(ctx: RuleContext, values: Sequence[int]) -> ir.Value | int:
    """The value of this warp."""
    if len(set(values)) == 1:
        return values[0]
    warp, result = ctx.launch.warp_id, ops.i32_constant(values[-1])
    for number, value in reversed(list(enumerate(values[:-1]))):
        is_this = ops.compare("eq", warp, number)
        result = ops.arith.select(is_this, ops.i32_constant(value), result)
    return result


def _prepare(ctx: RuleContext, reference: Any, memory: MemoryReference) -> _Copy:
    base, numbers, columns = _parts(reference)
    array = resolve(ctx, base, pointer=False)
    buffer = array.buffer
    if not isinstance(numbers, RegisterArray) or len(numbers.shape) != 1:
        raise UnsupportedError(
            "rows that are selected by something else than a vector", expected="ref.at[rows, :]"
        )
    if np.dtype(numbers.dtype).kind not in "iu":
        raise InvalidTypeError("numbers of rows", got=numbers.dtype, expected="integers")
    if buffer is None or array.window is None or len(buffer.shape) != 2:
        raise UnsupportedError(
            "rows of something else than a matrix that is an argument of the kernel",
            got=f"shape {list(array.shape)}",
        )
    plan = plan_gather(memory.layout)
    tensor_copies.check_shared_alignment(memory)
    rows, width = buffer.shape
    parameter = TensorMapParameter(
        buffer=buffer,
        element_type=element_code(str(array.dtype)),
        shape=(rows, width),
        strides=(width, 1),
        box=(1, plan.columns),
        swizzle=memory.layout.swizzle,
        location=ctx.location,
    )
    count = numbers.shape[0]
    start = columns.start
    if not isinstance(start, ir.Value | int):
        start = ctx.scalar(start)
    first = ops.i32_constant(start) if isinstance(start, int) else start
    return _Copy(
        plan,
        relayout(ctx, numbers, _layout_of(count)),
        count % (ROWS * _WARPS) == 0,
        tensor_copies.descriptor_address(ctx.launch.parameter(parameter)),
        ops.cast_integer(first, ops.i32()),
        memory,
    )


@rules.lowering(copy_gmem_to_smem_p, Semantics.LANE, requires=("tma_gather",), operands=_gathers)
def _gather(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axes: Any, **params: Any
) -> Sequence[Value]:
    source, destination, barrier, predicate = args_tree.unflatten(operands)
    if collective_axes:
        raise UnsupportedError("a copy that gathers, shared by the blocks of a cluster")
    if barrier is None:
        raise UnsupportedError("a copy that gathers, without a barrier")
    copy = _prepare(ctx, source, resolve(ctx, destination))
    selected = resolve_barrier(ctx, barrier)
    ctx.converge_before_copy()
    wanted = ops.i1_constant(True) if predicate is None else ctx.scalar(predicate)
    size = ops.arith.select(wanted, ops.i32_constant(copy.bytes), ops.i32_constant(0))
    with ops.when(ctx.leader):
        copies.expect(ctx, selected, size)
    with ops.when(ops.arith.andi(_issuers(ctx, copy), wanted)):
        acquire_stores(ctx, resolve(ctx, _parts(source)[0], pointer=False))
        copy.issue(
            ctx,
            "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5, $6}], [$7];",
            "r,l,r,r,r,r,r,r,~{memory}",
            selected.address(),
        )
    return ()


@rules.lowering(copy_smem_to_gmem_p, Semantics.LANE, requires=("tma_scatter",), operands=_scatters)
def _scatter(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    commit_group: bool,
    reduction_op: str | None,
    **params: Any,
) -> Sequence[Value]:
    source, destination, predicate = args_tree.unflatten(operands)
    if reduction_op is not None:
        raise UnsupportedError("a copy that scatters and reduces", got=reduction_op)
    copy = _prepare(ctx, destination, resolve(ctx, source))
    issuers = _issuers(ctx, copy)
    if predicate is not None:
        issuers = ops.arith.andi(issuers, ctx.scalar(predicate))
    with ops.when(issuers):
        acquire_stores(ctx, resolve(ctx, _parts(destination)[0], pointer=False))
        copy.issue(
            ctx,
            "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
            " [$1, {$2, $3, $4, $5, $6}], [$0];",
            "r,l,r,r,r,r,r,~{memory}",
        )
    if commit_group:
        ops.inline_assembly("cp.async.bulk.commit_group;", "~{memory}")
    return ()


@rules.lowering(copy_smem_to_gmem_p, Semantics.LANE, operands=_scatters)
def _no_scatter(ctx: RuleContext, *operands: Value, **params: Any) -> Sequence[Value]:
    raise UnsupportedError(
        f"a copy that scatters rows, which {ctx.target.name} cannot do",
        expected=f"a target that has them: {targets_with('tma_scatter')}",
    )


def _issuers(ctx: RuleContext, copy: _Copy) -> ir.Value:
    """True in a lane of each warp that copies."""
    return ctx.launch.elected_lane if copy.by_warps else ctx.leader


# Layout inference ---------------------------------------------------------------------------------


def _infer(ctx: InferenceContext, params: Any, operands: Sequence[Any], which: int) -> None:
    tree = params["args_tree"]
    references = tree.unflatten(list(operands))
    _, numbers, _ = _parts(references[which])
    _, position, _ = _parts(tree.unflatten(list(range(len(operands))))[which])
    count = ctx.avals_in[position].shape[0]
    _check_count(count)
    ctx.needs(position, numbers, _layout_of(count), "a copy has the numbers of its rows so")

    def check(view: Any) -> float | None:
        plan_gather(view.layout)
        return None

    shared = references[1 - which]
    ctx.propose_height(shared, check)
    ctx.uses(shared, check, "a copy gathers or scatters its rows")


@rules.inference(copy_gmem_to_smem_p, requires=("tma_gather",), operands=_gathers)
def _infer_gather(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> None:
    _infer(ctx, params, operands, 0)


@rules.inference(copy_smem_to_gmem_p, requires=("tma_scatter",), operands=_scatters)
def _infer_scatter(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> None:
    _infer(ctx, params, operands, 1)
