"""Translating operations of MLIR to LLVM IR, for plugins that emit dialects of their own choice."""

from __future__ import annotations

from pallasite.codegen.ptx import llvm_module as llvm_module
from pallasite.codegen.translation.arith import cast as cast
from pallasite.codegen.translation.arith import intrinsic as intrinsic
from pallasite.codegen.translation.arith import pairs as pairs
from pallasite.codegen.translation.constants import splat_text as splat_text
from pallasite.codegen.translation.emitter import Emitter as Emitter
from pallasite.codegen.translation.emitter import Handler as Handler
from pallasite.codegen.translation.emitter import Operand as Operand
from pallasite.codegen.translation.flags import fast_math as fast_math
from pallasite.codegen.translation.llvm_ops import shuffle_mask as shuffle_mask
from pallasite.codegen.translation.memory import ORDERINGS as ORDERINGS
from pallasite.codegen.translation.memory import alignment as alignment
from pallasite.codegen.translation.memory import ordering as ordering
from pallasite.codegen.translation.types import element_type as element_type
from pallasite.codegen.translation.types import intrinsic_suffix as intrinsic_suffix
from pallasite.codegen.translation.types import vector_length as vector_length
from pallasite.codegen.translation.types import with_element as with_element
from pallasite.interrupts import deferred as deferred
