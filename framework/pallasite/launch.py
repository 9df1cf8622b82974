"""What a kernel asks of its launch: plain records that lowering fills in and executors read."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from pallasite.errors import SourceLocation
from pallasite.resource import SHARED_MEMORY

PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""By name of dtype, the bits of an element that shares its byte with others in GPU memory."""


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
    location: SourceLocation | None = dataclasses.field(default=None, compare=False)


Parameter = ArrayParameter | TensorMapParameter


PROFILE_HEADER_WORDS = 8
PROFILE_EXIT_BIT = 1 << 31


@dataclasses.dataclass(frozen=True)
class Profile:
    """The record of named regions that a kernel leaves in a hidden output.

    The output has a slot for each recorder of each block (x fastest), in 32-bit words: the number
    of events; the multiprocessor; the global timer at the start (low, high); the clock at the
    start; the clock at the end; the global timer at the end (low, high). Then the events, two words
    each: the region's number, with the highest bit set where it ends, and the clock.

    Attributes:
      output: which output it is.
      names: of the regions, by number.
      scope: what a recorder is, ``"warpgroup"`` or ``"warp"``.
      recorders: how many of them a block has.
      events: how many a slot has room for; the count in the slot may be larger.
      directory: where traces are written.
    """

    output: int
    names: tuple[str, ...]
    scope: str
    recorders: int
    events: int
    directory: str

    @property
    def words(self) -> int:
        """Words of one slot."""
        return PROFILE_HEADER_WORDS + 2 * self.events


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """How to launch a kernel: CUDA dimensions (x, y, z), shared memory, and its parameters.

    ``grid`` counts blocks, so it includes the cluster extents. ``aliases`` pairs input and output
    numbers that share memory. With ``profile``, the last of ``outputs`` is not the user's.
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
    profile: Profile | None = None


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One request for a resource, and the user's line that made it.

    ``space`` is ``"smem"``, ``"barrier"``, ``"gmem"`` for the profiler, or what a plugin calls its
    own; ``amount`` is in ``unit``; ``offset`` is where it lies, in the same unit; ``resource`` is
    the name of what it is a part of.
    """

    space: str
    what: str
    amount: int
    offset: int
    location: SourceLocation | None = None
    resource: str = SHARED_MEMORY.name
    unit: str = SHARED_MEMORY.unit


@dataclasses.dataclass(frozen=True)
class ReservedAmount:
    """How much a kernel reserves of a resource that plugins provide, and what the target has.

    ``name``, ``title`` and ``unit`` are those of the resource; ``limit`` is None if it has none.
    """

    name: str
    title: str
    unit: str
    amount: int
    limit: int | None


@dataclasses.dataclass(frozen=True)
class ResourceReport:
    """On-chip resources of a kernel: who asked for what, and what the assembler says.

    ``reserved`` has all that is reserved besides shared memory and barriers.
    The assembler's figures are None until the kernel has been assembled. Stack and spills are in
    bytes per thread, registers in 32-bit registers per thread.
    """

    shared_memory_bytes: int = 0
    shared_memory_limit: int = 0
    barriers: int = 0
    reserved: tuple[ReservedAmount, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    registers: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None
    constant_bytes: int | None = None
