"""Syntax trees back to PTX, to read them again or to hand them to ptxas."""

from __future__ import annotations

from pallasite_simulator.ptx import syntax
from pallasite_simulator.ptx.types import TYPE_BYTES


def _identifier(name: str) -> str:
    # Made names hold "#", and elements of vectors ".", which identifiers of PTX cannot.
    return name.replace("#", "$again$").replace(".", "$part$")


def print_operand(operand: syntax.Operand) -> str:
    match operand:
        case syntax.Register(name):
            return _identifier(name)
        case syntax.Special(name, component):
            return f"{name}.{component}" if component else name
        case syntax.Immediate(value, "f32"):
            return f"0f{value:08X}"
        case syntax.Immediate(value, "f64"):
            return f"0d{value:016X}"
        case syntax.Immediate(value):
            return str(value)
        case syntax.Symbol(name, offset, generic):
            shown = f"generic({_identifier(name)})" if generic else _identifier(name)
            return f"{shown}+{offset}" if offset else shown
        case syntax.Address(base, offset, coordinates, extra):
            shown = str(offset) if base is None else print_operand(base)
            if base is not None and offset:
                shown += f"+{offset}"
            if coordinates is not None:
                shown += ", " + print_operand(syntax.Vector(coordinates))
            return f"[{', '.join([shown, *map(print_operand, extra)])}]"
        case syntax.Vector(elements):
            return "{" + ", ".join(map(print_operand, elements)) + "}"
        case syntax.Negated(inner):
            return ("!" if getattr(inner, "type", "") == "pred" else "-") + print_operand(inner)
        case syntax.Part(register, selection):
            return f"{register.name}.{selection}"
        case syntax.Pair(first, second):
            return f"{print_operand(first)}|{print_operand(second)}"
        case syntax.Sink():
            return "_"
        case syntax.Arguments(elements):
            return "(" + ", ".join(map(print_operand, elements)) + ")"
    raise TypeError(operand)


def print_statement(statement: syntax.Statement) -> str:
    match statement:
        case syntax.Instruction():
            guard = ""
            if statement.predicate is not None:
                sign = "!" if statement.predicate_negated else ""
                guard = f"@{sign}{print_operand(statement.predicate)} "
            operands = ", ".join(map(print_operand, statement.operands))
            return f"{guard}{statement.name} {operands};"
        case syntax.Label(name):
            return f"{_identifier(name)}:"
        case syntax.BranchTargets(name, labels):
            return f"{_identifier(name)}: .branchtargets {', '.join(map(_identifier, labels))};"
        case syntax.ImplicitDefinition(register):
            return f"// implicit-def: {_identifier(register.name)}"
    raise TypeError(statement)


def _print_values(variable: syntax.Variable, size: int) -> list[str]:
    """The initial values as elements of this size; addresses in bytes are given one by one."""
    assert variable.initial is not None
    addresses = dict(variable.addresses)
    values: list[str] = []
    while (at := len(values) * size) < len(variable.initial):
        if at not in addresses:
            values.append(str(int.from_bytes(variable.initial[at : at + size], "little")))
        elif size == 8:
            values.append(print_operand(addresses[at]))
        else:
            masks = [0xFF << 8 * number for number in range(8)]
            values += [f"{mask:#x}({print_operand(addresses[at])})" for mask in masks]
    return values


def print_variable(variable: syntax.Variable) -> str:
    """A declaration without semicolon."""
    shown = f".extern .{variable.space}" if variable.external else f".{variable.space}"
    size = TYPE_BYTES[variable.type]
    type_, count = variable.type, variable.bytes // size
    values = ""
    if variable.initial is not None:
        type_, count = "u8", variable.bytes
        addresses = dict(variable.addresses)
        if addresses and not any(one % 8 for one in (variable.bytes, *addresses)):
            type_, count = "u64", variable.bytes // 8
        values = " = {" + ", ".join(_print_values(variable, TYPE_BYTES[type_])) + "}"
    shown += f" .align {variable.alignment} .{type_} {_identifier(variable.name)}"
    if not variable.bytes:
        return shown + "[]"
    if count == 1 and variable.initial is None:
        return shown
    return f"{shown}[{count}]{values}"


def _print_parameters(parameters: tuple[syntax.Variable | syntax.Register, ...]) -> str:
    return ", ".join(
        print_variable(one)
        if isinstance(one, syntax.Variable)
        else f".reg .{one.type} {_identifier(one.name)}"
        for one in parameters
    )


def _print_header(function: syntax.Function) -> str:
    shown = ".entry" if function.entry else ".func"
    if function.results:
        shown += f" ({_print_parameters(function.results)})"
    shown += f" {function.name}({_print_parameters(function.parameters)})"
    for name, numbers in function.directives.items():
        shown += f"\n.{name} {', '.join(map(str, numbers))}"
    return shown


def _print_prototype(name: str, call: syntax.Instruction, variables: dict[str, str]) -> str:
    """A prototype for an indirect call, made from the parameters that it is given."""
    lists: list[str] = []
    for operand in call.operands:
        if isinstance(operand, syntax.Arguments):
            lists.append(
                ", ".join(
                    f".reg .{one.type} _"
                    if isinstance(one, syntax.Register)
                    else variables[one.name]
                    for one in operand.elements
                )
            )
        elif isinstance(operand, syntax.Register) and not lists:
            lists.append("")
    lists += [""] * (2 - len(lists))
    results = f"({lists[0]}) " if lists[0] else ""
    return f"{name}: .callprototype {results}_ ({lists[1]});"


def print_function(function: syntax.Function, linking: str = "") -> str:
    lines = [f"{linking} {_print_header(function)}"]
    if function.body is None:
        return lines[0] + ";"
    lines.append("{")
    for register in function.registers:
        if register not in (*function.parameters, *function.results):
            lines.append(f".reg .{register.type} {_identifier(register.name)};")
    lines += [print_variable(variable) + ";" for variable in function.variables]
    variables = {
        one.name: print_variable(one).replace(_identifier(one.name), "_")
        for one in function.variables
    }
    targets = [one for one in function.body if isinstance(one, syntax.BranchTargets)]
    lines += map(print_statement, targets)
    for statement in function.body:
        if isinstance(statement, syntax.Instruction) and statement.opcode == "call":
            *before, last = statement.operands
            # Calls of pointers end with a prototype.
            if isinstance(last, syntax.Symbol) and any(
                isinstance(one, syntax.Register) for one in before
            ):
                lines.append(_print_prototype(_identifier(last.name), statement, variables))
        if not isinstance(statement, syntax.BranchTargets):
            lines.append(print_statement(statement))
    return "\n".join([*lines, "}"])


def print_module(module: syntax.Module, linking: dict[str, str] | None = None) -> str:
    """The module as PTX, with functions declared before all variables.

    Args:
      module: the syntax tree.
      linking: ``.visible`` and the like by the name of a function or variable, which trees lack.
    """
    linking = linking or {}
    lines = [
        f".version {module.version[0]}.{module.version[1]}",
        f".target {module.target}",
        f".address_size {module.address_size}",
    ]
    for function in module.functions:
        if not function.entry:
            how = linking.get(function.name, "" if function.body is not None else ".extern")
            lines.append(f"{how} {_print_header(function)};")
    for variable in module.variables:
        lines.append(f"{linking.get(variable.name, '')} {print_variable(variable)};")
    for function in module.functions:
        if function.body is not None:
            lines.append(print_function(function, linking.get(function.name, "")))
    return "\n".join(lines) + "\n"
