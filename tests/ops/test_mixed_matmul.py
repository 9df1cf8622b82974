"""Mixed-precision GEMM by ``pallasite.ops`` agree with float64 on every target."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import TARGETS, error, exact, on, random

import pallasite.ops
import pallasite_std.ops
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_std.ops import MatmulConfig

pytestmark = pytest.mark.runs_kernels


def weights(seed, shape, dtype):
    if "int4" in dtype:
        low = -8 if dtype == "int4" else 0
        numbers = np.random.default_rng(seed).integers(low, low + 16, shape)
        return jnp.asarray(numbers.astype(dtype))
    return random(seed, shape, dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    """A program that names no chip."""
    a, b, scales = random(1, (20, 72), "bfloat16"), weights(2, (72, 50), "int8"), jnp.arange(50.0)
    with on(target):
        result = pallasite.ops.mixed_matmul(a, b, scales=scales)
    assert error(result, exact(a) @ exact(b) * exact(scales)) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "transpose"),
    [
        ("uint8", True),
        ("float8_e4m3fn", False),
        ("float8_e5m2", True),
        ("int4", True),
        ("uint4", False),
    ],
)
def test_dtypes(dtype, transpose):
    """All weights, either way round."""
    a, b = random(1, (33, 70), "float16"), weights(2, (41, 70) if transpose else (70, 41), dtype)
    with on("sm_100a"):
        result = pallasite.ops.mixed_matmul(a, b, transpose_b=transpose, out_dtype=jnp.float32)
    assert error(result, exact(a) @ (exact(b).T if transpose else exact(b))) < 1e-5


@pytest.mark.parametrize(
    ("group", "dtype"), [(64, "int8"), (16, "int8"), (24, "int8"), (5, "int8"), (8, "int4")]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_groups(group, dtype, transpose):
    """Factors of groups of any size, on Hopper too; they are rounded to float16."""
    k, n = 2 * group, 40
    a, b = random(1, (18, k), "float16"), weights(2, (n, k) if transpose else (k, n), dtype)
    scales = random(3, (2, n), "float16").astype(jnp.float32) * 2**-6
    with on("sm_90a" if transpose else "sm_120a"):
        result = pallasite.ops.mixed_matmul(a, b, scales=scales, transpose_b=transpose)
    matrix = exact(b).T if transpose else exact(b)
    assert error(result, exact(a) @ (matrix * np.repeat(exact(scales), group, 0))) < 1e-3


@pytest.mark.parametrize("transpose", [False, True])
def test_weights_of_4_bits_are_converted_alone(transpose):
    """XLA's kernels for GPUs that convert 4 bits and transpose, too, can be wrong."""
    a, b = random(1, (5, 16), "bfloat16"), weights(2, (3, 16) if transpose else (16, 3), "int4")

    def function(a, b, scales):
        return pallasite.ops.mixed_matmul(a, b, scales=scales, transpose_b=transpose)

    with on("sm_90"):
        lines = str(jax.make_jaxpr(function)(a, b, jnp.ones((2, 3)))).splitlines()
    conversions = [n for n, line in enumerate(lines) if "convert_element_type" in line]
    # Neither what it converts nor what becomes of that is joined to other operations.
    (place,) = [n for n in conversions if re.search(r":i8\[[\d,]+\] = ", lines[n])]
    assert "optimization_barrier" in lines[place - 1]
    assert any("optimization_barrier" in line for line in lines[place + 1 : place + 6])


def test_configuration():
    """A configuration of the portable product is served by it, on Hopper too."""
    a, b = random(1, (20, 64), "bfloat16"), weights(2, (64, 64), "int8")
    with on("sm_90a"):
        result = pallasite.ops.mixed_matmul(a, b, config=MatmulConfig(tile_m=32, tile_n=32))
    assert error(result, exact(a) @ exact(b)) < 4e-3


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("groups", [0, 1])
def test_sums_over_nothing(target, groups):
    a, b = jnp.ones((3, 0), jnp.bfloat16), jnp.ones((0, 8), jnp.int8)
    with on(target):
        assert not pallasite.ops.mixed_matmul(a, b, scales=jnp.ones((groups, 8))).any()


def test_errors():
    """What no implementation takes is refused with values and what is expected."""
    a, b = random(1, (8, 16), "float16"), weights(2, (16, 8), "int8")
    for target in ("sm_90a", "sm_100a"):
        with on(target):
            with pytest.raises(InvalidValueError, match="same extent along k"):
                pallasite.ops.mixed_matmul(a, b, transpose_b=True)
            with pytest.raises(InvalidTypeError, match="b has a dtype that this product"):
                pallasite.ops.mixed_matmul(a, b.astype(jnp.int16))
            with pytest.raises(InvalidValueError, match="scales do not fit the weights"):
                pallasite.ops.mixed_matmul(a, b, scales=jnp.ones((3, 8)))
            with pytest.raises(InvalidValueError, match=r"got: \(0, 8\)"):
                pallasite.ops.mixed_matmul(a, b, scales=jnp.ones((0, 8)))
    with pytest.raises(InvalidTypeError, match="config is not of type MatmulConfig"):
        pallasite_std.ops.mixed_matmul(a, b, config="fast")
