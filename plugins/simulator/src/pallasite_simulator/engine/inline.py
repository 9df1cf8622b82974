"""Calls of device functions are replaced by the functions' bodies (PTX ISA 7.1 and 9.7.12.5, call).

Each call site has registers, labels and local variables of its own. Parameters in ``.param`` space
are memory of each lane: the callee's formal ones mean the caller's variables. Calls of functions
without a body stay, for rules to give them a meaning.

Functions that call themselves, directly or through others, and those that are called by their
address cannot be put in everywhere: each has one body, behind the kernel's. A call branches there,
and back by a table of all calls. In between, ``@push`` and ``@pop`` keep what the calls around it
hold (:mod:`pallasite_simulator.instructions.frames`); local variables are in a frame to which a
register points.
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
    Part,
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
      PtxError: arguments that do not fit the function.
    """
    if function.body is None or not any(map(_is_call, function.body)):
        return function
    inliner = _Inliner(module)
    body = inliner.expand(function.body, _parameters(function))
    body += inliner.standing_bodies()
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


def _callees(module: Module) -> tuple[dict[str, set[str]], set[str]]:
    """Which functions with a body each one calls, and those that are called by address.

    A call by address may be one of every function whose address something takes.
    """
    functions = {one.name: one for one in module.functions if one.body is not None}
    calls: dict[str, set[str]] = {name: set() for name in functions}
    indirect: set[str] = set()
    taken = {symbol.name for one in module.variables for _, symbol in one.addresses}
    for name, function in functions.items():
        for variable in function.variables:
            taken.update(symbol.name for _, symbol in variable.addresses)
        for statement in function.body or ():
            if not isinstance(statement, Instruction):
                continue
            operands = statement.operands
            if statement.opcode == "call":
                callee, arguments, _ = call_parts(statement)
                operands = arguments
                if isinstance(callee, Symbol) and callee.name in functions:
                    calls[name].add(callee.name)
                elif not isinstance(callee, Symbol):
                    indirect.add(name)
            taken.update(one.name for one in operands if isinstance(one, Symbol))
    found = {name for name in taken & functions.keys() if not functions[name].entry}
    for name in indirect:
        calls[name] |= found
    return calls, found if indirect else set()


def _recursive(calls: Mapping[str, set[str]]) -> set[str]:
    """The functions that are called inside calls of themselves."""
    result = set()
    for name, direct in calls.items():
        reached, pending = set(direct), list(direct)
        while pending:
            new = calls[pending.pop()] - reached
            reached |= new
            pending += new
        if name in reached:
            result.add(name)
    return result


