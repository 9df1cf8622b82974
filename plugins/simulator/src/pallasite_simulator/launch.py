"""Running one kernel: arguments in, arrays changed in place, a report out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.memory import GlobalMemory
from pallasite_simulator.engine.program import Program
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.observer import Observer
    from pallasite_simulator.sanitizer.launch_state import LaunchState

LANES_AT_ONCE = 16384
"""How many lanes a wave has if the grid has as many: enough for NumPy, little enough for caches."""

PATIENCE = 5000
"""How often lanes that poll are run again, where nothing happens that another thread could notice,
before that counts as a deadlock: loops over strong loads may be long."""

SHARED_BYTES_AT_ONCE = 1 << 26
"""How much shared memory the blocks of a wave have at most, if there is more than one."""

SANITIZED_BYTES_AT_ONCE = 1 << 24
"""The same with the sanitizer, which keeps up to 12 times as much."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """A kernel parameter that points to an array in global memory.

    Attributes:
      array: contiguous; changed in place when the kernel has run, if ``writable``.
      name: for messages.
      writable: whether the kernel may write to it.
    """

    array: Array
    name: str = ""
    writable: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """A kernel parameter that points to one of the launch's ``arrays``, given by its number."""

    array: int


@dataclasses.dataclass(frozen=True, eq=False)
class Descriptor:
    """A kernel parameter that is a TMA descriptor (128 bytes by value) of one of the launch's
    ``arrays``, given by its number.

    ``encode(address)`` returns the descriptor's bytes, given the array's address.
    """

    array: int
    encode: Callable[[int], bytes]


type Argument = Pointer | Shared | Descriptor | np.generic | bytes | None
"""What a kernel gets: NumPy scalars and bytes by value, None for a null pointer."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      program: the kernel.
      geometry: its grid.
      dynamic_shared_bytes: shared memory of each block beside the static.
      arguments: one for each parameter.
      arrays: further arrays, to which arguments refer by number.
      blocks: linear numbers of the blocks to run; None for all. Whole clusters are run.
      resident_blocks: how many blocks can wait for one another, as on a chip.
      make_observer: makes the observer of a wave, in place of the sanitizer.
      sanitizer: checks the launch; None for no checks but those that memory needs.
      progress: called with the number of blocks that have ended.
    """

    program: Program
    geometry: Geometry
    arguments: Sequence[Argument]
    arrays: Sequence[Pointer] = ()
    dynamic_shared_bytes: int = 0
    blocks: Sequence[int] | None = None
    resident_blocks: int = 132 * 16
    make_observer: Callable[[], Observer] | None = None
    sanitizer: LaunchState | None = None
    progress: Callable[[int], None] | None = None
    bank_conflicts: Any = None
    memory: GlobalMemory | None = None


@dataclasses.dataclass
class Execution:
    """What one launch did.

    Attributes:
      issued: for each instruction of the program, how many warps executed it.
      bytes_moved: by (state space, ``"read"``, ``"write"`` or ``"atomic"``).
      output: what the kernel printed.
      blocks: how many blocks ran.
      counters: further numbers that instructions keep, by name.
    """

    issued: Array
    bytes_moved: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    output: list[str] = dataclasses.field(default_factory=list)
    blocks: int = 0
    counters: dict[str, int] = dataclasses.field(default_factory=dict)


def run(launch: Launch) -> Execution:
    """Runs a kernel to its end.

    Raises:
      SimulationError: the kernel did something that has no meaning, or no thread can go on, or the
        sanitizer found something.
    """
    program = launch.program
    memory = program.new_memory()
    arrays = [
        *launch.arrays,
        *[argument for argument in launch.arguments if isinstance(argument, Pointer)],
    ]
    addresses = [
        memory.allocate(one.name or f"array {number}", one.array.nbytes, 256, one.writable)
        for number, one in enumerate(arrays)
    ]
    memory.seal()
    program.initialize(memory)
    for one, address in zip(arrays, addresses, strict=True):
        contents = _bytes_of(one.array)
        memory.bytes_at(address, contents.size)[:] = contents
    parameters = _parameters(program, launch.arguments, addresses, len(launch.arrays))
    execution = run_blocks(launch, memory, parameters)
    for one, address in zip(arrays, addresses, strict=True):
        if one.writable:
            contents = _bytes_of(one.array)
            contents[:] = memory.bytes_at(address, contents.size)
    return execution


def run_blocks(launch: Launch, memory: GlobalMemory, parameters: Array) -> Execution:
    """Runs blocks of a launch on memory that is ready.

    Waves of blocks run one after the other; one that cannot go on, because it waits for a block
    that has not begun, is taken up again after others.
    """
    sanitizer = launch.sanitizer
    if sanitizer is None:
        return _run_waves(launch, memory, parameters)
    try:
        execution = _run_waves(launch, memory, parameters)
    except SimulationError as error:
        sanitizer.annotate(error)
        raise
    sanitizer.finish()
    return execution


