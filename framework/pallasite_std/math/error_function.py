"""erf, erfc and the inverse of erf.

Away from zero both come from ``e**(x^2) erfc(x) (1 + 2 x)``, a smooth function of
``(x - 4) / (x + 4)`` (M. M. Shepherd and J. G. Laframboise, "Chebyshev approximation of
(1 + 2x) exp(x^2) erfc x in 0 <= x < infinity", Mathematics of Computation 36, 1981). The inverse is
``x`` times a function of ``-log(1 - x^2)`` (M. Giles, "Approximating the erfinv function", GPU
Computing Gems Jade Edition, 2011). All coefficients are minimax fits of our own.
"""

from __future__ import annotations

import math

from pallasite_std.math.exponential import scaled_exp
from pallasite_std.math.hardware import Hardware
from pallasite_std.math.logarithm import log
from pallasite_std.math.values import Real, polynomial

# erf(x) = x + x P(x^2) on |x| <= 1.
_ERF_SINGLE = (
    0.128379166,
    -0.37612626,
    0.112836003,
    -0.0268544443,
    0.00518953521,
    -0.000802084222,
    7.88912221e-05,
)
_ERF_DOUBLE = (
    0.1283791670955126,
    -0.3761263890318375,
    0.11283791670954885,
    -0.026866170645077868,
    0.005223977624828387,
    -0.0008548326981423662,
    0.00012055331132906383,
    -1.4925595771399203e-05,
    1.6461008471009053e-06,
    -1.6350396204534752e-07,
    1.466032891780984e-08,
    -1.1374957575159048e-09,
    5.960690068608588e-11,
)
# (1 + 2 x) e**(x^2) erfc(x) as a polynomial in (x - 4) / (x + 4), for x up to 10.5 or 28.
_ERFC_SINGLE = (
    1.23299515,
    -0.139621139,
    0.0153796002,
    0.068097882,
    -0.101037063,
    0.0937216505,
    -0.0663606003,
    0.0372124314,
    -0.016014779,
    0.00507837953,
    -0.00110606523,
    -0.000632992538,
)
_ERFC_DOUBLE = (
    1.2329951186255526,
    -0.13962111684056253,
    0.015379652102619622,
    0.06809705425469532,
    -0.10103906603629771,
    0.09373283499825631,
    -0.06633036581236022,
    0.03716751553897676,
    -0.01619773405620709,
    0.005031969964890176,
    -0.000757773299245682,
    -0.00019925662555032384,
    0.0001506217234789799,
    -2.439944216881907e-05,
    -1.1222183003988201e-05,
    5.71019666163823e-06,
    2.941617458549208e-07,
    -8.259663486481458e-07,
    7.410546401541052e-08,
    1.1033284946500764e-07,
    -1.7469779670538064e-08,
    -1.4070563007409919e-08,
    1.6773172907112135e-09,
    1.1981475746643217e-09,
)
# erf_inv(x) / x as polynomials in w - 2.5 for w < 5 and in sqrt(w) - 3 beyond.
_INVERSE_SINGLE_CENTRE = (
    1.50140941,
    0.246640295,
    -0.00417733938,
    -0.0012527447,
    0.000218282628,
    -4.96190887e-06,
    -3.43461306e-06,
    4.65891475e-07,
    1.80374098e-08,
    -8.77278072e-09,
    3.35529438e-10,
)
_INVERSE_SINGLE_TAIL = (
    2.83297682,
    1.00167525,
    0.00944530312,
    -0.00764276367,
    0.00568769872,
    -0.00356709259,
    0.00147511205,
    -0.000120042983,
    -0.000277494168,
    0.000160552358,
    -2.9514822e-05,
)
# The same in w - 3.125 for w < 6.25, in sqrt(w) - 3.25 for w < 16 and in sqrt(w) - 5 beyond.
_INVERSE_DOUBLE_CENTRE = (
    1.653654562683103,
    0.2401581824255895,
    -0.006033670871430706,
    -0.0007407025341653081,
    0.00018673420803639486,
    -1.3882523364894822e-05,
    -1.3654692038892017e-06,
    4.234787804033799e-07,
    -2.9070366793359658e-08,
    -4.112635156145178e-09,
    1.0512107430082618e-09,
    -5.415372939035399e-11,
    -1.2974673023539067e-11,
    2.6334277710528423e-12,
    -8.160805671453244e-14,
    -4.053493028553621e-14,
    6.6486058977084866e-15,
    2.0106838293348012e-17,
    -1.3415801032288186e-16,
    1.1196975150147725e-17,
    1.3222369158236342e-18,
    -1.6926238354504916e-19,
    -4.323811599305261e-21,
)
_INVERSE_DOUBLE_MIDDLE = (
    3.0838856104922203,
    1.0052589676941597,
    0.005370914553602698,
    -0.0037512085075968545,
    0.002491442095506777,
    -0.0016882755553489144,
    0.0009532893907306299,
    -0.0003550375277606028,
    2.403100978521212e-05,
    6.828489446546589e-05,
    -4.731771230739512e-05,
    1.2475162718069221e-05,
    2.921887050042013e-06,
    -4.0136015043283264e-06,
    1.5054763866165349e-06,
    1.7974874231939836e-08,
    -2.7776414226587963e-07,
    9.086500607650788e-08,
    3.2350245581842677e-09,
)
_INVERSE_DOUBLE_TAIL = (
    4.849906401408584,
    1.0103004648645284,
    -0.000138719318361001,
    -0.00021503011905883932,
    7.599527767702045e-05,
    -1.968178084850573e-05,
    4.526056549216872e-06,
    -9.929691618675319e-07,
    2.2903151992748042e-07,
    -6.774612980608593e-08,
    2.9085638195357376e-08,
    -1.4914376383006717e-08,
    7.694750137258333e-09,
    -3.820377636287783e-09,
    1.456183502732264e-09,
    -2.472305657742176e-10,
    -1.3641983260441802e-11,
)


