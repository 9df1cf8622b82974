"""Portable operations: GEMM and attention with warp-level MMA, and operations on rows.

They serve every target through ``pallasite.ops``; a plugin may contribute faster ones for a target.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "matmul": "dense.api",
    "gated_matmul": "dense.gated",
    "MatmulConfig": "dense.config",
    "matmul_configs": "dense.config",
    "mixed_matmul": "mixed.api",
    "ragged_matmul": "ragged.api",
    "transposed_ragged_matmul": "ragged.api",
    "attention": "flash.api",
    "attention_backward": "flash.api",
    "attention_forward": "flash.api",
    "attention_dropout_mask": "flash.dropout",
    "AttentionConfig": "flash.config",
    "attention_configs": "flash.config",
    "decode_attention": "decode.api",
    "paged_attention": "decode.api",
    "DecodeConfig": "decode.config",
    "decode_configs": "decode.config",
    "rms_norm": "rows.norms",
    "layer_norm": "rows.norms",
    "softmax_cross_entropy": "rows.cross_entropy",
    "quantize": "rows.quantize",
    "dequantize": "rows.quantize",
    "rotary_embedding": "rows.rotary",
    "gated_activation": "rows.gated",
    "swiglu": "rows.gated",
    "top_k": "rows.top_k",
}
"""The module of each public name; it is imported when the name is first used."""

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_NAMES)
