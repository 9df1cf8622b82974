"""Approximate instructions of the GPU, as inline PTX on each element of a float32 value.

Errors are those of the PTX manual. Tests that run on another machine put functions of their own
in place of the instructions with :func:`replaced`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jaxlib.mlir import ir

from pallasite.ir import ops
from pallasite.lowering.numerics.number import Number, each

Replacement = Callable[..., ir.Value]
_replacement: Replacement | None = None


@contextlib.contextmanager
def replaced(function: Replacement) -> Iterator[None]:
    """Calls ``function(instruction, *operands)`` on scalars instead of emitting PTX."""
    global _replacement
    previous, _replacement = _replacement, function
    try:
        yield
    finally:
        _replacement = previous


def _apply(instruction: str, *operands: Number) -> Number:
    def scalar(*elements: Number) -> Number:
        values = [one.value for one in elements]
        if _replacement is not None:
            return Number(_replacement(instruction, *values))
        names = ", ".join(f"${position}" for position in range(len(values) + 1))
        constraints = ",".join(["=f", *["f"] * len(values)])
        text = f"{instruction} {names};"
        result = ops.inline_assembly(
            text, constraints, *values, results=[values[0].type], side_effects=False
        )
        return Number(result)

    return each(scalar, *operands)


def exp2(x: Number, *, flush: bool = False) -> Number:
    """2 to the power x: at most 2 ulp; exact for integers; ``flush`` makes denormals 0."""
    return _apply("ex2.approx.ftz.f32" if flush else "ex2.approx.f32", x)


def log2(x: Number) -> Number:
    """Binary logarithm: absolute error 2^-22 on [0.5, 2], else relative; denormals are 0."""
    return _apply("lg2.approx.ftz.f32", x)


def reciprocal(x: Number) -> Number:
    """1 / x: at most 1 ulp; denormals are 0."""
    return _apply("rcp.approx.ftz.f32", x)


def reciprocal_root(x: Number, *, flush: bool = False) -> Number:
    """1 / sqrt(x): relative error 2^-22.9."""
    return _apply("rsqrt.approx.ftz.f32" if flush else "rsqrt.approx.f32", x)


def root(x: Number) -> Number:
    """sqrt(x): relative error 2^-23; denormals are 0."""
    return _apply("sqrt.approx.ftz.f32", x)


def sine(x: Number) -> Number:
    """Sine: absolute error 2^-20.5 within [-pi, pi]."""
    return _apply("sin.approx.ftz.f32", x)


def cosine(x: Number) -> Number:
    """Cosine: absolute error 2^-20.5 within [-pi, pi]."""
    return _apply("cos.approx.ftz.f32", x)


def tangent_hyperbolic(x: Number) -> Number:
    """Hyperbolic tangent: relative error 2^-11."""
    return _apply("tanh.approx.f32", x)


def divide(x: Number, y: Number) -> Number:
    """Quotient: at most 2 ulp, over the full range."""
    return _apply("div.full.f32", x, y)
