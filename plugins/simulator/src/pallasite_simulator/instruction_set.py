"""How the meaning of instructions is given: rules, and what they are bound with.

A rule is bound once for each instruction of a program and returns a step, which is then called for
each execution with the lanes that take part::

    instructions = InstructionSet()

    @instructions.register("brev")
    def bind_brev(instruction, binder):
        \"\"\"Bit reverse: PTX ISA 9.7.1.\"\"\"
        kind = binder.only_type("b32", "b64")
        return binder.elementwise(functools.partial(reverse, bits=kind.bits), kind, kind)

The rules of a plugin are what its hook ``pallasite_instructions`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pallasite.plugin import InstructionRule

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder
    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.engine.wait import Wait
    from pallasite_simulator.ptx.syntax import Instruction

type Step = Callable[[Lanes], Iterable[Wait] | None]
"""Executes one instruction for some lanes; returns the lanes that cannot go on, with the reason."""

type Bind = Callable[[Instruction, Binder], Step]
"""Makes the step of one instruction; raises :class:`PtxError` for what it does not know."""


class InstructionSet:
    """Collects the rules of a module by a decorator; ``rules`` is what a plugin's hook returns."""

    def __init__(self) -> None:
        self.rules: list[InstructionRule] = []

    def register[Function: Callable[..., Any]](
        self, *names: str, overrides: tuple[str, ...] = (), needs_warp: bool = False
    ) -> Callable[[Function], Function]:
        """Registers a function as the meaning of instructions.

        Args:
          *names: dotted beginnings of instruction names (``"cp.async.bulk.tensor"``); for an
            instruction, the rule with the longest one is taken.
          overrides: names of plugins whose rules of the same name it replaces.
          needs_warp: whether the step must be called with whole warps (``.aligned`` instructions):
            lanes of a warp wait for one another before it. Instructions with a member mask call
            :meth:`Binder.converge_by` instead.
        """

        def register(function: Function) -> Function:
            for name in names:
                self.rules.append(
                    InstructionRule(
                        name=name, bind=function, overrides=overrides, needs_warp=needs_warp
                    )
                )
            return function

        return register

    def extend(self, *others: InstructionSet) -> None:
        """Adds all rules of other sets."""
        for other in others:
            self.rules += other.rules
