"""What the launching of kernels from PyTorch needs of tensors, without importing PyTorch first."""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallasite.plugin import ExecutionError, InvalidTypeError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.lowering import PACKED_BITS

ALIGNMENT = 16
"""Bytes. What vector accesses and TMA rely on."""


def import_torch() -> Any:
    """PyTorch.

    Raises:
      ExecutionError: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ExecutionError(
            f"PyTorch cannot be imported: {error}", hint="pip install pallasite[torch]"
        ) from error


def torch_dtype(dtype: Any) -> Any:
    """PyTorch's dtype of the same name as that of NumPy or ml_dtypes.

    Raises:
      UnsupportedError: it has none.
    """
    name = np.dtype(dtype).name
    found = None if name in PACKED_BITS else getattr(import_torch(), name, None)
    if found is None:
        raise UnsupportedError(f"tensors of PyTorch do not hold elements of dtype {name}")
    return found


def tensor_type(tensor: Any, what: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and NumPy dtype of a tensor.

    Raises:
      InvalidTypeError: it is no tensor.
      UnsupportedError: JAX has no such dtype, or packs it.
    """
    if not all(hasattr(tensor, name) for name in ("shape", "dtype", "device", "data_ptr")):
        raise InvalidTypeError(
            f"{what} is not a tensor",
            got=f"{type(tensor).__name__}: {tensor!r}",
            expected="a torch.Tensor",
            location=_jax.current_user_location(),
        )
    name = str(tensor.dtype).rpartition(".")[2]
    try:
        dtype = np.dtype(jnp.dtype(name))
        known = dtype.name not in PACKED_BITS
    except TypeError:
        known = False
    if not known:
        raise UnsupportedError(
            f"{what} has a dtype that kernels cannot read",
            got=str(tensor.dtype),
            location=_jax.current_user_location(),
        )
    return tuple(int(extent) for extent in tensor.shape), dtype


def host_view(tensor: Any) -> np.ndarray:
    """The memory of a contiguous tensor on the CPU as a NumPy array, of any dtype."""
    shape, dtype = tensor_type(tensor, "the tensor")
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def from_host(array: np.ndarray, device: Any) -> Any:
    """A new tensor on a device with the contents of an array."""
    tensor = import_torch().empty(array.shape, dtype=torch_dtype(array.dtype), device="cpu")
    if array.size:
        host_view(tensor)[...] = array
    return tensor.to(device)


def to_host(tensor: Any) -> np.ndarray:
    """The contents of a tensor; shares its memory where it lies on the CPU."""
    on_host = tensor.detach().cpu().contiguous()
    view = host_view(on_host)
    # The array does not keep the tensor live.
    return view if on_host.data_ptr() == tensor.data_ptr() else view.copy()


def dense(tensor: Any) -> Any:
    """The tensor as row-major memory that begins at a multiple of 16 bytes; a copy if it must."""
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
