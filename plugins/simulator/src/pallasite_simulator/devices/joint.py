"""One simulation of a kernel on several devices: one memory, in which all grids run together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pallasite_simulator.arguments import Arrays, Pointer
from pallasite_simulator.devices.cycles import waits_between
from pallasite_simulator.engine.float_environment import exact_floats
from pallasite_simulator.engine.memory import GLOBAL_BASE, DeviceSegments, GlobalMemory
from pallasite_simulator.errors import DeadlockError, SimulationError, TrapError
from pallasite_simulator.launch import Again, Execution, Launch, Waves, run_together
from pallasite_simulator.statistics.traffic import Traffic
from pallasite_simulator.types import Array

SEGMENT_ALIGNMENT = 1 << 16
"""Bytes that the memory of a device is a multiple of."""


@dataclasses.dataclass(frozen=True)
class SharedState:
    """Memory through which devices find each other.

    Attributes:
      sizes: by name, bytes of further memory that each device has.
      fill: called when it is known where that memory is, as ``fill(addresses, multicast)``:
        ``addresses`` has by name the address on each device, ``multicast`` for each device what to
        add to an address of it for that of the same place on all devices. It writes to the
        arguments of the launches, and returns by name the contents of the memory of each device.
      explain: given these contents when a device has executed a trap, says why; or None.
    """

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fill: Callable[[Mapping[str, Sequence[int]], Sequence[int]], Mapping[str, Sequence[Array]]] = (
        lambda addresses, multicast: {}
    )
    explain: Callable[[Mapping[str, Sequence[Array]]], str | None] = lambda contents: None


def run_devices(
    launches: Sequence[Launch],
    state: SharedState | None = None,
    *,
    raise_findings: bool = True,
) -> list[Execution]:
    """Runs a kernel on several devices to its end.

    Args:
      launches: what each device runs, alike but for the contents of arrays; their geometry says
        which device it is, one number after another, and all have one sanitizer.
      state: through which they find each other.
      raise_findings: whether what the sanitizer found is an error.

    Returns:
      What each device did.

    Raises:
      SimulationError: the kernel did something that has no meaning, no thread can go on, or the
        sanitizer found something.
    """
    state = state or SharedState()
    program = launches[0].program
    sanitizer = launches[0].sanitizer
    first = launches[0].geometry.device or 0
    launches = [_named(launch, device) for device, launch in enumerate(launches, first)]
    checked = sanitizer is not None and not any(one.blocks for one in launches)
    again = _Again(launches, state) if checked else None
    memory = program.new_memory()
    start = memory.size + -memory.size % SEGMENT_ALIGNMENT
    stride = 0
    arrays: list[Arrays] = []
    addresses: dict[str, list[int]] = {name: [] for name in state.sizes}
    for device, launch in enumerate(launches):
        memory.skip_to(start + device * stride)
        arrays.append(Arrays(memory, launch.arrays, launch.arguments))
        for name, size in state.sizes.items():
            addresses[name].append(memory.allocate(f"{name} of device {first + device}", size))
        if not stride:
            stride = memory.size - start
            stride += -stride % SEGMENT_ALIGNMENT
    segments = DeviceSegments(start, stride, len(launches), first)
    memory.segments = segments
    memory.seal()
    program.initialize(memory)
    devices = range(first, first + len(launches))
    multicast = [segments.multicast_distance(device) for device in devices]
    contents = state.fill(addresses, multicast)
    for name, each in contents.items():
        for address, one in zip(addresses[name], each, strict=True):
            held = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
            memory.bytes_at(address, held.size)[:] = held
    parts = []
    for launch, own in zip(launches, arrays, strict=True):
        own.write()
        traffic = None
        if launch.statistics:
            traffic = Traffic(memory.size, segments, launch.geometry.device)
        parts.append((Waves(launch, memory, own.parameters(program), traffic), traffic))
    try:
        _run(launches, [waves for waves, _ in parts], memory, arrays)
    except TrapError as error:
        left = {
            name: [memory.bytes_at(one, state.sizes[name]) for one in each]
            for name, each in addresses.items()
        }
        text = state.explain(left)
        if text is not None:
            error.message = f"kernel {program.name!r}: {text} ({error.message})"
            error.args = (error.message,)
        raise
    if sanitizer is not None and sanitizer.between_devices is not None:
        _check_devices(launches, arrays, memory, addresses)
    executions = []
    for device, (launch, own) in enumerate(zip(launches, arrays, strict=True)):
        waves, traffic = parts[device]
        own.read()
        if traffic is not None:
            waves.execution.add_traffic(program, traffic)
        waves.execution.device = launch.geometry.device
        executions.append(waves.execution)
        if launch.sanitizer is not None and launch.blocks is None:
            outputs = [*own.outputs, *((unused, None) for unused in launch.unused_outputs)]
            second = None if again is None else functools.partial(again.run, device)
            launch.sanitizer.check_outputs(program, outputs, True, second)
    links: dict[tuple[int, int], int] = {}
    for execution in executions:
        for pair, count in execution.links.items():
            links[pair] = links.get(pair, 0) + count
    for execution in executions:
        execution.links = links
    if sanitizer is not None and raise_findings:
        try:
            sanitizer.finish()
        except SimulationError as error:
            error.printed = "".join(text for one in executions for text in one.output)
            raise
    return executions


def _check_devices(
    launches: Sequence[Launch],
    arrays: Sequence[Arrays],
    memory: GlobalMemory,
    addresses: Mapping[str, Sequence[int]],
) -> None:
    """Checks what devices have left behind, if that is to be checked."""
    sanitizer = launches[0].sanitizer
    assert sanitizer is not None and sanitizer.between_devices is not None
    if "races" not in sanitizer.groups:
        return
    lasting = {one - GLOBAL_BASE for each in addresses.values() for one in each}
    semaphores = {offset for one in arrays for offset in one.semaphores}
    sanitizer.between_devices.finish(memory, lasting, semaphores)


def _run(
    launches: Sequence[Launch],
    parts: Sequence[Waves],
    memory: GlobalMemory,
    arrays: Sequence[Arrays],
) -> None:
    sanitizer = launches[0].sanitizer
    try:
        with exact_floats():
            run_together(parts, [launch.order for launch in launches])
    except SimulationError as error:
        if sanitizer is not None:
            sanitizer.annotate(error)
        if isinstance(error, DeadlockError):
            semaphores = {offset for one in arrays for offset in one.semaphores}
            found = waits_between(parts, memory, semaphores)
            error.got = "\n    ".join([str(error.got), *found])
        raise


class _Again:
    """What it takes to run all devices a second time, made before the first."""

    def __init__(self, launches: Sequence[Launch], state: SharedState):
        self._again = [Again(one) for one in launches]
        self._state = state
        self._contents: list[Callable[[Pointer], Array]] | None = None
        self._failed = False

    def run(self, device: int) -> Callable[[Pointer], Array] | None:
        """Runs them with other rubbish, once; returns what gives the bytes that an array of a
        device then has, or None if that run fails."""
        if self._contents is None and not self._failed:
            prepared = [one.prepared() for one in self._again]
            try:
                run_devices([launch for launch, _ in prepared], self._state)
                self._contents = [contents for _, contents in prepared]
            except SimulationError:
                self._failed = True
        return None if self._contents is None else self._contents[device]


def _named(launch: Launch, device: int) -> Launch:
    """The same, with arrays that are called by their device."""
    arguments = [
        _of_device(one, device) if isinstance(one, Pointer) else one for one in launch.arguments
    ]
    arrays = [_of_device(one, device) for one in launch.arrays]
    return dataclasses.replace(launch, arrays=arrays, arguments=arguments)


def _of_device(pointer: Pointer, device: int) -> Pointer:
    return dataclasses.replace(pointer, name=f"{pointer.name} of device {device}")
