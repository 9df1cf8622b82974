"""The jaxpr walker: lowers equation by equation. It knows no primitive by name; rules do it all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite import _jax
from pallasite.errors import InternalError, SourceLocation, UnsupportedError
from pallasite.layouts.registers import Layout
from pallasite.lowering.arrays import RegisterArray
from pallasite.lowering.context import KernelContext, Mode, RuleContext, Value
from pallasite.lowering.regions import OpenRegions
from pallasite.lowering.relayout import relayout
from pallasite.lowering.resources import errors_at_equation


def constant_value(value: Any, dtype: Any) -> RegisterArray:
    """The register array of a literal or a captured constant.

    Raises:
      UnsupportedError: an array whose elements differ; it must be passed as an input.
    """
    array = np.asarray(value, dtype=dtype)
    if array.size == 0 or (array.size > 1 and not bool(np.all(array == array.flat[0]))):
        raise UnsupportedError(
            "the kernel captures an array constant",
            got=f"{array.dtype}{list(array.shape)}",
            expected="scalars, or arrays of one repeated value",
            hint="pass the array to the kernel as an input",
        )
    return RegisterArray.constant(array.flat[0], array.dtype, array.shape)


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
    environment: dict[Any, Value] = {}
    binders = [*jaxpr.constvars, *jaxpr.invars]
    constants = list(getattr(jaxpr, "consts", ()) or ())
    if constants and len(args) == len(jaxpr.invars):
        values: list[Value] = [
            constant_value(c, v.aval.dtype) for c, v in zip(constants, jaxpr.constvars, strict=True)
        ]
        values += list(args)
    else:
        values = list(args)
    if len(values) != len(binders):
        raise InternalError(f"{len(values)} values for a jaxpr with {len(binders)} inputs")
    environment.update(zip(binders, values, strict=True))

    def read(atom: Any) -> Value:
        if isinstance(atom, _jax.Literal):
            return constant_value(atom.val, atom.aval.dtype)
        return environment[atom]

    if kernel.recorder is not None:
        kernel.recorder.enter(jaxpr, args)
    plan = kernel.plan
    hints: dict[Any, Layout] = {}
    if plan is None:
        hints = layout_hints(kernel, jaxpr)
        kernel.access_widths.add(jaxpr)
        kernel.known_layouts.add(jaxpr)
    used = {atom for equation in jaxpr.eqns for atom in equation.invars if _is_variable(atom)}
    used |= {atom for atom in jaxpr.outvars if _is_variable(atom)}
    regions = OpenRegions(kernel.launch)
    for equation in jaxpr.eqns:
        location = _jax.user_location(equation.source_info) or kernel.location
        avals_in = tuple(atom.aval for atom in equation.invars)
        with errors_at_equation(equation):
            rule = kernel.registry.lowering_rule(
                equation.primitive, mode.semantics, kernel.target, avals_in, equation.params
            )
        context = RuleContext(
            kernel=kernel,
            mode=mode,
            primitive=equation.primitive,
            avals_in=avals_in,
            avals_out=tuple(variable.aval for variable in equation.outvars),
            used=tuple(variable in used for variable in equation.outvars),
            layout_hint=_hint(kernel, hints, equation.outvars[0])
            if equation.outvars and plan is None
            else None,
            vector_limit=kernel.access_widths.limit(equation.outvars[0])
            if equation.outvars and plan is None
            else None,
            location=location,
            path=(*mode.path, id(equation)) if plan is not None else (),
            rules=(rule,),
        )
        wanted = None
        before: Sequence[tuple[Any, dict[str, Any]]] = ()
        if plan is not None:
            wanted = plan.equations.get((mode.path, id(equation)))
            before = plan.before.get((mode.path, id(equation)), ())
        if wanted is not None:
            context = dataclasses.replace(context, layout_hint=wanted.hint)
        with mlir_location(location), errors_at_equation(equation):
            check_elements(equation)
            operands = [read(atom) for atom in equation.invars]
            if wanted is not None:
                operands = _converted(context, operands, wanted.operands, wanted.spread)
            if plan is not None and (mode.path, id(equation)) in plan.barriers:
                context.synchronize()
            for primitive, params in before:
                inserted = kernel.registry.lowering_rule(primitive, mode.semantics, kernel.target)
                inserted.function(context, **params)
            regions.move_to(_jax.scope_names(equation.source_info))
            results = rule.function(context, *operands, **equation.params)
            if equation.primitive.multiple_results:
                results = () if results is None else tuple(results)
            else:
                results = (results,)
            _check_results(equation, results)
            if wanted is not None:
                results = _converted(context, results, wanted.results)
            if kernel.recorder is not None:
                kernel.recorder.results(context, results)
        environment.update(zip(equation.outvars, results, strict=True))
    regions.close()
    outputs = [read(atom) for atom in jaxpr.outvars]
    if plan is not None and (mode.path, id(jaxpr)) in plan.outputs:
        layouts = plan.outputs[mode.path, id(jaxpr)]
        context = RuleContext(kernel, mode, None, (), (), location=kernel.location)
        outputs = _converted(context, outputs, layouts)
    return outputs


def _converted(
    ctx: RuleContext,
    values: Sequence[Value],
    layouts: Sequence[Layout | None],
    spread: Collection[int] = (),
) -> list[Value]:
    """Arrays in the layouts that inference has chosen; splats only where they must not stay so."""
    converted = list(values)
    for position, layout in enumerate(layouts[: len(converted)]):
        value = converted[position]
        if layout is None or not isinstance(value, RegisterArray) or value.layout == layout:
            continue
        if not value.is_splat or position in spread:
            converted[position] = relayout(ctx, value, layout)
    return converted


def _hint(kernel: KernelContext, hints: Mapping[Any, Layout], variable: Any) -> Layout | None:
    """What later uses ask for, or else the layout of what the variable meets."""
    hint = hints.get(variable)
    return kernel.known_layouts.layout(variable) if hint is None else hint


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def layout_hints(kernel: KernelContext, jaxpr: Any) -> dict[Any, Layout]:
    """Which register layout the uses of each variable ask for, from a walk back over the jaxpr.

    A primitive's layout rule says what its operands should be laid out like, given the layout that
    is wanted of its results; the earliest use in program order decides.
    """
    hints: dict[Any, Layout] = {}
    for equation in reversed(jaxpr.eqns):
        with errors_at_equation(equation):
            rule = kernel.registry.layout_rule(
                equation.primitive,
                kernel.target,
                [atom.aval for atom in equation.invars],
                equation.params,
            )
            if rule is None:
                continue
            wanted = [hints.get(variable) for variable in equation.outvars]
            proposals = rule.function(
                [atom.aval for atom in equation.invars],
                [variable.aval for variable in equation.outvars],
                wanted,
                **equation.params,
            )
        for atom, proposal in zip(equation.invars, proposals, strict=True):
            if proposal is not None and not isinstance(atom, _jax.Literal):
                hints[atom] = proposal
    return hints


@contextlib.contextmanager
def mlir_location(location: SourceLocation | None) -> Iterator[None]:
    """Gives the operations emitted inside the user's source line."""
    if location is None:
        yield
        return
    with ir.Location.file(location.file, location.line, location.column):
        yield


def check_elements(equation: Any) -> None:
    """Refuses an equation that makes an array without elements."""
    for variable in equation.outvars:
        if 0 in getattr(variable.aval, "shape", ()):
            raise UnsupportedError(
                f"{equation.primitive} makes an array without elements",
                got=variable.aval.str_short(),
                expected="extents of at least 1",
            )


def _check_results(equation: Any, results: Sequence[Value]) -> None:
    name = equation.primitive.name
    if len(results) != len(equation.outvars):
        raise InternalError(
            f"the rule for {name} returned {len(results)} values, not {len(equation.outvars)}"
        )
    for variable, value in zip(equation.outvars, results, strict=True):
        aval = variable.aval
        if not isinstance(value, RegisterArray) or not isinstance(aval, _jax.ShapedArray):
            continue
        if value.shape != aval.shape or value.dtype != np.dtype(aval.dtype):
            raise InternalError(
                f"the rule for {name} returned {value.dtype}{list(value.shape)}"
                f" for {aval.dtype}{list(aval.shape)}"
            )
