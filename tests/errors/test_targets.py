"""What a target cannot do, and primitives that have no rule for it."""

from __future__ import annotations

import jax.numpy as jnp
from refusals import array, build, make, refused

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, MissingRuleError, ResourceError, UnsupportedError
from pallasite.targets import Target

OLD = Target(
    name="sm_80", ptx_version=70, compute_capability=(8, 0), max_shared_memory=166912,
    max_cluster_size=1,
)  # fmt: skip
TILE = plgpu.SMEM((64, 64), jnp.float32)


def _build_for_old(kernel):
    pallasite.compile(kernel, array(128, 64), target=OLD)


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'barrier_arrive' under WARPGROUP semantics \
    on target 'sm_80'
      expected: a case that has a rule: LANE on targets with mbarrier (plugin 'standard'); WARP \
        on targets with mbarrier (plugin 'standard')
      try: compile for sm_100 or sm_100a or sm_103a or sm_110a or sm_120a or sm_90 or sm_90a
    """,
)
def test_barriers():
    @make(scratch_types=[plgpu.Barrier()])
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)  # here

    _build_for_old(kernel)


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'copy_smem_to_gmem' under WARPGROUP semantics on target \
        'sm_80'
      got: operands Ref<smem>{float32[64,64]}, Ref<gmem>{float32[128,64]}
      expected: a case that has a rule: LANE on targets with tma_scatter for operands of which \
        scatters is true (plugin 'blackwell'); LANE on every target for operands of which \
        scatters is true (plugin 'blackwell'); LANE on targets with tma (plugin 'standard'); \
        WARP on targets with tma (plugin 'standard')
      try: compile for sm_100 or sm_100a or sm_103a or sm_110a or sm_120a or sm_90 or sm_90a
    """,
)
def test_stores_by_tma():
    @make(scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_smem_to_gmem(tile, o_ref.at[:64])  # here

    _build_for_old(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: a copy that blocks share without a barrier, or on sm_80
      expected: a barrier, and a target with TMA (sm_90 or later)
    """,
)
def test_shared_copies():
    @make(cluster=(1,), cluster_names=("pair",), scratch_types=[TILE])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_gmem_to_smem(x_ref.at[:64], tile, collective_axes="pair")  # here

    _build_for_old(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: a cluster of 2 blocks is too large for sm_80
      got: cluster=(2,)
      expected: at most 1 blocks
    """,
)
def test_clusters():
    @make(cluster=(2,), cluster_names=("pair",))  # here
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    _build_for_old(kernel)


@refused(
    InvalidValueError,
    r"""
    HERE: the copy cannot be distributed over the lanes
      got: float32[3, 5]
      expected: at least 4 contiguous, aligned bytes for each of the 128 lanes
    """,
)
def test_copies_of_odd_size_by_threads():
    @make(scratch_types=[plgpu.SMEM((3, 5), jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        plgpu.copy_gmem_to_smem(x_ref.at[:3, :5], tile)  # here

    _build_for_old(kernel)


@refused(
    ResourceError,
    r"""
    HERE: kernel kernel exceeds available shared memory: smem_bytes=179200
          179,200 bytes  tile: int8[175, 1024]              HERE
      expected: at most 166912 bytes per block on sm_80
      try: smaller blocks, fewer pipeline stages (max_concurrent_steps), or plgpu.RefUnion for \
        buffers that are not live at the same time
    """,
)
def test_shared_memory_of_a_small_target():
    @make(scratch_types={"tile": plgpu.SMEM((175, 1024), jnp.int8)})  # here
    def kernel(x_ref, o_ref, *, tile):
        o_ref[0, 0] = tile[0, 0].astype(jnp.float32)

    _build_for_old(kernel)


@refused(
    MissingRuleError,
    r"""
    HERE: no lowering rule for primitive 'wait_gmem_to_smem' under WARP semantics on target \
        'sm_90a'
      expected: a case that has a rule: LANE on every target (plugin 'standard')
      try: use it under LANE semantics
    """,
)
def test_primitive_of_warps_only():
    @make()
    def kernel(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp):
            plgpu.wait_gmem_to_smem(0)  # here

    build(kernel)