class _Inliner:
    """Collects what the bodies that are put in declare."""

    def __init__(self, module: Module):
        self.registers: list[Register] = []
        self.variables: dict[str, Variable] = {}
        self._functions = {one.name: one for one in module.functions if one.body is not None}
        self._sites = 0
        calls, self._by_address = _callees(module)
        self._standing_names = self._by_address | _recursive(calls)
        self._standing: dict[str, _Standing] = {}

    def expand(
        self, body: Iterable[Statement], parameters: Mapping[str, Variable]
    ) -> list[Statement]:
        """A body with all its calls expanded.

        Args:
          body: the statements.
          parameters: the variables of ``.param`` space that its calls may name.
        """
        expanded: list[Statement] = []
        for statement in body:
            if isinstance(statement, Instruction) and statement.opcode == "call":
                expanded += self._expand_call(statement, parameters)
            else:
                expanded.append(statement)
        return expanded

    def standing_bodies(self) -> list[Statement]:
        """The bodies of functions that are not inlined."""
        bodies: list[Statement] = []
        written: set[str] = set()
        while len(written) < len(self._standing):
            name = next(one for one in self._standing if one not in written)
            written.add(name)
            standing = self._standing[name]
            bodies += [
                Instruction("ret", (), (), standing.function.position, "ret"),
                Label(standing.entry, standing.function.position),
                *self.expand(standing.statements(), standing.visible),
                *standing.leave(),
            ]
        for standing in self._standing.values():
            bodies.append(standing.table())
            self.registers += standing.registers
            self.variables.update((one.name, one) for one in standing.variables)
        return bodies

    def _expand_call(
        self, call: Instruction, parameters: Mapping[str, Variable]
    ) -> list[Statement]:
        callee, arguments, results = call_parts(call)
        if not isinstance(callee, Symbol):
            return self._expand_indirect(call, callee, parameters)
        function = self._functions.get(callee.name)
        if function is None:
            return [call]
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
        if callee.name in self._standing_names:
            return self._stand(call, function, parameters, arguments, results)
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
            *self.expand(renamed, site.visible),
            *site.end,
        ]

    def _stand(
        self,
        call: Instruction,
        function: Function,
        parameters: Mapping[str, Variable],
        arguments: tuple[Operand, ...],
        results: tuple[Operand, ...],
    ) -> list[Statement]:
        """A call of a function that is not inlined."""
        standing = self._standing.get(function.name)
        if standing is None:
            standing = self._standing[function.name] = _Standing(function)
        # A site whose function has no body moves arguments and results.
        site = _Site(call, function, f"{function.name}.{self._sites}", parameters)
        moved: list[Statement] = []
        for formal, actual in zip(function.parameters, arguments, strict=True):
            moved += site.copy(standing.own(formal), actual, formal, result=False)
        kept: list[Statement] = []
        given: list[Statement] = []
        for formal, actual in zip(function.results, results, strict=True):
            if not isinstance(actual, Sink):
                between = site.between(formal)
                kept += site.copy(standing.own(formal), between, formal, result=True)
                given += site.copy(between, actual, formal, result=True)
        self.registers += site.registers
        self.variables.update((one.name, one) for one in site.variables)
        back, number = standing.new_return(self._sites)
        return [
            *site.start,
            standing.instruction("@push", call),
            *moved,
            site.instruction("mov", ("u32",), (standing.number, Immediate(number))),
            site.instruction("bra", (), (Symbol(standing.entry),)),
            Label(back, call.position),
            *kept,
            standing.instruction("@pop", call),
            *given,
            *site.skip_label(),
        ]

    def _expand_indirect(
        self, call: Instruction, callee: Operand, parameters: Mapping[str, Variable]
    ) -> list[Statement]:
        """Tries all functions that the address may be that of."""
        _, arguments, results = call_parts(call)
        self._sites += 1
        name = f"@indirect.{self._sites}"
        address, differs = Register(f"address{name}", "u64"), Register(f"differs{name}", "pred")
        self.registers += [address, differs]
        site = _Site(call, None, name, parameters)
        statements: list[Statement] = list(site.start)
        for number, candidate in enumerate(sorted(self._by_address)):
            function = self._functions[candidate]
            if len(arguments) != len(function.parameters) or len(results) != len(function.results):
                continue
            operands = tuple(Symbol(candidate) if one is callee else one for one in call.operands)
            plain = dataclasses.replace(
                call, operands=operands, predicate=None, predicate_negated=False
            )
            try:
                expanded = self._expand_call(plain, parameters)
            except PtxError:
                continue  # It has parameters of other sizes.
            other = Label(f"other.{number}{name}", call.position)
            branch = site.instruction("bra", (), (Symbol(other.name),))
            statements += [
                site.instruction("mov", ("u64",), (address, Symbol(candidate))),
                site.instruction("setp", ("ne", "u64"), (differs, address, callee)),
                dataclasses.replace(branch, predicate=differs),
                *expanded,
                site.instruction("bra", (), (Symbol(f"end{name}"),)),
                other,
            ]
        statements += [
            site.instruction("@unknown", (), (callee,)),
            Label(f"end{name}", call.position),
            *site.skip_label(),
        ]
        return statements


class _Site:
    """One call of a function with a body.

    Attributes:
      start, end: statements before and behind the body.
      registers, variables: that the body declares, renamed.
      visible: variables of ``.param`` space, by the names that they have in the renamed body.
    """

    def __init__(
        self,
        call: Instruction,
        function: Function | None,
        name: str,
        parameters: Mapping[str, Variable],
    ):
        self.start: list[Statement] = []
        self.end: list[Statement] = []
        self.registers: list[Register] = []
        self.variables: list[Variable] = []
        self.visible: dict[str, Variable] = dict(parameters)
        self._call = call
        self._called = function
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

    @property
    def _function(self) -> Function:
        assert self._called is not None
        return self._called

    def _new(self, name: str) -> str:
        # Identifiers hold no "@", so that a generated name cannot clash with a written one.
        return f"{name}@{self._name}"

    def instruction(
        self, opcode: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...]
    ) -> Instruction:
        """An instruction at the place of the call."""
        call = self._call
        return Instruction(
            opcode, modifiers, operands, call.position, call.text, location=call.location
        )

    def skip_label(self) -> list[Statement]:
        """Where lanes go on that do not call."""
        if self._call.predicate is None:
            return []
        return [Label(self._skip, self._call.position)]

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

    def between(self, formal: Variable | Register) -> Operand:
        """Something of the call's own that holds a result, like the parameter that is given."""
        if isinstance(formal, Register):
            register = Register(self._new(f"between.{formal.name}"), formal.type)
            self.registers.append(register)
            return register
        name = self._new(f"between.{formal.name}")
        variable = dataclasses.replace(formal, name=name)
        self.variables.append(variable)
        self._parameters = {**self._parameters, name: variable}
        return Symbol(name)

    def copy(
        self, own: Operand, given: Operand, formal: Variable | Register, *, result: bool
    ) -> list[Statement]:
        """Moves an argument to a parameter, or a result the other way; either may be a register or
        a variable, and an argument may be a constant."""
        if isinstance(formal, Register):
            bits = TYPES[formal.type].bits
            checked = self._checked(given, formal, bits, result)
            return [self._move(checked, own, bits) if result else self._move(own, checked, bits)]
        assert isinstance(own, Symbol)
        if not isinstance(given, Symbol):
            bits = 8 * formal.bytes
            checked, memory = self._checked(given, formal, bits, result), Address(own)
            return [
                self._move(checked, memory, bits) if result else self._move(memory, checked, bits)
            ]
        self._variable(formal, given)
        source, target = (own, given) if result else (given, own)
        statements: list[Statement] = []
        place, size = 0, min(8, formal.alignment & -formal.alignment)
        while place < formal.bytes:
            while size > formal.bytes - place:
                size //= 2
            word = Register(self._new(f"word.{formal.name}.{place}.{result}"), f"b{8 * size}")
            self.registers.append(word)
            read, write = (Address(Symbol(one.name), place) for one in (source, target))
            statements.append(self._move(word, read, 8 * size))
            statements.append(self._move(write, word, 8 * size))
            place += size
        return statements

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
        if isinstance(operand, Part):
            return Part(self._register_names[operand.register.name], operand.selection)
        if isinstance(operand, Pair):
            return Pair(self._operand(operand.first, symbol), self._operand(operand.second, symbol))
        return operand


