"""Moving registers between warpgroups: ``set_max_registers``."""

from __future__ import annotations

from typing import Any, Literal

from jax.extend.core import Primitive

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.language import checks, memory_effect

SMALLEST, LARGEST, STEP = 24, 256, 8

_INSTRUCTIONS = {"increase": "inc", "decrease": "dec"}

set_max_registers_p = Primitive("set_max_registers")
set_max_registers_p.multiple_results = True

rules = RuleSet()


def _abstract_evaluation(*, n: int, action: str) -> tuple[tuple[()], set[Any]]:
    return (), {memory_effect}


set_max_registers_p.def_effectful_abstract_eval(_abstract_evaluation)


def set_max_registers(n: int, *, action: Literal["increase", "decrease"]) -> None:
    """Changes how many registers each lane of the calling thread (a warpgroup) may use.

    A thread that increases waits until others have released enough, so the threads that need few
    must decrease first.

    Args:
      n: 32-bit registers per lane, known while tracing: a multiple of 8 from 24 to 256.
      action: ``"increase"`` or ``"decrease"``: how ``n`` compares with the present number.

    Raises:
      InvalidTypeError: ``n`` is not a Python integer.
      InvalidValueError: ``n`` or ``action`` is not one of the accepted values.

    PTX ISA: ``setmaxnreg``. Needs a target with the feature ``setmaxnreg``.
    """
    accepted = f"a multiple of {STEP} from {SMALLEST} to {LARGEST}"
    if not checks.is_integer(n):
        raise checks.type_error(
            "the number of registers must be an integer that is known while tracing",
            got=f"{n!r} of type {type(n).__name__}",
            expected=accepted,
        )
    if n % STEP or not SMALLEST <= n <= LARGEST:
        below = min(max(n // STEP * STEP, SMALLEST), LARGEST)
        above = min(below + STEP, LARGEST) if n > SMALLEST else below
        raise checks.value_error(
            "a warpgroup cannot have this number of registers per lane",
            got=n,
            expected=accepted,
            hint=" or ".join(str(value) for value in sorted({below, above})),
        )
    if action not in _INSTRUCTIONS:
        raise checks.value_error(
            "set_max_registers does not know this action",
            got=repr(action),
            expected=" or ".join(repr(name) for name in _INSTRUCTIONS),
        )
    set_max_registers_p.bind(n=int(n), action=action)


@rules.lowering(set_max_registers_p, Semantics.LANE, Semantics.WARPGROUP, requires=("setmaxnreg",))
def _lower(ctx: Any, *, n: int, action: str) -> tuple[()]:
    ops.inline_assembly(f"setmaxnreg.{_INSTRUCTIONS[action]}.sync.aligned.u32 {n};", "")
    return ()
