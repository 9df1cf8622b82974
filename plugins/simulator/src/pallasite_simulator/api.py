"""Running kernels from Python: compiled ones, and PTX text."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pallasite.plugin import InvalidValueError, Target, config
from pallasite.plugin.runtime import CompiledKernel, LaunchDevice, hidden_operands
from pallasite_simulator import executor, progress
from pallasite_simulator.arguments import Composed
from pallasite_simulator.engine.geometry import Extent, Geometry
from pallasite_simulator.engine.program import Program
from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.launch import Argument, Descriptor, Execution, Launch, Pointer, Shared, run
from pallasite_simulator.packing import is_packed
from pallasite_simulator.programs import load
from pallasite_simulator.statistics.chips import Chip, find_chip
from pallasite_simulator.statistics.summary import Statistics, summarize
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.ptx.syntax import Variable
    from pallasite_simulator.sanitizer.findings import Finding


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What one run of a kernel gave.

    Attributes:
      outputs: of a compiled kernel, its outputs, the hidden ones last; of PTX, the arrays among the
        arguments.
      printed: what the kernel printed.
      findings: what the sanitizer found.
      statistics: what the kernel did, in numbers; None if not asked for.
      note: why fewer processes than asked for shared the work; else empty.
      unwritten: for each output of a compiled kernel that was not written, as a whole or in part,
        what is missing.
    """

    outputs: tuple[Array, ...]
    printed: str
    findings: tuple[Finding, ...]
    statistics: Statistics | None
    note: str = ""
    unwritten: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TensorArgument:
    """A kernel argument that is a TMA descriptor of an array.

    Attributes:
      array: where the tensor is.
      map: the descriptor; its address counts from the beginning of the array.
    """

    array: Array
    map: TensorMap


def simulate(
    compiled: CompiledKernel,
    *inputs: Any,
    blocks: Sequence[int] | None = None,
    sanitize: bool | str | Sequence[str] | None = None,
    statistics: bool = True,
    progress: bool | None = None,
    processes: int | None = None,
    chip: str | Chip | None = None,
) -> Simulation:
    """Runs a compiled kernel on arrays.

    Args:
      compiled: from ``pallasite.compile``.
      *inputs: one array for each of ``compiled.launch.caller_inputs``. Hidden operands are those of
        CPU device 0, unless they are given too: an array for each of ``compiled.launch.inputs``.
      blocks: linear numbers of the blocks of the grid to run (x fastest); the clusters that they
        belong to are run whole. None for all.
      sanitize: whether to check what the kernel does, or names of groups of checks. What is found
        is not raised, but part of the result.
      statistics: whether to count instructions, bytes and bank conflicts, and to estimate the time.
      progress: whether to show a progress bar; None for a terminal only.
      processes: how many processes share the blocks. Blocks that may communicate run in one.
      chip: the chip that the estimate is for, or its name; by default that of the target.

    For None, the options ``sanitize``, ``simulator_progress``, ``simulator_processes`` and
    ``simulator_chip`` hold.

    Raises:
      InvalidTypeError: the inputs are not those that the kernel was compiled for.
      SimulationError: the kernel did something that has no meaning.
    """
    if len(inputs) == len(compiled.launch.caller_inputs):
        inputs = (*inputs, *hidden_operands(compiled, LaunchDevice("cpu", 0, 0)))
    arrays = executor.Arrays(compiled, inputs)
    nothing = executor.launches_nothing(compiled.launch)
    if nothing:
        outputs = tuple(arrays.untouched())
        blocks = ()
    settings = _Settings.of(sanitize, statistics, progress, processes, chip)
    allocations = compiled.resources.allocations
    launch = executor.make_launch(
        compiled, arrays, blocks=blocks, **settings.of_launch(allocations)
    )
    execution, note = settings.run(launch)
    unwritten: list[str] = []
    if not nothing:
        outputs = tuple(arrays.outputs())
        unwritten = arrays.unwritten() if blocks is None else []
    simulation = settings.result(launch, execution, outputs, note, compiled.target)
    return dataclasses.replace(simulation, unwritten=tuple(unwritten))


