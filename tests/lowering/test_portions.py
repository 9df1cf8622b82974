"""Arrays that are moved through scratch shared memory in portions, since they do not fit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

LANE = plgpu.LoweringSemantics.Lane
WARPGROUP = plgpu.LoweringSemantics.Warpgroup
SEMANTICS = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])
MOST = 227 * 1024
ROOM = 12 * 1024
"""Bytes that kernels leave for scratch memory, about."""

MOVES = {
    "roll of rows": lambda x: jnp.roll(x, 3, 0),
    "roll of columns": lambda x: jnp.roll(x, 5, 1),
    "roll of both": lambda x: jnp.roll(x, (3, 5), (0, 1)),
    "slice": lambda x: x[3:-2, 5:-1],
    "reversed": lambda x: x[::-1, ::-1],
    "every third": lambda x: x[:, ::3],
    "transposed": lambda x: x.T,
    "concatenated": lambda x: jnp.concatenate([x, x[:7] + x[:7], x[2:]]),
    "beside": lambda x: jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :3]), x], axis=1),
    "reshaped": lambda x: jnp.reshape(x[:-1], (-1, 2))[1:],
}  # fmt: skip


def values(shape, dtype):
    numbers = np.arange(np.prod(shape)).reshape(shape) * 7 % 251
    return jnp.asarray(numbers % 2 == 1 if dtype is bool else numbers.astype(dtype))


def run(function, x, semantics, occupied=0, threads=1):
    """What a kernel computes that has shared memory of so many bytes of its own."""
    want = jax.jit(function)(x)

    def body(x_ref, o_ref, *used):
        found = function(x_ref[...])
        for one in used:  # Lives as long as the arrays do.
            one[...] = jnp.zeros(one.shape, one.dtype)
        o_ref[...] = found

    scratch = [plgpu.SMEM((occupied // 512, 128), jnp.float32)] if occupied else []
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(want.shape, want.dtype),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    compiled = pallasite.compile(kernel, x, target="sm_90a")
    assert compiled.launch.shared_memory_bytes <= MOST
    (got,) = simulate(compiled, np.asarray(x)).outputs
    np.testing.assert_array_equal(got, np.asarray(want))
    return compiled


@SEMANTICS
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("shape", [(80, 64), (61, 83)], ids=str)
@pytest.mark.sampled
def test_movements_beside_other_memory(move, shape, semantics):
    """20 KiB are moved, between arithmetic, through 12."""
    x = values(shape, np.float32)
    function = MOVES[move]
    run(lambda x: function(x * 2.0) + 1.0, x, semantics, MOST - ROOM)


@SEMANTICS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, bool, np.int16, np.uint32], ids=str)
@pytest.mark.sampled(alone=("dtype", "semantics"))
def test_types(dtype, semantics):
    x = values((53, 251 if np.dtype(dtype).itemsize == 1 else 127), dtype)
    run(lambda x: jnp.roll(x, (3, 5), (0, 1)) == x, x, semantics, MOST - ROOM)


@SEMANTICS
def test_a_start_that_is_not_known(semantics):
    x = values((61, 83), np.int32)

    def function(x):
        first = x[0, 3] % 7  # 0 * 83 + 3, times 7.
        return jax.lax.dynamic_slice(x + 1, (first, first), (50, 60)) * 3

    run(function, x, semantics, MOST - ROOM)


@SEMANTICS
@pytest.mark.parametrize("rolled", ["rows", "both", "both, and more"])
@pytest.mark.sampled(alone=("rolled", "semantics"))
def test_more_than_all_shared_memory(rolled, semantics):
    x = values((231, 256), np.float32)
    by = {
        "rows": lambda x: jnp.roll(x, 3, 0) + 1.0,
        "both": lambda x: jnp.roll(x, (3, 5), (0, 1)),
        "both, and more": lambda x: jnp.roll(x * 2.0, (3, 5), (0, 1)) + x,
    }
    run(by[rolled], x, semantics)


def test_each_of_several_threads_has_its_own_portions():
    x = values((2, 64, 80), np.float32)

    def body(x_ref, o_ref, used):
        i = jax.lax.axis_index("thread")
        o_ref[i] = jnp.flip(x_ref[i] * 2.0)
        used[...] = jnp.zeros(used.shape, used.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(((MOST - 2 * ROOM) // 512, 128), jnp.float32)],
        num_threads=2,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    )
    compiled = pallasite.compile(kernel, x, target="sm_90a")
    (got,) = simulate(compiled, np.asarray(x)).outputs
    np.testing.assert_array_equal(got, np.asarray(x)[:, ::-1, ::-1] * 2)


def test_what_fits_is_moved_at_once():
    x = values((61, 83), np.float32)
    both = functools.partial(jnp.roll, shift=(3, 5), axis=(0, 1))
    assert run(both, x, LANE).ptx.count("bar.sync") < run(both, x, LANE, MOST - ROOM).ptx.count(
        "bar.sync"
    )