class _Standing(_Site):
    """A function that is not inlined.

    Attributes:
      function: the function.
      entry: label where it begins.
      number: register with the number of the call to go back to.
    """

    def __init__(self, function: Function):
        assert function.body is not None
        nowhere = Instruction("call", (), (), function.position, f"call {function.name}")
        super().__init__(nowhere, function, f"{function.name}.0", {})
        self.function = function
        self.entry = self._new("entry")
        self._returns: list[str] = []
        self._sizes: list[tuple[str, int]] = []
        self._offsets: dict[str, int] = {}
        for formal in (*function.parameters, *function.results):
            if isinstance(formal, Variable):
                self._declare(formal)
            else:
                name = self._new(formal.name)
                self._register_names[formal.name] = Register(name, formal.type)
        self.rename()
        self.number = Register(self._new("number"), "u32")
        self._frame = Register(self._new("frame"), "u64")
        self.registers += [self.number, self._frame]
        self._saved = tuple(self.registers)
        place = 0
        for variable in [one for one in self.variables if one.space == "local"]:
            place = -(-place // variable.alignment) * variable.alignment
            self._offsets[variable.name] = place
            place += variable.bytes
            self.variables.remove(variable)
        self._bytes = -(-place // 16) * 16
        self._params = tuple(one for one in self.variables if one.space == "param")

    def own(self, formal: Variable | Register) -> Operand:
        """What the function has for a parameter or result."""
        if isinstance(formal, Register):
            return self._register_names[formal.name]
        return Symbol(self._symbol_names[formal.name])

    def new_return(self, site: int) -> tuple[str, int]:
        """The label where a call ends, and its number."""
        self._returns.append(self._new(f"back.{site}"))
        return self._returns[-1], len(self._returns) - 1

    def instruction(self, opcode: str, call: Instruction) -> Instruction:  # type: ignore[override]
        """``@push`` or ``@pop``."""
        operands: tuple[Operand, ...] = (
            Symbol(self.function.name),
            Vector(self._saved),
            Vector(tuple(Symbol(one.name, one.bytes) for one in self._params)),
            self._frame,
            Immediate(self._bytes),
        )
        return Instruction(opcode, (), operands, call.position, call.text, location=call.location)

    def statements(self) -> list[Statement]:
        """The body, with local variables in the frame."""
        statements: list[Statement] = []
        for statement in self.body():
            if not isinstance(statement, Instruction) or not self._offsets:
                statements.append(statement)
                continue
            operands = list(statement.operands)
            for number, operand in enumerate(operands):
                if isinstance(operand, Symbol) and operand.name in self._offsets:
                    place = self._offsets[operand.name] + operand.offset
                    address = Register(self._new(f"address.{len(self.registers)}"), "u64")
                    self.registers.append(address)
                    taken = (address, self._frame, Immediate(place))
                    statements.append(
                        dataclasses.replace(
                            statement,
                            opcode="add",
                            modifiers=("u64",),
                            operands=taken,
                            predicate=None,
                            predicate_negated=False,
                        )
                    )
                    operands[number] = address
                elif isinstance(operand, Address) and isinstance(operand.base, Symbol):
                    place = self._offsets.get(operand.base.name, -1)
                    if place >= 0:
                        offset = operand.offset + operand.base.offset + place
                        operands[number] = dataclasses.replace(
                            operand, base=self._frame, offset=offset
                        )
            statements.append(dataclasses.replace(statement, operands=tuple(operands)))
        return statements

    def leave(self) -> list[Statement]:
        """Goes back to the call."""
        position = self.function.position
        operands = (self.number, Symbol(self._new("calls")))
        return [
            Label(self._leave, position),
            Instruction("brx", ("idx",), operands, position, "ret"),
        ]

    def table(self) -> BranchTargets:
        """Where it goes back to."""
        return BranchTargets(self._new("calls"), tuple(self._returns), self.function.position)


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
