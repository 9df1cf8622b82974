"""Products of groups of rows, against products in double precision and jax.lax.ragged_dot."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallasite
from pallasite.codegen.assembler import assemble
from pallasite.codegen.tools import find_tool
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops import (
    RaggedConfig,
    ragged_configs,
    ragged_matmul,
    transposed_ragged_matmul,
)
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.ragged import kernel, transposed_kernel
from pallasite_hopper.ops.ragged.choice import (
    Groups,
    chosen_transposed_config,
    ordered_configs,
    work_of,
)
from pallasite_hopper.ops.ragged.transposed_tiles import widths_of

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
SMALL = RaggedConfig(tile_m=64, tile_n=128, split="n", stages=2, band=2, epilogue_n=32)

TRANSPOSED = {
    "swap": True, "tile_m": 64, "tile_n": 48, "warpgroups": 1, "split": "m", "stages": 3,
    "group": 2, "epilogue_n": 32,
}  # fmt: skip
TWO = TRANSPOSED | {"warpgroups": 2}

ROWS = 200
SIZES = {
    "all in one": [0, 0, 200, 0, 0, 0],
    "whole tiles": [64, 128, 0, 0, 0, 0],
    "empty": [0, 70, 0, 0, 30, 0],
    "ones": [1] * 6,
    "straddling": [63, 65, 1, 66, 0, 5],
    "nothing": [0] * 6,
    "negative": [-40, 20, -1, 130, 0, 20],
}
"""All for one kernel: with and without rows after the last group."""


STATIC = ("transpose_b", "config", "out_dtype")
jitted_ragged = jax.jit(ragged_matmul, static_argnames=STATIC)
jitted_transposed = jax.jit(transposed_ragged_matmul, static_argnames=STATIC[1:])


def normal(seed, shape, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ragged_reference(a, b, sizes, transpose_b=False):
    a, b = a.astype(np.float64), b.astype(np.float64)
    if transpose_b:
        b = b.transpose(0, 2, 1)
    result = np.zeros((a.shape[0], b.shape[2]))
    row = 0
    for matrix, size in zip(b, np.maximum(sizes, 0), strict=True):
        result[row : row + size] = a[row : row + size] @ matrix
        row += size
    return result


def transposed_reference(a, b, sizes):
    a, b = a.astype(np.float64), b.astype(np.float64)
    result = np.zeros((len(sizes), a.shape[1], b.shape[1]))
    row = 0
    for group, size in enumerate(np.maximum(sizes, 0)):
        result[group] = a[row : row + size].T @ b[row : row + size]
        row += size
    return result


def check(result, expected, dtype=np.float32):
    result = np.asarray(result)
    assert result.shape == expected.shape and result.dtype == dtype
    tolerance = {np.dtype(np.float32): 2e-6, F16: 2e-3, BF16: 8e-3}[np.dtype(dtype)]
    atol = tolerance * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=0, atol=atol)


def check_ragged(m, k, n, sizes, *, transpose_b=False, config=SMALL, dtype=BF16, out=np.float32):
    """Rows of no group are not finite."""
    a = normal(0, (m, k), dtype)
    a[np.maximum(sizes, 0).sum() :] = np.nan
    b = normal(1, (len(sizes), n, k) if transpose_b else (len(sizes), k, n), dtype)
    result = jitted_ragged(
        *map(jnp.asarray, (a, b, sizes)), transpose_b=transpose_b, config=config, out_dtype=out
    )
    check(result, ragged_reference(a, b, sizes, transpose_b), out)


def check_transposed(m, k, n, sizes, *, config=SMALL, dtype=BF16, out=np.float32):
    a, b = normal(0, (m, k), dtype), normal(1, (m, n), dtype)
    a[np.maximum(sizes, 0).sum() :] = np.nan
    b[np.maximum(sizes, 0).sum() :] = np.inf
    result = jitted_transposed(*map(jnp.asarray, (a, b, sizes)), config=config, out_dtype=out)
    check(result, transposed_reference(a, b, sizes), out)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups(sizes, transpose_b):
    check_ragged(ROWS, 64, 128, sizes, transpose_b=transpose_b)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_transposed_groups(sizes):
    check_transposed(ROWS, 64, 128, sizes)


@pytest.mark.runs_kernels
def test_one_group():
    check_ragged(100, 64, 128, [100])
    check_transposed(100, 64, 128, [90])


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("k", "n"), [(200, 24), (72, 300), (65, 130)])
def test_shapes_that_do_not_divide(k, n):
    sizes = [50, 3, 90]
    check_ragged(150, k, n, sizes)
    check_ragged(152, k, n, sizes, transpose_b=True)
    check_transposed(152, k, n, sizes)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes(dtype):
    sizes = [9, 80]
    config = RaggedConfig(tile_m=64, tile_n=128, split="n", stages=2)
    check_ragged(96, 64, 128, sizes, dtype=dtype, out=dtype, config=config)
    check_transposed(96, 64, 128, sizes, dtype=dtype, out=dtype, config=config)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    "config",
    [
        RaggedConfig(tile_m=128, tile_n=64, tile_k=128, stages=2, epilogue_n=32),
        RaggedConfig(tile_m=128, tile_n=192, stages=3, band=1, epilogue_n=32),
        RaggedConfig(tile_m=64, tile_n=384, split="n", stages=2, epilogue_n=32),
    ],
    ids=lambda config: f"{config.tile_m}x{config.tile_n}x{config.tile_k}",
)
def test_configurations(config):
    sizes = [130, 0, 1, 40, 5]
    check_ragged(200, 72, 200, sizes, config=config)
    check_ragged(200, 72, 200, sizes, config=config, transpose_b=True)
    check_transposed(200, 136, 200, sizes, config=config)


@pytest.mark.runs_kernels
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 80), min_size=6, max_size=6))
def test_any_sizes(sizes):
    sizes = list(sizes)
    while sum(sizes) > ROWS:
        sizes[sizes.index(max(sizes))] //= 2
    check_ragged(ROWS, 64, 128, sizes)
    check_transposed(ROWS, 64, 128, sizes)


@pytest.mark.runs_kernels
def test_more_groups_than_are_added_up():
    """Rows after the last group are zeros in any case."""
    sizes = [0, 3, 1, 0, 9, 2, 0, 0] * 5
    assert len(sizes) > kernel.MOST_GROUPS
    check_ragged(ROWS, 64, 264, sizes, config=RaggedConfig(stages=2))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", [4, 6, 7, 9])
@pytest.mark.sampled(alone=("blocks", "transposed"))
def test_last_round_is_shared(blocks, transposed):
    """Few tiles that are left are cut up, into columns of one, two or four blocks.

    10 tiles leave 2 for 4 blocks, 4 for 6, 3 for 7 and 1 for 9.
    """
    config = RaggedConfig(stages=2)
    m, k, n, sizes = 300, 72, 392, [130, 5, 0, 129]
    problem = kernel.Problem(
        m=m, n=n, k=k, groups=4, dtype=BF16, out_dtype=BF16, transposed=transposed
    )  # fmt: skip
    a = normal(0, (m, k))
    a[np.maximum(sizes, 0).sum() :] = np.nan
    b = normal(1, (4, n, k) if transposed else (4, k, n))
    run = jax.jit(kernel.build(problem, config, blocks))
    with warnings.catch_warnings(action="error"):
        result = run(*map(jnp.asarray, (a, b, np.array(sizes, np.int32))))
    check(result, ragged_reference(a, b, sizes, transposed), BF16)


@pytest.mark.runs_kernels
def test_buffers_of_results_are_awaited():
    """A shared tile has one part; zeros after it wait until its buffer was read."""
    config = RaggedConfig(tile_n=128, stages=2)
    problem = kernel.Problem(
        m=600, n=128, k=64, groups=1, dtype=BF16, out_dtype=BF16, transposed=False
    )  # fmt: skip
    a, b, sizes = normal(0, (600, 64)), normal(1, (1, 64, 128)), [300]
    with pallasite.config.scoped(sanitize=True):
        run = jax.jit(kernel.build(problem, config, 2))
        result = run(*map(jnp.asarray, (a, b, np.array(sizes, np.int32))))
    check(result, ragged_reference(a, b, sizes), BF16)


def check_tiles(config, blocks, n, transposed, k=72):
    """With last tiles of few rows, an odd number of them too, also in a round that is shared."""
    sizes, m = [130, 64, 0, 129, 65, 1], 420
    problem = kernel.Problem(
        m=m, n=n, k=k, groups=6, dtype=BF16, out_dtype=BF16, transposed=transposed
    )  # fmt: skip
    a = normal(0, (m, k))
    a[np.maximum(sizes, 0).sum() :] = np.nan
    b = normal(1, (6, n, k) if transposed else (6, k, n))
    run = jax.jit(kernel.build(problem, config, blocks))
    with warnings.catch_warnings(action="error"):
        result = run(*map(jnp.asarray, (a, b, np.array(sizes, np.int32))))
    check(result, ragged_reference(a, b, sizes, transposed), BF16)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("blocks", "split", "n", "transposed"),
    [
        (5, "m", 392, False),
        (7, "n", 700, True),
        (3, "m", 600, True),
        pytest.param(4, "n", 256, False, marks=pytest.mark.slow),
    ],
)
def test_halved_tiles(blocks, split, n, transposed):
    buffers = 1 if split == "n" else 2
    config = RaggedConfig(stages=2, split=split, halves=True, band=1, epilogue_buffers=buffers)
    check_tiles(config, blocks, n, transposed)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("options", "blocks", "n", "transposed"),
    [
        ({}, 5, 392, False),
        ({}, 13, 256, True),
        pytest.param({"skip": True}, 7, 392, False, marks=pytest.mark.slow),
        ({"cluster": 2, "split": "n", "epilogue_buffers": 1}, 10, 700, True),
    ],
)
def test_steps_of_last_tiles_are_shared(options, blocks, n, transposed):
    """Also where blocks have no part, and parts of two tiles."""
    check_tiles(
        RaggedConfig(stages=2, band=2, stream=True, **options), blocks, n, transposed, k=312
    )


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("options", "blocks", "n", "transposed"),
    [
        ({"skip": True}, 5, 392, False),
        ({"cluster": 2}, 8, 700, True),
        ({"cluster": 2, "skip": True}, 6, 1024, False),
        pytest.param(
            {"cluster": 2, "split": "n", "epilogue_buffers": 1},
            8,
            392,
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_skipped_rows_and_clusters(options, blocks, n, transposed):
    check_tiles(RaggedConfig(stages=2, band=2, **options), blocks, n, transposed)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"tile_m": 128, "tile_n": 192, "stages": 3, "epilogue_buffers": 1}, 3),
        ({"tile_m": 64, "tile_n": 64, "stages": 2, "epilogue_n": 32}, 1),
    ],
)
@pytest.mark.sampled(alone=("name",))
def test_warpgroups_take_turns(options, blocks, name):
    """Each skips the steps of the other one's tiles, of which there are more or fewer."""
    config = RaggedConfig(alternate=True, **options)
    problem = transposed_kernel.Problem(
        m=ROWS, n=200, k=136, groups=6, dtype=BF16, out_dtype=np.dtype(np.float32)
    )  # fmt: skip
    a, b, sizes = normal(0, (ROWS, 136)), normal(1, (ROWS, 200)), SIZES[name]
    a[max(0, np.maximum(sizes, 0).sum()) :] = np.nan
    with pallasite.config.scoped(sanitize=True):
        run = jax.jit(transposed_kernel.build(problem, config, blocks))
        result = run(*map(jnp.asarray, (a, b, np.array(sizes, np.int32))))
    check(result, transposed_reference(a, b, sizes), np.dtype(np.float32))


