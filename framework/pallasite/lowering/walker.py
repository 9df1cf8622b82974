"""The jaxpr walker: lowers equation by equation. It knows no primitive by name; rules do it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pallasite import _jax
from pallasite.jaxpr_visitor import Visitor
from pallasite.lowering.context import RuleContext
from pallasite.lowering.equations import check_elements, errors_at_equation, mlir_location
from pallasite.lowering.regions import OpenRegions

if TYPE_CHECKING:
    from pallasite.lowering.context import KernelContext, Mode, Value


def lower_jaxpr(
    kernel: KernelContext, mode: Mode, jaxpr: Any, args: Sequence[Value]
) -> list[Value]:
    """Lowers the equations of ``jaxpr`` at the current insertion point.

    Args:
      kernel: the kernel's shared state.
      mode: the semantics and surroundings.
      jaxpr: a jaxpr; constants that it holds become constants of the kernel.
      args: a value for each of its inputs (and for each constvar that has no constant, first).

    Returns:
      A value for each output.
    """
    if kernel.recorder is not None:
        kernel.recorder.enter(jaxpr, args)
    kernel.strategy.enter(jaxpr)
    return _Lowering(kernel, mode, jaxpr).run(jaxpr, args)


class _Lowering(Visitor["Value"]):
    """Visits one jaxpr, in one place; values are those that rules hand to one another."""

    def __init__(self, kernel: KernelContext, mode: Mode, jaxpr: Any):
        super().__init__(kernel.jaxprs)
        self.kernel = kernel
        self.mode = mode
        self.used = _used(jaxpr)
        self.regions = OpenRegions(kernel.launch)

    def literal(self, atom: Any) -> Value:
        return self.kernel.strategy.constant(atom.val, atom.aval.dtype)

    def constant(self, variable: Any, value: Any) -> Value:
        return self.kernel.strategy.constant(value, variable.aval.dtype)

    def visit(self, equation: Any, read: Callable[[Any], Value]) -> Sequence[Value]:
        kernel, mode, strategy = self.kernel, self.mode, self.kernel.strategy
        primitive, params = equation.primitive, equation.params
        avals = tuple(atom.aval for atom in equation.invars)
        location = _jax.user_location(equation.source_info) or kernel.location
        with mlir_location(location), errors_at_equation(equation):
            check_elements(equation)
            rule = kernel.registry.lowering_rule(
                primitive, mode.semantics, kernel.target, avals, params
            )
            hint, vector_limit = strategy.wanted(equation, mode.path)
            context = RuleContext(
                kernel=kernel,
                mode=mode,
                primitive=primitive,
                avals_in=avals,
                avals_out=tuple(variable.aval for variable in equation.outvars),
                used=tuple(variable in self.used for variable in equation.outvars),
                layout_hint=hint,
                vector_limit=vector_limit,
                location=location,
                path=(*mode.path, id(equation)),
                rules=(rule,),
            )
            operands = strategy.before(context, [read(atom) for atom in equation.invars])
            self.regions.move_to(_jax.scope_names(equation.source_info))
            results = rule.function(context, *operands, **params)
            results = strategy.check(context, equation, results)
            results = strategy.after(context, results)
            if kernel.recorder is not None:
                kernel.recorder.results(context, results)
        return results

    def outputs(self, jaxpr: Any, read: Callable[[Any], Value]) -> list[Value]:
        self.regions.close()
        kernel, mode = self.kernel, self.mode
        context = RuleContext(kernel, mode, None, (), (), location=kernel.location, path=mode.path)
        return list(kernel.strategy.outputs(context, jaxpr, super().outputs(jaxpr, read)))


def _used(jaxpr: Any) -> set[Any]:
    """The variables that some equation takes or that the jaxpr returns."""
    atoms = {atom for equation in jaxpr.eqns for atom in equation.invars if not _is_literal(atom)}
    return atoms | {atom for atom in jaxpr.outvars if not _is_literal(atom)}


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
