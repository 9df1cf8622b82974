"""Runs compiled kernels: what JAX calls, and the launch of a compiled kernel."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pallasite.plugin import InvalidTypeError, config
from pallasite.plugin.lowering import (
    Allocation,
    ArrayParameter,
    Buffer,
    BufferKind,
    LaunchParameters,
    TensorMapParameter,
)
from pallasite.plugin.runtime import CompiledKernel
from pallasite_simulator import progress
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.memory import POISON
from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Argument, Descriptor, Launch, Pointer, Shared, run
from pallasite_simulator.packing import memory_bytes, pack, unpack
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer import LaunchState, parse_groups
from pallasite_simulator.sanitizer.outputs import still_poisoned
from pallasite_simulator.types import Array

MULTIPROCESSORS = 132
"""Of the chip that a kernel seems to run on, where its target does not say how many."""


class Recall(Protocol):
    """Whoever keeps what kernels gave."""

    def outputs(
        self,
        compiled: CompiledKernel,
        inputs: Sequence[Array],
        run: Callable[[], tuple[list[Array], str]],
    ) -> list[Array]:
        """The outputs of a compiled kernel: those of ``run()``, which also returns what the kernel
        printed, or those that are known of an equal run."""
        ...


recall: Recall | None = None
"""Asked for each kernel that JAX calls, if there is any."""


def execute(compiled: CompiledKernel, inputs: Sequence[Array]) -> list[Array]:
    """Runs a compiled kernel on NumPy arrays; returns its outputs.

    What the kernel prints goes to standard output. The options ``sanitize``,
    ``simulator_processes`` and ``simulator_timeout`` say how it is run.

    Raises:
      PallasiteError: what the kernel does has no meaning, or the sanitizer found something.
    """
    if recall is None:
        return _execute(compiled, inputs)[0]
    return recall.outputs(compiled, inputs, lambda: _execute(compiled, inputs))


def _execute(compiled: CompiledKernel, inputs: Sequence[Array]) -> tuple[list[Array], str]:
    with compiled.attributed_errors():
        return _run(compiled, inputs)


def _run(compiled: CompiledKernel, inputs: Sequence[Array]) -> tuple[list[Array], str]:
    arrays = Arrays(compiled, inputs)
    if launches_nothing(compiled.launch):
        return arrays.untouched(), ""
    sanitizer = make_sanitizer(config.get("sanitize"), compiled.resources.allocations)
    blocks = math.prod(compiled.launch.grid)
    with progress.bar(compiled.name, blocks, config.get("simulator_progress")) as update:
        launch = make_launch(
            compiled,
            arrays,
            sanitizer=sanitizer,
            processes=config.get("simulator_processes"),
            progress=update,
            timeout=config.get("simulator_timeout"),
        )
        try:
            execution = run(launch)
        except SimulationError as error:
            show(error.printed)
            raise
    printed = "".join(execution.output)
    show(printed)
    return arrays.outputs(), printed


def show(printed: str) -> None:
    """Writes what a kernel printed to standard output."""
    if printed:
        sys.stdout.write(printed)
        sys.stdout.flush()


def make_sanitizer(
    checks: bool | str | Sequence[str], allocations: Sequence[Allocation] = ()
) -> LaunchState | None:
    """What checks a launch; None if nothing is to be checked.

    Args:
      checks: whether to check everything, or the groups of checks.
      allocations: who asked for which piece of shared memory.
    """
    groups = parse_groups(checks)
    return LaunchState(groups, allocations) if groups else None


def launches_nothing(launch: LaunchParameters) -> bool:
    """Whether there is no block to run, or nothing that a block could produce, as on a GPU."""
    sizes = [math.prod(buffer.shape) for buffer in launch.outputs]
    return 0 in launch.grid or (bool(sizes) and not any(sizes))


class Arrays:
    """The arrays of one launch of a compiled kernel.

    An output that is aliased to an input begins as a copy of it. Other outputs and scratch that is
    not zeroed begin with rubbish; outputs that the kernel never gets are zeros, as on a GPU.
    """

    def __init__(self, compiled: CompiledKernel, inputs: Sequence[Array]):
        """Checks the inputs.

        Raises:
          InvalidTypeError: they are not those that the kernel was compiled for.
        """
        self._launch = compiled.launch
        self._inputs = _checked(compiled, inputs)
        self._input_of = {output: input_ for input_, output in compiled.launch.aliases}
        self._output_of = dict(compiled.launch.aliases)
        self._names = {
            (BufferKind.INPUT, one.input): f"hidden operand {one.name!r}"
            for one in compiled.launch.hidden_operands
        } | {
            (BufferKind.OUTPUT, one.output): f"hidden result {one.name!r}"
            for one in compiled.launch.hidden_results
        }
        self._partial = ("standard", "partial_outputs", "True") in compiled.plugin_options
        passed = {(p.buffer.kind, p.buffer.index) for p in compiled.launch.parameters}
        self._outputs: list[Array] = []
        for number, buffer in enumerate(compiled.launch.outputs):
            if number in self._input_of:
                self._outputs.append(pack(self._inputs[self._input_of[number]]).copy())
            else:
                written = (BufferKind.OUTPUT, number) in passed
                self._outputs.append(_filled(buffer, POISON if written else 0))

    def outputs(self) -> list[Array]:
        """The outputs as they are now."""
        return [
            unpack(contents, buffer.shape, buffer.dtype)
            for contents, buffer in zip(self._outputs, self._launch.outputs, strict=True)
        ]

    def untouched(self) -> list[Array]:
        """The outputs of a kernel that does nothing: zeros but for aliases."""
        for number, contents in enumerate(self._outputs):
            if number not in self._input_of:
                contents[:] = 0
        return self.outputs()

    def place_of(self, buffer: Buffer) -> tuple[BufferKind, int]:
        """What tells buffers apart: an aliased input is its output."""
        if buffer.kind is BufferKind.INPUT and buffer.index in self._output_of:
            return BufferKind.OUTPUT, self._output_of[buffer.index]
        return buffer.kind, buffer.index

    def pointer(self, buffer: Buffer) -> Pointer:
        """The memory of a buffer, and its name."""
        kind, index = self.place_of(buffer)
        name = self._names.get((kind, index), f"{kind.value} {index}")
        if kind is BufferKind.INPUT:
            return Pointer(pack(self._inputs[index]), name, writable=False)
        if kind is BufferKind.OUTPUT:
            aliased = index in self._input_of
            visible = not aliased and not self._partial and (kind, index) not in self._names
            described = (tuple(buffer.shape), np.dtype(buffer.dtype)) if visible else None
            return Pointer(self._outputs[index], name, undefined=not aliased, output=described)
        contents = _filled(buffer, 0 if buffer.zeroed else POISON)
        return Pointer(contents, name, undefined=not buffer.zeroed, semaphores=buffer.zeroed)

    def unused(self) -> list[Pointer]:
        """Outputs that the kernel never gets, and that therefore are zeros."""
        passed = {self.place_of(one.buffer) for one in self._launch.parameters}
        outputs = [
            self.pointer(Buffer(BufferKind.OUTPUT, number, one.shape, one.dtype))
            for number, one in enumerate(self._launch.outputs)
            if (BufferKind.OUTPUT, number) not in passed
        ]
        return [one for one in outputs if one.output is not None]

    def unwritten(self) -> list[str]:
        """What of the outputs seems not to have been written, in words."""
        buffers = {self.place_of(one.buffer): one.buffer for one in self._launch.parameters}
        outputs = [self.pointer(b) for (kind, _), b in buffers.items() if kind is BufferKind.OUTPUT]
        found = [still_poisoned(one) for one in outputs if one.output is not None]
        unused = [f"{one.name} was never written" for one in self.unused()]
        return [str(one) for one in found if one is not None] + unused


def make_launch(compiled: CompiledKernel, arrays: Arrays, **further: Any) -> Launch:
    """The launch of a compiled kernel.

    Args:
      compiled: the kernel.
      arrays: which the kernel changes.
      **further: attributes of the launch that do not follow from these.
    """
    launch = compiled.launch
    multiprocessors = compiled.target.multiprocessors or MULTIPROCESSORS
    with compiled.attributed_errors():
        program = load(compiled.ptx, compiled.name, multiprocessors)
    places: dict[tuple[BufferKind, int], int] = {}
    pointers: list[Pointer] = []
    arguments: list[Argument] = []
    for parameter in launch.parameters:
        key = arrays.place_of(parameter.buffer)
        if key not in places:
            places[key] = len(pointers)
            pointers.append(arrays.pointer(parameter.buffer))
        if isinstance(parameter, ArrayParameter):
            arguments.append(Shared(places[key]))
        else:
            arguments.append(Descriptor(places[key], _encoder(parameter)))
    # JAX's launcher passes two more pointers, which kernels declare and do not read.
    arguments += [None] * (len(program.parameters) - len(arguments))
    return Launch(
        program,
        Geometry(
            launch.grid,
            launch.block,
            launch.cluster,
            explicit_cluster=math.prod(launch.cluster) > 1,
        ),
        arguments,
        arrays=pointers,
        dynamic_shared_bytes=launch.shared_memory_bytes,
        unused_outputs=arrays.unused(),
        **further,
    )


def _encoder(parameter: TensorMapParameter) -> Any:
    return lambda address: TensorMap.from_parameter(parameter, address).encode()


def _filled(buffer: Buffer, byte: int) -> Array:
    return np.full(memory_bytes(buffer.shape, buffer.dtype), byte, np.uint8)


def _checked(compiled: CompiledKernel, inputs: Sequence[Array]) -> list[Array]:
    arrays = [np.asarray(one) for one in inputs]
    got = [(one.shape, one.dtype) for one in arrays]
    expected = [(one.shape, np.dtype(one.dtype)) for one in compiled.launch.inputs]
    if got != expected:
        raise InvalidTypeError(
            f"kernel {compiled.name!r} is run with the wrong inputs",
            got=_types(got),
            expected=_types(expected),
        )
    return arrays


def _types(types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return (
        ", ".join(f"{dtype.name}[{','.join(map(str, shape))}]" for shape, dtype in types) or "none"
    )
