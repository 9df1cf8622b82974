"""Inputs that nobody writes: their elements are loaded once, outside of loops."""

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

pytestmark = pytest.mark.runs_kernels

COUNTS = np.array([3, 1, 4, 1], np.int32)
X = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)


def accumulating(before=lambda: None, after=lambda refs: None, **options):
    """Adds rows as often as an input says, which is read in the loop, behind assembly."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(X.shape, jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        **options,
    )
    def kernel(counts_ref, x_ref, o_ref, row, ready):
        before()
        for i in range(4):
            plgpu.copy_gmem_to_smem(x_ref.at[i], row, ready)
            plgpu.barrier_wait(ready)

            def step(j, total, i=i):
                plgpu.commit_smem()
                return total + jnp.where(j < counts_ref[i], row[...], 0.0)

            o_ref[i] = lax.fori_loop(0, 5, step, jnp.zeros((128,), jnp.float32))
        after((counts_ref, o_ref))

    return kernel


def loads_in_loops(kernel, *args):
    """Loads of 32 bits from global memory: those in all, and those of memory that is constant."""
    ptx = pallasite.compile(kernel, *args, target="sm_90").ptx
    found = []
    for label, body in re.findall(r"^(\$L__BB\w+):\n(.*?)(?=^\$L__BB|\Z)", ptx, re.M | re.S):
        if re.search(rf"bra(?:\.uni)?\s+{re.escape(label)};", body):
            found += re.findall(r"ld\.global(?:\.nc)?\.b32", body)
    return re.findall(r"ld\.global(?:\.nc)?\.b32", ptx), found


def test_loads_leave_loops():
    kernel = accumulating()
    np.testing.assert_allclose(kernel(COUNTS, X), X * COUNTS[:, None], rtol=1e-6)
    everywhere, in_loops = loads_in_loops(kernel, COUNTS, X)
    assert everywhere == ["ld.global.nc.b32"] * 4 and in_loops == []


def test_an_input_that_is_written_is_loaded_again():
    def write(refs):
        counts_ref, _ = refs
        counts_ref[0] = 0

    kernel = accumulating(after=write)
    everywhere, in_loops = loads_in_loops(kernel, COUNTS, X)
    assert set(everywhere) == {"ld.global.b32"} and in_loops


def test_memory_shared_with_an_output_is_loaded_again():
    def aliased(counts):
        return pl.pallas_call(
            lambda counts_ref, o_ref: _count_up(counts_ref, o_ref),
            out_shape=jax.ShapeDtypeStruct((4,), jnp.int32),
            input_output_aliases={0: 0},
            in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM)],
            out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
            compiler_params=plgpu.CompilerParams(),
        )(counts)

    assert list(aliased(COUNTS))[0] == 8
    everywhere, _ = loads_in_loops(aliased, COUNTS)
    assert set(everywhere) == {"ld.global.b32"}


def _count_up(counts_ref, o_ref):
    def step(i, _):
        o_ref[0] = counts_ref[0] + 1

    lax.fori_loop(0, 5, step, None)


def test_a_kernel_that_waits_for_earlier_ones_loads_after_the_wait():
    kernel = accumulating(before=plgpu.griddepcontrol_wait)
    everywhere, in_loops = loads_in_loops(kernel, COUNTS, X)
    assert set(everywhere) == {"ld.global.b32"} and in_loops
