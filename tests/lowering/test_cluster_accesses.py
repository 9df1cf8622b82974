"""Loads and stores in the shared memory of other blocks of a cluster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import UnsupportedError

pytestmark = pytest.mark.runs_kernels

SHAPE = (64, 32)
TRANSFORMS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
X = np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32)


def run(body, transforms, axis):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(X.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM(SHAPE, jnp.float32, transforms=transforms),
            plgpu.ClusterBarrier(collective_axes=(axis,)),
        ],
        cluster=(2, 1) if axis == "x" else (1, 2),
        cluster_names=("x", "y"),
    )
    return np.asarray(kernel(X))


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("transforms", [(), TRANSFORMS])
def test_loads(transforms, axis):
    """Arrays, parts that begin somewhere, and scalars."""

    def body(x_ref, out_ref, tile, barrier):
        here = jax.lax.axis_index(axis)
        tile[...] = x_ref[here]
        meet(barrier)
        peer = plgpu.cluster_ref(tile, {axis: 1 - here})
        out_ref[here, 0:8] = peer.at[pl.ds(here * 8, 8)][...]
        out_ref[here, 8:64] = peer[8:64] + peer[3, 5] + tile[3, 5]

    result = run(body, transforms, axis)
    expected = X[::-1] + X[0, 3, 5] + X[1, 3, 5]
    expected[0, 0:8], expected[1, 0:8] = X[1, 0:8], X[0, 8:16]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transforms", [(), TRANSFORMS])
def test_stores(transforms):
    """What a block writes to another one's memory, that one reads after they met."""

    def body(x_ref, out_ref, tile, barrier):
        here = jax.lax.axis_index("x")
        peer = plgpu.cluster_ref(tile, {"x": 1 - here})
        meet(barrier)
        peer[...] = x_ref[here]
        meet(barrier)
        out_ref[here] = tile[...]

    np.testing.assert_array_equal(run(body, transforms, "x"), X[::-1])


@pytest.mark.parametrize("transforms", [(), TRANSFORMS])
def test_accesses_under_a_mask(transforms):
    """Odd columns come from the other block; even rows are written there."""
    row, column = np.indices(SHAPE)

    def body(x_ref, out_ref, tile, barrier):
        here = jax.lax.axis_index("x")
        odd = jax.lax.broadcasted_iota(jnp.int32, SHAPE, 1) % 2 == 1
        even = jax.lax.broadcasted_iota(jnp.int32, SHAPE, 0) % 2 == 0
        peer = plgpu.cluster_ref(tile, {"x": 1 - here})
        tile[...] = x_ref[here]
        meet(barrier)
        mixed = pltriton.load(peer, mask=odd, other=jnp.zeros(SHAPE, jnp.float32))
        meet(barrier)
        pltriton.store(peer, mixed, mask=even)
        meet(barrier)
        out_ref[here] = tile[...]

    result = run(body, transforms, "x")
    mixed = np.where(column % 2 == 1, X[::-1], 0)
    np.testing.assert_array_equal(result, np.where(row % 2 == 0, mixed[::-1], X))


@pytest.mark.parametrize("store", [True, False])
def test_copies_stay_in_the_block(store):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("x",),
    )
    def kernel(x_ref, out_ref, tile, loaded):
        peer = plgpu.cluster_ref(tile, {"x": 1})
        if store:
            plgpu.copy_smem_to_gmem(peer, out_ref)
        else:
            plgpu.copy_gmem_to_smem(x_ref, peer, loaded)

    with pytest.raises(UnsupportedError, match="the shared memory of another block"):
        pallasite.compile(kernel, jax.ShapeDtypeStruct(SHAPE, jnp.float32), target="sm_90a")