@pytest.mark.runs_kernels
def test_agrees_with_ragged_dot():
    sizes = jnp.asarray([70, 0, 33], jnp.int32)
    a, b = jnp.asarray(normal(0, (120, 64))), jnp.asarray(normal(1, (3, 64, 48)))
    expected = jax.lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)
    result = ragged_matmul(a, b, sizes, out_dtype=jnp.float32)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("transpose_b", [False, True])
def test_derivatives(transpose_b):
    """Of a loss that is quadratic in the result, so that cotangents differ."""
    sizes = np.array([40, 0, 21])
    a = normal(0, (72, 64))
    b = normal(1, (3, 24, 64) if transpose_b else (3, 64, 24))
    weight = normal(2, (72, 24), np.float32)

    def loss(a, b):
        product = ragged_matmul(
            a, b, jnp.asarray(sizes), transpose_b=transpose_b, out_dtype=jnp.float32
        )
        return jnp.sum(weight * product)

    d_a, d_b = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(a), jnp.asarray(b))
    cotangent = weight.astype(BF16)
    check(d_a, ragged_reference(cotangent, b, sizes, not transpose_b), BF16)
    pair = (cotangent, a) if transpose_b else (a, cotangent)
    check(d_b, transposed_reference(*pair, sizes), BF16)


