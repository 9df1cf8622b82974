"""Running kernels on tensors: by the CUDA driver, or by an executor on the host.

On a GPU a kernel is loaded once per device and launched on PyTorch's current stream, so it may be
captured in a CUDA graph. TMA descriptors are encoded by the driver, once for each address.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import ExecutionError
from pallasite.launch import ArrayParameter, Buffer, BufferKind, TensorMapParameter
from pallasite.runtime.launch import launches_nothing, nbytes, validate_launch
from pallasite.runtime.profile_dump import run_profiled, write_trace
from pallasite.runtime.tensor_maps import ELEMENT_BYTES, TENSOR_MAP_BYTES, encode
from pallasite.runtime.torch_tensors import (
    dense,
    from_host,
    import_torch,
    to_host,
    torch_dtype,
)

MAX_PORTABLE_CLUSTER = 8
_TENSOR_MAP_ALIGNMENT = 64
_ENCODED_MAPS = 256
"""How many encoded descriptors a kernel keeps."""


def driver() -> Any:
    """NVIDIA's bindings of the CUDA driver.

    Raises:
      ExecutionError: they are not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ExecutionError(
            f"launching kernels from PyTorch needs cuda-bindings: {error}",
            hint="pip install pallasite[torch]",
        ) from error


def checked(result: Sequence[Any], what: str) -> Any:
    """The value that a call of the driver returned.

    Raises:
      ExecutionError: it failed.
    """
    status, *values = result
    if int(status) != 0:
        raise ExecutionError(f"the CUDA driver cannot {what}", got=getattr(status, "name", status))
    return values[0] if values else None


class HostKernel:
    """A kernel that an executor runs on the host, wherever the tensors are."""

    def __init__(self, compiled: CompiledKernel, run: Callable[..., Any]):
        self.compiled = compiled
        self._run = functools.partial(run_profiled, run, compiled)

    def __call__(self, operands: Sequence[Any], in_place: frozenset[int], device: Any) -> list[Any]:
        """Runs it; see :class:`CudaKernel`."""
        arrays = [to_host(tensor) for tensor in operands]
        with jax.enable_x64(True):  # Results of 64 bits keep them.
            results = [np.asarray(array) for array in self._run(*arrays)]
        outputs = []
        input_of = _input_of(self.compiled)
        for number, array in enumerate(results):
            source = input_of.get(number)
            if source in in_place:
                operands[source].detach().copy_(from_host(array, device))
                outputs.append(operands[source])
            else:
                outputs.append(from_host(array, device))
        return outputs


