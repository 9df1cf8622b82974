"""Rules run on a GPU and compared with NumPy: every element of every output is checked."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental import pallas as pl
from tests import python_processes

from pallasite._jax import masked_load, masked_store, masked_swap, run_state
from pallasite.ir import ops
from pallasite.language.kernel import kernel
from pallasite.language.memory import SMEM, SemaphoreType
from pallasite.language.transforms import SwizzleTransform, TilingTransform, transpose_ref
from pallasite.lowering.arrays import elementwise
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.memory.transfers import load_array
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives import arrays
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait
from pallasite_std.primitives.copies import async_store_smem
from pallasite_std.primitives.inline import RefType, ShapeDtypeStruct, inline_mgpu
from pallasite_std.primitives.layouts import Layout, layout_cast

pytestmark = pytest.mark.runs_kernels

SWIZZLED = (TilingTransform((8, 32)), SwizzleTransform(128))
INTEGERS = ("int32", "uint32", "int64", "uint64")
FLOATS = ("float32", "float64", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True):
        yield


def out(shape, dtype=jnp.float32):
    """The type of an output."""
    return jax.ShapeDtypeStruct(shape, dtype)


def values(shape, dtype, seed=0, limit=50):
    """Small integers, which all dtypes and all orders of summation represent exactly."""
    low = 0 if np.dtype(dtype).kind == "u" else -limit
    numbers = np.random.default_rng(seed).integers(low, limit, shape)
    return jnp.asarray(numbers.astype(dtype))


# Atomic updates -----------------------------------------------------------------------------------

COMBINE = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def combine_blocks(operation, blocks, start, x):
    """What all blocks' updates make of ``start``, in NumPy."""
    x = np.asarray(x)
    result = np.asarray(start).astype(np.float64 if "float" in str(start.dtype) else start.dtype)
    for block in range(blocks):
        result = COMBINE[operation](result, x[block].astype(result.dtype))
    return result


def global_update(operation, shape, dtype, layout=None, blocks=6):
    update = getattr(arrays, f"atomic_{operation}")

    @functools.partial(
        kernel,
        out_type=out(shape, dtype),
        grid=(blocks,),
        grid_names=("i",),
        input_output_aliases={0: 0},
    )
    def body(start, x, o):
        value = x[jax.lax.axis_index("i")]
        update(o, value if layout is None else layout_cast(value, layout))

    limit = 4 if dtype.endswith("float16") or dtype == "float16" else 50
    start, x = values(shape, dtype, 1, limit), values((blocks, *shape), dtype, 2, limit)
    expected = combine_blocks(operation, blocks, start, x)
    result = jax.jit(body)(start, x)
    np.testing.assert_array_equal(np.asarray(result).astype(expected.dtype), expected)


@pytest.mark.parametrize("shape", [(64, 64), (256,), (7,), (96,), (300,), (1,), ()])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
@pytest.mark.sampled(alone=("shape",))
def test_atomic_add(dtype, shape):
    global_update("add", shape, dtype)


