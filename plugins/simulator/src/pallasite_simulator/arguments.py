"""What kernels get: arrays in global memory, and the buffer of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.engine.memory import GLOBAL_BASE
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.memory import GlobalMemory
    from pallasite_simulator.engine.program import Program

ALIGNMENT = 256
"""Bytes to which arrays are aligned in global memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """A kernel parameter that points to an array in global memory.

    Attributes:
      array: contiguous; changed in place when the kernel has run, if ``writable``.
      name: for messages.
      writable: whether the kernel may write to it.
      undefined: whether the kernel must not read what it has not written: the array holds rubbish.
      output: the shape and dtype of an output, which the kernel must write; else None.
      semaphores: whether it holds semaphores, which begin at zero.
    """

    array: Array
    name: str = ""
    writable: bool = True
    undefined: bool = False
    output: tuple[tuple[int, ...], np.dtype[Any]] | None = None
    semaphores: bool = False


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


@dataclasses.dataclass(frozen=True, eq=False)
class Composed:
    """A kernel parameter by value that is made of addresses and descriptors of the launch's
    ``arrays``.

    ``encode(addresses)`` returns its bytes, given the addresses of these arrays.
    """

    encode: Callable[[Sequence[int]], bytes]


type Argument = Pointer | Shared | Descriptor | Composed | np.generic | bytes | None
"""What a kernel gets: NumPy scalars and bytes by value, None for a null pointer."""


class Arrays:
    """The arrays of a launch, and where they are in its global memory."""

    def __init__(
        self, memory: GlobalMemory, arrays: Sequence[Pointer], arguments: Sequence[Argument]
    ):
        """Allocates all of them; the memory must not have been sealed."""
        self.memory = memory
        self._shared = len(arrays)
        self._arguments = arguments
        own = [argument for argument in arguments if isinstance(argument, Pointer)]
        self._arrays = [*arrays, *own]
        self._addresses = [
            memory.allocate(
                one.name or f"array {number}",
                one.array.nbytes,
                ALIGNMENT,
                one.writable,
                undefined=one.undefined,
            )
            for number, one in enumerate(self._arrays)
        ]

    def write(self) -> None:
        """Copies the arrays to the memory."""
        for one, address in zip(self._arrays, self._addresses, strict=True):
            contents = _bytes_of(one.array)
            self.memory.bytes_at(address, contents.size)[:] = contents

    def read(self) -> None:
        """Copies those that the kernel may write to back."""
        for one, address in zip(self._arrays, self._addresses, strict=True):
            if one.writable:
                contents = _bytes_of(one.array)
                contents[:] = self.memory.bytes_at(address, contents.size)

    @property
    def outputs(self) -> list[tuple[Pointer, int]]:
        """The outputs that the kernel must write, and their offsets in global memory."""
        return [
            (one, address - GLOBAL_BASE)
            for one, address in zip(self._arrays, self._addresses, strict=True)
            if one.output is not None
        ]

    @property
    def semaphores(self) -> list[int]:
        """Offsets in global memory of the arrays that hold semaphores."""
        return [
            address - GLOBAL_BASE
            for one, address in zip(self._arrays, self._addresses, strict=True)
            if one.semaphores
        ]

    def parameters(self, program: Program) -> Array:
        """The parameter buffer.

        Raises:
          SimulationError: a wrong number or size of arguments.
        """
        arguments = self._arguments
        if len(arguments) != len(program.parameters):
            raise SimulationError(
                f"kernel {program.name!r} is run with the wrong number of arguments",
                got=len(arguments),
                expected=f"{len(program.parameters)}: "
                + ", ".join(f"{one.name} ({one.bytes} bytes)" for one, _ in program.parameters),
            )
        buffer = np.zeros(program.parameter_bytes, np.uint8)
        own = iter(self._addresses[self._shared :])
        for number, (argument, (variable, offset)) in enumerate(
            zip(arguments, program.parameters, strict=True)
        ):
            if isinstance(argument, Pointer):
                contents = next(own).to_bytes(8, "little")
            elif isinstance(argument, Shared):
                contents = self._addresses[argument.array].to_bytes(8, "little")
            elif isinstance(argument, Descriptor):
                contents = argument.encode(self._addresses[argument.array])
            elif isinstance(argument, Composed):
                contents = argument.encode(self._addresses[: self._shared])
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


def _bytes_of(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise SimulationError("arrays of kernels must be contiguous", got=array.strides)
    return array.reshape(-1).view(np.uint8)
