"""Products of any shape agree with float64, in every configuration and with every epilogue."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallasite
from pallasite import errors
from pallasite_hopper.ops import MatmulConfig, matmul, matmul_configs
from pallasite_hopper.ops.dense import run
from pallasite_hopper.ops.dense.candidates import candidates
from pallasite_hopper.ops.dense.choice import default_config
from pallasite_hopper.ops.dense.config import SHARED_MEMORY
from pallasite_hopper.ops.dense.cost import Sizes, nanoseconds
from pallasite_hopper.ops.dense.joined_rows import JoinedRowsConfig
from pallasite_hopper.ops.dense.unaligned import (
    left_to_xla,
    nanoseconds_by_xla,
    nanoseconds_with_copies,
    without_copies,
)

pytestmark = pytest.mark.runs_kernels

SMALL = MatmulConfig(tile_m=128, tile_n=64, tile_k=64, stages=2, split="m", epilogue_n=32)
"""Small tiles, so that small products have several."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def random_matrix(seed, shape, dtype):
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize == 1:
        low = -128 if np.dtype(dtype).kind == "i" else 0
        return generator.integers(low, low + 256, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def product(m, n, k, dtype=BFLOAT16, dtype_b=None, *, config=None, **options):
    """A product by the kernel and in float64, of a and b as they are passed."""
    ta, tb = options.get("transpose_a", False), options.get("transpose_b", False)
    a = random_matrix(1, (k, m) if ta else (m, k), dtype)
    b = random_matrix(2, (n, k) if tb else (k, n), dtype_b or dtype)
    result = matmul(jnp.asarray(a), jnp.asarray(b), config=config, **options)
    left, right = a.astype(np.float64), b.astype(np.float64)
    expected = (left.T if ta else left) @ (right.T if tb else right)
    return np.asarray(result).astype(np.float64), expected


def relative_error(result, expected):
    assert result.shape == expected.shape
    assert np.isfinite(result).all()
    return np.linalg.norm(result - expected) / max(1e-30, np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (128, 64, 64),  # One tile of one step.
        (128, 64, 320),  # More steps than stages.
        (384, 192, 128),  # An odd number of tiles.
        (256, 128, 64),
        (100, 72, 200),  # Nothing divides the tile.
        (1, 8, 16),
        (129, 65, 33),  # Rows that the copy engine cannot read as they are.
        (7, 300, 96),
    ],
)
def test_shapes(m, n, k):
    """Shapes that divide the tile and shapes that do not."""
    assert relative_error(*product(m, n, k, config=SMALL)) < 4e-3
    if m < 128:
        assert relative_error(*product(m, n, k)) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "transpose_a", "transpose_b"),
    [
        *itertools.product(["bfloat16"], [False, True], [False, True]),
        ("float16", True, False),
        ("float32", False, True),
        ("float32", True, False),
        ("float8_e4m3fn", True, False),
        ("int8", False, True),
        ("int8", True, False),
    ],
)
def test_dtypes_and_orders(dtype, transpose_a, transpose_b):
    """Every dtype, both operands either way round."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tile_k = 128 // dtype.itemsize
    config = dataclasses.replace(SMALL, tile_k=tile_k)
    result, expected = product(
        136, 72, 2 * tile_k, dtype, config=config, transpose_a=transpose_a, transpose_b=transpose_b
    )
    limit = {"float32": 1e-3, "int8": 0.0}.get(dtype.name, 4e-3)
    assert relative_error(result, expected) <= limit


@pytest.mark.parametrize(
    ("left", "right", "accumulator", "limit"),
    [
        ("float8_e5m2", "float8_e4m3fn", "float32", 5e-3),
        ("float8_e4m3fn", "float8_e4m3fn", "float16", 1e-2),
        ("float16", "float16", "float16", 2e-2),
        ("uint8", "int8", "int32", 0.0),
    ],
)
def test_mixed_types_and_accumulators(left, right, accumulator, limit):
    """Operands of two types, and sums in float16."""
    left, right = (np.dtype(getattr(ml_dtypes, name, name)) for name in (left, right))
    result, expected = product(
        128, 64, 256, left, right, config=dataclasses.replace(SMALL, tile_k=128 // left.itemsize),
        accumulator=accumulator,
    )  # fmt: skip
    assert relative_error(result, expected) <= limit


CONFIGS = {
    "columns": MatmulConfig(tile_m=64, tile_n=128, tile_k=64, stages=3, split="n"),
    "large": MatmulConfig(stages=3),
    "pairs along m": dataclasses.replace(SMALL, cluster=2, cluster_along="m"),
    "pairs along n": dataclasses.replace(SMALL, cluster=2, cluster_along="n"),
    "four": dataclasses.replace(SMALL, cluster=4, cluster_along="n"),
    "squares of four": dataclasses.replace(SMALL, cluster=2, cluster_across=2),
    "two by four": dataclasses.replace(SMALL, cluster=2, cluster_along="n", cluster_across=4),
    "swapped four by two of many columns": MatmulConfig(
        swap=True, tile_m=64, tile_n=56, warpgroups=1, epilogue_n=56, cluster=4, cluster_across=2
    ),
    "swapped pairs of many columns, parts": MatmulConfig(
        swap=True, tile_m=64, tile_n=72, warpgroups=1, split="m", epilogue_n=32, cluster=2, parts=2
    ),
    "no matmul in flight": dataclasses.replace(SMALL, in_flight=0, stages=3),
    "swapped, no matmul in flight, many columns": MatmulConfig(
        swap=True, tile_m=64, tile_n=72, warpgroups=1, epilogue_n=72, in_flight=0, cluster=2
    ),
    "epilogue_buffers": dataclasses.replace(SMALL, epilogue_buffers=2),
    "epilogue_buffers that tiles do not use equally": MatmulConfig(
        tile_n=192, split="m", stages=2, epilogue_buffers=2
    ),
    "minor n": dataclasses.replace(SMALL, grid_minor="n", group=2),
    "deep": dataclasses.replace(SMALL, tile_k=128, stages=4),
    "one warpgroup": dataclasses.replace(SMALL, tile_m=64, warpgroups=1),
    "swapped": MatmulConfig(
        swap=True, tile_m=64, tile_n=32, warpgroups=1, split="m", epilogue_n=32, stages=3
    ),
    "swapped, several blocks on a multiprocessor": MatmulConfig(
        swap=True, tile_m=64, tile_n=32, warpgroups=1, split="m", epilogue_n=32, resident=3
    ),
    "parts of k": dataclasses.replace(SMALL, split_k=2),
    "swapped parts of k": MatmulConfig(
        swap=True, tile_m=64, tile_n=32, warpgroups=1, split="m", epilogue_n=8, stages=2, split_k=4
    ),
    "uneven parts of k in a cluster": dataclasses.replace(SMALL, split_k=2, tile_k=32),
    "parts of k by a second kernel": dataclasses.replace(SMALL, parts=2, epilogue_n=32),
    "more parts of k than steps": dataclasses.replace(SMALL, parts=5, epilogue_n=32),
    "swapped parts of k by a second kernel": MatmulConfig(
        swap=True, tile_m=64, tile_n=24, warpgroups=1, split="m", epilogue_n=8, stages=2, parts=3
    ),
    "192 columns": MatmulConfig(tile_n=192, split="m", stages=2),
    "192 rows": MatmulConfig(tile_m=192, tile_n=128, stages=2),
    "256 x 192": MatmulConfig(tile_m=256, tile_n=192, split="m", stages=2),
    "192 x 256": MatmulConfig(tile_m=192, tile_n=256, split="n", stages=2),
    "read once": dataclasses.replace(SMALL, evict_first=True),
    "swapped, read once": MatmulConfig(
        swap=True, tile_m=64, tile_n=24, warpgroups=1, split="m", epilogue_n=24, evict_first=True
    ),
    "swapped tiles of many columns, 256 rows": MatmulConfig(
        swap=True, tile_m=256, tile_n=184, split="m", epilogue_n=64, stages=2
    ),
    "warpgroups take turns": MatmulConfig(
        tile_m=64, tile_n=64, alternate=True, stages=4, epilogue_n=64
    ),
    "swapped pairs": MatmulConfig(
        swap=True, tile_m=128, tile_n=16, split="m", epilogue_n=16, stages=3, cluster=2
    ),
    "swapped pairs of many columns": MatmulConfig(
        swap=True, tile_m=64, tile_n=72, warpgroups=1, epilogue_n=64, cluster_along="n", cluster=2
    ),
    "swapped tiles of many columns, 192 rows": MatmulConfig(
        swap=True, tile_m=192, tile_n=56, warpgroups=1, split="m", epilogue_n=56, stages=2
    ),
    "swapped tiles of many columns": MatmulConfig(
        swap=True, tile_m=128, tile_n=104, split="m", epilogue_n=64, stages=2
    ),
    "swapped tiles of many columns, two buffers": MatmulConfig(
        swap=True, tile_m=128, tile_n=72, split="m", epilogue_n=32, epilogue_buffers=2, stages=2
    ),
    "swapped tiles of many columns in parts": MatmulConfig(
        swap=True, tile_m=64, tile_n=72, warpgroups=1, split="m", epilogue_n=32, stages=2, parts=3
    ),
}


@functools.cache
def usual_product(shape):
    return product(*shape, config=SMALL)[0]


RARE = {
    *("four", "two by four", "swapped pairs of many columns, parts", "no matmul in flight"),
    *("minor n", "one warpgroup", "192 columns", "256 x 192", "read once"),
    *("swapped tiles of many columns, 256 rows", "swapped pairs of many columns"),
    *("swapped tiles of many columns, 192 rows", "swapped tiles of many columns in parts"),
    "swapped parts of k by a second kernel",
}
"""What others divide alike, in the other order or with fewer rows."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in CONFIGS],
)
def test_configurations(name):
    """Every way of cutting a product up gives the same numbers, to the last bit.

    Sums of parts of k may differ in the last bit of float32, but hardly after rounding.
    """
    few = "swapped" in name and "many columns" not in name
    shape = (20, 264, 136) if few else (264, 264, 136)
    result, expected = product(*shape, config=CONFIGS[name])
    assert relative_error(result, expected) < 4e-3
    same = result == usual_product(shape)
    assert same.mean() > 0.99 if "parts" in name else same.all()


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((300, 200, 200), {}),  # 20 tiles of four steps, three stages.
        ((130, 130, 320), {"tile_n": 128, "transpose_b": True}),
        ((150, 520, 136), {"swap": True, "tile_m": 128, "tile_n": 40, "epilogue_n": 16}),
        ((500, 200, 130), {"cluster": 2, "stages": 2}),
        ((60, 60, 60), {}),  # One tile: the second warpgroup has none.
    ],
)
def test_warpgroups_that_take_turns(monkeypatch, shape, changes):
    """Each warpgroup computes tiles of its own; with an epilogue."""
    monkeypatch.setattr(run, "MULTIPROCESSORS", 4)
    options = {"transpose_b": changes.pop("transpose_b", False)}
    tile = {"tile_m": 64, "tile_n": 64, "stages": 3, "epilogue_n": 32, **changes}
    config = MatmulConfig(alternate=True, **tile)
    m, n, _ = shape
    residual = random_matrix(5, (m, n), BFLOAT16)
    with pallasite.config.scoped(sanitize=True):
        result, expected = product(*shape, config=config, residual=jnp.asarray(residual), **options)
    assert relative_error(result, expected + residual.astype(np.float64)) < 4e-3
    for others in ({"split_k": 2}, {"parts": 2}, {"last_parts": 2}, {"warpgroups": 1}):
        with pytest.raises(errors.InvalidValueError, match="alternate does not go together"):
            dataclasses.replace(config, epilogue_n=16, cluster=1, **others)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((100, 250, 490), MatmulConfig(split_k=2)),
        (
            (70, 180, 1100),
            MatmulConfig(swap=True, tile_m=192, tile_n=96, epilogue_n=16, stages=5, split_k=3),
        ),
    ],
)
def test_sums_in_stages(shape, config):
    """Blocks that share the steps of a tile send their sums where the stages of others were."""
    assert config.sums_in_stages(2, 2)
    assert config.shared_bytes(2, 2) <= SHARED_MEMORY
    with pallasite.config.scoped(sanitize=True):
        result, expected = product(*shape, config=config)
    assert relative_error(result, expected) < 4e-3


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((200, 248, 264), MatmulConfig(epilogue_n=32)),
        ((300, 200, 264), MatmulConfig(tile_n=192, split="m", stages=3, cluster=2)),
        ((100, 150, 264), MatmulConfig(split_k=2, epilogue_n=32, stages=3)),
        ((100, 150, 328), MatmulConfig(parts=3, epilogue_n=32, stages=3)),
        ((90, 248, 328), MatmulConfig(swap=True, tile_n=96, epilogue_n=32, stages=4, split="n")),
        (
            (139, 136, 328),
            MatmulConfig(
                swap=True, tile_m=64, tile_n=72, warpgroups=1, split="m", stages=13, cluster=2,
                cluster_along="n",
            ),
        ),
        (
            (139, 136, 328),
            MatmulConfig(
                swap=True, tile_m=64, tile_n=72, warpgroups=1, split="m", stages=3, parts=2,
                epilogue_n=16,
            ),
        ),
    ],
)  # fmt: skip
def test_epilogue_in_stages(shape, config):
    """Columns are written where the stages were, which no warpgroup reads any more."""
    config = dataclasses.replace(config, epilogue_in_stages=True)
    assert config.fits(2, 2)
    rng = np.random.default_rng(41)
    residual = (rng.standard_normal(shape[:2]) * 8).astype(jnp.bfloat16)
    with pallasite.config.scoped(sanitize=True):
        result, expected = product(*shape, config=config)
        assert relative_error(result, expected) < 4e-3
        if config.parts == 1:
            result, expected = product(*shape, config=config, residual=jnp.asarray(residual))
            assert relative_error(result, expected + residual.astype(np.float64)) < 4e-3
    with pytest.raises(errors.InvalidValueError, match="blocks that have one tile each"):
        product(9000, 1024, 64, config=dataclasses.replace(config, split_k=1))
    with pytest.raises(errors.InvalidValueError, match="one tile each"):
        dataclasses.replace(config, last_parts=2, cluster=1, split_k=1, parts=1)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((13, 640, 424), {}),  # Ten tiles of 64 columns: two rounds of four, and two that are left.
        ((9, 320, 200), {"tile_n": 16, "epilogue_n": 8, "tile_k": 128}),
        ((70, 200, 130), {"swap": False, "tile_n": 128, "epilogue_n": 64}),
        # Each block writes a part of the tile; the sums come where the stages were.
        ((630, 120, 320), {"swap": False, "tile_n": 128, "epilogue_n": 64, "stages": 9}),
        ((700, 120, 320), {"tile_m": 128, "tile_n": 80, "stages": 7, "epilogue_n": 48}),
        ((20, 130, 64), {"tile_n": 24, "epilogue_n": 16}),  # A step cannot be shared.
        ((5, 448, 136), {}),  # Three are left: too many for two pairs of blocks.
        ((5, 100, 136), {}),  # No whole round.
    ],
)
def test_shared_last_tiles(monkeypatch, shape, changes):
    """Pairs of blocks share the steps of tiles that whole rounds leave; with an epilogue."""
    monkeypatch.setattr(run, "MULTIPROCESSORS", 4)
    few = MatmulConfig(
        swap=True, tile_m=64, tile_n=16, warpgroups=1, split="m", epilogue_n=16, stages=3
    )
    config = dataclasses.replace(few, last_parts=2, **changes)
    m, n, _ = shape
    generator = np.random.default_rng(0)
    bias, residual = generator.standard_normal(n), random_matrix(5, (m, n), BFLOAT16)
    given = {"bias": jnp.asarray(bias, jnp.float32), "residual": jnp.asarray(residual)}
    with pallasite.config.scoped(sanitize=True):
        result, expected = product(*shape, config=config, **given)
    assert relative_error(result, expected + bias + residual.astype(np.float64)) < 4e-3
    for others in ({"split_k": 2}, {"parts": 2}, {"cluster": 2}):
        with pytest.raises(errors.InvalidValueError, match="last_parts does not go together"):
            dataclasses.replace(SMALL, last_parts=2, epilogue_n=16, **others)


