"""The few functions of the CUDA driver that loading and launching a kernel takes.

They are called in the driver's library directly: its interface is stable, and every process that
uses a GPU has it loaded. The context of the device must be current.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import ExecutionError
from pallasite.plugin.runtime import TENSOR_MAP_BYTES
from pallasite_std.copies.tensor_map_encoding import ELEMENT_BYTES, TensorMapEncoding

MAX_PORTABLE_CLUSTER = 8
_TENSOR_MAP_ALIGNMENT = 64
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
"""``CUfunction_attribute``."""

_pointer, _int, _unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_ARGUMENTS = {
    "cuModuleLoadData": [_pointer, _pointer],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuFuncSetAttribute": [_pointer, _int, _int],
    "cuLaunchKernel": [_pointer, *[_unsigned] * 7, _pointer, _pointer, _pointer],
    "cuTensorMapEncodeTiled": [_pointer, _int, _unsigned, *[_pointer] * 5, *[_int] * 4],
    "cuGetErrorName": [_int, _pointer],
}


@functools.cache
def library() -> Any:
    """The driver's library.

    Raises:
      ExecutionError: there is none, or it is older than TMA descriptors (CUDA 12).
    """
    try:
        found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, _int
    except (OSError, AttributeError) as error:
        raise ExecutionError(
            f"launching kernels on a GPU needs NVIDIA's driver: {error}",
            expected="a driver for CUDA 12 or later",
        ) from error
    return found


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.addressof(name))
    raise ExecutionError(
        f"the CUDA driver cannot {what}",
        got=f"error {status} ({(name.value or b'unknown').decode()})",
    )


def load(image: bytes, name: str, *, shared_memory_bytes: int, blocks_of_cluster: int) -> int:
    """Loads a kernel on the current device; it stays there as long as the process runs.

    Args:
      image: machine code, or PTX.
      name: of the entry point.
      shared_memory_bytes: dynamic shared memory that launches may ask for.
      blocks_of_cluster: how many blocks a cluster has, which the code itself says too.

    Returns:
      The handle of the function.

    Raises:
      ExecutionError: the driver refuses.
    """
    driver = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    text = ctypes.create_string_buffer(image)  # Ends in a zero, which PTX needs.
    status = driver.cuModuleLoadData(ctypes.addressof(module), ctypes.addressof(text))
    _check(status, f"load kernel {name!r}")
    status = driver.cuModuleGetFunction(ctypes.addressof(function), module, name.encode())
    _check(status, f"find kernel {name!r}")
    attributes = [(_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory_bytes)]
    if blocks_of_cluster > MAX_PORTABLE_CLUSTER:
        attributes.append((_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    for attribute, value in attributes:
        status = driver.cuFuncSetAttribute(function, attribute, value)
        _check(status, f"give kernel {name!r} {value} of attribute {attribute}")
    return function.value or 0


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Bytes at an aligned address; ``memory`` keeps them live."""

    memory: Any
    address: int


def _aligned(size: int) -> _Placed:
    memory = ctypes.create_string_buffer(size + _TENSOR_MAP_ALIGNMENT)
    begin = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
    return _Placed(memory, ctypes.addressof(memory) + begin)


def encode_tensor_map(encoding: TensorMapEncoding, pointer: int, name: str) -> bytes:
    """The TMA descriptor of an array at an address (PTX ISA, "Tensor-map"), for kernel ``name``.

    Out-of-bounds elements read as zeros.

    Raises:
      ExecutionError: the driver refuses.
    """
    rank, element = len(encoding.shape), ELEMENT_BYTES[encoding.element_type]
    wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    # The driver's order is minor to major; it takes no stride of the innermost dimension.
    shape = wide(*encoding.shape[::-1])
    strides = wide(*[stride * element for stride in encoding.strides[-2::-1]])
    box, steps = narrow(*encoding.box[::-1]), narrow(*[1] * rank)
    placed = _aligned(TENSOR_MAP_BYTES)
    status = library().cuTensorMapEncodeTiled(
        placed.address,
        encoding.element_type,
        rank,
        pointer,
        *(ctypes.addressof(array) for array in (shape, strides, box, steps)),
        0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
        encoding.swizzle,
        0,  # CU_TENSOR_MAP_L2_PROMOTION_NONE
        0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    )
    _check(status, f"encode a TMA descriptor of kernel {name!r}")
    return ctypes.string_at(placed.address, TENSOR_MAP_BYTES)


def launch(
    function: int,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    shared_memory_bytes: int,
    stream: int,
    parameters: Sequence[bytes],
) -> None:
    """Launches a loaded kernel; ``parameters`` are the bytes of each of its parameters.

    Raises:
      ExecutionError: the driver refuses.
    """
    placed = [_aligned(len(value)) for value in parameters]
    for one, value in zip(placed, parameters, strict=True):
        ctypes.memmove(one.address, value, len(value))
    table = (ctypes.c_void_p * len(placed))(*(one.address for one in placed))
    status = library().cuLaunchKernel(
        function,
        *grid,
        *block,
        shared_memory_bytes,
        stream,
        ctypes.addressof(table),
        None,
    )
    _check(status, f"launch kernel {name!r}")
