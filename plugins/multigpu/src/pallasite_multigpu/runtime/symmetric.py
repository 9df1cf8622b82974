"""JAX arrays that lie in the memory which processes share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import ExecutionError, InvalidValueError
from pallasite_multigpu.runtime import exchange, groups, process_groups
from pallasite_multigpu.runtime.heap import Heap

_CUDA_DEVICE = 2
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT = 4


def symmetric_empty(shape: Any, dtype: Any, sharding: Any) -> jax.Array:
    """An array of any content that kernels of other devices reach without a copy.

    Where several processes have one GPU each, its parts lie in the memory that these share, as long
    as it lives; the option ``symmetric_heap`` says how much there is. Every process of the sharding
    has to call this. Elsewhere all arrays can be reached, and it is one as any other.

    A kernel's result lies there if it is an array that lies there, donated and aliased
    (``jax.jit(..., donate_argnums=...)`` and ``input_output_aliases``).

    Args:
      shape: of the whole array.
      dtype: of its elements, of whole bytes.
      sharding: a ``jax.sharding.Sharding``.

    Returns:
      The array.

    Raises:
      InvalidValueError: the dtype or the sharding is none.
      ExecutionError: there is no room, or a process does not come.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        dtype = jnp.dtype(dtype)
        part = sharding.shard_shape(shape)
        devices = tuple(sorted(sharding.device_set, key=lambda one: one.id))
    except (TypeError, AttributeError) as error:
        raise InvalidValueError(
            "symmetric_empty of something that JAX has no array for",
            got=f"shape {shape}, dtype {dtype}, sharding {sharding}",
            expected="a shape, a dtype, and a jax.sharding.Sharding",
        ) from error
    if not groups.is_of_processes(devices) or devices[0].platform not in ("gpu", "cuda"):
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    groups.group_of(devices)
    heap = process_groups.heap()
    local = [one for one in devices if one.process_index == jax.process_index()]
    parts = [] if heap is None else [_array(heap, part, dtype) for _ in local]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def is_symmetric(array: jax.Array) -> bool:
    """Whether kernels of other devices reach an array without a copy."""
    if not exchange.several():
        return True
    heap = process_groups.heap()
    if heap is None:
        return False
    return all(
        heap.begin <= one.data.unsafe_buffer_pointer() < heap.end
        for one in array.addressable_shards
    )


def _array(heap: Heap, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    nbytes = math.prod(shape) * dtype.itemsize
    address = heap.allocate(nbytes, f"a symmetric array of {nbytes} bytes")
    try:
        memory = DeviceMemory(address, shape, dtype, heap.ordinal, lambda: heap.free(address))
        return jax.dlpack.from_dlpack(memory)
    except InvalidValueError:
        heap.free(address)
        raise
    except Exception as error:
        heap.free(address)
        raise ExecutionError(
            "JAX does not take memory of the symmetric heap as an array", got=str(error)
        ) from error


# DLPack (dlpack.h, version 0.8) -------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_alive: dict[int, tuple[Any, Any, Callable[[], None]]] = {}


def _forget(managed: int) -> None:
    _, _, release = _alive.pop(managed)
    release()


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


class DeviceMemory:
    """Memory of a GPU that is not JAX's, for ``from_dlpack``.

    Args:
      address: where it is.
      shape: of the array, row-major.
      dtype: of its elements.
      ordinal: CUDA's number of the GPU.
      release: called when nobody uses it any more.
    """

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        ordinal: int,
        release: Callable[[], None],
        device_type: int = _CUDA_DEVICE,
    ):
        self._device = (device_type, ordinal)
        extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        code = _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind)
        if code is None:
            raise InvalidValueError(
                "a symmetric array has elements that DLPack does not know",
                got=dtype.name,
                expected="integers, floats of 16, 32 or 64 bits, bfloat16, complex or bool",
            )
        managed = _DLManagedTensor()
        tensor = managed.dl_tensor
        tensor.data, tensor.device_type, tensor.device_id = address, device_type, ordinal
        tensor.ndim, tensor.shape, tensor.strides = len(shape), extents, None
        tensor.code, tensor.bits, tensor.lanes = code, dtype.itemsize * 8, 1
        tensor.byte_offset = 0
        managed.deleter = _delete
        self._managed = managed
        self._kept = (managed, extents, release)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        where = ctypes.addressof(self._managed)
        _alive[where] = self._kept
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(where, b"dltensor", None)
