"""What a kernel asks of its launch: plain records that lowering fills in and executors read."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any

from pallasite.errors import SourceLocation
from pallasite.resource import SHARED_MEMORY

PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""By name of dtype, the bits of an element that shares its byte with others in GPU memory."""


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The JAX device mesh around a kernel's call.

    Attributes:
      axes: names and sizes of all axes in order; the position along the last one counts fastest in
        a device's number, which is its index in ``mesh.devices.flat``.
      manual: names of those over which the call is manually sharded (``jax.shard_map``).
    """

    axes: tuple[tuple[Hashable, int], ...] = ()
    manual: tuple[Hashable, ...] = ()

    @property
    def manual_sizes(self) -> dict[Hashable, int]:
        """Sizes of the manual axes by name."""
        return {name: size for name, size in self.axes if name in self.manual}


class BufferKind(enum.Enum):
    """Where a kernel parameter's memory comes from."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


TENSOR_MAP_TYPES: Mapping[int, str] = {
    0: "UINT8",
    1: "UINT8",
    2: "UINT16",
    3: "UINT32",
    4: "UINT64",
    5: "FLOAT16",
    6: "FLOAT32",
    7: "BFLOAT16",
    8: "UINT8",
    9: "INT32",
    10: "INT64",
}
"""Data type of the driver's tensor map for each code; codes 0 and 8 are packed into bytes."""


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
    ``element_type`` is the code in :data:`TENSOR_MAP_TYPES`; ``swizzle`` in bytes (16 means
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
"""What a parameter of a kernel is: the address of an array, or a tensor map."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenOperand:
    """An input of a kernel that its caller does not pass: the host provides it at each launch.

    Attributes:
      name: unique in the kernel.
      input: which of ``LaunchParameters.inputs`` it is.
      value: the bytes of the array, row-major; None if something else makes it.
      initialiser: ``"module:function"`` of the host, or an empty string.
      provider: ``"module:object"`` of the host, an ``OperandProvider``, or an empty string.
      arguments: keyword arguments of that function, as JSON.
      per_device: whether each device has a value of its own; then the function gets the device.
    """

    name: str
    input: int
    value: bytes | None = None
    initialiser: str = ""
    provider: str = ""
    arguments: str = "{}"
    per_device: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenResult:
    """An output of a kernel that its caller does not get: the host consumes it after each launch.

    Attributes:
      name: unique in the kernel.
      output: which of ``LaunchParameters.outputs`` it is.
      consumer: ``"module:function"`` of the host.
      arguments: keyword arguments of that function, as JSON.
    """

    name: str
    output: int
    consumer: str
    arguments: str = "{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStep:
    """What the host does once on each device, before a kernel is first launched there.

    Attributes:
      function: ``"module:function"`` of the host.
      arguments: keyword arguments of that function, as JSON.
    """

    function: str
    arguments: str = "{}"


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """How to launch a kernel: CUDA dimensions (x, y, z), shared memory, and its parameters.

    ``grid`` counts blocks, so it includes the cluster extents. ``aliases`` pairs input and output
    numbers that share memory. ``inputs`` and ``outputs`` are those of the kernel's caller, and
    behind them the hidden ones, which ``hidden_operands`` and ``hidden_results`` describe.
    ``before_first_launch`` is what the host does on each device before the kernel first runs there.
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
    hidden_operands: tuple[HiddenOperand, ...] = ()
    hidden_results: tuple[HiddenResult, ...] = ()
    before_first_launch: tuple[HostStep, ...] = ()

    @property
    def caller_inputs(self) -> tuple[Buffer, ...]:
        """The inputs that the kernel's caller passes."""
        hidden = {one.input for one in self.hidden_operands}
        return tuple(one for number, one in enumerate(self.inputs) if number not in hidden)


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One request for a resource, and the user's line that made it.

    ``space`` is ``"smem"``, ``"barrier"``, ``"gmem"`` for hidden results, or what a plugin calls
    its own; ``amount`` is in ``unit``; ``offset`` is where it lies, in the same unit; ``resource``
    is the name of what it is a part of; ``accessed_at`` are the lines that access it, if known.
    """

    space: str
    what: str
    amount: int
    offset: int
    location: SourceLocation | None = None
    resource: str = SHARED_MEMORY.name
    unit: str = SHARED_MEMORY.unit
    accessed_at: tuple[SourceLocation, ...] = ()


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
