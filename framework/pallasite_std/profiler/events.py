"""The part of the profiler that runs in the kernel: it records when named regions begin and end.

Each recorder (a warpgroup, or a warp) owns a slot of a hidden result in global memory, whose form
:class:`pallasite_std.profiler.profile.Profile` describes. One lane of the recorder writes; all
lanes keep a cursor, the number of their next event, in a register.

An event costs reading the clock, forming an address, and one store of 8 bytes that nothing waits
for: 4 instructions, two more with the check of bounds. Shared memory is not used, so the kernel's
occupancy is what it is without the profiler. A store that has not arrived yet does delay a fence or
a release at the scope of the device that comes right after it. Nothing moves across an event that
reads or writes memory, which takes some freedom from the compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import ResourceError
from pallasite.plugin.ir import ops, pointer_type
from pallasite.plugin.lowering import Allocation, KernelContext
from pallasite_std.options import KernelOptions, TraceScope
from pallasite_std.profiler.profile import (
    PROFILE_EXIT_BIT,
    PROFILE_HEADER_WORDS,
    PROFILE_RESULT,
)

LARGEST_PROFILE = 2**31
"""Bytes that the profile of one launch can take."""
_WORD = 4
_LAST_CURSOR = 2**31 - 1
_START_TIME, _START_CLOCK, _END_CLOCK, _END_TIME = 8, 16, 20, 24
"""Byte offsets in the header; the count is at 0 and the multiprocessor's number at 4."""


class Profiler:
    """Records the named regions of one kernel; made before its body is lowered."""

    def __init__(self, kernel: KernelContext):
        launch, location = kernel.launch, kernel.location
        params = kernel.params.options_of(KernelOptions)
        per_warp = params.profile_trace_scope is TraceScope.WARP
        self._launch = launch
        self._checked = params.profile_bounds_check
        self._names: dict[str, int] = {}
        self._directory = params.profile_dir
        self._scope = params.profile_trace_scope.value
        self._recorders = launch.geometry.threads * (4 if per_warp else 1)
        self._events = 2 * params.profile_space
        words = PROFILE_HEADER_WORDS + 2 * self._events
        self._slot_bytes = _WORD * words
        slots = launch.geometry.blocks * self._recorders
        size = slots * self._slot_bytes
        if size > LARGEST_PROFILE:
            raise ResourceError(
                f"the profile of kernel {launch.name} is too large",
                got=f"{size} bytes for {slots} {self._scope}s",
                expected=f"at most {LARGEST_PROFILE} bytes",
                hint="a smaller profile_space, or a smaller grid",
                location=location,
            )
        buffer = launch.hidden_result(
            PROFILE_RESULT,
            (slots * words,),
            np.uint32,
            consumer="pallasite_std.profiler.dump:consume",
            arguments=self._arguments,
        )
        what = f"profile: {self._events} events per {self._scope}"
        launch.note(Allocation("gmem", what, size, 0, location))
        self._recorder = launch.block_warp_id if per_warp else launch.warpgroup_id
        self._leader = launch.elected_lane if per_warp else launch.warpgroup_leader
        base, ids = launch.array_pointer(buffer), [launch.block_id(d) for d in range(3)]
        with launch.at_entry():
            self._slot = self._own_slot(base, ids)
            self._cursor = llvm.alloca(
                pointer_type(0), ops.i32_constant(1), ops.i32(), alignment=_WORD
            )
            ops.store(ops.i32_constant(0), self._cursor, alignment=_WORD)
            with ops.when(self._leader):
                multiprocessor = _read("u32", "smid", ops.i32())
                ops.store(multiprocessor, ops.byte_pointer(self._slot, _WORD), alignment=_WORD)
                self._store_now(_START_CLOCK, _START_TIME)

    def _own_slot(self, base: ir.Value, ids: list[ir.Value]) -> ir.Value:
        grid = self._launch.geometry.cuda_grid
        block = ops.add(ops.multiply(ids[2], grid[1]), ids[1])
        block = ops.add(ops.multiply(block, grid[0]), ids[0])
        slot = ops.add(ops.multiply(block, self._recorders), self._recorder)
        wide = ops.cast_integer(slot, ops.i64(), signed=False)
        return ops.byte_pointer(base, ops.multiply(wide, self._slot_bytes))

    def _store_now(self, clock_offset: int, time_offset: int) -> None:
        clock = _read("u32", "clock", ops.i32())
        time = _read("u64", "globaltimer", ops.i64())
        ops.store(clock, ops.byte_pointer(self._slot, clock_offset), alignment=_WORD)
        ops.store(time, ops.byte_pointer(self._slot, time_offset), alignment=8)

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Records that what is emitted inside begins and ends."""
        number = self._names.setdefault(name, len(self._names))
        self._event(number)
        yield
        self._event(number | PROFILE_EXIT_BIT)

    def _event(self, word: int) -> None:
        cursor = ops.load(ops.i32(), self._cursor, alignment=_WORD)
        predicate = self._leader
        following = ops.add(cursor, 1)
        if self._checked:
            fits = ops.compare("ult", cursor, self._events)
            predicate = ops.arith.andi(predicate, fits)
            following = ops.arith.minui(following, ops.i32_constant(_LAST_CURSOR))
        wide = ops.cast_integer(cursor, ops.i64(), signed=False)
        pointer = ops.byte_pointer(self._slot, ops.multiply(wide, 2 * _WORD))
        ops.inline_assembly(
            "{ .reg .b32 event, time;"
            f" mov.b32 event, {word:#x}; mov.u32 time, %clock;"
            f" @$1 st.global.v2.b32 [$0+{_WORD * PROFILE_HEADER_WORDS}], {{event, time}}; }}",
            "l,b,~{memory}",
            pointer,
            predicate,
        )
        ops.store(following, self._cursor, alignment=_WORD)

    def finish(self) -> None:
        """Completes the slot, at the end of the kernel."""
        with ops.when(self._leader):
            cursor = ops.load(ops.i32(), self._cursor, alignment=_WORD)
            ops.store(cursor, self._slot, alignment=_WORD)
            self._store_now(_END_CLOCK, _END_TIME)

    def _arguments(self) -> dict[str, Any]:
        """What the host has to know to read the slots: all of a profile but its output."""
        return {
            "names": list(self._names),
            "scope": self._scope,
            "recorders": self._recorders,
            "events": self._events,
            "directory": self._directory,
        }


def _read(kind: str, register: str, type: ir.Type) -> Any:
    constraint = "=l" if kind == "u64" else "=r"
    return ops.inline_assembly(
        f"mov.{kind} $0, %{register};", f"{constraint},~{{memory}}", results=[type]
    )
