"""Taking over the work of blocks that were not launched; Hopper never finds any."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import InvalidTypeError, InvalidValueError
from pallasite import gpu as plgpu


def kernel(body, shape, **kwargs):
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(shape, jnp.float32), **kwargs)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cluster", [1, 2])
def test_each_block_does_its_own_work(threads, cluster):
    grid = (2, 3)

    def body(x, o):
        member = lax.axis_index("member") if cluster > 1 else 0
        wg = lax.axis_index("wg") if threads > 1 else 0

        def run(info):
            assert info.num_local_steps is None
            i, j = info.index
            o[i, j, member, wg] = x[i, j] + info.local_index.astype(jnp.float32)

        plgpu.dynamic_scheduling_loop(
            ("i", "j"),
            thread_axis="wg" if threads > 1 else None,
            cluster_axes=("member",) if cluster > 1 else (),
        )(run)

    x = np.random.default_rng(0).normal(size=(*grid, 128)).astype(np.float32)
    options = dict(num_threads=threads, thread_name="wg") if threads > 1 else {}
    if cluster > 1:
        options |= dict(cluster=(cluster,), cluster_names=("member",))
    shape = (*grid, cluster, threads, 128)
    out = kernel(body, shape, grid=grid, grid_names=("i", "j"), **options)(x)
    np.testing.assert_array_equal(out, np.broadcast_to(x[:, :, None, None], shape))


@pytest.mark.runs_kernels
def test_carry():
    def body(o):
        @plgpu.dynamic_scheduling_loop("i", init_carry=jnp.full((128,), 5.0))
        def total(info, carry):
            return carry * 2 + info.index[0].astype(jnp.float32)

        o[lax.axis_index("i")] = total

    out = kernel(body, (4, 128), grid=(4,), grid_names=("i",))()
    np.testing.assert_array_equal(out, np.repeat(10.0 + np.arange(4), 128).reshape(4, 128))


@pytest.mark.runs_kernels
def test_by_hand():
    """The answer says that there was nothing; the barrier completes all the same."""

    def body(o, result, answered):
        wg = lax.axis_index("wg")
        plgpu.try_cluster_cancel(result, answered, collective_axes="wg")
        plgpu.barrier_wait(answered)
        (i, j), found = plgpu.query_cluster_cancel(result, ("i", "j"))
        value = jnp.where(found, (i * 10 + j).astype(jnp.float32), -1.0)
        o[lax.axis_index("i"), wg] = jnp.full((128,), 1.0) * value

    out = kernel(
        body,
        (2, 2, 128),
        grid=(2, 1),
        grid_names=("i", "j"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.TryClusterCancelResult(), plgpu.Barrier(num_arrivals=2)],
    )()
    np.testing.assert_array_equal(out, np.full((2, 2, 128), -1.0))


@pytest.mark.parametrize("target", ["sm_90", "sm_90a", "sm_120a"])
def test_nothing_is_left_of_the_loop(target):
    def body(o):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            o[info.index[0]] = jnp.full((128,), 1.0)

    run = kernel(body, (4, 128), grid=(4,), grid_names=("i",))
    ptx = pallasite.compile(run, target=target).ptx
    assert ptx.count("st.global") == 1
    assert ptx.count("mbarrier.arrive") == 2


def refused(kind, body, **kwargs):
    options = dict(grid=(2,), grid_names=("i",), cluster=(2,), cluster_names=("member",))
    run = kernel(body, (2, 128), **(options | kwargs))
    with pytest.raises(kind) as caught:
        pallasite.compile(run, target="sm_90a")
    message = str(caught.value)
    assert "test_dynamic_scheduling.py" in message
    return message


def test_errors():
    scratch = [plgpu.TryClusterCancelResult(2), plgpu.Barrier()]

    def both(o, results, answered):
        plgpu.try_cluster_cancel(results, answered, collective_axes="member")

    message = refused(InvalidTypeError, both, scratch_types=scratch)
    assert "result_ref has 256 bits" in message
    assert "try: select one of several results: result_ref.at[slot]" in message

    def alone(o, results, answered):
        plgpu.try_cluster_cancel(results.at[0], answered)

    message = refused(InvalidValueError, alone, scratch_types=scratch)
    assert "a block of a cluster asks for the work of another cluster by itself" in message
    assert "also 'member'" in message

    def unknown(o, results, answered):
        plgpu.try_cluster_cancel(results.at[0], answered, collective_axes="rank")

    assert "there is no axis named 'rank'" in refused(
        InvalidValueError, unknown, scratch_types=scratch
    )

    def of_the_cluster(o, results, answered):
        plgpu.query_cluster_cancel(results.at[0], ("member",))

    message = refused(InvalidValueError, of_the_cluster, scratch_types=scratch)
    assert "'member' is not an axis of the grid" in message

    def in_global_memory(o, results, answered):
        plgpu.query_cluster_cancel(o, ("i",))

    message = refused(InvalidValueError, in_global_memory, scratch_types=scratch)
    assert "result_ref is in GMEM" in message

    def loop(o):
        plgpu.dynamic_scheduling_loop(("i",), thread_axis="wg")(lambda info: None)

    assert "there is no axis named 'wg'" in refused(InvalidValueError, loop)


def test_printed_equations():
    def body(o, results, answered):
        plgpu.try_cluster_cancel(results.at[1], answered)
        plgpu.barrier_wait(answered)
        plgpu.query_cluster_cancel(results.at[1], ("i",))

    run = kernel(
        body,
        (2, 128),
        grid=(2,),
        grid_names=("i",),
        scratch_types=[plgpu.TryClusterCancelResult(2), plgpu.Barrier()],
    )
    text = str(pallasite.compile(run, target="sm_90a").jaxpr)
    assert re.search(r"try_cluster_cancel \S+\[1,:?\S*\] using \S+", text), text
    assert re.search(r"query_cluster_cancel \S+\[1,:?\S*\] \('i',\)", text), text
