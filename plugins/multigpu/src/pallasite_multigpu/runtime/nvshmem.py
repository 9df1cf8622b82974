"""Memory shared by NVSHMEM: the symmetric heap of its host library, through ``ctypes``.

https://docs.nvidia.com/nvshmem/api: ``nvshmemx_hostlib_init_attr`` with a unique id,
``nvshmem_malloc``, ``nvshmem_ptr``. Its multicast over NVLink stays off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

import jax

from pallasite.plugin import ExecutionError
from pallasite_multigpu.network.package import PACKAGE as PACKAGE
from pallasite_multigpu.network.package import find
from pallasite_multigpu.options import peer_network
from pallasite_multigpu.runtime import exchange
from pallasite_multigpu.runtime.cuda import driver

LIBRARY = "libnvshmem_host.so.3"
_WITH_UNIQUE_ID = 1 << 3
_VERSION = 1 << 16
_ID_BYTES = 128


class _IdArguments(ctypes.Structure):
    """nvshmemx_uniqueid_args_v1."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    """nvshmemx_init_args_v1."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("unique_id", _IdArguments),
        ("content", ctypes.c_char * 96),
    )


class _Attributes(ctypes.Structure):
    """nvshmemx_init_attr_v1."""

    _fields_ = (("version", ctypes.c_int), ("mpi", ctypes.c_void_p), ("arguments", _Arguments))


class NvshmemMemory:
    """NVSHMEM's symmetric heap; all processes of the program allocate it together."""

    name = "nvshmem"

    def __init__(self) -> None:
        self._begin = 0
        self._state = 0

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """Memory of a GPU that can be shared, with zeros; returns its address.

        Raises:
          ExecutionError: NVSHMEM is not there, cannot begin, or has no room.
        """
        nvshmem = library()
        cuda = driver()
        with cuda.on(ordinal):
            _begin(nvshmem)
            found = nvshmem.nvshmem_malloc(ctypes.c_size_t(nbytes))
        if not found:
            raise ExecutionError(
                "NVSHMEM has no room for the memory that processes share", got=f"{nbytes} bytes"
            )
        self._begin = int(found)
        cuda.fill(ordinal, self._begin, nbytes)
        return self._begin

    def tell(self) -> Any:
        """The number of this process."""
        return {"element": jax.process_index()}

    def reach(self, process: int, told: Any) -> int:
        """Where the GPU reaches the memory that another process has allocated; 0 if only by the
        network, and kernels are made for that.

        Raises:
          ExecutionError: its GPU is not connected to this one by NVLink or PCIe.
        """
        found = library().nvshmem_ptr(ctypes.c_void_p(self._begin), ctypes.c_int(told["element"]))
        if not found and peer_network() != "off":
            return 0
        if not found:
            raise ExecutionError(
                "a kernel communicates between GPUs that cannot access each other's memory",
                got=f"the GPUs of processes {jax.process_index()} and {process}",
                expected="GPUs that are connected by NVLink, or by PCIe with peer access",
                hint="PALLASITE_PEER_NETWORK=nvshmem lets kernels copy and signal over other"
                " networks; or leave one of them out of the mesh",
            )
        return int(found)

    def network(self, ordinal: int) -> int:
        """The address of the state of NVSHMEM's device library, if kernels use that, or 0.

        NVSHMEM fills in the state of a module that has nothing else; it is copied from there.

        Raises:
          ExecutionError: NVSHMEM or the driver refuses the module.
        """
        if peer_network() == "off":
            return 0
        if not self._state:
            from pallasite_multigpu.network import library as device_library

            cuda = driver()
            ptx = device_library.state_module("sm_90")
            nbytes = 8 * device_library.state_words(ptx)
            with cuda.on(ordinal):
                module = cuda.load(ptx)
                _check(library().nvshmemx_cumodule_init(module), "nvshmemx_cumodule_init")
                filled = cuda.symbol(module, "nvshmemi_device_state_d")
            state = cuda.allocate(ordinal, nbytes)
            cuda.copy(ordinal, state, filled, nbytes)
            self._state = state
        return self._state


@functools.cache
def library() -> ctypes.CDLL:
    """NVSHMEM's host library.

    Raises:
      ExecutionError: it is not installed, or cannot be loaded.
    """
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    try:
        loaded = ctypes.CDLL(str(_path() or LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ExecutionError(
            "kernels of several processes need NVSHMEM here, which is not there",
            got=str(error),
            expected=f"the package {PACKAGE}",
            hint=f"pip install {PACKAGE}; on one machine, CUDA IPC does without"
            " (PALLASITE_PEER_MEMORY=ipc)",
        ) from error
    loaded.nvshmem_malloc.restype = ctypes.c_void_p
    loaded.nvshmem_ptr.restype = ctypes.c_void_p
    return loaded


def _path() -> pathlib.Path | None:
    return find(LIBRARY)


def is_installed() -> bool:
    """Whether the package is there."""
    return _path() is not None


def _begin(nvshmem: ctypes.CDLL) -> None:
    """Starts NVSHMEM with all processes of the program."""
    rank, count = jax.process_index(), jax.process_count()
    unique = (ctypes.c_ubyte * _ID_BYTES)()
    ctypes.c_int.from_buffer(unique).value = _VERSION + _ID_BYTES
    if rank == 0:
        _check(nvshmem.nvshmemx_get_uniqueid(ctypes.byref(unique)), "nvshmemx_get_uniqueid")
        exchange.tell("nvshmem", bytes(unique).hex())
    try:
        told = bytes.fromhex(exchange.hear("nvshmem"))
    except TimeoutError as error:
        raise ExecutionError(
            "process 0 does not start NVSHMEM",
            expected="that the first kernel that communicates is one of all processes",
        ) from error
    ctypes.memmove(unique, told, _ID_BYTES)
    attributes = _Attributes()
    attributes.version = _VERSION + ctypes.sizeof(_Attributes)
    attributes.arguments.version = _VERSION + ctypes.sizeof(_Arguments)
    attributes.arguments.unique_id.version = _VERSION + ctypes.sizeof(_IdArguments)
    code = nvshmem.nvshmemx_set_attr_uniqueid_args(
        ctypes.c_int(rank),
        ctypes.c_int(count),
        ctypes.byref(unique),
        ctypes.byref(attributes),
    )
    _check(code, "nvshmemx_set_attr_uniqueid_args")
    code = nvshmem.nvshmemx_hostlib_init_attr(
        ctypes.c_uint(_WITH_UNIQUE_ID), ctypes.byref(attributes)
    )
    _check(code, "nvshmemx_hostlib_init_attr")


def _check(code: int, what: str) -> None:
    if code:
        raise ExecutionError(
            "NVSHMEM cannot be started",
            got=f"{what} returns {code}",
            hint="NVSHMEM_DEBUG=INFO makes it say why; on one machine, CUDA IPC does without"
            " (PALLASITE_PEER_MEMORY=ipc)",
        )