def simulate_devices(
    compiled: CompiledKernel,
    inputs: Sequence[Sequence[Any]],
    *,
    sanitize: bool | str | Sequence[str] | None = None,
    statistics: bool = True,
    progress: bool | None = None,
    chip: str | Chip | None = None,
) -> list[Simulation]:
    """Runs a compiled kernel on several devices at once, without JAX.

    Args:
      compiled: from ``pallasite.compile`` of a program in which ``jax.shard_map`` calls the kernel
        on a mesh of so many devices; an abstract mesh will do.
      inputs: for each device in the order of the mesh, an array for each of
        ``compiled.launch.caller_inputs``.
      sanitize, statistics, progress, chip: as for :func:`simulate`.

    Returns:
      What the run gave on each device. What was printed and found is with the first one.

    Raises:
      InvalidTypeError: the inputs are not those that the kernel was compiled for.
      SimulationError: the kernel did something that has no meaning.
    """
    from pallasite_simulator.devices import execution as devices

    settings = _Settings.of(sanitize, statistics, progress, 1, chip)
    hidden = hidden_operands(compiled, LaunchDevice("cpu", 0, 0))
    made = {one.input for one in devices.provided(compiled)}
    first = len(compiled.launch.caller_inputs)
    kept = [one for number, one in enumerate(hidden, first) if number not in made]
    given = {rank: [*map(np.asarray, one), *kept] for rank, one in enumerate(inputs)}
    launch_settings = settings.of_launch(compiled.resources.allocations)
    launch_settings["processes"] = 1
    found = devices.simulate(compiled, given, launch_settings, settings.progress)
    simulations = []
    for number, (arrays, launch, execution) in enumerate(found):
        one = settings.result(launch, execution, tuple(arrays.outputs()), "", compiled.target)
        if number:
            one = dataclasses.replace(one, printed="", findings=())
        else:
            printed = "".join(text for _, _, each in found for text in each.output)
            one = dataclasses.replace(one, printed=printed)
        simulations.append(dataclasses.replace(one, unwritten=tuple(arrays.unwritten())))
    return simulations


