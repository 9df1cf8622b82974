"""What the tests of the warp-specialised pipeline share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import gpu as plgpu

BLOCK = (16, 32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_threads(num_compute_wgs, out_shape, body, **kwargs):
    """A kernel with so many consumer warpgroups and a producer warpgroup; float32 outputs."""
    shapes = out_shape if isinstance(out_shape, list) else [out_shape]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return plgpu.kernel(
        body,
        out_type=types if isinstance(out_shape, list) else types[0],
        num_threads=num_compute_wgs + 1,
        thread_name="wg",
        **kwargs,
    )


def pipeline(body, num_compute_wgs=1, **kwargs):
    """``emit_pipeline_warp_specialized`` with the names of :func:`on_threads`."""
    defaults = dict(memory_registers=40, wg_axis="wg", num_compute_wgs=num_compute_wgs)
    return plgpu.emit_pipeline_warp_specialized(body, **(defaults | kwargs))
