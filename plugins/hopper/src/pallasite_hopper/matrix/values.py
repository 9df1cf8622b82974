"""Accumulators while lowering: register arrays in the layout of the instructions' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import RegisterArray, RuleContext, relayout
from pallasite_hopper.matrix.fragments import accumulator_layout, result_layout

_FRAGMENTS = "pallasite.fragments"
"""An attribute of wgmma: whether the left operand is in registers."""

TIED = 64
"""Registers that one piece of inline assembly passes through."""


def enter(ctx: RuleContext, aval: Any, initial: RegisterArray | None) -> RegisterArray:
    """An accumulator's first value: zeros, or an array."""
    dtype = np.dtype(aval.dtype)
    layout = accumulator_layout(tuple(aval.shape), dtype)
    if initial is None:
        return relayout(ctx, RegisterArray.constant(0, dtype, aval.shape), layout)
    return settled(relayout(ctx, initial, layout))


def leave(ctx: RuleContext, value: RegisterArray, initial: RegisterArray) -> RegisterArray:
    """What a scope that began with ``initial`` makes of an accumulator's last value."""
    accumulator, contents = read(ctx, value, 0)
    return accumulator if initial.layout == accumulator.layout else contents


def settled(value: RegisterArray) -> RegisterArray:
    """The same registers, but what computes them stays before any fence that comes later.

    Assembly stays in order, so only what ordinary code puts into an accumulator must be tied to it,
    not each accumulator to each fence.
    """
    return RegisterArray(pass_through("", value.registers), value.layout, value.dtype)


def read(
    ctx: RuleContext, value: RegisterArray, wait: int | None
) -> tuple[RegisterArray, RegisterArray]:
    """Reads an accumulator, after a wait for all but ``wait`` wgmma.

    Without a wait, one was before; the registers are tied to its place all the same.

    Returns:
      The accumulator from then on, and its contents in the layout ``WGMMA``. They share registers.
    """
    text = "" if wait is None else wait_text(wait)
    registers = pass_through(text, value.registers)
    if comes_from_branch_with_fragments(value.registers[0]):
        registers = pinned(registers)
    value = RegisterArray(registers, value.layout, value.dtype)
    return value, relayout(ctx, value, result_layout(value.shape))


def wait_text(n: int) -> str:
    """The instruction that waits for all but ``n`` groups."""
    return f"wgmma.wait_group.sync.aligned {n};"


def pass_through(
    text: str, registers: Sequence[ir.Value], *, last: bool = False
) -> tuple[ir.Value, ...]:
    """Runs an instruction that leaves registers as they are, and ties them to it.

    To LLVM the registers are results of the instruction, so what uses them stays behind it, and
    what computes them stays before it. If there are too many for one piece of assembly, only one of
    the two holds for all: the second with ``last``, else the first.
    """
    results: list[ir.Value] = []
    starts = range(0, max(1, len(registers)), TIED)
    chosen = starts[-1] if last else 0
    for start in starts:
        part = registers[start : start + TIED]
        results += tied_assembly(text if start == chosen else "", part)
    return tuple(results)


