"""Every element-wise primitive compiles for every element type, for arrays and in single warps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kernels import array, compile_to_ptx, make
from pallasite.language.params import CompilerParams
from pallasite_std.pipelines.helpers import warp_map

INTEGERS = ("int4", "uint4", *(f"{sign}int{n}" for n in (8, 16, 32, 64) for sign in ("", "u")))
FLOATS = (
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "float32",
    "float64",
)
DTYPES = ("bool", *INTEGERS, *FLOATS)
WAYS = [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in FLOATS)]
"""Functions of floats may be approximate."""

FUNCTIONS = """abs acos acosh asin asinh atan atanh bitwise_not cbrt ceil clz cos cosh erf erf_inv
    erfc exp exp2 expm1 floor is_finite log log1p logistic neg population_count round rsqrt sign
    sin sinh sqrt square tan tanh"""
OPERATIONS = """add atan2 bitwise_and bitwise_or bitwise_xor div eq ge gt le lt max min mul ne pow
    rem shift_left shift_right_arithmetic shift_right_logical sub"""


def conversions(x):
    """To every type and, through it, on."""
    return [lax.convert_element_type(x, jnp.dtype(name)) for name in DTYPES]


def flow(x, y):
    """Branches, loops and calls that carry values of the type."""
    less = jnp.all(x < y) if x.shape else x < y
    chosen = lax.cond(less, lambda a, b: b, lambda a, b: lax.max(a, b), x, y)
    rotated = lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (x, y))[0]
    _, ended, _ = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] * 2 + 1, c[2], c[1]), (less.astype(jnp.int32), x, y)
    )
    return [chosen, rotated, ended, jax.jit(lax.min)(x, y), lax.optimization_barrier(x)]


def results(x, y):
    """What all primitives that take the type make of two values."""
    found = [*conversions(x), *flow(x, y), lax.clamp(x, y, x), lax.select_n(lax.eq(x, y), x, y)]
    unary = [getattr(lax, name) for name in FUNCTIONS.split()]
    unary += [functools.partial(lax.integer_pow, y=exponent) for exponent in (0, 2, 3, -1)]
    calls = [functools.partial(function, x) for function in unary]
    calls += [functools.partial(getattr(lax, name), x, y) for name in OPERATIONS.split()]
    for call in calls:
        try:
            found.append(call())
        except TypeError:
            continue  # JAX does not define the function for the type.
    return found


def rounded(x):
    return x if x.dtype == jnp.float32 else lax.convert_element_type(x, jnp.float32)


@functools.cache
def count(dtype):
    return len(jax.eval_shape(results, *[jax.ShapeDtypeStruct((), dtype)] * 2))


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("dtype", "approximate"), WAYS)
def test_arrays(dtype, approximate):
    @make((count(dtype), 256), compiler_params=CompilerParams(approx_math=approximate))
    def kernel(x, y, o):
        for number, value in enumerate(results(x[...], y[...])):
            o[number] = rounded(value)

    compile_to_ptx(kernel, *[array(256, dtype=dtype)] * 2)


@pytest.mark.parametrize(("dtype", "approximate"), WAYS)
def test_single_warps(dtype, approximate):
    @make((count(dtype), 4), compiler_params=CompilerParams(approx_math=approximate))
    def kernel(x, y, o):
        def body(warp):
            values = [jnp.asarray(ref[warp]).astype(dtype) for ref in (x, y)]
            for number, value in enumerate(results(*values)):
                o[number, warp] = rounded(value)

        warp_map(body)

    # Elements of 4 bits are no memory that a single thread could access.
    stored = jnp.int8 if "int4" in dtype else dtype
    compile_to_ptx(kernel, *[array(4, dtype=stored)] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype):
    functions = [lax.reduce_max, lax.reduce_min]
    if dtype == "bool":
        functions += [lax.reduce_or, lax.reduce_and, lax.reduce_xor]
    else:
        functions += [lax.reduce_sum, lax.reduce_prod]
    axes = [(0,), (1,), (0, 1)]

    @make((len(functions), 256))
    def kernel(x, o):
        value = x[...]
        for number, function in enumerate(functions):
            columns, rows, all_of_it = (rounded(function(value, axis)) for axis in axes)
            o[number] = columns + all_of_it
            o[number, :16] = rows

    compile_to_ptx(kernel, array(16, 256, dtype=dtype), strict=True)


@pytest.mark.parametrize("approximate", [False, True])
def test_approximate_math_rounds_a_product_and_a_sum_once(approximate):
    @make((128,), jnp.float32, compiler_params=CompilerParams(approx_math=approximate))
    def kernel(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x * 3.0 - x * x

    ptx = compile_to_ptx(kernel, array(128))
    assert ("fma.rn.f32" in ptx) == approximate
