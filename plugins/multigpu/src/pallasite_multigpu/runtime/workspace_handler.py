"""The handler of the call that launches kernels in shared memory; see :mod:`.workspace`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from pallasite.plugin.runtime import launcher
from pallasite_multigpu.runtime import host_code
from pallasite_multigpu.runtime.cuda import driver

TARGET = "pallasite_multigpu_launch"
"""The name of the call; its attributes are those of the launcher, and ``workspace``."""
LAUNCHER = "triton_kernel_call_ffi"

_heap = (ctypes.c_uint64 * 2)()

_HANDLER = (
    """
@missing = private constant [53 x i8] c"pallasite: this process shares no memory with others\\00"
@failed = private constant [46 x i8] c"pallasite: a copy in shared memory has failed\\00"

define private ptr @buffer(ptr %frame, i64 %number) {
  %count = call i64 @word(ptr %frame, i64 7)
  %is.operand = icmp ult i64 %number, %count
  %operands = call ptr @field(ptr %frame, i64 72)
  %results = call ptr @field(ptr %frame, i64 112)
  %rest = sub i64 %number, %count
  %place = select i1 %is.operand, i64 %number, i64 %rest
  %list = select i1 %is.operand, ptr %operands, ptr %results
  %entry = getelementptr ptr, ptr %list, i64 %place
  %found = load ptr, ptr %entry
  ret ptr %found
}

define private i64 @of.array(ptr %plan, i64 %array, i64 %word) alwaysinline {
  %before = mul i64 %array, 4
  %begin = add i64 %before, 3
  %number = add i64 %begin, %word
  %value = call i64 @word(ptr %plan, i64 %number)
  ret i64 %value
}

"""
    + host_code.BEFORE_LAUNCHER
    + """execute:
  %api = call ptr @field(ptr %frame, i64 16)
  %heap = inttoptr i64 HEAP to ptr
  %begin = call i64 @word(ptr %heap, i64 0)
  %end = call i64 @word(ptr %heap, i64 1)
  %no.heap = icmp eq i64 %end, 0
  br i1 %no.heap, label %missing, label %start

missing:
  %error.missing = call ptr @error(ptr %api, ptr @missing)
  ret ptr %error.missing

bad:
  %error.failed = call ptr @error(ptr %api, ptr @failed)
  ret ptr %error.failed

start:
  %stream.place = alloca ptr
  %no.stream = call ptr @stream(ptr %frame, ptr %stream.place)
  %has.stream = icmp eq ptr %no.stream, null
  br i1 %has.stream, label %prepare, label %refuse

refuse:
  ret ptr %no.stream

prepare:
  %stream = load ptr, ptr %stream.place
  %attributes = call ptr @field(ptr %frame, i64 160)
  %span = call ptr @field(ptr %attributes, i64 8)
  %plan = load ptr, ptr %span
  %total = call i64 @word(ptr %plan, i64 0)
  %arrays = call i64 @word(ptr %plan, i64 1)
  %buffers = call i64 @word(ptr %plan, i64 2)
  %base = sub i64 %end, %total
  %places = alloca i64, i64 %arrays
  %copies.words = mul i64 %buffers, 6
  %copies = alloca i64, i64 %copies.words
  %pointers = alloca ptr, i64 %buffers
  br label %arrays.next

arrays.next:  ; Where each array is while the kernel runs; what it holds goes there.
  %array = phi i64 [ 0, %prepare ], [ %array.following, %array.done ]
  %arrays.over = icmp uge i64 %array, %arrays
  br i1 %arrays.over, label %buffers.next, label %array.look

array.look:
  %array.buffer = call i64 @of.array(ptr %plan, i64 %array, i64 0)
  %array.offset = call i64 @of.array(ptr %plan, i64 %array, i64 1)
  %array.bytes = call i64 @of.array(ptr %plan, i64 %array, i64 2)
  %array.copied = call i64 @of.array(ptr %plan, i64 %array, i64 3)
  %array.given = call ptr @buffer(ptr %frame, i64 %array.buffer)
  %array.data = call ptr @field(ptr %array.given, i64 24)
  %array.address = ptrtoint ptr %array.data to i64
  %array.last = add i64 %array.address, %array.bytes
  %array.above = icmp uge i64 %array.address, %begin
  %array.below = icmp ule i64 %array.last, %end
  %array.inside = and i1 %array.above, %array.below
  %array.there = add i64 %base, %array.offset
  %array.place = select i1 %array.inside, i64 %array.address, i64 %array.there
  %array.noted = getelementptr i64, ptr %places, i64 %array
  store i64 %array.place, ptr %array.noted
  %array.in = and i64 %array.copied, 1
  %array.filled = icmp ne i64 %array.in, 0
  %array.outside = xor i1 %array.inside, true
  %array.moves = and i1 %array.filled, %array.outside
  br i1 %array.moves, label %array.copy, label %array.done

array.copy:
  %array.target = inttoptr i64 %array.there to ptr
  %array.code = call i32 @copy(ptr %array.target, ptr %array.data, i64 %array.bytes, ptr %stream)
  %array.bad = icmp ne i32 %array.code, 0
  br i1 %array.bad, label %bad, label %array.done

