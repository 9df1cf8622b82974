"""Checks of what shared memory holds, with correct twins."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from checked import BOTH, F32, array, findings, findings_of, only
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

STALE = "without having been written"
MEMBER = "a member of a RefUnion is read after another one was written"
BLOCK = plgpu.BlockSpec((16, 128), lambda i, *_: (i, 0))


def pipeline(step, *, grid=(8,), depth=2, semantics=BOTH[1]):
    def body(x, o):
        run = plgpu.emit_pipeline(
            step, grid=grid, in_specs=[BLOCK], out_specs=[BLOCK], max_concurrent_steps=depth
        )
        run(x, o)  # here

    return findings(body, [array(128, 128)], array(128, 128), semantics=semantics)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_that_no_step_writes(depth, semantics):
    def step(indices, x, o):
        x[...] + o[...]

    only(pipeline(step, depth=depth, semantics=semantics), STALE, "no step writes it")


def test_step_that_does_not_write_its_block():
    def step(indices, x, o):
        @pl.when(indices[0] < 7)
        def _():
            o[...] = x[...]

    only(pipeline(step), STALE, "counter = 7")


def test_steps_that_share_the_writes():
    def step(indices, x, o):
        @pl.when(indices[0] < 3)
        def _():
            o[...] = x[...]

        @pl.when(indices[0] >= 3)
        def _():
            o[...] = -x[...]

    assert pipeline(step) == []


def test_what_depends_on_data_is_not_known():
    def step(indices, x, o):
        @pl.when(x[0, 0] > 0)
        def _():
            o[...] = x[...]

    assert pipeline(step) == []


def test_blocks_that_stay():
    """Of the steps of one block, one has to write it."""

    def step(indices, x, o):
        @pl.when(indices[1] == 0)
        def _():
            o[...] = x[...]

    assert pipeline(step, grid=(8, 4)) == []


def test_output_of_a_grid_that_no_step_writes():
    def body(x, o):
        x[...] + o[...]

    block = pl.BlockSpec((16, 128), lambda i: (i, 0))
    kernel = pl.pallas_call(
        body,
        out_shape=array(128, 128),
        grid=(8,),
        in_specs=[block],
        out_specs=block,
        compiler_params=plgpu.CompilerParams(dimension_semantics=["sequential"]),
    )
    (found,) = findings_of(kernel, [array(128, 128)], body)
    assert STALE in found.text


# Unions -------------------------------------------------------------------------------------------

TILE = plgpu.SMEM((64, 128), F32)
OTHER = plgpu.SMEM((64, 128), jnp.int32)


def union(body, *members, out=jnp.int32, **options):
    return findings(
        body,
        [array(64, 128)],
        array(64, 128, dtype=out),
        scratch_types=[plgpu.RefUnion(*(members or (TILE, OTHER)))],
        **options,
    )


@pytest.mark.parametrize("semantics", BOTH)
def test_member_that_nobody_writes(semantics):
    def body(x, o, memory):
        one, other = memory
        one[...] = x[...]
        o[...] = other[...]  # here

    found = union(body, semantics=semantics)
    only(found, MEMBER, "read as int32[64, 128], written as float32[64, 128] at")


def test_member_that_another_one_has_overwritten():
    def body(x, o, memory):
        one, other = memory
        other[...] = x[...].astype(jnp.int32)
        one[...] = x[...]
        o[...] = other[...]  # here

    only(union(body), MEMBER)


def test_members_one_after_the_other():
    def body(x, o, memory):
        one, other = memory
        one[...] = x[...]
        value = one[...].astype(jnp.int32)
        other[...] = value
        o[...] = other[...]

    assert union(body) == []


def test_members_in_a_loop():
    """The first iteration tells."""

    def right(x, o, memory):
        one, other = memory

        @pl.loop(0, 4)
        def _(i):
            other[...] = jnp.full_like(other, i)
            o[...] = other[...]
            one[...] = x[...]

    def wrong(x, o, memory):
        one, other = memory

        @pl.loop(0, 4)
        def _(i):
            one[...] = x[...]
            o[...] = other[...]  # here
            other[...] = jnp.full_like(other, i)

    assert union(right) == []
    only(union(wrong), MEMBER)


def test_members_that_do_not_meet():
    def body(x, o, memory):
        (one, two), three = memory
        two[...] = x[...]
        three[...] = x[:32].astype(jnp.int32)
        o[...] = jnp.concatenate([three[...], three[...]]) + two[...].astype(jnp.int32)

    assert union(body, (TILE, TILE), plgpu.SMEM((32, 128), jnp.int32)) == []


def test_members_of_one_type():
    def body(x, o, memory):
        one, same = memory
        one[...] = x[...]
        o[...] = same[...]

    assert union(body, TILE, TILE, out=F32) == []


def test_threads_may_write_for_each_other():
    def body(x, o, memory):
        one, other = memory

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            other[...] = x[...].astype(jnp.int32)

        one[...] = x[...]
        o[...] = other[...]

    options = {"num_threads": 2, "thread_name": "wg"}
    assert [one for one in union(body, **options) if MEMBER in one.text] == []
