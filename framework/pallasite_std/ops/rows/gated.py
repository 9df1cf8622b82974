"""``gated_activation`` (SwiGLU and its relatives): the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite_std.ops.activations import captured_values
from pallasite_std.ops.arguments import in_32_bits, matched, with_derivatives_of, zeros
from pallasite_std.ops.rows.arguments import float_array, machine, same_type
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.elementwise import elementwise_kernel, flattened, tile_elements
from pallasite_std.ops.rows.kernel import Chunk, Rows, parameters
from pallasite_std.ops.rows.turned import Turned, turned_elementwise_kernel
from pallasite_std.ops.rows.turned_operands import (
    TurnedOperands,
    as_given,
    in_rows,
    turned_operands,
    with_rows_where_mapped,
)

type Activation = Callable[[jax.Array], jax.Array]


@in_32_bits
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``: :func:`gated_activation` with ``jax.nn.silu``."""
    return gated_activation(gate, up, jax.nn.silu)


@in_32_bits
def gated_activation(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """``activation(gate) * up``, element by element, in one kernel for it and one for gradients.

    Args:
      gate, up: (..., columns), of the same type: bfloat16, float16 or float32; it is computed in
        float32.
      activation: a function of float32 arrays that is applied to each element, such as
        ``jax.nn.silu``; the same function object for each call. If it captures values that JAX
        traces, XLA computes all of it.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together, an activation that
        does not work element by element.

    Source: N. Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    captured = captured_values(activation)
    gate = float_array(gate, "gate")
    up = same_type(up, gate, "up", "gate")
    gate, up = matched(gate, up)
    if gate.size == 0:
        return zeros(gate.shape, np.dtype(gate.dtype), gate)
    if captured:  # Operands of operations of JAX, whose transformations see them.
        composed: jax.Array = _reference(activation, gate, up)
        return composed
    result: jax.Array | None = _run_if_turned(activation, gate, up)
    return _gated(activation, gate, up) if result is None else result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    run = over_leading_axes(
        functools.partial(_run, activation), 2, functools.partial(_run_if_turned, activation)
    )
    result: jax.Array = run(gate, up)
    return result


def _run(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    operands = flattened(gate, up, elements=tile_elements(gate.size, gate.dtype))
    kernel = _kernel(activation, False, *operands[0].shape, np.dtype(gate.dtype))
    return jnp.reshape(kernel(*operands)[0], gate.shape)


def _forward(activation: Activation, gate: Any, up: Any) -> tuple[Any, Any]:
    result = _run_if_turned(activation, gate, up)
    found = turned_operands(gate, up)
    saved = found if found is not None and all(found.problem.across) else (gate, up)
    return _gated(activation, gate, up) if result is None else result, saved


def _backward(activation: Activation, saved: Any, d_out: Any) -> tuple[Any, Any]:
    if isinstance(saved, TurnedOperands):
        results = _turned_gradients(activation, saved.problem, saved.given, d_out)
        d_gate, d_up = saved.in_program(results)
    else:
        d_gate, d_up = _gradients_of(activation)(*saved, d_out)
    return d_gate, d_up


def _gradients_of(activation: Activation) -> Callable[..., Any]:
    """A function of gate, up and the cotangent."""

    def gradients(gate: Any, up: Any, d_out: Any) -> tuple[Any, Any]:
        elements = tile_elements(gate.size, gate.dtype)
        operands = flattened(gate, up, d_out, elements=elements)
        kernel = _kernel(activation, True, *operands[0].shape, np.dtype(gate.dtype))
        d_gate, d_up = kernel(*operands)
        return d_gate.reshape(gate.shape), d_up.reshape(gate.shape)

    return with_derivatives_of(_reference_gradients(activation), over_leading_axes(gradients, 3))


def _reference(activation: Activation, gate: Any, up: Any) -> Any:
    return (activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _reference_gradients(activation: Activation) -> Callable[..., tuple[Any, Any]]:
    def reference(gate: Any, up: Any, d_out: Any) -> tuple[Any, Any]:
        d_gate, d_up = jax.vjp(functools.partial(_reference, activation), gate, up)[1](d_out)
        return d_gate, d_up

    return reference


_gated.defvjp(in_32_bits(_forward), in_32_bits(_backward))


# Operands that lie across their rows --------------------------------------------------------------


def _run_if_turned(activation: Activation, gate: Any, up: Any) -> Any:
    found = turned_operands(gate, up)
    if found is None:
        return None
    return _of_turned(activation, found.problem, *found.given).reshape(found.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_turned(activation: Activation, problem: Turned, gate: Any, up: Any) -> Any:
    def run(gate: Any, up: Any) -> Any:
        kernel = _turned_kernel(activation, False, problem, np.dtype(gate.dtype), *machine())
        if kernel is not None:
            return kernel(gate, up)[0]
        # XLA reads what it has to transpose as it lies.
        return _reference(activation, *in_rows(problem, (gate, up)))

    def run_rows(*given: Any) -> Any:
        return _run(activation, *in_rows(problem, given))

    return with_rows_where_mapped(run, run_rows)(gate, up)


def _turned_forward(activation: Activation, problem: Turned, *given: Any) -> tuple[Any, Any]:
    return _of_turned(activation, problem, *given), given


def _turned_backward(
    activation: Activation, problem: Turned, given: Any, d_out: Any
) -> tuple[Any, Any]:
    if all(problem.across):
        d_gate, d_up = _turned_gradients(activation, problem, given, d_out)
    else:
        results = _gradients_of(activation)(*in_rows(problem, given), d_out)
        d_gate, d_up = as_given(problem, results)
    return d_gate, d_up


_of_turned.defvjp(in_32_bits(_turned_forward), in_32_bits(_turned_backward))


def _turned_gradients(
    activation: Activation, problem: Turned, given: Sequence[Any], d_out: Any
) -> Any:
    """Gradients by both operands, which lie across, as they lie; across which the cotangent is."""
    other = Turned(problem.batch, problem.columns, problem.rows, (False, False, True))
    lying = turned_operands(d_out)
    shape = (problem.batch, problem.rows, problem.columns)
    if lying is not None:
        there = lying.problem
        if (there.batch, there.rows, there.columns) == shape:
            return _gradients_of(activation)(*given, *lying.given)
    kernel = _turned_kernel(activation, True, other, np.dtype(d_out.dtype), *machine())

    def turned_back(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gate, up, d_out: function(gate, up, jnp.swapaxes(d_out, 1, 2))

    plain, reference = (
        turned_back(one(activation)) for one in (_gradients_of, _reference_gradients)
    )

    def run(gate: Any, up: Any, d_out: Any) -> Any:
        if kernel is None:
            return reference(gate, up, d_out)
        results = kernel(*(one.reshape(-1, problem.rows) for one in (gate, up)), d_out)
        return tuple(one.reshape(gate.shape) for one in results)

    compute = with_derivatives_of(reference, with_rows_where_mapped(run, plain))
    return compute(*given, d_out.reshape(shape))


@functools.lru_cache(maxsize=512)
def _turned_kernel(
    activation: Activation,
    gradient: bool,
    problem: Turned,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., Any] | None:
    shape = (problem.batch * problem.rows, problem.columns)
    out_types = [jax.ShapeDtypeStruct(shape, dtype)] * (2 if gradient else 1)
    work = functools.partial(_compute, activation, gradient)
    dtypes = [dtype] * len(problem.across)
    given = work, problem, dtypes, out_types, _name(gradient), multiprocessors, shared_memory
    return turned_elementwise_kernel(*given, parameters(dtype))


def _name(gradient: bool) -> str:
    return "gated_activation_gradient" if gradient else "gated_activation"


def _compute(
    activation: Activation,
    gradient: bool,
    block: Rows,
    chunk: Chunk,
    gate: Any,
    up: Any,
    *refs: Any,
) -> None:
    """What kernels do with a chunk."""
    if gradient:
        d_out, d_gate, d_up = refs
        cotangent = chunk.load(d_out)
        value, slope = jax.jvp(activation, (chunk.load(gate),), (jnp.ones(chunk.shape),))
        chunk.store(d_gate, cotangent * chunk.load(up) * slope)
        chunk.store(d_up, cotangent * value)
    else:
        chunk.store(refs[0], activation(chunk.load(gate)) * chunk.load(up))


@functools.lru_cache(maxsize=512)
def _kernel(
    activation: Activation, gradient: bool, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    work = functools.partial(_compute, activation, gradient)
    out_types = [jax.ShapeDtypeStruct((rows, columns), dtype)] * (2 if gradient else 1)
    return elementwise_kernel(
        work, rows, columns, out_types, _name(gradient), parameters(dtype),
        elements=tile_elements(rows * columns, dtype),
    )  # fmt: skip
