"""Layout inference of a whole kernel."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite import _jax, plugins
from pallasite.language.memory import MemorySpace, memory_space_of
from pallasite.lowering.inference.plan import LayoutPlan
from pallasite.lowering.inference.solver import Solver
from pallasite.lowering.inference.values import AbstractValue, MemoryValue, OtherValue
from pallasite.lowering.inference.walk import Walk

if TYPE_CHECKING:
    from pallasite.lowering.context import KernelContext


@dataclasses.dataclass(frozen=True)
class Inference:
    """What inference has found.

    Attributes:
      plan: what the walker follows.
      walk: the problem, and where it comes from.
      solver: its solution.
      seconds: how long it took.
    """

    plan: LayoutPlan
    walk: Walk
    solver: Solver
    seconds: float


def infer_layouts(kernel: KernelContext, jaxpr: Any) -> Inference:
    """Chooses the layouts that a kernel of warpgroup semantics leaves open.

    Args:
      kernel: the kernel that is about to be lowered.
      jaxpr: of its body.

    Raises:
      PallasiteError: there are none, or an equation is wrong.
    """
    start = time.perf_counter()
    walk = Walk(kernel)
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    values = [
        _argument(variable.aval, name) for variable, name in zip(jaxpr.invars, names, strict=True)
    ]
    walk.jaxpr((), jaxpr, values, 1.0)
    solver = Solver(walk.problem)
    solver.solve()
    plugins.manager().implementation("check_layouts")(walk.problem, solver)
    plan = walk.plan(solver)
    return Inference(plan, walk, solver, time.perf_counter() - start)


def _argument(aval: Any, name: str) -> AbstractValue:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or _jax.issubdtype(dtype, _jax.extended):
        return OtherValue(aval)
    space = memory_space_of(aval)
    if not isinstance(space, MemorySpace) or not space.is_global:
        return OtherValue(aval)
    return MemoryValue(space, tuple(aval.shape), np.dtype(dtype), name=name)
