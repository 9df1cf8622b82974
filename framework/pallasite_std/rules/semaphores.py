"""Semaphores: 32-bit counters in global memory that the launch clears.

Semaphores of a scope belong to a block: each block has as many as the estimator found to be live
at once, and scopes that follow one another use the same ones. So a semaphore must be back at zero
when its scope ends; nothing clears it in between. Global semaphores are never given back.

Orders of memory: a signal releases what the thread did before, a wait acquires it, at the scope of
the device; in a kernel that signals semaphores of other devices, at that of the system. PTX ISA 8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import (
    InternalError,
    Resource,
    RuleSet,
    Semantics,
    UnsupportedError,
    manager,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, pointer_type
from pallasite.plugin.language import GMEM, MemorySpace, memory_space_of
from pallasite.plugin.layouts import row_major
from pallasite.plugin.lowering import (
    ArrayParameter,
    Buffer,
    EstimatorContext,
    KernelContext,
    RegisterArray,
    Resources,
    RuleContext,
    StateKey,
    Value,
    nothing,
    resolve,
)
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.primitives import semaphores as prim
from pallasite_std.rules.reductions import shuffle

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)

_BITS = 32
_BYTES = 4

BLOCK_SEMAPHORES = Resource("block_semaphores", unit="semaphores", limited=False)
GLOBAL_SEMAPHORES = Resource("global_semaphores", unit="semaphores", limited=False)
REMOTE_SIGNALS = Resource("remote_signals", unit="signals", limited=False)
"""Signals to semaphores of other devices; plugins whose primitives make some reserve them."""


# Storage ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class SemaphoreMemory:
    """Where one kernel's semaphores are.

    Attributes:
      block: scratch for the semaphores of scopes, ``blocks`` times the peak; None until needed.
      block_top: how many of a block's semaphores the open scopes use.
      everywhere: scratch for the global semaphores; None until needed.
      allocated: for each ``get_global`` by the identity of its reference type, the type itself
        (which keeps the identity from being used again) and its first semaphore.
      global_top: how many global semaphores are given out.
    """

    block: Buffer | None = None
    block_top: int = 0
    everywhere: Buffer | None = None
    allocated: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)
    global_top: int = 0


_SEMAPHORES = StateKey("standard.semaphores", lambda kernel: SemaphoreMemory())


def semaphore_memory(kernel: KernelContext) -> SemaphoreMemory:
    """The kernel's record of its semaphores."""
    return kernel.state(_SEMAPHORES)


def _new_buffer(kernel: KernelContext, count: int) -> Buffer:
    buffer = kernel.launch.new_scratch((count,), np.dtype(np.int32), zeroed=True)
    # A scratch buffer is an operand that shares the memory of a hidden result, and both are
    # parameters; the kernel uses the first.
    for slot in (0, 1):
        kernel.launch.parameter(ArrayParameter(buffer, slot=slot))
    return buffer


def _reference(
    pointer: ir.Value, offset: int, shape: Sequence[int], buffer: Buffer
) -> MemoryReference:
    return MemoryReference(
        pointer=pointer,
        layout=row_major(shape, _BITS),
        dtype=np.dtype(np.int32),
        space=MemorySpace.GMEM,
        alignment=_BYTES,
        offset=offset,
        buffer=buffer,
    )


@contextlib.contextmanager
def block_semaphores(ctx: RuleContext, aval: Any) -> Iterator[MemoryReference]:
    """Semaphores of this block, for the duration of a scope."""
    kernel = ctx.kernel
    launch, geometry = ctx.launch, ctx.kernel.geometry
    memory = semaphore_memory(kernel)
    peak = kernel.estimate.amount(BLOCK_SEMAPHORES)
    offset = memory.block_top
    memory.block_top += math.prod(aval.shape)
    if memory.block_top > peak:
        raise InternalError(
            f"{memory.block_top} semaphores are live, but {peak} were estimated: a resource rule"
            " disagrees with its lowering rule"
        )
    buffer = memory.block
    if buffer is None:
        buffer = memory.block = _new_buffer(kernel, geometry.blocks * peak)
    base = launch.array_pointer(buffer)
    grid = geometry.cuda_grid
    ids = [launch.block_id(dimension) for dimension in range(3)]

    def own_part() -> ir.Value:
        number = ops.add(ops.multiply(ids[2], grid[1]), ids[1])
        number = ops.add(ops.multiply(number, grid[0]), ids[0])
        wide = ops.cast_integer(number, ops.i64(), signed=False)
        return ops.byte_pointer(base, ops.multiply(wide, peak * _BYTES))

    pointer = launch.emit_once("block_semaphores", own_part)
    try:
        yield _reference(pointer, offset, aval.shape, buffer)
    finally:
        memory.block_top = offset