@pytest.mark.parametrize("operation", ["max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_atomic_integers(dtype, operation):
    global_update(operation, (33, 4), dtype)


@pytest.mark.parametrize("operation", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_atomic_order_of_floats(dtype, operation):
    global_update(operation, (64, 32), dtype)


def test_atomic_order_of_nan_and_infinities():
    start = jnp.array([1.0, -1.0, -np.inf, 0.0, -0.0, np.inf, 3.0, -5.0], jnp.float32)
    x = jnp.array([np.nan, np.nan, -3.0, -0.0, 0.0, 2.0, np.inf, -np.inf], jnp.float32)

    def run(update):
        @functools.partial(kernel, out_type=out((8,)), input_output_aliases={0: 0})
        def body(start, x, o):
            update(o, x[...])

        return np.asarray(jax.jit(body)(start, x))

    np.testing.assert_array_equal(run(arrays.atomic_max), np.maximum(start, x))
    np.testing.assert_array_equal(run(arrays.atomic_min), np.minimum(start, x))


@pytest.mark.parametrize("layout", [Layout.WGMMA.reduce(1), Layout.WGMMA.reduce(0)])
def test_atomic_add_of_replicated_elements(layout):
    global_update("add", (128,), "float32", layout)


def test_atomic_add_in_mma_layout():
    global_update("add", (64, 64), "float32", Layout.WGMMA)
    global_update("add", (64, 64), "bfloat16", Layout.WGMMA)


@pytest.mark.parametrize("transforms", [(), SWIZZLED])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_atomic_add_in_shared_memory(dtype, transforms):
    @functools.partial(
        kernel,
        out_type=out((64, 64), dtype),
        scratch_types=[SMEM((64, 64), dtype, transforms=transforms), Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="t",
    )
    def body(x, o, s, b):
        thread = jax.lax.axis_index("t")

        @pl.when(thread == 0)
        def _():
            s[...] = x[0]

        barrier_arrive(b)
        barrier_wait(b)
        arrays.atomic_add(s, layout_cast(x[thread + 1], Layout.WGMMA))
        barrier_arrive(b)
        barrier_wait(b)

        @pl.when(thread == 1)
        def _():
            o[...] = s[...]

    x = values((3, 64, 64), dtype)
    np.testing.assert_array_equal(jax.jit(body)(x), np.asarray(x).sum(0))


# Semaphores ---------------------------------------------------------------------------------------


def test_blocks_wait_for_each_other():
    blocks = 8

    @functools.partial(
        kernel,
        out_type=[out((blocks, 128)), out((blocks, 128))],
        grid=(blocks,),
        grid_names=("i",),
    )
    def body(x, o, scratch):
        i = jax.lax.axis_index("i")
        done = pl.get_global(SemaphoreType.REGULAR)
        scratch[i] = x[i] * 2.0
        pl.semaphore_signal(done)
        pl.semaphore_wait(done, blocks, decrement=False)
        o[i] = scratch[(i + 1) % blocks]

    x = values((blocks, 128), "float32")
    for _ in range(3):  # The launch clears the semaphores each time.
        result, _ = jax.jit(body)(x)
        np.testing.assert_array_equal(result, np.roll(np.asarray(x) * 2, -1, 0))


def test_scoped_semaphores_and_reads():
    @functools.partial(kernel, out_type=out((4, 3), jnp.int32), grid=(4,), grid_names=("i",))
    def body(n, o):
        i = jax.lax.axis_index("i")

        def scope(sems):
            pl.semaphore_signal(sems.at[1], n[i])
            o[i, 0] = pl.semaphore_read(sems.at[1])
            pl.semaphore_wait(sems.at[1], n[i] - 1)
            o[i, 1] = pl.semaphore_read(sems.at[1])
            pl.semaphore_wait(sems.at[1], 1)
            o[i, 2] = pl.semaphore_read(sems.at[0])

        pl.run_scoped(scope, SemaphoreType.REGULAR((2,)))
        pl.run_scoped(scope, SemaphoreType.REGULAR((2,)))

    n = jnp.arange(5, 9, dtype=jnp.int32)
    expected = np.stack([np.arange(5, 9), np.ones(4), np.zeros(4)], 1)
    np.testing.assert_array_equal(jax.jit(body)(n), expected)


def test_threads_of_a_block_signal_each_other():
    @functools.partial(
        kernel, out_type=out((128,)), num_threads=2, thread_name="t",
        scratch_types=[SMEM((128,), jnp.float32)],
    )  # fmt: skip
    def body(x, o, s):
        def scope(sem):
            thread = jax.lax.axis_index("t")

            @pl.when(thread == 0)
            def _():
                s[...] = x[...] + 1.0
                pl.semaphore_signal(sem)

            @pl.when(thread == 1)
            def _():
                pl.semaphore_wait(sem)
                o[...] = s[...]

        pl.run_scoped(scope, SemaphoreType.REGULAR, collective_axes="t")

    x = values((128,), "float32")
    np.testing.assert_array_equal(jax.jit(body)(x), np.asarray(x) + 1)


# Warps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_warps_do_different_things(dtype):
    @functools.partial(
        kernel, out_type=out((8,), dtype), scratch_types=[SMEM((8,), dtype)],
        num_threads=2, thread_name="t",
    )  # fmt: skip
    def body(x, o, s):
        thread = jax.lax.axis_index("t")

        def per_warp(warp):
            s[thread * 4 + warp] = x[warp] * x[4 + thread]

        warp_map(per_warp)
        warp_map(lambda warp: arrays.atomic_add(s.at[thread * 4 + (warp + 1) % 4], x[warp]))

        def copy(warp):
            o[thread * 4 + warp] = s[thread * 4 + warp]

        warp_map(copy)

    x = values((6,), dtype)
    n = np.asarray(x)
    expected = [n[w] * n[4 + t] + n[(w - 1) % 4] for t in range(2) for w in range(4)]
    np.testing.assert_array_equal(jax.jit(body)(x), expected)


# Loads, masks, state ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", "int64", "float8_e4m3fn"])
@pytest.mark.parametrize("count", [0, 1, 99, 200, 256])
def test_masks(dtype, count):
    @functools.partial(kernel, out_type=out((256,), dtype))
    def body(x, n, o):
        inside = jnp.arange(256, dtype=jnp.int32) < n[0]
        value = masked_load(x, slice(None), mask=inside, other=jnp.ones((), dtype))
        masked_store(o, slice(None), value, mask=inside)
        masked_store(o, slice(None), value, mask=jnp.logical_not(inside))

    x = values((256,), "int32").astype(dtype)
    expected = np.where(np.arange(256) < count, np.asarray(x, np.float32), np.float32(1))
    result = jax.jit(body)(x, jnp.array([count], jnp.int32))
    np.testing.assert_array_equal(np.asarray(result).astype(np.float32), expected)


def test_masked_swap():
    @functools.partial(kernel, out_type=[out((256,)), out((256,))], input_output_aliases={0: 0})
    def body(x, y, o, old):
        even = jnp.arange(256, dtype=jnp.int32) % 2 == 0
        old[...] = masked_swap(o, slice(None), y[...], mask=even)

    x, y = values((256,), "float32", 1), values((256,), "float32", 2)
    even = np.arange(256) % 2 == 0
    new, old = jax.jit(body)(x, y)
    np.testing.assert_array_equal(new, np.where(even, y, x))
    np.testing.assert_array_equal(old, np.where(even, x, y))


@pytest.mark.parametrize("transposed", [False, True])
def test_checked_load(transposed):
    @functools.partial(kernel, out_type=out((64, 64)), scratch_types=[SMEM((64, 64), jnp.float32)])
    def body(x, o, s):
        s[...] = x[...]
        view = transpose_ref(s, (1, 0)) if transposed else s
        o[...] = arrays.load(view, optimized=not transposed)

    x = values((64, 64), "float32")
    np.testing.assert_array_equal(jax.jit(body)(x), np.asarray(x).T if transposed else x)


def test_state_in_registers():
    @functools.partial(kernel, out_type=out((128,)))
    def body(x, o):
        def inner(refs):
            a, b = refs
            a[...] = a[...] + b[...]

            def step(i, carry):
                b[...] = b[...] * 2.0 + a[...]
                return carry

            jax.lax.fori_loop(0, 3, step, 0)

        a, b = run_state(inner)((x[...], x[...] * 2.0))
        o[...] = a + b

    x = values((128,), "float32")
    n = np.asarray(x)
    a, b = n * 3, n * 2
    for _ in range(3):
        b = b * 2 + a
    np.testing.assert_array_equal(jax.jit(body)(x), a + b)


# Inlined code -------------------------------------------------------------------------------------


def test_inlined_code():
    layout = Layout.WG_STRIDED((256,), vec_size=2)

    @inline_mgpu(
        arg_types=(RefType(), layout),
        return_type=ShapeDtypeStruct((256,), jnp.float32, layout),
        values="pallasite",
    )
    def product(launch, ref, x):
        return elementwise(ops.arith.mulf, [x, load_array(launch, ref, x.layout)], np.float32)

    @functools.partial(kernel, out_type=out((256,)))
    def body(x, y, o):
        o[...] = product(x, y[...])

    x, y = values((256,), "float32", 1), values((256,), "float32", 2)
    np.testing.assert_array_equal(jax.jit(body)(x, y), np.asarray(x) * np.asarray(y))


# Clusters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "transforms", "layout"),
    [
        ((128,), "int32", (), None),
        ((64,), "float32", (), None),
        ((64, 64), "float32", (), None),
        ((64, 64), "float32", SWIZZLED, Layout.WGMMA),
        ((256,), "bfloat16", (), None),
    ],
)
def test_store_to_another_block(shape, dtype, transforms, layout):
    @functools.partial(
        kernel,
        out_type=out((2, *shape), dtype),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[SMEM(shape, dtype, transforms=transforms), Barrier()],
    )
    def body(x, o, s, b):
        c = jax.lax.axis_index("c")
        value = x[c] if layout is None else layout_cast(x[c], layout)
        async_store_smem(value, s, b, cluster_idx=1 - c, cluster_dim="c")
        barrier_wait(b)
        o[c] = s[...]

    x = values((2, *shape), dtype)
    np.testing.assert_array_equal(jax.jit(body)(x), np.asarray(x)[::-1])


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add", "int32"), ("max", "uint32"), ("xor", "int32"), ("add", "int64")],
)
def test_combine_in_another_block(operation, dtype):
    @functools.partial(
        kernel,
        out_type=out((2, 256), dtype),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[
            SMEM((256,), dtype),
            Barrier(num_arrivals=1),
            ClusterBarrier(collective_axes=("c",)),
        ],
    )
    def body(x, y, o, s, b, both):
        c = jax.lax.axis_index("c")
        async_store_smem(x[c], s, b, cluster_idx=1 - c, cluster_dim="c")
        barrier_wait(b)
        # Only the other block knows that this one's store has arrived there.
        barrier_arrive(both)
        barrier_wait(both)
        async_store_smem(y[c], s, b, cluster_idx=1 - c, cluster_dim="c", atomic=operation)
        barrier_wait(b)
        o[c] = s[...]

    x, y = values((2, 256), dtype, 1), values((2, 256), dtype, 2)
    expected = COMBINE[operation](np.asarray(x), np.asarray(y))[::-1]
    np.testing.assert_array_equal(jax.jit(body)(x, y), expected)


# Printing -----------------------------------------------------------------------------------------


def printed(capfd, function, *args):
    """What the device prints when a function runs."""
    capfd.readouterr()
    jax.tree.map(np.asarray, jax.jit(function)(*args))
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def test_print_scalars(capfd):
    @functools.partial(kernel, out_type=out((4,)), num_threads=2, thread_name="t")
    def body(x, n, o):
        t = jax.lax.axis_index("t")
        pl.debug_print("t={} x={} n={} p={} 100%", t, x[1], n[0], x[0] > 0)
        o[...] = x[...]

    x = jnp.array([1.0, 0.1, 2.0, 3.0], jnp.float32)
    text = printed(capfd, body, x, jnp.array([-(2**40)], jnp.int64))
    expected = [f"t={t} x=0.100000001 n={-(2**40)} p=True 100%" for t in range(2)]
    assert sorted(text.split("\n")[:-1]) == expected


@pytest.mark.parametrize("dtype", ["int8", "uint32", "float16", "bfloat16", "bool"])
@pytest.mark.parametrize("shape", [(4, 64), (7,), (96,)])
@pytest.mark.sampled(alone=("shape",))
def test_print_arrays(capfd, dtype, shape):
    @functools.partial(kernel, out_type=out(shape, dtype))
    def body(x, o):
        pl.debug_print("<{}>", x[...])
        o[...] = x[...]

    x = values(shape, "uint32").astype(dtype)
    text = printed(capfd, body, x)
    expected = sorted(
        f"<[{', '.join(map(str, index))}]: {x[index] if dtype == 'bool' else int(x[index])}>"
        for index in np.ndindex(shape)
    )
    assert sorted(text.split("\n")[:-1]) == expected


def test_print_per_warp(capfd):
    @functools.partial(kernel, out_type=out((4,)))
    def body(x, o):
        def per_warp(warp):
            pl.debug_print("warp {}", warp)

        warp_map(per_warp)
        o[...] = x[...]

    text = printed(capfd, body, values((4,), "float32"))
    assert sorted(text.split()) == sorted(["warp", "0", "warp", "1", "warp", "2", "warp", "3"])


def test_check_that_holds():
    @functools.partial(kernel, out_type=out((4,)))
    def body(x, o):
        checkify.debug_check(x[0] > 0, "not positive: {}", x[0])
        pl.delay(1000)
        o[...] = x[...]

    with pl.enable_debug_checks(True):
        np.testing.assert_array_equal(jax.jit(body)(jnp.ones(4, jnp.float32)), np.ones(4))


FAILING_CHECK = """
import jax, jax.numpy as jnp
from jax.experimental import checkify, pallas as pl
from pallasite.language.kernel import kernel

def body(x, o):
    checkify.debug_check(x[0] > 0, "not positive: {}", x[0])
    o[...] = x[...]

with pl.enable_debug_checks(True):
    f = jax.jit(kernel(body, out_type=jax.ShapeDtypeStruct((4,), jnp.float32)))
    jax.block_until_ready(f(jnp.full((4,), -2.5, jnp.float32)))
"""


def test_check_that_fails(tmp_path):
    # A failed check ends the process's use of the device, so it has a process of its own.
    script = tmp_path / "failing.py"
    script.write_text(FAILING_CHECK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = python_processes.run([script], env=environment, timeout=120)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert f"{script}:7: check failed: not positive: -2.5" in text
