"""MLIR contexts that know every dialect a kernel may use.

The MLIR bindings are those of jaxlib. A plain ``ir.Context()`` of theirs has the builtin dialect
only; the registry that is loaded here adds ``arith``, ``math``, ``scf``, ``vector``, ``llvm``,
``nvvm`` and the others that jaxlib ships.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext

_registry: ir.DialectRegistry | None = None
_idle: list[tuple[ir.Context, int]] = []
"""Contexts that nobody uses, and how many kernels each has served."""
_KERNELS = 64
"""How many kernels a context serves: what they intern in it is not freed before that."""


def make_context() -> ir.Context:
    """Returns a new MLIR context with the dialects of jaxlib loaded and no thread pool.

    That takes over a millisecond; a compilation borrows one with :func:`lent_context`.
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


@contextlib.contextmanager
def lent_context() -> Iterator[ir.Context]:
    """A context for one kernel, which nobody else uses meanwhile, and a later kernel may use again.

    Types, attributes and locations are interned in it for as long as it lives, so it serves a
    limited number of kernels. One in which something failed is not used again: a traceback may
    hold operations of it.
    """
    try:
        context, served = _idle.pop()
    except IndexError:
        context, served = make_context(), 0
    yield context
    if served + 1 < _KERNELS:
        _idle.append((context, served + 1))


def bytecode(module: Any) -> bytes:
    """A module as MLIR's bytecode, which takes a tenth of the time of its text."""
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return code.getvalue()


def printed(code: bytes) -> str:
    """The text, without locations, of a valid module that is given as bytecode."""
    with lent_context() as context, context:
        context.allow_unregistered_dialects = True
        try:
            operation = ir.Module.parse(code).operation
            return str(operation.get_asm(enable_debug_info=False, assume_verified=True))
        finally:
            context.allow_unregistered_dialects = False
