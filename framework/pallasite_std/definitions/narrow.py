"""Arrays of elements of less than a byte, where elements are moved one by one or reduced.

Neighbours share a byte, so that what moves single elements moves them as integers of a byte, or as
float16, which have the same values; sums are the same modulo the number of values. Element-wise
functions, loads and stores, and conversions need nothing of that.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as jp

from pallasite.plugin import jax_internals as _jax

_MOVING = frozenset(
    {
        *(jp.rev_p, jp.slice_p, jp.concatenate_p, jp.pad_p, jp.sort_p, lax.tile_p),
        *(jp.dynamic_slice_p, jp.dynamic_update_slice_p, jp.gather_p, jp.top_k_p),
        *(jp.cumsum_p, jp.cumprod_p, jp.cummax_p, jp.cummin_p, jp.argmax_p, jp.argmin_p),
        *(jp.reduce_sum_p, jp.reduce_prod_p, jp.reduce_max_p, jp.reduce_min_p),
        *(jp.reduce_and_p, jp.reduce_or_p, jp.reduce_xor_p, jp.reduce_p),
        *(jp.scatter_p, jp.scatter_add_p, jp.scatter_mul_p, jp.scatter_min_p, jp.scatter_max_p),
        lax.scatter_sub_p,
    }
)
_WIDER = {
    jnp.dtype(f"{kind}{bits}"): jnp.dtype(f"{kind}8") for kind in ("int", "uint") for bits in (2, 4)
} | {jnp.dtype(jnp.float4_e2m1fn): jnp.dtype(jnp.float16)}


def needs_bytes(equation: Any) -> bool:
    """Whether an equation moves elements of less than a byte one by one, or reduces them."""
    return equation.primitive in _MOVING and any(
        getattr(atom.aval, "dtype", None) in _WIDER and not isinstance(atom.aval, _jax.AbstractRef)
        for atom in equation.invars
    )


def with_bytes(equation: Any, *operands: Any, **params: Any) -> list[Any]:
    """What an equation makes of its operands, by way of elements of a byte."""
    wide = [
        lax.convert_element_type(one, _WIDER[one.dtype]) if one.dtype in _WIDER else one
        for one in operands
    ]
    found = equation.primitive.bind(*wide, **params)
    found = found if equation.primitive.multiple_results else [found]
    return [
        lax.convert_element_type(one, variable.aval.dtype)
        for one, variable in zip(found, equation.outvars, strict=True)
    ]
