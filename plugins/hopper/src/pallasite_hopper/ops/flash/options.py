"""Which options of attention these kernels have; the others are left to the portable kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite_hopper.ops.flash.terms import MASK_STEP
from pallasite_std.api import AttentionOptions

OPTIONS = frozenset(one.name for one in dataclasses.fields(AttentionOptions))
"""Keyword arguments of ``pallasite.ops.attention``."""

_SERVED = frozenset(
    {
        "causal",
        "scale",
        "soft_cap",
        "window",
        "q_lengths",
        "kv_lengths",
        "q_segments",
        "kv_segments",
        "bias",
        "alibi_slopes",
        "block_mask",
        "dropout_rate",
        "dropout_seed",
        "config",
        "mask_block",
    }
)


def portable_option(options: AttentionOptions) -> str | None:
    """The first option that is asked for and that only the portable kernels have."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in _SERVED or value is None:
            continue
        return field.name
    if options.block_mask is not None and not _whole_tiles(options.mask_block):
        return f"block_mask of blocks that are no multiples of {MASK_STEP}"
    return None


def _whole_tiles(block: Any) -> bool:
    """Whether tiles divide the blocks of a mask."""
    sides = block if isinstance(block, tuple | list) else (block,)
    return all(isinstance(side, int) and side > 0 and side % MASK_STEP == 0 for side in sides)
