"""The parameters of a kernel, and the buffers that it exchanges with its caller and the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.ir.types import pointer_type
from pallasite.launch import ArrayParameter, Buffer, BufferKind, Parameter
from pallasite.lowering.geometry import Geometry
from pallasite.lowering.hidden import Arguments, HiddenArrays, HostFunction
from pallasite.lowering.thread_ids import ThreadIds
from pallasite.targets import Target


class KernelParameters(ThreadIds):
    """Pointers and TMA descriptors that a kernel gets, and what is behind them.

    Attributes:
      hidden: inputs and outputs, those of the kernel's caller and the hidden ones.
      buffers_scratch: global memory that the launch allocates.
      aliases: pairs of input and output numbers that share memory.
    """

    def __init__(self, name: str, target: Target, geometry: Geometry, module: ir.Module):
        super().__init__(name, target, geometry, module)
        self.hidden = HiddenArrays()
        self.buffers_scratch: list[Buffer] = []
        self.aliases: tuple[tuple[int, int], ...] = ()
        self._parameters: dict[Parameter, ir.Value] = {}

    def parameter(self, parameter: Parameter) -> ir.Value:
        """The kernel's argument for ``parameter``: a global pointer, or the generic address of a
        TMA descriptor in parameter space. Equal parameters are one argument."""
        found = self._parameters.get(parameter)
        if found is None:
            space = 1 if isinstance(parameter, ArrayParameter) else 0
            with self.at_entry():
                found = llvm.mlir_undef(pointer_type(space))
            self._parameters[parameter] = found
        return found

    def array_pointer(self, buffer: Buffer) -> ir.Value:
        """The global pointer of a buffer."""
        return self.parameter(ArrayParameter(buffer))

    def new_scratch(self, shape: Sequence[int], dtype: Any, *, zeroed: bool) -> Buffer:
        """A buffer in global memory that the launch allocates; all zeros if ``zeroed``."""
        buffer = Buffer(
            BufferKind.SCRATCH, len(self.buffers_scratch), tuple(shape), dtype, zeroed=zeroed
        )
        self.buffers_scratch.append(buffer)
        return buffer

    def hidden_operand(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        value: Any = None,
        initialiser: HostFunction | None = None,
        provider: str | None = None,
        arguments: Arguments | None = None,
        per_device: bool = False,
    ) -> Buffer:
        """An input in global memory that the host passes at each launch, not the kernel's caller.

        Its memory may not be written to. Asking again for the same one gives the same one.

        Args:
          name: unique in the kernel; ``"my-plugin.table"``, say.
          shape, dtype: of the array.
          value: the array itself, which is kept with the compiled kernel; or
          initialiser: the host function that makes it, when a program is lowered (from PyTorch:
            when the kernel is first called): ``initialiser(**arguments)``, or
            ``initialiser(device, **arguments)`` with a :class:`LaunchDevice` if ``per_device``; or
          provider: ``"module:object"``, an ``OperandProvider``, which makes it when a program runs.
          arguments: of that function, made of what JSON has.
          per_device: whether each device gets a value of its own.

        Raises:
          InvalidValueError: none of the three, or several; another operand of this name.
          InvalidTypeError: a value of another type.
        """
        return self.hidden.operand(
            name,
            shape,
            dtype,
            value=value,
            initialiser=initialiser,
            provider=provider,
            arguments=arguments,
            per_device=per_device,
        )

    def hidden_result(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        consumer: HostFunction,
        arguments: Arguments | Callable[[], Arguments] | None = None,
    ) -> Buffer:
        """An output in global memory that the host gets after each launch, not the kernel's caller.

        The kernel has to write it. Asking again for the same one gives the same one.

        Args:
          name: unique in the kernel; ``"my-plugin.log"``, say.
          shape, dtype: of the array.
          consumer: the host function that gets it: ``consumer(array, kernel, **arguments)``, with a
            NumPy array and the ``CompiledKernel``. From JAX, it may run at any time after the
            launch, and launches on several devices call it in any order.
          arguments: of that function, made of what JSON has; or a function without arguments that
            gives them when the body is lowered.

        Raises:
          InvalidValueError: another result of this name.
        """
        return self.hidden.result(name, shape, dtype, consumer=consumer, arguments=arguments)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters that were asked for so far, in that order."""
        return tuple(self._parameters)

    def parameter_users(self, parameter: Parameter) -> list[ir.Operation]:
        """The operations that use a parameter as it is."""
        return [use.owner for use in self._parameters[parameter].uses]

    def replace_parameters(self, changes: Mapping[Parameter, Parameter]) -> None:
        """Lets other parameters take the place of some that were asked for."""
        # What takes the place of one may be equal to another one that is replaced.
        replaced = {old: self._parameters.pop(old) for old in changes}
        for old, value in replaced.items():
            value.replace_all_uses_with(self.parameter(changes[old]))
            value.owner.erase()
