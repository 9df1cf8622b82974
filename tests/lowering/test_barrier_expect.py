"""One arrival on a barrier for several copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import InvalidTypeError, InvalidValueError
from pallasite import gpu as plgpu

SHAPE = (16, 64)


def kernel(body, **kwargs):
    scratch = dict(
        x_smem=plgpu.SMEM(SHAPE, jnp.float32),
        y_smem=plgpu.SMEM(SHAPE, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)),)),
        loaded=plgpu.Barrier(),
    )
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=scratch | kwargs.pop("scratch", {}),
        **kwargs,
    )


def operands():
    x, y = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)
    return x, jnp.asarray(y, jnp.bfloat16)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("predicate", [None, True, "traced"])
@pytest.mark.parametrize("by_one_warp", [False, True])
def test_two_copies(predicate, by_one_warp):
    def body(x, y, o, x_smem, y_smem, loaded):
        wanted = jax.lax.axis_index("block") == 0 if predicate == "traced" else predicate

        def fetch():
            plgpu.barrier_expect(loaded, x_smem, y_smem, predicate=wanted)
            plgpu.copy_gmem_to_smem(x, x_smem, loaded, arrive=False)
            plgpu.copy_gmem_to_smem(y, y_smem, loaded, arrive=False)

        if by_one_warp:
            plgpu.warp_map(lambda warp: jax.lax.cond(warp == 2, fetch, lambda: None))
        else:
            fetch()
        plgpu.barrier_wait(loaded)
        o[...] = x_smem[...] + y_smem[...].astype(jnp.float32)

    x, y = operands()
    run = kernel(body, grid=(1,), grid_names=("block",))
    np.testing.assert_array_equal(run(x, y), x + np.asarray(y, np.float32))
    ptx = pallasite.compile(run, x, y, target="sm_90a").ptx
    assert ptx.count("mbarrier.expect_tx") == 1
    assert f", {16 * 64 * (4 + 2)};" in ptx


def test_copy_that_nobody_announces_is_no_arrival():
    def body(x, y, o, x_smem, y_smem, loaded):
        plgpu.copy_gmem_to_smem(x, x_smem, loaded, arrive=False)
        plgpu.barrier_wait(loaded)

    with pytest.raises(InvalidValueError, match="this wait never ends"):
        pallasite.compile(kernel(body), *operands(), target="sm_90a")


def test_two_announcements_complete_two_phases():
    def body(x, y, o, x_smem, y_smem, loaded):
        for _ in range(2):
            plgpu.barrier_expect(loaded, x_smem)
            plgpu.copy_gmem_to_smem(x, x_smem, loaded, arrive=False)
        plgpu.barrier_wait(loaded)

    with pytest.raises(InvalidValueError, match="complete two phases without a wait"):
        pallasite.compile(kernel(body), *operands(), target="sm_90a")


def refused(kind, body, **kwargs):
    with pytest.raises(kind) as caught:
        jax.eval_shape(kernel(body, **kwargs), *operands())
    message = str(caught.value)
    assert "test_barrier_expect.py" in message
    return message


def test_errors():
    def without_barrier(x, y, o, x_smem, y_smem, loaded):
        plgpu.copy_gmem_to_smem(x, x_smem, arrive=False)

    def with_predicate(x, y, o, x_smem, y_smem, loaded):
        plgpu.copy_gmem_to_smem(x, x_smem, loaded, arrive=False, predicate=True)

    for body in (without_barrier, with_predicate):
        message = refused(InvalidValueError, body)
        assert "expected: a barrier on which barrier_expect announces the bytes" in message

    def global_memory(x, y, o, x_smem, y_smem, loaded):
        plgpu.barrier_expect(loaded, x)

    assert "destination 0 is in GMEM" in refused(InvalidValueError, global_memory)

    def no_barrier(x, y, o, x_smem, y_smem, loaded):
        plgpu.barrier_expect(x_smem, y_smem)

    assert "barrier is not a barrier" in refused(InvalidTypeError, no_barrier)

    def many_bytes(x, y, o, x_smem, y_smem, loaded, large):
        plgpu.barrier_expect(loaded, large)

    scratch = dict(large=plgpu.SMEM((2**20,), jnp.int8))
    message = refused(InvalidValueError, many_bytes, scratch=scratch)
    assert "a barrier cannot count 1048576 bytes" in message
