"""A kernel that is tuned: the number of warpgroups of a block, and the elements of each.

The function works with any configuration of a list. Which one, ``pallasite.choose`` says: a guess,
unless the user asks for measurements, with ``PALLASITE_AUTOTUNE=on``; they are kept on disk, for
``PALLASITE_AUTOTUNE=cached`` to use. It does not matter that the function is being traced.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import pallasite
from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """The tiling of the work."""

    warpgroups: int
    elements: int
    """Of a warpgroup."""


CONFIGS = tuple(
    Config(warpgroups, elements) for warpgroups in (1, 2, 4) for elements in (1024, 512, 2048)
)


def swish(x: jax.Array) -> jax.Array:
    """``x * sigmoid(x)`` for vectors whose length is a multiple of 8192."""
    config = pallasite.choose("examples.swish", VERSION, (x,), CONFIGS, CONFIGS[0], swish_with)
    return swish_with(config, x)


def swish_with(config: Config, x: jax.Array) -> jax.Array:
    """The same with a configuration."""

    def body(x_ref, out_ref):
        part = jax.lax.axis_index("block") * config.warpgroups + jax.lax.axis_index("warpgroup")
        window = pl.ds(part * config.elements, config.elements)
        v = x_ref[window].astype(jnp.float32)
        out_ref[window] = (v / (1 + jnp.exp(-v))).astype(out_ref.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // (config.warpgroups * config.elements),),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        kernel_name="swish",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        f"swish_tuned_{name}",
        swish,
        random_arrays(((2**15,), dtype)),
        lambda x: x / (1 + np.exp(-x)),
        tolerance,
    )
    for name, dtype, tolerance in (("f32", jnp.float32, 1e-6), ("bf16", jnp.bfloat16, 4e-3))
]
