"""Remainders of loop counters are carried from one iteration to the next, or unsigned; addresses of
tensor maps are taken outside of loops."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate


def run(body: Any, limits: Any = (0,), count: int = 64) -> tuple[str, np.ndarray]:
    """What a kernel writes into ``count`` numbers, and the MLIR that its LLVM IR was made of."""

    def whole(limits_ref: Any, out_ref: Any) -> None:
        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                body(limits_ref, out_ref)

    numbers = jnp.asarray(limits, jnp.int32)
    kernel = plgpu.kernel(whole, out_type=jax.ShapeDtypeStruct((count,), jnp.int32))
    made = pallasite.compile(kernel, numbers, target="sm_90a")
    return made.mlir, simulate(made, numbers).outputs[0]


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rings(start: int, dynamic: bool) -> None:
    """Of three and seven slots, used in a branch and after another loop's."""

    def body(limits_ref: Any, out_ref: Any) -> None:
        stop = limits_ref[0] if dynamic else 23

        def outer(row: Any, _: Any) -> None:
            def step(i: Any, _: Any) -> None:
                @pl.when(i != 9)
                def _() -> None:
                    three, seven = lax.rem(i, jnp.int32(3)), lax.rem(i, jnp.int32(7))
                    out_ref[i] = three + 10 * seven + 100 * lax.rem(row, jnp.int32(3))

            lax.fori_loop(start, stop, step, None)
            out_ref[40 + row] = lax.rem(row, jnp.int32(3))

        lax.fori_loop(0, 5, outer, None)

    ir, out = run(body, (23,))
    i = np.arange(start, 23)
    expected = i % 3 + 10 * (i % 7) + 100 * (4 % 3)
    np.testing.assert_array_equal(out[start:23][i != 9], expected[i != 9])
    np.testing.assert_array_equal(out[40:45], np.arange(5) % 3)
    if not (dynamic and start):  # Nothing tells that a counter from 5 does not overflow.
        assert "arith.remsi" not in ir


def test_powers_of_two() -> None:
    """Counters, and what is ahead of them by a constant, are divided as unsigned numbers."""

    def body(limits_ref: Any, out_ref: Any) -> None:
        def step(i: Any, _: Any) -> None:
            rest, ahead = lax.rem(i, jnp.int32(4)), lax.rem(i + 3, jnp.int32(4))
            out_ref[i] = rest + 10 * ahead + 100 * lax.div(i, jnp.int32(8))
            far = i + jnp.int32(2**31 - 20)  # Overflows on the way.
            out_ref[i + 32] = lax.rem(far, jnp.int32(4))

        lax.fori_loop(0, 25, step, None)

    ir, out = run(body)
    i = np.arange(25, dtype=np.int32)
    np.testing.assert_array_equal(out[:25], i % 4 + 10 * ((i + 3) % 4) + 100 * (i // 8))
    np.testing.assert_array_equal(out[32:57], np.fmod(i + np.int32(2**31 - 20), 4))
    assert ir.count("arith.remui") == 2 and ir.count("arith.divui") == 1
    assert ir.count("arith.remsi") == 1 and "arith.divsi" not in ir


def test_tensor_maps_in_loops() -> None:
    """Their addresses are taken once, before the outermost loop, also if under a branch."""

    def body(x_ref: Any, out_ref: Any, tile: Any, barrier: Any) -> None:
        def outer(i: Any, _: Any) -> None:
            def step(j: Any, _: Any) -> None:
                @pl.when(j != 1)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(8 * i, 8)], tile, barrier)
                    plgpu.barrier_wait(barrier)
                    plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(8 * i, 8)])
                    plgpu.wait_smem_to_gmem(0)

            lax.fori_loop(0, 3, step, None)

        lax.fori_loop(0, 4, outer, None)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((32, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((8, 64), jnp.float32), plgpu.Barrier()],
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)).astype(jnp.float32))
    made = pallasite.compile(kernel, x, target="sm_100a")
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)
    before, _, loops = made.mlir.partition("scf.for")
    assert "llvm.ptrtoint %arg0" in before and "llvm.ptrtoint %arg1" in before
    assert "llvm.ptrtoint %arg" not in loops


def test_what_is_left() -> None:
    """Unknown divisors, negative starts and other steps are divided as before."""

    def body(limits_ref: Any, out_ref: Any) -> None:
        divisor = limits_ref[0]

        def step(i: Any, j: Any) -> Any:
            out_ref[i + 4] = lax.rem(i, jnp.int32(3))
            out_ref[i + 28] = lax.rem(i, divisor) + 10 * lax.rem(j, jnp.int32(5))
            return j + 2

        lax.fori_loop(-4, 16, step, jnp.int32(0))

    ir, out = run(body, (6,))
    i = np.arange(-4, 16)
    np.testing.assert_array_equal(out[:20], np.fmod(i, 3))
    np.testing.assert_array_equal(out[24:44], np.fmod(i, 6) + 10 * (2 * np.arange(20) % 5))
    assert len(re.findall(r"arith\.remsi", ir)) == 3


def test_numbers_of_the_loop_around() -> None:
    """What a loop hands on is its number in the loop around it, which is no counter."""

    def body(limits_ref: Any, out_ref: Any) -> None:
        def outer(row: Any, carry: Any) -> Any:
            def step(i: Any, own: Any) -> Any:
                out_ref[row * 3 + i] = 10 * own + lax.rem(i, jnp.int32(3))
                return row

            return carry + lax.fori_loop(0, limits_ref[0], step, jnp.int32(0))

        out_ref[63] = lax.fori_loop(0, 5, outer, jnp.int32(0))

    _, out = run(body, (3,))
    row, i = np.divmod(np.arange(15), 3)
    np.testing.assert_array_equal(out[:15], np.where(i == 0, 0, 10 * row) + i)
    assert out[63] == 10
