"""``gated_activation`` (SwiGLU and its relatives): the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite_std.ops.activations import check_activation
from pallasite_std.ops.arguments import in_32_bits, matched, with_derivatives_of, zeros
from pallasite_std.ops.rows.arguments import float_array, same_type
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.elementwise import elementwise_kernel, flattened, tile_elements
from pallasite_std.ops.rows.kernel import Chunk, Rows, parameters

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
        ``jax.nn.silu``; the same function object for each call.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together, an activation that
        does not work element by element.

    Source: N. Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    check_activation(activation)
    gate = float_array(gate, "gate")
    up = same_type(up, gate, "up", "gate")
    gate, up = matched(gate, up)
    if gate.size == 0:
        return zeros(gate.shape, np.dtype(gate.dtype), gate)
    result: jax.Array = _gated(activation, gate, up)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    result: jax.Array = over_leading_axes(functools.partial(_run, activation), 2)(gate, up)
    return result


def _run(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    operands = flattened(gate, up, elements=tile_elements(gate.size, gate.dtype))
    kernel = _kernel(activation, False, *operands[0].shape, np.dtype(gate.dtype))
    return jnp.reshape(kernel(*operands)[0], gate.shape)


def _forward(activation: Activation, gate: Any, up: Any) -> tuple[Any, Any]:
    return _gated(activation, gate, up), (gate, up)


def _backward(activation: Activation, saved: Any, d_out: Any) -> tuple[Any, Any]:
    def gradients(gate: Any, up: Any, d_out: Any) -> tuple[Any, Any]:
        elements = tile_elements(gate.size, gate.dtype)
        operands = flattened(gate, up, d_out, elements=elements)
        kernel = _kernel(activation, True, *operands[0].shape, np.dtype(gate.dtype))
        d_gate, d_up = kernel(*operands)
        return d_gate.reshape(gate.shape), d_up.reshape(gate.shape)

    def computed(gate: Any, up: Any) -> Any:
        return (activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    def reference(gate: Any, up: Any, d_out: Any) -> tuple[Any, Any]:
        d_gate, d_up = jax.vjp(computed, gate, up)[1](d_out)
        return d_gate, d_up

    gate, up = saved
    compute = with_derivatives_of(reference, over_leading_axes(gradients, 3))
    d_gate, d_up = compute(gate, up, d_out)
    return d_gate, d_up


_gated.defvjp(in_32_bits(_forward), in_32_bits(_backward))


@functools.lru_cache(maxsize=512)
def _kernel(
    activation: Activation, gradient: bool, rows: int, columns: int, dtype: np.dtype[Any]
) -> Callable[..., Any]:
    def work(block: Rows, chunk: Chunk, gate: Any, up: Any, *refs: Any) -> None:
        if gradient:
            d_out, d_gate, d_up = refs
            cotangent = chunk.load(d_out)
            value, slope = jax.jvp(activation, (chunk.load(gate),), (jnp.ones(chunk.shape),))
            chunk.store(d_gate, cotangent * chunk.load(up) * slope)
            chunk.store(d_up, cotangent * value)
        else:
            chunk.store(refs[0], activation(chunk.load(gate)) * chunk.load(up))

    out_types = [jax.ShapeDtypeStruct((rows, columns), dtype)] * (2 if gradient else 1)
    name = "gated_activation_gradient" if gradient else "gated_activation"
    return elementwise_kernel(
        work, rows, columns, out_types, name, parameters(dtype),
        elements=tile_elements(rows * columns, dtype),
    )  # fmt: skip
