"""Kernels that end with an error which the host reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import memory_effect
from pallasite.plugin.lowering import RuleContext, Value
from pallasite_multigpu import protocol
from pallasite_multigpu.protocol.layout import Trap

give_up_p = _jax.Primitive("give_up")
give_up_p.multiple_results = True
_jax.abstract_eval(give_up_p)(lambda value, *, code: ([], {memory_effect, _jax.comms_effect}))

rules = RuleSet()


def give_up(code: Trap, value: Any) -> None:
    """Ends the kernel: the host tells why, and where.

    Args:
      code: why.
      value: what it is about, an int32 scalar.
    """
    give_up_p.bind(value, code=int(code))


@rules.lowering(give_up_p, Semantics.LANE, Semantics.WARP)
def _give_up(ctx: RuleContext, value: Value, *, code: int) -> Sequence[Any]:
    protocol.trap(ctx, code, ctx.scalar(value, ops.i32()))
    return ()
