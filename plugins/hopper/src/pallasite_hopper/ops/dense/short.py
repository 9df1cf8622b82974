"""Products of two operands that lie across k, with few elements along k, by tensor cores.

Gradients of weights by few tokens are such products. They take as long as memory takes to write the
result, so blocks do nothing but that: each loads all that it multiplies at once, and so many blocks
are resident on a multiprocessor that some of them always write. A block has one warpgroup, with 64
rows of the result at a time. Measured on an H200 (2026-11): 14.2 µs for 5120x5120x11, where the
kernel for any k takes 16.7, 70.9 and 82.3 for 27648x5120x25, 144.6 and 155.0 for 5120x55296x24; but
42.5 and 39.4 for 13824x5120x61.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense.choice import default_config, estimated, this_chip
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_std.api import MatmulProblem

ROWS = 64
"""That an instruction multiplies."""

DEPTH = 16
"""Elements along k that it does."""

MOST_PRODUCTS = 32
"""Elements along k at most."""

_LAUNCH, _WRITTEN = 1600.0, 4100.0
"""Nanoseconds of the kernel besides, and bytes that it writes in a nanosecond."""

_LEAST = 64
"""Rows and columns of a result."""

_FEW_BLOCKS = 132
"""With fewer of them each computes 64 rows once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConfig:
    """The configuration of the kernel.

    Attributes:
      columns: of the result that a block computes, a multiple of 64 up to 256.
      times: how often it computes 64 rows, each time with a buffer of its own.
    """

    columns: int = 128
    times: int = 2


def short_config(sizes: Sizes) -> tuple[ShortConfig, float] | None:
    """The configuration for a product that this kernel takes less time for than the GEMM, by the
    estimates, and nanoseconds that it takes; else None."""
    if not (sizes.transpose_a and not sizes.transpose_b and sizes.size == 2):
        return None
    if not 0 < sizes.k <= MOST_PRODUCTS or min(sizes.m, sizes.n) < _LEAST:
        return None
    if sizes.m % 8 or sizes.n % 8:  # The copy engine cannot read such rows.
        return None
    time, chip = nanoseconds(sizes), this_chip()
    if time > estimated(default_config(sizes, chip), sizes, chip):
        return None
    config = ShortConfig()
    blocks = -(-sizes.m // (ROWS * config.times)) * -(-sizes.n // config.columns)
    return (dataclasses.replace(config, times=1) if blocks < _FEW_BLOCKS else config), time


def nanoseconds(sizes: Sizes) -> float:
    """The estimated time of the kernel."""
    return _LAUNCH + sizes.m * sizes.n * sizes.out_size / _WRITTEN


def build(problem: MatmulProblem, config: ShortConfig) -> Callable[..., jax.Array]:
    """The kernel as a function of both operands."""
    columns, times = config.columns, config.times
    height, depth = ROWS * times, -(-problem.k // DEPTH) * DEPTH
    down, across = -(-problem.m // height), -(-problem.n // columns)

    def body(a: Any, b: Any, out: Any, a_smem: Any, b_smem: Any, out_smem: Any, full: Any) -> None:
        block = lax.axis_index("block")
        top = lax.div(block, across) * height
        window = pl.ds(lax.rem(block, across) * columns, columns)
        every = pl.ds(0, depth)
        plgpu.copy_gmem_to_smem(a.at[every, pl.ds(top, height)], a_smem, full)
        plgpu.copy_gmem_to_smem(b.at[every, window], b_smem, full)
        plgpu.barrier_wait(full)
        for time in range(times):
            left = plgpu.transpose_ref(a_smem.at[:, pl.ds(time * ROWS, ROWS)], (1, 0))

            def product(acc: Any, left: Any = left) -> Any:
                plgpu.wgmma(acc, left, b_smem, accumulate=False)
                return acc[...]

            sums = pl.run_scoped(product, plgpu.ACC((ROWS, columns), jnp.float32))
            staging = out_smem.at[time]
            staging[...] = sums.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out.at[pl.ds(top + time * ROWS, ROWS), window])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(down * across,),
        grid_names=("block",),
        scratch_types={
            "a_smem": plgpu.SMEM((depth, height), problem.dtype_a),
            "b_smem": plgpu.SMEM((depth, columns), problem.dtype_b),
            "out_smem": plgpu.SMEM((times, ROWS, columns), problem.out_dtype),
            "full": plgpu.Barrier(num_arrivals=2),
        },
        kernel_name="short_products",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )
    return kernel
