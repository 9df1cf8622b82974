"""A kernel made ready: its instructions in one list, each bound to what it does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from pallasite.plugin import InstructionRule
from pallasite_simulator.binder import Binder, Source
from pallasite_simulator.engine import specials
from pallasite_simulator.engine.flow import flow_order
from pallasite_simulator.engine.inline import inline_calls
from pallasite_simulator.engine.memory import GLOBAL_BASE, SHARED_BASE, GlobalMemory
from pallasite_simulator.errors import PtxError
from pallasite_simulator.instruction_set import Step
from pallasite_simulator.ptx.syntax import (
    Address,
    BranchTargets,
    Function,
    Immediate,
    ImplicitDefinition,
    Instruction,
    Label,
    Module,
    Operand,
    Position,
    Register,
    Sink,
    Special,
    Statement,
    Symbol,
    Variable,
)
from pallasite_simulator.types import TYPES, PtxType

STEP, BRANCH, INDEXED, EXIT, TRAP = "step", "branch", "indexed", "exit", "trap"

_CONTROL = {"bra": BRANCH, "brx": INDEXED, "ret": EXIT, "exit": EXIT, "trap": TRAP}

HEAP_BYTES = 8 << 20
"""What ``malloc`` has to give out, as on a device where nobody asks for more."""

STACK_BYTES = 1024
"""What ``alloca`` has for each thread, likewise."""

FRAME_BYTES = 4096
"""What each thread has for the variables of functions that call themselves, or are called by
address."""

_GUARD_BYTES = (64, 2048)
"""How many unused bytes are behind each shared variable, if there are several: as many as it has,
within these limits."""

WHOLE_WARP = Immediate(0xFFFFFFFF)


@dataclasses.dataclass(slots=True)
class Entry:
    """One instruction, bound.

    Attributes:
      kind: ``"step"``, or how it leaves the straight way.
      instruction: as written.
      guard: its predicate, or None.
      negated: whether it is executed where the predicate is false.
      step: what it does.
      members: the mask of lanes that execute it together, or None.
      registers: numbers of all registers that it names.
      leader: whether another way leads here.
      target: of a branch; ``table`` and ``selector``: of an indexed one.
    """

    kind: str
    instruction: Instruction
    guard: Source | None
    negated: bool
    step: Step
    members: Source | None
    registers: frozenset[int]
    leader: bool = False
    target: int = -1
    table: tuple[int, ...] = ()
    selector: Source | None = None


class Program:
    """One kernel of a module, ready to run.

    Attributes:
      name: of the kernel.
      module: where it comes from.
      function: the kernel, with all calls inlined, or put behind it.
      code: its instructions; the last one ends it.
      rank: for each instruction, a number that orders the places where lanes can be: those with a
        smaller one run first.
      register_types: by number of register.
      unspecified: registers whose value does not matter where they were not written.
      parameters: kernel parameters and their offsets in the parameter buffer of
        ``parameter_bytes``.
      static_shared_bytes: of shared variables of known size, and of the guards behind them.
      guard_bytes: of these guards.
      shared_start: the first byte of shared memory that it may use: reserved memory is below
        ``SHARED_BASE``.
      grid_workspace: address of what the driver gives to grids whose blocks synchronize (in
        ``%envreg1`` and ``%envreg2``): a size and a barrier, zeros; 0 if it is not used.
      heap: address of what ``malloc`` gives out; 0 if it is not called.
      stack: local address of what ``alloca`` gives out.
      frames: local address of the frames of functions that are not inlined, of ``frame_bytes``.
      local_bytes: of each lane's local memory.
      multiprocessors: of the chip that it is for.
      source: the PTX of the module, if it is known.
      cancels: whether its clusters can cancel others that have not begun.
      most_blocks: how many blocks one multiprocessor has at most; rules of instructions that use
        what is limited make it smaller.
    """

    source: str = ""
    cancels: bool = False
    most_blocks: int = 32
    specials = specials

    def __init__(
        self,
        module: Module,
        name: str,
        rules: Mapping[str, InstructionRule],
        multiprocessors: int = 132,
    ):
        """Binds all instructions.

        Raises:
          PtxError: there is no such kernel, or an instruction that no rule knows.
        """
        self.module = module
        self.name = name
        self.multiprocessors: int = multiprocessors
        self._layout = GlobalMemory()
        self.function = inline_calls(module, self._find(name))
        self.register_types: list[PtxType] = []
        self._registers: dict[str, int] = {}
        self.unspecified: set[int] = set()
        self._symbols: dict[str, tuple[str, int]] = {}
        self._initial: list[tuple[Variable, int]] = []
        self.parameters: list[tuple[Variable, int]] = []
        self.parameter_bytes = 0
        self.static_shared_bytes: int = 0
        self.guard_bytes: int = 0
        self.shared_start: int = SHARED_BASE
        self.grid_workspace: int = 0
        self.heap: int = 0
        self.stack: int = 0
        self.frames: int = 0
        self.frame_bytes: int = 0
        self.local_bytes = 0
        for register in self.function.registers:
            if register.name not in self._registers:
                self._registers[register.name] = len(self.register_types)
                self.register_types.append(TYPES[register.type])
        self._place_parameters()
        self._place_variables()
        self._rules = rules
        self._known_rules: dict[tuple[str, ...], InstructionRule] = {}
        self.code: list[Entry] = []
        self._assemble()

    # What binding asks ----------------------------------------------------------------------------

    def register(self, register: Register) -> int:
        """The number of a register."""
        number = self._registers.get(register.name)
        if number is None:
            number = self._registers[register.name] = len(self.register_types)
            self.register_types.append(TYPES[register.type])
        return number

    def symbol(self, symbol: Symbol, instruction: Instruction) -> tuple[str, int]:
        """The state space and the address of a variable or parameter.

        Raises:
          PtxError: there is none of this name.
        """
        found = self._symbols.get(symbol.name)
        if found is None:
            raise PtxError(
                f"unknown symbol {symbol.name!r}",
                position=instruction.position,
                instruction=instruction.text,
                location=instruction.location,
            )
        return found

    def register_names(self) -> list[str]:
        """Names by number."""
        return list(self._registers)

    def new_memory(self) -> GlobalMemory:
        """A launch's global memory, which holds the program's global variables."""
        memory = GlobalMemory()
        for one in self._layout.allocations:
            memory.allocate(
                one.name,
                one.size,
                16,
                one.writable,
                offset=one.offset,
                undefined=one.undefined,
            )
        return memory

    def initialize(self, memory: GlobalMemory) -> None:
        """Writes the initial contents of global variables, once the memory is sealed."""
        for variable, address in self._initial:
            contents = bytearray(variable.initial or b"")
            for offset, symbol in variable.addresses:
                target = self._symbols[symbol.name][1] + symbol.offset
                contents[offset : offset + 8] = target.to_bytes(8, "little")
            memory.bytes_at(address, len(contents))[:] = memoryview(bytes(contents))

    # Placing --------------------------------------------------------------------------------------

    def _find(self, name: str) -> Function:
        kernels = [f for f in self.module.functions if f.entry and f.body is not None]
        for function in kernels:
            if function.name == name:
                if function.error is not None:
                    raise function.error
                return function
        raise PtxError(
            f"there is no kernel {name!r}",
            position=Position(1, 1),
            expected="one of " + (", ".join(f.name for f in kernels) or "none at all"),
        )

    def _place_parameters(self) -> None:
        offset = 0
        for one in self.function.parameters:
            assert isinstance(one, Variable)
            offset = -(-offset // one.alignment) * one.alignment
            self._symbols[one.name] = ("param", offset)
            self.parameters.append((one, offset))
            offset += one.bytes
        self.parameter_bytes = -(-max(offset, 16) // 16) * 16

    def _place_variables(self) -> None:
        """Gives addresses to all variables: static shared memory comes before the dynamic one."""
        variables = [*self.module.variables, *self.function.variables]
        shared = SHARED_BASE
        several = sum(one.space == "shared" for one in variables) > 1
        for one in variables:
            if one.space == "shared" and not (one.external and not one.bytes):
                shared = -(-shared // one.alignment) * one.alignment
                self._symbols[one.name] = ("shared", shared)
                shared += one.bytes
                if several:
                    # Hardware has no room between variables; here overruns hit no other one.
                    guard = min(max(one.bytes, _GUARD_BYTES[0]), _GUARD_BYTES[1])
                    shared += guard
                    self.guard_bytes += guard
            elif one.space in ("local", "param"):
                start = -(-self.local_bytes // one.alignment) * one.alignment
                self._symbols[one.name] = ("local", start)
                self.local_bytes = start + one.bytes
            elif one.space in ("global", "const"):
                address = self._layout.allocate(
                    one.name, one.bytes, max(one.alignment, 16), one.space == "global"
                )
                self._symbols[one.name] = (one.space, address)
                self._initial.append((one, address))
        self.static_shared_bytes = shared - SHARED_BASE
        dynamic = [one for one in variables if one.space == "shared" and one.external]
        for one in dynamic:
            if not one.bytes:
                place = -(-shared // max(one.alignment, 16)) * max(one.alignment, 16)
                self._symbols[one.name] = ("shared", place)
                self.static_shared_bytes = max(self.static_shared_bytes, place - SHARED_BASE)
        opcodes, named = _opcodes_and_specials(self.function.body or ())
        if any(one.startswith("%reserved_smem_offset_1") for one in named):
            self.shared_start = specials.RESERVED
        if any(one.startswith("%envreg") for one in named):
            self.grid_workspace = self._layout.allocate("grid workspace", 64, 64)
        if any(one.name == "malloc" for one in self.module.functions):
            self.heap = self._layout.allocate("the heap", HEAP_BYTES, undefined=True)
        if "alloca" in opcodes:
            self.stack = -(-self.local_bytes // 32) * 32
            self.local_bytes = self.stack + STACK_BYTES
        if "@push" in opcodes:
            self.frames = -(-self.local_bytes // 16) * 16
            self.frame_bytes = FRAME_BYTES
            self.local_bytes = self.frames + self.frame_bytes
        for number, function in enumerate(self.module.functions):
            self._symbols.setdefault(function.name, ("function", GLOBAL_BASE >> 8 | number))

    # Binding --------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        tables: dict[str, tuple[str, ...]] = {}
        assert self.function.body is not None
        for statement in self.function.body:
            if isinstance(statement, Label):
                labels[statement.name] = len(instructions)
            elif isinstance(statement, BranchTargets):
                tables[statement.name] = statement.labels
            elif isinstance(statement, ImplicitDefinition):
                self.unspecified.add(self.register(statement.register))
            else:
                instructions.append(statement)
        last = instructions[-1].position if instructions else self.function.position
        instructions.append(Instruction("ret", (), (), last, "ret"))
        for instruction in instructions:
            self.code.append(self._bind(instruction, labels, tables))
        for place in labels.values():
            self.code[place].leader = True
        for entry in self.code:
            # What was executed is counted where a basic block ends: clocks need it up to date.
            if reads_clock(entry.instruction.operands):
                entry.leader = True
        self.rank = flow_order(
            [
                (
                    entry.kind != STEP,
                    entry.guard is not None or entry.kind == STEP,
                    successors(entry),
                )
                for entry in self.code
            ]
        )

    def _bind(
        self, instruction: Instruction, labels: Mapping[str, int], tables: Mapping[str, Any]
    ) -> Entry:
        binder = Binder(self, instruction)
        guard = None
        if instruction.predicate is not None:
            guard = binder.source(instruction.predicate, TYPES["pred"])
        kind = _CONTROL.get(instruction.opcode, STEP)
        registers = frozenset(map(self.register, registers_in(instruction.operands)))
        entry = Entry(
            kind, instruction, guard, instruction.predicate_negated, _nothing, None, registers
        )
        if kind == BRANCH:
            entry.target = self._label(binder, instruction.operands[0], labels)
        elif kind == INDEXED:
            entry.selector = binder.source(0, TYPES["u32"])
            table = instruction.operands[1]
            if not isinstance(table, Symbol) or table.name not in tables:
                raise binder.error("brx.idx needs a table declared by .branchtargets")
            entry.table = tuple(labels[name] for name in tables[table.name])
        elif kind == STEP:
            rule = self._rule(instruction, binder)
            entry.step = rule.bind(instruction, binder)
            if rule.needs_warp:
                binder.converge_by(WHOLE_WARP)
            entry.members = binder.members
        return entry

    def _label(self, binder: Binder, operand: Operand, labels: Mapping[str, int]) -> int:
        if not isinstance(operand, Symbol) or operand.name not in labels:
            raise binder.error("a branch needs a label of the function", got=operand)
        return labels[operand.name]

    def _rule(self, instruction: Instruction, binder: Binder) -> InstructionRule:
        parts = (instruction.opcode, *instruction.modifiers)
        known = self._known_rules.get(parts)
        if known is not None:
            return known
        for length in range(len(parts), 0, -1):
            rule = self._rules.get(".".join(parts[:length]))
            if rule is not None:
                self._known_rules[parts] = rule
                return rule
        raise binder.error(
            "the simulator does not know this instruction",
            expected="an instruction for which a plugin has a rule",
        )


def _nothing(lanes: Any) -> None:
    """The step of an instruction that only branches."""


def successors(entry: Entry) -> tuple[int, ...]:
    """Where an instruction branches to."""
    if entry.kind == BRANCH:
        return (entry.target,)
    return entry.table if entry.kind == INDEXED else ()


def _opcodes_and_specials(body: Iterable[Statement]) -> tuple[set[str], set[str]]:
    """The opcodes of a function, and the names of special registers among its operands."""
    instructions = [one for one in body if type(one) is Instruction]
    operands = itertools.chain.from_iterable(one.operands for one in instructions)
    named = {one.name for one in operands if type(one) is Special}
    return {one.opcode for one in instructions}, named


def reads_clock(operands: tuple[Operand, ...]) -> bool:
    """Whether a special register that counts time is among the operands."""
    special = [one.name for one in operands if type(one) is Special]
    return bool(special) and any(map(specials.is_time, special))


def registers_in(operands: tuple[Operand, ...]) -> list[Register]:
    """All registers named in operands."""
    found: list[Register] = []
    one: Any
    for one in operands:
        kind: Any = type(one)
        if kind is Register:
            found.append(one)
        elif kind is Address and not one.coordinates and not one.extra:
            if type(one.base) is Register:
                found.append(one.base)
        elif kind not in _WITHOUT_REGISTERS:
            _collect_registers(one, found)
    return found


def _collect_registers(operand: Any, found: list[Register]) -> None:
    """Adds the registers of an operand of any kind."""
    stack = [operand]
    while stack:
        one = stack.pop()
        kind: Any = type(one)
        if kind is Register:
            found.append(one)
        elif kind is tuple:
            stack.extend(one)
        elif kind not in _WITHOUT_REGISTERS:
            stack.extend([getattr(one, name) for name in _fields(kind)])


_WITHOUT_REGISTERS = {Immediate, Special, Symbol, Sink, int, str, type(None)}


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of what an operand of a type is made of; of numbers and strings, none."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(field.name for field in dataclasses.fields(kind))