PARTS = ("row_scale", "column_scale", "bias", "activation", "residual")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        *((SMALL, (part,)) for part in PARTS),
        (SMALL, PARTS),
        (CONFIGS["swapped"], PARTS[:2]),
        (CONFIGS["more parts of k than steps"], PARTS),
        (CONFIGS["swapped"], PARTS[2:]),
        (dataclasses.replace(CONFIGS["swapped"], tile_n=24, epilogue_n=16), PARTS),
        (CONFIGS["pairs along m"], PARTS),
    ],
)
def test_epilogues(parts, config):
    """Scales, bias, activation and residual, alone and together."""
    m, n, k = 40, 200, 64
    a, b = random_matrix(1, (m, k), BFLOAT16), random_matrix(2, (k, n), BFLOAT16)
    extras = {
        "row_scale": random_matrix(3, (m,), np.float32),
        "column_scale": random_matrix(4, (n,), np.float32),
        "bias": random_matrix(5, (n,), np.float32),
        "residual": random_matrix(6, (m, n), BFLOAT16),
    }
    chosen = {name: jnp.asarray(extras[name]) for name in parts if name in extras}
    if "activation" in parts:
        chosen["activation"] = jax.nn.relu
    result = matmul(jnp.asarray(a), jnp.asarray(b), config=config, **chosen)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    if "row_scale" in parts:
        expected *= extras["row_scale"].astype(np.float64)[:, None]
    if "column_scale" in parts:
        expected *= extras["column_scale"].astype(np.float64)
    if "bias" in parts:
        expected += extras["bias"]
    if "activation" in parts:
        expected = np.maximum(expected, 0)
    if "residual" in parts:
        expected += extras["residual"].astype(np.float64)
    assert relative_error(np.asarray(result).astype(np.float64), expected) < 4e-3


