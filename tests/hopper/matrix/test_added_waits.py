"""wgmma waits that warpgroup semantics adds where the program has none."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError

pytestmark = pytest.mark.runs_kernels

STEPS, DEPTH = 6, 64
RANDOM = np.random.default_rng(0)
A = jnp.asarray(RANDOM.standard_normal((64, STEPS * DEPTH)), jnp.bfloat16)
B = jnp.asarray(RANDOM.standard_normal((STEPS * DEPTH, 64)), jnp.bfloat16)
PRODUCT = np.asarray(A, np.float32) @ np.asarray(B, np.float32)


def make(body, scratch, **options):
    params = plgpu.CompilerParams(
        **{"lowering_semantics": plgpu.LoweringSemantics.Warpgroup, **options}
    )

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=scratch,
        compiler_params=params,
    )
    def kernel(a_ref, b_ref, o_ref, *scratch):
        def scope(acc):
            body(acc, a_ref, b_ref, *scratch)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), jnp.float32))

    return kernel


def waits(kernel) -> list[int]:
    """How many products the waits of a kernel leave in flight, in their order."""
    ptx = pallasite.compile(kernel, A, B, target="sm_90a").ptx
    return [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)]


def one_buffer(acc, a_ref, b_ref, a, b, barrier):
    """The next step's copies overwrite what the product may still read."""

    def step(i, _):
        depth = pl.ds(i * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(a_ref.at[:, depth], a, barrier)
        plgpu.copy_gmem_to_smem(b_ref.at[depth], b, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.wgmma(acc, a, b)

    lax.fori_loop(0, STEPS, step, None)


BUFFERS = [
    plgpu.SMEM((64, DEPTH), jnp.bfloat16),
    plgpu.SMEM((DEPTH, 64), jnp.bfloat16),
    plgpu.Barrier(num_arrivals=2),
]


def test_copies_wait_for_the_product():
    kernel = make(one_buffer, BUFFERS)
    np.testing.assert_allclose(kernel(A, B), PRODUCT, rtol=1e-4, atol=1e-3)
    assert waits(kernel) == [0, 0]  # Before the copies, and where the accumulator is read.


def test_they_are_reported():
    report = pallasite.compile(make(one_buffer, BUFFERS), A, B, target="sm_90a").layouts
    found = [(one.what, one.primitive) for one in report.insertions]
    assert found == [("wait for wgmma", "copy_gmem_to_smem"), ("barrier", "copy_gmem_to_smem")]
    wait, barrier = report.insertions
    assert wait.location == barrier.location and "test_added_waits.py" in str(wait.location)


def pipelined(acc, a_ref, b_ref):
    """Slots are released a step late, but nobody waits."""

    def step(_, a, b):
        plgpu.wgmma(acc, a, b)

    specification = dict(delay_release=1)
    plgpu.emit_pipeline(
        step,
        grid=(STEPS,),
        in_specs=[
            plgpu.BlockSpec((64, DEPTH), lambda k: (0, k), **specification),
            plgpu.BlockSpec((DEPTH, 64), lambda k: (k, 0), **specification),
        ],
        max_concurrent_steps=3,
    )(a_ref, b_ref)


def test_pipelines_keep_products_in_flight():
    kernel = make(pipelined, [])
    np.testing.assert_allclose(kernel(A, B), PRODUCT, rtol=1e-4, atol=1e-3)
    found = waits(kernel)
    assert 1 in found and found[-1] == 0 and 0 not in found[:-1]


def test_all_warps_wait_before_the_copy_starts():
    """The wait comes before the barrier after which one lane starts the copy."""
    ptx = pallasite.compile(make(pipelined, []), A, B, target="sm_90a").ptx
    waiting = ptx.index("wgmma.wait_group.sync.aligned 1")
    copy = ptx.index("cp.async.bulk.tensor", waiting)
    between = ptx[waiting:copy]
    assert "bar.sync" in between or "barrier" in between.replace("mbarrier", "")


@pytest.mark.parametrize(
    "options",
    [
        dict(lowering_semantics=plgpu.LoweringSemantics.Lane),
        dict(unsafe_no_auto_barriers=True),
    ],
    ids=["lane", "no automatic barriers"],
)
def test_otherwise_it_is_an_error(options):
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    buffers = [
        plgpu.SMEM((64, DEPTH), jnp.bfloat16, transforms=tiles),
        plgpu.SMEM((DEPTH, 64), jnp.bfloat16, transforms=tiles),
        plgpu.Barrier(num_arrivals=2),
    ]
    with pytest.raises(InvalidValueError, match="while a wgmma that reads it is in flight"):
        make(one_buffer, buffers, **options)(A, B)
