"""Calls of functions that have no body: what CUDA's runtime provides (PTX ISA 9.7.12.5, call).

Calls of functions with a body are inlined before; here are ``vprintf``, ``__assertfail``,
``malloc`` and ``free``, and ``brkpt``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine.inline import call_parts
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.accesses import from_memory, to_memory
from pallasite_simulator.instructions.heap import bind_free, bind_malloc
from pallasite_simulator.instructions.print_format import Conversion, Format, convert, parse_format
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Operand, Register, Sink, Symbol
from pallasite_simulator.types import TYPES, Array, PtxType, Values

instructions = InstructionSet()

U32, U64 = TYPES["u32"], TYPES["u64"]


@instructions.register("call")
def bind_call(instruction: Instruction, binder: Binder) -> Step:
    """Call of an external function: PTX ISA 9.7.12.5 (call)."""
    callee, arguments, results = call_parts(instruction)
    assert isinstance(callee, Symbol)
    if any(one not in ("uni",) for one in instruction.modifiers):
        raise binder.error("unknown modifier", got="." + ".".join(instruction.modifiers))
    known = _FUNCTIONS.get(callee.name)
    if known is None:
        raise binder.error(
            f"function {callee.name!r} has no body",
            expected="a function of this module, or one of " + ", ".join(_FUNCTIONS),
        )
    signature, bind = known
    if len(arguments) != len(signature):
        raise binder.error(
            f"{callee.name} is called with the wrong number of arguments",
            got=len(arguments),
            expected=str(len(signature)),
        )
    sources = [_argument(binder, one, kind) for one, kind in zip(arguments, signature, strict=True)]
    return bind(binder, sources, results)


@instructions.register("brkpt")
def bind_breakpoint(instruction: Instruction, binder: Binder) -> Step:
    """Breakpoint: PTX ISA 9.7.19 (brkpt). Without a debugger, it ends the kernel with an error."""
    binder.expect_operands(0)
    binder.only_modifiers()

    def stop(lanes: Lanes) -> None:
        raise SimulationError(
            f"{lanes.wave.thread_name(int(lanes.numbers[0]))} executes a breakpoint",
            location=instruction.location,
        )

    return stop


# Arguments ----------------------------------------------------------------------------------------


def _variable(binder: Binder, symbol: Symbol) -> np.uint64:
    """The local address of a variable of ``.param`` space."""
    space, address = binder.program.symbol(symbol, binder.instruction)
    if space != "local" or symbol.offset:
        raise binder.error("arguments are registers or variables of .param space", got=symbol)
    return np.uint64(address)


def _argument(binder: Binder, operand: Operand, kind: PtxType) -> Source:
    """An argument of a call: a register, a constant, or a variable of ``.param`` space."""
    if isinstance(operand, Register | Immediate):
        return binder.source(operand, kind)
    if not isinstance(operand, Symbol):
        raise binder.error("arguments are registers or variables of .param space", got=operand)
    address, instruction = _variable(binder, operand), binder.instruction

    def read(lanes: Lanes) -> Values:
        raw = lanes.wave.memory.load(lanes, "local", address, kind.bytes, instruction)
        return from_memory(raw, kind)

    return read


def _result(
    binder: Binder, results: tuple[Operand, ...], kind: PtxType
) -> Callable[[Lanes, Values], None]:
    """Writes the result of a call: to a register, or a variable of ``.param`` space."""
    if len(results) > 1:
        raise binder.error("the function has one result", got=len(results))
    if not results:
        return lambda lanes, values: None
    (operand,) = results
    if isinstance(operand, Register | Sink):
        return binder.destination(operand, kind)
    if not isinstance(operand, Symbol):
        raise binder.error("results are registers or variables of .param space", got=operand)
    address, instruction = _variable(binder, operand), binder.instruction

    def write(lanes: Lanes, values: Values) -> None:
        raw = to_memory(values, kind, lanes.count)
        lanes.wave.memory.store(lanes, "local", address, raw, kind.bytes, instruction)

    return write


def _string(lanes: Lanes, lane: int, address: int, instruction: Instruction) -> bytes:
    """The string at a generic address that a lane (by its place among the lanes) has.

    Raises:
      SimulationError: it does not end inside the memory of its variable.
    """
    wave = lanes.wave
    memory = wave.memory
    one = wave.lanes(lanes.numbers[lane : lane + 1])
    ((space, _, inner),) = memory.resolve(one, np.full(1, address, np.uint64))
    offset = int(memory.offsets(one, space, inner, 1, instruction)[0])
    contents = memory.regions[space].bytes
    if space == "global":
        variable = memory.global_memory.allocation_at(offset)
        assert variable is not None
        end = variable.offset + variable.size
    else:
        stride = {"local": memory.local_stride, "shared": memory.shared_stride}.get(space)
        end = len(contents) if stride is None else (offset // stride + 1) * stride
    zeros = np.flatnonzero(contents[offset:end] == 0)
    if not len(zeros):
        raise SimulationError(
            f"{wave.thread_name(int(one.numbers[0]))} reads a string without an end,"
            f" in: {instruction.text}",
            got=memory.describe(space, offset),
            location=instruction.location,
        )
    return contents[offset : offset + int(zeros[0])].tobytes()


# printf -------------------------------------------------------------------------------------------


def _bind_printf(binder: Binder, sources: list[Source], results: tuple[Operand, ...]) -> Step:
    """CUDA's ``vprintf(format, arguments)``: prints, and returns the number of arguments."""
    read_format, read_buffer = sources
    write = _result(binder, results, U32)
    instruction = binder.instruction

    def step(lanes: Lanes) -> None:
        formats = np.broadcast_to(read_format(lanes), (lanes.count,))
        buffers = np.broadcast_to(read_buffer(lanes), (lanes.count,))
        counts = np.full(lanes.count, 0xFFFFFFFF, np.uint32)
        texts: list[bytes] = [b""] * lanes.count
        for address in np.unique(formats[formats != 0]):
            chosen = np.flatnonzero(formats == address)
            parsed = _format(lanes, int(chosen[0]), int(address), instruction)
            counts[chosen] = parsed.arguments
            some = lanes.where(formats == address)
            assert some is not None
            lines = _print(some, parsed, buffers[chosen], instruction)
            for place, line in zip(chosen, lines, strict=True):
                texts[place] = line
        lanes.wave.output += [text.decode(errors="replace") for text in texts if text]
        write(lanes, counts)

    return step


