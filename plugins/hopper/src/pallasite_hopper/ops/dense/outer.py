"""Products of a transposed operand with very few elements along k: sums of outer products.

Gradients of weights by few tokens are such products. They take as long as memory takes to write the
result, so lanes multiply: no tensor cores, no shared memory, nothing that the first stores wait for
but two loads. A lane has 8 columns of a block's rows, whose factors all lanes load.
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

MOST_PRODUCTS = 16
"""Elements along k at most."""
_LAUNCH, _WRITTEN, _MULTIPLIED = 1600.0, 4250.0, 16_000.0
"""Nanoseconds of the kernel besides, bytes that it writes in a nanosecond, and products that it
adds up (an H200, 2026-11): 4.7 µs for 1024x4096x12, where tensor cores take 5.1, 10.2 and 10.7 for
4096x4096x8, but 20.2 and 15.9 for 3072x8192x13."""

_VECTOR = 8
"""Elements of a vector, and of what the extents have to be multiples of."""
_NARROW, _WIDE = 512, 1024
"""Columns of a block at most. Narrow ones are 2 to 25 % faster, but for large results of several
products, where wide ones are 2 to 10 %."""
_FEW_PRODUCTS, _MANY_BLOCKS = 4, 132
_LEAST_SHARE = 0.5
"""Of these columns that equal parts of a row have to have."""
_LEAST_WIDTH = 256
"""Columns of a result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The configuration of the kernel.

    Attributes:
      columns: of the result that a block computes, a multiple of 8 that divides all columns.
      rows: that it computes at a time, a divisor of all rows.
      times: how often; together they divide all rows, too.
    """

    columns: int
    rows: int = 4
    times: int = 4


def outer_config(sizes: Sizes) -> OuterConfig | None:
    """The configuration for a product that this kernel takes less time for than the GEMM, by the
    estimates; else None."""
    if not (sizes.transpose_a and not sizes.transpose_b and sizes.size == 2):
        return None
    if not 0 < sizes.k <= MOST_PRODUCTS or sizes.n < _LEAST_WIDTH or not sizes.m:
        return None
    if sizes.m % _VECTOR or sizes.n % _VECTOR:
        return None
    chip = this_chip()
    if nanoseconds(sizes) > estimated(default_config(sizes, chip), sizes, chip):
        return None
    times = 4 if sizes.m % 16 == 0 else 2
    narrow, wide = (
        OuterConfig(columns=_columns(sizes.n, most), times=times) for most in (_NARROW, _WIDE)
    )
    blocks = sizes.m // (wide.rows * times) * (sizes.n // wide.columns)
    if sizes.k > _FEW_PRODUCTS and blocks >= _MANY_BLOCKS and wide.columns > _NARROW:
        return wide
    if narrow.columns >= min(sizes.n, _LEAST_SHARE * _NARROW):
        return narrow
    return wide if wide.columns >= min(sizes.n, _LEAST_SHARE * _WIDE) else None


def nanoseconds(sizes: Sizes) -> float:
    """The estimated time of the kernel."""
    each = max(sizes.out_size / _WRITTEN, sizes.k / _MULTIPLIED)
    return _LAUNCH + sizes.m * sizes.n * each


def _columns(width: int, most: int) -> int:
    """Of the fewest equal parts of a row that are whole vectors, no wider than ``most``."""
    vectors = width // _VECTOR
    parts = range(-(-width // most), vectors + 1)
    return width // next(count for count in parts if vectors % count == 0)


def build(problem: MatmulProblem, config: OuterConfig) -> Callable[..., jax.Array]:
    """The kernel as a function of both operands."""
    rows, columns = config.rows, config.columns
    height = rows * config.times

    def body(a: Any, b: Any, out: Any) -> None:
        window = pl.ds(lax.axis_index("across") * columns, columns)
        top = lax.axis_index("down") * height
        right = [b[k, window] for k in range(problem.k)]
        for time in range(config.times):
            here = pl.ds(top + time * rows, rows)
            left = [a[k, here] for k in range(problem.k)]
            total = jnp.zeros((rows, columns), jnp.float32)
            for one, other in zip(left, right, strict=True):
                down = jnp.broadcast_to(one.astype(jnp.float32)[:, None], total.shape)
                total += down * jnp.broadcast_to(other.astype(jnp.float32)[None], total.shape)
            out[here, window] = total.astype(out.dtype)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(problem.m // height, problem.n // columns),
        grid_names=("down", "across"),
        kernel_name="outer_products",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )
    return kernel
