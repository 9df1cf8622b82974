"""``wgmma.mma_async``: MMAs by warpgroups (PTX ISA 9.7.15.5.2).

The result is computed when the instruction is issued, for all warpgroups of the wave at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from pallasite_hopper.simulation import descriptors
from pallasite_hopper.simulation.accumulators import Accumulators
from pallasite_hopper.simulation.descriptors import CHUNK, Tile
from pallasite_hopper.simulation.groups import Groups
from pallasite_hopper.simulation.warpgroups import THREADS, WARPS, Convergence
from pallasite_simulator.binder import PRED, U32, U64, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions import tensor_core
from pallasite_simulator.instructions.tensor_core import FORMATS
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from pallasite_simulator.types import TYPES, Array, Values

instructions = InstructionSet()

M = 64

_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "s8": 32, "b1": 256}
"""Extent along K by the type of A."""

_FAMILY = {"e5m2": "e4m3", "u8": "s8"}

_ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "s8": ("s32",),
    "b1": ("s32",),
}

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What the name says, and what the constant operands say."""

    n: int
    d: str
    a: str
    b: str
    saturate: bool
    negate: bool = False
    transposed: tuple[bool, bool] = (False, False)

    @property
    def registers(self) -> int:
        """Registers of the accumulator."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def operations(self) -> int:
        return 2 * M * self.n * _K[_FAMILY.get(self.a, self.a)]


type _Matrix = Callable[[Lanes, Lanes], tuple[Array, Array | None]]
"""Gets a matrix for whole warpgroups, given them and the first lane of each: its elements, of shape
(warpgroups, rows, K) (transposed: (warpgroups, K, rows)), and the places of its chunks if they are
in shared memory."""


@instructions.register("wgmma.mma_async.sp")
def bind_sparse(instruction: Instruction, binder: Binder) -> Step:
    """MMAs with sparse matrices (PTX ISA 9.7.15.6.4), which the simulator does not have."""
    raise binder.error("the simulator does not have products of sparse matrices")


@instructions.register("wgmma.mma_async", needs_warp=True)
def bind_product(instruction: Instruction, binder: Binder) -> Step:
    """Multiplies matrices and adds the result to accumulators, or sets them: PTX ISA 9.7.15.5.2,
    wgmma.mma_async."""
    form = _operands(binder, _parse(binder))
    numbers, reads = _accumulator(binder, form)
    in_registers = isinstance(binder.operand(1), Vector)
    matrix_a = (
        _registers(binder, form)
        if in_registers
        else _shared(binder, 1, form.a, Tile(M, not form.transposed[0]), instruction)
    )
    matrix_b = _shared(binder, 2, form.b, Tile(form.n, not form.transposed[1]), instruction)
    scale = binder.source(3, PRED)
    left = _numbers(binder, binder.elements(1)) if in_registers else ()
    negate, operations, (across_a, across_b) = form.negate, form.operations, form.transposed
    convergence = Convergence(instruction)

    def step(lanes: Lanes) -> list[Wait] | None:
        whole, waits = convergence.arrive(lanes)
        if whole is not None:
            execute(whole)
        return waits or None

    def execute(lanes: Lanes) -> None:
        wave = lanes.wave
        first = wave.lanes(lanes.numbers[::THREADS])
        a, places_a = matrix_a(lanes, first)
        b, places_b = matrix_b(lanes, first)
        if negate:
            np.negative(a, out=a)
        if not across_a:
            a = tensor_core.along_k(a)
        keep = _by_group(scale(lanes), lanes, "scale-d", instruction).astype(np.uint8)
        held = Accumulators.of(wave, numbers)
        held.hold(lanes, reads, keep)
        held.add(lanes, a, b, keep, form.d, by_rows=across_b, saturate=form.saturate)
        counters = wave.counters
        counters[tensor_core.COUNTER] = (
            counters.get(tensor_core.COUNTER, 0) + first.count * operations
        )
        moved = wave.memory.bytes_moved
        read = CHUNK * sum(one.size for one in (places_a, places_b) if one is not None)
        moved["shared", "read"] = moved.get(("shared", "read"), 0) + read
        if wave.observer is not None:
            _tell(lanes, first, [places_a, places_b], numbers, left, instruction)

    return step


def _tell(
    lanes: Lanes,
    first: Lanes,
    places: list[Array | None],
    accumulator: tuple[int, ...],
    left: tuple[int, ...],
    instruction: Instruction,
) -> None:
    """Tells the observer of an MMA."""
    wave = lanes.wave
    observer = wave.observer
    assert observer is not None
    groups = Groups.of(wave)
    operation = AsyncOperation("wgmma", lanes.numbers, instruction, together=THREADS)
    warps = lanes.warps
    unfenced = ~groups.fenced[warps]
    if unfenced.any():
        observer.misuse(
            lanes.numbers[np.repeat(unfenced, 32)],
            "wgmma.mma_async without a wgmma.fence before it",
            instruction,
        )
        groups.fenced[warps] = True
    written, read = frozenset(accumulator), frozenset(left)
    conflicts = groups.conflicts(warps, written, read)
    if conflicts:
        names = wave.program.register_names()
        listed = ", ".join(sorted(names[number] for number in conflicts)[:4])
        observer.misuse(
            lanes.numbers,
            f"wgmma.mma_async uses {listed} as A in one product and as accumulator in another,"
            " without a wait between them",
            instruction,
        )
    observer.begin(operation)
    for one in places:
        if one is not None:
            owners = np.repeat(first.numbers, one.shape[1])
            observer.async_access(operation, "read", "shared", one.reshape(-1) << 4, CHUNK, owners)
    observer.registers_in_flight(operation, (*accumulator, *left))
    groups.issue(operation, warps, written, read)


# Names and operands -------------------------------------------------------------------------------


def _parse(binder: Binder) -> _Form:
    """Takes the name apart.

    Raises:
      PtxError: there is no such instruction.
    """
    target = binder.program.module.target
    if target != "sm_90a":
        raise binder.error("wgmma exists on one target only", got=target, expected="sm_90a")
    words = list(binder.instruction.modifiers[1:])
    shapes = [one for one in words if _SHAPE.fullmatch(one)]
    if words[:2] != ["sync", "aligned"] or len(shapes) != 1:
        raise binder.error(
            "unknown form", expected="wgmma.mma_async.sync.aligned.m64nNkK.dtype.atype.btype"
        )
    words = [one for one in words[2:] if one != shapes[0]]
    saturate = "satfinite" in words
    if saturate:
        words.remove("satfinite")
    counts = words[3:]
    if len(words) < 3 or counts not in ([], ["and", "popc"]):
        raise binder.error("wgmma.mma_async has three types, and .and.popc for .b1")
    d, a, b = words[:3]
    family = _FAMILY.get(a, a)
    if (
        family not in _K
        or _FAMILY.get(b, b) != family
        or d not in _ACCUMULATORS[family]
        or (counts != []) != (family == "b1")
    ):
        raise binder.error("wgmma.mma_async has no such combination of types", got=words)
    if saturate and family != "s8":
        raise binder.error(".satfinite is for products of integers")
    found = _SHAPE.fullmatch(shapes[0])
    assert found is not None
    n, k = int(found[1]), int(found[2])
    # Integers and bits have no odd multiples of 8 above 32.
    step = 16 if family in ("s8", "b1") and n > 32 else 8
    if k != _K[family] or not 8 <= n <= 256 or n % step:
        raise binder.error(
            "wgmma.mma_async has no such shape for these types",
            got=shapes[0],
            expected=f"m64nNk{_K[family]}, N a multiple of {step} from 8 to 256",
        )
    return _Form(n, d, a, b, saturate)


def _operands(binder: Binder, form: _Form) -> _Form:
    """Adds what the constant operands say."""
    scale = binder.operand(3)
    if isinstance(scale, Immediate) and scale.value not in (0, 1):
        raise binder.error("scale-d must be a predicate, 0 or 1", got=scale.value)
    if form.d == "s32":
        binder.expect_operands(4)
        return form
    in_registers = isinstance(binder.operand(1), Vector)
    transposable = form.a in ("f16", "bf16")
    binder.expect_operands(6 + (2 - in_registers) * transposable)
    signs = [_constant(binder, number, (-1, 1)) for number in (4, 5)]
    transposed = [False, False]
    if transposable:
        transposed[1] = _constant(binder, 7 - in_registers, (0, 1)) == 1
        transposed[0] = not in_registers and _constant(binder, 6, (0, 1)) == 1
    return dataclasses.replace(
        form, negate=signs[0] != signs[1], transposed=(transposed[0], transposed[1])
    )


def _constant(binder: Binder, number: int, allowed: tuple[int, int]) -> int:
    operand = binder.operand(number)
    if not isinstance(operand, Immediate) or operand.value not in allowed:
        raise binder.error(
            f"operand {number} must be a constant",
            got=operand.value if isinstance(operand, Immediate) else operand,
            expected=f"{allowed[0]} or {allowed[1]}",
        )
    return operand.value


def _accumulator(binder: Binder, form: _Form) -> tuple[tuple[int, ...], list[Source]]:
    """The numbers of the accumulator's registers, and what reads them."""
    elements = binder.elements(0)
    if len(elements) != form.registers:
        raise binder.error(
            "wrong number of registers of the accumulator",
            got=len(elements),
            expected=str(form.registers),
        )
    numbers = _numbers(binder, elements)
    if len(set(numbers)) != len(numbers):
        raise binder.error("the registers of an accumulator must be different ones")
    return numbers, [binder.source(one, U32) for one in elements]


