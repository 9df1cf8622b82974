"""Accumulators: how products are added, parts, initial contents, loops, branches, waits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from products_support import (
    BF16,
    F16,
    F32,
    I8,
    I32,
    LEFT_LAYOUTS,
    Operand,
    check,
    load,
    run,
    values,
    wide,
)

from pallasite import gpu as plgpu

pytestmark = [pytest.mark.runs_kernels, pytest.mark.usefixtures("semantics")]

LEFT = Operand(64, 32, BF16, 64)
RIGHT = Operand(32, 64, BF16, 128)
A = values("a", (64, 32), BF16)
B = values("b", (32, 64), BF16)
PRODUCT = wide(A) @ wide(B)


def compute(
    body, *further: np.ndarray, left=LEFT, right=RIGHT, a=A, b=B, shape=(64, 64), dtype=F32
):
    """Runs a body that gets a and b in shared memory, and what ``further`` is in global memory."""

    def whole(a_ref, b_ref, *refs):
        *further_refs, out_ref, a_smem, b_smem, barrier = refs
        load([(a_ref, a_smem), (b_ref, b_smem)], barrier)
        out_ref[...] = body(left.view(a_smem), right.view(b_smem), *further_refs)

    kernel = plgpu.kernel(
        whole,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[left.scratch, right.scratch, plgpu.Barrier(num_arrivals=2)],
    )
    return run(kernel, left.stored(a), right.stored(b), *further)


def scoped(function, shape=(64, 64), dtype=F32):
    """What a function of an accumulator returns."""
    return pl.run_scoped(function, plgpu.ACC(shape, dtype))


# How products are added ---------------------------------------------------------------------------


def test_nothing_is_added_to_zero():
    check(compute(lambda a, b: scoped(lambda acc: acc[...])), np.zeros((64, 64)))


@pytest.mark.parametrize("flag", [True, False, np.True_, np.False_])
def test_accumulate_known(flag):
    def body(a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(acc, a, b, accumulate=flag)
            return acc[...]

        return scoped(scope)

    check(compute(body), PRODUCT * (2 if flag else 1))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("flag", [0, 1])
def test_accumulate_traced(flag, dtype):
    def body(a, b, flag_ref):
        keep = flag_ref[0] == 1

        def scope(acc):
            plgpu.wgmma(acc, a, b, accumulate=keep)
            plgpu.wgmma(acc, a, b, accumulate=keep)
            plgpu.wgmma(acc, a, b, accumulate=jnp.logical_not(keep))
            return acc[...]

        return scoped(scope, dtype=dtype)

    operands = dict(
        left=Operand(64, 32, F16, 64), right=Operand(32, 64, F16, 128),
        a=A.astype(F16), b=B.astype(F16), dtype=dtype,
    )  # fmt: skip
    result = compute(body, np.asarray([flag], np.int32), **operands)
    check(result, PRODUCT * (1 if flag else 2))


def test_accumulate_traced_to_zero():
    """Whatever the flag is, there is nothing to add to."""

    def body(a, b, flag_ref):
        def scope(acc):
            plgpu.wgmma(acc, a, b, accumulate=flag_ref[0] == 1)
            return acc[...]

        return scoped(scope)

    check(compute(body, np.asarray([1], np.int32)), PRODUCT)


def test_accumulate_false_forgets_infinity():
    """Contents that are replaced do not matter, even if they times zero were not zero."""

    def body(a, b, flag_ref):
        def scope(acc):
            acc[...] = jnp.full((64, 64), jnp.inf)
            plgpu.wgmma(acc, a, b, accumulate=flag_ref[0] == 1)
            return acc[...]

        return scoped(scope)

    check(compute(body, np.asarray([0], np.int32)), PRODUCT)


def test_integers_wrap():
    """Sums of integers wrap around."""
    left, right = Operand(64, 32, I8, 32), Operand(32, 64, I8, 32, True)
    a, b = values("a", (64, 32), I8), values("b", (32, 64), I8)
    start = 2**31 - 1

    def body(a, b):
        def scope(acc):
            acc[...] = jnp.full((64, 64), start, jnp.int32)
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return scoped(scope, dtype=I32)

    expected = (a.astype(np.int64) @ b.astype(np.int64) + start).astype(np.int32)
    result = compute(body, left=left, right=right, a=a, b=b, dtype=I32)
    check(result, expected.astype(np.float64))


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16])
def test_parts(dtype):
    """Rows and columns; the rest stays as it is."""
    left, right = Operand(128, 32, F16, 64), Operand(32, 64, F16, 128)
    a, b = values("a", (128, 32), F16), values("b", (32, 64), F16)

    def body(a, b):
        def scope(acc):
            acc[...] = jnp.ones((128, 64), dtype)
            plgpu.wgmma(acc.at[64:128], a.at[64:128], b)
            plgpu.wgmma(acc.at[:, 8:24], a, b.at[:, 8:24], accumulate=False)
            plgpu.wgmma(acc.at[0:64].at[:, 32:64].at[:, 0:16], a.at[0:64], b.at[:, 32:48])
            return acc[...]

        return scoped(scope, (128, 64), dtype)

    product = wide(a) @ wide(b)
    expected = np.ones((128, 64))
    expected[64:] += product[64:]
    expected[:, 8:24] = product[:, 8:24]
    expected[:64, 32:48] += product[:64, 32:48]
    check(compute(body, left=left, right=right, a=a, b=b, shape=(128, 64), dtype=dtype), expected)


def test_parts_of_zero():
    """Each part is set by its first product, while others are in flight."""

    def body(a, b):
        def scope(acc):
            for start in range(0, 64, 16):
                part = slice(start, start + 16)
                plgpu.wgmma(acc.at[:, part], a, b.at[:, part])
            return acc[...]

        return scoped(scope)

    check(compute(body), PRODUCT)


def test_part_of_what_is_read():
    def body(a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return jnp.concatenate([acc[:, 32:64], acc[:, 0:32]], axis=1)

        return scoped(scope)

    expected = np.concatenate([PRODUCT[:, 32:], PRODUCT[:, :32]], axis=1)
    check(compute(body), expected)


# Contents -----------------------------------------------------------------------------------------

C = values("c", (64, 64), F32)
WGMMA = plgpu.Layout.WGMMA


@pytest.mark.parametrize("layout", [WGMMA, plgpu.Layout.WG_STRIDED((64, 64), vec_size=2)])
def test_store(layout):
    """Contents may come in another layout."""

    def body(a, b, c):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            acc[...] = plgpu.load(c, (), layout=layout) * 2
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return scoped(scope)

    check(compute(body, C), 2 * wide(C) + PRODUCT)


def test_store_of_a_scalar():
    def body(a, b):
        def scope(acc):
            acc[...] = 3.0
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return scoped(scope)

    check(compute(body), 3 + PRODUCT)


def test_contents_are_scaled_between_products():
    """As attention does when the largest score changes."""

    def body(a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            acc[...] = acc[...] * 0.5
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return scoped(scope)

    check(compute(body), 1.5 * PRODUCT)


@pytest.mark.parametrize(("dtype", "operands"), [(F32, BF16), (F16, F16), (I32, I8)])
def test_run_state(dtype, operands):
    """Initial contents of any dtype; the result is the contents at the end, once they are there."""
    left = Operand(64, 32, operands, 32)
    right = Operand(32, 64, operands, 32, operands == I8)
    a, b = values("a", (64, 32), operands), values("b", (32, 64), operands)
    c = values("c", (64, 64), F32).astype(dtype)

    def body(a, b, c):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(acc, a, b)

        return pl.run_state(scope)(plgpu.ACC.init(plgpu.load(c, (), layout=WGMMA)))

    arguments = dict(left=left, right=right, a=a, b=b, dtype=dtype)
    check(compute(body, c, **arguments), wide(c) + 2 * (wide(a) @ wide(b)))


def test_run_state_in_a_loop():
    def body(a, b, c):
        def step(_, value):
            def scope(acc):
                plgpu.wgmma(acc, a, b)

            return pl.run_state(scope)(plgpu.ACC.init(value))

        return lax.fori_loop(0, 3, step, plgpu.load(c, (), layout=WGMMA))

    check(compute(body, C), wide(C) + 3 * PRODUCT)


def test_layouts_of_scopes():
    """What state begins with is loaded in its layout, as is what meets the result of a scope."""
    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 192), jnp.float32),
        scratch_types=[
            LEFT.scratch,
            Operand(32, 192, BF16, 128).scratch,
            plgpu.SMEM((64, 192), jnp.float32, transforms=transforms),
            plgpu.Barrier(num_arrivals=3),
        ],
    )
    def kernel(a_ref, b_ref, c_ref, out_ref, a_smem, b_smem, c_smem, barrier):
        load([(a_ref, a_smem), (b_ref, b_smem), (c_ref, c_smem)], barrier)

        def state(acc):
            plgpu.wgmma(acc, a_smem, b_smem)

        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        first = pl.run_state(state)(plgpu.ACC.init(c_smem[...]))
        second = pl.run_scoped(scope, plgpu.ACC((64, 192)))
        wanted = c_ref[0, 0] > -100
        third = lax.cond(wanted, lambda: c_smem[...] * 2 + second, lambda: c_smem[...])
        out_ref[...] = first - third

    b, c = values("b", (32, 192), BF16), values("c", (64, 192), F32)
    check(run(kernel, A, b, c), -wide(c))


@pytest.mark.parametrize("dtype", [F32, F16])
def test_run_state_with_an_outer_accumulator(dtype):
    """A scope of state may use accumulators of scopes further out, which go on afterwards."""
    left, right = Operand(64, 32, F16, 32), Operand(32, 64, F16, 32)
    a, b = values("a", (64, 32), F16), values("b", (32, 64), F16)

    def body(a, b, c):
        def outer(outer_acc):
            plgpu.wgmma(outer_acc, a, b)

            def inner(inner_acc):
                plgpu.wgmma(outer_acc, a, b)
                plgpu.wgmma(inner_acc, a, b)

            state = pl.run_state(inner)(plgpu.ACC.init(plgpu.load(c, (), layout=WGMMA)))
            plgpu.wgmma(outer_acc, a, b)
            return outer_acc[...] - state

        return pl.run_scoped(outer, plgpu.ACC((64, 64), dtype))

    c = values("c", (64, 64), F32).astype(dtype)
    arguments = dict(left=left, right=right, a=a, b=b, dtype=dtype)
    check(compute(body, c, **arguments), 2 * (wide(a) @ wide(b)) - wide(c))


def test_scratch():
    """An accumulator may be a scratch of the whole kernel, if it has one thread."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            LEFT.scratch,
            RIGHT.scratch,
            plgpu.ACC((64, 64)),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    def kernel(a_ref, b_ref, out_ref, a_smem, b_smem, acc, barrier):
        load([(a_ref, a_smem), (b_ref, b_smem)], barrier)
        plgpu.wgmma(acc, a_smem, b_smem)
        out_ref[...] = acc[...]

    check(run(kernel, A, B), PRODUCT)


