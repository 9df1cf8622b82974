"""Emitting MLIR: operations, types, what is known to divide a value."""

from __future__ import annotations

from pallasite.codegen.translation.locations import location_in_llvm as location_in_llvm
from pallasite.codegen.translation.locations import source_location as source_location
from pallasite.ir import ops as ops
from pallasite.ir import types as types
from pallasite.ir.types import bit_width as bit_width
from pallasite.ir.types import parse_type as parse_type
from pallasite.ir.types import pointer_type as pointer_type
from pallasite.ir.types import vector_type as vector_type