def _numbers(binder: Binder, elements: tuple[Operand, ...]) -> tuple[int, ...]:
    numbers = []
    for one in elements:
        if not isinstance(one, Register) or TYPES[one.type].bits != 32:
            raise binder.error("matrices are in registers of 32 bits", got=one)
        numbers.append(binder.program.register(one))
    return tuple(numbers)


# Matrices -----------------------------------------------------------------------------------------


def _registers(binder: Binder, form: _Form) -> _Matrix:
    """A from registers (PTX ISA 9.7.15.5.1.1): four of each lane, as ``mma`` has them."""
    elements = binder.elements(1)
    if len(elements) != 4:
        raise binder.error("A takes four registers", got=len(elements))
    reads = [binder.source(one, U32) for one in elements]
    decode = FORMATS[form.a].decode

    def get(lanes: Lanes, first: Lanes) -> tuple[Array, None]:
        # Of lane 4g + t of warp w, register 2c + h: row 16w + 8h + g, word 4c + t of the row.
        words = np.empty((first.count, WARPS, 2, 8, 2, 4), np.uint32)
        for number, read in enumerate(reads):
            values = read(lanes)
            words[:, :, number % 2, :, number // 2] = (
                values.reshape(-1, WARPS, 8, 4) if values.ndim else values
            )
        return decode(words.reshape(first.count, M, 8)), None

    return get


