"""NVSHMEM's device library: the functions that kernels call, in LLVM IR, and its state.

The library is 30 MB of bitcode. What is used of it is cut out once and kept in the cache folder.
Its functions read the state of the job from a constant, which a host that loads a module itself
would fill in. JAX's launcher loads kernels, so here that is memory of the kernel's module into
which each block copies the state, from where the runtime has it.

https://docs.nvidia.com/nvshmem/api: put, signal, atomic and ordering operations of device code.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

from pallasite.plugin import StoreNamespace, UnsupportedError, config
from pallasite.plugin.codegen import llvm_module
from pallasite.plugin.runtime import SealedStore
from pallasite_multigpu.network.package import PACKAGE, find
from pallasite_std.api import library_key, link_library, trimmed_library

LIBRARY = "libnvshmem_device.bc"
BEGIN = "pallasite_network_begin"
"""Copies the state: ``void (ptr addrspace(1), i32 thread, i32 threads)``."""
FUNCTIONS = {
    "nvshmem_putmem_nbi": "void (ptr, ptr, i64, i32)",
    "nvshmem_uint64_p": "void (ptr, i64, i32)",
    "nvshmem_uint32_atomic_add": "void (ptr, i32, i32)",
    "nvshmem_uint32_test": "i32 (ptr, i32, i32)",
    "nvshmem_quiet": "void ()",
    "nvshmemx_signal_op": "void (ptr, i64, i32, i32)",
}
"""What kernels call."""
SIGNAL_SET = 9
"""NVSHMEM_SIGNAL_SET: a signal takes the place of the one before."""
GREATER_OR_EQUAL = 5
"""NVSHMEM_CMP_GE."""

LIBRARIES = StoreNamespace(
    name="device-libraries",
    noun="device library",
    nouns="device libraries",
    folder="device-libraries",
    suffix=".ll",
    max_bytes=2**24,
)

_STATE = "nvshmemi_device_state_d"
_STATE_LINE = re.compile(rf"^@{_STATE} = .*global (%\S+) zeroinitializer.*$", re.MULTILINE)
_VERSION_LINE = re.compile(r"^@nvshmemi_device_lib_version_d = .*\n", re.MULTILINE)

_BEGIN = """
define void @BEGIN(ptr addrspace(1) %state, i32 %thread, i32 %threads) alwaysinline {
entry:
  br label %next

next:
  %number = phi i32 [ %thread, %entry ], [ %following, %copy ]
  %bytes = ptrtoint ptr getelementptr (TYPE, ptr null, i32 1) to i64
  %words.wide = lshr i64 %bytes, 3
  %words = trunc i64 %words.wide to i32
  %more = icmp ult i32 %number, %words
  br i1 %more, label %copy, label %done

copy:
  %from = getelementptr i64, ptr addrspace(1) %state, i32 %number
  %word = load i64, ptr addrspace(1) %from, align 8
  %to = getelementptr i64, ptr addrspace(1) @STATE, i32 %number
  store i64 %word, ptr addrspace(1) %to, align 8
  %following = add i32 %number, %threads
  br label %next

done:
  ret void
}
"""


def path() -> pathlib.Path | None:
    """Where the library is; None if it is not installed."""
    return find(LIBRARY)


def required() -> pathlib.Path:
    """Where the library is.

    Raises:
      UnsupportedError: it is not installed.
    """
    place = path()
    if place is None:
        raise UnsupportedError(
            "a kernel whose devices may be of several hosts needs NVSHMEM's device library, which"
            " is not there",
            expected=f"{LIBRARY} of the package {PACKAGE}",
            hint=f"pip install {PACKAGE}, or leave the option peer_network at 'off'",
        )
    return place


@functools.cache
def original() -> str:
    """The functions as the library has them.

    Raises:
      UnsupportedError: the library is not installed.
    """
    bitcode = required().read_bytes()
    key = library_key(bitcode, FUNCTIONS)
    store = SealedStore(config.get("cache_dir"), LIBRARIES) if config.get("cache") else None
    kept = store.get(key) if store is not None else None
    if kept is not None:
        return kept.decode()
    text = trimmed_library(bitcode, FUNCTIONS)
    if store is not None:
        store.put(key, text.encode())
    return text


def for_kernels() -> str:
    """The functions as they are linked to kernels, with their state in global memory."""
    text = _VERSION_LINE.sub("", original())
    found = _STATE_LINE.search(text)
    if found is None:
        return text
    line = f"@{_STATE} = internal addrspace(1) global {found[1]} zeroinitializer, align 8"
    text = _STATE_LINE.sub(line, text).replace("addrspace(4)", "addrspace(1)")
    return text + _BEGIN.replace("BEGIN", BEGIN).replace("TYPE", found[1]).replace("STATE", _STATE)


def state_module(target: str) -> str:
    """PTX of a module with the library's state and its version and nothing else, for the host to
    let NVSHMEM fill it in.

    Args:
      target: as LLVM names it, such as ``"sm_90"``.
    """
    import llvmlite.binding as binding

    lines = original().splitlines()
    kept = [line for line in lines if line.startswith(("@", "%", "target "))]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    with llvm_module(binding.parse_assembly, "\n".join(kept) + "\n") as module:
        triple = binding.Target.from_triple("nvptx64-nvidia-cuda")
        return str(triple.create_target_machine(cpu=target).emit_assembly(module))


def state_words(ptx: str) -> int:
    """Words of 64 bits of the state, by the PTX of :func:`state_module`."""
    found = re.search(rf"\b{_STATE}\[(\d+)\]", ptx)
    return int(found[1]) // 8 if found else 0


def link(module: Any, context: Any) -> Any:
    """The pass: links the library to kernels that call it."""
    if f"@{BEGIN}(" not in context.llvm:
        return False
    link_library(module, context, for_kernels())
    return None
