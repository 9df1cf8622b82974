"""The call in JAX programs that copies a device's table: code for the host, made at run time.

A program may not contain addresses, since processes that run the same one compile and cache the
same text. So it names a group of devices by a number, and this handler of XLA's foreign function
interface (``xla/ffi/api/c_api.h``, version 0.4) looks up the table that the present device has in
that group, and copies it to its result on the stream. It is written in LLVM IR, which LLVM compiles
for the host.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import ExecutionError
from pallasite_multigpu.runtime import host_code
from pallasite_multigpu.runtime.cuda import driver

TARGET = "pallasite_multigpu_table"
"""The name of the call; its attribute is ``group``, its result the table."""
MAX_ENTRIES = 4096
"""Tables that a process can have."""
_ENTRY_WORDS = 3

_lock = threading.Lock()

LOOKUP = """
@missing = private constant [52 x i8] c"pallasite: this device has no mailboxes in the mesh\\00"

define private ptr @lookup(ptr %frame, i64 %group, ptr %found) {
entry:
  %api = call ptr @field(ptr %frame, i64 16)
  %context = call ptr @field(ptr %frame, i64 24)
  %asking = alloca [4 x i64]
  store [4 x i64] [i64 28, i64 0, i64 0, i64 0], ptr %asking
  %asking.context = getelementptr i8, ptr %asking, i64 16
  store ptr %context, ptr %asking.context
  %get.ordinal = call ptr @field(ptr %api, i64 184)
  %no.ordinal = call ptr %get.ordinal(ptr %asking)
  %has.ordinal = icmp eq ptr %no.ordinal, null
  br i1 %has.ordinal, label %place, label %refuse

refuse:
  ret ptr %no.ordinal

place:
  %ordinal.place = getelementptr i8, ptr %asking, i64 24
  %ordinal = load i32, ptr %ordinal.place
  %ordinal.wide = sext i32 %ordinal to i64
  %entries = inttoptr i64 ENTRIES to ptr
  %count = load atomic i64, ptr %entries acquire, align 8
  br label %next

next:
  %number = phi i64 [ 0, %place ], [ %following, %other ]
  %over = icmp uge i64 %number, %count
  br i1 %over, label %missing, label %look

missing:
  %error.missing = call ptr @error(ptr %api, ptr @missing)
  ret ptr %error.missing

look:
  %skipped = mul i64 %number, 24
  %offset = add i64 %skipped, 8
  %entry.place = getelementptr i8, ptr %entries, i64 %offset
  %entry.group = load i64, ptr %entry.place
  %entry.ordinal.place = getelementptr i8, ptr %entry.place, i64 8
  %entry.ordinal = load i64, ptr %entry.ordinal.place
  %same.group = icmp eq i64 %entry.group, %group
  %same.ordinal = icmp eq i64 %entry.ordinal, %ordinal.wide
  %same = and i1 %same.group, %same.ordinal
  br i1 %same, label %known, label %other

other:
  %following = add i64 %number, 1
  br label %next

known:
  %table = call ptr @field(ptr %entry.place, i64 16)
  store ptr %table, ptr %found
  ret ptr null
}
"""
"""``lookup`` finds the table of a call frame's device in a group, or returns an error."""

