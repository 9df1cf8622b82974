"""Products of 16-bit activations with narrow weights, against products in double precision."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallasite
from pallasite.codegen.assembler import assemble
from pallasite.codegen.tools import find_tool
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops import MixedConfig, mixed_configs, mixed_matmul
from pallasite_hopper.ops.mixed import kernel
from pallasite_hopper.ops.mixed.choice import default_config
from pallasite_hopper.ops.mixed.config import SHARED_MEMORY
from pallasite_std.api import MixedProblem

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
SMALL = MixedConfig(tile_m=16, epilogue_m=16, stages=2)


def inputs(m, n, k, dtype=BF16, weights=jnp.int8):
    """Activations, and weights (k, n) over the whole range of their dtype."""
    generator = np.random.default_rng(m * n + k)
    info = ml_dtypes.iinfo(weights)
    a = generator.standard_normal((m, k)).astype(dtype)
    w = generator.integers(int(info.min), int(info.max), (k, n), endpoint=True)
    return a, w


def check(a, w, *, weights=jnp.int8, transpose=True, scales=None, config=SMALL, out=jnp.float32):
    """Multiplies on the simulator and compares; weights are (k, n) before transposition."""
    stored = jnp.asarray((w.T if transpose else w).astype(weights))
    function = jax.jit(
        lambda a, w, scales: mixed_matmul(
            a, w, scales=scales, transpose_b=transpose, config=config, out_dtype=out
        )
    )
    result = np.asarray(function(jnp.asarray(a), stored, scales))
    factors = np.ones(1) if scales is None else np.asarray(scales, np.float64)
    effective = w.astype(np.float64)
    if factors.ndim == 2:
        factors = factors.astype(a.dtype).astype(np.float64)
        effective = effective * np.repeat(factors, w.shape[0] // factors.shape[0], 0)
        # A product of two numbers of 8 or 11 bits is exact in float32, so it is rounded once.
        effective = effective.astype(np.float32).astype(a.dtype).astype(np.float64)
        factors = np.ones(1)
    expected = a.astype(np.float64) @ effective * factors
    assert result.shape == expected.shape and result.dtype == np.dtype(out)
    tolerance = {4: 2e-6, 2: 2e-3 if out == np.float16 else 8e-3}[np.dtype(out).itemsize]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=0, atol=tolerance * scale)
    return result


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("weights", "dtype", "transpose"),
    [
        *itertools.product([jnp.int8, jnp.uint8, jnp.int4, jnp.uint4], [BF16, F16], [True]),
        (jnp.int8, F16, False),
        (jnp.uint8, BF16, False),
        (jnp.int4, BF16, False),
    ],
)
@pytest.mark.sampled
def test_dtypes(dtype, weights, transpose):
    """Several tiles along every dimension; every value occurs as a weight."""
    a, w = inputs(24, 144, 192, dtype, weights)
    assert len(np.unique(w)) == 1 << ml_dtypes.iinfo(weights).bits
    check(a, w, weights=weights, transpose=transpose)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("weights", "transpose", "scales"),
    [
        (jnp.int8, True, None),
        (jnp.int8, False, "columns"),
        (jnp.uint8, True, "columns"),
        (jnp.uint8, True, None),
        (jnp.int8, True, "groups"),
    ],
)
def test_weights_as_fractions(weights, transpose, scales):
    """As exact as whole numbers; the last rows of a tile are written by themselves."""
    a, w = inputs(30, 144, 192, BF16, weights)
    config = MixedConfig(tile_m=24, epilogue_m=16, stages=2, fractions=True)
    shape = {None: None, "columns": (144,), "groups": (3, 144)}[scales]
    factors = None
    if shape is not None:
        values = np.random.default_rng(1).uniform(0.5, 2, shape)
        factors = jnp.asarray(values.astype(np.float32))
    found = check(a, w, weights=weights, transpose=transpose, scales=factors, config=config)
    if scales is None:
        whole = dataclasses.replace(config, fractions=False)
        np.testing.assert_array_equal(
            found, check(a, w, weights=weights, transpose=transpose, config=whole)
        )


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weights", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_8_bit_floats(dtype, weights):
    a, _ = inputs(16, 128, 64, dtype)
    w = np.random.default_rng(2).standard_normal((64, 128)).astype(weights)
    check(a, w.astype(np.float64), weights=weights)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 64), (3, 20, 72), (17, 130, 200), (40, 264, 40)])
@pytest.mark.parametrize(
    ("weights", "transpose"), [(jnp.int8, True), (jnp.int8, False), (jnp.int4, True)]
)
@pytest.mark.sampled(alone=("m", "n", "k"))
def test_shapes_that_do_not_divide(m, n, k, transpose, weights):
    a, w = inputs(m, n, k, BF16, weights)
    check(a, w, weights=weights, transpose=transpose, out=jnp.bfloat16)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("split", "tile_m", "scaled"), [(2, 16, True), (4, 16, False), (3, 24, True), (8, 24, False)]
)
def test_split_depth(split, tile_m, scaled):
    """Parts of k that are not all of one size, some possibly empty; rows that blocks can divide
    among each other, and others."""
    a, w = inputs(20, 136, 64 * 5)
    scales = jnp.linspace(0.5, 2, 136) if scaled else None
    config = MixedConfig(tile_m=tile_m, epilogue_m=16, stages=2, split_k=split)
    assert config.exchanges == (tile_m % (8 * split) == 0)
    check(a, w, scales=scales, config=config)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    "config",
    [
        MixedConfig(tile_m=24, epilogue_m=8, tile_k=128, stages=3),
        MixedConfig(tile_m=32, epilogue_m=16, tile_k=128, pieces=4, stages=2),
        MixedConfig(tile_m=8, epilogue_m=8, tile_n=256, tile_k=64, stages=2),
        MixedConfig(tile_m=16, epilogue_m=8, tile_k=64, stages=2, grid_minor="m", group=2),
        MixedConfig(tile_m=32, epilogue_m=8, tile_k=64, stages=2, cluster=2),
        MixedConfig(tile_m=16, epilogue_m=8, tile_k=64, stages=2, cluster=2, split_k=2),
        MixedConfig(tile_m=24, epilogue_m=16, tile_n=64, warpgroups=1, stages=3),
        MixedConfig(tile_m=48, tile_n=64, warpgroups=1, stages=2, split_k=3),
    ],
    ids=lambda config: (
        f"{config.tile_m}x{config.tile_n}x{config.tile_k}x{config.cluster}x{config.split_k}"
    ),
)
def test_configurations(config):
    check(*inputs(40, 264, 320), config=config)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("options", "blocks", "weights"),
    [
        # Of ten tiles four blocks share the last two, of whose sums one has all or each a part.
        ({"last_parts": 2, "tile_m": 24, "epilogue_m": 16, "stages": 3}, 4, jnp.int8),
        ({"last_parts": 2, "tile_m": 32, "epilogue_m": 16, "stages": 2}, 6, jnp.int4),
        # None are left, or too many.
        ({"last_parts": 2, "tile_m": 24, "epilogue_m": 8, "stages": 3}, 10, jnp.int8),
        ({"last_parts": 2, "tile_m": 24, "epilogue_m": 8, "stages": 3}, 7, jnp.int8),
    ],
)
def test_last_tiles_that_blocks_share(options, blocks, weights):
    a, w = inputs(100, 256, 320, BF16, weights)
    bits = {jnp.int8: 8, jnp.int4: 4}[weights]
    problem = MixedProblem(
        m=100, n=256, k=320, dtype=BF16, weights=np.dtype(weights), weight_bits=bits,
        out_dtype=np.dtype(np.float32), transposed=True, turned=False, group=0, column_scale=False,
    )  # fmt: skip
    with pallasite.config.scoped(sanitize=True):
        run = jax.jit(kernel.build(problem, MixedConfig(**options), blocks))
        result = run(jnp.asarray(a), jnp.asarray(w.T.astype(weights)))
    expected = a.astype(np.float64) @ w
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.runs_kernels
@pytest.mark.parametrize("cluster", [1, 2])
def test_column_scales(cluster):
    """The last tile of a cluster begins beyond the last column."""
    a, w = inputs(20, 264, 128)
    scales = jnp.asarray(np.random.default_rng(1).uniform(-2, 2, 264).astype(jnp.float32))
    config = MixedConfig(tile_m=16, epilogue_m=16, stages=2, cluster=cluster)
    check(a, w, scales=scales, config=config)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("group", "tile_k", "transpose"),
    [
        (8, 64, True),
        (16, 128, False),
        (32, 64, True),
        (32, 128, False),
        (64, 64, True),
        (64, 128, False),
        (64, 128, True),
        (192, 64, True),
        (256, 128, False),
    ],
)
def test_group_scales(group, tile_k, transpose):
    """Groups inside of a step, and steps inside of a group."""
    k = max(256, 2 * group)
    a, w = inputs(16, 136, k)
    scales = np.random.default_rng(1).uniform(0.5, 2, (k // group, 136)).astype(np.float32)
    config = MixedConfig(tile_m=16, epilogue_m=16, tile_k=tile_k, stages=2)
    check(a, w, scales=jnp.asarray(scales), config=config, transpose=transpose)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_group_scales_of_4_bits(dtype):
    a, w = inputs(16, 136, 256, dtype, jnp.int4)
    scales = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, (2, 136)).astype(jnp.float32))
    config = MixedConfig(tile_m=16, epilogue_m=16, tile_k=128, stages=2)
    check(a, w, weights=jnp.int4, scales=scales, config=config)


@pytest.mark.runs_kernels
def test_odd_numbers_of_parts_of_the_epilogue():
    """Several tiles of a block, of 144 rows that are written in nine parts with two buffers."""
    a, w = inputs(293, 128 * 45, 64, BF16, jnp.int8)
    config = MixedConfig(tile_m=144, epilogue_m=16)
    check(a, w, config=config, out=jnp.bfloat16)


def test_tiles_that_fill_rounds():
    """Rows of tiles are chosen such that rounds of tiles take the least time."""
    for extents, rows, depth, warpgroups in (
        ((4096, 8192, 8192), 256, 64, 2),
        ((483, 5120, 5120), 168, 128, 2),  # 120 tiles
        ((1993, 1280, 1280), 160, 128, 2),  # 130
        ((3000, 6144, 5120), 160, 128, 2),  # 912, seven rounds
        ((423, 3072, 3072), 88, 128, 2),  # 120
        ((256, 4096, 4096), 128, 128, 1),  # 128
        ((200, 8192, 8192), 200, 64, 1),  # 128
    ):
        config = default_config(*extents, 8, 2)
        assert (config.tile_m, config.tile_k, config.warpgroups) == (rows, depth, warpgroups)
        assert config.split_k == 1
        assert config.shared_bytes(8, 2) <= SHARED_MEMORY


def test_tiles_that_whole_rounds_leave():
    """Blocks share them where few are left after long rounds: 288 and 994 tiles."""
    for extents, rows in (((364, 18432, 6144), 192), ((878, 18176, 4608), 176)):
        config = default_config(*extents, 8, 2)
        assert (config.tile_m, config.last_parts) == (rows, 2)
        assert config.stages >= 4 and config.shared_bytes(8, 2) <= SHARED_MEMORY
    # Not with scales of groups, nor where sums take longer than a round.
    assert default_config(364, 18432, 6144, 8, 2, group=128).last_parts == 1
    assert default_config(378, 9216, 3072, 4, 2).last_parts == 1


@pytest.mark.parametrize("group", [8, 16, 192, 256])
def test_default_configuration_fits_groups(group):
    """Room is left for their scales, and steps are no deeper than groups allow."""
    for m in (150, 300, 1000, 4096):
        config = default_config(m, 4096, 768, 8, 2, group=group)
        assert config.fits_group(group)
        assert config.shared_bytes(8, 2, group) <= SHARED_MEMORY and config.stages > 2


@pytest.mark.runs_kernels
def test_default_configuration():
    a, w = inputs(5, 24, 128)
    np.testing.assert_allclose(
        np.asarray(mixed_matmul(jnp.asarray(a), jnp.asarray(w, jnp.int8)), np.float64),
        a.astype(np.float64) @ w,
        rtol=1e-2,
        atol=3,
    )


def test_configurations_fit_in_shared_memory():
    """Also where blocks share the tiles that the default leaves for last."""
    shared = 0
    for m, bits in itertools.product((1, 16, 64, 100, 128, 512, 4096), (4, 8)):
        for n, k in ((4096, 4096), (8192, 8192), (18176, 4608), (9216, 3072)):
            configs = mixed_configs(m, n, k, bits)
            shared += configs[0].last_parts > 1
            assert all(config.shared_bytes(bits, 2) <= 227 * 1024 for config in configs)
            assert len(configs) >= 5
    assert shared


@pytest.mark.parametrize(
    ("m", "scaled", "weights"),
    [
        (16, False, jnp.int8),
        (16, True, jnp.int4),
        (128, False, jnp.int4),
        (128, True, jnp.int8),
        (700, True, jnp.int4),  # Tiles of 176 rows.
        (4096, False, jnp.int8),
        (4096, False, jnp.int4),
        (4096, True, jnp.int8),
        (4096, True, jnp.int4),
    ],
)
@pytest.mark.sampled
def test_no_spills_and_no_serialization(m, scaled, weights):
    """Warnings of ptxas are errors."""
    n = k = 4096
    scales = jax.ShapeDtypeStruct((k // 128, n), jnp.float32) if scaled else None
    a, w = jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((n, k), weights)
    kernel = pallasite.compile(
        lambda a, w, scales: mixed_matmul(a, w, scales=scales, transpose_b=True),
        a, w, scales, target="sm_90a",
    )  # fmt: skip
    if find_tool("ptxas").path is None:
        pytest.skip("ptxas is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembly = assemble(kernel.ptx, kernel.name)
    assert assembly.spill_store_bytes == 0
    assert "cvt.rn.f32.s" not in kernel.ptx and "cvt.rn.bf16.s" not in kernel.ptx


@pytest.mark.parametrize(
    ("a", "w", "options", "error", "words"),
    [
        ((8, 64), (32, 16), {}, InvalidValueError, "same extent along k"),
        ((8, 64, 1), (64, 16), {}, InvalidTypeError, "a is not a matrix"),
        ((8, 64), (64, 16), {"scales": jnp.ones(15)}, InvalidValueError, "scales do not fit"),
        ((8, 64), (64, 16), {"scales": jnp.ones((3, 16))}, InvalidValueError, "scales do not fit"),
        ((8, 64), (64, 16), {"scales": jnp.ones((16, 16))}, InvalidValueError, "groups of sc"),
    ],
)
def test_messages(a, w, options, error, words):
    with pytest.raises(error, match=words):
        mixed_matmul(jnp.zeros(a, jnp.bfloat16), jnp.zeros(w, jnp.int8), **options)


def test_message_of_dtypes():
    with pytest.raises(InvalidTypeError, match="b has a dtype"):
        mixed_matmul(jnp.zeros((8, 64), BF16), jnp.zeros((64, 16), BF16))
    with pytest.raises(InvalidTypeError, match="a has a dtype"):
        mixed_matmul(jnp.zeros((8, 64)), jnp.zeros((64, 16), jnp.int8))


@pytest.mark.parametrize(
    ("name", "value"),
    [("tile_m", 12), ("tile_n", 64), ("tile_k", 32), ("pieces", 3), ("stages", 1), ("split_k", 0),
     ("cluster", 3), ("grid_minor", "k"), ("epilogue_m", 20), ("last_parts", 3)],
)  # fmt: skip
def test_configuration_messages(name, value):
    with pytest.raises(InvalidValueError, match=f"MixedConfig.{name} does not fit"):
        MixedConfig(**{name: value})
