"""What a kernel asks of its launch: plain records that lowering fills in and executors read."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from pallasite.errors import SourceLocation, UnsupportedError


class BufferKind(enum.Enum):
    """Where a kernel parameter's memory comes from."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in global memory that the kernel gets: the ``index``-th input, output or scratch.

    ``zeroed`` scratch must hold zeros when the kernel starts.
    """

    kind: BufferKind
    index: int
    shape: tuple[int, ...]
    dtype: Any
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayParameter:
    """A kernel parameter that is a 64-bit global pointer, aligned to ``alignment`` bytes.

    ``slot`` tells several parameters for one buffer apart; the kernel reads slot 0 only.
    """

    buffer: Buffer
    alignment: int = 256
    slot: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMapParameter:
    """A kernel parameter that is a TMA descriptor (128 bytes, by value, aligned to 64).

    ``shape``, ``strides`` and ``box`` are in elements, major to minor; the last stride is 1.
    ``element_type`` is the code in :data:`pallasite.layouts.tma`; ``swizzle`` in bytes (16 means
    none). Out-of-bounds elements read as zeros and are not written.
    """

    buffer: Buffer
    element_type: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    location: SourceLocation | None = None


Parameter = ArrayParameter | TensorMapParameter


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """How to launch a kernel: CUDA dimensions (x, y, z), shared memory, and its parameters.

    ``grid`` counts blocks, so it includes the cluster extents. ``aliases`` pairs input and output
    numbers that share memory.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_memory_bytes: int
    parameters: tuple[Parameter, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One request for an on-chip resource, and the user's line that made it.

    ``space`` is ``"smem"``, ``"barrier"`` or ``"tmem"``; ``amount`` is in bytes (TMEM: columns);
    ``offset`` is where it lies, in the same unit.
    """

    space: str
    what: str
    amount: int
    offset: int
    location: SourceLocation | None = None


@dataclasses.dataclass(frozen=True)
class ResourceReport:
    """On-chip resources of a kernel: who asked for what, and what the assembler says.

    The assembler's figures are None until the kernel has been assembled. Stack and spills are in
    bytes per thread, registers in 32-bit registers per thread.
    """

    shared_memory_bytes: int = 0
    shared_memory_limit: int = 0
    barriers: int = 0
    tmem_columns: int = 0
    allocations: tuple[Allocation, ...] = ()
    registers: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None
    constant_bytes: int | None = None


def canonical_order(
    parameters: Sequence[Parameter], aliases: Sequence[tuple[int, int]]
) -> tuple[Parameter, ...]:
    """The order of a kernel's parameters, as the launcher matches them with buffers.

    The launcher gives each parameter the next buffer: first the operands, then the results. An
    input that needs several parameters is passed as often. An output is one result; one that needs
    a second parameter gets it from an operand that shares its memory: the aliased input if there
    is one, else an uninitialised operand. Scratch is an operand that shares the memory of a hidden
    result. So: inputs by number, second parameters of outputs, scratch; then outputs by number,
    hidden results of scratch.

    Args:
      parameters: what the kernel needs, in any order; each output at least once.
      aliases: pairs of input and output numbers that share memory.

    Raises:
      UnsupportedError: an output needs more parameters than it has buffers.
    """
    aliased = {output: given for given, output in aliases}
    inputs: list[tuple[int, Parameter]] = []
    seconds: list[tuple[int, Parameter]] = []
    scratch: list[tuple[int, Parameter]] = []
    results: dict[int, Parameter] = {}
    hidden: list[tuple[int, Parameter]] = []
    for parameter in parameters:
        buffer = parameter.buffer
        if buffer.kind is BufferKind.INPUT:
            inputs.append((buffer.index, parameter))
        elif buffer.kind is BufferKind.SCRATCH:
            slot = parameter.slot if isinstance(parameter, ArrayParameter) else 0
            (hidden if slot else scratch).append((buffer.index, parameter))
        elif buffer.index not in results:
            results[buffer.index] = parameter
        else:
            seconds.append((buffer.index, parameter))
    taken = [output for output, _ in seconds]
    passed = {given for given, _ in inputs}
    for output in taken:
        if taken.count(output) > 1 or (output in aliased and aliased[output] in passed):
            needed = [p for p in parameters if p.buffer.kind is BufferKind.OUTPUT]
            raise UnsupportedError(
                f"output {output} is accessed in more ways than the launcher can pass",
                got="; ".join(str(p) for p in needed if p.buffer.index == output),
                expected="plain accesses and copies of one tile shape, or copies of two tile shapes"
                " (one of both for an output that shares memory with an input that is read)",
                hint="use one block shape and one set of transforms for all copies to this output",
            )
    # A second parameter of an output that shares an unused input's memory takes that operand.
    for position, (output, parameter) in reversed(list(enumerate(seconds))):
        if output in aliased:
            inputs.append((aliased[output], parameter))
            del seconds[position]
    by_number = lambda pair: pair[0]  # noqa: E731
    operands = [p for _, p in sorted(inputs, key=by_number)]
    operands += [p for _, p in sorted(seconds, key=by_number)]
    operands += [p for _, p in sorted(scratch, key=by_number)]
    outputs = [results[number] for number in sorted(results)]
    return (*operands, *outputs, *[p for _, p in sorted(hidden, key=by_number)])