array.done:
  %array.following = add i64 %array, 1
  br label %arrays.next

buffers.next:  ; The launcher gets these addresses.
  %number = phi i64 [ 0, %arrays.next ], [ %number.following, %number.done ]
  %buffers.over = icmp uge i64 %number, %buffers
  br i1 %buffers.over, label %launch, label %number.look

number.look:
  %number.given = call ptr @buffer(ptr %frame, i64 %number)
  %number.skipped = mul i64 %number, 6
  %number.copy = getelementptr i64, ptr %copies, i64 %number.skipped
  call void @llvm.memcpy.p0.p0.i64(ptr %number.copy, ptr %number.given, i64 48, i1 false)
  %number.pointer = getelementptr ptr, ptr %pointers, i64 %number
  store ptr %number.copy, ptr %number.pointer
  %number.first.0 = mul i64 %arrays, 4
  %number.first.1 = add i64 %number.first.0, %number
  %number.first = add i64 %number.first.1, 3
  %number.array = call i64 @word(ptr %plan, i64 %number.first)
  %number.stays = icmp slt i64 %number.array, 0
  br i1 %number.stays, label %number.done, label %number.move

number.move:
  %number.noted = getelementptr i64, ptr %places, i64 %number.array
  %number.place = load i64, ptr %number.noted
  %number.data = getelementptr i64, ptr %number.copy, i64 3
  store i64 %number.place, ptr %number.data
  br label %number.done

number.done:
  %number.following = add i64 %number, 1
  br label %buffers.next

launch:
  %operands.place = getelementptr i8, ptr %changed, i64 72
  store ptr %pointers, ptr %operands.place
  %operands = call i64 @word(ptr %frame, i64 7)
  %first.result = getelementptr ptr, ptr %pointers, i64 %operands
  %results.place = getelementptr i8, ptr %changed, i64 112
  store ptr %first.result, ptr %results.place
  %problem = call ptr %launcher(ptr %changed)
  %launched = icmp eq ptr %problem, null
  br i1 %launched, label %results.next, label %give.up

give.up:
  ret ptr %problem

results.next:  ; What the kernel has made goes back.
  %result = phi i64 [ 0, %launch ], [ %result.following, %result.done ]
  %results.over = icmp uge i64 %result, %arrays
  br i1 %results.over, label %leave, label %result.look

result.look:
  %result.buffer = call i64 @of.array(ptr %plan, i64 %result, i64 0)
  %result.bytes = call i64 @of.array(ptr %plan, i64 %result, i64 2)
  %result.copied = call i64 @of.array(ptr %plan, i64 %result, i64 3)
  %result.out = and i64 %result.copied, 2
  %result.made = icmp ne i64 %result.out, 0
  %result.given = call ptr @buffer(ptr %frame, i64 %result.buffer)
  %result.data = call ptr @field(ptr %result.given, i64 24)
  %result.noted = getelementptr i64, ptr %places, i64 %result
  %result.place = load i64, ptr %result.noted
  %result.address = ptrtoint ptr %result.data to i64
  %result.elsewhere = icmp ne i64 %result.place, %result.address
  %result.moves = and i1 %result.made, %result.elsewhere
  br i1 %result.moves, label %result.copy, label %result.done

result.copy:
  %result.there = inttoptr i64 %result.place to ptr
  %result.code = call i32 @copy(ptr %result.data, ptr %result.there, i64 %result.bytes, ptr %stream)
  %result.bad = icmp ne i32 %result.code, 0
  br i1 %result.bad, label %bad, label %result.done

result.done:
  %result.following = add i64 %result, 1
  br label %results.next

leave:
  ret ptr null
}
"""
)


def share(begin: int, end: int) -> None:
    """Tells the handler where the memory is that this process shares; the workspace is its end."""
    _heap[0], _heap[1] = begin, end


@functools.cache
def register() -> None:
    """Makes the call known to JAX, for CUDA.

    Raises:
      ExecutionError: JAX's launcher or the CUDA driver is not there.
    """
    copy = driver().address("cuMemcpyDtoDAsync_v2")
    host_code.register_before(TARGET, launcher_stages(), handler(copy))


def launcher_stages() -> dict[str, int]:
    """Addresses of the handlers of JAX's launcher, by stage.

    Raises:
      ExecutionError: it is not there.
    """
    handlers = launcher()._cuda_triton.registrations()[LAUNCHER]
    stages = handlers if isinstance(handlers, Mapping) else {"execute": handlers}
    return {stage: _address(capsule) for stage, capsule in stages.items()}


def handler(copy: int | None) -> str:
    """The handler in LLVM IR, of this process's memory; see :func:`~.host_code.register_before`.

    Args:
      copy: see :func:`~.host_code.copying`.
    """
    return host_code.copying(copy) + _HANDLER.replace("HEAP", str(ctypes.addressof(_heap)))


def _address(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address: int = get(capsule, name(capsule))
    return address
