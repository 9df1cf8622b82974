"""The few functions of the CUDA driver that the runtime needs, through ``ctypes``.

https://docs.nvidia.com/cuda/cuda-driver-api: contexts, memory, peer access, memory of other
processes. Nothing here creates multicast objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from pallasite.plugin import ExecutionError

_ALREADY_ENABLED = 704
_PORTABLE_AND_MAPPED = 3
_ENABLE_PEER_ACCESS = 1
HANDLE_BYTES = 64
"""Bytes of what names memory to other processes."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """The driver's library, with errors as exceptions."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: Any, permitted: tuple[int, ...] = ()) -> int:
        """Calls a function of the driver; returns its code, which is 0 or one of ``permitted``.

        Raises:
          ExecutionError: the driver says that something is wrong.
        """
        code = int(getattr(self._library, name)(*arguments))
        if code and code not in permitted:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise ExecutionError(
                f"the CUDA driver's {name} failed",
                got=f"{code}: {(text.value or b'unknown').decode()}",
            )
        return code

    def address(self, name: str) -> int:
        """The address of a function of the driver."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    @contextlib.contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Makes the primary context of a GPU, which JAX uses too, current within a block."""
        if ordinal not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def count(self) -> int:
        """How many GPUs there are."""
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def reaches(self, ordinal: int, peer: int) -> bool:
        """Whether a GPU can access the memory of another one."""
        if ordinal == peer:
            return True
        answer = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(answer), ordinal, peer)
        return bool(answer.value)

    def let_reach(self, ordinal: int, peer: int) -> None:
        """Lets a GPU access the memory of another one."""
        with self.on(peer):
            context = self._contexts[peer]
        with self.on(ordinal):
            self.call("cuCtxEnablePeerAccess", context, 0, permitted=(_ALREADY_ENABLED,))

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """Memory on a GPU that holds zeros; returns its address. It is never freed."""
        pointer = ctypes.c_uint64()
        with self.on(ordinal):
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self.fill(ordinal, pointer.value, nbytes)
        return pointer.value

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        """Copies bytes to memory on a GPU; they are there when this returns."""
        with self.on(ordinal):
            self.call(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(address),
                ctypes.c_char_p(data),
                ctypes.c_size_t(len(data)),
            )

    def fill(self, ordinal: int, address: int, nbytes: int) -> None:
        """Fills memory on a GPU with zeros; they are there when this returns."""
        with self.on(ordinal):
            self.call(
                "cuMemsetD8_v2",
                ctypes.c_uint64(address),
                ctypes.c_ubyte(0),
                ctypes.c_size_t(nbytes),
            )
            self.call("cuCtxSynchronize")

    def handle(self, ordinal: int, address: int) -> bytes:
        """What names memory of :meth:`allocate` to other processes of the machine."""
        found = _Handle()
        with self.on(ordinal):
            self.call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.addressof(found), HANDLE_BYTES)

    def open(self, ordinal: int, handle: bytes) -> int:
        """Where a GPU reaches memory of another process; it is never closed."""
        pointer, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.addressof(given), handle, HANDLE_BYTES)
        with self.on(ordinal):
            self.call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                given,
                ctypes.c_uint(_ENABLE_PEER_ACCESS),
            )
        return pointer.value

    def load(self, ptx: str) -> ctypes.c_void_p:
        """A module in the context that is current; it is never unloaded."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx.encode()))
        return module

    def symbol(self, module: ctypes.c_void_p, name: str) -> int:
        """The address of a variable of a module."""
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
        text = ctypes.c_char_p(name.encode())
        self.call("cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(size), module, text)
        return pointer.value

    def copy(self, ordinal: int, target: int, source: int, nbytes: int) -> None:
        """Copies memory of a GPU; it is there when this returns."""
        with self.on(ordinal):
            self.call(
                "cuMemcpyDtoD_v2",
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(nbytes),
            )
            self.call("cuCtxSynchronize")

    def allocate_pinned(self, nbytes: int) -> int:
        """Host memory that all GPUs reach at the same address and that holds zeros; never freed."""
        pointer = ctypes.c_void_p()
        self.call(
            "cuMemHostAlloc",
            ctypes.byref(pointer),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_PORTABLE_AND_MAPPED),
        )
        address = pointer.value or 0
        ctypes.memset(address, 0, nbytes)
        return address


@functools.cache
def driver() -> Driver:
    """The CUDA driver.

    Raises:
      ExecutionError: it is not there.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ExecutionError(
            "kernels of several GPUs need the CUDA driver, which is not there", got=str(error)
        ) from error
    return Driver(library)
