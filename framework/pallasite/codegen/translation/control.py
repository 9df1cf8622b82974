"""Translation of structured control flow: ``scf`` and the branches of the llvm dialect."""

from __future__ import annotations

from typing import Any

from pallasite.codegen.translation.emitter import Emitter, Handler, Operand

Arm = tuple[str, list[Operand]]
"""The end of one arm: label of the block that it comes from, and what it yields."""

_UNROLL_DISABLED = 1
_UNROLL_FULL = 0


def _yield(emitter: Emitter, operation: Any) -> None:
    emitter.yielded = emitter.operands(operation)


def _condition(emitter: Emitter, operation: Any) -> None:
    emitter.condition, *emitter.yielded = emitter.operands(operation)


def _region(emitter: Emitter, region: Any, label: str, exit_label: str) -> list[Arm]:
    """Emits a region from ``label`` on, each yield branching to ``exit_label``."""
    emitter.start(label)
    return run_blocks(emitter, list(region.blocks), exit_label)


def _join(emitter: Emitter, operation: Any, label: str, arms: list[Arm]) -> None:
    """Begins the block where the arms join, with a phi for each result of the operation."""
    emitter.start(label)
    emitter.yielded = None
    if not arms:
        emitter.statement("unreachable")
        emitter.start(emitter.new_label())
        for result in operation.results:
            emitter.values[result] = (emitter.types[result.type], "poison")
        return
    for index, result in enumerate(operation.results):
        type_ = arms[0][1][index][0]
        names = {operands[index][1] for _, operands in arms}
        if len(names) == 1:
            emitter.values[result] = arms[0][1][index]
            continue
        name, line = emitter.phi(type_)
        emitter.fill_phi(line, [(operands[index][1], block) for block, operands in arms])
        emitter.values[result] = (type_, name)


def _if(emitter: Emitter, operation: Any) -> None:
    condition = emitter.values[operation.operation.operands[0]][1]
    suffix = emitter.suffix
    then_region, else_region = operation.regions
    yes, after = emitter.new_label(), emitter.new_label()
    has_else = len(else_region.blocks) > 0
    no = emitter.new_label() if has_else else after
    emitter.statement(f"br i1 {condition}, label %{yes}, label %{no}")
    arms = _region(emitter, then_region, yes, after)
    if has_else:
        arms += _region(emitter, else_region, no, after)
    else:
        arms.append(("", []))
    emitter.suffix = suffix
    _join(emitter, operation, after, arms)


def _for(emitter: Emitter, operation: Any) -> None:
    (type_, lower), (_, upper), (_, step), *initial = emitter.operands(operation)
    attributes = operation.attributes
    unsigned = "unsignedCmp" in attributes
    suffix = emitter.suffix
    body_block = operation.regions[0].blocks[0]
    header, body, after = emitter.new_label(), emitter.new_label(), emitter.new_label()
    before = emitter.block
    emitter.statement(f"br label %{header}")
    emitter.start(header)
    counter, counter_line = emitter.phi(type_)
    carried = [emitter.phi(kind) for kind, _ in initial]
    predicate = "ult" if unsigned else "slt"
    more = emitter.instruction(f"icmp {predicate} {type_} {counter}, {upper}")
    emitter.statement(f"br i1 {more}, label %{body}, label %{after}")
    argument, *arguments = body_block.arguments
    emitter.values[argument] = (type_, counter)
    for value, (kind, _), (name, _) in zip(arguments, initial, carried, strict=True):
        emitter.values[value] = (kind, name)
    emitter.start(body)
    emitter.run(body_block)
    yielded = emitter.yielded or []
    emitter.suffix = suffix
    wrap = "nuw" if unsigned else "nsw"
    following = emitter.instruction(f"add {wrap} {type_} {counter}, {step}")
    latch = emitter.block
    emitter.statement(f"br label %{header}{_loop_metadata(emitter, attributes)}")
    emitter.fill_phi(counter_line, [(lower, before), (following, latch)])
    for (name, line), (_, start), (_, next_), result in zip(
        carried, initial, yielded, operation.results, strict=True
    ):
        emitter.fill_phi(line, [(start, before), (next_, latch)])
        emitter.values[result] = (emitter.types[result.type], name)
    emitter.start(after)
    emitter.yielded = None


def _while(emitter: Emitter, operation: Any) -> None:
    initial = emitter.operands(operation)
    suffix = emitter.suffix
    before_block, after_block = (region.blocks[0] for region in operation.regions)
    header, body, after = emitter.new_label(), emitter.new_label(), emitter.new_label()
    entry = emitter.block
    emitter.statement(f"br label %{header}")
    emitter.start(header)
    carried = [emitter.phi(type_) for type_, _ in initial]
    for value, (type_, _), (name, _) in zip(before_block.arguments, initial, carried, strict=True):
        emitter.values[value] = (type_, name)
    emitter.run(before_block)
    forwarded = emitter.yielded or []
    emitter.statement(f"br i1 {emitter.condition[1]}, label %{body}, label %{after}")
    for value, result, operand in zip(
        after_block.arguments, operation.results, forwarded, strict=True
    ):
        emitter.values[value] = emitter.values[result] = operand
    emitter.start(body)
    emitter.run(after_block)
    yielded = emitter.yielded or []
    latch = emitter.block
    emitter.suffix = suffix
    emitter.statement(f"br label %{header}{_loop_metadata(emitter, operation.attributes)}")
    for (_, line), (_, start), (_, next_) in zip(carried, initial, yielded, strict=True):
        emitter.fill_phi(line, [(start, entry), (next_, latch)])
    emitter.start(after)
    emitter.yielded = None


