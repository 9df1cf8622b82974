"""The rates that the machine reaches, of which results are shares."""

from __future__ import annotations

from typing import Any

import harness
import jax
import jax.numpy as jnp
import operands
import timing


def copy(timer: timing.Timer, rehearse: bool) -> dict[str, Any]:
    """The bandwidth of a copy in bytes per second, and how it was measured."""
    if operands.torch_is_there() and not rehearse:
        bandwidth, how = harness.copy_bandwidth(2**30)
        return {"bandwidth": bandwidth, "bandwidth_by": how}
    elements = 2**20 if rehearse else 2**28
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    seconds = _seconds(timer, lambda x: x + 1, x)
    return {"bandwidth": 8 * elements / seconds, "bandwidth_by": "x + 1"}


def product(timer: timing.Timer, rehearse: bool) -> dict[str, Any]:
    """The rate of a large product by XLA in floating-point operations per second."""
    m, n, k = (128, 128, 64) if rehearse else (8192, 8192, 16384)
    a = operands.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    b = operands.normal(jax.random.key(1), (k, n), jnp.bfloat16)
    seconds = _seconds(timer, lambda a, b: jnp.dot(a, b, preferred_element_type=a.dtype), a, b)
    return {"matrix_rate": 2 * m * n * k / seconds}


def _seconds(timer: timing.Timer, function: Any, *args: jax.Array) -> float:
    framework, call = timing.FRAMEWORKS["jax"], jax.jit(function)
    framework.wait(call(*args))
    times = sorted(timer.batch(framework, call, [args], 8).kernels)
    return times[len(times) // 2] * 1e-3
