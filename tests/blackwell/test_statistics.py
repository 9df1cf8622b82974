"""What a run says of tensor memory and the tensor cores, in one process and in several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

BLOCKS, ROWS, COLUMNS, DEPTH = 3, 128, 32, 64


def product(a_ref, b_ref, out_ref, a_smem, b_smem, acc, filled, done):
    """Each block has a tile of rows."""
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(a_ref.at[rows], a_smem, filled)
    plgpu.copy_gmem_to_smem(b_ref, b_smem, filled)
    plgpu.barrier_wait(filled)
    plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
    plgpu.barrier_wait(done)
    out_ref[rows] = plgpu.async_load_tmem(acc)


@pytest.fixture(scope="module")
def compiled():
    kernel = plgpu.kernel(
        product,
        out_type=jax.ShapeDtypeStruct((BLOCKS * ROWS, COLUMNS), jnp.float32),
        grid=(BLOCKS,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((ROWS, DEPTH), jnp.float16),
            plgpu.SMEM((DEPTH, COLUMNS), jnp.float16),
            plgpu.TMEM((ROWS, COLUMNS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(target="sm_100a"),
    )
    a = jax.ShapeDtypeStruct((BLOCKS * ROWS, DEPTH), jnp.float16)
    return pallasite.compile(kernel, a, jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.float16))


@pytest.mark.parametrize("processes", [1, 2])
def test_tensor_memory_is_counted(compiled, processes):
    generator = np.random.default_rng(1)
    a = generator.standard_normal((BLOCKS * ROWS, DEPTH)).astype(np.float16)
    b = generator.standard_normal((DEPTH, COLUMNS)).astype(np.float16)
    found = simulate(compiled, a, b, processes=processes, sanitize=True)
    assert not found.findings
    np.testing.assert_allclose(
        found.outputs[0], a.astype(np.float64) @ b.astype(np.float64), rtol=1e-4, atol=1e-4
    )
    statistics = found.statistics
    cells = BLOCKS * ROWS * COLUMNS
    assert statistics.tensor_operations == {"f16": 2 * cells * DEPTH}
    # One instruction for 16 elements along k writes D, and all but the first read it; then it is
    # loaded.
    steps = DEPTH // 16
    assert statistics.bytes_moved["tensor", "write"] == steps * 4 * cells
    assert statistics.bytes_moved["tensor", "read"] == steps * 4 * cells
    # Copies fill shared memory, and products read it: A and B of each block.
    operands = 2 * BLOCKS * (ROWS + COLUMNS) * DEPTH
    assert statistics.bytes_moved["shared", "write"] >= operands
    assert statistics.shared_bytes_of_engines >= 2 * operands
    assert "tensor cores (f16)" in {one.resource for one in statistics.estimate.bounds}
    text = str(statistics)
    assert f"f16  {2 * cells * DEPTH:,}" in text
    assert "tensor read" in text and "tensor write" in text
