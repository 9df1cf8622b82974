"""``pallasite.ops.top_k`` agrees with ``jax.lax.top_k``, also where elements are equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_support import on, random

import pallasite.ops
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_std.ops.rows.queues import queues_of

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "target"),
    [
        ((3, 5, 64), 8, "bfloat16", "sm_100a"),
        ((2, 3000), 3, "float32", "sm_90a"),  # Warpgroups share a row.
        ((1, 70001), 2, "float16", "sm_90"),  # A row does not fit registers.
        ((7, 13), 13, "float16", "sm_120a"),
        ((1,), 1, "float32", "sm_90a"),
        ((4097,), 9, "float32", "sm_120a"),  # Nothing follows the only row in memory.
        ((1, 3001), 18, "bfloat16", "sm_90a"),
    ],
)
def test_shapes(shape, k, dtype, target):
    x = random(1, shape, dtype)
    with on(target):
        values, indices = pallasite.ops.top_k(x, k)
    expected, places = jax.lax.top_k(x, k)
    assert values.dtype == x.dtype and indices.dtype == jnp.int32
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, places)


@settings(max_examples=5)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_equal_elements(columns, seed):
    """The lowest column first; infinities of both signs are elements like others."""
    rng = np.random.default_rng(seed)
    x = rng.choice(np.array([-np.inf, -1.0, 2.0, np.inf], np.float32), (6, columns))
    k = int(rng.integers(1, columns + 1))
    dtype = [jnp.float32, jnp.bfloat16, jnp.float16][seed % 3]
    with on("sm_90a"):
        values, indices = pallasite.ops.top_k(jnp.asarray(x, dtype), k)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


@pytest.mark.parametrize(("columns", "dtype"), [(33000, jnp.bfloat16), (33001, jnp.float32)])
def test_equal_elements_of_long_rows(columns, dtype):
    """Segments of a row do not change the order, nor what is returned for zeros and NaN."""
    rng = np.random.default_rng(2)
    few = np.array([-np.inf, -1, -0.0, 0.0, 2, np.nan, np.inf], np.float32)
    x = rng.choice(few, (2, columns), p=[0.9, 0.0992, 2e-4, 2e-4, 2e-4, 1e-4, 1e-4])
    k = 20
    values, indices = pallasite.ops.top_k(jnp.asarray(x, dtype), k)
    order = np.argsort(-np.where(np.isnan(x), np.inf, x), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, order)
    wanted, values = np.take_along_axis(x, order, 1), np.asarray(values, np.float32)
    np.testing.assert_array_equal(values, wanted)
    assert (np.signbit(values) == np.signbit(wanted)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("columns", [4096, 3001])
@pytest.mark.parametrize("where", ["neighbours", "columns of a lane", "anywhere"])
def test_queues(where, columns, dtype):
    """The largest elements are all in one part of a row, whose queue does not hold them, or not;
    some are equal."""
    rng = np.random.default_rng(columns)
    x = rng.normal(size=(3, columns)).astype(np.float32)
    step = 1024 if columns == 4096 else 128
    few = {"neighbours": slice(8, 16), "columns of a lane": slice(5, None, step)}
    if where in few:
        x[:, few[where]] += 10
        x[1, few[where]] = 12
    x = jnp.asarray(x, dtype)
    with on("sm_90a"):
        values, indices = pallasite.ops.top_k(x, 20)
    expected, places = jax.lax.top_k(x, 20)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(values, expected)


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.sampled_from([(1024, 128, 2), (96, 4, 8), (60, 4, 1), (140, 4, 1)])
)
def test_queues_of_parts(seed, sizes):
    """Queues have the largest elements of each part, of equal ones the lower columns first."""
    width, parts, vector = sizes
    keys = np.random.default_rng(seed).integers(0, 9, width)
    columns = np.arange(width)
    queues = queues_of((jnp.asarray(keys), jnp.asarray(columns)), parts, vector)
    for part in range(parts):
        mine = columns[columns // vector % parts == part]
        wanted = mine[np.lexsort((mine, -keys[mine]))][: len(queues)]
        np.testing.assert_array_equal([int(one[part]) for _, one in queues], wanted)


def test_nan_and_derivatives():
    x = jnp.asarray([[1.0, jnp.nan, 3.0, 2.0]])
    with on("sm_100a"):
        values, indices = pallasite.ops.top_k(x, 2)
        gradient = jax.grad(lambda x: (pallasite.ops.top_k(x, 2)[0] ** 2).sum())(x[:, 2:])
    np.testing.assert_array_equal(indices, [[1, 2]])
    np.testing.assert_array_equal(values, [[np.nan, 3.0]])
    np.testing.assert_array_equal(gradient, [[6.0, 4.0]])


def test_nothing_and_errors():
    x = jnp.zeros((3, 4))
    with on("sm_90a"):
        assert [one.shape for one in pallasite.ops.top_k(x, 0)] == [(3, 0)] * 2
        with pytest.raises(InvalidValueError, match="k does not fit the rows"):
            pallasite.ops.top_k(x, 5)
        with pytest.raises(InvalidTypeError, match="x does not fit"):
            pallasite.ops.top_k(x.astype(jnp.int32), 1)