@pytest.mark.parametrize(
    ("shape", "along", "rest"),
    [
        ((200, 131, 96), "m", {}),  # Columns that the copy engine cannot write as they are.
        ((150, 200, 130), "n", {"split_k": 2}),
        ((140, 72, 64), "m", {"swap": True, "tile_m": 64, "tile_n": 16, "warpgroups": 1}),
        ((70, 190, 64), "n", {"cluster": 2}),
        ((128, 64, 64), "m", {}),  # There is no rest.
    ],
)
def test_rest_of_the_tiles(shape, along, rest):
    """A second kernel, with tiles of its own, writes what the first leaves; with an epilogue."""
    m, n, k = shape
    other = dataclasses.replace(SMALL, **{"epilogue_n": 16, **rest})
    place = 128 if along == "m" else 64
    config = dataclasses.replace(SMALL, rest=other, rest_from=place, rest_along=along)
    generator = np.random.default_rng(0)
    bias, rows = generator.standard_normal(n), generator.standard_normal(m)
    residual = random_matrix(5, (m, n), BFLOAT16)
    given = {
        "bias": jnp.asarray(bias, jnp.float32),
        "row_scale": jnp.asarray(rows, jnp.float32),
        "residual": jnp.asarray(residual),
    }
    result, expected = product(m, n, k, config=config, **given)
    expected = expected * rows[:, None] + bias + residual.astype(np.float64)
    assert relative_error(result, expected) < 4e-3


