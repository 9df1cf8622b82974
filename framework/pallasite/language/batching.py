"""Adds a grid axis to a traced kernel: what ``jax.vmap`` of a kernel means.

The body stays as it is, except that every access to a batched operand first selects the entry of
the new grid axis, and that ``pl.program_id`` counts one axis further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from pallasite import _jax
from pallasite.errors import UnsupportedError


class BatchAxis:
    """The name of a grid axis that ``jax.vmap`` added; each is different."""

    def __repr__(self) -> str:
        return "vmap"


class _Batched:
    """A reference with a leading batch dimension that the code being rewritten does not see."""

    def __init__(self, value: Any, rewriter: _Rewriter):
        self.value = value
        self.rewriter = rewriter

    @property
    def entry(self) -> Any:
        """The transform that selects this program's entry."""
        shape = _jax.typeof(self.value).shape
        index = (lax.axis_index(self.rewriter.axis), *(slice(None) for _ in shape[1:]))
        return _jax.NDIndexer.from_indices_shape(index, shape)


# Primitives that keep the transforms of a reference in a parameter `tree` of their own:
# how many operands come before the leaves of the transforms.
_LEADING_OPERANDS = {_jax.get_p: 1, _jax.swap_p: 2, _jax.addupdate_p: 2}

# Calls that are evaluated in place, and the parameter that holds the jaxpr.
_INLINED = {
    _jax.jit_p: "jaxpr",
    _jax.closed_call_p: "call_jaxpr",
    _jax.eval_jaxpr_p: "call_jaxpr",
    _jax.remat_p: "jaxpr",
    _jax.custom_jvp_call_p: "call_jaxpr",
    _jax.custom_vjp_call_p: "call_jaxpr",
}


class _Rewriter:
    def __init__(self, axis: BatchAxis, size: int):
        self.axis = axis
        self.size = size

    def aval(self, aval: Any, batched: bool) -> Any:
        if not batched:
            return aval
        return aval.update(inner_aval=aval.inner_aval.update(shape=(self.size, *aval.shape)))

    def rewrite(self, jaxpr: Any, batched: Sequence[bool]) -> Any:
        """The jaxpr with a leading dimension on those inputs that are batched."""

        def body(*args: Any) -> list[Any]:
            values = [_Batched(a, self) if b else a for a, b in zip(args, batched, strict=True)]
            return self.evaluate(jaxpr, jaxpr.consts, values)

        avals = [self.aval(v.aval, b) for v, b in zip(jaxpr.invars, batched, strict=True)]
        info = jaxpr.debug_info
        new, _ = _jax.trace_to_jaxpr(
            body, avals, debug_info=_jax.make_debug_info("vmap of a kernel", body, avals)
        )
        return new.replace(debug_info=new.debug_info.replace_func_name(info.func_name))

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr in the current trace; references may be :class:`_Batched`."""
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
        if primitive in _INLINED:
            jaxpr = params[_INLINED[primitive]]
            return self.evaluate(jaxpr, jaxpr.consts, operands)
        if (rule := _STRUCTURED.get(primitive)) is not None:
            return rule(self, primitive, params, operands)
        if primitive is _jax.program_id_p:
            params["axis"] += 1
        if any(isinstance(operand, _Batched) for operand in operands):
            operands, params = self.select_entries(equation, operands, params)
        return _bind(primitive, operands, params)

    def select_entries(
        self, equation: Any, operands: list[Any], params: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Operands and parameters in which batched references are views of their entries."""
        primitive = equation.primitive
        if (leading := _LEADING_OPERANDS.get(primitive)) is not None:
            transforms = params["tree"].unflatten(operands[leading:])
            if isinstance(operands[0], _Batched):
                transforms = (operands[0].entry, *transforms)
            leaves, params["tree"] = jax.tree.flatten(transforms)
            return [_base(operand) for operand in operands[:leading]] + leaves, params
        if "args_tree" in params:
            arguments = params["args_tree"].unflatten(operands)
            selected = _select_in_arguments(arguments)
            leaves, params["args_tree"] = _jax.flatten_with_references(selected)
            return leaves, params
        raise UnsupportedError(
            f"jax.vmap cannot add an axis to a kernel that uses {primitive} on an operand",
            location=_jax.user_location(equation.source_info),
            hint="write the batch axis into the grid of the kernel",
        )


