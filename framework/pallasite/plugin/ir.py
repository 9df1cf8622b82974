"""Emitting MLIR: operations, types, what is known to divide a value."""

from __future__ import annotations

from pallasite.ir import ops as ops
from pallasite.ir import types as types
from pallasite.ir.divisibility import ANY as ANY
from pallasite.ir.divisibility import MEMREF_ALIGNMENT as MEMREF_ALIGNMENT
from pallasite.ir.divisibility import known_divisor as known_divisor
from pallasite.ir.divisibility import known_remainder as known_remainder
from pallasite.ir.divisibility import with_divisor as with_divisor
from pallasite.ir.types import bit_width as bit_width
from pallasite.ir.types import parse_type as parse_type
from pallasite.ir.types import pointer_type as pointer_type
from pallasite.ir.types import vector_type as vector_type
