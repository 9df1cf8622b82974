"""What communicating kernels begin and end with; kernels that do not communicate have nothing."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest
from acting import Acting, act_p, kernel_of
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import pallasite
from pallasite import gpu as plgpu
from pallasite import plugins
from pallasite.plugin import InvalidTypeError, UnsupportedError
from pallasite_multigpu.protocol import layout


@pytest.fixture(autouse=True)
def plugin():
    plugins.register(Acting(), name="acting")
    yield
    plugins.unregister("acting")


def compiled(*what, devices=2, params=None, **options):
    kernel = kernel_of(*what, **(params or {}))
    if devices is None:
        return pallasite.compile(kernel, jax.ShapeDtypeStruct((128,), jnp.float32), target="sm_90a")
    mesh = jax.sharding.AbstractMesh((devices,), ("x",))
    spec = PartitionSpec("x")
    called = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((128 * devices,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    return pallasite.compile(called, x, target="sm_90a", **options)


def test_a_pull_begins_and_ends_with_a_barrier():
    kernel = compiled("pull", assemble=True)
    (operand,) = kernel.launch.hidden_operands
    assert (operand.name, operand.input) == ("multigpu.table", 1)
    assert kernel.launch.inputs[1].shape == (layout.table_words(2),)
    text = kernel.ptx
    order = [
        "exit;",
        "atom.relaxed.gpu.global.add.u64",
        "st.release.sys.global.b64",
        "ld.acquire.sys.global.b64",
        "barrier.cta.red.or.pred",
        "ld.global.b32",
        "atom.acq_rel.sys.global.add.u32",
        "st.release.sys.global.b32",
    ]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)


def test_the_barrier_at_the_end_is_as_wanted():
    end = "atom.acq_rel.sys.global.add.u32"
    options = {"exit_barrier": False}
    assert end not in compiled("pull", params=options).ptx
    options = {"exit_barrier": True}
    assert end in compiled("trap", params=options).ptx
    assert end not in compiled("trap").ptx


def test_who_only_asks_who_he_is_meets_nobody():
    kernel = compiled("rank", assemble=True)
    assert len(kernel.launch.hidden_operands) == 1
    assert "ld.global.nc.b32" in kernel.ptx and ".sys" not in kernel.ptx


def test_kernels_that_do_not_communicate_are_as_they_were():
    def ptx():
        return re.sub(r"\.file.*|\.loc.*", "", compiled().ptx)

    kept = ptx()
    with pallasite.config.scoped(disabled_plugins="multigpu"):
        assert ptx() == kept
    assert not compiled().launch.hidden_operands


def test_the_mesh_is_needed():
    with pytest.raises(UnsupportedError, match=r"outside of jax\.shard_map") as error:
        compiled("pull", devices=None)
    assert "acting.py" in str(error.value)
    with pytest.raises(UnsupportedError, match=r"33 devices\n  expected: at most 32"):
        compiled("pull", devices=33)


def test_the_barrier_is_wanted_or_not():
    for given, options in ((True, True), (None, None)):
        assert plgpu.CompilerParams(exit_barrier=given).exit_barrier is options
    with pytest.raises(InvalidTypeError, match="exit_barrier is neither true nor false\n  got: 1"):
        _ = compiled("pull", params={"exit_barrier": 1})


@pytest.mark.parametrize("count", [1, 7, 1024, 1025])
def test_the_first_block_clears_semaphores_before_it_publishes(count):
    def body(x, o, semaphores):
        act_p.bind(what="meet")
        pl.semaphore_signal(semaphores.at[0])
        pl.semaphore_wait(semaphores.at[0])
        o[...] = x[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SemaphoreType.REGULAR((count,))],
    )
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    called = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    made = pallasite.compile(called, x, target="sm_90a")
    (table,) = made.launch.hidden_operands
    clears = json.loads(table.arguments)["clears"]
    assert clears == (count <= 1024)
    found = re.findall(r"setp\.lt\.u32 p, low, (\d+);|(fence\.acq_rel\.sys;)", made.ptx)
    assert found[0] == ((str(count), "") if clears else ("", found[0][1]))


def exchanging(blocks=1, threads=1, warps=False, room=0):
    """A kernel whose blocks store on the other device, signal it, and wait; as PTX."""

    def body(x, o, semaphore, *buffer):
        other = 1 - jax.lax.axis_index("x")
        plgpu.remote_ref(o, other)[...] = x[...]
        pl.semaphore_signal(semaphore, device_id=other)
        if not warps:
            pl.semaphore_wait(semaphore)
            return

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            pl.semaphore_wait(semaphore)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="thread",
        scratch_types=[
            plgpu.SemaphoreType.REGULAR,
            *([plgpu.SMEM((room,), jnp.int8)] if room else []),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    called = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return pallasite.compile(called, x, target="sm_90a")


MOST = 227 << 10
"""Bytes of shared memory of a block on sm_90a."""


@pytest.mark.parametrize(("room", "kept"), [(0, True), (8 << 10, True), (MOST, False)])
def test_addresses_of_peers_are_kept_in_shared_memory(room, kept):
    """Of two devices, the addresses of a result and a semaphore each; if there is room."""
    made = exchanging(room=room)
    assert made.launch.shared_memory_bytes == room + (2 * 2 * 8 if kept else 0)
    words = re.findall(r"ld\.relaxed\.sys\.global\.v2\.b64 {(\w+), back", made.ptx)
    assert words == ["front0", "front1", "front2"] + ([] if kept else ["front", "front"])
    assert ("st.shared.v2.b32" in made.ptx) == kept


@pytest.mark.parametrize(
    ("options", "alone"),
    [({}, True), ({"blocks": 2}, False), ({"threads": 2}, False), ({"warps": True}, False)],
    ids=["one", "blocks", "threads", "warps"],
)
def test_a_lone_waiter_subtracts_without_an_answer(options, alone):
    text = exchanging(**options).ptx
    assert ("red.relaxed.sys.global.add.s32" in text) == alone
    assert ("atom.acquire.sys.global.cas.b32" in text) != alone


@pytest.mark.parametrize("blocks", [1, 2])
def test_zeros_and_the_fence_wait_for_the_ticket_of_several_blocks(blocks):
    text = exchanging(blocks=blocks).ptx
    ticket = "shfl.sync.idx.b32 ticket"
    order = ["st.global.b32", "fence.acq_rel.sys;"]
    order = [ticket, *order] if blocks > 1 else [*order, ticket]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)
