"""What lies where in shared memory while a kernel runs.

XLA's memory cannot be shared between processes. So a handler stands before the handlers of JAX's
kernel launcher (:mod:`.workspace_handler`): it copies arrays that peers reach to a *workspace*, the
end of the memory that this process shares with others, lets the launcher launch the kernel there,
and copies results back, all on the stream of the call. Arrays that lie in shared memory already
stay where they are. Kernels of a device follow one another, so all of them use one workspace.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Sequence
from typing import Any

from pallasite.plugin import ExecutionError, LaunchRequest, config
from pallasite.plugin.lowering import Buffer, BufferKind
from pallasite.plugin.runtime import CompiledKernel, nbytes, validate_launch
from pallasite_multigpu.runtime import workspace_handler
from pallasite_multigpu.runtime.heap import Heap

ALIGNMENT = 512
"""Bytes, of arrays in a workspace."""
_COPY_IN, _COPY_OUT = 1, 2


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """An array that is in shared memory while a kernel runs.

    Attributes:
      buffer: its first place among operands and results of the call.
      offset: where it lies in the workspace, in bytes.
      nbytes: its size.
      filled: whether the caller gives its contents.
      returned: whether the caller gets its contents.
    """

    buffer: int
    offset: int
    nbytes: int
    filled: bool
    returned: bool


@dataclasses.dataclass(frozen=True)
class Workspace:
    """What a launch needs of the workspace.

    Attributes:
      nbytes: its size.
      arrays: what lies in it.
      array_of: for each operand and result of the call, which of the arrays it is, or -1.
    """

    nbytes: int
    arrays: tuple[SharedArray, ...]
    array_of: tuple[int, ...]

    @property
    def attribute(self) -> bytes:
        """As the call gets it: words of 64 bits."""
        words = [self.nbytes, len(self.arrays), len(self.array_of)]
        for one in self.arrays:
            copied = _COPY_IN * one.filled | _COPY_OUT * one.returned
            words += [one.buffer, one.offset, one.nbytes, copied]
        words += self.array_of
        return struct.pack(f"<{len(words)}q", *words)


def launch_there(
    compiled: CompiledKernel, request: LaunchRequest, heap: Heap, reached: Collection[Sequence[Any]]
) -> None:
    """Lets a program launch a kernel so that what peers reach is in shared memory meanwhile.

    Args:
      compiled: the kernel.
      request: how the program calls it; its ``call`` is changed.
      heap: the memory that this process shares.
      reached: kinds and numbers of the buffers that peers reach.

    Raises:
      ExecutionError: there is no room; or an executor runs the kernel that is not JAX's launcher.
    """
    executor = config.get("executor")
    if executor not in (None, "jax-launcher"):
        raise ExecutionError(
            f"kernel {compiled.name!r} reaches memory of other processes, where executor"
            f" {executor!r} launches it",
            expected="JAX's launcher: leave the option 'executor' out",
        )
    needed = workspace_of(compiled, {(kind, index) for kind, index in reached})
    if not needed.arrays:
        return
    heap.reserve(needed.nbytes, f"the arrays of kernel {compiled.name!r}")
    workspace_handler.register()
    request.call.update(target=workspace_handler.TARGET, workspace=needed.attribute)


def workspace_of(compiled: CompiledKernel, reached: Collection[tuple[str, int]]) -> Workspace:
    """What a kernel needs of the workspace.

    Args:
      compiled: the kernel.
      reached: kinds and numbers of the buffers that peers reach.
    """
    plan = validate_launch(compiled.launch, compiled.name)
    buffers = [*plan.operands, *plan.results]
    partner = {operand: len(plan.operands) + result for operand, result in plan.aliases}
    members: dict[Any, list[int]] = {}
    for place, buffer in enumerate(buffers):
        shared = partner.get(place, place)
        is_input = buffer.kind is BufferKind.INPUT and shared == place
        members.setdefault(("input", buffer.index) if is_input else shared, []).append(place)
    array_of, arrays, offset = [-1] * len(buffers), list[SharedArray](), 0
    for places in members.values():
        mine = [buffers[place] for place in places]
        size = nbytes(mine[0].shape, mine[0].dtype)
        if not size or not any(_key(one) in reached for one in mine):
            continue
        for place in places:
            array_of[place] = len(arrays)
        filled = any(
            buffers[place].kind is BufferKind.INPUT and place < len(plan.operands)
            for place in places
        )
        returned = any(
            buffers[place].kind is BufferKind.OUTPUT and place >= len(plan.operands)
            for place in places
        )
        arrays.append(SharedArray(places[0], offset, size, filled, returned))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Workspace(offset, tuple(arrays), tuple(array_of))


def _key(buffer: Buffer) -> tuple[str, int]:
    return buffer.kind.value, buffer.index
