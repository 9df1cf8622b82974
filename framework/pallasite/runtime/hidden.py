"""The host's side of hidden operands and results, and its steps before a kernel's first launch.

Functions of the host are named ``"module:function"`` in a compiled kernel, so that it can be kept
on disk; they are imported when they are called.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import ExecutionError, InvalidTypeError
from pallasite.extensions import LaunchRequest
from pallasite.launch import Buffer, HiddenOperand


@dataclasses.dataclass(frozen=True)
class LaunchDevice:
    """A device of this process, where kernels are launched.

    Attributes:
      platform: JAX's, such as ``"cuda"``; ``"cpu"`` where the simulator runs kernels.
      ordinal: its number among the devices of the platform that this process has; CUDA's number.
      id: its number among those of all processes of a program.
    """

    platform: str
    ordinal: int
    id: int


class OperandProvider(Protocol):
    """Makes a hidden operand where programs run, since it cannot be a constant of a program.

    Both methods get the operand's arguments by keyword, and return an array of its type. A third,
    ``simulated``, is for operands that tell of other devices: see the simulator's ``SharedState``.
    """

    def in_jax(self, compiled: CompiledKernel, request: LaunchRequest, **arguments: Any) -> Any:
        """The operand on the device that runs the call, made of JAX operations: it is traced."""

    def on_device(self, compiled: CompiledKernel, device: LaunchDevice, **arguments: Any) -> Any:
        """The operand (NumPy) of a launch on one device, without a JAX program: PyTorch's, say."""


_lock = threading.RLock()
_values: dict[tuple[Any, ...], np.ndarray] = {}
_done: set[tuple[Any, ...]] = set()


def run_steps(compiled: CompiledKernel, device: LaunchDevice) -> None:
    """Takes the steps before a kernel's first launch on a device, unless they were taken before."""
    for number, step in enumerate(compiled.launch.before_first_launch):
        key = (compiled.name, compiled.ptx, number, step, device)
        with _lock:
            if key in _done:
                continue
            what = f"the step before the first launch of kernel {compiled.name!r}"
            host_function(step.function, what)(device, compiled, **json.loads(step.arguments))
            _done.add(key)


def operand_value(
    compiled: CompiledKernel, operand: HiddenOperand, device: LaunchDevice | None
) -> np.ndarray:
    """What a hidden operand holds; an initialiser is called once in a process, for each device.

    Args:
      compiled: the kernel.
      operand: one of its hidden operands.
      device: where it is launched; None will do if the value is the same on each device.

    Raises:
      ExecutionError: the initialiser cannot be found.
      InvalidTypeError: the initialiser returned something else than the kernel expects.
    """
    buffer = compiled.launch.inputs[operand.input]
    if operand.provider and device is not None:
        made = provider_of(compiled, operand).on_device(
            compiled, device, **json.loads(operand.arguments)
        )
        return _checked(
            np.asarray(made), buffer, f"provider {operand.provider}", _what(compiled, operand)
        )
    if operand.value is not None:
        return np.frombuffer(operand.value, np.dtype(buffer.dtype)).reshape(buffer.shape)
    place = device if operand.per_device else None
    key = (operand.initialiser, operand.arguments, buffer.shape, np.dtype(buffer.dtype), place)
    with _lock:
        if key not in _values:
            what = _what(compiled, operand)
            function = host_function(operand.initialiser, what)
            given = (place,) if operand.per_device else ()
            value = np.asarray(function(*given, **json.loads(operand.arguments)))
            _values[key] = _checked(value, buffer, f"initialiser {operand.initialiser}", what)
        return _values[key]


def provider_of(compiled: CompiledKernel, operand: HiddenOperand) -> OperandProvider:
    """What makes a hidden operand where programs run.

    Raises:
      ExecutionError: it cannot be found.
    """
    return cast(OperandProvider, host_function(operand.provider, _what(compiled, operand)))


def _what(compiled: CompiledKernel, operand: HiddenOperand) -> str:
    return f"hidden operand {operand.name!r} of kernel {compiled.name!r}"


def hidden_operands(compiled: CompiledKernel, device: LaunchDevice) -> list[np.ndarray]:
    """What to pass behind the caller's operands, where a kernel is about to be launched.

    Takes the steps before the first launch there, too.

    Raises:
      ExecutionError: a function of the host cannot be found.
      InvalidTypeError: one returned something else than the kernel expects.
    """
    run_steps(compiled, device)
    return [operand_value(compiled, one, device) for one in compiled.launch.hidden_operands]


def consume_hidden_results(compiled: CompiledKernel, results: Sequence[Any]) -> list[Any]:
    """Hands a launch's hidden results, as NumPy arrays, to the host; returns the caller's."""
    hidden = sorted(one.output for one in compiled.launch.hidden_results)
    for number in hidden:
        consumer(compiled, number)(np.asarray(results[number]), compiled)
    return [value for number, value in enumerate(results) if number not in hidden]


def consumer(compiled: CompiledKernel, number: int) -> Callable[..., Any]:
    """The function of the host that takes a hidden result, and the kernel.

    Args:
      compiled: the kernel.
      number: of the output.

    Raises:
      ExecutionError: it cannot be found.
    """
    (found,) = (one for one in compiled.launch.hidden_results if one.output == number)
    what = f"hidden result {found.name!r} of kernel {compiled.name!r}"
    function = host_function(found.consumer, what)
    return functools.partial(function, **json.loads(found.arguments))


def host_function(reference: str, what: str) -> Callable[..., Any]:
    """A function of the host by its ``"module:function"``.

    Raises:
      ExecutionError: there is none.
    """
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ExecutionError(
            f"{what} needs a function of the host that is not there: {error}",
            got=reference,
            hint="install the plugin that the kernel was compiled with",
        ) from error
    function: Callable[..., Any] = found
    return function


def _checked(value: np.ndarray, buffer: Buffer, function: str, what: str) -> np.ndarray:
    expected = (buffer.shape, np.dtype(buffer.dtype))
    if (value.shape, value.dtype) != expected:
        raise InvalidTypeError(
            f"the {function} of {what} returned another type",
            got=f"{value.dtype.name}{list(value.shape)}",
            expected=f"{expected[1].name}{list(expected[0])}",
        )
    return value
