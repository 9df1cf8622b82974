"""Kernels for Hopper that JAX programs call: GEMM and attention."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "matmul": "pallasite_hopper.ops.dense.api",
    "gated_matmul": "pallasite_hopper.ops.dense.gated",
    "MatmulConfig": "pallasite_hopper.ops.dense.config",
    "matmul_configs": "pallasite_hopper.ops.dense.choice",
    "mixed_matmul": "pallasite_hopper.ops.mixed.api",
    "MixedConfig": "pallasite_hopper.ops.mixed.config",
    "mixed_configs": "pallasite_hopper.ops.mixed.choice",
    "ragged_matmul": "pallasite_hopper.ops.ragged.api",
    "transposed_ragged_matmul": "pallasite_hopper.ops.ragged.api",
    "RaggedConfig": "pallasite_hopper.ops.ragged.config",
    "ragged_configs": "pallasite_hopper.ops.ragged.config",
    "attention": "pallasite_hopper.ops.flash.api",
    "attention_backward": "pallasite_hopper.ops.flash.api",
    "attention_forward": "pallasite_hopper.ops.flash.api",
    "AttentionConfig": "pallasite_hopper.ops.flash.config",
    "attention_configs": "pallasite_hopper.ops.flash.forward_choice",
    "decode_attention": "pallasite_hopper.ops.decode.api",
    "paged_attention": "pallasite_hopper.ops.decode.api",
    "DecodeConfig": "pallasite_hopper.ops.decode.config",
    "decode_configs": "pallasite_hopper.ops.decode.config",
}
"""The module of each public name; it is imported when the name is first used."""

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_NAMES)