def _shared(
    binder: Binder, number: int, kind: str, tile: Tile, instruction: Instruction
) -> _Matrix:
    """A or B from shared memory, by a descriptor."""
    if isinstance(binder.operand(number), Vector):
        raise binder.error("B is in shared memory: the operand is a descriptor", got="a vector")
    read, decode = binder.source(number, U64), FORMATS[kind].decode

    def get(lanes: Lanes, first: Lanes) -> tuple[Array, Array]:
        own = _by_group(read(lanes), lanes, "matrix descriptors", instruction)
        places = descriptors.chunks(first, own, tile, instruction)
        memory = lanes.wave.memory.regions["shared"].views[CHUNK]
        held = np.take(memory, places, mode="clip")
        shape = (first.count, tile.rows, -1) if tile.k_major else (first.count, -1, tile.rows // 2)
        return decode(held.view(np.uint32).reshape(shape)), places

    return get


def _by_group(values: Values, lanes: Lanes, what: str, instruction: Instruction) -> Array:
    """One value for each warpgroup.

    Raises:
      SimulationError: threads of a warpgroup have different values.
    """
    if not values.ndim:
        return np.full(lanes.count // THREADS, values)
    parts = values.reshape(-1, THREADS)
    own: Array = np.ascontiguousarray(parts[:, 0])
    different = parts != own[:, None]
    if different.any():
        group = int(np.flatnonzero(different.any(axis=1))[0])
        lane = int(lanes.numbers[group * THREADS])
        raise SimulationError(
            f"the threads of a warpgroup have different {what}, in: {instruction.text}",
            got=f"the warpgroup of {lanes.wave.thread_name(lane)}",
            location=instruction.location,
        )
    return own
