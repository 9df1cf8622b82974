"""Products of one row with a small matrix whose rows lie along k.

XLA makes one kernel of them that adds up products, without tensor cores (jax 0.11.2), and with
fewer bytes than ours needs to get going it is faster: 1.8 µs for 1x400x1824 in float8 and 3.0 by
ours, 4.9 and 5.8 for 1x3048x2240 in bfloat16 (an H200, 2026-11). Larger products have other
kernels there.
"""

from __future__ import annotations

from pallasite_hopper.ops.dense.choice import default_config, estimated, this_chip
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.direct_choice import direct_config
from pallasite_hopper.ops.dense.unaligned import nanoseconds_with_copies
from pallasite_std.api import padded_columns

_MOST = 10_000_000
"""Elements of both operands from which on XLA has other kernels
(``GpuAlgebraicSimplifierVisitor::ShouldStrengthReduceDotToReduce``)."""

_LAUNCH = {1: 1750.0, 2: 1315.0}
"""Nanoseconds of XLA's kernel besides, by the bytes of an element: 8 bits have to be converted."""

_READ = {1: 1500.0, 2: 3790.0}
"""Bytes that it reads in a nanosecond, fewer of those, too: 4.1 µs for 1x2768x1248 in float8, where
ours takes 2.9."""

_LEAST_GAIN = 0.05
"""What it has to gain."""


def vector_left_to_xla(sizes: Sizes) -> bool:
    """Whether XLA takes less time for a product of floating-point numbers of 8 or 16 bits, without
    epilogue."""
    small = 0 < sizes.k * (sizes.n + sizes.m) < _MOST
    if sizes.m != 1 or not sizes.transpose_b or not small or not sizes.n:
        return False
    read = (sizes.n + 1) * sizes.k * sizes.size / _READ[sizes.size]
    return (_LAUNCH[sizes.size] + read) * (1 + _LEAST_GAIN) < _ours(sizes)


def _ours(sizes: Sizes) -> float:
    """The time of our fastest kernel."""
    if padded_columns(sizes.k, sizes.size) == sizes.k:
        chip = this_chip()
        return estimated(default_config(sizes, chip), sizes, chip)
    direct = direct_config(sizes)
    copied = nanoseconds_with_copies(sizes)
    return copied if direct is None else min(copied, direct[1])
