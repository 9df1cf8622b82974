"""Hidden operands and results: arrays that a kernel exchanges with the host behind its caller."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite.launch import Buffer, BufferKind, HiddenOperand, HiddenResult, HostStep

type HostFunction = str | Callable[..., Any]
"""A function of the host that other processes can find: ``"module:function"``, or itself."""

type Arguments = Mapping[str, Any]
"""Keyword arguments of a host function, made of what JSON has."""


def host_step(function: HostFunction, arguments: Arguments | None = None) -> HostStep:
    """What the host does on each device before a kernel's first launch there.

    Args:
      function: called as ``function(device, kernel, **arguments)``, with a :class:`LaunchDevice`
        and the ``CompiledKernel``, once for each device of a process.
      arguments: of what JSON has, since they are kept in the disk cache with the kernel.

    Raises:
      InvalidValueError: no other process could find the function.
      InvalidTypeError: arguments that JSON has not.
    """
    what = "the step before the first launch"
    return HostStep(
        function=function_name(function, what), arguments=json_text(arguments or {}, what)
    )


def function_name(function: HostFunction, what: str) -> str:
    """``"module:function"`` of a host function.

    Raises:
      InvalidValueError: no other process could find it, such as one inside a function.
    """
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if colon and module and name:
            return function
    else:
        module = getattr(function, "__module__", "")
        name = getattr(function, "__qualname__", "")
        found: Any = importlib.import_module(module) if module else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is function:
            return f"{module}:{name}"
    raise InvalidValueError(
        f"{what} names a function that other processes cannot find",
        got=repr(function),
        expected='a function of a module, or its name: "module:function"',
    )


def json_text(arguments: Arguments, what: str) -> str:
    """Arguments as JSON, the same text for the same arguments.

    Raises:
      InvalidTypeError: they are no mapping of strings to what JSON has.
    """
    try:
        if not all(isinstance(key, str) for key in arguments):
            raise TypeError("keys that are not strings")
        return json.dumps(dict(arguments), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"{what} has arguments that cannot be kept: {error}",
            got=repr(arguments),
            expected="a dictionary by keyword of numbers, strings, lists and dictionaries",
        ) from error


@dataclasses.dataclass(frozen=True)
class _Result:
    """A hidden result whose arguments may not be known before the body is lowered."""

    name: str
    output: int
    consumer: str
    arguments: Arguments | Callable[[], Arguments]


class HiddenArrays:
    """The hidden operands and results of one kernel, behind those of its caller.

    Attributes:
      inputs, outputs: all buffers of the kernel, first those of its caller.
    """

    def __init__(self) -> None:
        self.inputs: tuple[Buffer, ...] = ()
        self.outputs: tuple[Buffer, ...] = ()
        self._operands: dict[str, tuple[HiddenOperand, Buffer]] = {}
        self._results: dict[str, tuple[_Result, Buffer]] = {}

    def operand(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        value: Any,
        initialiser: HostFunction | None,
        provider: str | None,
        arguments: Arguments | None,
        per_device: bool,
    ) -> Buffer:
        """See :meth:`LaunchContext.hidden_operand`."""
        what = f"hidden operand {name!r}"
        given = {"a value": value, "an initialiser": initialiser, "a provider": provider}
        names = [name for name, one in given.items() if one is not None]
        if len(names) != 1:
            raise InvalidValueError(
                f"{what} needs either a value, an initialiser or a provider",
                got=" and ".join(names) or "none of them",
            )
        if per_device and initialiser is None:
            raise InvalidValueError(
                f"{what} has {names[0]}, which is not asked for each device",
                got="per_device=True",
                expected="an initialiser",
            )
        extents, kind = tuple(int(extent) for extent in shape), np.dtype(dtype)
        contents = None
        if value is not None:
            array = np.asarray(value)
            if (array.shape, array.dtype) != (extents, kind):
                raise InvalidTypeError(
                    f"the value of {what} has another type",
                    got=f"{array.dtype.name}{list(array.shape)}",
                    expected=f"{kind.name}{list(extents)}",
                )
            contents = np.ascontiguousarray(array).tobytes()
        number, buffer = len(self.inputs), None
        if name in self._operands:
            number, buffer = self._operands[name][0].input, self._operands[name][1]
        record = HiddenOperand(
            name=name,
            input=number,
            value=contents,
            initialiser="" if initialiser is None else function_name(initialiser, what),
            provider="" if provider is None else function_name(provider, what),
            arguments=json_text(arguments or {}, what),
            per_device=per_device,
        )
        made = Buffer(BufferKind.INPUT, number, extents, kind)
        if buffer is None:
            self.inputs = (*self.inputs, made)
            self._operands[name] = (record, made)
        elif self._operands[name] != (record, made):
            raise _asked_twice(what, self._operands[name][1], made)
        return made

    def result(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        consumer: HostFunction,
        arguments: Arguments | Callable[[], Arguments] | None,
    ) -> Buffer:
        """See :meth:`LaunchContext.hidden_result`."""
        what = f"hidden result {name!r}"
        kept = arguments if callable(arguments) else dict(arguments or {})
        if not callable(kept):
            json_text(kept, what)  # Where it is wrong, the caller is told at once.
        number = len(self.outputs)
        if name in self._results:
            number = self._results[name][0].output
        record = _Result(name, number, function_name(consumer, what), kept)
        shape = tuple(int(extent) for extent in shape)
        made = Buffer(BufferKind.OUTPUT, number, shape, np.dtype(dtype))
        if name not in self._results:
            self.outputs = (*self.outputs, made)
            self._results[name] = (record, made)
        elif self._results[name] != (record, made):
            raise _asked_twice(what, self._results[name][1], made)
        return made

    def operands(self) -> tuple[HiddenOperand, ...]:
        """Records of all operands so far."""
        return tuple(record for record, _ in self._operands.values())

    def results(self) -> tuple[HiddenResult, ...]:
        """Records of all results so far; asks for the arguments that were left open."""
        return tuple(
            HiddenResult(
                name=one.name,
                output=one.output,
                consumer=one.consumer,
                arguments=json_text(
                    one.arguments() if callable(one.arguments) else one.arguments,
                    f"hidden result {one.name!r}",
                ),
            )
            for one, _ in self._results.values()
        )


def _asked_twice(what: str, one: Buffer, other: Buffer) -> InvalidValueError:
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return InvalidValueError(
        f"{what} is asked for twice in one kernel, in different ways",
        got="other host functions or values"
        if same
        else f"{np.dtype(one.dtype).name}{list(one.shape)} and"
        f" {np.dtype(other.dtype).name}{list(other.shape)}",
        hint="use a name of your own, such as 'my-plugin.table'",
    )
