"""References whose elements are seen as ones of another dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite.plugin import UnsupportedError, ViewRule
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import View
from pallasite.plugin.ir import types
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.reference_types import MemoryReference


def _lower(ctx: RuleContext, reference: MemoryReference, transform: Any) -> MemoryReference:
    del ctx
    dtype = np.dtype(transform.dtype)
    if types.bit_width(dtype) != reference.element_bits:
        raise UnsupportedError(
            "a reference seen as elements of another width",
            got=f"{reference.dtype} as {dtype}",
            expected="a dtype of the same width",
            hint="use plgpu.RefUnion to give one memory region several dtypes",
        )
    return dataclasses.replace(reference, dtype=dtype)


def _infer(view: View, transform: Any) -> None:
    view.dtype = np.dtype(transform.dtype)
    if types.bit_width(view.dtype) != view.layout.element_bits:
        raise UnsupportedError("a reference seen as elements of another width")


RULES = (ViewRule(transform=_jax.BitcastTransform, lower=_lower, infer=_infer),)
