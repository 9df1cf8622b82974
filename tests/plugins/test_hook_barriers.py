"""Kinds of barriers, orders and primitives that use barriers, from a plugin of another author."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from refusals import build, make, refused

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, PluginError, UnsupportedError
from pallasite.plugin import (
    BarrierKind,
    BarrierOrder,
    BarrierPhase,
    BarrierRole,
    BarrierUse,
    RuleSet,
    Semantics,
    TargetPredicate,
    hookimpl,
    jax_internals,
    plugins,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.language import memory_effect
from pallasite.plugin.lowering import resolve_barrier
from pallasite_std.api import BarrierAllocation, BarrierDType, arguments

# A kind on which one elected lane of each warp arrives --------------------------------------------


@dataclasses.dataclass(frozen=True)
class WarpBarrierType(BarrierDType):
    name: ClassVar[str] = "warp_barrier"
    title: ClassVar[str] = "WarpBarrier"

    num_arrivals: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpBarrier(BarrierAllocation):
    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()

    def element_type(self):
        return WarpBarrierType(self.num_arrivals)


def arrive_by_warps(ctx, barrier, condition, by):
    ctx.launch.warp_barrier()
    lane = ctx.launch.elected_lane
    with ops.when(lane if condition is None else ops.arith.andi(lane, condition)):
        ops.inline_assembly(
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0], 1;",
            "r,~{memory}",
            barrier.address(),
        )


def marks(text):
    """What emits a fence that nothing else emits, so that it can be found."""
    return lambda ctx, barrier: ops.inline_assembly(text, "~{memory}")


WARP_BARRIERS = BarrierKind(
    dtype=WarpBarrierType,
    phase=lambda dtype, geometry: BarrierPhase(4 * dtype.num_arrivals),
    arrive=arrive_by_warps,
    before_arrive=marks("fence.acq_rel.gpu;"),
    after_wait=marks("fence.sc.gpu;"),
    most_arrivals=64,
    most_barriers=8,
)

# A primitive that arrives several times -----------------------------------------------------------

signal_p = jax_internals.Primitive("signal")
signal_p.multiple_results = True


@jax_internals.abstract_eval(signal_p)
def _signal_abstract_eval(*avals, args_tree, times):
    return (), {memory_effect}


arguments.no_discharge(signal_p)


def signal(barrier, times):
    arguments.bind(signal_p, arguments.barrier(barrier), times=times)


rules = RuleSet()


@rules.lowering(signal_p, Semantics.LANE)
def _signal(ctx, *operands, args_tree, times):
    (reference,) = args_tree.unflatten(operands)
    barrier = resolve_barrier(ctx, reference)
    ctx.synchronize()
    with ops.when(ctx.leader):
        ops.inline_assembly(
            f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0], {128 * times};",
            "r,~{memory}",
            barrier.address(),
        )
    return ()


SIGNAL = BarrierUse(
    primitive=signal_p,
    role=BarrierRole.ARRIVE,
    arrivals=lambda dtype, params: params["times"],
)


class Plugin:
    """Hooks that return what a test gives them."""

    def __init__(self, kinds=(), orders=(), uses=(), lowering=()):
        self.kinds, self.orders, self.uses, self.lowering = kinds, orders, uses, lowering

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.lowering

    @hookimpl
    def pallasite_barrier_kinds(self):
        return self.kinds

    @hookimpl
    def pallasite_barrier_orders(self):
        return self.orders

    @hookimpl
    def pallasite_barrier_uses(self):
        return self.uses


def complete(orders=(), uses=(SIGNAL,)):
    """The plugin with its kind of barriers and its primitive."""
    return Plugin((WARP_BARRIERS,), orders, uses, rules.lowering_rules)


@pytest.fixture
def register():
    made = []

    def add(plugin, name="other-barriers"):
        made.append(plugins.register(plugin, name=name))

    yield add
    for name in made:
        plugins.unregister(name)


SHAPE = (2, 128)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
OUT = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


def exchanged(barrier, semantics=SEMANTICS[0], arrive=plgpu.barrier_arrive):
    """Two threads, each of which gives its row to the other, in three rounds."""

    @plgpu.kernel(
        out_type=OUT,
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), barrier],
        num_threads=2,
        thread_name="t",
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    def kernel(x_ref, o_ref, rows, full):
        thread = lax.axis_index("t")

        for i in range(3):
            rows[thread] = x_ref[thread] + i
            arrive(full.at[0])
            plgpu.barrier_wait(full.at[0])
            o_ref[thread] = rows[1 - thread]
            arrive(full.at[1])
            plgpu.barrier_wait(full.at[1])

    return kernel


def ptx_of(kernel, target="sm_90a"):
    return pallasite.compile(kernel, OUT, target=target).ptx


# A kind -------------------------------------------------------------------------------------------


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_kind_with_arrivals_of_its_own(register, semantics):
    register(complete())
    kernel = exchanged(WarpBarrier(num_arrivals=2, num_barriers=2), semantics)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X[::-1] + 2)
    ptx = ptx_of(kernel)
    assert re.findall(r"mbarrier\.init\S* \[.*\], (\d+)", ptx) == ["8", "8"]
    emitted = re.findall(r"fence\.acq_rel\.gpu|mbarrier\.(?:arrive|try_wait)|fence\.sc\.gpu", ptx)
    once = ["fence.acq_rel.gpu", "mbarrier.arrive", "mbarrier.try_wait", "fence.sc.gpu"]
    assert emitted == once * 6


@pytest.mark.runs_kernels
def test_copies_arrive_on_it_as_often_as_the_kind_counts(register):
    register(complete())

    @plgpu.kernel(out_type=OUT, scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), WarpBarrier()])
    def kernel(x_ref, o_ref, tile, full):
        plgpu.copy_gmem_to_smem(x_ref, tile, full)
        plgpu.barrier_wait(full)
        o_ref[...] = tile[...] * 2

    np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)
    assert re.findall(r"mbarrier\.arrive\S* _, \[.*\], (\d+);", ptx_of(kernel)) == ["4"]


@pytest.fixture
def registered(register):
    register(complete())


def with_barriers(*barriers, threads=2):
    return make(scratch_types=list(barriers), num_threads=threads, thread_name="t")


@pytest.mark.usefixtures("registered")
@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the first phase of the barrier completes with arrival 3, but only \
    2 can come before
      got: plgpu.WarpBarrier(num_arrivals=3)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_a_wait_that_never_ends():
    @with_barriers(WarpBarrier(num_arrivals=3))
    def kernel(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)  # here

    build(kernel)


@pytest.mark.usefixtures("registered")
@refused(
    InvalidValueError,
    r"""
    HERE: a barrier cannot count 17 arrivals
      expected: num_arrivals of at most 16
    """,
)
def test_more_arrivals_than_the_kind_counts():
    @with_barriers(threads=1)
    def kernel(x_ref, o_ref):
        def scope(barrier):
            pass

        pl.run_scoped(scope, WarpBarrier(num_arrivals=17))  # here

    build(kernel)


@refused(
    UnsupportedError,
    r"""
    HERE: barriers of the kind WarpBarrier, which no plugin loaded contributes
      expected: one of Barrier, ClusterBarrier
      try: return a BarrierKind for it from the hook pallasite_barrier_kinds
    """,
)
def test_a_kind_that_no_plugin_contributes():
    @with_barriers(threads=1)
    def kernel(x_ref, o_ref):
        pl.run_scoped(lambda barrier: None, WarpBarrier())  # here

    build(kernel)


# Orders -------------------------------------------------------------------------------------------


def order(name="tensor_core", targets=(), overrides=(), text="fence.acq_rel.sys;"):
    return BarrierOrder(
        name=name,
        before_arrive=marks(text),
        after_wait=marks("fence.sc.sys;"),
        target=TargetPredicate(names=frozenset(targets)),
        overrides=overrides,
    )


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_barriers_order_what_a_plugin_says(register, semantics):
    general, special = order(text="fence.acq_rel.cta;"), order(targets=["sm_90a"])
    register(complete(orders=(general, special)))
    barriers = plgpu.Barrier(num_arrivals=2, num_barriers=2, orders_tensor_core=True)
    kernel = exchanged(barriers, semantics)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X[::-1] + 2)
    # Every lane comes to the order before the lanes converge, and one arrives.
    kinds = r"fence\.acq_rel\.\w+|bar\.sync|mbarrier\.(?:init|arrive)\S* .*, \d+|mbarrier.arrive"
    emitted = [text.split(" ")[0].split(".")[:3] for text in re.findall(kinds, ptx_of(kernel))]
    first = emitted.index(["fence", "acq_rel", "sys"])
    assert emitted[first + 1] == ["bar", "sync"]
    assert emitted[first + 2][:2] == ["mbarrier", "arrive"]
    assert re.findall(r"mbarrier\.init\S* \[.*\], (\d+)", ptx_of(kernel)) == ["2", "2"]
    assert ptx_of(kernel).count("fence.sc.sys") == emitted.count(["fence", "acq_rel", "sys"])
    assert "fence.acq_rel.cta" in ptx_of(kernel, "sm_90")


@pytest.mark.runs_kernels
def test_barriers_of_a_cluster_order_it_too(register):
    register(complete(orders=(order(),)))

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((256,), jnp.float32),
        scratch_types=[plgpu.ClusterBarrier(collective_axes=("c",), orders_tensor_core=True)],
        cluster=(2,),
        cluster_names=("c",),
    )
    def kernel(x_ref, o_ref, ready):
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        part = pl.ds(lax.axis_index("c") * 128, 128)
        o_ref[part] = x_ref[part] + 1

    x = X.reshape(256)
    np.testing.assert_array_equal(np.asarray(kernel(x)), x + 1)
    ptx = pallasite.compile(kernel, jax.ShapeDtypeStruct((256,), jnp.float32), target="sm_90a").ptx
    assert ptx.index("fence.acq_rel.sys") < ptx.index("mapa") < ptx.index("fence.sc.sys")


def test_an_order_that_no_plugin_has_on_the_target(register):
    register(complete(orders=(order(targets=["sm_100"]),)))
    kernel = exchanged(plgpu.Barrier(num_arrivals=2, num_barriers=2, orders_tensor_core=True))
    with pytest.raises(UnsupportedError) as caught:
        ptx_of(kernel)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:")
    assert (
        "a barrier that orders the work of the tensor core, for which no plugin loaded has an order"
        " on target 'sm_90a'" in message
    )
    assert "a plugin that contributes the barrier order 'tensor_core' for the target" in message


# Primitives that arrive ---------------------------------------------------------------------------


@pytest.mark.runs_kernels
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_primitive_that_arrives(register, semantics):
    register(complete())
    barriers = plgpu.Barrier(num_arrivals=4, num_barriers=2)
    kernel = exchanged(barriers, semantics, arrive=lambda barrier: signal(barrier, 2))
    np.testing.assert_array_equal(np.asarray(kernel(X)), X[::-1] + 2)


@pytest.mark.usefixtures("registered")
@refused(
    InvalidValueError,
    r"""
    HERE: this wait never ends: the second phase of the barrier completes with arrival 8, but only \
    6 can come before
      got: plgpu.Barrier(num_arrivals=4)
      expected: num_arrivals copies or arrivals for each wait, before it
    """,
)
def test_its_arrivals_are_counted():
    @with_barriers(plgpu.Barrier(num_arrivals=4))
    def kernel(x_ref, o_ref, barrier):
        signal(barrier, 2)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)  # here

    build(kernel)


def test_its_arrivals_that_only_tell_others_are_known(register):
    """Where layouts are inferred, a rule learns whether other threads alone wait for an arrival."""
    seen = []

    def lower(ctx, *operands, **params):
        seen.append(ctx.is_release)
        return _signal(ctx, *operands, **params)

    noting = RuleSet()
    noting.lowering(signal_p, Semantics.LANE)(lower)
    register(Plugin(uses=(SIGNAL,), lowering=noting.lowering_rules))

    @plgpu.kernel(
        out_type=OUT,
        scratch_types=[plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="t",
    )
    def kernel(x_ref, o_ref, told, turns):
        def tell():
            signal(told, 1)
            signal(turns, 1)
            plgpu.barrier_wait(turns)

        def listen():
            plgpu.barrier_wait(told)
            signal(turns, 1)
            plgpu.barrier_wait(turns)

        lax.cond(lax.axis_index("t") == 0, tell, listen)

    ptx_of(kernel)
    # Of the branches, whichever comes first: what only tells the other, and the turns of both.
    assert sorted(seen) == [False, False, True]


def test_without_a_record_nothing_is_known_of_the_barrier(register):
    register(complete(uses=()))

    @with_barriers(plgpu.Barrier(num_arrivals=4))
    def kernel(x_ref, o_ref, barrier):
        signal(barrier, 1)
        plgpu.barrier_wait(barrier)

    build(kernel)


# Contradictions, listings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Plugin(kinds=(WARP_BARRIERS,)), "both register barrier kinds named 'WarpBarrier'"),
        (Plugin(uses=(SIGNAL,)), "both register barrier uses of primitive 'signal, argument 0'"),
        (
            Plugin(orders=(order(),)),
            "both register equally specific barrier orders 'tensor_core' for target",
        ),
    ],
)
def test_two_plugins_contradict_each_other(register, plugin, message):
    register(complete(orders=(order(),)))
    register(plugin, "another")
    with pytest.raises(PluginError) as caught:
        plugins.registry()
    assert f"plugins 'other-barriers' and 'another' {message}" in str(caught.value)


def test_one_may_override_the_other(register):
    register(complete(orders=(order(),)))
    mine = order(overrides=("other-barriers",))
    register(Plugin(orders=(mine,)), "another")
    registry = plugins.registry()
    chosen = registry.barriers.order("tensor_core", registry.targets["sm_90a"])
    assert chosen == dataclasses.replace(mine, plugin="another")


def test_they_are_listed(register, capsys):
    from pallasite.cli import main

    register(complete(orders=(order(),)))
    assert main(["plugins"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "other-barriers" in line]
    assert "1 barrier kinds, 1 barrier orders, 1 barrier uses" in row
