"""Indices that leave an array for some block, and the same kernels as they should be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked import BOTH, F32, array, findings, findings_of, only
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu

both = pytest.mark.parametrize("semantics", BOTH)


@both
def test_grid(semantics):
    def body(x, o):
        i = lax.axis_index("i")
        o[pl.ds(i * 64, 64)] = x[pl.ds(i * 64, 64)]  # here

    def found(blocks):
        x = array(512)
        return findings(body, [x], x, grid=(blocks,), grid_names=("i",), semantics=semantics)

    assert not found(8)
    only(
        found(9),
        "this access leaves the array: dimension 0 has 512 elements",
        "got: indices 512 to 575 where i = 8 of an array of shape (512,)",
        "expected: indices from 0 to 511",
        "try: ",
    )


def test_negative_index():
    def body(x, o):
        o[...] = x[-1]  # here

    x = array(512, 64)
    only(
        findings(body, [x], array(64)),
        "got: index -1 of an array of shape (512, 64)",
        "try: 511: negative indices do not count from the end",
    )


@both
@pytest.mark.parametrize("trips", [4, 5])
def test_loops_within_blocks(trips, semantics):
    def body(x, o):
        i = lax.axis_index("i")

        def step(s, carry):
            at, total = carry
            total += x[pl.ds(at, 64)]  # here
            return at + 64, total

        _, total = lax.fori_loop(0, trips, step, (i * 256, jnp.zeros(64, F32)))
        o[pl.ds(i * 64, 64)] = total

    found = findings(
        body, [array(512)], array(128), grid=(2,), grid_names=("i",), semantics=semantics
    )
    if trips == 4:
        assert not found
    else:
        only(found, "indices 512 to 575 where", "i = 1", "the loop's counter = 4")


def test_functions_of_programs_with_names_of_jax():
    """What a program's own ``remainder`` returns is not what that of ``jax.numpy`` would."""

    @jax.jit
    def remainder(a, b):
        return a * 0 + b - 4

    def body(x, o):
        def step(number, total):
            return total + x[remainder(number, jnp.int32(4))] + x[jnp.remainder(number, 1)]

        o[...] = lax.fori_loop(4, 8, step, jnp.zeros(64, F32))

    assert not findings(body, [array(1, 64)], array(64))


def test_guards():
    """A condition narrows a symbol; under any other one nothing is certain."""

    def body(x, n, o):
        def store(i):
            o[pl.ds(i * 64, 64)] = x[pl.ds(i * 64, 64)]

        i = lax.axis_index("i")
        pl.when(i < 8)(lambda: store(i))
        pl.when(i < n[0])(lambda: store(i))
        pl.when(i == 9)(lambda: store(i - 8))

    inputs = [array(512), array(1, dtype=np.int32)]
    assert not findings(body, inputs, array(512), grid=(10,), grid_names=("i",))

    def wrong(x, o):
        i = lax.axis_index("i")

        @pl.when(i >= 2)
        def _():
            o[pl.ds((i - 2) * 64, 64)] = x[pl.ds((i + 1) * 64, 64)]  # here

    found = findings(wrong, [array(512)], array(512), grid=(9,), grid_names=("i",))
    only(found, "indices 576 to 639 where i = 8")


@pytest.mark.parametrize("divide", ["//", "div"])
def test_positions_by_division(divide):
    def body(x, o, *, width):
        i = lax.axis_index("i")
        row = i // width if divide == "//" else lax.div(i, width)
        column = i % width if divide == "//" else lax.rem(i, width)
        at = (row, pl.ds(column * 64, 64))
        o[at] = x[at]  # here

    x = array(4, 256)

    def check(width):
        def kernel(*refs):
            body(*refs, width=width)

        return findings(kernel, [x], x, grid=(16,), grid_names=("i",))

    assert not check(4)
    (found, *_) = check(8)
    assert "dimension 1 has 256 elements" in found.text and "i % 8 = 7" in found.text


def test_shared_memory_and_barriers():
    def body(x, o, tiles, barriers, *, stages):
        for s in range(2):
            plgpu.copy_gmem_to_smem(x.at[pl.ds(s * 64, 64)], tiles.at[s], barriers.at[s])

        def step(s, _):
            slot = lax.rem(s, stages)
            plgpu.barrier_wait(barriers.at[slot])  # here
            o[pl.ds(s * 64, 64)] = tiles[slot]

        lax.fori_loop(0, 4, step, None)

    scratch = [plgpu.SMEM((2, 64), F32), plgpu.Barrier(num_barriers=2)]

    def found(stages):
        def kernel(*refs):
            body(*refs, stages=stages)

        call = plgpu.kernel(kernel, out_type=array(256), scratch_types=scratch)
        with pallasite.config.scoped(disabled_passes="check-barriers"):
            return findings_of(call, [array(256)], body)

    assert "barrier 2 of 2" in found(3)[0].text
    assert not any("leaves" in one.text for one in found(2))


def test_threads_and_warps():
    def body(x, o, tile, *, threads):
        w = lax.axis_index("wg")
        tile[w] = x[pl.ds(w * 64, 64)]  # here
        o[pl.ds(w * 64, 64)] = tile[w]

    def found(threads):
        return findings(
            lambda *refs: body(*refs, threads=threads), [array(192)], array(192),
            num_threads=threads, thread_name="wg", scratch_types=[plgpu.SMEM((2, 64), F32)],
        )  # fmt: skip

    assert not [one for one in found(2) if "leaves" in one.text]
    assert "index 2 of an array of shape (2, 64)" in found(3)[0].text


def test_copies_by_tensor_map_may_leave_global_memory():
    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x.at[pl.ds(i * 64, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o.at[pl.ds(i * 64, 64)])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64,), F32), plgpu.Barrier()]
    x = array(500)
    assert not findings(body, [x], x, grid=(8,), grid_names=("i",), scratch_types=scratch)


def test_pallas_call():
    def body(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = x_ref[pl.ds(i * 64, 64)]

    def call(blocks):
        return pl.pallas_call(
            body,
            out_shape=array(512),
            grid=(blocks,),
            in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM)],
            out_specs=pl.BlockSpec((64,), lambda i: (lax.rem(i, 8),)),
            compiler_params=pallasite.CompilerParams(),
        )

    jax.make_jaxpr(call(8))(array(512))
    assert not [one for one in findings_of(call(8), [array(512)]) if "leaves" in one.text]


def test_disabled():
    def body(x, o):
        o[pl.ds(lax.axis_index("i") * 64, 64)] = x[pl.ds(lax.axis_index("i") * 64, 64)]

    with pallasite.config.scoped(disabled_passes="check-indices"):
        found = findings(body, [array(512)], array(512), grid=(9,), grid_names=("i",))
    assert not any("leaves" in one.text for one in found)
