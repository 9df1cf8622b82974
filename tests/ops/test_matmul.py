"""``pallasite.ops.matmul`` agrees with float64 on every target."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import PORTABLE, TARGETS, error, exact, on, random

import pallasite.ops
import pallasite_std.ops
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_std.ops import MatmulConfig, matmul_configs

pytestmark = pytest.mark.runs_kernels

DTYPES = {
    "bfloat16": ("bfloat16", 4e-3),
    "float16": ("float16", 5e-4),
    "float32": ("float32", 2e-3),  # Multiplied as tf32.
    "int8": ("uint8", 0),
    "float8_e4m3fn": ("float8_e5m2", 4e-3),
}
"""For the dtype of a that of b, and the error that is allowed for."""


def compare(m, n, k, dtype="bfloat16", **options):
    """The relative error of a product."""
    dtype_b = DTYPES[dtype][0]
    ta, tb = options.get("transpose_a", False), options.get("transpose_b", False)
    a = random(1, (k, m) if ta else (m, k), dtype)
    b = random(2, (n, k) if tb else (k, n), dtype_b)
    left, right = exact(a).T if ta else exact(a), exact(b).T if tb else exact(b)
    return error(pallasite.ops.matmul(a, b, **options), left @ right)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    """A program that names no chip."""
    with on(target):
        assert compare(70, 50, 100) < 4e-3


def test_portable_on_hopper():
    """The portable kernel runs on chips that have better ones."""
    a, b = random(1, (70, 100), "bfloat16"), random(2, (100, 50), "bfloat16")
    with on("sm_90a"):
        assert error(pallasite_std.ops.matmul(a, b), exact(a) @ exact(b)) < 4e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64, 128), (33, 70, 41)])
def test_dtypes(dtype, shape):
    """All operands that warps multiply, in even and odd shapes."""
    with on(PORTABLE[len(dtype) % 3]):
        assert compare(*shape, dtype) <= DTYPES[dtype][1]


@pytest.mark.parametrize(("ta", "tb"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_transposes(dtype, ta, tb):
    """Either operand may be given the other way round."""
    with on("sm_90"):
        assert compare(24, 40, 136, dtype, transpose_a=ta, transpose_b=tb) <= DTYPES[dtype][1]


@pytest.mark.parametrize("m", [1, 16, 17, 65, 130])
def test_rows(m):
    """Any number of rows, by tiles of 16, 32, 64 and 128."""
    with on("sm_120a"):
        assert compare(m, 130, 64) < 4e-3


@pytest.mark.parametrize("config", matmul_configs(64, 64)[::5])
def test_configurations(config):
    """Tuning may choose any of them."""
    with on("sm_100a"):
        assert compare(64, 130, 300, config=config) < 4e-3


def test_epilogue():
    """Scales, bias, activation and residual, in this order."""
    a, b = random(1, (70, 64), "float16"), random(2, (64, 90), "float16")
    rows, columns, bias = (random(i, (n,), "float32") for i, n in ((3, 70), (4, 90), (5, 90)))
    residual = random(6, (70, 90), "float32")
    with on("sm_100a"):
        result = pallasite.ops.matmul(
            a,
            b,
            row_scale=rows,
            column_scale=columns,
            bias=bias,
            activation=jax.nn.relu,
            residual=residual,
            out_dtype=jnp.float32,
        )
    scaled = exact(a) @ exact(b) * exact(rows)[:, None] * exact(columns)
    assert error(result, np.maximum(scaled + exact(bias), 0) + exact(residual)) < 1e-5


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_90"])
def test_one_column_with_a_bias(target):
    """A result of one column, and the bias that is added to all of it."""
    a, b = random(1, (40, 64), "float16"), random(2, (64, 1), "float16")
    bias = random(3, (1,), "float32")
    with on(target):
        result = pallasite.ops.matmul(a, b, bias=bias)
    assert result.shape == (40, 1)
    assert error(result, exact(a) @ exact(b) + exact(bias)) < 4e-3


def test_accumulator():
    """Sums may be rounded to float16."""
    with on("sm_90"):
        assert 1e-5 < compare(32, 32, 64, "float16", accumulator=jnp.float16) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients(dtype):
    """Of both operands, the scale and the bias."""
    a, b = random(1, (40, 50), dtype), random(2, (50, 30), dtype)
    scale, bias = random(3, (30,), "float32"), random(4, (30,), "float32")

    def loss(product, *args):
        return jnp.sum(jnp.sin(product(*args).astype(jnp.float32)))

    def ours(a, b, scale, bias):
        return pallasite.ops.matmul(a, b, column_scale=scale, bias=bias, out_dtype=jnp.float32)

    def theirs(a, b, scale, bias):
        product = jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)
        return product * scale + bias

    args = (a, b, scale, bias)
    expected = jax.grad(lambda *x: loss(theirs, *x), argnums=(0, 1, 2, 3))(*args)
    with on("sm_90"):
        gradients = jax.grad(lambda *x: loss(ours, *x), argnums=(0, 1, 2, 3))(*args)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert error(found, exact(wanted)) < 2e-2


def test_errors():
    """What no implementation takes is refused with values and what is expected."""
    a, b = random(1, (16, 32), "float16"), random(2, (32, 16), "float16")
    with on("sm_120a"):
        with pytest.raises(InvalidValueError, match="same extent along k"):
            pallasite.ops.matmul(a, b, transpose_b=True)
        with pytest.raises(InvalidValueError, match="do not multiply this dtype"):
            pallasite.ops.matmul(a.astype(jnp.int16), b)
        with pytest.raises(InvalidValueError, match="not multiplied with each other"):
            pallasite.ops.matmul(a, b.astype(jnp.int8))
        with pytest.raises(InvalidValueError, match="accumulated in float16"):
            pallasite.ops.matmul(
                a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), accumulator=jnp.float16
            )
        with pytest.raises(InvalidTypeError, match="config is not of type MatmulConfig"):
            pallasite.ops.matmul(a, b, config=3)
        with pytest.raises(InvalidTypeError, match="out_dtype is not a dtype of real numbers"):
            pallasite.ops.matmul(a, b, out_dtype=jnp.complex64)
    for wrong in ({"tile_m": 24}, {"tile_m": 16, "tile_n": 40}, {"stages": 1}, {"group": 0}):
        with pytest.raises(InvalidValueError, match=f"MatmulConfig.{list(wrong)[-1]}"):
            MatmulConfig(**wrong)


@dataclasses.dataclass
class _Scaled:
    """A function that cannot be a key."""

    factor: float

    def __call__(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (3, "activation is not a function"),
        (lambda x: x.sum(axis=0), r"the shape that it is given\n  got: \(7,\) of \(5, 7\)"),
        (lambda x: (x, x), "the shape that it is given"),
        (lambda x: None, "got: nothing of"),
        (lambda x: x * jnp.arange(16.0), "cannot be applied to a matrix of any extents"),
        (jax.nn.softmax, "not work element by element: kernels .*\n  got: reduce_max of"),
        (lambda x: jnp.flip(x, 0), "got: rev of the whole array"),
        (lambda x: jnp.roll(x, 1), "got: slice of the whole array"),
        (lambda x: x[:, jnp.zeros(x.shape[1], int)], "got: gather of the whole array"),
        (lambda x: x + jnp.arange(x.shape[1]), "got: iota of the whole array"),
        (
            lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
            "got: random_bits of the whole array",
        ),
        (_Scaled(2.0), "activation has no hash, .*\n  got: a _Scaled"),
    ],
)
def test_activations_that_see_other_elements(activation, message):
    """Kernels would apply them to tiles, whose extents nobody knows."""
    a = random(1, (16, 16), "float16")
    for operation in (
        pallasite.ops.matmul,
        lambda a, b, **o: pallasite.ops.gated_matmul(a, a, b, **o),
        pallasite.ops.gated_activation,
    ):
        with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
            operation(a, a, activation=activation)


def test_activations_of_each_element():
    """Functions of functions, branches, scalars from outside, and dtypes of their own."""
    a, factor = random(1, (16, 16), "float16"), jnp.float32(2)

    def inner(x):  # What has rules of its own, too.
        return jnp.where(x > 0, jax.nn.relu(x) * factor, jnp.exp(x)).astype(jnp.bfloat16)

    twice = jax.vmap(jax.vmap(inner))
    product = exact(a) @ exact(a)
    wanted = np.where(product > 0, 2 * product, np.exp(np.minimum(product, 0)))
    assert error(pallasite.ops.matmul(a, a, activation=twice), wanted) < 5e-3