def _run_waves(launch: Launch, memory: GlobalMemory, parameters: Array) -> Execution:
    program, geometry = launch.program, launch.geometry
    shared_bytes = program.static_shared_bytes + launch.dynamic_shared_bytes
    order = _chosen(geometry, launch.blocks)
    size = wave_size(geometry, shared_bytes, launch.sanitizer is not None)
    make_observer = launch.make_observer
    if make_observer is None and launch.sanitizer is not None:
        make_observer = launch.sanitizer.observer
    execution = Execution(np.zeros(len(program.code) + 1, np.int64))
    pending = [order[start : start + size] for start in range(0, len(order), size)][::-1]
    stuck: list[Wave] = []
    vain = 0
    while pending or stuck:
        moved = False
        resident = sum(wave.block_count for wave in stuck)
        while pending and (not resident or resident + len(pending[-1]) <= launch.resident_blocks):
            wave = Wave(
                program,
                geometry,
                pending.pop(),
                memory,
                parameters,
                shared_bytes,
                make_observer() if make_observer is not None else None,
                launch.bank_conflicts,
            )
            moved |= wave.run()
            if wave.done:
                _finish(wave, launch, execution)
            else:
                stuck.append(wave)
                resident += wave.block_count
        for wave in list(stuck):
            moved |= wave.run()
            if wave.done:
                stuck.remove(wave)
                _finish(wave, launch, execution)
        vain = 0 if moved else vain + 1
        if stuck and vain and (vain > PATIENCE or not any(wave.polling for wave in stuck)):
            raise stuck[0].standstill()
    return execution


def wave_size(geometry: Geometry, shared_bytes: int, sanitized: bool = False) -> int:
    """How many blocks run together: whole clusters, at least one."""
    lanes = -(-geometry.threads // 32) * 32
    blocks = max(1, LANES_AT_ONCE // lanes)
    if shared_bytes:
        limit = SANITIZED_BYTES_AT_ONCE if sanitized else SHARED_BYTES_AT_ONCE
        blocks = min(blocks, max(1, limit // shared_bytes))
    cluster = geometry.cluster_size
    return max(1, blocks // cluster) * cluster


def _chosen(geometry: Geometry, blocks: Sequence[int] | None) -> Array:
    order = geometry.order
    if blocks is None:
        return order
    wrong = [block for block in blocks if not 0 <= block < geometry.blocks]
    if wrong:
        raise SimulationError(
            "there is no such block in the grid",
            got=wrong[0],
            expected=f"0 to {geometry.blocks - 1}",
        )
    clusters = order.reshape(-1, geometry.cluster_size)
    return clusters[np.isin(clusters, list(blocks)).any(axis=1)].reshape(-1)


def _finish(wave: Wave, launch: Launch, execution: Execution) -> None:
    execution.issued += np.cumsum(wave.issued)
    for key, count in wave.memory.bytes_moved.items():
        execution.bytes_moved[key] = execution.bytes_moved.get(key, 0) + count
    for name, count in wave.counters.items():
        execution.counters[name] = execution.counters.get(name, 0) + count
    execution.output += wave.output
    execution.blocks += wave.block_count
    if launch.progress is not None:
        launch.progress(execution.blocks)


def _bytes_of(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise SimulationError("arrays of kernels must be contiguous", got=array.strides)
    return array.reshape(-1).view(np.uint8)


def _parameters(
    program: Program, arguments: Sequence[Argument], addresses: Sequence[int], first: int
) -> Array:
    """The parameter buffer; pointers among the arguments have the addresses from ``first`` on.

    Raises:
      SimulationError: a wrong number or size of arguments.
    """
    if len(arguments) != len(program.parameters):
        raise SimulationError(
            f"kernel {program.name!r} is run with the wrong number of arguments",
            got=len(arguments),
            expected=f"{len(program.parameters)}: "
            + ", ".join(f"{one.name} ({one.bytes} bytes)" for one, _ in program.parameters),
        )
    buffer = np.zeros(program.parameter_bytes, np.uint8)
    own = iter(addresses[first:])
    for number, (argument, (variable, offset)) in enumerate(
        zip(arguments, program.parameters, strict=True)
    ):
        if isinstance(argument, Pointer):
            contents = next(own).to_bytes(8, "little")
        elif isinstance(argument, Shared):
            contents = addresses[argument.array].to_bytes(8, "little")
        elif isinstance(argument, Descriptor):
            contents = argument.encode(addresses[argument.array])
        elif argument is None:
            contents = bytes(8)
        else:
            contents = argument if isinstance(argument, bytes) else argument.tobytes()
        if len(contents) != variable.bytes:
            raise SimulationError(
                f"argument {number} of kernel {program.name!r} has the wrong size",
                got=f"{len(contents)} bytes",
                expected=f"{variable.bytes} bytes for {variable.name}",
            )
        buffer[offset : offset + len(contents)] = np.frombuffer(contents, np.uint8)
    return buffer
