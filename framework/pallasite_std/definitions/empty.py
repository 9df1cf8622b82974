"""What is made of arrays without elements: these exist while a kernel is traced only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import jax_internals as _jax
from pallasite_std.definitions.record import Definition


def is_empty(value: Any) -> bool:
    """Whether a variable or a value has no elements."""
    aval = getattr(value, "aval", value)
    return not isinstance(aval, _jax.AbstractRef) and 0 in getattr(aval, "shape", ())


def _some(equation: Any) -> bool:
    """Whether there are such arrays among operands and results, and no references."""
    atoms = (*equation.invars, *equation.outvars)
    return any(map(is_empty, atoms)) and not any(
        isinstance(one.aval, _jax.AbstractRef) for one in atoms
    )


def _inlined(name: str) -> Definition:
    """A call, whose jaxpr takes the place of the equation."""

    def run(*operands: Any, **params: Any) -> Sequence[Any]:
        given = [jnp.zeros(x.shape, x.dtype) if is_empty(x) else x for x in operands]
        return list(_jax.jaxpr_as_function(params[name])(*given))

    return Definition(run, _some)


def _reduction(neutral: Callable[[np.dtype[Any]], Any]) -> Definition:
    def run(x: Any, *, axes: Sequence[int], **params: Any) -> list[Any]:
        shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
        return [jnp.full(shape, neutral(np.dtype(x.dtype)), x.dtype)]

    return Definition(run, lambda equation: is_empty(equation.invars[0]))


def _limit(sign: int) -> Callable[[np.dtype[Any]], Any]:
    def limit(dtype: np.dtype[Any]) -> Any:
        if dtype == np.bool_:
            return sign > 0
        if jnp.issubdtype(dtype, jnp.floating):
            return sign * math.inf
        return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min

    return limit


_UNCHANGED = {  # By primitive: which operand says what is changed.
    primitives.dynamic_update_slice_p: 1,
    primitives.scatter_p: 2,
    primitives.scatter_add_p: 2,
    primitives.scatter_mul_p: 2,
    primitives.scatter_min_p: 2,
    primitives.scatter_max_p: 2,
    lax.scatter_sub_p: 2,
}


def _unchanged(position: int) -> Definition:
    return Definition(
        lambda x, *operands, **params: [x], lambda equation: is_empty(equation.invars[position])
    )


DEFINITIONS = {
    _jax.jit_p: _inlined("jaxpr"),
    _jax.custom_jvp_call_p: _inlined("call_jaxpr"),
    primitives.closed_call_p: _inlined("call_jaxpr"),
    primitives.reduce_sum_p: _reduction(lambda dtype: 0),
    primitives.reduce_prod_p: _reduction(lambda dtype: 1),
    primitives.reduce_max_p: _reduction(_limit(-1)),
    primitives.reduce_min_p: _reduction(_limit(1)),
    primitives.reduce_and_p: _reduction(lambda dtype: True if dtype == np.bool_ else -1),
    primitives.reduce_or_p: _reduction(lambda dtype: 0),
    primitives.reduce_xor_p: _reduction(lambda dtype: 0),
    **{primitive: _unchanged(position) for primitive, position in _UNCHANGED.items()},
}