@pytest.mark.runs_kernels
def test_derivatives_of_the_transposed():
    sizes = np.array([33, 0, 20])
    a, b, weight = normal(0, (64, 72)), normal(1, (64, 24)), normal(2, (3, 72, 24), np.float32)

    def loss(a, b):
        product = transposed_ragged_matmul(a, b, jnp.asarray(sizes), out_dtype=jnp.float32)
        return jnp.sum(weight * product)

    d_a, d_b = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(a), jnp.asarray(b))
    cotangent = weight.astype(BF16)
    check(d_a, ragged_reference(b, cotangent, sizes, True), BF16)
    check(d_b, ragged_reference(a, cotangent, sizes), BF16)


# Code ---------------------------------------------------------------------------------------------


def struct(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (ragged_matmul, ((8192, 2048), (8, 2048, 4096))),
        (ragged_matmul, ((256, 2048), (8, 2048, 4096))),
        (transposed_ragged_matmul, ((8192, 2048), (8192, 4096))),
    ],
)
def test_no_spills_and_no_serialization(function, shapes):
    """Warnings of ptxas are errors."""
    a, b = (struct(shape) for shape in shapes)
    kernel = pallasite.compile(function, a, b, struct((8,), jnp.int32), target="sm_90a")
    if find_tool("ptxas").path is None:
        pytest.skip("ptxas is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembly = assemble(kernel.ptx, kernel.name)
    assert assembly.spill_store_bytes == 0


@pytest.mark.parametrize(
    ("rows", "columns", "mean", "count", "tile_n", "alternate"),
    [
        (4096, 4096, 1024, 8, 192, True),
        (1024, 1024, 512, 8, 128, True),
        (2048, 5632, 4096, 4, 256, False),
        (64, 4096, 1024, 8, 256, False),
    ],
)
def test_default_of_the_transposed(rows, columns, mean, count, tile_n, alternate):
    """Warpgroups take turns where groups have few steps."""
    for out_size in (2, 4):
        config = chosen_transposed_config(rows, columns, mean, count, out_size)
        assert out_size > 2 or (config.tile_n, config.alternate) == (tile_n, alternate)
        assert config.stages >= 4 and config.shared_bytes(out_size) <= 227 * 1024


def test_configurations_fit_in_shared_memory():
    for rows in (1, 64, 100, 1000):
        for columns in (64, 4096):
            for out_size in (2, 4):
                found = ragged_configs(rows, columns, out_size)
                assert len(found) >= 12
                assert all(config.shared_bytes(out_size) <= 227 * 1024 for config in found)


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "sizes", "error", "words"),
    [
        ((8, 64), (2, 32, 16), (2,), InvalidValueError, "same extent along k"),
        ((8, 64), (64, 16), (2,), InvalidTypeError, "b does not have 3 dimensions"),
        ((8, 64), (2, 64, 16), (3,), InvalidTypeError, "group_sizes is not a vector"),
        ((8, 64), (2, 64, 16), (2, 1), InvalidTypeError, "group_sizes is not a vector"),
    ],
)
def test_messages(a, b, sizes, error, words):
    with pytest.raises(error, match=words):
        ragged_matmul(jnp.zeros(a, BF16), jnp.zeros(b, BF16), jnp.zeros(sizes, jnp.int32))


