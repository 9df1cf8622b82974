"""Products of groups of rows by ``pallasite.ops`` agree with float64 on every target."""

from __future__ import annotations

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

TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-3}


def reference(a, b, sizes):
    """The product of each group, zeros after all groups."""
    result, row = np.zeros((len(a), b.shape[2])), 0
    for matrix, size in zip(b, sizes, strict=True):
        result[row : row + size] = a[row : row + size] @ matrix
        row += size
    return result


def transposed_reference(a, b, sizes):
    """The product of the rows of each group."""
    result, row = [], 0
    for size in sizes:
        result.append(a[row : row + size].T @ b[row : row + size])
        row += size
    return np.stack(result)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    """Empty groups, groups that share tiles, rows after all groups."""
    a, b, sizes = (
        random(1, (70, 40), "bfloat16"),
        random(2, (4, 40, 50), "bfloat16"),
        [20, 0, 33, 5],
    )
    with on(target):
        result = pallasite.ops.ragged_matmul(a, b, jnp.asarray(sizes))
        transposed = pallasite.ops.transposed_ragged_matmul(a, result, jnp.asarray(sizes))
    assert error(result, reference(exact(a), exact(b), sizes)) < 4e-3
    assert not np.any(exact(result)[58:])
    assert error(transposed, transposed_reference(exact(a), exact(result), sizes)) < 4e-3


@pytest.mark.parametrize("target", TARGETS)
def test_sizes_that_are_none(target):
    """More rows than there are: kernels end, and groups before the first such one are right."""
    a, b = random(1, (70, 40), "bfloat16"), random(2, (4, 40, 48), "bfloat16")
    c = random(3, (70, 48), "bfloat16")
    sizes = jnp.asarray([20, 30, 2**30, 2**30])
    with on(target):
        result = pallasite.ops.ragged_matmul(a, b, sizes)
        transposed = pallasite.ops.transposed_ragged_matmul(a, c, sizes)
    assert error(result[:50], reference(exact(a), exact(b), [20, 30, 0, 0])[:50]) < 4e-3
    expected = transposed_reference(exact(a), exact(c), [20, 30, 20, 0])
    assert error(transposed[:2], expected[:2]) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "shape", "sizes", "transpose"),
    [
        ("float16", (33, 20, 41), [0, 33], True),
        ("float32", (41, 20, 30), [1, 2, 38], False),
        ("bfloat16", (130, 130, 8), [129], False),
        ("float32", (41, 20, 30), [0, 0], True),
    ],
)
def test_shapes(dtype, shape, sizes, transpose):
    """Extents that divide nothing, dtypes that Hopper's kernel leaves to the portable one."""
    m, k, n = shape
    a, b = (
        random(1, (m, k), dtype),
        random(2, (len(sizes), *((n, k) if transpose else (k, n))), dtype),
    )
    with on("sm_90a" if dtype == "float32" else "sm_120a"):
        result = pallasite.ops.ragged_matmul(
            a, b, jnp.asarray(sizes), transpose_b=transpose, out_dtype=jnp.float32
        )
    matrices = exact(b).swapaxes(1, 2) if transpose else exact(b)
    assert error(result, reference(exact(a), matrices, sizes)) < TOLERANCE[dtype]


def test_rows_of_other_groups_do_not_count():
    """Not even if they are not finite."""
    a = random(1, (40, 24), "float16").at[10:].set(jnp.inf)
    b = random(2, (40, 32), "float16").at[10:].set(jnp.nan)
    with on("sm_90"):
        result = pallasite.ops.transposed_ragged_matmul(a, b, jnp.asarray([4, 6]))
    expected = transposed_reference(exact(a), exact(b), [4, 6])
    assert error(result, expected) < 1e-3


def test_configuration():
    """A configuration of the portable product is served by it, on Hopper too."""
    a, b, sizes = random(1, (50, 64), "bfloat16"), random(2, (2, 64, 64), "bfloat16"), [30, 20]
    config = MatmulConfig(tile_m=32, tile_n=32, stages=2)
    with on("sm_90a"):
        result = pallasite.ops.ragged_matmul(a, b, jnp.asarray(sizes), config=config)
    assert error(result, reference(exact(a), exact(b), sizes)) < 4e-3


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients(transpose):
    """Of both operands, and of both products."""
    sizes = [7, 0, 16]
    a, b = random(1, (30, 24), "float16"), random(2, (3, 24, 24), "float16")
    weights = random(3, (30, 24), "float16")
    with on("sm_100a"):
        _, pullback = jax.vjp(
            lambda a, b: pallasite.ops.ragged_matmul(
                a, b, jnp.asarray(sizes), transpose_b=transpose
            ),
            a,
            b,
        )
        d_a, d_b = pullback(weights)
        _, pullback = jax.vjp(
            lambda a, b: pallasite.ops.transposed_ragged_matmul(a, b, jnp.asarray(sizes)),
            a,
            weights,
        )
        transposed_d_a, transposed_d_b = pullback(b)
    matrices, d_out = exact(b), exact(weights)
    turned = matrices.swapaxes(1, 2)
    pair = (d_out, exact(a)) if transpose else (exact(a), d_out)
    assert error(d_a, reference(d_out, matrices if transpose else turned, sizes)) < 1e-3
    assert error(d_b, transposed_reference(*pair, sizes)) < 1e-3
    assert error(transposed_d_a, reference(d_out, turned, sizes)) < 1e-3
    assert error(transposed_d_b, reference(exact(a), matrices, sizes)) < 1e-3


def test_errors():
    """What no implementation takes is refused with values and what is expected."""
    a, b = random(1, (8, 16), "float16"), random(2, (2, 16, 8), "float16")
    for target in ("sm_90a", "sm_100a"):
        with on(target):
            with pytest.raises(InvalidValueError, match="same extent along k"):
                pallasite.ops.ragged_matmul(a, b, jnp.asarray([1, 2]), transpose_b=True)
            with pytest.raises(InvalidTypeError, match="group_sizes is not a vector"):
                pallasite.ops.ragged_matmul(a, b, jnp.asarray([1, 2, 3]))
            with pytest.raises(InvalidTypeError, match="a has a dtype that this product"):
                pallasite.ops.ragged_matmul(a.astype(jnp.int8), b, jnp.asarray([1, 2]))
            with pytest.raises(InvalidValueError, match="same number of rows"):
                pallasite.ops.transposed_ragged_matmul(a, b[0], jnp.asarray([1, 2]))
    with pytest.raises(InvalidTypeError, match="config is not of type MatmulConfig"):
        pallasite_std.ops.ragged_matmul(a, b, jnp.asarray([1, 2]), config=object())
