"""TMA descriptors are fetched while the kernel prepares its barriers."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

SHAPE = (64, 128)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
TRANSFORMS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
    scratch_types=[plgpu.SMEM(SHAPE, jnp.float32, transforms=TRANSFORMS), plgpu.Barrier()],
)
def copy(x_ref, o_ref, tile, barrier):
    plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(tile, o_ref)
    plgpu.wait_smem_to_gmem(0)


def test_each_descriptor_once_before_the_barriers():
    ptx = pallasite.compile(copy, X, target="sm_90a").ptx
    found = [m.start() for m in re.finditer(r"prefetch\.tensormap", ptx)]
    assert len(found) == 2
    assert max(found) < ptx.index("mbarrier.init") < ptx.index("cp.async.bulk.tensor")
    np.testing.assert_array_equal(copy(X), X)


def test_without_descriptors_there_is_nothing_to_fetch():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    assert "prefetch.tensormap" not in pallasite.compile(kernel, X, target="sm_90a").ptx
    np.testing.assert_array_equal(kernel(X), X * 2)
