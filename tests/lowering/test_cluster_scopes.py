"""Barriers of a cluster order ordinary accesses for the whole cluster only where there are any."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels import array, compile_to_ptx, make
from pallasite.language.memory import SMEM
from pallasite.language.transforms import cluster_ref
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.primitives.arrays import atomic_add
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait
from pallasite_std.primitives.copies import copy_gmem_to_smem

SHAPE = (64, 32)


def compiled(body):
    kernel = make(
        SHAPE,
        jnp.float32,
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[
            SMEM(SHAPE, jnp.float32),
            Barrier(),
            ClusterBarrier(collective_axes=("c",)),
        ],
    )(body)
    return compile_to_ptx(kernel, array(*SHAPE, dtype=jnp.float32))


def test_only_copies():
    """Copies are ordered by themselves: the block's own scope is enough."""

    def body(x, o, scratch, loaded, read):
        copy_gmem_to_smem(x, scratch, loaded, collective_axes="c")
        barrier_wait(loaded)
        o[...] = scratch[...]
        barrier_arrive(read)
        barrier_wait(read)

    ptx = compiled(body)
    assert "mbarrier.arrive.release.cta.shared::cluster.b64" in ptx
    assert ".release.cluster.shared::cluster" not in ptx
    assert ".acquire.cluster" not in ptx


def test_updates_of_another_block():
    """Atomic updates of another block's memory are published to the cluster."""

    def body(x, o, scratch, loaded, read):
        del loaded
        other = 1 - jax.lax.axis_index("c")
        atomic_add(cluster_ref(scratch, {"c": other}), x[...])
        barrier_arrive(read)
        barrier_wait(read)
        o[...] = scratch[...]

    ptx = compiled(body)
    assert "mbarrier.arrive.release.cluster.shared::cluster.b64" in ptx
    assert ".acquire.cluster" in ptx
