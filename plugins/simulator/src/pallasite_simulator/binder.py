"""What rules bind instructions with: operands become functions of the lanes that execute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.engine.lanes import ALL, Lanes
from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from pallasite_simulator.types import STORAGE, TYPES, Array, PtxType, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program
    from pallasite_simulator.instruction_set import Step

type Source = Callable[[Lanes], Values]
"""The operand's values: one for each lane, or a scalar if it is the same for all. The array may be
the register itself: it must not be written to."""

type Destination = Callable[[Lanes, Values], None]
"""Writes values of the operand's type, one for each lane or a scalar. The array must be new, not
one that came from a :data:`Source`."""

U32 = TYPES["u32"]
U64 = TYPES["u64"]
PRED = TYPES["pred"]


def _discard(lanes: Lanes, values: Values) -> None:
    """The destination ``_``."""


@dataclasses.dataclass(slots=True)
class Binder:
    """Binds one instruction.

    Attributes:
      program: the kernel that it belongs to.
      instruction: the instruction.
      members: set by :meth:`converge_by`.
    """

    program: Program
    instruction: Instruction
    members: Source | None = None

    # Errors ---------------------------------------------------------------------------------------

    def error(self, message: str, *, expected: str | None = None, got: object = None) -> PtxError:
        """An error about this instruction, to be raised."""
        return PtxError(
            message,
            position=self.instruction.position,
            instruction=self.instruction.text,
            expected=expected,
            got=got,
            location=self.instruction.location,
        )

    def expect_operands(self, *numbers: int) -> None:
        """Raises :class:`PtxError` unless the instruction has one of these numbers of operands."""
        if len(self.instruction.operands) not in numbers:
            raise self.error(
                "wrong number of operands",
                got=len(self.instruction.operands),
                expected=" or ".join(map(str, numbers)),
            )

    def only_modifiers(self, *allowed: str) -> None:
        """Raises :class:`PtxError` for a modifier that is neither allowed nor a type."""
        for modifier in self.instruction.modifiers:
            if modifier not in allowed and modifier not in TYPES:
                raise self.error(f"unknown modifier .{modifier}")

    # Types ----------------------------------------------------------------------------------------

    @property
    def types(self) -> tuple[PtxType, ...]:
        """The types among the instruction's modifiers, in order."""
        return tuple(TYPES[name] for name in self.instruction.modifiers if name in TYPES)

    def only_type(self, *allowed: str) -> PtxType:
        """The one type of the instruction; raises :class:`PtxError` if it is not allowed."""
        types = self.types
        if len(types) != 1 or (allowed and types[0].name not in allowed):
            raise self.error(
                "wrong type", expected="one of " + ", ".join(f".{name}" for name in allowed)
            )
        return types[0]

    # Operands -------------------------------------------------------------------------------------

    def source(self, operand: Operand | int, kind: PtxType) -> Source:
        """Values of an operand (or of the operand of this number) as a type.

        A register that is wider than an integer type is cut; a narrower one is an error.

        Raises:
          PtxError: the operand cannot be of this type.
        """
        if isinstance(operand, int):
            operand = self.operand(operand)
        if isinstance(operand, Register):
            return self._register_source(operand, kind)
        if isinstance(operand, Immediate):
            constant = self.constant(operand, kind)
            return lambda lanes: constant
        if isinstance(operand, Negated) and kind.kind == "predicate":
            inner = self.source(operand.operand, kind)
            return lambda lanes: np.logical_not(inner(lanes))
        if isinstance(operand, Special):
            return self._special_source(operand, kind)
        if isinstance(operand, Symbol):
            return self._symbol_source(operand, kind)
        raise self.error("operand of a kind that the instruction does not take", got=operand)

    def destination(self, operand: Operand | int, kind: PtxType) -> Destination:
        """Writes values of a type; a wider register gets integers extended by their sign.

        Raises:
          PtxError: the operand is no register, or too narrow.
        """
        if isinstance(operand, int):
            operand = self.operand(operand)
        if isinstance(operand, Sink):
            return _discard
        if not isinstance(operand, Register):
            raise self.error("the destination must be a register", got=operand)
        number, declared = self.program.register(operand), TYPES[operand.type]
        storage = declared.storage
        if declared.bits == kind.bits:
            if kind.dtype == storage or kind.bits == 128:
                return lambda lanes, values: lanes.put(number, values)
            return lambda lanes, values: lanes.put(number, values.view(storage))
        if declared.bits < kind.bits or not kind.integer or kind.bits == 1:
            raise self.error(
                f"register {operand.name} of type .{declared.name} cannot hold a .{kind.name}"
            )
        extended = np.dtype(f"int{declared.bits}" if kind.kind == "signed" else storage)
        return lambda lanes, values: lanes.put(number, values.astype(extended).view(storage))

    def operand(self, number: int) -> Operand:
        """The operand of this number."""
        if number >= len(self.instruction.operands):
            raise self.error("too few operands", got=len(self.instruction.operands))
        return self.instruction.operands[number]

    def elements(self, operand: Operand | int) -> tuple[Operand, ...]:
        """The elements of a vector operand, or the operand itself as the only one."""
        if isinstance(operand, int):
            operand = self.operand(operand)
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def address(self, operand: Operand | int) -> Source:
        """Addresses of ``[base+offset]``, as 64-bit integers.

        A 32-bit register is extended with zeros, and the sum with the offset wraps in its width, so
        addresses of shared memory may be given either way.
        """
        if isinstance(operand, int):
            operand = self.operand(operand)
        if not isinstance(operand, Address):
            raise self.error("operand must be an address", got=operand, expected="[base+offset]")
        base, offset = operand.base, operand.offset
        if base is None:
            absolute = np.uint64(offset & (2**64 - 1))
            return lambda lanes: absolute
        if isinstance(base, Symbol):
            return self.source(Symbol(base.name, base.offset + offset), U64)
        if not isinstance(base, Register) or TYPES[base.type].bits not in (32, 64):
            raise self.error("addresses are in registers of 32 or 64 bits", got=base)
        kind = TYPES[f"u{TYPES[base.type].bits}"]
        value = self.source(base, kind)
        if kind.bits == 32:
            small = np.uint32(offset & (2**32 - 1))
            return lambda lanes: (value(lanes) + small).astype(np.uint64)
        wide = np.uint64(offset & (2**64 - 1))
        return value if not offset else lambda lanes: value(lanes) + wide

    def constant(self, operand: Immediate, kind: PtxType) -> Any:
        """An immediate as a NumPy scalar of a type (``b128``: an array of two words)."""
        if kind.kind == "predicate":
            return np.bool_(operand.value != 0)
        if kind.kind == "float":
            if operand.kind == "int" and kind.bits >= 32:
                raise self.error(
                    f"an integer is no .{kind.name}", got=operand.value, expected="such as 1.0"
                )
            if operand.kind == "int":
                return np.array(operand.value & (2**kind.bits - 1), kind.storage).view(kind.dtype)[
                    ()
                ]
            if operand.kind == "f64":
                given: Any = np.uint64(operand.value).view(np.float64)
            else:
                given = np.uint32(operand.value).view(np.float32)
            return given if given.dtype == kind.dtype else given.astype(kind.dtype)
        if kind.bits == 128:
            return np.array([operand.value % 2**64, operand.value >> 64 & (2**64 - 1)], np.uint64)
        if operand.kind == "f64" and kind.bits == 32:
            # A decimal float in an untyped 32-bit instruction.
            return np.uint64(operand.value).view(np.float64).astype(np.float32).view(kind.dtype)
        return np.array(operand.value & (2**kind.bits - 1), kind.storage).view(kind.dtype)[()]

    # Ready-made steps -----------------------------------------------------------------------------

    def elementwise(
        self, function: Callable[..., Values], result: PtxType, *sources: PtxType
    ) -> Step:
        """A step ``operand 0 = function(operand 1, ...)``, for each lane on its own.

        Args:
          function: of arrays (or scalars) of the sources' dtypes; returns a new array of the
            result's dtype, or a scalar.
          result: type of operand 0.
          *sources: types of the other operands.
        """
        self.expect_operands(1 + len(sources))
        write = self.destination(0, result)
        reads = [self.source(1 + number, kind) for number, kind in enumerate(sources)]
        if len(reads) == 1:
            (first,) = reads
            return lambda lanes: write(lanes, function(first(lanes)))
        if len(reads) == 2:
            first, second = reads
            return lambda lanes: write(lanes, function(first(lanes), second(lanes)))
        if len(reads) == 3:
            first, second, third = reads
            return lambda lanes: write(lanes, function(first(lanes), second(lanes), third(lanes)))
        return lambda lanes: write(lanes, function(*[read(lanes) for read in reads]))

    def converge_by(self, members: Operand | int) -> None:
        """Makes lanes wait, before the step, for all lanes that their member mask names.

        Args:
          members: the operand with the mask (``membermask`` of ``shfl.sync`` and the like).
        """
        self.members = self.source(members, U32)

    # Details --------------------------------------------------------------------------------------

    def _register_source(self, operand: Register, kind: PtxType) -> Source:
        number, declared = self.program.register(operand), TYPES[operand.type]
        dtype, instruction, name = kind.dtype, self.instruction, operand.name

        def held(lanes: Lanes) -> Array:
            values = lanes.registers[number]
            if values is None or number in lanes.wave.undefined:
                wave = lanes.wave
                if values is None or lanes not in wave.defined.get(number, ()):
                    values = wave.undefined_register(lanes, number, name, instruction)
            index = lanes.index
            return values if index is ALL else values[index]

        if declared.bits == kind.bits:
            if declared.storage == dtype or kind.bits == 128:
                return held
            return lambda lanes: held(lanes).view(dtype)
        if declared.bits < kind.bits or not kind.integer or declared.bits == 128:
            raise self.error(
                f"register {name} of type .{declared.name} cannot be read as .{kind.name}"
            )
        narrow = STORAGE[kind.bits]
        return lambda lanes: held(lanes).astype(narrow).view(dtype)

    def _special_source(self, operand: Special, kind: PtxType) -> Source:
        name, component, dtype = operand.name, operand.component, kind.dtype
        if not self.program.specials.known(name, component):
            raise self.error(
                f"the simulator does not know {name}{'.' * bool(component)}{component}"
            )

        def read(lanes: Lanes) -> Values:
            values = lanes.wave.special(name, component, lanes)
            return values if values.dtype == dtype else values.astype(dtype)

        return read

    def _symbol_source(self, operand: Symbol, kind: PtxType) -> Source:
        if kind.bits not in (32, 64):
            raise self.error(f"an address does not fit a .{kind.name}")
        space, address = self.program.symbol(operand, self.instruction)
        constant = np.uint64((address + operand.offset) & (2**kind.bits - 1)).astype(kind.dtype)
        if space != "shared":
            return lambda lanes: constant

        def shared(lanes: Lanes) -> Values:
            base = lanes.wave.shared_base
            if base is None:
                return constant
            return lanes.of(base).astype(kind.dtype) + constant

        return shared
