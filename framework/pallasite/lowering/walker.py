"""The jaxpr walker: lowers equation by equation. It knows no primitive by name; rules do it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pallasite import _jax
from pallasite.errors import InternalError
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
    strategy = kernel.strategy
    environment = _bound(kernel, jaxpr, args)

    def read(atom: Any) -> Value:
        if isinstance(atom, _jax.Literal):
            return strategy.constant(atom.val, atom.aval.dtype)
        return environment[atom]

    if kernel.recorder is not None:
        kernel.recorder.enter(jaxpr, args)
    strategy.enter(jaxpr)
    used = _used(jaxpr)
    regions = OpenRegions(kernel.launch)
    for equation in jaxpr.eqns:
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
                used=tuple(variable in used for variable in equation.outvars),
                layout_hint=hint,
                vector_limit=vector_limit,
                location=location,
                path=(*mode.path, id(equation)),
                rules=(rule,),
            )
            operands = strategy.before(context, [read(atom) for atom in equation.invars])
            regions.move_to(_jax.scope_names(equation.source_info))
            results = rule.function(context, *operands, **params)
            if primitive.multiple_results:
                results = () if results is None else tuple(results)
            else:
                results = (results,)
            strategy.check(equation, results)
            results = strategy.after(context, results)
            if kernel.recorder is not None:
                kernel.recorder.results(context, results)
        environment.update(zip(equation.outvars, results, strict=True))
    regions.close()
    context = RuleContext(kernel, mode, None, (), (), location=kernel.location, path=mode.path)
    return list(strategy.outputs(context, jaxpr, [read(atom) for atom in jaxpr.outvars]))


def _bound(kernel: KernelContext, jaxpr: Any, args: Sequence[Value]) -> dict[Any, Value]:
    """The values of a jaxpr's constants and inputs, by variable."""
    binders = [*jaxpr.constvars, *jaxpr.invars]
    constants = list(getattr(jaxpr, "consts", ()) or ())
    values = list(args)
    if constants and len(args) == len(jaxpr.invars):
        values[:0] = [
            kernel.strategy.constant(constant, variable.aval.dtype)
            for constant, variable in zip(constants, jaxpr.constvars, strict=True)
        ]
    if len(values) != len(binders):
        raise InternalError(f"{len(values)} values for a jaxpr with {len(binders)} inputs")
    return dict(zip(binders, values, strict=True))


def _used(jaxpr: Any) -> set[Any]:
    """The variables that some equation takes or that the jaxpr returns."""
    atoms = {atom for equation in jaxpr.eqns for atom in equation.invars if not _is_literal(atom)}
    return atoms | {atom for atom in jaxpr.outvars if not _is_literal(atom)}


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal)