def test_messages_of_dtypes():
    a, b, sizes = jnp.zeros((8, 64), BF16), jnp.zeros((2, 64, 16), BF16), jnp.zeros(2, int)
    with pytest.raises(InvalidTypeError, match="different dtypes"):
        ragged_matmul(a, b.astype(F16), sizes)
    with pytest.raises(InvalidTypeError, match="dtype that this product does not take"):
        ragged_matmul(a.astype(np.float32), b, sizes)
    with pytest.raises(InvalidTypeError, match="result cannot have this dtype"):
        ragged_matmul(a, b, sizes, out_dtype=jnp.int32)
    with pytest.raises(InvalidTypeError, match="group_sizes is not a vector"):
        ragged_matmul(a, b, sizes.astype(np.float32))
    with pytest.raises(InvalidValueError, match="same number of rows"):
        transposed_ragged_matmul(a, jnp.zeros((9, 64), BF16), sizes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tile_m", 64), ("tile_n", 96), ("tile_k", 32), ("stages", 1), ("split", "k"), ("band", 0),
     ("epilogue_n", 16)],
)  # fmt: skip
def test_configuration_messages(name, value):
    with pytest.raises(InvalidValueError, match=f"RaggedConfig.{name} does not fit"):
        RaggedConfig(**{name: value})


