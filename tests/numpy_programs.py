"""Small programs of JAX on the CPU, inputs and references of tests, are evaluated by NumPy.

XLA takes 20 ms or more to compile a program of one operation for one shape, as ``jnp`` runs where
nothing is traced, and most such programs of tests run once. Here each equation is a call of NumPy.
Programs that have anything else go to XLA: kernels, loops, callbacks, conversions to small floats,
operands on several devices.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array, config, core, custom_derivatives, literals, pjit
from jax._src.random.prng import PRNGKeyArray
from jax._src.sharding_impls import UnspecifiedValue
from tests.numpy_random import OF_KEYS, is_key
from tests.numpy_rules import ROUNDED, RULES, Function, Unsupported

_KNOWN = ROUNDED | {
    *map(np.dtype, ("bool", "float32", "float64", "int8", "int16", "int32", "int64")),
    *map(np.dtype, ("uint8", "uint16", "uint32", "uint64")),
}
_MOST_EQUATIONS = 1000
_MOST_ELEMENTS = 1 << 24  # of the results of all equations; XLA takes less time for more
_OPTIONS = {"xla_allow_excess_precision", "xla_backend_optimization_level"}
"""Options of XLA with whatever value of which programs mean what is computed here."""
_OPERANDS = (np.ndarray, np.generic, bool, int, float, literals.TypedNdArray)


def install() -> None:
    """Evaluates programs in this process, where nothing is traced."""
    pjit._pjit_call_impl_python = _evaluate_or(pjit._pjit_call_impl_python)


def _evaluate_or(otherwise: Function) -> Function:
    def run(*operands: Any, jaxpr: Any, **params: Any) -> Any:
        program = _program(jaxpr) if _is_plain(operands, jaxpr, params) else None
        if program is None:
            return otherwise(*operands, jaxpr=jaxpr, **params)
        return program(operands), None, None, []

    return run


def _is_plain(operands: Sequence[Any], jaxpr: Any, params: dict[str, Any]) -> bool:
    """Whether operands and results are on no device in particular, and nothing is watched."""
    return (
        all(isinstance(one, _OPERANDS) or _is_anywhere(one) for one in operands)
        and all(isinstance(one, UnspecifiedValue) for one in params["in_shardings"])
        and all(isinstance(one, UnspecifiedValue) for one in params["out_shardings"])
        and not any(params["donated_invars"])
        and not any(layout is not None for layout in params["in_layouts"])
        and not any(layout is not None for layout in params["out_layouts"])
        and all(name in _OPTIONS for name, _ in params["compiler_options_kvs"])
        and not jaxpr.effects
        and params["ctx_mesh"].empty
        and jax.config.jax_default_device in (None, jax.devices()[0])
        and not (config.debug_nans.value or config.debug_infs.value)
        and jax.default_backend() == "cpu"
    )


def _is_anywhere(operand: Any) -> bool:
    words = operand._base_array if isinstance(operand, PRNGKeyArray) else operand
    return type(words) is array.ArrayImpl and not words._committed and not words.is_deleted()


_programs: weakref.WeakKeyDictionary[Any, Function | None] = weakref.WeakKeyDictionary()


def _program(jaxpr: Any) -> Function | None:
    """What evaluates a program and returns arrays of JAX; None where XLA has to."""
    if jaxpr in _programs:
        return _programs[jaxpr]
    try:
        if any(is_key(one.aval) for one in jaxpr.outvars):
            raise Unsupported
        run, types = (
            _function(jaxpr, [_MOST_EQUATIONS, _MOST_ELEMENTS]),
            [one.aval for one in jaxpr.outvars],
        )
        consts, inputs = list(map(np.asarray, jaxpr.consts)), [one.aval for one in jaxpr.invars]
    except Unsupported:
        _programs[jaxpr] = None
        return None

    def program(operands: Sequence[Any]) -> list[Any]:
        values = [_to_numpy(one, aval) for one, aval in zip(operands, inputs, strict=True)]
        with np.errstate(all="ignore"):
            results = run(*consts, *values)
        return [_to_jax(one, aval, values) for one, aval in zip(results, types, strict=True)]

    _programs[jaxpr] = program
    return program


def _to_numpy(operand: Any, aval: Any) -> Any:
    if isinstance(operand, PRNGKeyArray):
        return np.asarray(operand._base_array)
    return np.asarray(operand).astype(aval.dtype, copy=False)


def _to_jax(value: Any, aval: Any, operands: Sequence[Any]) -> Any:
    value = np.asarray(value)
    assert value.shape == aval.shape, (value.shape, aval)
    # JAX may use the memory of what it is given: that of nothing else.
    mine = value.base is None and not any(value is one for one in operands)
    value = np.array(value, aval.dtype, order="C", copy=None if mine else True)
    result = jax.device_put(value)
    if not aval.weak_type:
        return result
    return array.ArrayImpl(aval, result.sharding, result._arrays, False, _skip_checks=True)


def _function(jaxpr: Any, left: list[int]) -> Function:
    """A function of the constants and inputs of a jaxpr, for as many equations and elements of
    their results as are left."""
    places: dict[Any, int] = {}
    fixed: list[Any] = []

    def place(atom: Any) -> int:
        _check_type(atom.aval)
        if isinstance(atom, core.Literal):
            fixed.append(np.asarray(atom.val, atom.aval.dtype))
            return -len(fixed)
        return places[atom]

    for one in jaxpr.all_invars:
        _check_type(one.aval)
        places[one] = len(places)
    steps = []
    for equation in jaxpr.eqns:
        left[0] -= 1
        left[1] -= sum(math.prod(one.aval.shape) for one in equation.outvars)
        if min(left) < 0 or equation.effects:
            raise Unsupported
        function = _of_equation(equation, left)
        sources = [place(one) for one in equation.invars]
        for one in equation.outvars:
            _check_type(one.aval)
            places[one] = len(places)
        results = [places[one] for one in equation.outvars]
        steps.append((function, sources, results, equation.primitive.multiple_results))
    outputs = [place(one) for one in jaxpr.outvars]

    def run(*values: Any) -> list[Any]:
        # Literals are at the end, where negative indices count from.
        memory = [*values, *[None] * (len(places) - len(values)), *reversed(fixed)]
        for function, sources, results, several in steps:
            done = function(*[memory[one] for one in sources])
            if several:
                for where, one in zip(results, done, strict=True):
                    memory[where] = one
            else:
                memory[results[0]] = done
        return [memory[one] for one in outputs]

    return run


def _check_type(aval: Any) -> None:
    if is_key(aval):
        return
    if type(aval) is not core.ShapedArray or aval.dtype not in _KNOWN:
        raise Unsupported


_CALLS = {
    pjit.jit_p: "jaxpr",
    custom_derivatives.custom_jvp_call_p: "call_jaxpr",
    custom_derivatives.custom_vjp_call_p: "call_jaxpr",
}


def _of_equation(equation: Any, left: list[int]) -> Function:
    primitive, params = equation.primitive, equation.params
    if primitive in _CALLS:
        inner = params[_CALLS[primitive]]
        run, consts = _function(inner, left), list(map(np.asarray, inner.consts))
        return functools.partial(run, *consts)
    if primitive not in RULES:
        raise Unsupported
    operands, results = ([x.aval for x in xs] for xs in (equation.invars, equation.outvars))
    if primitive not in OF_KEYS and any(map(is_key, (*operands, *results))):
        raise Unsupported
    return RULES[primitive](params, operands, results)
