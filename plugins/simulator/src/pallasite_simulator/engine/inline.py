"""Calls of device functions are replaced by the functions' bodies (PTX ISA 7.1 and 9.7.12.5, call).

Each call site has registers, labels and local variables of its own. Parameters in ``.param`` space
are memory of each lane: the callee's formal ones mean the caller's variables. Calls of functions
without a body stay, for rules to give them a meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.syntax import (
    Address,
    Arguments,
    BranchTargets,
    Function,
    Immediate,
    ImplicitDefinition,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Statement,
    Symbol,
    Variable,
    Vector,
)
from pallasite_simulator.types import TYPES

PRIVATE_SPACES = ("local", "param")
"""State spaces whose variables each call has anew; those of others exist once."""


def inline_calls(module: Module, function: Function) -> Function:
    """The function with all calls of functions that have a body replaced by it.

    Raises:
      PtxError: a recursive or indirect call, or arguments that do not fit the function.
    """
    if function.body is None or not any(map(_is_call, function.body)):
        return function
    inliner = _Inliner({one.name: one for one in module.functions if one.body is not None})
    body = inliner.expand(function.body, (function.name,), _parameters(function))
    return dataclasses.replace(
        function,
        registers=(*function.registers, *inliner.registers),
        variables=(*function.variables, *inliner.variables.values()),
        body=tuple(body),
    )


def _is_call(statement: Statement) -> bool:
    return isinstance(statement, Instruction) and statement.opcode == "call"


def _parameters(function: Function) -> dict[str, Variable]:
    """The function's variables that calls may name, by name."""
    named = (*function.parameters, *function.results, *function.variables)
    return {one.name: one for one in named if isinstance(one, Variable) and one.space == "param"}


def call_parts(call: Instruction) -> tuple[Operand, tuple[Operand, ...], tuple[Operand, ...]]:
    """Callee, arguments and results of a call."""
    results, *rest = call.operands
    if not isinstance(results, Arguments):
        rest = [results, *rest]
        results = Arguments(())
    callee, *rest = rest
    arguments = rest[0] if rest and isinstance(rest[0], Arguments) else Arguments(())
    return callee, arguments.elements, results.elements


class _Inliner:
    """Collects what the bodies that are put in declare."""

    def __init__(self, functions: Mapping[str, Function]):
        self.registers: list[Register] = []
        self.variables: dict[str, Variable] = {}
        self._functions = functions
        self._sites = 0

    def expand(
        self,
        body: Iterable[Statement],
        callers: tuple[str, ...],
        parameters: Mapping[str, Variable],
    ) -> list[Statement]:
        """A body with all its calls expanded.

        Args:
          callers: names of the functions that the body is in, outermost first.
          parameters: the variables of ``.param`` space that its calls may name.
        """
        expanded: list[Statement] = []
        for statement in body:
            if isinstance(statement, Instruction) and statement.opcode == "call":
                expanded += self._expand_call(statement, callers, parameters)
            else:
                expanded.append(statement)
        return expanded

    def _expand_call(
        self, call: Instruction, callers: tuple[str, ...], parameters: Mapping[str, Variable]
    ) -> list[Statement]:
        callee, arguments, results = call_parts(call)
        if not isinstance(callee, Symbol):
            raise _error(call, "indirect calls are not supported", got=callee)
        function = self._functions.get(callee.name)
        if function is None:
            return [call]
        if callee.name in callers:
            raise _error(
                call, "recursive calls are not supported", got=" > ".join((*callers, callee.name))
            )
        if function.error is not None:
            raise function.error
        if function.entry:
            raise _error(call, "a kernel cannot be called", got=callee.name)
        assert function.body is not None
        if len(arguments) != len(function.parameters) or len(results) != len(function.results):
            raise _error(
                call,
                "the call does not fit the function",
                got=f"{len(arguments)} arguments and {len(results)} results",
                expected=f"{len(function.parameters)} and {len(function.results)}",
            )
        self._sites += 1
        site = _Site(call, function, f"{function.name}.{self._sites}", parameters)
        for formal, actual in zip(function.parameters, arguments, strict=True):
            site.bind(formal, actual, result=False)
        for formal, actual in zip(function.results, results, strict=True):
            site.bind(formal, actual, result=True)
        site.rename()
        renamed = site.body()
        self.registers += site.registers
        self.variables.update((one.name, one) for one in site.variables)
        return [
            *site.start,
            *self.expand(renamed, (*callers, function.name), site.visible),
            *site.end,
        ]


