"""Floating-point types of products of few bits, by their names in PTX."""

from __future__ import annotations

import ml_dtypes

TYPES = {
    "e4m3": (8, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, ml_dtypes.float8_e5m2),
    "e3m2": (6, ml_dtypes.float6_e3m2fn),
    "e2m3": (6, ml_dtypes.float6_e2m3fn),
    "e2m1": (4, ml_dtypes.float4_e2m1fn),
}
"""Bits of an element, and the dtype."""

FACTORS = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}
"""Of scale factors."""