_HANDLER = (
    """
@failed = private constant [50 x i8] c"pallasite: the copy of the table of devices fails\\00"

"""
    + host_code.BEGIN
    + """metadata:
  %about = call ptr @field(ptr %extension, i64 24)
  %major = getelementptr i8, ptr %about, i64 24
  store i32 0, ptr %major
  %minor = getelementptr i8, ptr %about, i64 28
  store i32 4, ptr %minor
  %traits = getelementptr i8, ptr %about, i64 32
  store i32 1, ptr %traits
  ret ptr null

stage:
"""
    + host_code.WHICH_STAGE
    + """  br i1 %executes, label %execute, label %leave

leave:
  ret ptr null

execute:
  %api = call ptr @field(ptr %frame, i64 16)
  %attributes = call ptr @field(ptr %frame, i64 160)
  %attribute = load ptr, ptr %attributes
  %group.place = call ptr @field(ptr %attribute, i64 8)
  %group = load i64, ptr %group.place
  %results = call ptr @field(ptr %frame, i64 112)
  %result = load ptr, ptr %results
  %target = call ptr @field(ptr %result, i64 24)
  %extents = call ptr @field(ptr %result, i64 40)
  %words = load i64, ptr %extents
  %bytes = mul i64 %words, 8
  %source.place = alloca ptr
  %unknown = call ptr @lookup(ptr %frame, i64 %group, ptr %source.place)
  %is.known = icmp eq ptr %unknown, null
  br i1 %is.known, label %copy, label %refuse

refuse:
  ret ptr %unknown

copy:
  %source = load ptr, ptr %source.place
  %stream.place = alloca ptr
  %no.stream = call ptr @stream(ptr %frame, ptr %stream.place)
  %has.stream = icmp eq ptr %no.stream, null
  br i1 %has.stream, label %enqueue, label %refuse.stream

refuse.stream:
  ret ptr %no.stream

enqueue:
  %stream = load ptr, ptr %stream.place
  %code = call i32 @copy(ptr %target, ptr %source, i64 %bytes, ptr %stream)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %done, label %bad

done:
  ret ptr null

bad:
  %error.failed = call ptr @error(ptr %api, ptr @failed)
  ret ptr %error.failed
}
"""
)


class Tables:
    """The tables of this process by group and ordinal of the device, where the handler looks."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint64 * (1 + _ENTRY_WORDS * MAX_ENTRIES))()
        self._known: dict[tuple[int, int], int] = {}

    @property
    def address(self) -> int:
        """Where they are: a count, and for each group, ordinal and address."""
        return ctypes.addressof(self._words)

    def add(self, group: int, ordinal: int, address: int) -> None:
        """Adds the table of a device in a group; adding it again changes nothing.

        Raises:
          ExecutionError: there are too many.
        """
        with _lock:
            if (group, ordinal) in self._known:
                return
            number = len(self._known)
            if number == MAX_ENTRIES:
                raise ExecutionError(
                    "this process has kernels of too many groups of devices",
                    expected=f"at most {MAX_ENTRIES} tables",
                )
            first = 1 + _ENTRY_WORDS * number
            self._words[first : first + _ENTRY_WORDS] = [group, ordinal, address]
            self._known[group, ordinal] = address
            self._words[0] = number + 1


TABLES = Tables()


def lookup() -> str:
    """:data:`LOOKUP`, of the tables of this process."""
    return LOOKUP.replace("ENTRIES", str(TABLES.address))


@functools.cache
def register(platform: str) -> None:
    """Makes the call known to JAX.

    Args:
      platform: ``"cuda"``, or ``"cpu"``, where tables are in the host's memory.

    Raises:
      ExecutionError: the CUDA driver is not there.
    """
    copy = driver().address("cuMemcpyDtoDAsync_v2") if platform == "cuda" else None
    name = f"{TARGET}_{platform}"
    text = host_code.HELPERS + host_code.copying(copy) + lookup() + _HANDLER
    text = text.replace("HANDLER", name)
    handler = host_code.handler(host_code.compiled(text, name))
    jax.ffi.register_ffi_target(
        TARGET, jax.ffi.pycapsule(handler), platform={"cuda": "CUDA"}.get(platform, platform)
    )


def call(group: int, words: int) -> jax.Array:
    """The table of the device that runs the program; traced by JAX, with 64-bit types enabled.

    Args:
      group: the number of the group.
      words: of the table.
    """
    # XLA moves a call out of a loop only if its operands are no smaller than its result.
    unused = jnp.zeros((words,), np.uint64)
    type_ = jax.ShapeDtypeStruct((words,), np.uint64)
    return cast(jax.Array, jax.ffi.ffi_call(TARGET, type_)(unused, group=np.int64(group)))
