"""Register and memory layouts as plain data, with the algebra that lowering rules need."""

from pallasite.layouts.construct import (
    Replicated,
    Tiling,
    default_strided,
    default_vector_length,
    strided,
    tiled,
)
from pallasite.layouts.conversion import Conversion, ConversionKind, conversion
from pallasite.layouts.description import describe
from pallasite.layouts.digits import LANES, THREADS, WARPS, Digit, Owner
from pallasite.layouts.memory import (
    Extent,
    MemoryLayout,
    MemorySlice,
    OffsetTerm,
    row_major,
    swizzle_bytes,
)
from pallasite.layouts.named import resolve
from pallasite.layouts.reduction import LaneRotation, ReductionPlan
from pallasite.layouts.registers import Layout, Rearrangement, RegisterLayout, SplatLayout

__all__ = [
    "LANES",
    "THREADS",
    "WARPS",
    "Conversion",
    "ConversionKind",
    "Digit",
    "Extent",
    "LaneRotation",
    "Layout",
    "MemoryLayout",
    "MemorySlice",
    "OffsetTerm",
    "Owner",
    "Rearrangement",
    "ReductionPlan",
    "RegisterLayout",
    "Replicated",
    "SplatLayout",
    "Tiling",
    "conversion",
    "default_strided",
    "default_vector_length",
    "describe",
    "resolve",
    "row_major",
    "strided",
    "swizzle_bytes",
    "tiled",
]
