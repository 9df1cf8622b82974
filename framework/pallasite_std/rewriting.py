"""Evaluates a traced kernel body on views of references, and with other program numbers.

A jaxpr can only be called on whole references. Here it is evaluated equation by equation, in the
current trace, on arguments that may be views (``TransformedRef``): the transforms of the view are
put before those of each access. Inner functions are traced again, and capture what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import UnsupportedError, plugins
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import Region, Visitor, with_jaxprs
from pallasite_std.passes.tables import computed, is_table

# Primitives that keep the transforms of a reference in a parameter `tree` of their own:
# how many operands come before the leaves of the transforms.
_LEADING_OPERANDS = {_jax.get_p: 1, _jax.swap_p: 2, _jax.addupdate_p: 2}


def is_view(value: Any) -> bool:
    """Whether ``value`` is a view of a reference rather than a value of a jaxpr."""
    return isinstance(value, _jax.TransformedRef)


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    *,
    program_id: Callable[[int], Any] | None = None,
    axis_index: Mapping[Any, Any] | None = None,
    get_global: Callable[[Any], Any] | None = None,
    purpose: str = "rewriting",
) -> list[Any]:
    """Evaluates ``jaxpr`` in the current trace.

    Args:
      jaxpr: a kernel body, or part of one.
      args: values for its inputs; views stand for references.
      program_id: what ``pl.program_id(axis)`` gives; as it is, if None.
      axis_index: what ``lax.axis_index`` gives for some axes; as it is for the others.
      get_global: what ``pl.get_global`` gives for a type; as it is, if None.
      purpose: what this is done for, for the error message when a primitive cannot take a view.

    Raises:
      UnsupportedError: a view reaches a primitive that does not say how its references are bound.
    """
    return _Evaluator(program_id, axis_index or {}, get_global, purpose).run(jaxpr, args)


class _Evaluator(Visitor[Any]):
    """Values are those of the current trace, and views of references."""

    def __init__(
        self,
        program_id: Callable[[int], Any] | None,
        axis_index: Mapping[Any, Any],
        get_global: Callable[[Any], Any] | None,
        purpose: str,
    ):
        super().__init__(plugins.registry().jaxprs)
        self.program_id = program_id
        self.axis_index = axis_index
        self.get_global = get_global
        self.purpose = purpose

    def literal(self, atom: Any) -> Any:
        return atom.val

    def constant(self, variable: Any, value: Any) -> Any:
        return computed(np.asarray(value)) if is_table(value) else value

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        with _jax.location_of_equation(equation):
            return super().equation(equation, operands)

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        primitive, params = equation.primitive, dict(equation.params)
        if primitive is _jax.program_id_p and self.program_id is not None:
            return [self.program_id(params["axis"])]
        if primitive is _jax.axis_index_p and params["axis_name"] in self.axis_index:
            return [self.axis_index[params["axis_name"]]]
        if primitive is _jax.get_global_p and self.get_global is not None:
            return [self.get_global(params["what"])]
        if any(is_view(operand) for operand in operands):
            operands, params = self.on_views(equation, operands, params)
        return _bind(primitive, operands, params)

    def structured(
        self, equation: Any, regions: Sequence[Region], operands: list[Any]
    ) -> Sequence[Any] | None:
        if not regions:
            return self.primitive(equation, operands)
        entry = self.table.entry(equation.primitive)
        assert entry is not None
        functions = [self.function(region) for region in regions]
        if entry.rebind is not None:
            return entry.rebind(equation, operands, functions)
        if all(region.is_plain_call for region in regions):
            return super().structured(equation, regions, operands)
        return self.with_the_same_operands(equation, regions, operands, functions)

    def function(self, region: Region) -> Callable[..., list[Any]]:
        """A region as a function of the current trace."""
        return lambda *inputs: self.run(region.jaxpr, inputs)

    def with_the_same_operands(
        self,
        equation: Any,
        regions: Sequence[Region],
        operands: list[Any],
        functions: Sequence[Callable[..., list[Any]]],
    ) -> Sequence[Any]:
        """Binds a primitive anew, of which is not known how it is bound with other operands."""
        new = []
        for region, function in zip(regions, functions, strict=True):
            avals = [variable.aval for variable in region.inputs]
            new.append(_jax.trace_to_jaxpr(function, avals)[0])
        if any(map(is_view, operands)) or any(jaxpr.consts for jaxpr in new):
            raise UnsupportedError(
                f"{self.purpose} does not work with {equation.primitive}",
                expected="a primitive whose JaxprPrimitive says how to rebind it",
                location=_jax.user_location(equation.source_info),
            )
        params = with_jaxprs(self.table, equation, regions, new)
        return _bind(equation.primitive, operands, params)

    def on_views(
        self, equation: Any, operands: list[Any], params: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Operands and parameters in which the transforms of views are part of the arguments."""
        leading = _LEADING_OPERANDS.get(equation.primitive)
        if leading is not None and not any(is_view(operand) for operand in operands[1:]):
            view = operands[0]
            transforms = params["tree"].unflatten(operands[leading:])
            leaves, params["tree"] = jax.tree.flatten((*view.transforms, *transforms))
            return [view.ref, *operands[1:leading], *leaves], params
        if "args_tree" in params:
            opaque = [_PlainView(value) if is_view(value) else value for value in operands]
            arguments = params["args_tree"].unflatten(opaque)
            leaves, params["args_tree"] = _jax.flatten_with_references(_merge_views(arguments))
            return leaves, params
        raise UnsupportedError(
            f"{self.purpose} does not work with {equation.primitive} on a reference",
            location=_jax.user_location(equation.source_info),
            hint="bind the primitive's arguments as `args_tree`, as those of the core are",
        )


def _merge_views(arguments: Any) -> Any:
    """Merges views into an argument tuple. There, a reference is either a TransformedRef, whose
    ``ref`` may now be a view, or (in primitives of Pallas) a plain reference before the tuple of
    its transforms; that one may now be a view itself."""
    result: list[Any] = []
    pending: tuple[Any, ...] | None = None
    for argument in arguments:
        if pending is not None:
            result.append((*pending, *(argument or ())))
            pending = None
        elif isinstance(argument, _PlainView):
            result.append(argument.view.ref)
            pending = argument.view.transforms
        elif is_view(argument) and isinstance(argument.ref, _PlainView):
            view = argument.ref.view
            transforms = (*view.transforms, *argument.transforms)
            result.append(_jax.TransformedRef(view.ref, transforms))
        else:
            result.append(argument)
    return type(arguments)(result)


class _PlainView:
    """A view as an opaque leaf, while it stands where a jaxpr has a plain reference."""

    def __init__(self, view: Any):
        self.view = view


def _bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]