def test_rows_that_the_copy_engine_cannot_read():
    """Products that take less time than copying their operands are left to XLA, epilogue included;
    all others, and any with a configuration, are not."""
    a, b = random_matrix(1, (70, 3), BFLOAT16), random_matrix(2, (3, 71), BFLOAT16)
    bias = np.random.default_rng(3).standard_normal(71)
    expected = np.maximum(a.astype(np.float64) @ b.astype(np.float64) + bias, 0)
    arrays = jnp.asarray(a), jnp.asarray(b), jnp.asarray(bias, jnp.float32)

    def run(a, b, bias, config=None):
        return matmul(a, b, bias=bias, activation=jax.nn.relu, config=config)

    with pytest.raises(errors.InvalidValueError, match="calls no kernel"):
        pallasite.compile_all(run, *arrays, target="sm_90a")
    assert relative_error(np.asarray(run(*arrays)).astype(np.float64), expected) < 4e-3
    own = pallasite.compile_all(lambda *x: run(*x, config=SMALL), *arrays, target="sm_90a")
    assert [one.name for one in own] == ["matmul"]
    large = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in ((16384, 8192), (8192, 8191))]
    own = pallasite.compile_all(matmul, *large, target="sm_90a")
    assert [one.name for one in own] == ["longer_rows", "matmul"]
    row = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in ((1, 4001), (4001, 3001))]
    own = pallasite.compile_all(matmul, *row, target="sm_90a")
    assert [one.name for one in own] == ["few_rows_matmul"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("out", [np.float16, BFLOAT16, np.float32, ml_dtypes.float8_e4m3fn])
def test_what_xla_multiplies_has_a_result_that_its_library_has(dtype, out):
    """cuBLASLt refuses products of float16 with a result in bfloat16 ("GEMM is not supported")."""

    def run(a, b):
        return matmul(a, b, transpose_a=True, transpose_b=True, out_dtype=out)

    a, b = (random_matrix(seed, (n, 3), dtype) for seed, n in ((1, 3), (2, 17)))
    equations = products_of_xla(jax.make_jaxpr(run)(a, b).jaxpr)
    (sums,) = [e.params["preferred_element_type"] for e in equations]
    assert sums in (dtype, np.float32)
    result = run(jnp.asarray(a), jnp.asarray(b))
    assert result.dtype == out
    expected = (a.T.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)
    wanted = expected.astype(out).astype(np.float64)
    assert relative_error(np.asarray(result).astype(np.float64), wanted) < 4e-3


def products_of_xla(jaxpr):
    """The products of a jaxpr that are not in a kernel."""
    found = [one for one in jaxpr.eqns if one.primitive is jax.lax.dot_general_p]
    for equation in jaxpr.eqns:
        for name in ("call_jaxpr", "jaxpr", "call"):
            inner = equation.params.get(name)
            if inner is not None:
                found += products_of_xla(getattr(inner, "jaxpr", inner))
    return found


EXTENTS = st.integers(1, 4096)


@settings(max_examples=25, deadline=None)
@given(EXTENTS, EXTENTS, EXTENTS, st.booleans(), st.booleans())
def test_estimates_of_rows_that_the_copy_engine_cannot_read(m, n, k, across_a, across_b):
    """Copies add to our time, without one nothing is left to XLA; XLA's time grows with what is
    calculated, and with an epilogue, which has a kernel of its own there."""
    sizes = Sizes(m, n, k, 2, 2, across_a, across_b)
    along_k = not across_a or across_b
    aligned = dataclasses.replace(
        sizes, m=m + -m % 8 * across_a, n=n + -n % 8, k=k + -k % 8 * along_k
    )
    copies = sum(x % 8 != 0 for x in (m if across_a else k, k if across_b else n, n))
    assert not left_to_xla(aligned) and (copies or not left_to_xla(sizes))
    if not across_a:
        operands = sum(x % 8 != 0 for x in (k, k if across_b else n))
        without = nanoseconds_with_copies(aligned)
        added = nanoseconds_with_copies(sizes) - without
        # Another configuration may be chosen, with parts of k, whose result needs no copy.
        assert added > 300 * operands - 0.1 * without
    assert copies or without_copies(sizes) is None
    for name in ("m", "n") if m > 1 else ("n",):
        # As odd as before: even rows are calculated faster.
        larger = dataclasses.replace(sizes, **{name: 3 * getattr(sizes, name)})
        assert nanoseconds_by_xla(larger) > nanoseconds_by_xla(sizes)
    assert nanoseconds_by_xla(sizes, plain=False) > nanoseconds_by_xla(sizes)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("order", [(False, False), (False, True), (True, True)])
def test_few_rows_that_nobody_else_reads_fast(order, swapped):
    """Large operands with unaligned rows, for few rows or columns, are not copied."""
    m, n = (6002, 18) if swapped else (18, 6002)
    joined = not swapped and not order[1]  # Several rows of the matrix are read as one.
    order = tuple(not one for one in order[::-1]) if swapped else order
    sizes = Sizes(m, n, 9002, 2, 2, *order)
    config = without_copies(sizes)
    assert joined == isinstance(config, JoinedRowsConfig)
    assert joined or config.swap != swapped
    shapes = [(9002, m) if order[0] else (m, 9002), (n, 9002) if order[1] else (9002, n)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    options = {"transpose_a": order[0], "transpose_b": order[1]}
    kernels = pallasite.compile_all(
        functools.partial(matmul, **options), *arrays, target="sm_90a", assemble=True
    )
    names = ["joined_rows_matmul", "split_columns"] if joined else ["direct_matmul"]
    assert sorted(one.name for one in kernels) == names
    assert all(one.resources.spill_store_bytes == 0 for one in kernels)


@pytest.mark.parametrize("transpose_a", [False, True])
def test_float32_by_xla(monkeypatch, transpose_a):
    """With the epilogue, and of many at once."""
    monkeypatch.setattr(run, "turned_left_to_xla", lambda *_, **turned: turned["turned_b"])
    options = {"transpose_a": transpose_a, "activation": jax.nn.relu}
    bias = random_matrix(3, (24,), np.float32)
    result, sums = product(20, 24, 40, np.float32, bias=jnp.asarray(bias), **options)
    assert relative_error(result, np.maximum(sums + bias, 0)) < 2e-3
    a, b = random_matrix(1, (3, 40, 20), np.float32), random_matrix(2, (3, 40, 24), np.float32)
    several = jax.vmap(lambda a, b: matmul(a, b, transpose_a=True))
    expected = np.einsum("zkm,zkn->zmn", a.astype(np.float64), b.astype(np.float64))
    assert relative_error(np.asarray(jax.jit(several)(a, b), np.float64), expected) < 2e-3
    with pytest.raises(errors.InvalidValueError, match="calls no kernel"):
        pallasite.compile_all(several, a, b, target="sm_90a")


@pytest.mark.runs_kernels
def test_few_rows_of_integers_by_xla(monkeypatch):
    """With a matrix that our kernel would have to transpose before."""
    monkeypatch.setattr(run, "turned_left_to_xla", lambda *_, **turned: turned["turned_b"])
    a, b = random_matrix(1, (20, 40), np.int8), random_matrix(2, (40, 24), np.int8)
    function = jax.jit(lambda a, b: matmul(a, b, column_scale=jnp.arange(24.0)))
    assert "pallas" not in str(jax.make_jaxpr(function)(a, b))
    expected = a.astype(np.int32) @ b.astype(np.int32) * np.arange(24)
    np.testing.assert_array_equal(function(a, b), expected)


@pytest.mark.parametrize("order", [*itertools.product((False, True), repeat=2)])
def test_large_results_of_short_products(order):
    """What takes time is to write the result: tiles are visited along its rows, and warpgroups take
    turns where there is something to multiply."""
    config = default_config(Sizes(4096, 32768, 24, 2, 2, *order))
    assert (config.swap, config.tile_m, config.grid_minor) == (True, 256, "m")
    longer = default_config(Sizes(4096, 32768, 200, 2, 2, *order))
    assert (longer.swap, longer.alternate, longer.grid_minor) == (True, True, "m")
    options = {"transpose_a": order[0], "transpose_b": order[1], "config": config}
    assert relative_error(*product(392, 776, 24, **options)) < 4e-3
    small = default_config(Sizes(512, 1024, 24, 2, 2, *order))
    assert small.tile_m * small.tile_n < config.tile_m * config.tile_n


def test_order_of_tiles_of_the_transposed_product():
    """Multiprocessors near each other have tiles that share operands: not all of the columns."""
    sizes = Sizes(2772, 512, 2496, 2, 2)
    found = [one for one in candidates(sizes) if one.swap and (one.tile_m, one.tile_n) == (64, 176)]
    ordered = dataclasses.replace(found[0], group=1)
    assert found[0].group >= 4
    assert nanoseconds(found[0], sizes) < 0.95 * nanoseconds(ordered, sizes)
    # Whole lines of few tiles, in either direction.
    for extents, tile, group in (
        ((335, 1280, 5120), (128, 32), 1),
        ((1300, 1280, 5120), (128, 104), 4),
        ((2094, 4672, 4544), (128, 152), 4),
    ):
        sizes = Sizes(*extents, 2, 2)
        found = [c for c in candidates(sizes) if c.swap and (c.tile_m, c.tile_n) == tile]
        assert {c.group for c in found if c.cluster == c.split_k == 1} == {group}


WIDE = MatmulConfig(
    tile_m=128, tile_n=304, tile_k=64, stages=3, swap=True, split="n", epilogue_n=64, group=1
)
TALL = MatmulConfig(
    tile_m=192, tile_n=104, tile_k=64, stages=5, swap=True, alternate=True, epilogue_n=32, group=1
)


@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        dataclasses.replace(WIDE, tile_n=272, stages=4, epilogue_n=16),
        TALL,
        dataclasses.replace(TALL, stages=4, cluster=2, cluster_along="n", epilogue_n=64),
    ],
)
def test_wide_and_tall_tiles(config):
    """More columns than one instruction has, and 192 rows of warpgroups that take turns."""
    result, expected = product(2 * config.tile_n + 9, 264, 200, config=config)
    assert relative_error(result, expected) < 4e-3


