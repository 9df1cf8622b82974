"""Operands that the tensor cores read along k only, and that are given the other way round.

They are copied to the other order first, which takes longer than the product itself where it has
few rows. XLA's products in tf32, and of a few rows with a matrix of integers, take them as they
are; those of 8-bit floats convert them first, which takes longer than our copies.
"""

from __future__ import annotations

import math

from pallasite_hopper.ops.dense.choice import batched_config, default_config
from pallasite_hopper.ops.dense.cost import Sizes, nanoseconds

_COPY, _COPIED = 1300.0, 3650.0
"""Nanoseconds of a copy, and bytes that it reads and writes in a nanosecond besides."""
_LAUNCH, _CALCULATED, _MEMORY = 2000.0, 400_000.0, 4300.0
"""Of XLA's product: nanoseconds, operations in a nanosecond, bytes of all arrays."""
_FILL, _MOST_FILL = 1.8, 12_000.0
"""Nanoseconds more for each element along k, and at most."""
_OVERLAP = 1.5
"""Exponent of the norm that joins the times of calculating and of moving. All of these: measured on
an H200 (2026-11, jax 0.11.2) with 11 shapes of 1 to 13,321 rows."""

_LEAST_GAIN, _LEAST_GAINED = 0.1, {4: 4000.0, 1: 1000.0}
"""What XLA has to gain, as a share of its time and in nanoseconds, by the bytes of an element. The
same rates are near the times of int8 (2026-11, an H200: 50.0 µs for 4x7168x18432, 39.4 for
64x8192x8192, 61.1 for 256x8192x4096)."""


def left_to_xla(sizes: Sizes, *, turned_a: bool, turned_b: bool) -> bool:
    """Whether XLA takes less time for a product in tf32, or of integers of 8 bits, than our kernel
    and the copies before it.

    Args:
      sizes: of the product, with operands along k.
      turned_a, turned_b: whether the operands are copied to that order.
    """
    if not (turned_a or turned_b) or 0 in (sizes.m, sizes.n, sizes.k):
        return False
    if sizes.size == 1 and (turned_a or sizes.m == 1):  # XLA has slower kernels for these.
        return False
    config = batched_config(sizes) if sizes.batch > 1 else default_config(sizes)
    if config is None:
        return False
    time = nanoseconds(config, sizes)
    for turned, extent in ((turned_a, sizes.m), (turned_b, sizes.n)):
        time += turned * copying(sizes.batch * extent * sizes.k * sizes.size)
    least = _LEAST_GAINED[sizes.size]
    return (1 + _LEAST_GAIN) * _nanoseconds_by_xla(sizes) + least < time


def copying(size: int) -> float:
    """Nanoseconds of a copy of so many bytes to another order."""
    return _COPY + 2 * size / _COPIED


def _nanoseconds_by_xla(sizes: Sizes) -> float:
    m, n, k = sizes.m, sizes.n, sizes.k
    calculated = 2 * sizes.batch * m * n * k / _CALCULATED
    moved = sizes.batch * ((m + n) * k * sizes.size + m * n * sizes.out_size) / _MEMORY
    both = math.pow(calculated**_OVERLAP + moved**_OVERLAP, 1 / _OVERLAP)
    return _LAUNCH + min(_FILL * k, _MOST_FILL) + both
