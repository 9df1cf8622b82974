"""Outputs that the grid covers in part or twice, and the same kernels as they should be."""

from __future__ import annotations

import pytest
from checked import BOTH, F32, array, findings, findings_of, only
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu

both = pytest.mark.parametrize("semantics", BOTH)


@both
def test_in_part(semantics):
    def body(x, o):
        at = pl.ds(lax.axis_index("i") * 64, 64)
        o[at] = x[at]  # here

    def found(blocks, extent=512):
        x = array(extent)
        return findings(body, [x], x, grid=(blocks,), grid_names=("i",), semantics=semantics)

    assert not found(8)
    only(found(7), "output 0 in part: no block writes index 448 of dimension 0, which has 512")
    only(found(7, 449), "no block writes index 448 of dimension 0, which has 449")


@both
def test_two_dimensions_by_copies(semantics):
    def body(x, o, tile, barrier):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        at = (pl.ds(i * 64, 64), pl.ds(j * 64, 64))
        plgpu.copy_gmem_to_smem(x.at[at], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[at])  # here
        plgpu.wait_smem_to_gmem(0)

    def found(grid):
        return findings(
            body, [array(128, 192)], array(128, 192), grid=grid, grid_names=("i", "j"),
            scratch_types=[plgpu.SMEM((64, 64), F32), plgpu.Barrier()], semantics=semantics,
        )  # fmt: skip

    assert not found((2, 3))
    assert not found((3, 3))  # What lies outside is dropped.
    only(found((2, 2)), "no block writes index 128 of dimension 1, which has 192")
    only(found((1, 3)), "no block writes index 64 of dimension 0, which has 128")


def test_loops_clusters_and_threads():
    def body(x, o, *, steps):
        block = lax.axis_index("i") * 2 + lax.axis_index("c")

        def step(s, _):
            at = pl.ds(((s * 4 + block) * 2 + lax.axis_index("wg")) * 64, 64)
            o[at] = x[at]

        lax.fori_loop(0, steps, step, None)

    def found(steps):
        x = array(1536)
        return findings(
            lambda *refs: body(*refs, steps=steps), [x], x, grid=(2,), grid_names=("i",),
            cluster=(2,), cluster_names=("c",), num_threads=2, thread_name="wg",
        )  # fmt: skip

    assert not found(3)
    (one,) = found(2)
    assert "no block writes index 1024 of dimension 0" in one.text


def test_what_blocks_write_together():
    """Several equations, positions by division, conditions that cover everything together."""

    def body(x, o):
        i = lax.axis_index("i")
        at = pl.ds((i % 2) * 256 + (i // 2) * 64, 64)
        o[at] = x[at]
        first = i == 0

        @pl.when(first)
        def _():
            o[pl.ds(128, 64)] = x[pl.ds(128, 64)]

        @pl.when(~first)
        def _():
            o[pl.ds(192, 64)] = x[pl.ds(192, 64)]
            o[pl.ds(384, 128)] = x[pl.ds(384, 128)]

    assert not [
        one
        for one in findings(body, [array(512)], array(512), grid=(4,), grid_names=("i",))
        if "in part" in one.text
    ]


def test_aliased_outputs_may_be_covered_in_part():
    def body(x, o):
        o[pl.ds(0, 64)] = x[pl.ds(0, 64)] + 1

    kernel = plgpu.kernel(body, out_type=array(512), input_output_aliases={0: 0})
    assert not findings_of(kernel, [array(512)])
    only_part = plgpu.kernel(body, out_type=array(512))
    assert len(findings_of(only_part, [array(512)])) == 1


@both
def test_twice(semantics):
    def body(x, o):
        i, k = lax.axis_index("i"), lax.axis_index("k")
        o[pl.ds(i * 64, 64)] = x[pl.ds((i * 4 + k) * 64, 64)]  # here

    found = findings(
        body, [array(1024)], array(256), grid=(4, 4), grid_names=("i", "k"), semantics=semantics
    )
    only(found, "covers output 0 twice", "another k write other data to the same elements")

    def same(x, o):
        i = lax.axis_index("i")
        o[pl.ds(i * 64, 64)] = x[pl.ds(i * 64, 64)]

    assert not findings(same, [array(256)], array(256), grid=(4, 4), grid_names=("i", "k"))


def test_windows_that_overlap():
    def body(x, o, *, step):
        i = lax.axis_index("i")
        o[pl.ds(i * step, 128)] = x[pl.ds(i * 128, 128)]

    def found(step):
        extent = step * 3 + 128
        return findings(
            lambda *refs: body(*refs, step=step), [array(512)], array(extent),
            grid=(4,), grid_names=("i",),
        )  # fmt: skip

    assert not found(128)
    assert "twice: blocks with another i" in found(64)[0].text


def test_one_block_may_write_in_a_loop():
    def body(x, o):
        def step(s, _):
            o[pl.ds(lax.axis_index("i") * 64, 64)] = x[pl.ds(s * 64, 64)]

        lax.fori_loop(0, 4, step, None)

    assert not findings(body, [array(256)], array(256), grid=(4,), grid_names=("i",))


def test_block_specs():
    def call(index_map, grid, blocks):
        return pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 2),
            out_shape=array(256),
            grid=grid,
            in_specs=[pl.BlockSpec((64,), lambda i, k: (i * blocks + k,))],
            out_specs=pl.BlockSpec((64,), index_map),
            compiler_params=pallasite.CompilerParams(),
        )

    assert not findings_of(call(lambda i, k: (i * 2 + k,), (2, 2), 2), [array(256)])
    (one,) = findings_of(call(lambda i, k: (i,), (4, 2), 2), [array(512)])
    assert "twice" in one.text
    (one,) = findings_of(call(lambda i, k: (i * 2 + k,), (1, 2), 2), [array(256)])
    assert "no block writes index 128" in one.text


def test_disabled():
    def body(x, o):
        o[pl.ds(0, 64)] = x[pl.ds(0, 64)]

    with pallasite.config.scoped(disabled_passes="check-grid"):
        assert not findings(body, [array(512)], array(512))


def test_blocks_that_take_turns():
    """A semaphore orders what blocks write."""

    def body(x, o):
        i = lax.axis_index("i")
        turn = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.semaphore_wait(turn, i, decrement=False)
        o[...] = x[pl.ds(i * 64, 64)]
        pl.semaphore_signal(turn, 1)

    assert not findings(body, [array(256)], array(64), grid=(4,), grid_names=("i",))