def run_ptx(
    ptx: str | os.PathLike[str],
    arguments: Sequence[Any] = (),
    *,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 1,
    cluster: int | Sequence[int] = 1,
    shared_memory_bytes: int = 0,
    name: str | None = None,
    target: str | Target | None = None,
    blocks: Sequence[int] | None = None,
    sanitize: bool | str | Sequence[str] | None = None,
    statistics: bool = True,
    progress: bool | None = None,
    processes: int | None = None,
    chip: str | Chip | None = None,
) -> Simulation:
    """Runs a kernel that is given as PTX, from whatever compiler.

    Args:
      ptx: the text of a module, or the path of a file (``pathlib.Path``).
      arguments: one for each parameter: a contiguous NumPy array for a pointer, which the kernel
        may change; the same array several times means the same memory. A NumPy scalar, a number
        (taken as the type of the parameter) or bytes by value. A :class:`TensorArgument` for a
        TMA descriptor. None for a null pointer. A list of such things for a structure by value;
        descriptors in it are aligned to 64 bytes, pointers to 8, NumPy scalars to their size.
      grid, block, cluster: extents x, y, z; ``grid`` counts blocks. Missing ones are 1.
      shared_memory_bytes: dynamic shared memory of each block.
      name: of the kernel; may be left out if the module has only one.
      target: what the estimate is for; by default the target that the module names.
      blocks, sanitize, statistics, progress, processes, chip: as for :func:`simulate`.

    Raises:
      PtxError: the text is malformed, or has an instruction that nothing knows.
      SimulationError: wrong arguments, or the kernel did something that has no meaning.
    """
    text = pathlib.Path(ptx).read_text() if isinstance(ptx, os.PathLike) else ptx
    program = load(text, name, executor.MULTIPROCESSORS)
    found = _target(target, program)
    if found is not None and found.multiprocessors not in (0, executor.MULTIPROCESSORS):
        program = load(text, name, found.multiprocessors)
    geometry = Geometry(
        _extent(grid), _extent(block), _extent(cluster), explicit_cluster=cluster != 1
    )
    _check(program, geometry)
    values, pointers = _arguments(program, arguments)
    settings = _Settings.of(sanitize, statistics, progress, processes, chip)
    launch = Launch(
        program,
        geometry,
        values,
        arrays=pointers,
        dynamic_shared_bytes=shared_memory_bytes,
        blocks=() if 0 in geometry.grid else blocks,
        **settings.of_launch(),
    )
    execution, note = settings.run(launch)
    outputs = tuple(one for one in arguments if isinstance(one, np.ndarray))
    return settings.result(launch, execution, outputs, note, found)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The arguments that both functions share, with the options' values for those left out."""

    sanitize: bool | str | Sequence[str]
    statistics: bool
    progress: bool | None
    processes: int
    chip: Chip | None

    @classmethod
    def of(
        cls,
        sanitize: bool | str | Sequence[str] | None,
        statistics: bool,
        progress: bool | None,
        processes: int | None,
        chip: str | Chip | None,
    ) -> _Settings:
        chip = config.get("simulator_chip") if chip is None else chip
        processes = config.get("simulator_processes") if processes is None else processes
        if processes < 1:
            raise InvalidValueError(
                "wrong number of processes", got=processes, expected="1 or more"
            )
        return cls(
            config.get("sanitize") if sanitize is None else sanitize,
            statistics,
            config.get("simulator_progress") if progress is None else progress,
            processes,
            find_chip(chip) if isinstance(chip, str) else chip,
        )

    def of_launch(self, allocations: Any = ()) -> dict[str, Any]:
        """Attributes of the launch."""
        return {
            "sanitizer": executor.make_sanitizer(self.sanitize, allocations),
            "statistics": self.statistics,
            "processes": self.processes,
            "timeout": config.get("simulator_timeout"),
        }

    def run(self, launch: Launch) -> tuple[Execution, str]:
        """Runs, with a progress bar; also says why it is in fewer processes than asked for."""
        note = ""
        if self.processes > 1:
            from pallasite_simulator.parallel.team import obstacle_of

            reason = obstacle_of(launch)
            note = f"one process: {reason}" if reason else ""
        with progress.bar(launch.program.name, len(launch.order), self.progress) as update:
            launch = dataclasses.replace(launch, progress=update)
            return run(launch, raise_findings=False), note

    def result(
        self,
        launch: Launch,
        execution: Execution,
        outputs: tuple[Array, ...],
        note: str,
        target: Target | None,
    ) -> Simulation:
        """Puts everything together."""
        sanitizer = launch.sanitizer
        numbers = None
        if self.statistics:
            blocks = launch.geometry.blocks
            numbers = summarize(launch.program, execution, blocks, target, self.chip)
        return Simulation(
            outputs,
            "".join(execution.output),
            tuple(sanitizer.findings.found.values()) if sanitizer is not None else (),
            numbers,
            note,
        )


def _target(target: str | Target | None, program: Program) -> Target | None:
    """The target of PTX; None for one that no plugin knows."""
    if isinstance(target, Target):
        return target
    from pallasite.plugin import find_target, manager

    if target is not None:
        return find_target(target)
    return manager().targets().get(program.module.target)


def _extent(value: int | Sequence[int]) -> Extent:
    given = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(given) <= 3 or any(extent < 0 for extent in given):
        raise InvalidValueError(
            "wrong extents of a launch", got=value, expected="up to three numbers: x, y, z"
        )
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _check(program: Program, geometry: Geometry) -> None:
    """Compares a launch with what the kernel asks for (PTX ISA 11.4), and with the hardware."""
    if not 0 < geometry.threads <= 1024:
        raise InvalidValueError(
            "wrong number of threads in a block", got=geometry.threads, expected="1 to 1024"
        )
    if any(g % c for g, c in zip(geometry.grid, geometry.cluster, strict=True)):
        raise InvalidValueError(
            "the grid is not a whole number of clusters",
            got=f"grid {geometry.grid}, cluster {geometry.cluster}",
        )
    for directive, given in (
        ("reqntid", geometry.block),
        ("reqnctapercluster", geometry.cluster),
    ):
        asked = program.function.directives.get(directive)
        if asked and (*asked, 1, 1)[:3] != given:
            raise InvalidValueError(
                f"kernel {program.name!r} demands other extents: .{directive}",
                got=given,
                expected=str(tuple((*asked, 1, 1)[:3])),
            )
    most = program.function.directives.get("maxntid")
    if most and geometry.threads > math.prod(most):
        raise InvalidValueError(
            f"kernel {program.name!r} has fewer threads in a block at most: .maxntid",
            got=geometry.threads,
            expected=str(math.prod(most)),
        )


