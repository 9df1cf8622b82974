"""Loops that one lane runs alone: results and code; loops that all lanes have to run."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tcgen05_support import F16, F32, LANE, smem, values, wide

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

M, N, K = 128, 64, 32


def synchronous(steps, stages, *, ahead=0, threads=1, rounds=1, dynamic=False, reads=False):
    """A kernel whose warpgroups copy, multiply and wait in one loop.

    Args:
      ahead: of how many steps operands are fetched before they are multiplied.
      threads: warpgroups; each has columns of the output.
      rounds: how often all of it is done, in a loop around that one.
      dynamic: the number of steps is loaded while the kernel runs.
      reads: all lanes read operands in the loop.
    """

    def body(a_ref, b_ref, count_ref, out_ref, seen_ref, a_smem, b_smem, acc, filled, done):
        thread = lax.axis_index("t")
        a_smem, b_smem, acc = a_smem.at[thread], b_smem.at[thread], acc.at[thread]
        count = count_ref[0] if dynamic else steps

        def fetch(i):
            slot = lax.rem(i, jnp.int32(stages))
            barrier = filled.at[thread * stages + slot]
            along = pl.ds(i * K, K)
            plgpu.copy_gmem_to_smem(a_ref.at[:, along], a_smem.at[slot], barrier)
            columns = pl.ds(thread * N, N)
            plgpu.copy_gmem_to_smem(b_ref.at[along, columns], b_smem.at[slot], barrier)

        def step(i, total):
            slot = lax.rem(i, jnp.int32(stages))
            if not ahead:
                fetch(i)
            plgpu.barrier_wait(filled.at[thread * stages + slot])
            if reads:
                total += plgpu.load(a_smem, (slot, 5, 7)).astype(jnp.float32)
            left, right, finished = a_smem.at[slot], b_smem.at[slot], done.at[thread]
            plgpu.tcgen05_mma(acc, left, right, finished, accumulate=i > 0)
            plgpu.barrier_wait(done.at[thread])
            if ahead:
                pl.when(i + ahead < count)(lambda: fetch(i + ahead))
            return total

        def one_round(number, total):
            for i in range(ahead):
                fetch(jnp.int32(i))
            total = lax.fori_loop(0, count, step, total)
            out_ref[:, pl.ds(thread * N, N)] = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            return total

        seen = lax.fori_loop(0, rounds, one_round, jnp.float32(0))
        seen_ref[pl.ds(thread * M, M)] = plgpu.layout_cast(
            jnp.full((M,), seen), plgpu.Layout.WGMMA.reduce(1)
        )

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((M, threads * N), F32),
            jax.ShapeDtypeStruct((threads * M,), F32),
        ],
        num_threads=threads,
        thread_name="t",
        scratch_types=[
            smem((threads, stages, M, K), F16, 64),
            smem((threads, stages, K, N), F16, 128),
            plgpu.TMEM((threads, M, N), F32),
            plgpu.Barrier(num_arrivals=2, num_barriers=threads * stages),
            plgpu.Barrier(num_barriers=threads, orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(target="sm_100a", lowering_semantics=LANE),
    )


def inputs(steps, threads):
    a, b = values("a", (M, steps * K), F16), values("b", (steps * K, threads * N), F16)
    return a, b, np.asarray([steps], np.int32)


def barriers_in_loop(ptx):
    """How many barriers of warpgroups are in the loop that issues products."""
    lines = ptx.splitlines()
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.match(r"\$L\w+:$", line)}
    products = [n for n, line in enumerate(lines) if "tcgen05.mma" in line]
    loops = [
        (labels[target[1]], n)
        for n, line in enumerate(lines)
        if (target := re.search(r"\bbra\S*\s+(\$L\w+);", line)) and labels[target[1]] < n
    ]
    around = [(a, b) for a, b in loops if any(a < one < b for one in products)]
    first, last = min(around, key=lambda one: one[1] - one[0])
    return sum("bar.sync" in line for line in lines[first:last])


@pytest.mark.parametrize(
    ("steps", "stages", "options"),
    [
        (7, 3, {"ahead": 2}),
        (8, 2, {}),
        (9, 4, {"ahead": 4}),
        (3, 3, {"ahead": 1}),
        (5, 2, {"ahead": 1, "dynamic": True}),
        (1, 4, {"ahead": 1, "dynamic": True}),
        (5, 2, {"ahead": 2, "threads": 2}),
        (5, 3, {"ahead": 2, "rounds": 3}),
        (7, 3, {"ahead": 1, "reads": True}),
    ],
)
def test_results(steps, stages, options):
    threads = options.get("threads", 1)
    kernel, arguments = synchronous(steps, stages, **options), inputs(steps, threads)
    compiled = pallasite.compile(kernel, *arguments)
    # A number of steps that was loaded might not be the same for all lanes.
    alone = not options.get("reads") and not options.get("dynamic")
    assert (barriers_in_loop(compiled.ptx) == 0) == alone
    simulation = simulate(compiled, *arguments, sanitize=True)
    assert not simulation.findings
    product, seen = simulation.outputs
    np.testing.assert_array_equal(product, wide(arguments[0]) @ wide(arguments[1]))
    total = wide(arguments[0])[5, 7::K].sum() if options.get("reads") else 0
    np.testing.assert_array_equal(seen, np.full(threads * M, total))


def test_the_pass_can_be_switched_off():
    arguments = inputs(4, 1)
    with config.scoped(disabled_passes=("single-lane-loops",)):
        compiled = pallasite.compile(synchronous(4, 2), *arguments)
    assert barriers_in_loop(compiled.ptx) > 0
