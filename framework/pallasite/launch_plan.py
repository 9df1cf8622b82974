"""Which buffers a kernel launch passes, in which order: pure data, no JAX.

The launcher gives kernel parameter number n the n-th buffer of the call, operands first and then
results. So every buffer of the call but a tail of results must be taken by exactly one parameter:

* an input that nothing aliases is an operand once for each of its parameters, or not at all;
* an output or scratch array is one result: one parameter. A second parameter gets an operand, an
  uninitialised array that the result aliases. A third has no buffer, because XLA would copy an
  operand that is aliased and also passed a second time;
* an aliased pair of input and output is one array, whose parameters are counted together: one
  operand and one result, so two parameters;
* results that no parameter takes come last, where the launcher does not look;
* an output without parameters is not part of the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pallasite.errors import InternalError, UnsupportedError
from pallasite.launch import ArrayParameter, Buffer, BufferKind, LaunchParameters, Parameter


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """The call's operands and results; the kernel's n-th parameter takes the n-th of them.

    Attributes:
      operands: an input is passed as it is; any other buffer stands for an uninitialised array.
      results: outputs and scratch arrays.
      aliases: pairs of operand and result positions that share memory.
      output_positions: for each output its position among the results, None if not in the call.
      zeroed: positions of parameters whose memory the launcher clears before the kernel.
    """

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    aliases: tuple[tuple[int, int], ...]
    output_positions: tuple[int | None, ...]
    zeroed: frozenset[int]


@dataclasses.dataclass(frozen=True, order=True)
class _Array:
    """One array in memory; an aliased pair is its input. ``kind`` is a position in ``_KINDS``."""

    kind: int
    index: int
    output: int | None = dataclasses.field(default=None, compare=False)

    @property
    def read_only(self) -> bool:
        return self.kind == 0 and self.output is None

    def result_buffer(self, launch: LaunchParameters) -> Buffer:
        if self.kind == _SCRATCH:
            return launch.scratch[self.index]
        return launch.outputs[self.index if self.output is None else self.output]

    def __str__(self) -> str:
        if self.output is not None:
            return f"output {self.output}, which shares memory with input {self.index},"
        return f"{_KINDS[self.kind].value} {self.index}"


_KINDS = (BufferKind.INPUT, BufferKind.OUTPUT, BufferKind.SCRATCH)
_SCRATCH = 2


def canonical_order(
    parameters: Iterable[Parameter], aliases: Sequence[tuple[int, int]] = ()
) -> tuple[Parameter, ...]:
    """An order of a kernel's parameters that the launcher can serve; it is the same for every
    order in which the arrays are given, and a fixed point of this function.

    1. For each input by number: all its parameters; or, if an output aliases it, the first of the
       parameters of the two.
    2. For each output that aliases no input, then each scratch array, by number: the first
       parameter, if it has two.
    3. For each output by number (aliased or not), then each scratch array: the parameter that is
       left, if any.

    Within one array, pointers come before TMA descriptors, and otherwise the given order is kept.

    Args:
      parameters: what the kernel needs; the same parameter twice counts as two.
      aliases: pairs of input and output numbers that share memory.

    Raises:
      UnsupportedError: more than two parameters for an output or a scratch array.
    """
    groups = _group(tuple(parameters), aliases)
    operands: list[Parameter] = []
    results: list[tuple[tuple[bool, int], Parameter]] = []
    for array in sorted(groups):
        members = sorted(groups[array], key=lambda p: not isinstance(p, ArrayParameter))
        if array.read_only:
            operands.extend(members)
            continue
        if len(members) == 2 or array.output is not None:
            operands.append(members.pop(0))
        number = array.index if array.output is None else array.output
        results.extend(((array.kind == _SCRATCH, number), member) for member in members)
    return (*operands, *[p for _, p in sorted(results, key=lambda pair: pair[0])])


def plan_launch(launch: LaunchParameters) -> LaunchPlan:
    """How to call the launcher for a kernel whose parameters have the order of
    ``launch.parameters``: any order that can be served, not only the canonical one.

    Raises:
      UnsupportedError: more than two parameters for an output or a scratch array.
      InternalError: an order that cannot be served, or parameters that contradict the buffers.
    """
    for parameter in launch.parameters:
        _check_buffer(parameter.buffer, launch)
    groups = _group(launch.parameters, launch.aliases)
    arrays = _arrays(launch.parameters, launch.aliases)
    first = {array: arrays.index(array) for array in groups}
    split = 1 + max(
        (
            position
            for position, array in enumerate(arrays)
            if array.read_only
            or position == first[array]
            and (array.output is not None or len(groups[array]) == 2)
        ),
        default=-1,
    )
    shared = {a: position for position, a in enumerate(arrays[:split]) if not a.read_only}
    with_parameter = arrays[split:]
    if len(shared) + len(set(with_parameter)) != sum(
        min(2, len(groups[array])) for array in groups if not array.read_only
    ):
        raise InternalError(
            "the kernel's parameters are in an order that the launcher cannot serve",
            got=", ".join(map(str, arrays)),
            expected="the order of canonical_order",
        )
    results = [*with_parameter, *[array for array in shared if array not in with_parameter]]
    outputs = {
        buffer.index: position
        for position, array in enumerate(results)
        if (buffer := array.result_buffer(launch)).kind is BufferKind.OUTPUT
    }
    return LaunchPlan(
        operands=tuple(_buffers(launch, _KINDS[a.kind])[a.index] for a in arrays[:split]),
        results=tuple(array.result_buffer(launch) for array in results),
        aliases=tuple((shared[array], n) for n, array in enumerate(results) if array in shared),
        output_positions=tuple(outputs.get(i) for i in range(len(launch.outputs))),
        zeroed=_zeroed(launch.parameters),
    )


def _arrays(
    parameters: Sequence[Parameter], aliases: Sequence[tuple[int, int]]
) -> tuple[_Array, ...]:
    """The array of each parameter."""
    input_of = {output: input_ for input_, output in aliases}
    output_of = dict(aliases)
    if len(input_of) != len(aliases) or len(output_of) != len(aliases):
        raise InternalError("an input or output takes part in two aliases", got=aliases)

    def array(buffer: Buffer) -> _Array:
        if buffer.kind is BufferKind.INPUT:
            return _Array(0, buffer.index, output_of.get(buffer.index))
        if buffer.kind is BufferKind.OUTPUT and buffer.index in input_of:
            return _Array(0, input_of[buffer.index], buffer.index)
        return _Array(_KINDS.index(buffer.kind), buffer.index)

    return tuple(array(parameter.buffer) for parameter in parameters)


def _group(
    parameters: Sequence[Parameter], aliases: Sequence[tuple[int, int]]
) -> dict[_Array, list[Parameter]]:
    groups: dict[_Array, list[Parameter]] = {}
    for array, parameter in zip(_arrays(parameters, aliases), parameters, strict=True):
        groups.setdefault(array, []).append(parameter)
    for array, members in groups.items():
        if len(members) > 2 and not array.read_only:
            raise _too_many(array, members)
    return groups


def _too_many(array: _Array, parameters: Sequence[Parameter]) -> UnsupportedError:
    pointers = sum(isinstance(parameter, ArrayParameter) for parameter in parameters)
    locations = [getattr(parameter, "location", None) for parameter in parameters]
    return UnsupportedError(
        f"{array} is accessed in more ways than the launcher can pass",
        got=f"{pointers} pointers and {len(parameters) - pointers} different TMA descriptors",
        expected="a pointer and one descriptor, or two descriptors",
        hint="use one set of transforms for all copies to this output, with tiles that none of"
        " them cuts: they share descriptors then",
        location=next((location for location in reversed(locations) if location), None),
    )


def _zeroed(order: Sequence[Parameter]) -> frozenset[int]:
    """The position of one pointer for each array that must hold zeros at the start."""
    wanted = {p.buffer for p in order if p.buffer.zeroed}
    pointers = {
        parameter.buffer: position
        for position, parameter in enumerate(order)
        if parameter.buffer.zeroed and isinstance(parameter, ArrayParameter)
    }
    if wanted != pointers.keys():
        raise InternalError("zeroed scratch without a pointer parameter", got=wanted)
    return frozenset(pointers.values())


def _buffers(launch: LaunchParameters, kind: BufferKind) -> tuple[Buffer, ...]:
    return {
        BufferKind.INPUT: launch.inputs,
        BufferKind.OUTPUT: launch.outputs,
        BufferKind.SCRATCH: launch.scratch,
    }[kind]


def _check_buffer(buffer: Buffer, launch: LaunchParameters) -> None:
    buffers = _buffers(launch, buffer.kind)
    if not 0 <= buffer.index < len(buffers) or buffers[buffer.index] != buffer:
        raise InternalError(
            f"a parameter's buffer is not {buffer.kind.value} {buffer.index} of the kernel",
            got=buffer,
        )
    if buffer.zeroed and buffer.kind is not BufferKind.SCRATCH:
        raise InternalError(f"{buffer.kind.value} {buffer.index} cannot be zeroed")
