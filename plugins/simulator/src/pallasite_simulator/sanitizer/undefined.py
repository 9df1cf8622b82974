"""Undefined values: registers that were never written, and loads of uninitialized memory.

As in MemorySanitizer (E. Stepanov, K. Serebryany, "MemorySanitizer: fast detector of uninitialized
memory use in C++", 2015), that such a value is moved, combined or compared is no error yet, since
it may be discarded: each bit of a register is defined or not, and the results of instructions are
as defined as their operands. It is an error to use an undefined bit: in an address, in a branch, or
in what other threads or the host get to see.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.observer import Access
from pallasite_simulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)
from pallasite_simulator.sanitizer.contents import Contents
from pallasite_simulator.sanitizer.findings import place
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.types import TYPES, Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.engine.wave import Wave

_PURE = frozenset(
    {"mov", "prmt", "selp", "slct", "setp", "set", "and", "or", "xor", "not", "cnot", "lop3"}
    | {"shl", "shr", "shf", "bfe", "bfi", "bfind", "brev", "popc", "clz", "fns", "bmsk", "szext"}
    | {"add", "sub", "mul", "mad", "mul24", "mad24", "sad", "abs", "neg", "min", "max", "div"}
    | {"addc", "subc", "madc", "rem", "dp4a", "dp2a", "cvt", "cvta", "fma", "rcp", "sqrt", "rsqrt"}
    | {"sin", "cos", "lg2", "ex2", "tanh", "copysign", "testp", "isspacep"}
)
"""Instructions that do nothing but compute registers from registers."""

_BY_ELEMENT = frozenset({"add", "sub", "mul", "fma", "mad", "min", "max", "abs", "neg"})
"""Of these, those that compute each element of packed operands by itself."""

_PACKED = {"f32x2": 32, "f16x2": 16, "bf16x2": 16, "s16x2": 16, "u16x2": 16}
"""Bits of an element by the type of two."""

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclasses.dataclass(slots=True, eq=False)
class Origin:
    """Where undefined values come from.

    Attributes:
      kind: of the finding.
      text: what lanes do there.
      instruction: there.
      hint: for the finding.
      lanes: of them.
      touched: whether an instruction has read the values.
    """

    kind: str
    text: str
    instruction: Instruction
    hint: str
    lanes: Array
    touched: bool = False


@dataclasses.dataclass(slots=True)
class _Read:
    """One register that an instruction reads: which bits are undefined, and what it held."""

    register: int
    name: str
    lanes: Lanes
    bits: Array
    values: Array
    instruction: Instruction


class UndefinedValues:
    """Follows the undefined values of one wave.

    Attributes:
      contents: what shared memory holds.
      local: for each byte of local memory, 1 where it is initialized.
    """

    def __init__(self, wave: Wave, reporter: Reporter):
        self.wave = wave
        self.reporter = reporter
        self.contents = Contents(wave, reporter.allocations)
        self.local = np.zeros(0, np.uint8)
        self._reads: list[_Read] = []
        self._loads: list[tuple[Array, Array, Origin]] = []
        self._stores: list[Access] = []
        self._origins: dict[int, Origin] = {}
        self._loaded: dict[int, Origin] = {}

    # What happens while an instruction is executed ------------------------------------------------

    def read(self, lanes: Lanes, register: int, name: str, instruction: Instruction) -> None:
        """Lanes read a register of which some bits may be undefined."""
        bits = lanes.of(self.wave.undefined[register])
        if not bits.any():
            return
        held = self.wave.registers[register]
        assert held is not None
        values = lanes.of(held).copy()
        if not self._reads:
            self._stores = []  # Of instructions before this one.
        self._reads.append(_Read(register, name, lanes, bits.copy(), values, instruction))
        self.wave.follow = True
        origin = self._origins.get(register)
        if origin is not None:
            origin.touched = True

    def loaded(self, lanes: Array, wrong: Array, origin: Origin) -> None:
        """Lanes load uninitialized bytes (one row for each of the lanes)."""
        origin = self._loaded.setdefault(id(origin.instruction), origin)
        self._loads.append((lanes, wrong, origin))
        self.wave.follow = True

    def access(self, access: Access) -> None:
        """Lanes access memory."""
        if access.space not in ("shared", "local"):
            return
        if access.writes and access.instruction.opcode == "st":
            self._stores.append(access)
        elif self._stores:
            self._stores = []
        if access.writes and access.space == "shared" and access.instruction.opcode != "mbarrier":
            self.contents.written(access.instruction, access.offsets, access.size)

    def follow(self, lanes: Lanes, instruction: Instruction) -> None:
        """Lanes have executed an instruction that read or loaded undefined values."""
        reads, self._reads = self._reads, []
        loads, self._loads = self._loads, []
        stores, self._stores = self._stores, []
        if reads:
            used = reads
            if instruction.opcode in _PURE:
                used = []
                self._compute(lanes, instruction, reads)
            elif instruction.opcode == "st":
                used = self._store(lanes, instruction, reads, stores)
            self._report(used, instruction)
        for numbers, wrong, origin in loads:
            self._load(numbers, wrong, origin)

    def used(self) -> None:
        """What was read decides where lanes go."""
        reads, self._reads = self._reads, []
        for one in reads:
            self._report([one], one.instruction)

    def finish(self) -> None:
        """The end, by an error or not: what was read for an instruction that failed, and loads of
        uninitialized memory whose values nobody looked at."""
        self.used()
        loaded, self._loaded = self._loaded, {}
        for origin in loaded.values():
            if not origin.touched:
                self.reporter.simple(
                    origin.kind, origin.lanes, origin.text, origin.instruction, origin.hint
                )

    # Results --------------------------------------------------------------------------------------

    def shuffled(
        self,
        lanes: Lanes,
        registers: tuple[int, int],
        sources: Array,
        absent: Array,
        instruction: Instruction,
    ) -> None:
        """A shuffle has moved values between lanes; as in :meth:`Observer.shuffled`."""
        register, target = registers
        bits = np.zeros(self.wave.lane_count, np.uint64)
        origin = None
        for one in self._reads:
            if one.register == register:
                bits[one.lanes.index] = one.bits
                origin = self._origin_of(one, instruction)
        self._reads = [one for one in self._reads if one.register != register]
        found = bits[sources]
        if absent.any():
            found[absent] = _ALL
            origin = Origin(
                "misuse of shfl",
                "reads from a lane that does not take part in the shuffle",
                instruction,
                "read from lanes that the member mask names, or do not use what others give",
                lanes.numbers[absent],
            )
        if origin is not None:
            self._define(target, lanes, found, origin)

    def _load(self, numbers: Array, wrong: Array, origin: Origin) -> None:
        elements = self._elements(origin.instruction.operands[0])
        registers = [one for one in elements if isinstance(one, Register)]
        size = wrong.shape[1] // max(1, len(elements))
        lanes = self.wave.lanes(numbers)
        if not wrong.reshape(len(numbers), len(elements), -1).any(axis=(0, 2)).all():
            origin.touched = True
        for position, one in enumerate(elements):
            if not isinstance(one, Register) or not registers:
                continue
            part = wrong[:, position * size : (position + 1) * size]
            bits = np.zeros(len(numbers), np.uint64)
            for byte in range(min(size, 8)):
                column = part[:, byte] if size <= 8 else part.any(axis=1)
                bits |= np.where(column, np.uint64(255) << np.uint64(8 * byte), np.uint64(0))
            # A wider register is extended by the sign, which is in the highest byte.
            if size < 8:
                bits |= np.where(part[:, -1], _ALL << np.uint64(8 * size), np.uint64(0))
            self._define(self.wave.program.register(one), lanes, bits, origin)

    def _store(
        self, lanes: Lanes, instruction: Instruction, reads: list[_Read], stores: list[Access]
    ) -> list[_Read]:
        """Undefined values in shared and local memory make it uninitialized; returns the reads of
        what must be defined."""
        address, value = instruction.operands[0], instruction.operands[1]
        base = address.base if isinstance(address, Address) else None
        of_address = self.wave.program.register(base) if isinstance(base, Register) else -1
        stored = sum(len(one.lanes) for one in stores)
        if stored < lanes.count:
            return [one for one in reads if one.register == of_address or _is_stored(one)]
        wrong = [one for one in reads if one.register == of_address]
        known = self._known(lanes, reads)
        elements = self._elements(value)
        for access in stores:
            here = np.searchsorted(lanes.numbers, access.lanes)
            size = access.size // len(elements)
            for number, element in enumerate(elements):
                bits = np.broadcast_to(self._bits(element, known), (lanes.count,))[here]
                for byte in range(min(size, 8)):
                    undefined = bits >> np.uint64(8 * byte) & np.uint64(255) != 0
                    places = access.offsets[undefined] + number * size + byte
                    if len(places):
                        self._mark(access.space, places)
        return wrong

    def _mark(self, space: str, places: Array) -> None:
        if space == "local":
            self.local[places] = 0
        else:
            self.contents.undefined(places)

    def _compute(self, lanes: Lanes, instruction: Instruction, reads: list[_Read]) -> None:
        known = self._known(lanes, reads)
        bits = self._result(lanes, instruction, known)
        origin = self._origin_of(reads[0], instruction)
        target = instruction.operands[0]
        for one in (target.first, target.second) if isinstance(target, Pair) else (target,):
            shift = 0
            elements = self._elements(one)
            for element in elements:
                width = TYPES[element.type].bits if isinstance(element, Register) else 0
                if isinstance(element, Register):
                    part = bits >> np.uint64(shift) if shift < 64 else bits
                    self._define(self.wave.program.register(element), lanes, part, origin)
                if not width:
                    kinds = [TYPES[m].bits for m in instruction.modifiers if m in TYPES]
                    width = (kinds[-1] if kinds else 64) // len(elements)
                shift += width

    def _result(self, lanes: Lanes, instruction: Instruction, known: dict[int, _Read]) -> Array:
        """Which bits of the result are undefined, for each of the lanes."""
        name, operands = instruction.opcode, instruction.operands[1:]
        bits = [np.broadcast_to(self._bits(one, known), (lanes.count,)) for one in operands]
        anything = np.bitwise_or.reduce(bits) if bits else np.zeros(lanes.count, np.uint64)
        full = np.where(anything != 0, _ALL, np.uint64(0))
        if any(TYPES[m].bits == 128 for m in instruction.modifiers if m in TYPES):
            return full
        if name == "mov":
            return bits[0]
        if name in ("xor", "not", "lop3"):
            return anything
        if name in ("and", "or"):
            first, second = (self._value(lanes, one, known, instruction) for one in operands)
            if first is None or second is None:
                return anything
            if name == "or":
                first, second = ~first, ~second
            one, other = bits
            found: Array = one & other | (first & ~one) & other | one & (second & ~other)
            return found
        if name == "selp":
            chosen = self._value(lanes, operands[2], known, instruction)
            if chosen is not None:
                picked = np.where(chosen & _ONE != 0, bits[0], bits[1])
                return np.where(bits[2] != 0, _ALL, picked)
        if name in ("shl", "shr") and isinstance(operands[1], Immediate):
            return self._shifted(instruction, bits[0], operands[1].value)
        if name == "bfi" and all(isinstance(one, Immediate) for one in operands[2:]):
            return self._inserted(instruction, bits[0], bits[1])
        if name == "prmt" and instruction.modifiers == ("b32",):
            selector = self._value(lanes, operands[2], known, instruction)
            if selector is not None and not bits[2].any():
                return _permuted(bits[0] | bits[1] << np.uint64(32), selector)
        packed = next((m for m in instruction.modifiers if m in _PACKED), None)
        if packed is not None and name in _BY_ELEMENT:
            return _spread(anything, _PACKED[packed])
        if name == "cvt":
            kinds = [TYPES[m] for m in instruction.modifiers if m in TYPES]
            if len(kinds) == 2 and all(one.integer for one in kinds):
                return _extended(bits[0], kinds[1].bits, kinds[1].kind == "signed")
        return full

    def _shifted(self, instruction: Instruction, bits: Array, amount: int) -> Array:
        kind = next(TYPES[m] for m in instruction.modifiers if m in TYPES)
        amount = min(amount, 63)
        if instruction.opcode == "shl":
            return bits << np.uint64(amount)
        return _extended(bits, kind.bits, kind.kind == "signed") >> np.uint64(amount)

    def _inserted(self, instruction: Instruction, field: Array, whole: Array) -> Array:
        """``bfi`` with a position and a length that are known; each has 8 bits."""
        kind = next(TYPES[m] for m in instruction.modifiers if m in TYPES)
        at, length = (
            one.value & 255 for one in instruction.operands[3:] if isinstance(one, Immediate)
        )
        mask = np.uint64(((1 << length) - 1 << at) & ((1 << kind.bits) - 1))
        placed = field << np.uint64(at) if at < 64 else np.zeros_like(field)
        found: Array = placed & mask | whole & ~mask
        return found

    # Details --------------------------------------------------------------------------------------

    def _known(self, lanes: Lanes, reads: list[_Read]) -> dict[int, _Read]:
        """What was read, by register, for all of the lanes."""
        known = {}
        for one in reads:
            if one.lanes.count != lanes.count:
                bits = np.zeros(self.wave.lane_count, one.bits.dtype)
                values = np.zeros(self.wave.lane_count, one.values.dtype)
                bits[one.lanes.index], values[one.lanes.index] = one.bits, one.values
                one = dataclasses.replace(
                    one, lanes=lanes, bits=lanes.of(bits), values=lanes.of(values)
                )
            known[one.register] = one
        return known

    def _elements(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def _bits(self, operand: Operand, known: dict[int, _Read]) -> Array:
        """Undefined bits of an operand, as 64-bit integers."""
        if isinstance(operand, Negated):
            return self._bits(operand.operand, known)
        if isinstance(operand, Vector):
            joined, shift = np.zeros(1, np.uint64), 0
            for one in operand.elements:
                joined = joined | self._bits(one, known) << np.uint64(min(shift, 63))
                shift += TYPES[one.type].bits if isinstance(one, Register) else 0
            return joined
        if isinstance(operand, Register):
            found = known.get(self.wave.program.register(operand))
            if found is not None:
                return found.bits.astype(np.uint64)
        return np.zeros(1, np.uint64)

    def _value(
        self, lanes: Lanes, operand: Operand, known: dict[int, _Read], instruction: Instruction
    ) -> Array | None:
        """The value that an operand had, as 64-bit integers; None if it is not known any more."""
        if isinstance(operand, Negated):
            inner = self._value(lanes, operand.operand, known, instruction)
            return None if inner is None else ~inner
        if isinstance(operand, Immediate):
            return np.full(lanes.count, operand.value & int(_ALL), np.uint64)
        if not isinstance(operand, Register):
            return None
        number = self.wave.program.register(operand)
        if number in known:
            values = known[number].values
        else:
            held = self.wave.registers[number]
            if held is None or operand == instruction.operands[0]:
                return None
            values = lanes.of(held)
        if values.dtype.kind not in "biu":
            return None
        return values.astype(np.uint64)

    def _define(self, register: int, lanes: Lanes, bits: Array, origin: Origin) -> None:
        """Says which bits of a register are undefined, after lanes have written it."""
        if not bits.any():
            return
        whole = self.wave.new_undefined(register)
        if whole.dtype == np.bool_:
            kept = bits != 0
        else:
            kept = bits.astype(whole.dtype)
            if not kept.any():
                return
        before = self.wave.undefined.get(register)
        if before is None:
            before = self.wave.undefined[register] = np.zeros_like(whole)
        before[lanes.index] = kept
        self.wave.defined.pop(register, None)
        self._origins[register] = origin

    def _origin_of(self, read: _Read, instruction: Instruction) -> Origin:
        """Where the undefined bits of a register that an instruction reads come from."""
        return self._origins.get(read.register) or Origin(
            "read of a register without a value",
            f"reads {read.name}, which it has not written",
            instruction,
            "give it a value on every path",
            read.lanes.numbers[read.bits != 0],
        )

    def _report(self, reads: list[_Read], instruction: Instruction) -> None:
        for one in reads:
            wrong = one.lanes.numbers[one.bits != 0]
            if not len(wrong):
                continue
            origin = self._origin_of(one, instruction)
            text = origin.text
            if origin.instruction is not instruction:
                text += f", and uses it at {place(instruction)}"
            self.reporter.simple(origin.kind, wrong, text, origin.instruction, origin.hint)


def _spread(bits: Array, width: int) -> Array:
    """All bits of each of two elements of which any is set."""
    element = (_ONE << np.uint64(width)) - _ONE
    low = np.where(bits & element != 0, element, np.uint64(0))
    high = np.where(bits >> np.uint64(width) & element != 0, element, np.uint64(0))
    result: Array = low | high << np.uint64(width)
    return result


def _extended(bits: Array, width: int, signed: bool) -> Array:
    """Undefined bits of an integer of a width that is extended."""
    if width >= 64:
        return bits
    low = bits & np.uint64((1 << width) - 1)
    if not signed:
        return low
    return np.where(bits >> np.uint64(width - 1) & _ONE != 0, low | _ALL << np.uint64(width), low)


def _is_stored(read: _Read) -> bool:
    """Whether undefined bits of a value are among those that are stored: the low ones."""
    widths = [TYPES[m].bits for m in read.instruction.modifiers if m in TYPES]
    kept = _ALL >> np.uint64(64 - min(widths[-1], 64)) if widths else _ALL
    return bool((read.bits.astype(np.uint64) & kept).any())


def _permuted(bits: Array, selector: Array) -> Array:
    """Undefined bits of what ``prmt`` picks from eight bytes."""
    result = np.zeros(len(bits), np.uint64)
    for position in range(4):
        nibble = selector >> np.uint64(4 * position) & np.uint64(15)
        byte = bits >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128) != 0, np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint64(8) != 0, sign, byte)
        result |= byte << np.uint64(8 * position)
    return result