def _arguments(program: Program, arguments: Sequence[Any]) -> tuple[list[Argument], list[Pointer]]:
    """Arguments as the engine takes them, and the arrays that they refer to."""
    pointers: list[Pointer] = []
    places: dict[int, int] = {}

    def place_of(array: Array, number: int) -> int:
        if is_packed(array.dtype):
            raise InvalidValueError(
                f"argument {number}: elements narrower than a byte are packed in global memory",
                got=array.dtype.name,
                hint="pass an array of uint8",
            )
        if id(array) not in places:
            places[id(array)] = len(pointers)
            pointers.append(Pointer(array, f"argument {number}", array.flags.writeable))
        return places[id(array)]

    def converted(argument: Any, number: int) -> Argument:
        if isinstance(argument, np.ndarray):
            return Shared(place_of(argument, number))
        if isinstance(argument, TensorArgument):
            return Descriptor(place_of(argument.array, number), _encoder(argument.map))
        if isinstance(argument, list | tuple):
            size = 0
            if number < len(program.parameters):
                size = program.parameters[number][0].bytes
            return _structure([converted(one, number) for one in argument], size)
        return cast(Argument, argument)

    values: list[Argument] = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, int | float) and number < len(program.parameters):
            values.append(_scalar(argument, program.parameters[number][0], number))
        else:
            values.append(converted(argument, number))
    return values, pointers


def _structure(parts: Sequence[Argument], size: int) -> Composed:
    """A structure by value of at least ``size`` bytes; its parts are where C puts them."""

    def contents_of(part: Argument, addresses: Sequence[int]) -> tuple[int, bytes]:
        """The alignment of a part, and what it holds."""
        if isinstance(part, Shared):
            return 8, addresses[part.array].to_bytes(8, "little")
        if isinstance(part, Descriptor):
            return 64, part.encode(addresses[part.array])
        if isinstance(part, Composed):
            return 8, part.encode(addresses)
        if part is None:
            return 8, bytes(8)
        if isinstance(part, bytes):
            return 1, part
        if isinstance(part, np.generic):
            return part.itemsize, part.tobytes()
        raise InvalidValueError(
            "this cannot be a part of a structure",
            got=type(part).__name__,
            expected="an array, a TensorArgument, a NumPy scalar, bytes, None, or a list of these",
        )

    def encode(addresses: Sequence[int]) -> bytes:
        contents = b""
        for part in parts:
            alignment, held = contents_of(part, addresses)
            contents += bytes(-len(contents) % alignment) + held
        # C pads structures to their alignment, which is at most that of a descriptor.
        return contents + bytes(size - len(contents) if 0 < size - len(contents) < 64 else 0)

    return Composed(encode)


def _encoder(map: TensorMap) -> Any:
    return lambda address: dataclasses.replace(map, address=address + map.address).encode()


def _scalar(value: float, parameter: Variable, number: int) -> bytes:
    """A Python number as the type of a parameter."""
    from pallasite_simulator.types import TYPES

    kind = TYPES.get(parameter.type)
    if kind is None or kind.kind not in ("bits", "unsigned", "signed", "float"):
        raise InvalidValueError(
            f"argument {number} is a number, its parameter is of type .{parameter.type}",
            got=value,
            expected="a NumPy scalar of the right size, or bytes",
        )
    if kind.kind == "float":
        return np.asarray(value).astype(kind.dtype).tobytes()
    if not isinstance(value, int):
        raise InvalidValueError(
            f"argument {number} is a float, its parameter is of type .{parameter.type}",
            got=value,
            expected="an integer, or a NumPy scalar of the right size",
        )
    signed = value < 0
    try:
        return int(value).to_bytes(kind.bytes, "little", signed=signed)
    except OverflowError as error:
        raise InvalidValueError(
            f"argument {number} does not fit its parameter of type .{parameter.type}", got=value
        ) from error
