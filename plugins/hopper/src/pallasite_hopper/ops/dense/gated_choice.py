"""Which configuration the kernel of a gated GEMM has, and whether two GEMMs take less time.

The kernel is a GEMM by both weights side by side, of which a warpgroup's part of a tile has as many
columns of one as of the other. So it has the configurations of such a GEMM whose parts can be
halved; of the transposed GEMM, where columns of the weights are rows of the tile, these halves are
whole fragments of 64 rows of the tensor cores.
"""

from __future__ import annotations

import dataclasses
import functools

from pallasite_hopper.ops.dense.candidates import candidates, with_most_stages
from pallasite_hopper.ops.dense.choice import (
    default_config,
    estimated,
    memory_rate,
    this_chip,
)
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.one_round import one_round_config

_HALF = 64
"""Columns of a weight that fill the swizzle, and the rows of a fragment."""

_LAUNCH = 1000.0
"""Nanoseconds that the kernel of the activation takes at least."""

_SEPARATE = 0.03
"""What two GEMMs take more than estimated: nothing of the second one is on its way when the first
one ends (10x28672x8192: 208 us, and 206 in one kernel, which was estimated to take 1 % more)."""

_FEW_ROWS, _PLAIN = 128, 0.1
"""Up to so many rows tiles that are not transposed take that much more than estimated, as do those
of the plain GEMM: 61x28672x8192 took 225 us with 64 x 256 by turns, two GEMMs 216."""

_ACTIVATION = 0.08
"""Nanoseconds for each sum: joining 64 x 128 columns of both weights takes 1.3 us, which only
warpgroups that take turns hide (7415x14336x4096 on an H200: 2278 us with 128 x 192 by turns, 2514
with 256 x 160, which are as fast in a plain GEMM)."""

_WRITTEN = 1
"""Bytes that are written for each sum: half of an element of the result."""


def fused_config(m: int, n: int, k: int, chip: str | None = None) -> MatmulConfig | None:
    """The configuration of the kernel, or None where two GEMMs take less time by the estimate.

    Its rows and columns are those of both weights together.

    Args:
      m, n, k: extents; n of one weight.
      chip: whose rates count; by default those of the device on which operations run.
    """
    return _fused(m, n, k, chip or this_chip())


@functools.lru_cache(maxsize=1024)
def _fused(m: int, n: int, k: int, chip: str) -> MatmulConfig | None:
    each, both = Sizes(m, n, k, 2, 2), both_weights(m, n, k)
    found = fused_configs(m, n, k, chip)
    if not found:
        return None
    activation = _LAUNCH + 3 * m * n * 2 / memory_rate(each, chip)
    separate = 2 * estimated(default_config(each, chip), each, chip) + activation
    return found[0] if _rank(found[0], both, chip) < separate * (1 + _SEPARATE) else None


def both_weights(m: int, n: int, k: int) -> Sizes:
    """Of a GEMM by both weights side by side."""
    return Sizes(m, 2 * n, k, 2, _WRITTEN, activation=_ACTIVATION)


def fused_configs(m: int, n: int, k: int, chip: str) -> list[MatmulConfig]:
    """Configurations of the kernel, the one to be used first; for arguments see
    :func:`fused_config`."""
    both = both_weights(m, n, k)
    once = one_round_config(both, chip)
    found = [once] if once is not None and halves(once) else []
    others = (_with_room(one, both) for one in candidates(both) if halves(one))
    fitting = [one for one in others if one is not None]
    found += sorted(fitting, key=lambda one: _rank(one, both, chip))
    return list(dict.fromkeys(found))


def _rank(config: MatmulConfig, both: Sizes, chip: str) -> float:
    plain = not config.swap and both.m <= _FEW_ROWS
    return estimated(config, both, chip) * (1 + _PLAIN * plain)


def halves(config: MatmulConfig) -> bool:
    """Whether a warpgroup's part of a tile can have as many columns of one weight as of the other,
    so that what joins them is in the registers of one lane."""
    if config.parts > 1 or config.rest is not None:
        return False
    if config.swap:
        return config.warpgroup_m % (2 * _HALF) == 0
    # Blocks that share steps write columns, of which each would have those of one weight only.
    alone = config.split_k == config.last_parts == 1
    return alone and config.warpgroup_n % (2 * _HALF) == 0


def _with_room(config: MatmulConfig, both: Sizes) -> MatmulConfig | None:
    """The same with room for the columns of the result that are written at a time, which are as
    wide as those of the sums if they are not their rows."""
    if config.swap:
        return config
    size = both.size
    shallow = with_most_stages(config, size, size)
    config = dataclasses.replace(config, stages=min(config.stages, shallow.stages))
    return config if config.stages >= 2 and config.fits(size, size) else None