class CudaKernel:
    """A kernel that the CUDA driver launches; it stays loaded as long as the process runs, because
    CUDA graphs may hold it."""

    def __init__(self, compiled: CompiledKernel):
        self.compiled = compiled
        self.nothing = launches_nothing(compiled.launch)
        if not self.nothing:
            validate_launch(compiled.launch, compiled.name)
        self._functions: dict[int, Any] = {}
        self._maps: collections.OrderedDict[tuple[int, int], bytes] = collections.OrderedDict()

    def __call__(self, operands: Sequence[Any], in_place: frozenset[int], device: Any) -> list[Any]:
        """Launches it on the current stream of a device.

        Args:
          operands: tensors on the device, of the types that the kernel was compiled for.
          in_place: positions of operands that an output may overwrite, if it is to share memory
            with them. Others are copied first.
          device: the device.

        Returns:
          The outputs. One that overwrote an operand is that very tensor.
        """
        torch = import_torch()
        with torch.cuda.device(device):
            inputs = [dense(tensor) for tensor in operands]
            outputs = self._outputs(torch, operands, inputs, in_place, device)
            if not self.nothing:
                self._launch(torch, inputs, [filled for filled, _ in outputs], device)
        results = []
        for filled, given in outputs:
            if given is not None and given.data_ptr() != filled.data_ptr():
                given.detach().copy_(filled)
            results.append(filled if given is None else given)
        profile = self.compiled.launch.profile
        if profile is not None:
            write_trace(to_host(results.pop(profile.output)), self.compiled)
        return results

    def _outputs(
        self,
        torch: Any,
        operands: Sequence[Any],
        inputs: list[Any],
        in_place: frozenset[int],
        device: Any,
    ) -> list[tuple[Any, Any]]:
        """For each output the memory that it gets, and the operand that it is to end up in."""
        launch = self.compiled.launch
        passed = {(p.buffer.kind, p.buffer.index) for p in launch.parameters}
        input_of = _input_of(self.compiled)
        outputs = []
        for number, buffer in enumerate(launch.outputs):
            source = input_of.get(number)
            if source is None:
                written = (BufferKind.OUTPUT, number) in passed and not self.nothing
                make = torch.empty if written else torch.zeros
                tensor = make(buffer.shape, dtype=torch_dtype(buffer.dtype), device=device)
                outputs.append((tensor, None))
                continue
            given = operands[source] if source in in_place else None
            if given is None and inputs[source].data_ptr() == operands[source].data_ptr():
                inputs[source] = inputs[source].clone()
            outputs.append((inputs[source], given))
        return outputs

    def _launch(
        self, torch: Any, inputs: Sequence[Any], outputs: Sequence[Any], device: Any
    ) -> None:
        cuda, launch = driver(), self.compiled.launch
        scratch = [
            (torch.zeros if buffer.zeroed else torch.empty)(
                (nbytes(buffer.shape, buffer.dtype),), dtype=torch.uint8, device=device
            )
            for buffer in launch.scratch
        ]
        tensors = {
            BufferKind.INPUT: inputs,
            BufferKind.OUTPUT: outputs,
            BufferKind.SCRATCH: scratch,
        }

        def address(buffer: Buffer) -> int:
            return int(tensors[buffer.kind][buffer.index].data_ptr())

        arguments = _Arguments()
        for number, parameter in enumerate(launch.parameters):
            pointer = address(parameter.buffer)
            if isinstance(parameter, ArrayParameter):
                arguments.add(pointer.to_bytes(8, "little"))
            else:
                arguments.add(self._tensor_map(cuda, number, parameter, pointer))
        for _ in range(2):  # Global and profiler scratch of JAX's launcher, which nobody uses.
            arguments.add(bytes(8))
        stream = torch.cuda.current_stream(device).cuda_stream
        status = cuda.cuLaunchKernel(
            self._function(cuda, torch, device),
            *launch.grid,
            *launch.block,
            launch.shared_memory_bytes,
            stream,
            arguments.address,
            0,
        )
        checked(status, f"launch kernel {self.compiled.name!r}")

    def _function(self, cuda: Any, torch: Any, device: Any) -> Any:
        """The kernel's entry point on a device, which is the current one."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._functions:
            compiled = self.compiled
            image = compiled.cubin or compiled.ptx.encode() + b"\0"
            module = checked(cuda.cuModuleLoadData(image), f"load kernel {compiled.name!r}")
            function = checked(
                cuda.cuModuleGetFunction(module, compiled.name.encode()),
                f"find kernel {compiled.name!r}",
            )
            attributes = cuda.CUfunction_attribute
            values = {
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: (
                    compiled.launch.shared_memory_bytes
                )
            }
            if int(np.prod(compiled.launch.cluster)) > MAX_PORTABLE_CLUSTER:
                values[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
            for attribute, value in values.items():
                checked(
                    cuda.cuFuncSetAttribute(function, attribute, value),
                    f"give kernel {compiled.name!r} what it needs ({attribute}: {value})",
                )
            self._functions[index] = function
        return self._functions[index]

    def _tensor_map(
        self, cuda: Any, number: int, parameter: TensorMapParameter, pointer: int
    ) -> bytes:
        key = (number, pointer)
        if key in self._maps:
            self._maps.move_to_end(key)
            return self._maps[key]
        encoding = encode(parameter)
        element = ELEMENT_BYTES[encoding.element_type]

        def wide(values: Sequence[int]) -> list[Any]:
            return [cuda.cuuint64_t(value) for value in values]

        def narrow(values: Sequence[int]) -> list[Any]:
            return [cuda.cuuint32_t(value) for value in values]

        # The driver's order is minor to major; it takes no stride of the innermost dimension.
        encoded = checked(
            cuda.cuTensorMapEncodeTiled(
                cuda.CUtensorMapDataType(encoding.element_type),
                len(encoding.shape),
                pointer,
                wide(encoding.shape[::-1]),
                wide([stride * element for stride in encoding.strides[-2::-1]]),
                narrow(encoding.box[::-1]),
                narrow([1] * len(encoding.shape)),
                cuda.CUtensorMapInterleave(0),
                cuda.CUtensorMapSwizzle(encoding.swizzle),
                cuda.CUtensorMapL2promotion(0),
                cuda.CUtensorMapFloatOOBfill(0),
            ),
            f"encode a TMA descriptor of kernel {self.compiled.name!r}",
        )
        self._maps[key] = ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)
        if len(self._maps) > _ENCODED_MAPS:
            self._maps.popitem(last=False)
        return self._maps[key]


class _Arguments:
    """Values of a kernel's parameters in memory, and the table of where each is."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._table: Any = None

    def add(self, value: bytes) -> None:
        """Adds a parameter."""
        size = len(value)
        memory = (ctypes.c_uint8 * (size + _TENSOR_MAP_ALIGNMENT))()
        begin = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
        ctypes.memmove(ctypes.addressof(memory) + begin, value, size)
        self._values.append((memory, begin))

    @property
    def address(self) -> int:
        """Of the table; valid as long as this object lives."""
        pointers = [ctypes.addressof(memory) + begin for memory, begin in self._values]
        self._table = (ctypes.c_void_p * len(pointers))(*pointers)
        return ctypes.addressof(self._table)


def _input_of(compiled: CompiledKernel) -> dict[int, int]:
    return {output: input_ for input_, output in compiled.launch.aliases}
