"""Lowering of ``griddepcontrol``: programmatic dependent launches (PTX ISA, ``griddepcontrol``)."""

from __future__ import annotations

from collections.abc import Sequence

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext, Value
from pallasite_std.primitives import barriers

rules = RuleSet()

_ALL = (Semantics.LANE, Semantics.WARP)


@rules.lowering(barriers.griddepcontrol_wait_p, *_ALL, requires=("griddepcontrol",))
def _wait_for_grids(ctx: RuleContext) -> Sequence[Value]:
    """PTX ISA 9.7.13.13 (``griddepcontrol``)."""
    ops.inline_assembly("griddepcontrol.wait;", "~{memory}")
    return ()


@rules.lowering(barriers.griddepcontrol_launch_dependents_p, *_ALL, requires=("griddepcontrol",))
def _launch_dependents(ctx: RuleContext) -> Sequence[Value]:
    ops.inline_assembly("griddepcontrol.launch_dependents;", "~{memory}")
    return ()
