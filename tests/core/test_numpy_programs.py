"""What NumPy makes of programs of JAX is what XLA makes of them, types included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from tests import numpy_programs

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is of the CPU")


def random(dtype, *shape, seed=0):
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "biu":
        return jnp.asarray(generator.integers(-100, 100, shape).astype(dtype))
    return jnp.asarray(generator.standard_normal(shape).astype(dtype))


def tolerance(dtype):
    return 4 * float(ml_dtypes.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0


def check(function, *operands):
    program = jax.jit(function)
    traced = program.trace(*operands).jaxpr
    assert numpy_programs._program(traced) is not None, traced
    got, expected = program(*operands), program.lower(*operands).compile()(*operands)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.aval == other.aval and one.aval.weak_type == other.aval.weak_type
        wide = [np.asarray(array).astype(np.float64) for array in (one, other)]
        limit = tolerance(one.dtype)
        np.testing.assert_allclose(*wide, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_functions(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = random(dtype, 3, 5), random(dtype, 3, 5, seed=1)
        special = jnp.asarray([0.0, -0.0, 2.5, -3.5, np.inf, -np.inf, np.nan], dtype)
        together = jnp.concatenate([x.ravel(), special])
        check(
            lambda x: [
                *(jnp.exp(x), jnp.tanh(x), jnp.sin(x), jnp.cos(x), jnp.expm1(x), jnp.exp2(x)),
                *(jnp.log(abs(x)), jnp.log1p(abs(x)), jnp.sqrt(abs(x)), lax.rsqrt(abs(x))),
                *(jax.nn.sigmoid(x), lax.erf(x), lax.erfc(x), x**3, abs(x) ** 0.3, lax.square(x)),
            ],
            x,
        )
        check(
            lambda x: [
                *(jnp.floor(x), jnp.ceil(x), jnp.round(x), lax.round(x), jnp.isfinite(x), x > 1),
                *(jnp.maximum(x, 1), jnp.minimum(x, -1), jnp.clip(x, -1, 2), -x, abs(x), x != 0),
                *(jnp.where(x < 0, x, 2), x == x, x.astype(bool), x.astype("int8")),
                *(x.astype("uint16"), x.astype("int32"), x.astype("float32"), x.astype("float16")),
            ],
            together,
        )
        check(lambda x, y: (x + y, x - y, x * y, x / y, jnp.power(abs(x), y), x <= y), x, y)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32", "bool"])
def test_integers(dtype):
    x, y = random(dtype, 40), random(dtype, 40, seed=1)
    check(lambda x, y: (x & y, x | y, x ^ y, ~x, x < y, x == y, jnp.maximum(x, y)), x, y)
    check(lambda x: [x.astype(one) for one in ("float32", "bfloat16", "int8", "uint32")], x)
    if dtype != "bool":
        y = y.at[:3].set(0)
        check(lambda x, y: (x + y, x - y, x * y, lax.div(x, y), x**2, -x, x.sum(), x.prod()), x, y)
        check(lambda x, y: (x << (y & 7), lax.shift_right_arithmetic(x, y & 7), x // 3), x, y)
        check(lambda x, y: (lax.shift_right_logical(x, y & 7), x % 3, lax.rem(x, y)), x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_shapes_and_sums(dtype):
    x, n = random(dtype, 3, 4, 5), jnp.asarray([2, 0, 7, -1])
    check(
        lambda x: [
            *(x.reshape(5, 12), x.transpose(2, 0, 1), x[1:, ::2, 4], x[None], x[:, ::-1]),
            *(jnp.broadcast_to(x[:, :1], x.shape), jnp.concatenate([x, x[:1]]), jnp.split(x, 2, 1)),
            *(
                jnp.pad(x, 2),
                lax.pad(x, x[0, 0, 0], [(1, -2, 1), (-1, 2, 0), (0, 0, 2)]),
                jnp.stack([x, x], 2),
            ),
            *(jnp.sort(x, 1), jnp.argsort(x, 2), jnp.tile(x, (2, 1, 3)), list(x)),
            *(jnp.arange(7), lax.broadcasted_iota("int32", (2, 3), 1), jnp.ones(3), x + 1),
        ],
        x,
    )
    check(
        lambda x: [
            *(x.sum((0, 2)), x.max(1), x.min(), (x > 0).any(0), (x > 0).all(), x.argmax(1)),
            *(x.argmin(2), jnp.cumsum(x.astype("float32"), 1)),
            jnp.cumsum(x.astype("float32"), 0)[::-1],
        ],
        x,
    )
    check(
        lambda x, n: [
            *(x[n[0]], x[:, n], x[n[:2], n[1:3]], jnp.take(x, n, axis=1, mode="clip")),
            lax.dynamic_slice(x, (n[2], n[3], n[0]), (2, 2, 2)),
            lax.dynamic_update_slice(x, x[:1, :2], (n[2], n[3], n[0])),
            jnp.take_along_axis(x, n[None, :, None], 2),
            *(x.at[n].set(x[0]), x.at[:, 1, n].set(0), x.astype("float32").at[0, n, n].max(0.1)),
        ],
        x,
        n,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_products_and_derivatives(dtype):
    x, y = random(dtype, 3, 4, 5), random(dtype, 3, 5, 4, seed=1)
    check(
        lambda x, y: [
            *(x @ y, jnp.einsum("abc,dce->ebad", x, y), jnp.tensordot(x[0], y[0], ([0], [1]))),
            jnp.einsum("abc,ace->abe", x, y, preferred_element_type="float32"),
        ],
        x,
        y,
    )
    x, labels = random("float32", 3, 6), jnp.asarray([1, 5, 9])

    def loss(x):
        chosen = jnp.take_along_axis(x, labels[:, None] % 6, 1)[:, 0]
        scale = x[jnp.asarray([0, 0, 2])].prod(1) + jax.nn.gelu(x).sum(1)
        return jnp.sum(
            (jax.nn.logsumexp(x, 1) - chosen) * jax.nn.relu(scale) + jax.nn.silu(x[:, 0])
        )

    check(jax.value_and_grad(loss), x)


def test_random_numbers():
    key = jax.random.key(7)
    check(lambda key: [jax.random.bits(key, (3, 5), f"uint{n}") for n in (8, 16, 32)], key)

    def drawn(key):
        _, other = jax.random.split(key)
        return [
            *(jax.random.normal(key, (700,)), jax.random.uniform(key, (2, 3), "bfloat16")),
            *(jax.random.randint(key, (9,), -4, 70), jax.random.bernoulli(key, 0.3, (5,))),
            jax.random.normal(other, (4,), "float16"),
        ]

    check(drawn, key)
    check(jax.random.key_data, key)


def test_memory_of_others():
    """Results share none with operands; those that were given away are refused."""
    given = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    result = jax.jit(lambda x: (x, x.T, x[1:]))(given)
    given[:] = 0
    assert [float(one[-1, -1]) for one in result] == [11.0] * 3
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        _ = x + 1


def test_what_xla_compiles():
    """Loops, small floats, keys that are returned, and programs with effects."""
    x = random("float32", 4)
    for function in (
        lambda x: lax.fori_loop(0, 3, lambda _, y: y * x, x),
        lambda x: x.astype("float8_e4m3fn").astype("float32"),
        lambda x: jax.pure_callback(lambda y: y, x, x),
        lambda x: jax.random.split(jax.random.key(x[0].astype(int))),
    ):
        assert numpy_programs._program(jax.jit(function).trace(x).jaxpr) is None
    assert float(jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y + x, x))(2.0)) == 8.0
