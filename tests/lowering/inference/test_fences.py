"""Fences and barriers that warpgroup semantics implies."""

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
from pallasite.lowering.inference.fences import Event, Fork, Loop
from pallasite.plugin import GENERIC, EventKind
from pallasite_std.inference.missing_barriers import missing_barriers
from pallasite_std.inference.missing_fences import missing_fences
from pallasite_std.memory_events import ASYNC, FENCES

pytestmark = pytest.mark.runs_kernels

SHAPE = (64, 128)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def fences(kernel, *args) -> int:
    """How many fences between the proxies are in the code."""
    ptx = pallasite.compile(kernel, *args, target="sm_90a").ptx
    return len(re.findall(r"fence\.proxy\.async", ptx))


def make(body, *, commits, scratch, threads=None, **options):
    """A kernel from SHAPE to SHAPE; ``body`` gets a function that stands for the author's fence."""
    commit = plgpu.commit_smem if commits else lambda: None
    names = {} if threads is None else {"num_threads": threads, "thread_name": "t"}
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **options)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=scratch,
        compiler_params=params,
        **names,
    )
    def kernel(x_ref, o_ref, *scratch):
        body(commit, x_ref, o_ref, *scratch)

    return kernel


def stored(commit, x_ref, o_ref, tile):
    tile[...] = x_ref[...] * 2
    commit()
    plgpu.copy_smem_to_gmem(tile, o_ref)
    plgpu.wait_smem_to_gmem(0)