def _erfc_of_size(size: Real, hardware: Hardware) -> Real:
    """erfc of a number that is not negative."""
    double = size.is_double
    size = size.at_most(27.5 if double else 10.4)
    near, far = size - 4.0, size + 4.0
    place = near / far if double else hardware.divide(near, far)
    value = polynomial(place, _ERFC_DOUBLE if double else _ERFC_SINGLE)
    square = size * size
    low = size.times_plus(size, -square)
    return scaled_exp(-square, hardware, low=-low) * (value / size.times_plus(2.0, 1.0))


def _erf_near_zero(x: Real) -> Real:
    """erf(x) / x - 1 for |x| <= 1."""
    return polynomial(x * x, _ERF_DOUBLE if x.is_double else _ERF_SINGLE)


def erf(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The error function, at most 1.5 ulp."""
    size = abs(x)
    small = size.times_plus(_erf_near_zero(x), size)
    large = 1.0 - _erfc_of_size(size, hardware)
    return (size < 1.0).choose(small, large).with_sign_of(x)


def erfc(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The complement 1 - erf(x), at most 4.5 ulp also where it is tiny."""
    size = abs(x)
    tail = _erfc_of_size(size, hardware)
    value = (x < 0.0).choose(2.0 - tail, tail)
    near = 1.0 - x.times_plus(_erf_near_zero(x), x)
    return (size < 0.5).choose(near, value)


def erf_inv(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The inverse of erf, at most 4 ulp in f32, 8 in f64; infinite at 1, NaN beyond."""
    w = -log((-x).times_plus(x, 1.0), approximate, hardware)
    root = w.sqrt()
    if x.is_double:
        tail = polynomial(root - 5.0, _INVERSE_DOUBLE_TAIL)
        middle = polynomial(root - 3.25, _INVERSE_DOUBLE_MIDDLE)
        centre = polynomial(w - 3.125, _INVERSE_DOUBLE_CENTRE)
        ratio = (w < 6.25).choose(centre, (w < 16.0).choose(middle, tail))
    else:
        tail = polynomial(root - 3.0, _INVERSE_SINGLE_TAIL)
        centre = polynomial(w - 2.5, _INVERSE_SINGLE_CENTRE)
        ratio = (w < 5.0).choose(centre, tail)
    return abs(x).equals(1.0).choose(x.constant(math.inf).with_sign_of(x), x * ratio)
