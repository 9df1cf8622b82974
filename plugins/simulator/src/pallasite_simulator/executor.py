"""Runs compiled kernels: the executor, and what it is made of for those who want more of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.codegen.compiled import CompiledKernel
from pallasite.launch import ArrayParameter, Buffer, BufferKind, TensorMapParameter
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.launch import Argument, Descriptor, Launch, Pointer, Shared, run
from pallasite_simulator.programs import load
from pallasite_simulator.types import Array

POISON = 0xCD
"""What the bytes of outputs hold before the kernel writes them."""


def execute(compiled: CompiledKernel, inputs: Sequence[Array]) -> list[Array]:
    """Runs a compiled kernel on NumPy arrays; returns its outputs.

    Raises:
      PallasiteError: what the kernel does has no meaning, or the sanitizer found something.
    """
    outputs = make_outputs(compiled, inputs)
    if 0 in compiled.launch.grid:
        return outputs
    run(make_launch(compiled, inputs, outputs))
    return outputs


def make_outputs(compiled: CompiledKernel, inputs: Sequence[Array]) -> list[Array]:
    """Arrays for the outputs: copies of the inputs that they alias, else poisoned."""
    launch = compiled.launch
    alias_of = {output: input_ for input_, output in launch.aliases}
    parameters = {p.buffer for p in launch.parameters}
    outputs: list[Array] = []
    for number, buffer in enumerate(launch.outputs):
        if number in alias_of:
            outputs.append(np.array(inputs[alias_of[number]], copy=True, order="C"))
        elif buffer in parameters:
            outputs.append(_filled(buffer, POISON))
        else:
            # As the GPU's launcher does for outputs that the kernel never touches.
            outputs.append(_filled(buffer, 0))
    return outputs


def make_launch(
    compiled: CompiledKernel, inputs: Sequence[Array], outputs: Sequence[Array], **options: Any
) -> Launch:
    """The launch of a compiled kernel on arrays.

    Args:
      compiled: the kernel.
      inputs: one array for each of ``compiled.launch.inputs``.
      outputs: from :func:`make_outputs`; the kernel changes them in place.
      **options: further attributes of the launch.
    """
    launch = compiled.launch
    program = load(compiled.ptx, compiled.name, compiled.target.multiprocessors or 132)
    places: dict[tuple[BufferKind, int], int] = {}
    alias_of = dict(launch.aliases)
    arguments: list[Argument] = []
    arrays: list[tuple[tuple[BufferKind, int], Array, str, bool]] = []

    def argument_of(buffer: Buffer) -> int:
        kind, index = buffer.kind, buffer.index
        if kind is BufferKind.INPUT and index in alias_of:
            kind, index = BufferKind.OUTPUT, alias_of[index]
        key = (kind, index)
        if key not in places:
            if kind is BufferKind.INPUT:
                array, writable = np.ascontiguousarray(inputs[index]), False
            elif kind is BufferKind.OUTPUT:
                array, writable = outputs[index], True
            else:
                array, writable = _filled(buffer, 0 if buffer.zeroed else POISON), True
            places[key] = len(arrays)
            arrays.append((key, array, f"{kind.value} {index}", writable))
        return places[key]

    # The array of a descriptor may have no pointer parameter: all arrays come first, unseen.
    owners = [argument_of(parameter.buffer) for parameter in launch.parameters]
    hidden = [Pointer(array, name, writable) for _, array, name, writable in arrays]
    for parameter, owner in zip(launch.parameters, owners, strict=True):
        if isinstance(parameter, ArrayParameter):
            arguments.append(Shared(owner))
        else:
            assert isinstance(parameter, TensorMapParameter)
            arguments.append(Descriptor(owner, _encoder(parameter)))
    # JAX's launcher passes two more pointers, which kernels do not declare or do not read.
    missing = len(program.parameters) - len(arguments)
    arguments += [None] * max(0, missing)
    geometry = Geometry(
        launch.grid, launch.block, launch.cluster, explicit_cluster=math.prod(launch.cluster) > 1
    )
    return Launch(
        program,
        geometry,
        arguments,
        arrays=hidden,
        dynamic_shared_bytes=launch.shared_memory_bytes,
        **options,
    )


def _encoder(parameter: TensorMapParameter) -> Any:
    return lambda address: TensorMap.from_parameter(parameter, address).encode()


def _filled(buffer: Buffer, byte: int) -> Array:
    dtype = np.dtype(buffer.dtype)
    contents = np.full(math.prod(buffer.shape) * dtype.itemsize, byte, np.uint8)
    array: Array = contents.view(dtype).reshape(buffer.shape)
    return array
