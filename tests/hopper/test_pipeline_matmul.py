"""A persistent matrix product on the warp-specialised pipeline, in small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.hopper.pipeline_support import pipeline

from pallasite import gpu as plgpu

pytestmark = [pytest.mark.runs_kernels, pytest.mark.usefixtures("semantics")]

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ROWS, COLUMNS, DEPTH = 64, 64, 64  # of a consumer warpgroup's tile, and of a step


def matmul(a, b, *, blocks, cluster, delay, with_state):
    (m, k), (_, n) = a.shape, b.shape
    m_tiles, n_tiles, steps = m // (2 * ROWS), n // (cluster * COLUMNS), k // DEPTH

    def body(a_ref, b_ref, o_ref, staging):
        wg = lax.axis_index("wg")
        member = lax.axis_index("cluster") if cluster > 1 else jnp.int32(0)

        def make(tile_m, tile_n, context, state=None):
            def step(_, a_block, b_block, accumulator):
                plgpu.wgmma(accumulator, a_block.at[pl.ds(wg * ROWS, ROWS)], b_block)
                plgpu.wgmma_wait(delay)
                return accumulator

            shared = dict(collective_axes=("cluster",)) if cluster > 1 else {}
            return pipeline(
                step,
                2,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(
                        (2 * ROWS, DEPTH),
                        lambda i: (tile_m, i),
                        transforms=TILED,
                        delay_release=delay,
                        **shared,
                    ),
                    plgpu.BlockSpec(
                        (DEPTH, COLUMNS),
                        lambda i: (i, tile_n * cluster + member),
                        transforms=TILED,
                        delay_release=delay,
                    ),
                ],
                max_concurrent_steps=2 + delay,
                compute_context=context,
                pipeline_state=state,
            )

        def run(allocations):
            @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="sm")
            def _(info):
                tile_m, tile_n = plgpu.planar_snake(info.index[0], (m_tiles, n_tiles), 0, 2)

                def context(run_steps):
                    def scope(accumulator):
                        run_steps(accumulator)
                        return accumulator[...]

                    product = pl.run_scoped(scope, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staging[wg] = product.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    rows = pl.ds((tile_m * 2 + wg) * ROWS, ROWS)
                    columns = pl.ds((tile_n * cluster + member) * COLUMNS, COLUMNS)
                    plgpu.copy_smem_to_gmem(staging.at[wg], o_ref.at[rows, columns])

                state = None
                if with_state:
                    first, last = (
                        info.local_index == 0,
                        info.local_index == info.num_local_steps - 1,
                    )
                    kinds = plgpu.PipelinePipeline
                    state = jnp.where(
                        first,
                        jnp.where(last, int(kinds.SINGLE), int(kinds.START)),
                        jnp.where(last, int(kinds.STOP), int(kinds.STEADY)),
                    )
                make(tile_m, tile_n, context, state)(a_ref, b_ref, allocations=allocations)

        allocations = make(0, 0, lambda _: None).get_allocations(a_ref, b_ref)
        pl.run_scoped(run, allocations, collective_axes="wg")
        plgpu.wait_smem_to_gmem(0)

    options = dict(cluster=(cluster,), cluster_names=("cluster",)) if cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((2, ROWS, COLUMNS), jnp.bfloat16, transforms=TILED)],
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        **options,
    )(a, b)


@pytest.mark.parametrize(
    ("blocks", "cluster", "delay", "with_state"),
    [(1, 1, 0, False), (2, 1, 1, False), (2, 1, 1, True), (3, 2, 1, True), (2, 2, 0, False)],
)
@pytest.mark.sampled
def test_matmul(blocks, cluster, delay, with_state):
    generator = np.random.default_rng(0)
    shapes = (256, 192), (192, 128 * cluster)
    a, b = (jnp.asarray(generator.normal(size=shape).astype(jnp.bfloat16)) for shape in shapes)
    out = matmul(a, b, blocks=blocks, cluster=cluster, delay=delay, with_state=with_state)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-7, atol=0.05)
