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
