"""Running kernels on tensors: by the CUDA driver, or by an executor on the host.

On a GPU a kernel is loaded once per device and launched on PyTorch's current stream, so it may be
captured in a CUDA graph. TMA descriptors are encoded by the driver, once for each address.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin.lowering import ArrayParameter, Buffer, BufferKind, TensorMapParameter
from pallasite.plugin.runtime import (
    CompiledKernel,
    LaunchDevice,
    consume_hidden_results,
    hidden_operands,
    launches_nothing,
    nbytes,
    validate_launch,
)
from pallasite_std.copies.tensor_map_encoding import encode
from pallasite_std.torch import cuda_driver
from pallasite_std.torch.tensors import dense, from_host, import_torch, to_host, torch_dtype

_ENCODED_MAPS = 256
"""How many encoded descriptors a kernel keeps."""


class HostKernel:
    """A kernel that an executor runs on the host, wherever the tensors are."""

    def __init__(self, compiled: CompiledKernel, run: Callable[..., Any]):
        self.compiled = compiled
        self._run = functools.partial(run, compiled)

    def __call__(self, operands: Sequence[Any], in_place: frozenset[int], device: Any) -> list[Any]:
        """Runs it; see :class:`CudaKernel`."""
        arrays = [to_host(tensor) for tensor in operands]
        arrays += hidden_operands(self.compiled, LaunchDevice("cpu", 0, 0))
        with jax.enable_x64(True):  # Results of 64 bits keep them.
            results = [np.asarray(array) for array in self._run(*arrays)]
        results = consume_hidden_results(self.compiled, results)
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
        self._functions: dict[int, int] = {}
        self._hidden: dict[int, list[Any]] = {}
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
            inputs += self._hidden_operands(torch, device)
            outputs = self._outputs(torch, operands, inputs, in_place, device)
            if not self.nothing:
                self._launch(torch, inputs, [filled for filled, _ in outputs], device)
        results = []
        for filled, given in outputs:
            if given is not None and given.data_ptr() != filled.data_ptr():
                given.detach().copy_(filled)
            results.append(filled if given is None else given)
        hidden = {one.output for one in self.compiled.launch.hidden_results}
        arrived = [to_host(one) if n in hidden else one for n, one in enumerate(results)]
        return consume_hidden_results(self.compiled, arrived)

    def _hidden_operands(self, torch: Any, device: Any) -> list[Any]:
        """The hidden operands on a device, which is the current one."""
        index = _index(torch, device)
        if index not in self._hidden:
            arrays = hidden_operands(self.compiled, LaunchDevice("cuda", index, index))
            self._hidden[index] = [dense(from_host(array, device)) for array in arrays]
        return self._hidden[index]

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
        launch = self.compiled.launch
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

        parameters = []
        for number, parameter in enumerate(launch.parameters):
            pointer = address(parameter.buffer)
            if isinstance(parameter, ArrayParameter):
                parameters.append(pointer.to_bytes(8, "little"))
            else:
                parameters.append(self._tensor_map(number, parameter, pointer))
        # Global and profiler scratch of JAX's launcher, which is unused.
        parameters += [bytes(8), bytes(8)]
        cuda_driver.launch(
            self._function(torch, device),
            self.compiled.name,
            launch.grid,
            launch.block,
            launch.shared_memory_bytes,
            torch.cuda.current_stream(device).cuda_stream,
            parameters,
        )

    def _function(self, torch: Any, device: Any) -> int:
        """The kernel's entry point on a device, which is the current one."""
        index = _index(torch, device)
        if index not in self._functions:
            compiled = self.compiled
            self._functions[index] = cuda_driver.load(
                compiled.cubin or compiled.ptx.encode(),
                compiled.name,
                shared_memory_bytes=compiled.launch.shared_memory_bytes,
                blocks_of_cluster=math.prod(compiled.launch.cluster),
            )
        return self._functions[index]

    def _tensor_map(self, number: int, parameter: TensorMapParameter, pointer: int) -> bytes:
        key = (number, pointer)
        if key in self._maps:
            self._maps.move_to_end(key)
        else:
            encoding = encode(parameter)
            self._maps[key] = cuda_driver.encode_tensor_map(encoding, pointer, self.compiled.name)
            if len(self._maps) > _ENCODED_MAPS:
                self._maps.popitem(last=False)
        return self._maps[key]


def _index(torch: Any, device: Any) -> int:
    return int(torch.cuda.current_device() if device.index is None else device.index)


def _input_of(compiled: CompiledKernel) -> dict[int, int]:
    return {output: input_ for input_, output in compiled.launch.aliases}
