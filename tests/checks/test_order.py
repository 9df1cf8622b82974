"""Copies and barriers in a wrong order, and the same kernels as they should be."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest
from checked import BOTH, F32, array, findings, only
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu

both = pytest.mark.parametrize("semantics", BOTH)
TILE = plgpu.SMEM((64, 64), F32)
X = array(64, 64)
LONG = array(64 * 6, 64)


def rows(i):
    return pl.ds(i * 64, 64)


# Bytes --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("announced", "copied"), [(1, 1), (2, 2), (1, 2), (2, 1), (0, 1)])
def test_bytes(announced, copied, semantics):
    def body(x, o, t, u, b):
        if announced:
            plgpu.barrier_expect(b, *(t, u)[:announced])  # here
        for tile in (t, u)[:copied]:
            plgpu.copy_gmem_to_smem(x, tile, b, arrive=False)  # here
        plgpu.barrier_wait(b)
        o[...] = t[...]

    found = findings(body, [X], X, scratch_types=[TILE, TILE, plgpu.Barrier()], semantics=semantics)
    if announced == copied:
        assert not found
    elif announced == 0:
        assert "nothing in the kernel arrives on the barrier" in found[0].text
    elif announced < copied:
        only(found, "bring more bytes than", "16384 bytes announced, 32768 bytes copied")
    else:
        only(found, "bring fewer bytes than", "32768 bytes announced, 16384 bytes copied")


@pytest.mark.parametrize("wrong_step", [None, 2])
def test_bytes_in_a_loop(wrong_step):
    """Only a phase in the third iteration announces what is not copied."""

    def body(x, o, t, b):
        def step(i, _):
            plgpu.barrier_expect(b, t)
            if wrong_step is None:
                plgpu.copy_gmem_to_smem(x.at[rows(i)], t, b, arrive=False)
            else:
                pl.when(i != wrong_step)(
                    lambda: plgpu.copy_gmem_to_smem(x.at[rows(i)], t, b, arrive=False)
                )
            plgpu.barrier_wait(b)
            o[rows(i)] = t[...]

        lax.fori_loop(0, 6, step, None)

    found = findings(body, [LONG], LONG, scratch_types=[TILE, plgpu.Barrier()])
    if wrong_step is None:
        assert not found
    else:
        (one,) = found
        assert "16384 bytes announced, 0 bytes copied" in one.text


# Waits and commits --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("defect", [None, "wait", "late wait", "commit"])
def test_through_shared_memory(defect, semantics):
    def body(x, o, t, b):
        plgpu.copy_gmem_to_smem(x, t, b)
        if defect not in ("wait", "late wait"):
            plgpu.barrier_wait(b)
        value = t[...]  # here wait
        if defect == "late wait":
            plgpu.barrier_wait(b)
        t[...] = value + 1
        if defect != "commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t, o)
        plgpu.wait_smem_to_gmem(0)

    found = findings(body, [X], X, scratch_types=[TILE, plgpu.Barrier()], semantics=semantics)
    if defect is None or (defect == "commit" and semantics is BOTH[1]):
        assert not found  # Layout inference adds the fence.
    elif defect == "commit":
        assert "stored without plgpu.commit_smem()" in found[0].text
    else:
        only(found, "shared memory is read while a copy from global memory may still write it")


@both
@pytest.mark.parametrize("defect", [None, "wait", "group"])
def test_copies_out(defect, semantics):
    def body(x, o, t):
        t[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t, o, commit_group=False)  # here
        if defect != "group":
            plgpu.commit_smem_to_gmem_group()
        if defect != "wait":
            plgpu.wait_smem_to_gmem(0)

    found = findings(body, [X], X, scratch_types=[TILE], semantics=semantics)
    if defect is None:
        assert not found
    elif defect == "wait":
        only(found, "nothing waits for this copy to global memory")
    else:
        only(found, "is never closed", "got: commit_group=False")


def test_a_copy_that_nobody_waits_for():
    def body(x, o, t, b):
        plgpu.copy_gmem_to_smem(x, t, b)  # here
        o[...] = x[...]

    only(
        findings(body, [X], X, scratch_types=[TILE, plgpu.Barrier()]),
        "nothing waits for this copy to shared memory",
    )


@both
@pytest.mark.parametrize("left", [0, 1])
def test_slots_of_copies_out(left, semantics):
    """Two slots: before one is written again, all but the last group must be over."""

    def body(x, o, t, *, pending):
        def step(i, _):
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            slot = t.at[lax.rem(i, 2)]
            slot[...] = x[rows(i)]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, o.at[rows(i)])

        lax.fori_loop(0, 6, step, None)
        plgpu.wait_smem_to_gmem(0)

    def found(pending):
        return findings(
            lambda *refs: body(*refs, pending=pending), [LONG], LONG,
            scratch_types=[plgpu.SMEM((2, 64, 64), F32)], semantics=semantics,
        )  # fmt: skip

    if left == 0:
        assert not found(0)
        assert not found(1)
    else:
        (one,) = found(2)
        assert "written while a copy to global memory may still read it" in one.text


# Pipelines by hand --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("defect", [None, "too far", "not waited", "other slot"])
def test_ring_of_one_thread(defect, semantics):
    slots, steps = 3, 6

    def body(x, o, t, b):
        ahead = slots if defect == "too far" else slots - 1
        for s in range(ahead):
            plgpu.copy_gmem_to_smem(x.at[rows(s)], t.at[s % slots], b.at[s % slots])

        def step(i, _):
            slot = lax.rem(i, slots)

            @pl.when(i + ahead < steps)
            def _():
                n = i + ahead
                to = lax.rem(n, slots)
                plgpu.copy_gmem_to_smem(x.at[rows(n)], t.at[to], b.at[to])

            if defect != "not waited":
                plgpu.barrier_wait(b.at[slot])
            used = lax.rem(i + 1, slots) if defect == "other slot" else slot
            o[rows(i)] = t[used]

        lax.fori_loop(0, steps, step, None)

    scratch = [plgpu.SMEM((slots, 64, 64), F32), plgpu.Barrier(num_barriers=slots)]
    found = findings(body, [LONG], LONG, scratch_types=scratch, semantics=semantics)
    assert bool(found) == (defect is not None), found


@both
@pytest.mark.parametrize("defect", [None, "no release", "early release", "few arrivals"])
def test_warp_specialised_ring(defect, semantics):
    """One thread fills slots, two others use them; a slot is filled anew when both are done."""
    slots, steps, users = 2, 6, 2

    def body(x, o, t, full, empty):
        thread = lax.axis_index("wg")

        @pl.when(thread == users)
        def _():
            def fill(i, _):
                slot = lax.rem(i, slots)
                if defect != "no release":
                    pl.when(i >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(x.at[rows(i)], t.at[slot], full.at[slot])

            lax.fori_loop(0, steps, fill, None)

        @pl.when(thread < users)
        def _():
            def use(i, total):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(full.at[slot])
                if defect == "early release":
                    plgpu.barrier_arrive(empty.at[slot])
                total += t[slot]
                if defect in (None, "few arrivals"):
                    plgpu.barrier_arrive(empty.at[slot])
                return total

            zeros = plgpu.layout_cast(
                jnp.zeros((64, 64), F32), plgpu.Layout.WG_STRIDED((64, 64), 2)
            )
            total = lax.fori_loop(0, steps, use, zeros)
            o[rows(thread)] = total

    arrivals = users + (defect == "few arrivals")
    scratch = [
        plgpu.SMEM((slots, 64, 64), F32),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots),
    ]
    found = findings(
        body, [LONG], array(128, 64), scratch_types=scratch, semantics=semantics,
        num_threads=users + 1, thread_name="wg",
    )  # fmt: skip
    if defect is None:
        assert not found
    elif defect == "few arrivals":
        assert "completes with arrival 3, but only 2 can come before" in found[0].text
    else:
        assert "a copy writes shared memory that another thread may still read" in found[0].text


def test_what_is_not_known_is_not_reported():
    def body(x, n, o, t, b):
        plgpu.copy_gmem_to_smem(x, t, b)
        pl.when(n[0] > 0)(lambda: plgpu.barrier_wait(b))
        o[...] = t[...]

    scratch = [TILE, plgpu.Barrier()]
    assert not findings(body, [X, array(1, dtype=jnp.int32)], X, scratch_types=scratch)


def test_waits_that_are_passed_on():
    """One thread waits for the copy, and tells the other."""

    def body(x, o, t, full, told):
        thread = lax.axis_index("wg")

        @pl.when(thread == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, t, full)
            plgpu.barrier_wait(full)
            plgpu.barrier_arrive(told)

        @pl.when(thread == 1)
        def _():
            plgpu.barrier_wait(told)
            o[...] = t[...]

    scratch = [TILE, plgpu.Barrier(), plgpu.Barrier()]
    check = functools.partial(
        findings, inputs=[X], out=X, scratch_types=scratch, num_threads=2, thread_name="wg"
    )
    assert not check(body)


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_pipelines_are_right(steps, depth):
    def body(x, o):
        plgpu.emit_pipeline(
            lambda _, a, b: b.__setitem__(..., a[...] + 1),
            grid=(steps,),
            in_specs=[plgpu.BlockSpec((64, 64), lambda i: (i, 0))],
            out_specs=[plgpu.BlockSpec((64, 64), lambda i: (i, 0))],
            max_concurrent_steps=depth,
        )(x, o)

    x = array(64 * steps, 64)
    assert not findings(body, [x], x)


@pytest.mark.parametrize(
    ("name", "defect"),
    [("check-transfers", "bytes"), ("check-reuse", "read"), ("check-copies", "wait")],
)
def test_disabled(name, defect):
    def body(x, o, t, b):
        if defect == "bytes":
            plgpu.barrier_expect(b, t)
            plgpu.barrier_wait(b)
        elif defect == "read":
            plgpu.copy_gmem_to_smem(x, t, b)
            o[...] = t[...]
            plgpu.barrier_wait(b)
        else:
            plgpu.copy_gmem_to_smem(x, t, b)
        o[...] = x[...]

    scratch = [TILE, plgpu.Barrier()]
    assert len(findings(body, [X], X, scratch_types=scratch)) == 1
    with pallasite.config.scoped(disabled_passes=name):
        assert not findings(body, [X], X, scratch_types=scratch)


# Stages -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_stages(steps, semantics):
    def body(x, o, t, b):
        for s in range(min(3, steps)):
            plgpu.copy_gmem_to_smem(x.at[rows(s)], t.at[s], b.at[s])  # here

        def step(i, _):
            slot = lax.rem(i, 3)
            plgpu.barrier_wait(b.at[slot])
            o[rows(i)] = t[slot]
            plgpu.commit_smem()

            @pl.when(i + 3 < steps)
            def _():
                plgpu.copy_gmem_to_smem(x.at[rows(i + 3)], t.at[slot], b.at[slot])

        lax.fori_loop(0, steps, step, None)

    scratch = [plgpu.SMEM((3, 64, 64), F32), plgpu.Barrier(num_barriers=3)]
    x = array(64 * steps, 64)
    found = findings(body, [x], x, scratch_types=scratch, semantics=semantics)
    if steps >= 3:
        assert not found
    else:
        only(found, "has 3 stages, of which 2 are used", "try: num_barriers=2")


# Warps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defect", [None, "wait", "bytes"])
def test_warps(defect):
    """One warp starts copies, and another one waits for them."""

    def body(x, o, t, u, b, done):
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                plgpu.barrier_expect(b, t, *((u,) if defect == "bytes" else ()))
                plgpu.copy_gmem_to_smem(x, t, b, arrive=False)

            @pl.when(warp == 1)
            def _():
                if defect != "wait":
                    plgpu.barrier_wait(b)
                plgpu.barrier_arrive(done)

        plgpu.barrier_wait(done)
        o[...] = t[...]
        if defect == "wait":
            plgpu.barrier_wait(b)

    scratch = [TILE, TILE, plgpu.Barrier(), plgpu.Barrier()]
    found = findings(body, [X], X, scratch_types=scratch, target="sm_100a")
    if defect is None:
        assert not found
    elif defect == "wait":
        assert "shared memory is read while a copy" in found[0].text
    else:
        assert "32768 bytes announced, 16384 bytes copied" in found[0].text


@pytest.mark.parametrize("row", [0, 1])
def test_a_copy_arrives_whatever_its_predicate(row):
    """Without bytes where it is false."""

    def body(x, out, tile, loaded):
        tile[...] = jnp.zeros((64, 64), F32)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, tile, loaded, predicate=lax.axis_index("row") % 2 == row)
        plgpu.barrier_wait(loaded)
        out[lax.axis_index("row")] = tile[...]

    options = {"grid": (3,), "grid_names": ("row",)}
    scratch = [plgpu.SMEM((64, 64), F32), plgpu.Barrier()]
    assert not findings(body, [array(64, 64)], array(3, 64, 64), scratch_types=scratch, **options)
