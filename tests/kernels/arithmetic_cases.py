"""Element-wise arithmetic, comparisons, functions and conversions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.special
from catalog import block_kernel, case, random, whole, wide
from jax import lax

from pallasite import gpu as plgpu

SIZE = 1024
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
INTEGERS = (jnp.int32, jnp.uint32, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)

BINARY = {
    "add": (lax.add, np.add),
    "sub": (lax.sub, np.subtract),
    "mul": (lax.mul, np.multiply),
    "max": (lax.max, np.maximum),
    "min": (lax.min, np.minimum),
}


@case(*[(n, d) for n in BINARY for d in (jnp.float32, jnp.bfloat16, jnp.float16)], tolerance=1e-2)
def float_binary(name, dtype):
    function, reference = BINARY[name]
    x, y = random("x", (SIZE,), dtype), random("y", (SIZE,), dtype)
    return whole(function, (SIZE,), dtype), (x, y), lambda x, y: reference(wide(x), wide(y))


@case(*[(n, d) for n in BINARY for d in INTEGERS])
def integer_binary(name, dtype):
    function, reference = BINARY[name]
    x, y = random("x", (SIZE,), dtype, 0, 10), random("y", (SIZE,), dtype, 0, 10)
    return whole(function, (SIZE,), dtype), (x, y), reference


@case(jnp.int32, jnp.uint32, jnp.int8)
def integer_division(dtype):
    x = random("x", (SIZE,), dtype)
    y = random("y", (SIZE,), dtype, 1, 13)
    kernel = whole(lambda x, y: lax.div(x, y) * 16 + lax.rem(x, y), (SIZE,), dtype)

    def reference(x, y):
        quotient = np.trunc(x.astype(np.float64) / y).astype(np.int64)
        remainder = x.astype(np.int64) - quotient * y
        return (quotient * 16 + remainder).astype(x.dtype)

    return kernel, (x, y), reference


@case(jnp.float32, jnp.float16, jnp.bfloat16, tolerance=1e-2)
def float_division(dtype):
    x, y = random("x", (SIZE,), dtype), random("y", (SIZE,), dtype, 0.5, 2.0)
    return whole(lax.div, (SIZE,), dtype), (x, y), lambda x, y: wide(x) / wide(y)


@case(*[(n, d) for n in ("lt", "le", "gt", "ge", "eq", "ne") for d in (jnp.float32, jnp.int32)])
def comparison(name, dtype):
    function = getattr(lax, name)
    x, y = random("x", (SIZE,), dtype, -3, 3), random("y", (SIZE,), dtype, -3, 3)
    if dtype == jnp.float32:
        x, y = np.round(x), np.round(y)
        x[::7] = np.nan
    references = dict(
        lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal,
        ne=np.not_equal,
    )  # fmt: skip
    kernel = whole(lambda x, y: function(x, y).astype(jnp.int32), (SIZE,), jnp.int32)
    return kernel, (x, y), lambda x, y: references[name](x, y).astype(np.int32)


@case(
    *[(n, d) for n in ("bitwise_and", "bitwise_or", "bitwise_xor") for d in (jnp.int32, jnp.int8)]
)
def bitwise(name, dtype):
    function = getattr(lax, name)
    x, y = random("x", (SIZE,), dtype), random("y", (SIZE,), dtype)
    return whole(function, (SIZE,), dtype), (x, y), getattr(np, name)


@case(jnp.int32, jnp.uint32)
def shifts(dtype):
    x, y = random("x", (SIZE,), dtype), random("y", (SIZE,), dtype, 0, 31)
    kernel = whole(
        lambda x, y: lax.shift_left(x, y) ^ lax.shift_right_logical(x, y), (SIZE,), dtype
    )

    def reference(x, y):
        unsigned = x.astype(np.uint32)
        shift = y.astype(np.uint32)
        return ((unsigned << shift) ^ (unsigned >> shift)).astype(x.dtype)

    return kernel, (x, y), reference


UNARY = {
    "neg": (lax.neg, np.negative, -4, 4),
    "abs": (lax.abs, np.abs, -4, 4),
    "sign": (lax.sign, np.sign, -4, 4),
    "floor": (lax.floor, np.floor, -4, 4),
    "ceil": (lax.ceil, np.ceil, -4, 4),
    "exp": (lax.exp, np.exp, -20, 20),
    "exp2": (lax.exp2, np.exp2, -20, 20),
    "expm1": (lax.expm1, np.expm1, -2, 4),
    "log": (lax.log, np.log, 1e-3, 100),
    "log1p": (lax.log1p, np.log1p, -0.5, 100),
    "sqrt": (lax.sqrt, np.sqrt, 0, 100),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), 0.01, 100),
    "sin": (lax.sin, np.sin, -100, 100),
    "cos": (lax.cos, np.cos, -100, 100),
    "tan": (lax.tan, np.tan, -1, 1),
    "tanh": (lax.tanh, np.tanh, -4, 4),
    "logistic": (lax.logistic, scipy.special.expit, -10, 10),
    "erf": (lax.erf, scipy.special.erf, -3, 3),
    "cbrt": (lax.cbrt, np.cbrt, -10, 10),
    "atan": (lax.atan, np.arctan, -10, 10),
    "asin": (lax.asin, np.arcsin, -1, 1),
    "acos": (lax.acos, np.arccos, -1, 1),
    "sinh": (lax.sinh, np.sinh, -4, 4),
    "cosh": (lax.cosh, np.cosh, -4, 4),
}


@case(*UNARY, tolerance=1e-6)
def unary_float32(name):
    function, reference, low, high = UNARY[name]
    x = random(name, (SIZE,), jnp.float32, low, high)
    return whole(function, (SIZE,), jnp.float32), (x,), lambda x: reference(wide(x))


@case("exp", "log", "tanh", "sin", "rsqrt", "logistic", tolerance=2e-3)
def unary_approximate(name):
    function, reference, low, high = UNARY[name]
    low, high = max(low, -3), min(high, 3)
    x = random(name, (SIZE,), jnp.float32, low, high)
    params = plgpu.CompilerParams(approx_math=True)
    kernel = whole(function, (SIZE,), jnp.float32, compiler_params=params)
    return kernel, (x,), lambda x: reference(wide(x))


@case("exp", "tanh", "log", "neg", tolerance=1e-2)
def unary_bfloat16(name):
    function, reference, low, high = UNARY[name]
    x = random(name, (SIZE,), jnp.bfloat16, max(low, 0.01), min(high, 4))
    return whole(function, (SIZE,), jnp.bfloat16), (x,), lambda x: reference(wide(x))


@case(2, 3, 4, -1, -2, 0, tolerance=1e-5)
def integer_power(exponent):
    x = random("x", (SIZE,), jnp.float32, 0.5, 2)
    kernel = whole(lambda x: lax.integer_pow(x, exponent), (SIZE,), jnp.float32)
    return kernel, (x,), lambda x: wide(x) ** exponent


@case(tolerance=1e-5)
def power_and_arc_tangent():
    x = random("x", (SIZE,), jnp.float32, 0.1, 3)
    y = random("y", (SIZE,), jnp.float32, -3, 3)
    kernel = whole(lambda x, y: lax.pow(x, y) + lax.atan2(y, x), (SIZE,), jnp.float32)
    return kernel, (x, y), lambda x, y: wide(x) ** wide(y) + np.arctan2(wide(y), wide(x))


@case()
def nan_propagates_through_max():
    x, y = random("x", (SIZE,), jnp.float32), random("y", (SIZE,), jnp.float32)
    x[::5] = np.nan
    y[::7] = np.nan
    kernel = whole(lambda x, y: lax.max(x, y) - lax.min(x, y), (SIZE,), jnp.float32)
    return kernel, (x, y), lambda x, y: np.maximum(x, y) - np.minimum(x, y)


CONVERSIONS = (
    jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32, jnp.float16, jnp.bfloat16,
    jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2,
)  # fmt: skip


@case(*[(a, b) for a in CONVERSIONS for b in CONVERSIONS if a != b])
def conversion(source, target):
    x = random("x", (SIZE,), source)
    kernel = whole(lambda x: lax.convert_element_type(x, target), (SIZE,), target)

    def reference(x):
        y = np.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(target, jnp.integer):
            info = jnp.iinfo(target)
            return np.clip(np.trunc(wide(y)), int(info.min), int(info.max)).astype(target)
        return y.astype(target)

    return kernel, (x,), reference


@case(jnp.int32, jnp.uint8)
def saturating_conversion(target):
    x = np.resize(
        np.float32([np.nan, np.inf, -np.inf, 3e9, -3e9, 1.9, -1.9, 255.5, 300, -1, 0]), (SIZE,)
    )
    kernel = whole(lambda x: x.astype(target), (SIZE,), target)

    def reference(x):
        info = np.iinfo(target)
        clipped = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), info.min, info.max)
        return np.trunc(clipped).astype(target)

    return kernel, (x,), reference


@case((jnp.float32, jnp.int32), (jnp.bfloat16, jnp.uint16), (jnp.int8, jnp.uint8))
def bitcast(source, target):
    x = random("x", (SIZE,), source)
    kernel = whole(lambda x: lax.bitcast_convert_type(x, target), (SIZE,), target)
    return kernel, (x,), lambda x: x.view(target)


@case(tolerance=1e-6)
def scalar_operands():
    x = random("x", (SIZE,), jnp.float32)
    kernel = whole(lambda x: 2.0 * x + (1 - x) / 4.0, (SIZE,), jnp.float32)
    return kernel, (x,), lambda x: 2.0 * wide(x) + (1 - wide(x)) / 4.0


@case((7,), (96,), (130,), (3, 5), (4, 96), (2, 3, 64))
def odd_shapes(*shape):
    x = random("x", shape, jnp.int32)
    return whole(lambda x: x * 3 + 1, shape, jnp.int32), (x,), lambda x: x * 3 + 1


@case(jnp.int4, jnp.uint4)
def narrow_integers(dtype):
    x = random("x", (SIZE,), jnp.int32, 0, 7).astype(dtype)
    kernel = whole(lambda x: x.astype(jnp.int8) * 2, (SIZE,), jnp.int8)
    return kernel, (x,), lambda x: x.astype(np.int8) * 2


@case(tolerance=1e-3)
def gelu_chain():
    x = random("x", (8, SIZE), jnp.bfloat16)

    @block_kernel((8, SIZE), jnp.bfloat16, grid=(8,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        row = lax.axis_index("row")
        x = x_ref[row].astype(jnp.float32)
        o_ref[row] = jax.nn.gelu(x).astype(jnp.bfloat16)

    def reference(x):
        y = wide(x)
        return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))

    return kernel, (x,), lambda x: reference(x).astype(ml_dtypes.bfloat16)
