"""The handler of the call that launches kernels of one process with the table of their device.

A program holds no addresses. To copy the table into an array of the program (:mod:`.copy_table`)
takes a step of the stream by itself, in a loop once in each turn. So a handler stands before those
of JAX's kernel launcher: in place of an operand that stands for the table, it gives the launcher
the table's own address, which stays the same as long as the process lives.
"""

from __future__ import annotations

import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import LaunchRequest, config
from pallasite.plugin.lowering import BufferKind
from pallasite.plugin.runtime import CompiledKernel, validate_launch
from pallasite_multigpu.runtime import copy_table, host_code, workspace_handler

TARGET = "pallasite_multigpu_with_table"
"""The name of the call; its attributes are those of the launcher, and ``table``."""

_HANDLER = (
    "\n"
    + host_code.BEFORE_LAUNCHER
    + """execute:
  %attributes = call ptr @field(ptr %frame, i64 160)
  %span = call ptr @field(ptr %attributes, i64 8)
  %words = load ptr, ptr %span
  %group = call i64 @word(ptr %words, i64 0)
  %number = call i64 @word(ptr %words, i64 1)
  %table.place = alloca ptr
  %unknown = call ptr @lookup(ptr %frame, i64 %group, ptr %table.place)
  %is.known = icmp eq ptr %unknown, null
  br i1 %is.known, label %launch, label %refuse

refuse:
  ret ptr %unknown

launch:
  %table = load ptr, ptr %table.place
  %count = call i64 @word(ptr %frame, i64 7)
  %operands = alloca ptr, i64 %count
  %bytes = mul i64 %count, 8
  %given = call ptr @field(ptr %frame, i64 72)
  call void @llvm.memcpy.p0.p0.i64(ptr %operands, ptr %given, i64 %bytes, i1 false)
  %place = getelementptr ptr, ptr %operands, i64 %number
  %old = load ptr, ptr %place
  %new = alloca [48 x i8], align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %new, ptr %old, i64 48, i1 false)
  %data = getelementptr i8, ptr %new, i64 24
  store ptr %table, ptr %data
  store ptr %new, ptr %place
  %operands.place = getelementptr i8, ptr %changed, i64 72
  store ptr %operands, ptr %operands.place
  %problem = call ptr %launcher(ptr %changed)
  ret ptr %problem
}
"""
)


def launch_with(
    compiled: CompiledKernel, request: LaunchRequest, group: int, table: int
) -> jax.Array | None:
    """Lets a program launch a kernel with the table that the device has in a group.

    Args:
      compiled: the kernel.
      request: how the program calls it; its ``call`` is changed.
      group: the number of the group.
      table: which input of the kernel the table is.

    Returns:
      What stands for the table in the program; None if another executor than JAX's launcher runs
      the kernel.
    """
    if config.get("executor") not in (None, "jax-launcher"):
        return None
    plan = validate_launch(compiled.launch, compiled.name)
    (place,) = (
        number
        for number, buffer in enumerate(plan.operands)
        if buffer.kind is BufferKind.INPUT and buffer.index == table
    )
    register()
    request.call.update(target=TARGET, table=struct.pack("<2q", group, place))
    # A constant that no operation makes: XLA would fill one of equal numbers, or of consecutive
    # ones, at each step.
    words = np.full(compiled.launch.inputs[table].shape, 2**64 - 1, np.uint64)
    words[1::2] = 0
    return jnp.asarray(words)


@functools.cache
def register() -> None:
    """Makes the call known to JAX, for CUDA.

    Raises:
      ExecutionError: JAX's launcher is not there.
    """
    host_code.register_before(TARGET, workspace_handler.launcher_stages(), handler())


def handler() -> str:
    """The handler in LLVM IR, of the tables of this process; see
    :func:`~.host_code.register_before`."""
    return copy_table.lookup() + _HANDLER
