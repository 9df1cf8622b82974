"""Order between what peers have written, and asynchronous copies that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import memory_effect
from pallasite.plugin.lowering import RuleContext

acquire_for_copies_p = _jax.Primitive("acquire_for_copies")
acquire_for_copies_p.multiple_results = True
_jax.abstract_eval(acquire_for_copies_p)(lambda: ([], {memory_effect}))

rules = RuleSet()


def acquire_for_copies() -> None:
    """What this thread has waited for is there for asynchronous copies that it starts later.

    PTX ISA: ``fence.proxy.async``, on global memory.
    """
    acquire_for_copies_p.bind()


@rules.lowering(acquire_for_copies_p, Semantics.LANE, Semantics.WARP)
def _acquire_for_copies(ctx: RuleContext, **params: Any) -> Sequence[Any]:
    del ctx, params
    ops.inline_assembly("fence.proxy.async.global;", "~{memory}")
    return ()