def _check_global(what: Any) -> None:
    is_semaphore = _jax.issubdtype(what.dtype, _jax.semaphore_dtype)
    if not is_semaphore or memory_space_of(what) is not GMEM:
        raise UnsupportedError(
            "get_global of something other than semaphores",
            got=what,
            expected="plgpu.SemaphoreType.REGULAR, or an array of semaphores",
        )


@rules.resources(_jax.get_global_p)
def _get_global_resources(ctx: EstimatorContext, *, what: Any) -> Resources:
    _check_global(what)
    # Never given back, so every call of get_global counts, even those of other branches.
    return Resources(kept={(GLOBAL_SEMAPHORES, object()): math.prod(what.shape)})


@rules.lowering(_jax.get_global_p, *_ALL)
def _get_global(ctx: RuleContext, *, what: Any) -> MemoryReference:
    """The same semaphores whenever this equation is lowered.

    Loops that are unrolled lower an equation several times, and some code is lowered on trial; all
    of them stand for one call of ``get_global``, which is recognised by its parameter object.
    """
    _check_global(what)
    kernel = ctx.kernel
    memory = semaphore_memory(kernel)
    if memory.everywhere is None:
        memory.everywhere = _new_buffer(kernel, kernel.estimate.amount(GLOBAL_SEMAPHORES))
    if id(what) not in memory.allocated:
        memory.allocated[id(what)] = (what, memory.global_top)
        memory.global_top += math.prod(what.shape)
        if memory.global_top > memory.everywhere.shape[0]:
            raise InternalError("more global semaphores than were estimated")
    _, offset = memory.allocated[id(what)]
    buffer = memory.everywhere
    return _reference(ctx.launch.array_pointer(buffer), offset, what.shape, buffer)


@rules.resources(_jax.semaphore_signal_p)
def _signal_resources(
    ctx: EstimatorContext, *operands: Any, args_tree: Any, device_id_type: Any
) -> Resources:
    *_, device, _ = jax.tree.unflatten(args_tree, operands)
    return nothing() if device is None else Resources({REMOTE_SIGNALS: 1})


# Operations -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Waiting:
    """How a kernel waits for semaphores that other devices signal.

    Attributes:
      emit: ``emit(ctx, pointer, amount, decrement)`` emits the wait of one thread for a semaphore
        to reach an amount (i32), which it subtracts if ``decrement``; acquires at the scope of the
        system. None: it polls for ever.
    """

    emit: Callable[[RuleContext, ir.Value, ir.Value, bool], None] | None = None


WAITING = StateKey("standard.waiting", lambda kernel: Waiting())
"""Plugins whose kernels can give up set it before the kernel's body."""


def scope_of(ctx: RuleContext, memory: MemoryReference) -> str:
    """The scope in which a semaphore orders memory: who may signal it or wait for it."""
    far = memory.peer is not None or ctx.kernel.estimate.amount(REMOTE_SIGNALS)
    return "sys" if far else "gpu"


def one_semaphore(ctx: RuleContext, reference: Value, transforms: Any) -> MemoryReference:
    """The semaphore that a reference and its transforms stand for.

    Raises:
      UnsupportedError: they stand for several.
    """
    memory: MemoryReference = resolve(ctx, reference, transforms or ())
    if memory.layout.size != 1:
        raise UnsupportedError(
            f"{ctx.primitive} of {memory.layout.size} semaphores at once", expected="one semaphore"
        )
    return memory


@rules.lowering(_jax.semaphore_signal_p, *_ALL)
def _signal(
    ctx: RuleContext, *operands: Value, args_tree: Any, device_id_type: Any
) -> Sequence[Value]:
    reference, transforms, amount, device, core = jax.tree.unflatten(args_tree, operands)
    if core is not None:
        raise UnsupportedError(
            "semaphore_signal with core_index", hint="a GPU's blocks have no core numbers"
        )
    memory = one_semaphore(ctx, reference, transforms)
    if device is not None:
        raise UnsupportedError(
            "a semaphore of another device is signalled",
            expected="semaphore_signal without device_id",
            hint=manager().remedy("names", "remote_ref"),
        )
    signal(ctx, memory, amount)
    return ()