@pytest.mark.runs_kernels
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("fields", "widths"),
    [
        (TRANSPOSED, 3),
        (TRANSPOSED | {"epilogue_buffers": 2}, 1),
        (TWO | {"tile_m": 128}, 2),
        (TWO | {"split": "n", "tile_n": 64}, 4),
        (TWO | {"alternate": True, "epilogue_n": 16}, 3),
        (TWO | {"cluster": 2, "cluster_along": "m", "tile_m": 128}, 2),
    ],
    ids=str,
)
@pytest.mark.sampled(alone=("sizes",))
def test_tiles_of_the_transposed_product(sizes, fields, widths, last):
    """Tiles as wide as what is left of a group, in kernels of all kinds."""
    config = RaggedConfig(transposed=MatmulConfig(**fields), widths=widths, last=last)
    a, b, counts = normal(1, (ROWS, 136)), normal(2, (6, 136, 264)), np.array(SIZES[sizes])
    result = jitted_ragged(a, b, jnp.asarray(counts), config=config, out_dtype=jnp.float32)
    check(result, ragged_reference(a, b, counts))


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("transpose_b", "last"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("fields", [TRANSPOSED, TWO | {"alternate": True}])
@pytest.mark.sampled(alone=("fields", "transpose_b", "last"))
def test_several_rounds_of_transposed_tiles(fields, transpose_b, last, monkeypatch):
    """Blocks have several tiles, of full width and narrower ones; odd extents, float16."""
    monkeypatch.setattr("pallasite_hopper.ops.ragged.api.MULTIPROCESSORS", 5)
    config = RaggedConfig(transposed=MatmulConfig(**fields), last=last)
    counts = np.array([100, 0, 17, 150, 49, 3, 96])
    shape = (7, 205, 70) if transpose_b else (7, 70, 205)
    a, b = normal(1, (430, 70), F16), normal(2, shape, F16)
    result = ragged_matmul(a, b, jnp.asarray(counts), transpose_b=transpose_b, config=config)
    check(result, ragged_reference(a, b, counts, transpose_b), np.float16)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20000),
    st.integers(1, 64),
    st.integers(1, 1000).map(lambda n: 8 * n),
    st.integers(1, 1000).map(lambda k: 8 * k),
    st.sampled_from([2, 4]),
    st.sampled_from(["H100", "H200"]),
)
def test_choice(m, count, n, k, out_size, chip):
    """What is chosen fits registers and shared memory."""
    config = ordered_configs(Groups(m, n, k, count, out_size, False), chip)[0]
    tiles = config.transposed
    if tiles is None:
        assert config.shared_bytes(out_size) <= 227 * 1024
        return
    assert tiles.fits(2, out_size) and tiles.stages > 2
    assert tiles.warpgroup_m * tiles.warpgroup_n <= 128 * 200
    assert all(width % 8 == 0 for width in widths_of(tiles, config.widths))


def test_work_of_blocks():
    """The block with the most tiles, by tiles that are counted one by one."""
    tiles = MatmulConfig(swap=True, tile_m=64, tile_n=64, warpgroups=1, split="m", group=2)
    sizes = (130, 64, 0, 20)
    for last, order in (
        # Groups of 130, 64 and 20 rows, three columns of tiles; bands of two rows of tiles.
        (False, ["64"] * 6 + ["2"] * 3 + ["64"] * 3 + ["20"] * 3),
        (True, ["64"] * 6 + ["64"] * 3 + ["2"] * 3 + ["20"] * 3),
    ):
        config = RaggedConfig(transposed=tiles, widths=2, last=last)
        work, again = work_of(config, 192, np.array(sizes), blocks=4)
        # Two rows, and 20, take a tile of 32, which reads three quarters of what a whole one does.
        costs = [1.0 if rows == "64" else max(0.5, 0.8 * 0.75) for rows in order]
        assert work == pytest.approx(max(sum(costs[block::4]) for block in range(4)))
        assert again == (1 if last else 0)


def test_tiles_fit_groups_of_equal_size():
    """Groups whose rows make a little more than a tile of 128 have tiles of more rows; many rows
    have warpgroups that take turns."""
    few = ordered_configs(Groups(16 * 170, 8192, 6144, 16, 2, False), "H200")[0].transposed
    assert few is not None and few.tile_n % 128 > 0
    many = ordered_configs(Groups(8192, 4096, 4096, 8, 2, False), "H200")[0]
    assert many.transposed is not None and many.transposed.alternate and many.last
