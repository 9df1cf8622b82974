"""Transpositions, however they are written, access tiles without bank conflicts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu

SIZE = 64
WAYS = {
    "array": lambda tile: tile[...].T,
    "view": lambda tile: plgpu.transpose_ref(tile, (1, 0))[...],
    "checked": lambda tile: plgpu.load(plgpu.transpose_ref(tile, (1, 0))),
}


def transposition(way, dtype, *, to_shared: bool):
    def body(x_ref, out_ref, tile, turned, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        if not to_shared:
            out_ref[...] = WAYS[way](tile)
            return
        turned[...] = WAYS[way](tile)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned, out_ref)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((SIZE, SIZE), dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((SIZE, SIZE), dtype),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )


@pytest.mark.runs_kernels
@pytest.mark.parametrize("to_shared", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
def test_transposition(way, dtype, to_shared):
    kernel = transposition(way, dtype, to_shared=to_shared)
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE), dtype)
    np.testing.assert_array_equal(kernel(x), x.T)
    report = pallasite.compile(kernel, x, target="sm_90a").layouts
    assert report is not None
    assert report.conversions == ()
    for shared in report.shared[: 2 if to_shared else 1]:
        assert "SwizzleTransform(128)" in shared.layout
        assert not any("has bank conflicts" in reason.text for reason in shared.why)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_turned_view_of_global_memory_is_accessed_as_it_lies(dtype):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((SIZE,), jnp.float32))
    def kernel(x_ref, out_ref):
        columns = plgpu.transpose_ref(x_ref, (1, 0))[...]
        out_ref[...] = columns.astype(jnp.float32).sum(axis=0)

    x = jax.ShapeDtypeStruct((SIZE, SIZE), dtype)
    compiled = pallasite.compile(kernel, x, target="sm_90a")
    vectors = SIZE * SIZE // 128 * np.dtype(dtype).itemsize // 16
    assert compiled.ptx.count("ld.global.v4") >= vectors
    assert "ld.global.b" not in compiled.ptx