@rules.lowering(prim.device_signal_p, *_ALL)
def _signal_on_device(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    reference, amount = args_tree.unflatten(operands)
    signal(ctx, one_semaphore(ctx, reference, ()), amount, "gpu")
    return ()


def signal(
    ctx: RuleContext, memory: MemoryReference, amount: Value, scope: str | None = None
) -> None:
    """Emits a signal to one semaphore, on this device or another, after what the thread did."""
    if ctx.auto_barriers:
        # One lane signals for all: what the others did must be done.
        ctx.synchronize()
    scope, pointer = scope or scope_of(ctx, memory), memory.address()
    value = ctx.scalar(amount, ops.i32())
    with ops.when(ctx.leader):
        ops.inline_assembly(
            f"red.release.{scope}.global.add.s32 [$0], $1;",
            "l,r,~{memory}",
            _as_global(pointer),
            value,
        )


def _as_global(pointer: ir.Value) -> ir.Value:
    if pointer.type == pointer_type(1):
        return pointer
    return llvm.addrspacecast(pointer_type(1), pointer)


@rules.lowering(_jax.semaphore_wait_p, *_ALL)
def _wait(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    """One lane spins, then all go on."""
    reference, transforms, amount, decrement = jax.tree.unflatten(args_tree, operands)
    memory = one_semaphore(ctx, reference, transforms)
    _emit_wait(ctx, memory, amount, decrement, scope_of(ctx, memory))
    return ()


@rules.lowering(prim.device_wait_p, *_ALL)
def _wait_on_device(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    reference, amount, decrement = args_tree.unflatten(operands)
    _emit_wait(ctx, one_semaphore(ctx, reference, ()), amount, decrement, "gpu")
    return ()


def _emit_wait(
    ctx: RuleContext, memory: MemoryReference, amount: Value, decrement: Value, scope: str
) -> None:
    value = ctx.scalar(amount, ops.i32())
    pointer = memory.address()
    if isinstance(decrement, RegisterArray):
        decrement = bool(ctx.static_integer(decrement, "the decrement flag of semaphore_wait"))
    emit = ctx.kernel.state(WAITING).emit if scope == "sys" else None
    with ops.when(ctx.leader):
        if emit is not None:
            emit(ctx, _as_global(pointer), value, bool(decrement))
        else:
            text = _take(scope) if decrement else _watch(scope)
            ops.inline_assembly(text, "l,r,~{memory}", pointer, value)
    ctx.synchronize()


def _watch(scope: str) -> str:
    """Polls until the counter has reached a value."""
    return (
        "{ .reg .pred below; .reg .s32 seen;\n\t"
        "POLL_${:uid}:\n\t"
        f"ld.acquire.{scope}.global.s32 seen, [$0];\n\t"
        "setp.lt.s32 below, seen, $1;\n\t"
        "@below bra POLL_${:uid};\n\t}"
    )


def _take(scope: str) -> str:
    """Polls until the counter has reached a value, and subtracts it."""
    return (
        "{ .reg .pred again; .reg .s32 seen, rest, found;\n\t"
        "POLL_${:uid}:\n\t"
        f"ld.relaxed.{scope}.global.s32 seen, [$0];\n\t"
        "setp.lt.s32 again, seen, $1;\n\t"
        "@again bra POLL_${:uid};\n\t"
        "sub.s32 rest, seen, $1;\n\t"
        f"atom.acquire.{scope}.global.cas.b32 found, [$0], seen, rest;\n\t"
        "setp.ne.s32 again, found, seen;\n\t"
        "@again bra POLL_${:uid};\n\t}"
    )


@rules.lowering(_jax.semaphore_read_p, *_ALL)
def _read(ctx: RuleContext, *operands: Value, args_tree: Any) -> RegisterArray:
    """All lanes get the value that one lane saw: it may change while they read."""
    reference, transforms = jax.tree.unflatten(args_tree, operands)
    memory = one_semaphore(ctx, reference, transforms)
    pointer = memory.address()
    seen = ops.inline_assembly(
        f"ld.acquire.{scope_of(ctx, memory)}.global.s32 $0, [$1];",
        "=r,l,~{memory}",
        pointer,
        results=[ops.i32()],
    )
    if ctx.in_warp:
        return RegisterArray.splat(shuffle(seen, "idx", 0), np.int32)
    with ctx.scratch(_BYTES, "scratch for layout changes and reductions") as (scratch, _):
        ctx.synchronize()
        with ops.when(ctx.leader):
            ops.store(seen, scratch, alignment=_BYTES)
        ctx.synchronize()
        return RegisterArray.splat(ops.load(ops.i32(), scratch, alignment=_BYTES), np.int32)