@pytest.mark.parametrize("state", [False, True])
def test_indices_in_the_scope(state):
    """In a scope, everything is known that is known outside of it."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
        scratch_types=[
            LEFT.scratch,
            RIGHT.scratch,
            plgpu.Barrier(num_arrivals=2),
            plgpu.SMEM((4,), jnp.int32),
        ],
        grid=(2,),
        grid_names=("block",),
    )
    def kernel(a_ref, b_ref, out_ref, a_smem, b_smem, barrier, warps):
        load([(a_ref, a_smem), (b_ref, b_smem)], barrier)

        def scope(acc):
            @pl.loop(0, lax.axis_index("block") + pl.program_id(0) + 1)
            def _(_):
                plgpu.wgmma(acc, a_smem, b_smem)

            plgpu.wgmma_wait(0)

            @plgpu.warp_map
            def _(warp):
                warps[warp] = warp * pl.num_programs(0)

            if not state:
                return acc[...]

        if state:
            result = pl.run_state(scope)(plgpu.ACC.init(jnp.zeros((64, 64))))
        else:
            result = scoped(scope)
        out_ref[lax.axis_index("block")] = result + warps[3].astype(jnp.float32)

    check(run(kernel, A, B), np.stack([PRODUCT + 6, 3 * PRODUCT + 6]))


# Loops and branches -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", ["known", "traced", "unrolled", "while", "pl.loop", "nested"])
@pytest.mark.sampled
def test_loops(kind, count):
    def body(a, b, count_ref):
        limit = count_ref[0]

        def scope(acc):
            def step(*_):
                plgpu.wgmma(acc, a, b)

            match kind:
                case "known":
                    lax.fori_loop(0, count, lambda *_: step(), None)
                case "traced":
                    lax.fori_loop(0, limit, lambda *_: step(), None)
                case "unrolled":
                    lax.fori_loop(0, count, lambda *_: step(), None, unroll=True)
                case "while":

                    def again(i):
                        step()
                        return i + 1

                    lax.while_loop(lambda i: i < limit, again, 0)
                case "pl.loop":
                    pl.loop(0, limit)(step)
                case "nested":

                    @pl.loop(0, limit)
                    def _(i):
                        pl.loop(0, i + 1)(step)

            return acc[...]

        return scoped(scope)

    times = count * (count + 1) // 2 if kind == "nested" else count
    check(compute(body, np.asarray([count], np.int32)), times * PRODUCT)


@pytest.mark.parametrize("flag", [0, 1, 2])
def test_branches(flag):
    """Products and contents in branches, which agree on nothing but the accumulator."""

    def body(a, b, flag_ref):
        chosen = flag_ref[0]

        def scope(acc):
            plgpu.wgmma(acc, a, b)

            def product():
                plgpu.wgmma(acc, a, b)

            def replace():
                plgpu.wgmma_wait(0)
                acc[...] = acc[...] + 7

            lax.switch(chosen, [product, replace, lambda: None])
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return scoped(scope)

    expected = {0: 3 * PRODUCT, 1: 2 * PRODUCT + 7, 2: 2 * PRODUCT}[flag]
    check(compute(body, np.asarray([flag], np.int32)), expected)


def test_scaled_on_condition_in_a_loop():
    """Lazy rescaling: a branch in a loop changes the contents now and then."""

    def body(a, b, count_ref):
        def scope(acc):
            @pl.loop(0, count_ref[0])
            def _(i):
                @pl.when(lax.rem(i, 2) == 1)
                def _():
                    acc[...] = acc[...] * 0.5

                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(0)

            return acc[...]

        return scoped(scope)

    expected = np.zeros((64, 64))
    for i in range(4):
        expected = (expected * 0.5 if i % 2 else expected) + PRODUCT
    check(compute(body, np.asarray([4], np.int32)), expected)


# Waiting ------------------------------------------------------------------------------------------


def test_two_accumulators_in_flight():
    """The first is read while the products of the second are in flight."""

    def body(a, b):
        def scope(first, second):
            plgpu.wgmma(first, a, b)
            plgpu.wgmma(second, a, b)
            plgpu.wgmma(second, a, b)
            one = plgpu.wgmma_accumulator_load(first, wait_n=2)
            return one * 10 + second[...]

        return pl.run_scoped(scope, plgpu.ACC((64, 64)), plgpu.ACC((64, 64)))

    check(compute(body), 12 * PRODUCT)


def test_read_after_an_explicit_wait():
    def body(a, b):
        def scope(first, second):
            plgpu.wgmma(first, a, b)
            plgpu.wgmma(second, a, b)
            plgpu.wgmma_wait(1)
            one = plgpu.wgmma_accumulator_load(first, wait_n=None)
            plgpu.wgmma_wait(0)
            return one * 10 + plgpu.wgmma_accumulator_load(second, wait_n=None)

        return pl.run_scoped(scope, plgpu.ACC((64, 64)), plgpu.ACC((64, 64)))

    check(compute(body), 11 * PRODUCT)


def test_accumulators_of_two_scopes():
    """A product of an inner scope, while one of the outer scope is in flight."""

    def body(a, b):
        def outer(first):
            plgpu.wgmma(first, a, b)

            def inner(second):
                plgpu.wgmma(second, a, b)
                return second[...]

            other = scoped(inner)
            plgpu.wgmma(first, a, b)
            return first[...] + 10 * other

        return scoped(outer)

    check(compute(body), 12 * PRODUCT)


@pytest.mark.parametrize("left", [0, 1])
def test_ring_of_slots(left):
    """Slots are filled again once the products that read them are over."""
    steps, slots = 6, 3
    a, b = values("a", (64, 32 * steps), BF16), values("b", (32 * steps, 64), BF16)
    tiles = [Operand(64, 32, BF16, 64), Operand(32, 64, BF16, 128)]

    def body(a_ref, b_ref, out_ref, *refs):
        def inside(a_smem, b_smem, loaded):
            def fetch(step):
                slot = lax.rem(step, slots)
                window = pl.ds(step * 32, 32)
                plgpu.copy_gmem_to_smem(a_ref.at[:, window], a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_ref.at[window], b_smem.at[slot], loaded.at[slot])

            for step in range(slots - left):
                fetch(step)

            def scope(acc):
                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(step, slots)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                    plgpu.wgmma_wait(left)
                    following = step + slots - left

                    @pl.when(following < steps)
                    def _():
                        fetch(following)

                return acc[...]

            out_ref[...] = scoped(scope)

        pl.run_scoped(
            inside,
            *[plgpu.SMEM((slots, *tile.stored_shape), BF16, transforms=tile.scratch.transforms)
              for tile in tiles],
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        )  # fmt: skip

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    check(run(kernel, a, b), wide(a) @ wide(b))


# Threads ------------------------------------------------------------------------------------------


def test_two_warpgroups():
    """Each multiplies rows of its own by the same right operand."""
    left, right = Operand(128, 32, BF16, 64), RIGHT
    a = values("a", (128, 32), BF16)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[left.scratch, right.scratch, plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="wg",
    )
    def kernel(a_ref, b_ref, out_ref, a_smem, b_smem, loaded):
        number = lax.axis_index("wg")

        @pl.when(number == 0)
        def _():
            plgpu.copy_gmem_to_smem(a_ref, a_smem, loaded)
            plgpu.copy_gmem_to_smem(b_ref, b_smem, loaded)

        plgpu.barrier_wait(loaded)
        rows = pl.ds(number * 64, 64)

        def scope(acc):
            plgpu.wgmma(acc, a_smem.at[rows], b_smem)
            return acc[...]

        out_ref[rows] = scoped(scope)

    check(run(kernel, a, B), wide(a) @ wide(B))


def test_warp_specialized():
    """One warpgroup copies, the other one multiplies: slots are handed back by a barrier."""
    steps, slots = 5, 2
    a, b = values("a", (64, 32 * steps), BF16), values("b", (32 * steps, 64), BF16)

    def stacked(operand):
        shape = (slots, *operand.stored_shape)
        return plgpu.SMEM(shape, BF16, transforms=operand.scratch.transforms)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            stacked(LEFT),
            stacked(RIGHT),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        num_threads=2,
        thread_name="wg",
    )
    def kernel(a_ref, b_ref, out_ref, a_smem, b_smem, loaded, consumed):
        @pl.when(lax.axis_index("wg") == 1)
        def _():
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, slots)

                @pl.when(step >= slots)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                window = pl.ds(step * 32, 32)
                plgpu.copy_gmem_to_smem(a_ref.at[:, window], a_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b_ref.at[window], b_smem.at[slot], loaded.at[slot])

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            def scope(acc):
                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(step, slots)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                    plgpu.wgmma_wait(1)

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_arrive(consumed.at[lax.rem(step + slots - 1, slots)])

                return acc[...]

            out_ref[...] = scoped(scope)

    check(run(kernel, a, b), wide(a) @ wide(b))


# Left operands in registers -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_left_operand_changes_in_a_loop(dtype):
    """Registers that a product in flight reads are not changed."""
    left = Operand(64, 32, dtype, 64)
    right = Operand(32, 64, dtype, 64, dtype == F32)
    a, b = values("a", (64, 32), dtype), values("b", (32, 64), dtype)
    layout = getattr(plgpu.Layout, LEFT_LAYOUTS[dtype.itemsize])

    def body(a, b, c, a_ref):
        def scope(acc):
            def step(_, value):
                plgpu.wgmma(acc, value, b)
                plgpu.wgmma_wait(0)
                return value + value

            lax.fori_loop(0, 3, step, plgpu.load(a_ref, (), layout=layout))
            return acc[...]

        return scoped(scope)

    result = compute(body, C, a, left=left, right=right, a=a, b=b)
    check(result, 7 * (wide(a) @ wide(b)))


def test_zeros_that_a_branch_hands_back():
    """One branch adds products in a loop, the other leaves the zeros; they are made once."""
    left = Operand(64, 64, BF16, 128)
    right = Operand(64, 128, BF16, 128)
    a, b = values("a", (64, 64), BF16), values("b", (64, 128), BF16)

    def body(times):
        def inside(a, b, times_ref):
            count = times_ref[0]

            def scope(acc):
                @pl.when(count > 0)
                def _():
                    def step(_, carry):
                        plgpu.wgmma(acc, a, b)
                        plgpu.wgmma_wait(0)
                        return carry

                    lax.fori_loop(0, count, step, None)

                return acc[...]

            return scoped(scope, (64, 128))

        counts = np.array([times], np.int32)
        return compute(inside, counts, left=left, right=right, a=a, b=b, shape=(64, 128))

    for times in (0, 1, 3):
        check(body(times), times * (wide(a) @ wide(b)))
