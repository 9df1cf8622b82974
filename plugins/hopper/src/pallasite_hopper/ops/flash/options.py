"""Which options of attention these kernels have; the others are left to the portable kernels."""

from __future__ import annotations

import dataclasses

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
        if field.name in ("dropout_rate", "dropout_seed") and options.dropout_rate == 0:
            continue
        return field.name
    return None