class _Site:
    """One call of a function with a body.

    Attributes:
      start, end: statements before and behind the body.
      registers, variables: that the body declares, renamed.
      visible: variables of ``.param`` space, by the names that they have in the renamed body.
    """

    def __init__(
        self, call: Instruction, function: Function, name: str, parameters: Mapping[str, Variable]
    ):
        self.start: list[Statement] = []
        self.end: list[Statement] = []
        self.registers: list[Register] = []
        self.variables: list[Variable] = []
        self.visible: dict[str, Variable] = dict(parameters)
        self._call = call
        self._function = function
        self._name = name
        self._leave = self._new("return")
        self._register_names: dict[str, Register] = {}
        self._symbol_names: dict[str, str] = {}
        self._label_names: dict[str, str] = {}
        self._parameters = parameters
        self._skip = self._new("skip")
        if call.predicate is not None:
            self.start.append(
                Instruction(
                    "bra",
                    (),
                    (Symbol(self._skip),),
                    call.position,
                    call.text,
                    call.predicate,
                    not call.predicate_negated,
                    call.location,
                )
            )

    def _new(self, name: str) -> str:
        # Identifiers hold no "@", so that a generated name cannot clash with a written one.
        return f"{name}@{self._name}"

    # Parameters -----------------------------------------------------------------------------------

    def bind(self, formal: Variable | Register, actual: Operand, *, result: bool) -> None:
        """Makes a parameter or result mean what the call gives for it.

        PTX ISA 7.1: either may be a register or a variable of ``.param`` space, and an argument
        may be a constant.
        """
        if isinstance(formal, Variable) and isinstance(actual, Symbol):
            self._symbol_names[formal.name] = self._variable(formal, actual).name
            return
        if isinstance(formal, Variable):
            self._declare(formal)
            target: Operand = Address(Symbol(self._symbol_names[formal.name]))
            bits = 8 * formal.bytes
        else:
            target = self._register_names[formal.name] = Register(
                self._new(formal.name), formal.type
            )
            bits = TYPES[formal.type].bits
        if isinstance(actual, Sink) and result:
            return
        given = self._checked(actual, formal, bits, result)
        if result:
            self.end.append(self._move(given, target, bits))
        else:
            self.start.append(self._move(target, given, bits))

    def _variable(self, formal: Variable, actual: Symbol) -> Variable:
        """The caller's variable that a formal parameter means."""
        variable = self._parameters.get(actual.name)
        if (
            variable is None
            or actual.offset
            or variable.bytes < formal.bytes
            or variable.alignment < formal.alignment
        ):
            raise self._mismatch(formal, actual)
        return variable

    def _checked(
        self, actual: Operand, formal: Variable | Register, bits: int, result: bool
    ) -> Operand:
        """What the call gives, as an operand of ``mov``, ``ld`` or ``st``."""
        if isinstance(actual, Register) and TYPES[actual.type].bits == bits:
            return actual
        if isinstance(actual, Immediate) and not result and bits in (8, 16, 32, 64):
            return actual
        if isinstance(actual, Symbol) and isinstance(formal, Register):
            variable = self._parameters.get(actual.name)
            if variable is not None and 8 * variable.bytes == bits:
                return Address(actual)
        raise self._mismatch(formal, actual)

    def _mismatch(self, formal: Variable | Register, actual: Operand) -> PtxError:
        return _error(
            self._call,
            f"an operand does not fit {formal.name!r} of function {self._function.name!r}",
            got=actual,
        )

    def _move(self, target: Operand, source: Operand, bits: int) -> Instruction:
        """``target = source``, where one of them may be a variable of ``.param`` space."""
        opcode, modifiers = "mov", [f"b{bits}"]
        if isinstance(target, Address):
            opcode, modifiers = "st", ["param", *modifiers]
        elif isinstance(source, Address):
            opcode, modifiers = "ld", ["param", *modifiers]
        call = self._call
        return Instruction(
            opcode,
            tuple(modifiers),
            (target, source),
            call.position,
            call.text,
            location=call.location,
        )

    # Names ----------------------------------------------------------------------------------------

    def _declare(self, variable: Variable) -> None:
        name = self._symbol_names[variable.name] = self._new(variable.name)
        renamed = dataclasses.replace(variable, name=name)
        self.variables.append(renamed)
        if variable.space == "param":
            self.visible[name] = renamed

    def rename(self) -> None:
        """Gives everything that the function declares a name of this call's own."""
        function = self._function
        for register in function.registers:
            self._register_names[register.name] = Register(self._new(register.name), register.type)
        self.registers = list(self._register_names.values())
        for variable in function.variables:
            if variable.space in PRIVATE_SPACES:
                self._declare(variable)
            else:
                self.variables.append(variable)
        assert function.body is not None
        for statement in function.body:
            if isinstance(statement, Label | BranchTargets):
                self._label_names[statement.name] = self._new(statement.name)

    def body(self) -> list[Statement]:
        """The function's statements, renamed; ``ret`` leads behind them."""
        assert self._function.body is not None
        renamed: list[Statement] = []
        statements = self._function.body
        last = statements[-1] if statements else None
        if isinstance(last, Instruction) and last.opcode == "ret" and last.predicate is None:
            statements = statements[:-1]
        for statement in statements:
            if isinstance(statement, Label):
                renamed.append(Label(self._label_names[statement.name], statement.position))
            elif isinstance(statement, BranchTargets):
                renamed.append(
                    BranchTargets(
                        self._label_names[statement.name],
                        tuple(self._label_names[one] for one in statement.labels),
                        statement.position,
                    )
                )
            elif isinstance(statement, ImplicitDefinition):
                register = self._register_names[statement.register.name]
                renamed.append(ImplicitDefinition(register, statement.position))
            else:
                renamed.append(self._instruction(statement))
        self.end.insert(0, Label(self._leave, self._call.position))
        if self._call.predicate is not None:
            self.end.append(Label(self._skip, self._call.position))
        return renamed

    def _instruction(self, instruction: Instruction) -> Instruction:
        guard = instruction.predicate
        if guard is not None:
            guard = self._register_names[guard.name]
        if instruction.opcode == "ret":
            return dataclasses.replace(
                instruction,
                opcode="bra",
                operands=(Symbol(self._leave),),
                predicate=guard,
            )
        symbol = self._label if instruction.opcode in ("bra", "brx") else self._symbol
        return dataclasses.replace(
            instruction,
            modifiers=_in_function(instruction),
            operands=tuple(self._operand(one, symbol) for one in instruction.operands),
            predicate=guard,
        )

    def _label(self, symbol: Symbol) -> Symbol:
        return Symbol(self._label_names[symbol.name])

    def _symbol(self, symbol: Symbol) -> Symbol:
        name = self._symbol_names.get(symbol.name)
        return symbol if name is None else dataclasses.replace(symbol, name=name)

    def _operand(self, operand: Operand, symbol: Callable[[Symbol], Symbol]) -> Operand:
        if isinstance(operand, Register):
            return self._register_names[operand.name]
        if isinstance(operand, Symbol):
            return symbol(operand)

        def each(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
            return tuple(self._operand(one, symbol) for one in operands)

        if isinstance(operand, Address):
            base = operand.base
            if isinstance(base, Register):
                base = self._register_names[base.name]
            elif isinstance(base, Symbol):
                base = symbol(base)
            coordinates = None if operand.coordinates is None else each(operand.coordinates)
            return Address(base, operand.offset, coordinates, each(operand.extra))
        if isinstance(operand, Vector):
            return Vector(each(operand.elements))
        if isinstance(operand, Arguments):
            return Arguments(each(operand.elements))
        if isinstance(operand, Negated):
            return Negated(self._operand(operand.operand, symbol))
        if isinstance(operand, Pair):
            return Pair(self._operand(operand.first, symbol), self._operand(operand.second, symbol))
        return operand


def _in_function(instruction: Instruction) -> tuple[str, ...]:
    """The modifiers, with ``.param`` made explicit: in a function, an address of that space that
    is in a register is that of a parameter of the function (PTX ISA 5.1.6.3)."""
    if instruction.opcode in ("ld", "st") and "param" in instruction.modifiers:
        bases = [one.base for one in instruction.operands if isinstance(one, Address)]
        if any(isinstance(base, Register) for base in bases):
            return tuple("param::func" if one == "param" else one for one in instruction.modifiers)
    return instruction.modifiers


def _error(
    call: Instruction, message: str, *, got: object = None, expected: str | None = None
) -> PtxError:
    return PtxError(
        message,
        position=call.position,
        instruction=call.text,
        got=got,
        expected=expected,
        location=call.location,
    )
