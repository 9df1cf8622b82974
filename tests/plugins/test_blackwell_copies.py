"""Copies that a pair of blocks shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import UnsupportedError
from pallasite import gpu as plgpu

BLOCK = (64, 64)


def pair_copy(partition, window):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, *BLOCK), jnp.bfloat16),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=[plgpu.SMEM(BLOCK, jnp.bfloat16), plgpu.Barrier()],
    )
    def kernel(x_ref, o_ref, tile, loaded):
        block = jax.lax.axis_index("pair")
        plgpu.copy_gmem_to_smem(
            x_ref, tile, loaded, collective_axes="pair", leader_tracked=partition
        )
        plgpu.barrier_wait(loaded)
        o_ref[block] = tile[...]

    return kernel, jax.ShapeDtypeStruct(window, jnp.bfloat16)


def compiled(partition, window, target="sm_100a"):
    kernel, x = pair_copy(partition, window)
    return pallasite.compile(kernel, x, target=target, assemble=True)


def test_partitioned():
    ptx = compiled(plgpu.CopyPartition.PARTITIONED(0), (128, 64)).ptx
    assert "mapa.shared::cluster.u32" in ptx
    assert ".shared::cta.global.mbarrier::complete_tx::bytes.cta_group::2" in ptx
    assert "16384" in ptx  # bytes of both blocks
    assert "multicast" not in ptx


def test_replicated():
    kernel = compiled(plgpu.CopyPartition.REPLICATED, BLOCK)
    assert ".mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2" in kernel.ptx
    assert kernel.launch.parameters[0].box == (32, 64)


def test_other_targets_refuse():
    kernel, x = pair_copy(plgpu.CopyPartition.PARTITIONED(0), (128, 64))
    with pytest.raises(UnsupportedError) as caught:
        pallasite.compile(kernel, x, target="sm_90a")
    message = str(caught.value)
    assert "test_blackwell_copies.py" in message
    assert "PARTITIONED: sm_90a cannot signal a peer's barrier" in message
    assert "sm_100a" in message
