"""Code for the host, made at run time: handlers of XLA's foreign function interface in LLVM IR.

``xla/ffi/api/c_api.h``, version 0.4; offsets of fields are in bytes, on machines with pointers of
64 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import jax
import llvmlite.binding as llvm

_keep: list[object] = []

HELPERS = """
define private ptr @field(ptr %base, i64 %offset) alwaysinline {
  %place = getelementptr i8, ptr %base, i64 %offset
  %value = load ptr, ptr %place
  ret ptr %value
}

define private i64 @word(ptr %base, i64 %number) alwaysinline {
  %offset = mul i64 %number, 8
  %place = getelementptr i8, ptr %base, i64 %offset
  %value = load i64, ptr %place, align 1
  ret i64 %value
}

define private ptr @error(ptr %api, ptr %text) {
  %arguments = alloca [4 x i64]
  store [4 x i64] [i64 28, i64 0, i64 0, i64 13], ptr %arguments
  %message = getelementptr i8, ptr %arguments, i64 16
  store ptr %text, ptr %message
  %create = call ptr @field(ptr %api, i64 48)
  %made = call ptr %create(ptr %arguments)
  ret ptr %made
}
"""
"""``field`` and ``word`` load from a distance, ``error`` makes an XLA_FFI_Error of a text."""

BEGIN = """define ptr @HANDLER(ptr %frame) {
entry:
  %extension = call ptr @field(ptr %frame, i64 8)
  %none = icmp eq ptr %extension, null
  br i1 %none, label %stage, label %asked

asked:  ; Which version this is, and what may be done with it.
  %type.place = getelementptr i8, ptr %extension, i64 8
  %type = load i32, ptr %type.place
  %is.metadata = icmp eq i32 %type, 1
  br i1 %is.metadata, label %metadata, label %stage

"""
"""How a ``HANDLER`` begins: it goes on at ``metadata`` or at ``stage``."""

WHICH_STAGE = """
  %stage.place = getelementptr i8, ptr %frame, i64 32
  %stage.now = load i32, ptr %stage.place
  %executes = icmp eq i32 %stage.now, 3
"""
"""Whether the handler has to do its work now, rather than to prepare it: ``%executes``."""

BEFORE_LAUNCHER = (
    BEGIN
    + """metadata:  ; The launcher answers for both.
  %answering = inttoptr i64 LAUNCHER to ptr
  %answered = call ptr %answering(ptr %frame)
  ret ptr %answered

stage:  ; The launcher gets a frame with the first attribute only.
  %launcher = inttoptr i64 LAUNCHER to ptr
  %changed = alloca [176 x i8], align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %changed, ptr %frame, i64 176, i1 false)
  %attributes.place = getelementptr i8, ptr %changed, i64 136
  store i64 1, ptr %attributes.place
"""
    + WHICH_STAGE
    + """  br i1 %executes, label %execute, label %forward

forward:
  %forwarded = call ptr %launcher(ptr %changed)
  ret ptr %forwarded

"""
)
"""How a ``HANDLER`` begins that stands before one of JAX's launcher, which is at ``LAUNCHER``: what
executes goes on at ``execute``, with ``%changed`` as the frame for the launcher, which gets all
other calls."""

_ON_HOST = """
define private ptr @stream(ptr %frame, ptr %found) alwaysinline {
  store ptr null, ptr %found
  ret ptr null
}

define private i32 @copy(ptr %target, ptr %source, i64 %bytes, ptr %stream) alwaysinline {
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %bytes, i1 false)
  ret i32 0
}
"""

_ON_CUDA = """
define private ptr @stream(ptr %frame, ptr %found) {
  %api = call ptr @field(ptr %frame, i64 16)
  %context = call ptr @field(ptr %frame, i64 24)
  %asking = alloca [4 x i64]
  store [4 x i64] [i64 32, i64 0, i64 0, i64 0], ptr %asking
  %asking.context = getelementptr i8, ptr %asking, i64 16
  store ptr %context, ptr %asking.context
  %get = call ptr @field(ptr %api, i64 80)
  %problem = call ptr %get(ptr %asking)
  %stream = call ptr @field(ptr %asking, i64 24)
  store ptr %stream, ptr %found
  ret ptr %problem
}

define private i32 @copy(ptr %target, ptr %source, i64 %bytes, ptr %stream) {
  %function = inttoptr i64 COPY_FUNCTION to ptr
  %code = call i32 %function(ptr %target, ptr %source, i64 %bytes, ptr %stream)
  ret i32 %code
}
"""


def copying(function: int | None) -> str:
    """Helpers ``stream``, which stores the stream of a call frame, and ``copy``, which copies on
    it; both return 0 or an error.

    Args:
      function: the address of one that copies memory of GPUs, ``cuMemcpyDtoDAsync``; None where
        the memory is the host's.
    """
    return _ON_HOST if function is None else _ON_CUDA.replace("COPY_FUNCTION", str(function))


def compiled(text: str, name: str) -> int:
    """The address of a function for the host, from LLVM IR."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _keep.append(engine)
    address: int = engine.get_function_address(name)
    return address


def handler(address: int) -> Any:
    """A function of a call frame, for ``jax.ffi.pycapsule``; kept as long as the process."""
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    _keep.append(function)
    return function


def register_before(target: str, launcher_stages: Mapping[str, int], text: str) -> None:
    """Makes a call known to JAX, for CUDA, whose handlers stand before those of a launcher.

    Args:
      target: the name of the call.
      launcher_stages: addresses of the launcher's handlers by stage.
      text: of the handler, see :data:`BEFORE_LAUNCHER`, and of what it needs beside
        :data:`HELPERS`.
    """
    made = handlers_before(target, launcher_stages, text)
    capsules = {stage: jax.ffi.pycapsule(handler(at)) for stage, at in made.items()}
    jax.ffi.register_ffi_target(target, capsules, platform="CUDA")


def handlers_before(target: str, launcher_stages: Mapping[str, int], text: str) -> dict[str, int]:
    """Addresses of the handlers of :func:`register_before`, by stage."""
    made = {}
    for stage, address in launcher_stages.items():
        name = f"{target}_{stage}_{address:x}"
        whole = HELPERS + text.replace("LAUNCHER", str(address)).replace("HANDLER", name)
        made[stage] = compiled(whole, name)
    return made
