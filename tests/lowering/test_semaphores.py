"""Semaphores: where they live, and how they are signalled and awaited."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from kernels import array, compile_kernel, compile_to_ptx, in_order, make, spec_of
from pallasite import config, plugins
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.language.memory import SMEM, SemaphoreType
from pallasite.launch import BufferKind
from pallasite.lowering.entry import estimate_kernel
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives import semaphores
from pallasite_std.rules.semaphores import BLOCK_SEMAPHORES

REGULAR = SemaphoreType.REGULAR


def scratch_sizes(compiled):
    return [buffer.shape for buffer in compiled.launch.scratch]


def test_signal_and_wait_in_a_scope():
    @make((4, 128), grid=(4,), grid_names=("i",))
    def kernel(x, o):
        def body(sem):
            pl.semaphore_signal(sem, 2)
            pl.semaphore_wait(sem, 2)
            o[jax.lax.axis_index("i")] = x[...]

        pl.run_scoped(body, REGULAR)

    compiled = compile_kernel(kernel, array(128))
    assert scratch_sizes(compiled) == [(4,)]
    in_order(
        compiled.ptx,
        r"bar\.sync",
        r"red\.release\.gpu\.global\.add\.s32 \[%rd\d+\], %r",
        r"ld\.relaxed\.gpu\.global\.s32 seen",
        r"atom\.acquire\.gpu\.global\.cas\.b32 found",
        r"bar\.sync",
    )


@pytest.mark.parametrize("memory_scope", ["sys", "gpu"])
@pytest.mark.parametrize("in_warp", [False, True])
def test_functions_of_the_language(memory_scope, in_warp):
    @make((128,))
    def kernel(x, o):
        semaphore = pl.get_global(REGULAR)

        def body(_=None):
            semaphores.semaphore_signal(semaphore, 2, memory_scope=memory_scope)
            semaphores.semaphore_wait(semaphore, decrement=False, memory_scope=memory_scope)
            semaphores.semaphore_wait(semaphore, 2, memory_scope=memory_scope)

        if in_warp:
            warp_map(body)
        else:
            body()
        o[...] = x[...]

    in_order(
        compile_kernel(kernel, array(128)).ptx,
        r"red\.release\.gpu\.global\.add\.s32",
        r"ld\.acquire\.gpu\.global\.s32 seen",
        r"atom\.acquire\.gpu\.global\.cas\.b32 found",
    )


def test_signal_to_another_device_names_the_plugin():
    @make((128,))
    def kernel(x, o):
        semaphores.semaphore_signal(pl.get_global(REGULAR), device_id=(1,))
        o[...] = x[...]

    with (
        config.scoped(disabled_plugins="multigpu"),
        pytest.raises(UnsupportedError, match=r"another device.*\n.*\n.*plugin 'multigpu'"),
    ):
        compile_to_ptx(kernel, array(128))


def test_scratch_is_zeroed_and_paired_with_a_hidden_result():
    @make((128,))
    def kernel(x, o):
        pl.semaphore_signal(pl.get_global(REGULAR))
        o[...] = x[...]

    launch = compile_kernel(kernel, array(128)).launch
    scratch = [p for p in launch.parameters if p.buffer.kind is BufferKind.SCRATCH]
    assert [p.slot for p in scratch] == [0, 1]
    assert all(p.buffer.zeroed for p in scratch)
    # The operand comes before the outputs, the hidden result after them.
    kinds = [p.buffer.kind for p in launch.parameters]
    assert kinds.index(BufferKind.SCRATCH) < kinds.index(BufferKind.OUTPUT)
    assert kinds[-1] is BufferKind.SCRATCH


def test_blocks_have_their_own():
    @make((2, 3), jnp.int32, grid=(2, 3), grid_names=("i", "j"))
    def kernel(o):
        def body(sems):
            pl.semaphore_signal(sems.at[1, 2])
            pl.semaphore_wait(sems.at[1, 2])

        pl.run_scoped(body, REGULAR((2, 4)))
        o[jax.lax.axis_index("i"), jax.lax.axis_index("j")] = jnp.int32(1)

    compiled = compile_kernel(kernel)
    assert scratch_sizes(compiled) == [(2 * 3 * 8,)]
    in_order(compiled.ptx, r"ctaid\.[xy]", r"ctaid\.[xy]", r"mad\.lo|mul\.lo|mad\.wide|mul\.wide")


def test_scopes_in_turn_share_and_nested_scopes_add_up():
    @make((128,))
    def kernel(x, o):
        def one(a):
            pl.semaphore_signal(a.at[0])
            pl.semaphore_wait(a.at[0])

        pl.run_scoped(one, REGULAR((3,)))
        pl.run_scoped(lambda a: pl.run_scoped(one, REGULAR((2,))), REGULAR((3,)))
        o[...] = x[...]

    assert scratch_sizes(compile_kernel(kernel, array(128))) == [(5,)]
    target = plugins.registry().targets["sm_90"]
    estimate = estimate_kernel(spec_of(kernel, array(128)), target)
    assert estimate.amount(BLOCK_SEMAPHORES) == 5


def test_global_ones_are_made_once_in_unrolled_loops():
    @make((128,))
    def kernel(x, o):
        def step(i, carry):
            pl.semaphore_signal(pl.get_global(REGULAR))
            return carry

        jax.lax.fori_loop(0, 3, step, 0, unroll=True)
        other = pl.get_global(REGULAR((2,)))
        pl.semaphore_signal(other.at[1])
        o[...] = x[...]

    compiled = compile_kernel(kernel, array(128))
    assert scratch_sizes(compiled) == [(3,)]
    assert compiled.ptx.count("red.release.gpu") == 4
    # All three steps signal the first semaphore, the last signal is two further.
    in_order(compiled.ptx, r"add\.s64\s+%rd\d+, %rd\d+, 8;", r"red\.release")


def test_global_ones_in_code_that_is_lowered_on_trial():
    @make((128,))
    def kernel(x, o):
        def step(i, acc):
            pl.semaphore_signal(pl.get_global(REGULAR))
            return acc + x[...]

        # The splat carry makes the loop's body be lowered twice.
        o[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros((128,), jnp.float32))

    assert scratch_sizes(compile_kernel(kernel, array(128))) == [(1,)]


def test_wait_without_decrement():
    @make((128,))
    def kernel(x, n, o):
        sem = pl.get_global(REGULAR)
        pl.semaphore_wait(sem, n[0], decrement=False)
        o[...] = x[...]

    ptx = compile_to_ptx(kernel, array(128), array(1, dtype=jnp.int32))
    in_order(ptx, r"ld\.acquire\.gpu\.global\.s32 seen", r"setp\.lt\.s32 below, seen, %r")
    assert "atom." not in ptx


def test_dynamic_increment():
    @make((128,))
    def kernel(x, n, o):
        pl.semaphore_signal(pl.get_global(REGULAR), n[0])
        o[...] = x[...]

    ptx = compile_to_ptx(kernel, array(128), array(1, dtype=jnp.int32))
    in_order(ptx, r"ld\.global\.nc\.b32\s+%r\d+", r"red\.release\.gpu\.global\.add\.s32")


def test_all_lanes_read_one_value():
    @make((1,), jnp.int32)
    def kernel(o):
        o[0] = pl.semaphore_read(pl.get_global(REGULAR))

    ptx = compile_to_ptx(kernel)
    in_order(
        ptx,
        r"ld\.acquire\.gpu",
        r"bar\.sync",
        r"st\.shared",
        r"bar\.sync",
        r"ld\.shared",
        "st.global",
    )


def test_in_warps():
    @make((4,), jnp.int32, scratch_types=[SMEM((4,), jnp.int32)])
    def kernel(o, s):
        sems = pl.get_global(REGULAR((4,)))

        def body(warp):
            pl.semaphore_signal(sems.at[warp])
            pl.semaphore_wait(sems.at[warp])
            o[warp] = pl.semaphore_read(sems.at[warp])

        warp_map(body)

    ptx = compile_to_ptx(kernel)
    in_order(
        ptx,
        r"bar\.warp\.sync",
        "red.release",
        "atom.acquire",
        r"bar\.warp\.sync",
        r"shfl\.sync\.idx",
    )


def test_threads_must_share():
    @make((128,), num_threads=2, thread_name="t")
    def kernel(x, o):
        pl.run_scoped(lambda sem: pl.semaphore_signal(sem), REGULAR)
        o[...] = x[...]

    with pytest.raises(InvalidValueError, match=r"collective_axes='t'"):
        compile_to_ptx(kernel, array(128))


def test_other_devices_need_a_plugin():
    @make((128,))
    def kernel(x, o):
        pl.semaphore_signal(
            pl.get_global(REGULAR), device_id=jnp.int32(1), device_id_type=pl.DeviceIdType.LOGICAL
        )
        o[...] = x[...]

    with (
        config.scoped(disabled_plugins="multigpu"),
        pytest.raises(UnsupportedError, match="plugin 'multigpu'") as error,
    ):
        compile_to_ptx(kernel, array(128))
    assert "test_semaphores.py" in str(error.value)


def test_only_semaphores_are_global():
    @make((128,))
    def kernel(x, o):
        ref = pl.get_global(SMEM((128,), jnp.float32))
        o[...] = ref[...] + x[...]

    with pytest.raises(UnsupportedError, match="get_global of something other than semaphores"):
        compile_to_ptx(kernel, array(128))
