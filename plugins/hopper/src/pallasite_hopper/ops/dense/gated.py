"""``gated_matmul``: both products of a gated feed-forward layer in one kernel.

A tile of the accumulator has the same columns of both products side by side, so that what joins
them is in the registers of one lane.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense import run as products
from pallasite_hopper.ops.dense.api import matmul
from pallasite_hopper.ops.dense.candidates import with_most_stages
from pallasite_hopper.ops.dense.choice import default_config
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, Sizes, nanoseconds
from pallasite_hopper.ops.dense.kernel import Item, MatmulLoop, build
from pallasite_std.api import (
    Activation,
    Epilogue,
    MatmulProblem,
    aligned,
    gated_activation,
    gated_product,
    in_32_bits,
    padded_columns,
)

_TILES = ((128, 256, 2), (256, 128, 2), (64, 256, 1), (64, 128, 1))
"""Rows, columns of both products together, consumer warpgroups, which halve the rows. Halves of the
columns fill the swizzle."""

_LAUNCH = 1000.0
"""Nanoseconds that the kernel of the activation takes at least."""

_JOINING = 0.03
"""Share more that the kernel takes than a product by both weights, measured on an H200."""


@in_32_bits
def gated_matmul(
    a: jax.Array, gate: jax.Array, up: jax.Array, *, activation: Activation = jax.nn.silu
) -> jax.Array:
    """``activation(a @ gate) * (a @ up)``: the first half of a gated feed-forward layer (SwiGLU).

    Few rows, for which two products of the transposed kind take less time, are left to these.

    Args:
      a: (m, k), bfloat16 or float16.
      gate, up: (k, n), of the same dtype.
      activation: a function of float32 arrays that is applied to each element; the same function
        object for each call.

    Returns:
      (m, n), of the dtype of a.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    return _gated(a, gate, up, activation)


def _composition(activation: Activation, a: Any, gate: Any, up: Any) -> jax.Array:
    return gated_activation(matmul(a, gate), matmul(a, up), activation)


def _run(activation: Activation, a: Any, gate: Any, up: Any) -> jax.Array:
    (m, k), n = a.shape, gate.shape[1]
    config = fused_config(m, n, k)
    if config is None:
        return _composition(activation, a, gate, up)
    dtype = np.dtype(a.dtype)
    padded = padded_columns(n, dtype.itemsize)
    problem = MatmulProblem(
        m=m,
        n=padded,
        k=k,
        dtype_a=dtype,
        dtype_b=dtype,
        out_dtype=dtype,
        accumulator=np.dtype(np.float32),
        transpose_a=False,
        transpose_b=False,
    )
    kernel = _kernel(problem, config, activation)
    result: jax.Array = kernel(aligned(a), aligned(gate), aligned(up))
    return result if padded == n else result[:, :n]


_gated = gated_product(_run, _composition)


@functools.lru_cache(maxsize=1024)
def fused_config(m: int, n: int, k: int) -> MatmulConfig | None:
    """The configuration of the kernel, or None where two products take less time by the estimate.

    Its columns are those of both products.
    """
    both, each = Sizes(m, 2 * n, k, 2, 2), Sizes(m, n, k, 2, 2)
    candidates = [
        with_most_stages(
            MatmulConfig(
                tile_m=rows,
                tile_n=columns,
                stages=2,
                warpgroups=warpgroups,
                split="m",
                group=16 if k >= 4096 else 8,
                cluster=cluster,
            ),
            2,
            2,
        )
        for rows, columns, warpgroups in _TILES
        for cluster in (1, 2)
    ]
    best = min(candidates, key=lambda config: nanoseconds(config, both))
    activation = _LAUNCH + 3 * m * n * 2 / H200.memory
    separate = 2 * nanoseconds(default_config(each), each) + activation
    return best if nanoseconds(best, both) * (1 + _JOINING) <= separate else None


class GatedLoop(MatmulLoop):
    """The matmul's loop with two right operands, of which each has half of the columns."""

    copies = 3

    def __init__(
        self,
        problem: MatmulProblem,
        config: MatmulConfig,
        epilogue: Epilogue,
        activation: Activation,
    ):
        super().__init__(problem, config, epilogue)
        self.activation = activation
        self.up: Any = None

    @property
    def tile_columns(self) -> int:
        """Columns of the result of a tile."""
        return self.config.tile_n // 2

    def run(self, a: Any, b: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body; a, gate, up and the result."""
        self.up, *rest = refs
        super().run(a, b, *rest, **scratch)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        """Starts the copies of the same columns of both."""
        width = self.tile_columns
        window = (depth, pl.ds(item.n, width))
        for half, source in enumerate((b, self.up)):
            there = smem.at[:, pl.ds(half * width, width)]
            plgpu.copy_gmem_to_smem(source.at[window], there, full, collective_axes=share)

    def finish(
        self,
        warpgroup: Any,
        operands: Any,
        out: Any,
        out_smem: Any,
        residual_full: Any,
        item_part: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Joins both products of a warpgroup's part of a tile, and writes it."""
        half, width = self.tile_columns, self.config.epilogue_n
        buffers = self.config.epilogue_buffers
        uneven = half // width % buffers != 0
        for part in range(half // width):
            staging = out_smem.at[warpgroup, part % buffers]
            in_flight = 0 if uneven and part == 0 else buffers - 1
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            first = part * width
            gate = sums[:, first : first + width]
            up = sums[:, half + first : half + first + width]
            staging[...] = (self.activation(gate) * up).astype(out.dtype)
            plgpu.commit_smem()
            window = (pl.ds(m, self.config.warpgroup_m), pl.ds(n + first, width))
            plgpu.copy_smem_to_gmem(staging, out.at[window])


@functools.lru_cache(maxsize=256)
def _kernel(problem: MatmulProblem, config: MatmulConfig, activation: Activation) -> Any:
    epilogue = Epilogue()
    loop = GatedLoop(problem, config, epilogue, activation)
    steps = -(-loop.items // (products.MULTIPROCESSORS // config.cluster)) * loop.k_steps
    config = dataclasses.replace(config, stages=max(2, min(config.stages, steps)))
    loop = GatedLoop(problem, config, epilogue, activation)
    return build(problem, config, epilogue, products.MULTIPROCESSORS, loop, "gated_matmul")
