"""What assemblers made of kernels: their instructions and loops, and what lanes decide in them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from pallasite.codegen import assembler

_MATRIX = re.compile(r"^UTC[A-Z]*MMA\b")
_UNIFORM = re.compile(r"^(UTC[A-Z]*MMA|UTCBAR|UTMALDG|UTMASTG|UBLKCP|UTCCP)\b")
_LOCAL = re.compile(r"^(LDL|STL)\b")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\.(L\w+):")
_BRANCH = re.compile(r"`\(\.(L\w+)\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A machine instruction: its guard without which it always runs, its name, its operands."""

    guard: str | None
    name: str
    operands: str

    @property
    def product(self) -> bool:
        """Whether it is a matrix instruction of the tensor core."""
        return _MATRIX.match(self.name) is not None

    @property
    def of_lanes(self) -> bool:
        """Whether lanes of a warp may differ in whether they run it."""
        return self.guard is not None and "UP" not in self.guard


@dataclasses.dataclass(frozen=True)
class Code:
    """What a compiler made of a kernel.

    Attributes:
      registers: of a thread.
      spills: bytes of spills and of the stack.
      local: instructions that access local memory.
      instructions: of the kernel.
      loop: instructions of the loop that issues matrix instructions, without those that wait for
        barriers again.
      products: matrix instructions in that loop.
      guarded: copies, products and commits under predicates of single lanes.
      branched: those that a branch of single lanes skips, in the innermost loop that has them.
      copies: to shared memory, in the loop that issues matrix instructions.
      tensor_copies: to tensor memory, in that loop.
      seconds: of processors, from the call to machine code.
    """

    registers: int
    spills: int
    local: int
    instructions: int
    loop: int
    products: int
    guarded: int
    branched: int
    copies: int
    tensor_copies: int
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Machine instructions for each matrix instruction."""
        return self.loop / self.products if self.products else math.nan


def read_code(ptx: str, name: str) -> Code:
    """Assembles PTX, and counts.

    Raises:
      CompilationError: there is no assembler, or it refuses the PTX.
    """
    assembly = assembler.assemble(ptx, name)
    instructions, labels = parsed(assembler.disassemble(assembly.cubin))
    first, last = issuing_loop(instructions, labels)
    loop = instructions[first : last + 1]
    uniform = [n for n, one in enumerate(instructions) if _UNIFORM.match(one.name)]
    return Code(
        registers=assembly.registers,
        spills=assembly.spill_store_bytes + assembly.spill_load_bytes + assembly.stack_bytes,
        local=sum(_LOCAL.match(one.name) is not None for one in instructions),
        instructions=len(instructions),
        loop=len(loop),
        products=sum(one.product for one in loop),
        guarded=sum(instructions[n].of_lanes for n in uniform),
        branched=sum(is_skipped_by_lanes(instructions, labels, n) for n in uniform),
        copies=sum(one.name.startswith("UTMALDG") for one in loop),
        tensor_copies=sum(one.name.startswith("UTCCP") for one in loop),
    )


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a disassembled kernel, and at which of them its labels are."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(instructions)
        elif (found := _LINE.match(line)) is not None:
            instructions.append(Instruction(found[1], found[2], found[3]))
    return instructions, labels


def branches(
    instructions: Sequence[Instruction], labels: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """Numbers of the branches, and of the instructions where they lead."""
    for number, one in enumerate(instructions):
        target = _BRANCH.search(one.operands) if one.name.startswith("BRA") else None
        if target is not None and target[1] in labels:
            yield number, labels[target[1]]


def loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """First and last instruction of each loop, where ptxas puts it as one piece.

    Code that is rarely run, such as that which waits for a barrier again, is behind the end of the
    kernel: what leads back from there is no loop.
    """
    for last, first in branches(instructions, labels):
        away = any(one.name == "EXIT" and one.guard is None for one in instructions[first:last])
        if first < last and not away:
            yield first, last


def issuing_loop(instructions: Sequence[Instruction], labels: dict[str, int]) -> tuple[int, int]:
    """First and last instruction of the shortest loop that has a matrix instruction.

    Raises:
      ValueError: there is none.
    """
    products = [n for n, one in enumerate(instructions) if one.product]
    found = [
        (last - first, first, last)
        for first, last in loops(instructions, labels)
        if any(first <= product <= last for product in products)
    ]
    if not found:
        raise ValueError("no loop issues matrix instructions")
    _, first, last = min(found)
    return first, last


def is_skipped_by_lanes(
    instructions: Sequence[Instruction], labels: dict[str, int], number: int
) -> bool:
    """Whether lanes may differ in whether they reach an instruction, each time around its loop.

    A branch that is taken once, before the innermost loop, does not count: it selects a warp or a
    lane for a role. Outside of loops, the same holds for all.
    """
    around = [(b - a, a, b) for a, b in loops(instructions, labels) if a <= number <= b]
    if not around:
        return False
    _, first, last = min(around)
    return any(
        first <= place < number < target <= last + 1 and instructions[place].of_lanes
        for place, target in branches(instructions, labels)
    )