def _index_switch(emitter: Emitter, operation: Any) -> None:
    type_, name = emitter.values[operation.operation.operands[0]]
    suffix = emitter.suffix
    default_region, *case_regions = operation.regions
    cases = list(operation.attributes["cases"])
    default, after = emitter.new_label(), emitter.new_label()
    labels = [emitter.new_label() for _ in cases]
    table = " ".join(
        f"{type_} {case}, label %{label}" for case, label in zip(cases, labels, strict=True)
    )
    emitter.statement(f"switch {type_} {name}, label %{default} [ {table} ]")
    arms: list[Arm] = []
    for region, label in zip(case_regions, labels, strict=True):
        arms += _region(emitter, region, label, after)
    arms += _region(emitter, default_region, default, after)
    emitter.suffix = suffix
    _join(emitter, operation, after, arms)


def _execute_region(emitter: Emitter, operation: Any) -> None:
    suffix = emitter.suffix
    inside, after = emitter.new_label(), emitter.new_label()
    emitter.statement(f"br label %{inside}")
    arms = _region(emitter, operation.regions[0], inside, after)
    emitter.suffix = suffix
    _join(emitter, operation, after, arms)


def run_blocks(emitter: Emitter, blocks: list[Any], exit_label: str) -> list[Arm]:
    """Emits blocks that branch to one another; the first continues the current basic block."""
    if not blocks:
        emitter.statement(f"br label %{exit_label}")
        return [(emitter.block, [])]
    labels = [emitter.block] + [emitter.new_label() for _ in blocks[1:]]
    outer = emitter.successors
    emitter.successors = list(zip(blocks, labels, strict=True))
    incoming, emitter.incoming = emitter.incoming, {label: [] for label in labels}
    arms: list[Arm] = []
    lines: dict[str, list[int]] = {}
    for index, (block, label) in enumerate(zip(blocks, labels, strict=True)):
        if index:
            emitter.start(label)
            lines[label] = []
            for argument in block.arguments:
                type_ = emitter.types[argument.type]
                name, line = emitter.phi(type_)
                emitter.values[argument] = (type_, name)
                lines[label].append(line)
        emitter.run(block)
        if emitter.yielded is not None:
            arms.append((emitter.block, emitter.yielded))
            emitter.statement(f"br label %{exit_label}")
    for label, phi_lines in lines.items():
        edges = emitter.incoming[label]
        for index, line in enumerate(phi_lines):
            emitter.fill_phi(line, [(operands[index][1], block) for block, operands in edges])
    emitter.successors, emitter.incoming = outer, incoming
    return arms


def _target(emitter: Emitter, successor: Any, operands: list[Operand]) -> str:
    """Label of a successor block, after noting what this edge passes to it."""
    label = next(label for block, label in emitter.successors if block == successor)
    emitter.incoming[label].append((emitter.block, operands))
    return label


def _branch(emitter: Emitter, operation: Any) -> None:
    label = _target(emitter, operation.successors[0], emitter.operands(operation))
    emitter.statement(f"br label %{label}")


def _conditional_branch(emitter: Emitter, operation: Any) -> None:
    (_, condition), *operands = emitter.operands(operation)
    sizes = list(operation.attributes["operandSegmentSizes"])
    yes = _target(emitter, operation.successors[0], operands[: sizes[1]])
    no = _target(emitter, operation.successors[1], operands[sizes[1] :])
    emitter.statement(f"br i1 {condition}, label %{yes}, label %{no}")


def _loop_metadata(emitter: Emitter, attributes: Any) -> str:
    """Loop metadata from the attribute ``unroll``: 0 fully, 1 never, else by that factor."""
    if "unroll" not in attributes:
        return ""
    factor = attributes["unroll"].value
    if factor == _UNROLL_FULL:
        option = '!{!"llvm.loop.unroll.full"}'
    elif factor == _UNROLL_DISABLED:
        option = '!{!"llvm.loop.unroll.disable"}'
    else:
        option = f'!{{!"llvm.loop.unroll.count", i32 {factor}}}'
    return f", !llvm.loop {emitter.metadata.loop(option)}"


CONTROL: dict[str, Handler] = {
    "scf.yield": _yield,
    "scf.condition": _condition,
    "scf.if": _if,
    "scf.for": _for,
    "scf.while": _while,
    "scf.index_switch": _index_switch,
    "scf.execute_region": _execute_region,
    "llvm.br": _branch,
    "llvm.cond_br": _conditional_branch,
    "cf.br": _branch,
    "cf.cond_br": _conditional_branch,
}
