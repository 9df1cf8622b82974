"""Copies that gather and scatter rows, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tcgen05_support import LANE, WARPGROUP

import pallasite
from pallasite import PallasiteError, UnsupportedError
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])
RANDOM = np.random.default_rng(0)


def tiles(swizzle, bits):
    return (
        plgpu.TilingTransform((8, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )


def moved(count, columns, dtype, semantics, transforms=(), target="sm_100a"):
    """A kernel that gathers rows and scatters them, the columns from a computed one on."""

    def body(x, rows, places, start, out, tile, filled):
        first = pl.multiple_of(start[0], 16)
        numbers = rows[...]
        plgpu.copy_gmem_to_smem(x.at[numbers, pl.ds(first, columns)], tile, filled)
        plgpu.barrier_wait(filled)
        plgpu.copy_smem_to_gmem(tile, out.at[places[...], :])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, columns), dtype),
        scratch_types=[plgpu.SMEM((count, columns), dtype, transforms=transforms), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    x = jnp.asarray(RANDOM.integers(-99, 99, (77, columns + 32)), dtype)
    rows = jnp.asarray(RANDOM.integers(0, 77, count), jnp.int32)
    places = jnp.asarray(RANDOM.permutation(count), jnp.uint32)
    inputs = (x, rows, places, jnp.asarray([16], jnp.int32))
    made = pallasite.compile(kernel, *inputs, target=target)
    expected = np.empty((count, columns), np.asarray(x).dtype)
    expected[np.asarray(places)] = np.asarray(x)[np.asarray(rows), 16 : 16 + columns]
    return made, inputs, expected


@BOTH
@pytest.mark.parametrize(
    ("count", "columns", "dtype", "swizzle"),
    [
        (16, 64, jnp.float32, None),
        (12, 96, jnp.bfloat16, None),
        (4, 256, jnp.int8, None),
        (64, 128, jnp.float16, 64),
        (24, 128, jnp.int8, 128),
        (48, 16, jnp.float32, 32),
    ],
)
def test_rows(count, columns, dtype, swizzle, semantics):
    transforms = ()
    if swizzle is not None:
        transforms = tiles(swizzle, 8 * np.dtype(dtype).itemsize)
    made, inputs, expected = moved(count, columns, dtype, semantics, transforms)
    assert "tile::gather4" in made.ptx and "tile::scatter4" in made.ptx
    simulation = simulate(made, *inputs, sanitize=True)
    assert simulation.findings == ()
    np.testing.assert_array_equal(np.asarray(simulation.outputs[0]), expected)


@BOTH
def test_rows_that_the_matrix_does_not_have(semantics):
    """A gather fills them with zeros, a scatter does not write them."""
    made, (x, _, _, start), _ = moved(8, 64, jnp.float32, semantics)
    rows = np.array([3, 77, -1, 76, 1000, 0, -5, 2], np.int32)
    places = np.arange(8, dtype=np.uint32)[::-1].copy()
    expected = np.where((rows[:, None] >= 0) & (rows[:, None] < 77), np.asarray(x)[rows % 77], 0)
    out = simulate(made, x, rows, places, start, sanitize=True).outputs[0]
    np.testing.assert_array_equal(np.asarray(out)[places], expected[:, 16:80])
    places[3] = 8
    simulation = simulate(made, x, rows, places, start, sanitize=True)
    assert ["never written" in str(finding) for finding in simulation.findings] == [True]
    kept = np.delete(np.arange(8), 3)
    np.testing.assert_array_equal(
        np.asarray(simulation.outputs[0])[places[kept]], expected[kept, 16:80]
    )


@BOTH
def test_refusals(semantics):
    with pytest.raises(PallasiteError) as caught:
        moved(16, 64, jnp.float32, semantics, target="sm_120a")
    assert type(caught.value) is UnsupportedError and "test_gathers.py" in str(caught.value)
    assert "sm_100a or sm_103a or sm_110a" in str(caught.value)
    with pytest.raises(PallasiteError, match="four rows at a time") as caught:
        moved(6, 64, jnp.float32, semantics)
    assert "test_gathers.py" in str(caught.value)
    if semantics is LANE:
        with pytest.raises(PallasiteError, match="most 256 elements"):
            moved(4, 512, jnp.int8, semantics)