def test_narrow_epilogue():
    """Tiles are among the candidates with fewer columns written at a time, for a stage more."""
    for extents, rows, columns in (((869, 5120, 13824), 128, 304), ((435, 18176, 4544), 192, 112)):
        sizes = Sizes(*extents, 2, 2)
        found = {
            one.stages: one.epilogue_n
            for one in candidates(sizes)
            if (one.tile_m, one.tile_n) == (rows, columns) and one.swap
            if one.cluster == one.parts == one.last_parts == one.split_k == 1
            if one.alternate == (rows == 192)
        }
        assert len(found) == 2 and found[max(found)] < found[min(found)]


def test_columns_that_fill_a_round():
    """There are tiles of which as many as there are multiprocessors cover few rows of weights."""
    sizes = Sizes(2260, 640, 1280, 2, 2)
    tiles = {-(-2260 // one.tile_n) * 5 for one in candidates(sizes) if one.swap}
    assert any(120 < count <= 132 for count in tiles)


def test_scalar_scales():
    """One factor for all rows and one for all columns."""
    a = random_matrix(1, (64, 128), ml_dtypes.float8_e4m3fn)
    b = random_matrix(2, (64, 128), ml_dtypes.float8_e4m3fn)
    result = matmul(
        jnp.asarray(a),
        jnp.asarray(b),
        transpose_b=True,
        row_scale=jnp.float32(0.5),
        column_scale=jnp.asarray([3.0], jnp.float32),
        out_dtype=jnp.float32,
    )
    expected = 1.5 * (a.astype(np.float64) @ b.astype(np.float64).T)
    assert relative_error(np.asarray(result, np.float64), expected) < 1e-3


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    m=st.integers(1, 200),
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
)
def test_any_shape(m, n, k, transpose_a, transpose_b):
    """The default configuration takes any shape."""
    result, expected = product(m, n, k, transpose_a=transpose_a, transpose_b=transpose_b)
    assert np.abs(result - expected).max() <= 2**-7 * np.abs(expected).max() + 1e-3


@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(False, True), (True, False)])
def test_gradients(transpose_a, transpose_b):
    """Gradients of both operands and of the epilogue's."""
    m, n, k = 64, 72, 40
    a = jnp.asarray(random_matrix(1, (k, m) if transpose_a else (m, k), np.float32))
    b = jnp.asarray(random_matrix(2, (n, k) if transpose_b else (k, n), np.float32))
    bias = jnp.asarray(random_matrix(3, (n,), np.float32))
    scale = jnp.asarray(random_matrix(4, (n,), np.float32))
    weights = jnp.asarray(random_matrix(5, (m, n), np.float32))

    def ours(a, b, bias, scale):
        out = matmul(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, bias=bias, column_scale=scale,
            activation=jnp.tanh,
        )  # fmt: skip
        return jnp.sum(out * weights)

    def reference(a, b, bias, scale):
        left, right = a.T if transpose_a else a, b.T if transpose_b else b
        product = jnp.matmul(left, right, precision="highest")
        return jnp.sum(jnp.tanh(product * scale + bias) * weights)

    # Small products, so that the rounding to tf32 stays small after tanh.
    arguments = (0.1 * a, b, bias, scale)
    found = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)))(*arguments)
    expected = jax.jit(jax.grad(reference, argnums=(0, 1, 2, 3)))(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(np.asarray(one, np.float64), np.asarray(other, np.float64)) < 5e-3


def test_plain_gradients_take_two_products():
    """Without activation the sums are not computed again."""
    a = jnp.asarray(random_matrix(1, (64, 32), BFLOAT16))
    b = jnp.asarray(random_matrix(2, (32, 64), BFLOAT16))
    residual = jnp.asarray(random_matrix(3, (64, 64), BFLOAT16))

    def loss(a, b, residual):
        return jnp.sum(matmul(a, b, residual=residual).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(a, b, residual)
    assert str(traced.jaxpr).count("name=matmul") <= 3
    _, _, d_residual = jax.grad(loss, argnums=(0, 1, 2))(a, b, residual)
    assert (np.asarray(d_residual, np.float32) == 1).all()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 8192, 8192), (300, 5000, 700), (8192,) * 3])
