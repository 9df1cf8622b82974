"""The error function, its complement and its inverse.

Float32 results are computed from polynomials and exp in float32 where an error of a few ulp is
enough; float64 results, and erfc and erf_inv in float32, are evaluated in float64.

Sources: W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23
(1969), for float64; M. Giles, "Approximating the erfinv function", GPU Computing Gems (2011), for
the start of the inverse, which one Halley step refines.
"""

from __future__ import annotations

import math

from pallasite.lowering.numerics import exponential, logarithm
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    copy_sign,
    minimum,
    polynomial,
    select,
    square_root,
)

# Cody's coefficients, from the highest power down.
_NEAR_TOP = (
    1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
    3.20937758913846947e3,
)  # fmt: skip
_NEAR_BOTTOM = (
    1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
    2.84423683343917062e3,
)  # fmt: skip
_MIDDLE_TOP = (
    2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
    2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
    1.23033935479799725e3,
)  # fmt: skip
_MIDDLE_BOTTOM = (
    1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
    1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3,
    1.23033935480374942e3,
)  # fmt: skip
_FAR_TOP = (
    1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
    1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4,
)  # fmt: skip
_FAR_BOTTOM = (
    1.0, 2.56852019228982242e0, 1.87295284992346047e0, 5.27905102951428412e-1,
    6.05183413124413191e-2, 2.33520497626869185e-3,
)  # fmt: skip
_LARGEST = 27.5
"""erfc(x) is below the smallest float64 beyond this."""


def _near(x: Number) -> Number:
    """erf(x) for |x| <= 0.46875."""
    square = x * x
    return x * polynomial(square, _NEAR_TOP) / polynomial(square, _NEAR_BOTTOM)


def _complement(y: Number) -> Number:
    """erfc(y) for 0.46875 <= y, in float64."""
    limited = minimum(y, _LARGEST)
    middle = polynomial(limited, _MIDDLE_TOP) / polynomial(limited, _MIDDLE_BOTTOM)
    inverse_square = 1.0 / (limited * limited)
    tail = inverse_square * polynomial(inverse_square, _FAR_TOP)
    tail = tail / polynomial(inverse_square, _FAR_BOTTOM)
    far = (1 / math.sqrt(math.pi) - tail) / limited
    # exp(-y^2) with the square in two parts, so that its rounding does not show.
    high = Number(_rounded_to_sixteenths(limited).value)
    rest = (limited - high) * (limited + high)
    scale = exponential.exp(0.0 - high * high) * exponential.exp(0.0 - rest)
    return scale * select(limited <= 4.0, middle, far)


def _rounded_to_sixteenths(x: Number) -> Number:
    from pallasite.lowering.numerics.number import truncate

    return truncate(x * 16.0) * 0.0625


def _erf_64(x: Number) -> Number:
    y = absolute(x)
    large = copy_sign(1.0 - _complement(select(y < 0.46875, y.constant(0.46875), y)), x)
    result = select(y <= 0.46875, _near(select(y <= 0.46875, x, x.constant(0.0))), large)
    return select(x.is_nan(), x, result)


def erf(x: Number, approximate: bool = False) -> Number:
    """The error function: float64 about 2 ulp; float32 is rounded from float64."""
    del approximate
    if x.width == 64:
        return _erf_64(x)
    return _erf_64(x.to_float("f64")).to_float("f32")


def erfc(x: Number) -> Number:
    """1 - erf(x) without cancellation: float64 a few ulp; float32 is rounded from float64."""
    if x.width == 32:
        return erfc(x.to_float("f64")).to_float("f32")
    y = absolute(x)
    tail = _complement(select(y < 0.46875, y.constant(0.46875), y))
    result = select(x < 0.0, 2.0 - tail, tail)
    result = select(y <= 0.46875, 1.0 - _near(select(y <= 0.46875, x, x.constant(0.0))), result)
    return select(x.is_nan(), x, result)


# Giles' polynomials for the single-precision inverse, from the highest power down.
_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def erf_inv(x: Number) -> Number:
    """The inverse of erf: infinite at -1 and 1, not a number beyond.

    Giles' polynomials give a few digits, which Halley steps on erf refine: two for float64 (about
    1e-14 relative, less near 1), one for float32.
    """
    if x.width == 32:
        return _erf_inv_64(x.to_float("f64"), 1).to_float("f32")
    return _erf_inv_64(x, 2)


def _erf_inv_64(x: Number, steps: int) -> Number:
    inside = absolute(x) < 1.0
    safe = select(inside, x, x.constant(0.0))
    w = 0.0 - logarithm.log((1.0 - safe) * (1.0 + safe))
    central = polynomial(w - 2.5, _CENTRAL)
    tail = polynomial(square_root(select(w < 5.0, w.constant(5.0), w)) - 3.0, _TAIL)
    y = safe * select(w < 5.0, central, tail)
    for _ in range(steps):
        # The residual comes from erfc for large arguments, where erf has no digits left.
        magnitude = absolute(y)
        near = _erf_64(magnitude) - absolute(safe)
        far = (1.0 - absolute(safe)) - erfc(magnitude)
        residual = select(magnitude < 0.5, near, far)
        slope = 2 / math.sqrt(math.pi) * exponential.exp(0.0 - magnitude * magnitude)
        step = residual / slope
        magnitude = magnitude - step / (1.0 + magnitude * step)
        y = copy_sign(magnitude, safe)
    edge = copy_sign(x.constant(math.inf), x)
    result = select(absolute(x).equals(1.0), edge, x.constant(math.nan))
    return select(inside, y, result)
