"""Evaluates a traced kernel body on views of references, and with other program numbers.

A jaxpr can only be called on whole references. Here it is evaluated equation by equation, in the
current trace, on arguments that may be views (``TransformedRef``): the transforms of the view are
put before those of each access. Inner functions are traced again, and capture what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from pallasite import _jax
from pallasite.errors import UnsupportedError

# Primitives that keep the transforms of a reference in a parameter `tree` of their own:
# how many operands come before the leaves of the transforms.
_LEADING_OPERANDS = {_jax.get_p: 1, _jax.swap_p: 2, _jax.addupdate_p: 2}

# Calls that are evaluated in place, and the parameter that holds the jaxpr.
_INLINED = {
    _jax.jit_p: "jaxpr",
    _jax.call_p: "call_jaxpr",
    _jax.closed_call_p: "call_jaxpr",
    _jax.eval_jaxpr_p: "call_jaxpr",
    _jax.remat_p: "jaxpr",
    _jax.custom_jvp_call_p: "call_jaxpr",
    _jax.custom_vjp_call_p: "call_jaxpr",
    _jax.custom_vmap_p: "call",
}


def is_view(value: Any) -> bool:
    """Whether ``value`` is a view of a reference rather than a value of a jaxpr."""
    return isinstance(value, _jax.TransformedRef)


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    *,
    program_id: Callable[[int], Any] | None = None,
    axis_index: Mapping[Any, Any] | None = None,
    purpose: str = "rewriting",
) -> list[Any]:
    """Evaluates ``jaxpr`` in the current trace.

    Args:
      jaxpr: a kernel body, or part of one.
      args: values for its inputs; views stand for references.
      program_id: what ``pl.program_id(axis)`` gives; as it is, if None.
      axis_index: what ``lax.axis_index`` gives for some axes; as it is for the others.
      purpose: what this is done for, for the error message when a primitive cannot take a view.

    Raises:
      UnsupportedError: a view reaches a primitive that does not say how its references are bound.
    """
    return _Evaluator(program_id, axis_index or {}, purpose).evaluate(jaxpr, jaxpr.consts, args)


class _Initial:
    """A value for ``run_state``, with the type of the reference that it initialises."""

    def __init__(self, aval: Any, value: Any):
        self.aval = aval
        self.value = value


_jax.ref_type_aval_mappings[_Initial] = lambda initial: (initial.aval, initial.value)


class _Evaluator:
    def __init__(
        self,
        program_id: Callable[[int], Any] | None,
        axis_index: Mapping[Any, Any],
        purpose: str,
    ):
        self.program_id = program_id
        self.axis_index = axis_index
        self.purpose = purpose

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        environment: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else environment[atom]

        for var, value in zip(jaxpr.all_invars, [*consts, *args], strict=True):
            environment[var] = value
        for equation in jaxpr.eqns:
            with _jax.location_of_equation(equation):
                results = self.equation(equation, [read(v) for v in equation.invars])
            for var, value in zip(equation.outvars, results, strict=True):
                environment[var] = value
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        primitive, params = equation.primitive, dict(equation.params)
        if primitive is _jax.program_id_p and self.program_id is not None:
            return [self.program_id(params["axis"])]
        if primitive is _jax.axis_index_p and params["axis_name"] in self.axis_index:
            return [self.axis_index[params["axis_name"]]]
        if primitive in _INLINED:
            jaxpr = params[_INLINED[primitive]]
            return self.evaluate(jaxpr, jaxpr.consts, operands)
        if (rule := _STRUCTURED.get(primitive)) is not None:
            return rule(self, params, operands)
        if any(is_view(operand) for operand in operands):
            operands, params = self.on_views(equation, operands, params)
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
        return list(results) if primitive.multiple_results else [results]

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


def _cond(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    index, *args = operands

    def branch_function(branch: Any) -> Callable[[], list[Any]]:
        return lambda: e.evaluate(branch, branch.consts, args)

    branches = [branch_function(branch) for branch in params["branches"]]
    if len(branches) == 2:
        return list(lax.cond(lax.convert_element_type(index, bool), branches[1], branches[0]))
    return list(lax.switch(index, branches))


def _scan(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    num_consts, num_carry, _ = _jax.scan_operand_counts(params)
    consts = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    jaxpr = params["jaxpr"]

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = e.evaluate(jaxpr, jaxpr.consts, [*consts, *carry, *x])
        return results[:num_carry], results[num_carry:]

    carry, ys = lax.scan(
        body,
        carry,
        operands[num_consts + num_carry :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
    condition_consts = operands[:conditions]
    body_consts = operands[conditions : conditions + bodies]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    return list(
        lax.while_loop(
            lambda carry: e.evaluate(condition, condition.consts, [*condition_consts, *carry])[0],
            lambda carry: e.evaluate(body, body.consts, [*body_consts, *carry]),
            operands[conditions + bodies :],
        )
    )


def _run_scoped(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    jaxpr = params["jaxpr"]

    def body(*scoped: Any) -> list[Any]:
        return e.evaluate(jaxpr, operands, scoped)

    new, _ = _jax.trace_to_jaxpr(body, [v.aval for v in jaxpr.invars], traced_for="run_scoped")
    params["jaxpr"] = new
    return list(_jax.run_scoped_p.bind(*new.consts, **params))


def _run_state(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    jaxpr = params["jaxpr"]
    is_ref = [
        is_view(operand) or isinstance(_jax.typeof(operand), _jax.AbstractRef)
        for operand in operands
    ]
    initial = [
        _Initial(var.aval, operand)
        for var, operand, captured in zip(jaxpr.invars, operands, is_ref, strict=True)
        if not captured
    ]

    def body(refs: list[Any]) -> None:
        remaining = iter(refs)
        args = [
            operand if captured else next(remaining)
            for operand, captured in zip(operands, is_ref, strict=True)
        ]
        e.evaluate(jaxpr, jaxpr.consts, args)

    final = iter(_jax.run_state(body)(initial))
    return [
        operand if captured else next(final)
        for operand, captured in zip(operands, is_ref, strict=True)
    ]


def _mpmd_map(e: _Evaluator, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    if len(params["jaxprs"]) != 1 or len(params["jaxprs"][0].invars) != len(operands):
        raise UnsupportedError(f"{e.purpose} does not work with this use of mpmd_map")
    (mesh,), (jaxpr,) = params["meshes"], params["jaxprs"]

    def body() -> None:
        e.evaluate(jaxpr, jaxpr.consts, operands)

    _jax.mpmd_map([(mesh, body)], compiler_params=params["compiler_params"], name=params["name"])()
    return []


_Rule = Callable[[_Evaluator, dict[str, Any], list[Any]], list[Any]]
_STRUCTURED: dict[Any, _Rule] = {
    _jax.cond_p: _cond,
    _jax.scan_p: _scan,
    _jax.while_p: _while,
    _jax.run_scoped_p: _run_scoped,
    _jax.run_state_p: _run_state,
    _jax.mpmd_map_p: _mpmd_map,
}