def test_default_configurations_fit(shape, size):
    """They take no more shared memory than there is, and use most of it."""
    config = default_config(Sizes(*shape, size, max(2, size)))
    assert config.shared_bytes(size, max(2, size)) <= SHARED_MEMORY
    assert config.stages >= 3


def test_candidates():
    """The default configuration is the first; all fit; none comes twice."""
    for shape in ((4096, 4096, 4096), (16, 8192, 8192)):
        found = matmul_configs(*shape, BFLOAT16)
        assert found[0] == default_config(Sizes(*shape, 2, 2))
        assert len(set(found)) == len(found) > 4
        assert all(config.fits(2, 2) for config in found)


@settings(max_examples=30)
@given(
    m=st.integers(1, 20000),
    n=st.integers(1, 200000),
    k=st.integers(1, 70000),
    size=st.sampled_from([1, 2, 4]),
    out_size=st.sampled_from([1, 2, 4]),
    transpose_b=st.booleans(),
)
def test_every_shape_has_configurations(m, n, k, size, out_size, transpose_b):
    """They fit into shared memory, have clusters that exist, and a time that can be compared."""
    sizes = Sizes(m, n, k, size, out_size, transpose_b=transpose_b)
    config = default_config(sizes)
    assert config.fits(size, out_size)
    assert config.cluster * config.split_k <= 8
    assert config.parts * config.split_k <= -(-k // config.tile_k)
    assert 0 < nanoseconds(config, sizes) < float("inf")


def test_few_tiles_share_their_steps():
    """A long K extent keeps all multiprocessors busy, whichever way."""
    for m, n, k in ((128, 128, 65536), (1, 1536, 7168), (300, 1536, 7168), (257, 64, 20000)):
        config = default_config(Sizes(m, n, k, 2, 2))
        rows, columns = (n, m) if config.swap else (m, n)
        tiles = -(-rows // config.tile_m) * -(-columns // config.tile_n)
        assert tiles * config.parts * config.split_k * config.cluster >= 66, (m, n, k, config)


def test_no_slow_code():
    """The assembler neither spills nor serializes products, in any candidate of a few shapes."""
    a = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    wide = dataclasses.replace(CONFIGS["192 rows"], stages=4)
    for config in (MatmulConfig(), CONFIGS["large"], CONFIGS["swapped"], SMALL, wide):
        compiled = pallasite.compile(
            lambda a, b, config=config: matmul(a, b, config=config),
            a,
            a,
            target="sm_90a",
            assemble=True,
        )
        assert compiled.resources.spill_store_bytes == 0
        assert compiled.resources.registers <= 216


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (((64, 32), (16, 64)), {}, "same extent along k"),
        (((64, 32, 1), (32, 64)), {}, "a is not a matrix"),
        (((64, 32), (32, 64)), {"bias": jnp.zeros(32)}, "bias does not fit"),
        (((64, 32), (32, 64)), {"row_scale": jnp.zeros(32)}, "row_scale does not fit"),
        (((64, 32), (32, 64)), {"residual": jnp.zeros((64, 64))}, "dtype of the result"),
        (((64, 32), (32, 64)), {"accumulator": jnp.float16}, "not accumulated in float16"),
    ],
)
def test_refusals(arguments, options, text):
    """What does not fit together is said."""
    a, b = (jnp.zeros(shape, jnp.bfloat16) for shape in arguments)
    with pytest.raises(errors.PallasiteError, match=text):
        matmul(a, b, **options)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"split": "k"}, "split"),
        ({"cluster": 3}, "cluster"),
        ({"cluster": 2, "cluster_across": 3}, "cluster_across"),
        ({"cluster_across": 2}, "cluster_across"),
        ({"cluster": 4, "cluster_across": 4}, "cluster_across"),
        ({"tile_m": 96, "split": "m"}, "tensor cores"),
        ({"epilogue_n": 48}, "epilogue_n"),
        ({"in_flight": 2}, "in_flight"),
    ],
)
def test_refused_configurations(fields, text):
    """So is a configuration that cannot be."""
    with pytest.raises(errors.InvalidValueError, match=text):
        MatmulConfig(**fields)
