"""Asynchronous stores to other blocks of a cluster, and the order of dependent kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import ClusterRefTransform
from pallasite.plugin.layouts import RegisterLayout
from pallasite.plugin.lowering import (
    RegisterArray,
    RuleContext,
    Value,
    gather,
    resolve,
    resolve_barrier,
)
from pallasite_std.barriers.emission import hardware_arrivals
from pallasite_std.memory.access import AccessPlan, plan_access
from pallasite_std.memory.elements import once_per_element
from pallasite_std.memory.padding import where_elements
from pallasite_std.memory.reference_types import BarrierReference, MemoryReference, default_layout
from pallasite_std.memory.relayout import relayout
from pallasite_std.memory.resolution import by_table
from pallasite_std.memory.transfers import access_addresses
from pallasite_std.primitives import copies
from pallasite_std.rules.loads import check_optimized
from pallasite_std.rules.references import check_dtype

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)

_COMPLETION = "shared::cluster.mbarrier::complete_tx::bytes"
_SHAPES = {4: (1, 32), 8: (2, 32), 16: (4, 32)}
"""How many words of how many bits a store of so many bytes moves."""


def cluster_address(pointer: ir.Value, rank: ir.Value) -> ir.Value:
    """The cluster-wide address of the same place in the shared memory of another block (i32).

    PTX ISA 9.7.9.23 (``mapa``).
    """
    address: ir.Value = ops.inline_assembly(
        "mapa.shared::cluster.u32 $0, $1, $2;",
        "=r,r,r",
        ops.shared_address(pointer),
        rank,
        results=[ops.i32()],
        side_effects=False,
    )
    return address


@rules.lowering(copies.async_store_smem_p, Semantics.LANE, requires=("cluster", "mbarrier"))
def _async_store_smem(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    cluster_dim: Any,
    optimized: bool,
    atomic: str | None,
    relaxed: bool,
) -> Sequence[Value]:
    """``st.async`` or ``red.async`` (PTX ISA 9.7.9.13, 9.7.13.9), and one arrival of this thread
    on the barrier of the block that is written, which announces the bytes."""
    value, target, barrier, index = args_tree.unflatten(operands)
    memory = resolve(ctx, target, other_blocks=True)
    check_dtype(value, memory.dtype, "the value and the reference differ in dtype")
    if memory.remote is not None:
        raise InvalidValueError(
            "async_store_smem to a cluster_ref", expected="this block's reference: cluster_idx says"
            " which block is written"
        )  # fmt: skip
    remote = by_table(ctx, memory, ClusterRefTransform((cluster_dim,), (index,)))
    assert remote.remote is not None
    resolved = resolve_barrier(ctx, barrier)
    _check_barrier(resolved)
    array = value.materialize(default_layout(memory)) if value.is_splat else value
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    plan = plan_access(layout, memory.layout, min(16, memory.offset_alignment))
    if plan.tail:  # All of these accesses are alike.
        array = relayout(ctx, array, default_layout(memory))
        layout = array.layout
        assert isinstance(layout, RegisterLayout)
        plan = plan_access(layout, memory.layout, min(16, memory.offset_alignment))
    if optimized:
        check_optimized(memory, layout, "the store")
    size = memory.layout.size * memory.element_bits // 8
    if ctx.auto_barriers:
        ctx.synchronize()
    count = hardware_arrivals(ctx, resolved)
    arrived = cluster_address(resolved.pointer(), remote.remote)
    order = "relaxed" if relaxed else "release"
    with ops.when(ctx.leader):
        ops.inline_assembly(
            "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [$0], $1;\n\t"
            f"mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [$0], {count};",
            "r,r,~{memory}",
            arrived,
            ops.i32_constant(size),
        )
    _store(ctx, remote, array, plan, arrived, atomic)
    return ()


def _check_barrier(barrier: BarrierReference) -> None:
    if not barrier.dtype.counts_bytes:
        raise InvalidTypeError(
            "async_store_smem completes on a cluster barrier", expected="a plgpu.Barrier"
        )
    if barrier.dtype.orders:
        raise InvalidValueError(
            "async_store_smem completes on a barrier that orders tensor-core work",
            expected="a plgpu.Barrier without orders_tensor_core",
        )


def _store(
    ctx: RuleContext,
    memory: MemoryReference,
    array: RegisterArray,
    plan: AccessPlan,
    barrier: ir.Value,
    atomic: str | None,
) -> None:
    width = plan.width_bytes
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    suffix = None if atomic is None else _reduction(memory, atomic)
    if suffix is None and width not in _SHAPES:
        raise UnsupportedError(
            f"an asynchronous store of {width} bytes at a time",
            got=f"{memory.dtype}{list(memory.shape)} in memory laid out as {memory.layout}",
            expected="4, 8 or 16 neighbouring bytes in each thread",
            hint="use a layout with longer vectors, or 32-bit elements",
        )
    with once_per_element(ctx.launch, layout):
        address_of = access_addresses(ctx.launch, memory, plan)
        vectors = gather(array.registers, [list(access.parts) for access in plan.accesses])
        for access, vector in zip(plan.accesses, vectors, strict=True):
            assert memory.remote is not None
            with where_elements(ctx.launch, layout, access.guards):
                address = cluster_address(address_of(access), memory.remote)
                if suffix is not None:
                    _reduce(address, vector, barrier, suffix, memory)
                else:
                    _store_words(address, vector, barrier, *_SHAPES[width])


def _store_words(
    address: ir.Value, vector: ir.Value, barrier: ir.Value, count: int, bits: int
) -> None:
    words = ops.bitcast(vector, types.vector_type(types.parse_type(f"i{bits}"), count))
    values = [ops.extract(words, position) for position in range(count)]
    names = ", ".join(f"${position + 2}" for position in range(count))
    form, text = ("", names) if count == 1 else (f".v{count}", f"{{{names}}}")
    ops.inline_assembly(
        f"st.async.weak.{_COMPLETION}{form}.b32 [$0], {text}, [$1];",
        ",".join(["r"] * (2 + count)) + ",~{memory}",
        address,
        barrier,
        *values,
    )


def _reduction(memory: MemoryReference, operation: str) -> str:
    """The operation and type of ``red.async``."""
    signed = types.is_signed(memory.dtype)
    bits = memory.element_bits
    if types.is_integer(memory.dtype) and bits == 32:
        letter = "b" if operation in ("and", "or", "xor") else "s" if signed else "u"
        return f"{operation}.{letter}32"
    if types.is_integer(memory.dtype) and bits == 64 and operation == "add":
        return "add.u64"
    raise UnsupportedError(
        f"an asynchronous {operation} of {memory.dtype} in another block's shared memory",
        expected="32-bit integers, or the sum of 64-bit integers",
        hint="store with atomic=None and combine on the other side",
    )


def _reduce(
    address: ir.Value, vector: ir.Value, barrier: ir.Value, suffix: str, memory: MemoryReference
) -> None:
    size = memory.element_bits // 8
    letter = "r" if size == 4 else "l"
    for position in range(ops.vector_length(vector)):
        ops.inline_assembly(
            f"red.async.relaxed.cluster.{_COMPLETION}.{suffix} [$0], $2, [$1];",
            f"r,r,{letter},~{{memory}}",
            ops.add(address, position * size),
            barrier,
            ops.extract(vector, position),
        )


# Dependent kernels ------------------------------------------------------------------------------
