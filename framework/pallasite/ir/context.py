"""MLIR contexts that know every dialect a kernel may use.

The MLIR bindings are those of jaxlib. A plain ``ir.Context()`` of theirs has the builtin dialect
only; the registry that is loaded here adds ``arith``, ``math``, ``scf``, ``vector``, ``llvm``,
``nvvm`` and the others that jaxlib ships.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext

_registry: ir.DialectRegistry | None = None


def make_context() -> ir.Context:
    """Returns a new MLIR context with the dialects of jaxlib loaded and no thread pool.

    Types, attributes and locations are interned in a context for as long as it lives, so each
    kernel gets its own.
    """
    global _registry
    if _registry is None:
        _registry = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(_registry)
    context = ir.Context()
    context.enable_multithreading(False)
    context.append_dialect_registry(_registry)
    context.load_all_available_dialects()
    return context
