"""Whether one kernel of Hopper multiplies and communicates, or two do, one after the other: by
estimates of their times.

One kernel hides what travels behind the product, up to the last tile of each block, but it has few
kinds of tiles. Hopper's own product also takes few rows, or shares k among blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallasite.plugin import select_target
from pallasite_hopper.ops.dense.choice import default_config, estimated, this_chip
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import Sizes

LINK = 300
"""Bytes that a device gets from another one in a nanosecond (NVLink of Hopper)."""
TOGETHER = 9_500
"""Nanoseconds that one kernel takes besides: the barriers between devices, and the last pieces."""
APART = 8_000
"""Nanoseconds that two kernels take besides: the barriers, and one more launch. With these numbers,
what is chosen took at most 4 % more time than the best, of 17 products of 256 to 16384 rows on two
H200."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A product of which something travels.

    Attributes:
      m, n, k: extents of the product of each device.
      size, out_size: bytes of an element of the operands and of the result.
      traffic: bytes that a device gets from others.
    """

    m: int
    n: int
    k: int
    size: int
    out_size: int
    traffic: int

    @property
    def sizes(self) -> Sizes:
        """The product."""
        return Sizes(m=self.m, n=self.n, k=self.k, size=self.size, out_size=self.out_size)


def exchange_of(m: int, n: int, k: int, dtype: Any, out_dtype: Any, traffic: int) -> Exchange:
    """The product of (m, k) and (k, n), for which a device gets ``traffic`` bytes of others."""
    sizes = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
    return Exchange(m, n, k, *sizes, traffic)


def fastest(
    exchange: Exchange, usual: MatmulConfig, fits: Callable[[MatmulConfig], bool]
) -> MatmulConfig | None:
    """The configuration of one kernel that multiplies and communicates; None for two kernels.

    Args:
      exchange: what there is to do.
      usual: the configuration that is taken unless another way is estimated to be faster.
      fits: whether the kernel can have a configuration.
    """
    smaller = dataclasses.replace(usual, tile_n=128, stages=5)
    together = [one for one in (usual, smaller) if fits(one)]
    if not together:
        return None
    chip, blocks = this_chip(), select_target().multiprocessors or 132
    times = [_time_together(exchange, one, chip, blocks) for one in together]
    apart = _time_of_product(exchange, chip) + exchange.traffic / LINK + APART
    return None if apart < min(times) else together[times.index(min(times))]


@functools.lru_cache(maxsize=1024)
def _time_of_product(exchange: Exchange, chip: str) -> float:
    return estimated(default_config(exchange.sizes, chip), exchange.sizes, chip)


@functools.lru_cache(maxsize=1024)
def _time_together(exchange: Exchange, config: MatmulConfig, chip: str, blocks: int) -> float:
    """What is shorter, the product or what travels, is hidden the better the more rounds of tiles
    there are."""
    product, travels = estimated(config, exchange.sizes, chip), exchange.traffic / LINK
    tiles = math.ceil(exchange.m / config.tile_m) * math.ceil(exchange.n / config.tile_n)
    rounds = math.ceil(tiles / blocks)
    return max(product, travels) + min(product, travels) / rounds**2 + TOGETHER