def _base(value: Any) -> Any:
    return value.value if isinstance(value, _Batched) else value


def _select_in_arguments(arguments: Any) -> Any:
    """Puts entry selections into an argument tuple, where a reference is a TransformedRef or is
    followed by the tuple of its transforms."""
    result: list[Any] = []
    pending: _Batched | None = None
    for argument in arguments:
        if pending is not None:
            result.append((pending.entry, *(argument or ())))
            pending = None
        elif isinstance(argument, _Batched):
            result.append(argument.value)
            pending = argument
        elif isinstance(argument, _jax.TransformedRef) and isinstance(argument.ref, _Batched):
            transforms = (argument.ref.entry, *argument.transforms)
            result.append(_jax.TransformedRef(argument.ref.value, transforms))
        else:
            result.append(argument)
    return type(arguments)(result)


def _bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def _mask(operands: Sequence[Any]) -> list[bool]:
    return [isinstance(operand, _Batched) for operand in operands]


def _cond(r: _Rewriter, primitive: Any, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    mask = _mask(operands[1:])
    params["branches"] = tuple(r.rewrite(branch, mask) for branch in params["branches"])
    return _bind(primitive, [_base(operand) for operand in operands], params)


def _one_jaxpr(
    r: _Rewriter, primitive: Any, params: dict[str, Any], operands: list[Any]
) -> list[Any]:
    params["jaxpr"] = r.rewrite(params["jaxpr"], _mask(operands))
    return _bind(primitive, [_base(operand) for operand in operands], params)


def _while(r: _Rewriter, primitive: Any, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
    mask = _mask(operands)
    carried = mask[conditions + bodies :]
    params["cond_jaxpr"] = r.rewrite(params["cond_jaxpr"], mask[:conditions] + carried)
    params["body_jaxpr"] = r.rewrite(
        params["body_jaxpr"], mask[conditions : conditions + bodies] + carried
    )
    return _bind(primitive, [_base(operand) for operand in operands], params)


def _run_scoped(
    r: _Rewriter, primitive: Any, params: dict[str, Any], operands: list[Any]
) -> list[Any]:
    jaxpr = params["jaxpr"]

    def body(*scoped: Any) -> list[Any]:
        return r.evaluate(jaxpr, operands, scoped)

    new, _ = _jax.trace_to_jaxpr(body, [v.aval for v in jaxpr.invars], traced_for="run_scoped")
    params["jaxpr"] = new
    return _bind(primitive, new.consts, params)


def _mpmd_map(
    r: _Rewriter, primitive: Any, params: dict[str, Any], operands: list[Any]
) -> list[Any]:
    jaxprs = []
    for mesh, jaxpr in zip(params["meshes"], params["jaxprs"], strict=True):
        rest = len(jaxpr.invars) - len(operands)
        with mesh.tracing_context(), _jax.extend_axis_env(list(mesh.shape.items())):
            jaxprs.append(r.rewrite(jaxpr, [*_mask(operands), *[False] * rest]))
    params["jaxprs"] = tuple(jaxprs)
    return _bind(primitive, [_base(operand) for operand in operands], params)


_Rule = Callable[[_Rewriter, Any, dict[str, Any], list[Any]], list[Any]]
_STRUCTURED: dict[Any, _Rule] = {
    _jax.cond_p: _cond,
    _jax.scan_p: _one_jaxpr,
    _jax.while_p: _while,
    _jax.run_scoped_p: _run_scoped,
    _jax.run_state_p: _one_jaxpr,
    _jax.mpmd_map_p: _mpmd_map,
}


def prepend_axis(jaxpr: Any, batched: Sequence[bool], axis: BatchAxis, size: int) -> Any:
    """The body of a kernel with a new first grid axis.

    Args:
      jaxpr: the body; its inputs are references and it has no outputs.
      batched: which inputs get a leading dimension of ``size``.
      axis: the name of the new axis; the caller makes it known to the tracing environment.
      size: its size.
    """
    return _Rewriter(axis, size).rewrite(jaxpr, batched)
