"""As much of PyTorch as the launching of kernels uses, on NumPy arrays, and a CUDA driver that
records what it is asked."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

NAMES = (
    *("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "complex64"),
)


@dataclasses.dataclass(frozen=True)
class Dtype:
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.name))


@dataclasses.dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def device(name: Any) -> Device:
    if isinstance(name, Device):
        return name
    kind, _, index = name.partition(":")
    return Device(kind, int(index) if index else (0 if kind == "cuda" else None))


class Tensor:
    """A strided array with a device."""

    def __init__(self, array: np.ndarray, where: Any = "cpu"):
        self.array = array
        self.device = device(where)

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: Dtype(self.array.dtype.name))

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _like(self, array: np.ndarray) -> Tensor:
        return Tensor(array, self.device)

    def detach(self) -> Tensor:
        return self._like(self.array)

    def contiguous(self) -> Tensor:
        return self if self.array.flags.c_contiguous else self._like(aligned(self.array))

    def clone(self) -> Tensor:
        return self._like(aligned(self.array))

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def to(self, target: Any) -> Tensor:
        if isinstance(target, Dtype):
            return self._like(aligned(self.array.astype(target.numpy)))
        where = device(target)
        return self if where == self.device else Tensor(aligned(self.array), where)

    def copy_(self, other: Tensor) -> Tensor:
        self.array[...] = other.array
        return self

    def reshape(self, shape: Any) -> Tensor:
        return self._like(self.array.reshape(shape))

    def permute(self, dims: Any) -> Tensor:
        return self._like(self.array.transpose(dims))

    def expand(self, shape: Any) -> Tensor:
        return self._like(np.broadcast_to(self.array, shape))


def aligned(array: np.ndarray) -> np.ndarray:
    """A row-major copy that begins at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def make_module() -> types.ModuleType:
    """The module ``torch``."""
    module = types.ModuleType("torch")
    for name in NAMES:
        setattr(module, name, Dtype(name))

    def filled(byte: int) -> Any:
        def make(shape: Any, *, dtype: Dtype, device: Any) -> Tensor:
            array = aligned(np.empty(shape, dtype.numpy))
            array.reshape(-1).view(np.uint8)[...] = byte
            return Tensor(array, device)

        return make

    module.Tensor, module.device = Tensor, device
    module.empty, module.zeros = filled(0xCD), filled(0)
    module.cuda = types.SimpleNamespace(
        is_available=lambda: False,
        device=lambda where: contextlib.nullcontext(),
        current_device=lambda: 0,
        current_stream=lambda where: types.SimpleNamespace(cuda_stream=77),
        get_device_capability=lambda where: (9, 0),
    )
    return module


def numbers(kind: Any, address: int, count: int) -> list[int]:
    """Integers in memory."""
    return list((kind * count).from_address(address))


class FakeDriver:
    """The driver's library: every call is recorded; ``on_launch`` gets the parameters' bytes.

    ``sizes`` says how many bytes each parameter of the next launch has.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.sizes: tuple[int, ...] = ()
        self.on_launch: Any = lambda parameters: None
        self.status = 0

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of the calls of a function."""
        return [arguments for called, arguments in self.calls if called == name]

    def cuModuleLoadData(self, result: int, image: int) -> int:
        self.calls.append(("cuModuleLoadData", (ctypes.string_at(image),)))
        ctypes.c_void_p.from_address(result).value = 11
        return 0

    def cuModuleGetFunction(self, result: int, module: ctypes.c_void_p, name: bytes) -> int:
        self.calls.append(("cuModuleGetFunction", (module.value, name)))
        ctypes.c_void_p.from_address(result).value = 22
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.calls.append(("cuFuncSetAttribute", (function.value, attribute, value)))
        return 0

    def cuTensorMapEncodeTiled(
        self,
        result: int,
        kind: int,
        rank: int,
        pointer: int,
        shape: int,
        strides: int,
        box: int,
        steps: int,
        *modes: int,
    ) -> int:
        assert result % 64 == 0
        arrays = (
            numbers(ctypes.c_uint64, shape, rank),
            numbers(ctypes.c_uint64, strides, rank - 1),
            numbers(ctypes.c_uint32, box, rank),
            numbers(ctypes.c_uint32, steps, rank),
        )
        self.calls.append(("cuTensorMapEncodeTiled", (kind, rank, pointer, *arrays, *modes)))
        ctypes.memset(result, len(self.of("cuTensorMapEncodeTiled")), 128)
        return 0

    def cuLaunchKernel(self, *arguments: Any) -> int:
        self.calls.append(("cuLaunchKernel", arguments))
        pointers = numbers(ctypes.c_uint64, arguments[9], len(self.sizes))
        assert all(pointer % 64 == 0 for pointer in pointers)
        self.on_launch(
            [ctypes.string_at(p, size) for p, size in zip(pointers, self.sizes, strict=True)]
        )
        return self.status

    def cuGetErrorName(self, status: int, result: int) -> int:
        self.name = ctypes.create_string_buffer(f"CUDA_ERROR_{status}".encode())
        ctypes.c_void_p.from_address(result).value = ctypes.addressof(self.name)
        return 0
