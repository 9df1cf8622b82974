"""Copies tell the L2 cache what nobody reads again."""

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


@pytest.mark.parametrize("evict_first", [False, True])
@pytest.mark.parametrize("transforms", [TRANSFORMS, ()])  # By a tensor map, or without one.
def test_evict_first(evict_first, transforms):
    """Only a hint: what arrives is the same, whichever instruction copies."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32, transforms=transforms), plgpu.Barrier()],
    )
    def copy(x_ref, o_ref, tile, barrier):
        plgpu.copy_gmem_to_smem(x_ref, tile, barrier, evict_first=evict_first)
        plgpu.barrier_wait(barrier)
        o_ref[...] = tile[...]

    ptx = pallasite.compile(copy, X, target="sm_90a").ptx
    loads = re.findall(r"cp\.async\.bulk\S*\.global\S* [^;]*;", ptx)
    hinted = evict_first and bool(transforms)
    policies = re.findall(r"createpolicy\.fractional\.L2::evict_first\.b64 (%\w+)", ptx)
    assert bool(policies) == hinted
    for load in loads:
        assert ("L2::cache_hint" in load) == hinted
        assert not hinted or load.endswith(tuple(f", {policy};" for policy in policies))
    np.testing.assert_array_equal(copy(X), X)