def stored_in_a_loop(commit, x_ref, o_ref, tile):
    def step(i, _):
        rows = pl.ds(i * 16, 16)
        tile[...] = x_ref[rows] * 2
        commit()
        plgpu.copy_smem_to_gmem(tile, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    lax.fori_loop(0, 4, step, None)


def stored_in_a_branch(commit, x_ref, o_ref, tile):
    @pl.when(x_ref[0, 0] < 100)
    def _():
        tile[...] = x_ref[...] * 2
        commit()

    plgpu.copy_smem_to_gmem(tile, o_ref)
    plgpu.wait_smem_to_gmem(0)


def stored_for_another_thread(commit, x_ref, o_ref, tile, ready):
    def store():
        tile[...] = x_ref[...] * 2
        commit()
        plgpu.barrier_arrive(ready)

    def send():
        plgpu.barrier_wait(ready)
        plgpu.copy_smem_to_gmem(tile, o_ref)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(lax.axis_index("t") == 0, store, send)


TILE = plgpu.SMEM(SHAPE, jnp.float32)
CASES = {
    "stored": (stored, [TILE], None),
    "in a loop": (stored_in_a_loop, [plgpu.SMEM((16, 128), jnp.float32)], None),
    "in a branch": (stored_in_a_branch, [TILE], None),
    "for another thread": (stored_for_another_thread, [TILE, plgpu.Barrier()], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_missing_fence_is_inserted(case):
    body, scratch, threads = CASES[case]
    without = make(body, commits=False, scratch=scratch, threads=threads)
    np.testing.assert_array_equal(without(X), X * 2)  # The sanitizer sees a race without it.
    written = make(body, commits=True, scratch=scratch, threads=threads)
    assert fences(without, X) == fences(written, X) == 1


def test_a_fence_that_is_there_is_enough():
    body, scratch, _ = CASES["stored"]
    checked = make(body, commits=True, scratch=scratch)
    plain = make(body, commits=True, scratch=scratch, unsafe_no_auto_barriers=True)
    assert fences(checked, X) == fences(plain, X) == 1
    np.testing.assert_array_equal(checked(X), X * 2)


def test_without_automatic_barriers_there_are_none():
    body, scratch, _ = CASES["stored"]
    assert fences(make(body, commits=False, scratch=scratch, unsafe_no_auto_barriers=True), X) == 0


def test_memory_that_no_copy_uses_needs_none():
    def plain(commit, x_ref, o_ref, tile):
        tile[...] = x_ref[...] * 2
        o_ref[...] = tile[...]

    kernel = make(plain, commits=False, scratch=[TILE])
    np.testing.assert_array_equal(kernel(X), X * 2)
    assert fences(kernel, X) == 0


def test_operands_of_products():
    def body(commit, x_ref, o_ref, a, b):
        a[...] = x_ref[:, :64].astype(jnp.bfloat16)
        b[...] = x_ref[...].astype(jnp.bfloat16)
        commit()

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC(SHAPE, jnp.float32))

    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.SMEM(SHAPE, jnp.bfloat16)]
    kernel = make(body, commits=False, scratch=scratch)
    narrow = np.asarray(jnp.asarray(X, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(kernel(X), narrow[:, :64] @ narrow, rtol=1e-5, atol=1e-4)
    assert fences(kernel, X) == 1


# Barriers of the warpgroup ------------------------------------------------------------------------


def barriers(kernel, *args) -> int:
    """How many barriers are in the code."""
    ptx = pallasite.compile(kernel, *args, target="sm_90a").ptx
    return len(re.findall(r"bar(?:rier)?\.sync|barrier\.cta", ptx))


def exchanged(commit, x_ref, o_ref, tile):
    """Lanes load what others stored."""
    tile[...] = x_ref[...]
    o_ref[...] = tile[...] + tile[...].reshape(128, 64).T


def in_turns(commit, x_ref, o_ref, tile):
    """Lanes overwrite what others still load."""

    def step(i, _):
        rows = pl.ds(i * 16, 16)
        tile[...] = x_ref[rows]
        o_ref[rows] = tile[...] + tile[...].reshape(128, 16).T

    lax.fori_loop(0, 4, step, None)


def in_turns_result():
    parts = X.reshape(4, 16, 128)
    return (parts + parts.reshape(4, 128, 16).transpose(0, 2, 1)).reshape(SHAPE)


def test_lanes_meet_between_a_store_and_a_load():
    kernel = make(exchanged, commits=False, scratch=[TILE])
    np.testing.assert_array_equal(kernel(X), X + X.reshape(128, 64).T)
    without = make(exchanged, commits=False, scratch=[TILE], unsafe_no_auto_barriers=True)
    assert barriers(kernel, X) == barriers(without, X) + 1


def test_lanes_meet_before_memory_is_used_again():
    tile = plgpu.SMEM((16, 128), jnp.float32)
    kernel = make(in_turns, commits=False, scratch=[tile])
    np.testing.assert_array_equal(kernel(X), in_turns_result())
    without = make(in_turns, commits=False, scratch=[tile], unsafe_no_auto_barriers=True)
    assert barriers(kernel, X) == barriers(without, X) + 2


def test_memory_of_an_earlier_scope_is_not_overwritten_too_early():
    def body(commit, x_ref, o_ref):
        def first(tile):
            tile[...] = x_ref[...]
            return tile[...].reshape(128, 64).T

        turned = pl.run_scoped(first, TILE)

        def second(tile):
            tile[...] = turned
            return tile[...].reshape(128, 64).T

        o_ref[...] = pl.run_scoped(second, TILE)

    kernel = make(body, commits=False, scratch=[])
    np.testing.assert_array_equal(kernel(X), X.reshape(128, 64).T.reshape(128, 64).T)


def copied(commit, x_ref, o_ref, tiles, ready):
    """Two copies with nothing between them, then one where lanes have loaded."""

    def step(i, _):
        for slot in range(2):
            rows = pl.ds((2 * i + slot) * 16, 16)
            plgpu.copy_gmem_to_smem(x_ref.at[rows], tiles.at[slot], ready.at[slot])
        for slot in range(2):
            plgpu.barrier_wait(ready.at[slot])
            o_ref[pl.ds((2 * i + slot) * 16, 16)] = tiles[slot] + 1

    lax.fori_loop(0, 2, step, None)


def test_lanes_meet_before_copies_only_where_they_may_be_apart():
    scratch = [plgpu.SMEM((2, 16, 128), jnp.float32), plgpu.Barrier(num_barriers=2)]
    kernel = make(copied, commits=False, scratch=scratch)
    np.testing.assert_array_equal(kernel(X), X + 1)
    without = make(copied, commits=False, scratch=scratch, unsafe_no_auto_barriers=True)
    assert barriers(kernel, X) == barriers(without, X) + 1


# The searches by themselves -----------------------------------------------------------------------

TAKEN, OTHER = ((("c",), 0),), ((("c",), 1),)
MEMORY, ELSEWHERE = object(), object()
KINDS = {
    "asynchronous": EventKind.LOAD,
    "copied": EventKind.STORE,
    "unknown": EventKind.ACCESS,
    "overwrite": EventKind.ELECTED_STORE,
    "expect": EventKind.ELECTED_ARRIVE,
    "barrier": EventKind.SYNCHRONIZE,
}
OTHER_PROXY = ("asynchronous", "copied", "fence")
NOWHERE = ("fence", "barrier", "arrive", "wait", "expect")


def event(kind, number, branches=(), memory=MEMORY):
    proxy = ASYNC if kind in OTHER_PROXY else GENERIC
    kind, memory = KINDS.get(kind) or EventKind(kind), None if kind in NOWHERE else memory
    return Event(kind, ((), number), branches, memory, proxy)


def found(*events):
    return [number for _, number in missing_fences(events, FENCES).before]


def scopes(events):
    return [number for _, number in missing_fences(events, FENCES).scopes]


def test_order_of_events():
    store, use, fence = event("store", 1), event("asynchronous", 2), event("fence", 3)
    assert found(store, use) == [2]
    assert found(store, fence, use) == []
    assert found(use, store) == []
    assert found(event("store", 1, memory=ELSEWHERE), use) == []
    assert found(store, use, event("asynchronous", 4)) == [2]


def test_loops_and_branches():
    store, use, fence = event("store", 1), event("asynchronous", 2), event("fence", 3)
    assert found(Loop([use, store])) == [2]
    assert found(Loop([use, store, fence])) == []
    assert found(Fork([[store], []]), use) == [2]
    assert found(Fork([[store, fence], []]), use) == []
    assert found(Fork([[store, fence], [store]]), use) == [2]


def test_arrivals_for_other_threads():
    arrive = event("arrive", 5, TAKEN)
    store = event("store", 1, TAKEN)
    assert found(Fork([[store, arrive], [event("asynchronous", 2, OTHER)]])) == [5]
    assert found(Fork([[store, event("fence", 3, TAKEN), arrive], []])) == []
    inside = event("asynchronous", 4, (*TAKEN, (("d",), 0)))
    assert found(Fork([[store, arrive, inside], []])) == [4]


def test_scopes_after_stores():
    allocate, use = event("allocate", 9, memory=ELSEWHERE), event("asynchronous", 2)
    elsewhere = event("asynchronous", 3, memory=ELSEWHERE)
    assert scopes([event("store", 1), allocate, elsewhere, use]) == [9]
    fenced = [event("store", 1), event("fence", 4), allocate, elsewhere]
    assert scopes(fenced) == []
    assert scopes([Loop([allocate, elsewhere, event("store", 5)])]) == [9]


def met(*events, fenced=()):
    return [number for _, number in missing_barriers(events, fenced)]


def test_barriers_between_accesses():
    store, load = event("store", 1), event("load", 2)
    again, barrier = event("store", 3), event("barrier", 4)
    assert met(store, load, again) == [2, 3]
    assert met(store, barrier, load, event("barrier", 5), again) == []
    assert met(load, event("load", 6)) == []
    assert met(store, event("load", 2, memory=ELSEWHERE)) == []
    assert met(store, event("unknown", 7), load) == [7, 2]
    assert met(store, load, fenced={((), 2)}) == []
    assert met(event("asynchronous", 8), store) == [1]


def test_barriers_of_loops_branches_and_scopes():
    store, load = event("store", 1), event("load", 2)
    assert met(Loop([store, load])) == [2, 1]
    assert met(Loop([load, store])) == [1, 2]
    assert met(Fork([[store], []]), load) == [2]
    assert met(Fork([[store, event("barrier", 3)], []]), load) == []
    elsewhere = event("store", 4, memory=ELSEWHERE)
    assert met(load, event("allocate", 5, memory=ELSEWHERE), elsewhere) == [4]


def test_barriers_before_copies():
    copy, other = event("overwrite", 1), event("overwrite", 2, memory=ELSEWHERE)
    load, wait, barrier = event("load", 3), event("wait", 4), event("barrier", 5)
    assert met(copy, other, copy) == []
    assert met(load, other, copy) == [1]
    assert met(event("store", 6), copy) == met(event("asynchronous", 6), copy) == [1]
    assert met(event("store", 6), copy, fenced={((), 1)}) == []
    # Whoever arrives for all must not leave others behind at a wait.
    assert met(wait, copy, other) == [1]
    assert met(wait, barrier, copy) == []
    assert met(Loop([copy, wait])) == [1]
    assert met(Loop([copy, barrier, wait, load, barrier])) == []
    assert met(event("copied", 7), event("store", 8)) == []
    expect = event("expect", 9)
    assert met(expect, event("copied", 7)) == []
    assert met(wait, expect) == met(load, expect) == [9]


def test_copies_into_memory_that_was_stored_to():
    store = event("store", 1)
    assert found(store, event("copied", 2)) == [2]
    assert found(store, event("overwrite", 2), event("expect", 3), event("wait", 4)) == []
