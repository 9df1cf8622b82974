"""``gated_matmul``: both products of a gated feed-forward layer in one kernel.

A warpgroup's part of the accumulator has the same columns of both products side by side, or below
each other in the transposed GEMM, so that what joins them is in the registers of one lane.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense import run as products
from pallasite_hopper.ops.dense.api import matmul
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.gated_choice import fused_config
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


@in_32_bits
def gated_matmul(
    a: jax.Array, gate: jax.Array, up: jax.Array, *, activation: Activation = jax.nn.silu
) -> jax.Array:
    """``activation(a @ gate) * (a @ up)``: the first half of a gated feed-forward layer (SwiGLU).

    Where two GEMMs take less time by the estimate, they are used.

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
    config = fused_config(a.shape[0], gate.shape[1], a.shape[1])
    if config is None:
        return _composition(activation, a, gate, up)
    return run_fused(activation, config, a, gate, up)


def run_fused(
    activation: Activation, config: MatmulConfig, a: jax.Array, gate: jax.Array, up: jax.Array
) -> jax.Array:
    """The kernel with a configuration; for the others see :func:`gated_matmul`."""
    (m, k), n = a.shape, gate.shape[1]
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
    left, right = aligned(a), aligned(gate)
    if config.swap:
        problem, left, right = problem.swapped(), right, left
    result: jax.Array = _kernel(problem, config, activation)(left, right, aligned(up))
    return result if padded == n else result[:, :n]


_gated = gated_product(_run, _composition, matmul)


class GatedLoop(MatmulLoop):
    """The GEMM's loop with both weights in place of one.

    A warpgroup's part of the stages has columns of the first weight and then the same columns of
    the second one; so have its sums, in which these are rows with ``config.swap``.
    """

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
    def copies(self) -> int:
        """Those of both weights for each warpgroup's part, and that of the other operand."""
        whole = self.config.tile_m if self.config.swap else self.config.tile_n
        return 1 + 2 * (whole // self._joint)

    @property
    def _joint(self) -> int:
        """Columns of both weights in a warpgroup's part."""
        return self.config.warpgroup_m if self.config.swap else self.config.warpgroup_n

    @property
    def part_rows(self) -> int:
        """Half of those of the sums, if these are columns of the weights."""
        return self.config.warpgroup_m // (2 if self.config.swap else 1)

    @property
    def part_columns(self) -> int:
        """The same of columns."""
        return self.config.warpgroup_n // (1 if self.config.swap else 2)

    def run(self, a: Any, b: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body; a and gate in the order of the GEMM, up and the result."""
        self.up, *rest = refs
        super().run(a, b, *rest, **scratch)

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        """Starts the copies of both weights, if they are the left operand."""
        if self.config.swap:
            once = self.config.evict_first and self.n_tiles == 1
            self._fetch_both(a, window[0], item.m, smem, full, share, once)
        else:
            super().fetch_left(a, item, window, smem, full, share)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        """Starts the copies of both weights, if they are the right operand."""
        if self.config.swap:
            super().fetch_right(b, item, depth, smem, full, share)
        else:
            once = self.config.evict_first and self.m_tiles == 1
            self._fetch_both(b, depth, item.n, smem, full, share, once)

    def _fetch_both(
        self, gate: Any, depth: Any, first: Any, smem: Any, full: Any, share: Any, once: bool
    ) -> None:
        width = self._joint // 2
        for place in range((self.copies - 1) // 2):
            window = (depth, pl.ds(first + place * width, width))
            for half, source in enumerate((gate, self.up)):
                there = smem.at[:, pl.ds((2 * place + half) * width, width)]
                plgpu.copy_gmem_to_smem(
                    source.at[window], there, full, collective_axes=share, evict_first=once
                )

    def columns_of(self, sums: Any) -> int:
        """Half of them, if they are columns of the weights."""
        return int(sums.shape[1]) // (1 if self.config.swap else 2)

    def joined(self, sums: Any, first: int, columns: int) -> Any:
        """What the activation and the product make of columns of both weights."""
        end = first + columns
        if self.config.swap:
            half = self.part_rows
            gate, up = sums[:half, first:end], sums[half:, first:end]
        else:
            half = self.columns_of(sums)
            gate, up = sums[:, first:end], sums[:, half + first : half + end]
        return self.activation(gate) * up


@functools.lru_cache(maxsize=256)
def _kernel(problem: MatmulProblem, config: MatmulConfig, activation: Activation) -> Any:
    epilogue = Epilogue()

    def loop(config: MatmulConfig) -> GatedLoop:
        return GatedLoop(problem, config, epilogue, activation)

    config = products.useful(loop, config)
    return build(problem, config, epilogue, products.MULTIPROCESSORS, loop(config), "gated_matmul")
