"""Angles of any size: what is left of them is exact."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import PI, exact
from math_support import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, HOST, run

import pallasite
from pallasite import gpu as plgpu
from pallasite_std.math import large_angles
from pallasite_std.math.table import UNARY

NAMES = {"sin": 1.0, "cos": 1.0, "tan": 2.3}
HARD = [
    *("0x1.6ac5b262ca1ffp+849", "0x1.fffffffffffffp+1023", "0x1p+1023", "0x1p+48"),
    *("0x1.0000000000001p+48", "0x1.fffffffffffffp+47", "0x1.921fb54442d18p+600"),
]
"""The first one is the float that is nearest to a multiple of pi/2."""


def angles(dtype, count=2000, seed=0):
    """Random significands with every exponent, and some that are next to multiples of pi/2."""
    generator = np.random.default_rng(seed)
    largest = int(np.log2(float(np.finfo(dtype).max if dtype == FLOAT64 else 1e38)))
    exponents = generator.integers(-4, largest + 1, count)
    x = generator.uniform(1, 2, count) * 2.0 ** exponents.astype(float)
    x *= generator.choice([-1, 1], count)
    quarters = [Fraction(k) * Fraction(PI, 1 << 2601) for k in (1, 3, 10**6, 2**60 + 1, 2**90 + 3)]
    near = [float(one) for one in quarters]
    x = np.concatenate([x, near, [float.fromhex(one) for one in HARD]])
    return x[np.abs(x) < (np.inf if dtype == FLOAT64 else 3e38)].astype(dtype)


def errors(name, x, result):
    """In units of the last place of the result."""
    found = []
    for one, got in zip(x.tolist(), result.astype(np.float64).tolist(), strict=True):
        expected = exact(name, one)
        place = np.spacing(np.abs(np.asarray(float(expected), result.dtype)))
        found.append(float(abs(Fraction(got) - expected) / Fraction(float(place))))
    return np.array(found)


def test_the_bits_of_two_over_pi():
    expected = (1 << 2600 + 1216 + 1) // PI
    words = [expected >> 64 * at & (1 << 64) - 1 for at in reversed(range(19))]
    assert [0, *words] == list(large_angles._WORDS)


@pytest.mark.parametrize("length", [0, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_doubles_of_any_size(name, length):
    x = angles(FLOAT64)
    x = x[: len(x) // 4 * 4]
    result = run(lambda v: UNARY[name](v, FLOAT64, False, HOST), [x], FLOAT64, length)
    found = errors(name, x, result)
    assert found.max() <= NAMES[name], x[found.argmax()].hex()


@pytest.mark.parametrize("name", NAMES)
def test_singles_of_any_size(name):
    x = angles(FLOAT32)
    result = run(lambda v: UNARY[name](v, FLOAT32, False, HOST), [x], FLOAT32)
    found = errors(name, x, result)
    assert found.max() <= (2.8 if name == "tan" else 1.5), x[found.argmax()]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_narrow_numbers_of_any_size(name, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    x = every[np.isfinite(every.astype(np.float32)) & (np.abs(every.astype(np.float32)) > 100)]
    x = x[:: 37 if dtype == FLOAT16 else 11]
    result = run(lambda v: UNARY[name](v, dtype, False, HOST), [x], dtype)
    expected = [float(exact(name, float(one))) for one in x.astype(np.float64)]
    rounded = np.array(expected).astype(dtype).astype(np.float64)
    got = result.astype(np.float64)
    bits = 8 if dtype == BFLOAT16 else 11
    # One rounding of a float32: the neighbour is as good as the nearest only halfway between.
    place = 2.0 ** (np.floor(np.log2(np.abs(rounded))) - bits + 1)
    assert np.all(np.abs(got - expected) <= 0.51 * place)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number(name):
    x = np.array([np.inf, -np.inf, np.nan, 1e300, np.nan, 1.0], FLOAT64)
    for length in (0, 2):
        result = run(lambda v: UNARY[name](v, FLOAT64, False, HOST), [x], FLOAT64, length)
        assert np.isnan(result).tolist() == [True, True, True, False, True, False]


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("name", NAMES)
def test_in_kernels(name, semantics):
    """Arguments of all sizes side by side; the reduction of large ones is in the code once."""
    with jax.enable_x64(True):
        x = angles(FLOAT64, count=1024 - len(HARD) - 5)
        rng = np.random.default_rng(3)
        x[rng.integers(0, 1000, 500)] = rng.normal(0, 10, 500)

        def body(x_ref, o_ref):
            o_ref[...] = getattr(jnp, name)(x_ref[...])

        params = plgpu.CompilerParams(lowering_semantics=semantics)
        kernel = plgpu.kernel(body, out_type=jnp.asarray(x), compiler_params=params)
        ptx = pallasite.compile(kernel, jnp.asarray(x)).ptx
        result = np.asarray(kernel(jnp.asarray(x)))
    assert ptx.count(".func") == 1
    found = errors(name, x, result)
    assert found.max() <= NAMES[name], x[found.argmax()].hex()
