"""Copies of one array that share a tensor map, because the launcher cannot pass one for each.

The box of a tensor map fixes how much one instruction copies, so copies of several tile shapes need
several. The launcher passes at most two parameters for an output or scratch array (see
``launch_plan``). Where a kernel needs more, the copies of the largest box keep their tensor map,
and each of the others becomes several instructions of a box that all of them are multiples of.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxlib.mlir import ir

from pallasite.plugin.ir import bit_width, ops
from pallasite.plugin.lowering import (
    Buffer,
    BufferKind,
    KernelContext,
    Parameter,
    StateKey,
    TensorMapParameter,
)
from pallasite_std.copies.tensor_map_types import SHARED_ALIGNMENT

type Box = tuple[int, ...]

MAXIMUM_PARAMETERS = 2
"""How many parameters the launcher passes for an array that the kernel writes."""

_UNROLLED = 2
"""Parts of which each has an instruction; of more, a loop copies them."""


@dataclasses.dataclass(frozen=True)
class TensorInstruction:
    """An instruction that copies one box.

    Attributes:
      text, constraints: of the inline PTX.
      operands: its operands; the address of the tensor map is one of them.
      parameter: its tensor map.
      shared: which operand is the 32-bit shared address; None if it copies to no shared memory.
      coordinates: which operand is the coordinate along the innermost dimension; those of the
        others follow.
    """

    text: str
    constraints: str
    operands: tuple[ir.Value, ...]
    parameter: TensorMapParameter
    shared: int | None
    coordinates: int


@dataclasses.dataclass
class _Sharing:
    """Which parameters others take the place of, when the body of the kernel is lowered, and what
    stands until then where copies will be."""

    changes: dict[Parameter, Parameter] = dataclasses.field(default_factory=dict)
    waiting: set[ir.Operation] = dataclasses.field(default_factory=set)


_SHARING = StateKey("standard.shared-tensor-maps", lambda kernel: _Sharing())


def emit_later(kernel: KernelContext, instruction: TensorInstruction) -> None:
    """Emits an instruction here, or several that copy the same by a tensor map that it shares."""

    sharing = kernel.state(_SHARING)

    def emit(*operands: ir.Value) -> None:
        change = sharing.changes.get(instruction.parameter)
        if isinstance(change, TensorMapParameter):
            emit_cut(dataclasses.replace(instruction, operands=operands), change)
        else:
            ops.inline_assembly(instruction.text, instruction.constraints, *operands)

    placeholder = kernel.emit_later(emit, *instruction.operands)
    if placeholder is not None:
        sharing.waiting.add(placeholder)


def share(kernel: KernelContext) -> None:
    """Copies to an output use fewer tensor maps, if it has more than the launcher passes."""
    launch, sharing = kernel.launch, kernel.state(_SHARING)

    def divisible(parameter: TensorMapParameter) -> bool:
        # What a plugin does with a tensor map is not known here.
        users = launch.parameter_users(parameter)
        uses = [use for user in users for result in user.results for use in result.uses]
        return all(user.name == "llvm.ptrtoint" for user in users) and all(
            use.owner in sharing.waiting for use in uses
        )

    sharing.changes = shared_parameters(launch.parameters, launch.aliases, divisible)
    launch.replace_parameters(sharing.changes)


def common_box(boxes: Sequence[Box], element_bits: int) -> Box | None:
    """The largest box that each of ``boxes`` can be cut into.

    A box fills shared memory densely, and so do its parts. They begin at multiples of 128 bytes.

    Args:
      boxes: extents in elements, major to minor, all of the same rank.
      element_bits: bits of one element.

    Returns:
      None if there is no such box.
    """
    part = [math.gcd(*extents) for extents in zip(*boxes, strict=True)]
    cut = [max((d for d, p in enumerate(part) if box[d] != p), default=0) for box in boxes]
    for dim in range(max(cut)):
        part[dim] = 1  # A part of what lies within it is dense only in a single place of it.
    whole = all(box == tuple(part) for box in boxes)
    if not whole and math.prod(part) * element_bits % (8 * SHARED_ALIGNMENT):
        return None
    return tuple(part)


def cut_boxes(boxes: Iterable[Box], count: int, element_bits: int) -> dict[Box, Box] | None:
    """For each box the one that it is copied by, of which there are at most ``count`` (1 or 2).

    With two, the largest box for which that is possible is left as it is.

    Args:
      boxes: extents in elements, major to minor, all of the same rank.
      count: how many different boxes there may be.
      element_bits: bits of one element.

    Returns:
      None if so few boxes are not enough.
    """
    found = sorted(set(boxes), key=lambda box: (math.prod(box), box), reverse=True)
    if len(found) <= count:
        return {box: box for box in found}
    if count < 1:
        return None
    for kept in [(box,) for box in found] if count > 1 else [()]:
        others = [box for box in found if box not in kept]
        part = common_box(others, element_bits)
        if part is not None:
            return {box: box if box in kept else part for box in found}
    return None


def shared_parameters(
    parameters: Iterable[Parameter],
    aliases: Sequence[tuple[int, int]],
    divisible: Callable[[TensorMapParameter], bool],
) -> dict[Parameter, Parameter]:
    """Which parameters of a kernel others have to take the place of, so that the launcher can pass
    all that are left.

    Arrays that get few enough parameters are left as they are, and so are those of which too many
    would be left.

    Args:
      parameters: what the kernel asked for.
      aliases: pairs of input and output numbers that share memory.
      divisible: whether all copies by a tensor map can be cut into smaller ones.
    """
    arrays: dict[Buffer, dict[Parameter, list[Parameter]]] = {}
    input_of = {output: given for given, output in aliases}
    written = {given for given, _ in aliases}
    for parameter in parameters:
        array = buffer = parameter.buffer
        if buffer.kind is BufferKind.OUTPUT and buffer.index in input_of:
            array = dataclasses.replace(buffer, kind=BufferKind.INPUT, index=input_of[buffer.index])
        if array.kind is not BufferKind.INPUT or array.index in written:
            same = dataclasses.replace(parameter, buffer=array)
            arrays.setdefault(array, {}).setdefault(same, []).append(parameter)
    result: dict[Parameter, Parameter] = {}
    for asked in arrays.values():
        if sum(map(len, asked.values())) > MAXIMUM_PARAMETERS:
            result.update(_shared_in_array(asked, divisible))
    return result


def _shared_in_array(
    asked: Mapping[Parameter, Sequence[Parameter]],
    divisible: Callable[[TensorMapParameter], bool],
) -> Iterator[tuple[Parameter, Parameter]]:
    """The replacements for one array, of which ``asked`` has the parameters, by what they are if
    an output has no buffer but that of the input it shares memory with."""
    merged = {one: one for one in asked}
    maps = [one for one in asked if isinstance(one, TensorMapParameter)]
    kinds: list[list[TensorMapParameter]] = []
    free = {
        one
        for one in maps
        if all(
            isinstance(member, TensorMapParameter) and divisible(member) for member in asked[one]
        )
    }
    for one in sorted(maps, key=lambda one: math.prod(one.box), reverse=True):
        for kind in kinds:
            if {one, kind[0]} <= free and arrangement(one, kind[0]) is not None:
                kind.append(one)
                break
        else:
            kinds.append([one])
    room = MAXIMUM_PARAMETERS - (len(asked) - len(maps))
    for kind in kinds:
        model = kind[0]
        boxes = {one: _arranged(one.box, arrangement(one, model)) for one in kind}
        bits = bit_width(model.buffer.dtype)
        cut = cut_boxes(boxes.values(), room - (len(kinds) - 1), bits)
        if cut is None:
            return
        merged.update({one: dataclasses.replace(model, box=cut[boxes[one]]) for one in kind})
    for given, members in asked.items():
        yield from ((member, merged[given]) for member in members if member != merged[given])


def arrangement(parameter: TensorMapParameter, model: TensorMapParameter) -> tuple[int, ...] | None:
    """Which dimension of a tensor map each dimension of another is, if that other one can copy the
    same, but for its box.

    Dimensions along which a box has one element may be anywhere but innermost.
    """
    plain = dataclasses.replace(parameter, shape=model.shape, strides=model.strides, box=model.box)
    if plain != model:
        return None
    left = dict(enumerate(zip(parameter.shape, parameter.strides, strict=True)))
    result: list[int] = []
    for wanted in zip(model.shape, model.strides, strict=True):
        found = next((dim for dim, one in left.items() if one == wanted), None)
        if found is None:
            return None
        del left[found]
        result.append(found)
    order = [dim for dim in result if parameter.box[dim] > 1]
    if left or order != sorted(order) or result[-1] != len(parameter.box) - 1:
        return None
    return tuple(result)


def _arranged(box: Box, dims: Sequence[int] | None) -> Box:
    assert dims is not None
    return tuple(box[dim] for dim in dims)


def emit_cut(instruction: TensorInstruction, parameter: TensorMapParameter) -> None:
    """Emits what copies the same as an instruction, by another tensor map: one or several.

    Args:
      instruction: what would be emitted by the tensor map that was asked for.
      parameter: what :func:`shared_parameters` has found for it.
    """
    old = dataclasses.replace(instruction.parameter, buffer=parameter.buffer)
    dims = arrangement(old, parameter)
    box, part = _arranged(old.box, dims), parameter.box
    assert dims is not None
    bits, rank = bit_width(parameter.buffer.dtype), len(part)
    last = instruction.coordinates + rank - 1
    changed = {
        last - place: instruction.operands[last - dim]
        for place, dim in enumerate(dims)
        if place != dim
    }
    shared_step = math.prod(part) * bits // 8
    axes: list[_Axis] = []
    for dim in reversed(range(rank)):
        count = box[dim] // part[dim]
        # Tensor maps count bytes where elements are smaller: see runtime/tensor_maps.py.
        step = part[dim] * bits // 8 if bits < 8 and dim == rank - 1 else part[dim]
        if count > 1:
            axes.insert(0, _Axis(last - dim, count, step, shared_step))
        shared_step *= count
    unrolled = math.prod(axis.count for axis in axes) <= _UNROLLED
    _emit_parts(instruction, axes, changed, unrolled)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """A dimension along which a box is cut ``count`` times.

    From part to part, the coordinate, which is the given operand, grows by ``step``, and the shared
    address by ``shared_step`` bytes.
    """

    operand: int
    count: int
    step: int
    shared_step: int


def _emit_parts(
    instruction: TensorInstruction,
    axes: Sequence[_Axis],
    changed: Mapping[int, ir.Value],
    unrolled: bool,
) -> None:
    """Emits the instruction for each place along the axes; ``changed`` has new operands."""
    if not axes:
        operands = [changed.get(n, value) for n, value in enumerate(instruction.operands)]
        ops.inline_assembly(instruction.text, instruction.constraints, *operands)
        return
    axis = axes[0]
    steps = {axis.operand: axis.step}
    if instruction.shared is not None:
        steps[instruction.shared] = axis.shared_step
    if len(axes) == 1 and not unrolled:
        _emit_loop(instruction, axis.count, steps, changed)
        return

    def emit(place: ir.Value | int) -> None:
        here = dict(changed)
        for position, step in steps.items():
            base = here.get(position, instruction.operands[position])
            way = place * step if isinstance(place, int) else ops.multiply(place, step)
            here[position] = ops.add(base, way)
        _emit_parts(instruction, axes[1:], here, unrolled)

    if unrolled:
        for place in range(axis.count):
            emit(place)
        return

    def body(place: ir.Value, carries: list[ir.Value]) -> Sequence[ir.Value]:
        del carries
        emit(place)
        return ()

    ops.for_loop(ops.i32_constant(0), ops.i32_constant(axis.count), [], body, rolled=True)


def _emit_loop(
    instruction: TensorInstruction,
    count: int,
    steps: Mapping[int, int],
    changed: Mapping[int, ir.Value],
) -> None:
    """Emits the instruction ``count`` times in a loop, from one to the next of which the operands
    that ``steps`` has grow by so much.

    The loop is PTX, of which LLVM sees one instruction. It has nothing to gain here, and its search
    for other induction variables takes longer than all else where an operand is a long sum.
    """
    operands = [changed.get(n, value) for n, value in enumerate(instruction.operands)]
    first = next(iter(steps))
    text = re.sub(
        r"\$(\d+)",
        lambda found: f"at{found[1]}" if int(found[1]) in steps else found[0],
        instruction.text,
    )
    declared = ", ".join(f"at{position}" for position in steps)
    begin = "".join(f"mov.b32 at{position}, ${position};\n\t" for position in steps)
    grow = "".join(f"add.s32 at{n}, at{n}, {step};\n\t" for n, step in steps.items())
    ops.inline_assembly(
        "{ .reg .pred more;\n\t"
        f".reg .b32 {declared}, end;\n\t"
        f"{begin}add.s32 end, ${first}, {count * steps[first]};\n"
        "PARTS_${:uid}:\n\t"
        # ptxas would unroll it, and make hundreds of instructions of what is seldom run.
        '.pragma "nounroll";\n\t'
        f"{text}\n\t{grow}"
        f"setp.ne.s32 more, at{first}, end;\n\t"
        "@more bra PARTS_${:uid};\n\t}",
        instruction.constraints,
        *operands,
    )