def _format(lanes: Lanes, lane: int, address: int, instruction: Instruction) -> Format:
    text = _string(lanes, lane, address, instruction)
    try:
        return parse_format(text)
    except ValueError as error:
        raise SimulationError(
            f"printf has an unknown format, in: {instruction.text}",
            got=f"{str(error)!r} in {text.decode(errors='replace')!r}",
            expected="conversions of the types c, d, i, o, u, x, X, p, e, f, g, a, s",
            location=instruction.location,
        ) from None


def _print(lanes: Lanes, parsed: Format, buffers: Array, instruction: Instruction) -> list[bytes]:
    """What each lane prints."""
    memory = lanes.wave.memory

    def load(offset: int, size: int) -> Array:
        places = buffers + np.uint64(offset)
        return memory.load(lanes, "generic", places, size, instruction)

    columns = []
    for one in parsed.conversions:
        values = _values(lanes, one, load(one.offset, one.bytes), instruction)
        widths = [0] * lanes.count
        if one.width_offset is not None:
            widths = load(one.width_offset, 4).view(np.int32).tolist()
        columns.append(
            [convert(one, value, width) for value, width in zip(values, widths, strict=True)]
        )
    first, *others = parsed.literals
    return [
        first + b"".join(text + literal for text, literal in zip(row, others, strict=True))
        for row in (zip(*columns, strict=True) if columns else [()] * lanes.count)
    ]


def _values(
    lanes: Lanes, conversion: Conversion, raw: Array, instruction: Instruction
) -> list[int | float | bytes | None]:
    """Arguments as :func:`convert` takes them."""
    if conversion.type == "s":
        strings: dict[int, bytes | None] = {0: None}
        found: list[int | float | bytes | None] = []
        for lane, address in enumerate(raw.tolist()):
            if address not in strings:
                strings[address] = _string(lanes, lane, address, instruction)
            found.append(strings[address])
        return found
    if conversion.type in "eEfFgGaA":
        return list(raw.view(np.float64).tolist())
    return list(raw.tolist())


# assert -------------------------------------------------------------------------------------------


def _bind_assertion(binder: Binder, sources: list[Source], results: tuple[Operand, ...]) -> Step:
    """CUDA's ``__assertfail(condition, file, line, function, ...)``: ends the kernel."""
    instruction = binder.instruction
    if results:
        raise binder.error("the function has no result", got=len(results))

    def step(lanes: Lanes) -> None:
        condition, file, line, function = (
            int(np.broadcast_to(read(lanes), (lanes.count,))[0]) for read in sources[:4]
        )

        def text(address: int) -> str:
            if not address:
                return "?"
            return _string(lanes, 0, address, instruction).decode(errors="replace")

        raise SimulationError(
            f"assertion failed: {text(condition)}, in {text(function)} at {text(file)}:{line}",
            got=f"{lanes.wave.thread_name(int(lanes.numbers[0]))} ({lanes.count} lanes)",
            location=instruction.location,
        )

    return step


def _bind_heap(
    bind: Callable[[Binder, list[Source], Callable[..., None]], Step],
) -> Callable[[Binder, list[Source], tuple[Operand, ...]], Step]:
    def bound(binder: Binder, sources: list[Source], results: tuple[Operand, ...]) -> Step:
        return bind(binder, sources, _result(binder, results, U64))

    return bound


_FUNCTIONS: dict[
    str,
    tuple[tuple[PtxType, ...], Callable[[Binder, list[Source], tuple[Operand, ...]], Step]],
] = {
    "malloc": ((U64,), _bind_heap(bind_malloc)),
    "free": ((U64,), _bind_heap(bind_free)),
    "vprintf": ((U64, U64), _bind_printf),
    "__assertfail": ((U64, U64, U32, U64, U64), _bind_assertion),
    "__assert_fail": ((U64, U64, U32, U64), _bind_assertion),
}
