"""Translating operations of MLIR to LLVM IR, for plugins that emit dialects of their own choice."""

from __future__ import annotations

from pallasite.codegen.translation.emitter import Emitter as Emitter
from pallasite.codegen.translation.emitter import Handler as Handler
from pallasite.codegen.translation.emitter import Operand as Operand
from pallasite.codegen.translation.types import vector_length as vector_length
from pallasite.codegen.translation.types import with_element as with_element
