"""``pallasite.ops.matmul`` on targets with tensor memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import InvalidTypeError, InvalidValueError, ops
from pallasite.plugin import find_target
from pallasite_blackwell.ops.config import MatmulConfig, default_config, matmul_configs

SMALL = MatmulConfig(tile_n=64, stages=2)
PAIR = MatmulConfig(tile_n=64, stages=2, pair=True)


def random(seed, shape, dtype):
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return jnp.asarray(generator.integers(-128, 128, shape).astype(dtype))
    return jnp.asarray(generator.standard_normal(shape).astype(dtype))


def exact(array):
    return np.asarray(array).astype(np.float64)


def error(result, expected):
    return np.linalg.norm(exact(result) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("config", [SMALL, PAIR], ids=["block", "pair"])
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        ("bfloat16", 4e-3),
        ("float16", 4e-4),
        ("float32", 2e-3),
        ("float8_e4m3fn", 4e-3),
        ("int8", 0),
    ],
)
def test_dtypes_and_odd_extents(dtype, limit, config):
    a, b = random(0, (140, 200), dtype), random(1, (200, 70), dtype)
    with pallasite.target("sm_100a"):
        result = ops.matmul(a, b, config=config)
    assert error(result, exact(a) @ exact(b)) <= limit


@pytest.mark.parametrize("config", [SMALL, PAIR], ids=["block", "pair"])
def test_transposed_operands_and_the_epilogue(config):
    a, b = random(0, (72, 300), "float16"), random(1, (96, 72), "float16")
    rows, bias = random(2, (300,), "float32"), random(3, (96,), "float32")
    residual = random(4, (300, 96), "float32")
    with pallasite.target("sm_100a"):
        result = ops.matmul(
            a, b, transpose_a=True, transpose_b=True, row_scale=rows, column_scale=0.5, bias=bias,
            activation=jax.nn.relu, residual=residual, out_dtype=jnp.float32, config=config,
        )  # fmt: skip
    scaled = exact(a).T @ exact(b).T * exact(rows)[:, None] * 0.5
    assert error(result, np.maximum(scaled + exact(bias), 0) + exact(residual)) < 1e-5


@pytest.mark.parametrize(("tile_n", "pair"), [(192, True), (192, False), (96, False)])
def test_tiles_that_rows_of_128_bytes_do_not_divide(tile_n, pair):
    a, b = random(0, (130, 72), "float16"), random(1, (72, 200), "float16")
    with pallasite.target("sm_100a"):
        result = ops.matmul(a, b, config=MatmulConfig(tile_n=tile_n, stages=2, pair=pair))
    assert error(result, exact(a) @ exact(b)) <= 4e-4


def test_a_configuration_is_chosen():
    for target in ("sm_100a", "sm_103a", "sm_110a"):
        assert [one.plugin for one in ops.implementations("matmul", find_target(target))] == [
            "blackwell",
            "standard",
        ]
    configs = matmul_configs(4096, 4096, 2)
    assert all(config.fits(2) for config in configs) and len(configs) == len(set(configs))
    assert default_config(8192, 8192, 2, 148).pair and not default_config(64, 4096, 2, 148).pair
    with pallasite.target("sm_100a"):
        a, b = random(0, (16, 64), "bfloat16"), random(1, (64, 40), "bfloat16")
        assert error(ops.matmul(a, b), exact(a) @ exact(b)) < 4e-3


def test_integers_where_the_tensor_core_has_none():
    """The portable implementation serves them."""
    a, b = random(0, (16, 32), "int8"), random(1, (32, 16), "int8")
    with pallasite.target("sm_103a"):
        np.testing.assert_array_equal(ops.matmul(a, b), exact(a) @ exact(b))


def test_gradients():
    a, b = random(0, (40, 48), "float16"), random(1, (48, 32), "float16")

    def loss(product, *args):
        return jnp.sum(jnp.sin(product(*args).astype(jnp.float32)))

    expected = jax.grad(lambda *x: loss(jnp.matmul, *x), argnums=(0, 1))(a, b)
    with pallasite.target("sm_100a"):
        found = jax.grad(lambda *x: loss(ops.matmul, *x), argnums=(0, 1))(a, b)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and error(ours, exact(theirs)) < 2e-2


def test_errors():
    a, b = random(0, (16, 32), "float16"), random(1, (32, 16), "float16")
    with pallasite.target("sm_100a"):
        with pytest.raises(InvalidTypeError, match="not accumulated in float16"):
            wide = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
            ops.matmul(*wide, accumulator=jnp.float16)
        with pytest.raises(InvalidTypeError, match="does not multiply this dtype"):
            ops.matmul(a.astype(jnp.int16), b)
    with pytest.raises(InvalidValueError, match="tile_n"):
        MatmulConfig(tile_n=32, pair=True)
    with pytest.raises(InvalidValueError, match="epilogue_n"):
        MatmulConfig(tile_n=96, epilogue_n=64)
