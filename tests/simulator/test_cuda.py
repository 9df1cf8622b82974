"""PTX that nvcc made of CUDA C++ runs and gives right numbers."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_programs import COMPILER, SOURCES
from cuda_programs import compiled as compiled_source
from sanitizer_support import sanitize_ptx
from simulator_support import run_ptx

from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.launch import Descriptor, Pointer, Shared

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no nvcc here")


def compiled(name: str, *options: str) -> str:
    return compiled_source(SOURCES / name, *options)


def tile_map(shape):
    """The encoder of a descriptor of float32 tiles of 32 x 32."""
    return lambda address: TensorMap(
        address=address,
        element_type=7,
        sizes=shape[::-1],
        strides=(4 * shape[1],),
        box=(32, 32),
        element_strides=(1, 1),
    ).encode()


@pytest.mark.parametrize("options", [(), ("-G",), ("-lineinfo",)])
def test_tensor_copies(options):
    x = np.random.default_rng(1).standard_normal((96, 128)).astype(np.float32)
    y, sums = np.full((128, 96), np.nan, np.float32), np.full(96, np.nan, np.float32)
    run_ptx(
        compiled("tensor_copy.cu", *options),
        Descriptor(0, tile_map(x.shape)),
        Descriptor(1, tile_map(y.shape)),
        Shared(2),
        arrays=[Pointer(x, "x"), Pointer(y, "y"), Pointer(sums, "sums")],
        grid=3,
    )
    np.testing.assert_array_equal(y, 2 * x.T)
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-5)


FUNCTIONS = (
    lambda x: x + 1,
    lambda x: x * x,
    lambda x: np.sqrt(np.abs(x)),
    lambda x: x / 3,
    lambda x: np.minimum(x, 0.5),
    np.floor,
    np.negative,
)


@pytest.mark.parametrize("options", [(), ("-G",), ("--use_fast_math",)])
def test_mixture(options):
    count, blocks, threads = 500, 6, 96
    x = np.random.default_rng(2).standard_normal(count).astype(np.float32)
    y, sums = np.full(count, np.nan, np.float32), np.zeros(1 + blocks, np.int64)
    coefficients = np.zeros(
        1,
        np.dtype(
            dict(
                names=["scale", "kind", "shift", "table"],
                formats=["f4", "i4", "f8", "5i1"],
                offsets=[0, 4, 8, 16],
                itemsize=24,
            )
        ),
    )
    coefficients[0] = (1.5, 2, 0.25, (1, -2, 3, -4, 5))
    execution = run_ptx(
        compiled("mixture.cu", *options),
        x,
        y,
        sums,
        coefficients.tobytes(),
        np.int32(count),
        grid=blocks,
        block=threads,
        name="mixture",
    )
    at = np.arange(blocks * threads)
    value = np.zeros(len(at))
    value[:count] = x
    table = np.stack([FUNCTIONS[(i + 2) % 7](value) for i in range(7)])
    picked = table[at // 3 % 7, at] * 2.0 ** (at % 8)
    expected = 1.5 * (picked + 0.25 / (at + 1)) + np.array([1, -2, 3, -4, 5])[at % 5]
    np.testing.assert_allclose(y, expected[:count], rtol=1e-5, atol=1e-5)
    assert sums[0] == (at * at % 1013 - at // 7).sum()
    positive = (value > 0).reshape(blocks, threads).sum(axis=1)
    # Blocks 0 and 4, and 1 and 5, share a counter; either may be first.
    assert sums[3] == positive[2] and sums[4] == positive[3]
    assert max(sums[1], sums[5]) == positive[0] + positive[4]
    assert "".join(execution.output) == f"block 1 of 6: {value[threads]:.3f} done\n"


@pytest.mark.parametrize(("name", "count"), [("sorted", 192), ("sorted", 100), ("greatest", 250)])
def test_idioms_that_look_like_errors(name, count):
    choose = np.random.default_rng(count)
    if name == "sorted":
        x, grid = choose.integers(-1000, 1000, 192).astype(np.int32), 1
        expected = np.sort(x[:count])
    else:
        x, grid = choose.random(256).astype(np.float32), 4
        expected = x[:count][np.arange(count) % 32 < 20].max()[None]
    y = np.zeros(len(expected), x.dtype)
    found = sanitize_ptx(
        compiled("idioms.cu"), x, y, np.int32(count), name=name, block=64, grid=grid
    )
    assert found == ""
    np.testing.assert_array_equal(y, expected)


def test_pipeline_and_its_end():
    x = np.random.default_rng(5).standard_normal((5, 128)).astype(np.float32)
    y = np.full((5, 128), np.nan, np.float32)
    found = sanitize_ptx(compiled("idioms.cu"), x, y, np.int32(5), name="pipelined", block=128)
    assert found == ""
    np.testing.assert_array_equal(y, x[:, ::-1])


def test_blocks_synchronize():
    x = np.random.default_rng(9).integers(0, 1 << 30, 6 * 64).astype(np.int32)
    between, y = np.zeros_like(x), np.zeros_like(x)
    found = sanitize_ptx(
        compiled("grid_sync.cu"), x, between, y, np.int32(5), name="rotated", grid=6, block=64
    )
    assert found == ""
    np.testing.assert_array_equal(y, np.roll(x, -33 * 5))


def test_heap_and_stack():
    x = np.random.default_rng(3).integers(0, 10, 128).astype(np.int32)
    y = np.zeros_like(x)
    found = sanitize_ptx(
        compiled("memory.cu"), x, y, np.int32(128), name="reversed", grid=2, block=64
    )
    assert found == ""
    expected = [
        int("".join(str(x[(at + i) % 128]) for i in reversed(range(at % 5 + 1))))
        for at in range(128)
    ]
    np.testing.assert_array_equal(y, expected)


def ackermann(m, n):
    if m == 0:
        return n + 1
    return ackermann(m - 1, ackermann(m, n - 1) if n else 1)


def spread(depth, outer):
    own = [outer[(i + 1) & 3] + depth * (i + 1) for i in range(4)]
    low, high, weight = own[depth & 3], own[(depth + 1) & 3], own[0]
    if depth > 0:
        left, right = spread(depth - 1, own), spread(max(depth - 2, 0), own)
        low, high = min(low, left[0] + own[1]), max(high, right[1] + own[2])
        weight += left[2] * 3 + right[2]
    return low, high, weight


@pytest.mark.parametrize("options", [(), ("-G",)])
def test_recursion(options):
    result = np.full((5, 64), -1, np.int32)
    run_ptx(compiled("calls.cu", *options), result, block=64, name="recursive")
    ranges = [spread(i % 7, [i, 2 * i, i - 7, 5]) for i in range(64)]
    expected = [
        [ackermann(i % 3, i % 5) for i in range(64)],
        [i % 2 == 0 for i in range(64)],
        *zip(*ranges, strict=True),
    ]
    np.testing.assert_array_equal(result, np.array(expected).astype(np.int32))


@pytest.mark.parametrize("options", [(), ("-G",)])
def test_calls_by_address(options):
    values = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    x = values[0].copy()
    run_ptx(compiled("calls.cu", *options), values, np.int32(3), block=64, name="indirect")
    i = np.arange(64)
    y = np.choose(i % 3, [2 * x, x * x, x / np.float32(3)])
    np.testing.assert_array_equal(values[0], y)
    np.testing.assert_allclose(values[1], np.where(i % 5 < 2, 1, 3) * y * y, rtol=1e-6)


@pytest.mark.parametrize("options", [(), ("-G",)])
def test_tiles_of_several_warps(options):
    """They exchange numbers through reserved shared memory."""
    sums = np.zeros(192, np.int32)
    run_ptx(compiled("calls.cu", *options), sums, grid=2, block=192, name="tiles")
    tile = np.arange(192) // 64 * 64
    np.testing.assert_array_equal(sums, 64 * tile + 2016 + 1000 * (tile + 5))