def pinned(registers: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """The same registers; what uses them stays behind this place in machine code, too.

    ptxas (seen with 13.0 and 13.5) may move what reads accumulators before the wait for the
    MMAs that add to them, if these are in another basic block and have their left operand
    in registers. So after the wait the registers are overwritten under a condition that never
    holds, and that ptxas does not know: a GPU has multiprocessors.
    """
    results: list[ir.Value] = []
    for start in range(0, len(registers), TIED):
        part = registers[start : start + TIED]
        moves = " ".join(f"@p mov.b32 ${number}, z;" for number in range(len(part)))
        text = f"{{ .reg .pred p; .reg .b32 z; mov.u32 z, %nsmid; setp.eq.u32 p, z, 0; {moves} }}"
        results += tied_assembly(text, part)
    return tuple(results)


def mark_product(result: ir.Value, *, fragments: bool) -> None:
    """Marks the assembly that gives this as a wgmma, and whether its left operand is in
    registers."""
    owner = result.owner
    while owner.name != "llvm.inline_asm":
        owner = owner.operands[0].owner
    owner.attributes[_FRAGMENTS] = ir.BoolAttr.get(fragments)


def comes_from_branch_with_fragments(register: ir.Value) -> bool:
    """Whether a loop or a branch before has MMAs whose left operand is in registers, and whose
    result this may be."""
    seen: set[int] = set()

    def follow(value: ir.Value | None, inside: bool) -> bool:
        if value is None:
            return False
        owner = value.owner
        key = hash(value)
        if key in seen:
            return False
        seen.add(key)
        if isinstance(owner, ir.Block):
            around = owner.owner
            if around.name != "scf.for":
                return False
            number = ir.BlockArgument(value).arg_number - 1
            return number >= 0 and follow(_yielded(around.regions[0], number), True)
        if owner.name in ("scf.for", "scf.if", "scf.index_switch"):
            number = ir.OpResult(value).result_number
            return any(follow(_yielded(region, number), True) for region in owner.regions)
        if owner.name == "scf.while":
            number = ir.OpResult(value).result_number
            return follow(_yielded(owner.regions[1], number), True)
        if _FRAGMENTS in owner.attributes:
            return inside and ir.BoolAttr(owner.attributes[_FRAGMENTS]).value
        operands = list(owner.operands)
        return bool(operands) and follow(operands[0], inside)

    return follow(register, False)


def _yielded(region: ir.Region, number: int) -> ir.Value | None:
    """An operand of the operation that ends a region; None while the region is being emitted."""
    operations = list(region.blocks[0].operations) if len(region.blocks) else []
    if not operations or operations[-1].operation.name != "scf.yield":
        return None
    value: ir.Value = operations[-1].operands[number]
    return value


def need(words: Sequence[ir.Value]) -> None:
    """What computes these 32-bit integers stays before all assembly that comes later."""
    for start in range(0, len(words), TIED):
        part = words[start : start + TIED]
        ops.inline_assembly("", ",".join([*["r"] * len(part), "~{memory}"]), *part)


def own_registers(registers: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    """The 32 bits of each register in one that nothing else uses.

    LLVM gives equal values one register: a constant among the elements would share it with code
    that reads it while a wgmma is in flight, which the instructions forbid.
    """
    results: list[ir.Value] = []
    for start in range(0, len(registers), TIED):
        words = [ops.bitcast(one, ops.i32()) for one in registers[start : start + TIED]]
        constraints = ",".join(["=r"] * len(words) + [str(number) for number in range(len(words))])
        kinds = [word.type for word in words]
        made = ops.inline_assembly("", constraints, *words, results=kinds, side_effects=False)
        results += [made] if len(words) == 1 else made
    return tuple(results)


def tied_assembly(
    text: str, registers: Sequence[ir.Value], inputs: Sequence[ir.Value] = (), codes: str = ""
) -> list[ir.Value]:
    """Inline assembly whose results ``$0``... take the registers' places; then come ``inputs``."""
    words = [as_word(register) for register in registers]
    outputs = ["=" + _code(word) for word in words]
    ties = [str(number) for number in range(len(words))]
    constraints = ",".join([*outputs, *ties, *([codes] if codes else []), "~{memory}"])
    values = ops.inline_assembly(
        text, constraints, *words, *inputs, results=[word.type for word in words]
    )
    found = [] if values is None else [values] if isinstance(values, ir.Value) else list(values)
    return [
        ops.bitcast(value, register.type) for value, register in zip(found, registers, strict=True)
    ]


def as_word(register: ir.Value) -> ir.Value:
    """A register as inline assembly takes it: f32, or 32 bits as an integer."""
    if register.type == types.parse_type("f32"):
        return register
    return ops.bitcast(register, ops.i32())


def _code(word: ir.Value) -> str:
    return "f" if word.type == types.parse_type("f32") else "r"
