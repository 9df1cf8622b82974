"""Kernels that reach other devices: from the inputs on each device to the outputs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import LaunchRequest, config
from pallasite.plugin.lowering import HiddenOperand
from pallasite.plugin.runtime import CompiledKernel
from pallasite_simulator import executor, progress
from pallasite_simulator.devices.joint import SharedState, run_devices
from pallasite_simulator.devices.meeting import Meeting
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Execution, Launch
from pallasite_simulator.types import Array
from pallasite_std.api import communicates


def provided(compiled: CompiledKernel) -> list[HiddenOperand]:
    """The operands of a kernel that tell it of other devices: those whose providers know how to
    simulate them. Others come with the program."""
    operands = [one for one in compiled.launch.hidden_operands if one.provider]
    return [one for one in operands if hasattr(provider_of(one), "simulated")]


def provider_of(operand: HiddenOperand) -> Any:
    """What makes a provided operand."""
    module, _, name = operand.provider.partition(":")
    return getattr(importlib.import_module(module), name)


def run_in_program(compiled: CompiledKernel, *operands: Any, request: LaunchRequest) -> Any:
    """The JAX operations that run a kernel which other devices run, too."""
    from pallasite_std.api import run_on_host

    count, rank = 1, 0
    for name, size in request.device_mesh.axes:
        count, rank = count * size, rank * size + jax.lax.axis_index(name)
    where = [json.loads(one.arguments).get("location", "") for one in provided(compiled)]
    meeting: Meeting[Sequence[Array]] = Meeting(compiled.name, count, where[0])
    execute = functools.partial(_execute, meeting)
    rank = jax.numpy.asarray(rank, jax.numpy.int32)
    made_here = {one.input for one in provided(compiled)}
    own = [one for number, one in enumerate(operands) if number not in made_here]
    return run_on_host(execute, compiled, rank, *own, request=request)


def _execute(
    meeting: Meeting[Sequence[Array]], compiled: CompiledKernel, inputs: Sequence[Array]
) -> Sequence[Array]:
    rank, *own = inputs
    number = int(rank)
    if not communicates(compiled):
        return execute_devices(compiled, {number: own}, meeting.count)[0]
    return meeting.run(
        number,
        own,
        lambda all_inputs: execute_devices(compiled, dict(enumerate(all_inputs)), meeting.count),
    )


def execute_devices(
    compiled: CompiledKernel, inputs: Mapping[int, Sequence[Array]], count: int
) -> list[list[Array]]:
    """Runs a compiled kernel on devices; what it prints goes to standard output.

    Args:
      compiled: the kernel.
      inputs: by rank, all inputs on the device but those that tell of other devices.
      count: devices of the mesh.

    Returns:
      The outputs on each of the devices.

    Raises:
      PallasiteError: what the kernel does has no meaning, or the sanitizer found something.
    """
    sanitizer = executor.make_sanitizer(config.get("sanitize"), compiled.resources.allocations)
    settings = {"sanitizer": sanitizer, "timeout": config.get("simulator_timeout")}
    arrays, launches, state = prepare(compiled, inputs, count, **settings)
    if executor.launches_nothing(compiled.launch):
        return [one.untouched() for one in arrays]
    try:
        executions = _run(launches, state, config.get("simulator_progress"))
    except SimulationError as error:
        executor.show(error.printed)
        raise
    executor.show("".join(text for one in executions for text in one.output))
    return [one.outputs() for one in arrays]


def simulate(
    compiled: CompiledKernel,
    inputs: Mapping[int, Sequence[Array]],
    settings: Mapping[str, Any],
    shown: bool | None,
) -> list[tuple[executor.Arrays, Launch, Execution]]:
    """Runs a compiled kernel on all devices of its mesh; what the sanitizer finds is not raised.

    Args:
      compiled: the kernel.
      inputs: by rank, all inputs on the device but those that tell of other devices.
      settings: attributes of the launches.
      shown: whether to show a progress bar.
    """
    arrays, launches, state = prepare(compiled, inputs, len(inputs), **settings)
    executions = _run(launches, state, shown, raise_findings=False)
    return list(zip(arrays, launches, executions, strict=True))


def _run(
    launches: Sequence[Launch], state: SharedState, shown: bool | None, **options: Any
) -> list[Execution]:
    first = launches[0]
    blocks = first.geometry.blocks * len(launches)
    with progress.bar(first.program.name, blocks, shown) as update:
        parts = _Progress(update)
        told = [
            dataclasses.replace(one, progress=parts.of(number))
            for number, one in enumerate(launches)
        ]
        return run_devices(told, state, **options)


class _Progress:
    """Adds up the blocks of all devices that have ended."""

    def __init__(self, update: Callable[[int], None] | None):
        self._update = update
        self._ended: dict[int, int] = {}

    def of(self, device: int) -> Callable[[int], None]:
        """What is told how many blocks of a device have ended."""

        def tell(blocks: int) -> None:
            self._ended[device] = blocks
            if self._update is not None:
                self._update(sum(self._ended.values()))

        return tell


def prepare(
    compiled: CompiledKernel,
    inputs: Mapping[int, Sequence[Array]],
    count: int,
    **further: Any,
) -> tuple[list[executor.Arrays], list[Launch], SharedState]:
    """The arrays and launches of a kernel on devices, and what tells them of each other.

    Args:
      compiled: the kernel.
      inputs: by rank, all inputs on the device but those that tell of other devices.
      count: devices of the mesh.
      **further: attributes of the launches.
    """
    hidden = provided(compiled)
    arrays, launches = [], []
    tables: list[list[Array]] = [[] for _ in hidden]
    for rank, given in inputs.items():
        own = list(given)
        for place, operand in sorted(enumerate(hidden), key=lambda one: one[1].input):
            buffer = compiled.launch.inputs[operand.input]
            table = np.zeros(buffer.shape, buffer.dtype)
            tables[place].append(table)
            own.insert(operand.input, table)
        one = executor.Arrays(compiled, own)
        launch = executor.make_launch(compiled, one, **further)
        geometry = dataclasses.replace(launch.geometry, device=rank)
        arrays.append(one)
        launches.append(dataclasses.replace(launch, geometry=geometry))
    return arrays, launches, _state(compiled, hidden, tables, list(inputs), count)


def _state(
    compiled: CompiledKernel,
    hidden: Sequence[HiddenOperand],
    tables: Sequence[Sequence[Array]],
    ranks: Sequence[int],
    count: int,
) -> SharedState:
    """What providers of operands keep in the memory of devices."""
    parts = []
    for operand in hidden:
        provider = provider_of(operand)
        parts.append(provider.simulated(compiled, count, **json.loads(operand.arguments)))
    sizes = {name: size for one in parts for name, size in one.sizes.items()}

    def fill(
        addresses: Mapping[str, Sequence[int]], multicast: Sequence[int]
    ) -> Mapping[str, Sequence[Array]]:
        contents: dict[str, Sequence[Array]] = {}
        for one, own in zip(parts, tables, strict=True):
            made, memory = one.fill(ranks, addresses, multicast)
            for table, values in zip(own, made, strict=True):
                table[...] = values
            contents |= memory
        return contents

    def explain(contents: Mapping[str, Sequence[Array]]) -> str | None:
        texts = (one.explain(contents) for one in parts if hasattr(one, "explain"))
        return next((one for one in texts if one is not None), None)

    return SharedState(sizes, fill, explain)
