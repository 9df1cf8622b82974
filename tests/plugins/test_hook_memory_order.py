"""Events of memory order, proxies and fences, from a plugin of another author."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slots_plugin
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import ExecutionError, InvalidValueError, PluginError
from pallasite.plugin import (
    EventKind,
    MemoryEvent,
    MemoryEvents,
    Proxy,
    ProxyFence,
    RuleSet,
    Semantics,
    TargetPredicate,
    hookimpl,
    jax_internals,
    plugins,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.language import GMEM, SMEM, memory_effect
from pallasite.plugin.lowering import resolve
from pallasite_std.api import arguments

ASYNC, UNIT = Proxy("async"), Proxy("unit")


def primitive(name):
    made = jax_internals.Primitive(name)
    made.multiple_results = True

    @jax_internals.abstract_eval(made)
    def _abstract_eval(*avals, **params):
        return (), {memory_effect}

    arguments.no_discharge(made)
    return made


# An asynchronous copy of its own, and a unit with a proxy of its own ------------------------------

send_p, unit_p, unit_fence_p = primitive("send"), primitive("unit"), primitive("unit_fence")


def send(source, target):
    """Copies from shared to global memory, and waits."""
    source = arguments.reference(source, "source", SMEM)
    arguments.bind(send_p, source, arguments.reference(target, "target", GMEM))


def unit(source):
    """Lets the unit read shared memory."""
    arguments.bind(unit_p, arguments.reference(source, "source", SMEM))


rules = RuleSet()


@rules.lowering(send_p, Semantics.LANE)
def _send(ctx, *operands, args_tree):
    source, target = (resolve(ctx, one) for one in args_tree.unflatten(operands))
    with ops.when(ctx.leader):
        ops.inline_assembly(
            "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;\n\t"
            "cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;",
            "l,r,r,~{memory}",
            target.address(),
            ops.shared_address(source.address()),
            ops.i32_constant(source.layout.size * source.element_bits // 8),
        )
    ctx.synchronize()
    return ()


@rules.lowering(unit_p, Semantics.LANE)
def _unit(ctx, *operands, args_tree):
    (source,) = args_tree.unflatten(operands)
    ops.inline_assembly(
        "{ .reg .b32 unit; ld.volatile.shared.b32 unit, [$0]; }",
        "r,~{memory}",
        ops.shared_address(resolve(ctx, source).address()),
    )
    return ()


def emit_unit_fence(ctx):
    ops.inline_assembly("fence.sc.gpu;", "~{memory}")


@rules.lowering(unit_fence_p, Semantics.LANE)
def _unit_fence(ctx):
    emit_unit_fence(ctx)
    ctx.synchronize()
    return ()


def reads_by(proxy):
    """The events of a primitive that reads its first argument by a proxy."""

    def events(context, *operands, args_tree):
        source, *_ = args_tree.unflatten(operands)
        return [MemoryEvent(EventKind.LOAD, source, proxy=proxy)]

    return events


def events_of(made, proxy, **options):
    return MemoryEvents(primitive=made, function=reads_by(proxy), **options)


def fence(emit=None, **options):
    return ProxyFence(proxy=UNIT, primitive=unit_fence_p, emit=emit, **options)


class Plugin:
    """Hooks that return what a test gives them."""

    def __init__(self, events=(), fences=(), lowering=()):
        self.events, self.fences, self.lowering = events, fences, lowering

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.lowering

    @hookimpl
    def pallasite_memory_events(self):
        return self.events

    @hookimpl
    def pallasite_proxy_fences(self):
        return self.fences


UNIT_FENCE = fence()


def complete(fences=(UNIT_FENCE,)):
    events = (events_of(send_p, ASYNC), events_of(unit_p, UNIT))
    return Plugin(events, fences, rules.lowering_rules)


@pytest.fixture
def register():
    made = []

    def add(plugin, name="other-memory"):
        made.append(plugins.register(plugin, name=name))

    yield add
    for name in made:
        plugins.unregister(name)


SHAPE = (64, 128)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
ONE = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
TILE = plgpu.SMEM(SHAPE, jnp.float32)


def make(body, *scratch, threads=None, **options):
    names = {} if threads is None else {"num_threads": threads, "thread_name": "t"}
    return plgpu.kernel(
        body,
        out_type=ONE,
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(**options),
        **names,
    )


def emitted(kernel, target="sm_90a"):
    """The fences and the accesses by other proxies in the code of a kernel, in their order."""
    ptx = pallasite.compile(kernel, ONE, target=target).ptx
    names = {
        "fence.proxy.async": "fence of the async proxy",
        "fence.sc.gpu": "fence of the unit",
        "cp.async.bulk.global": "send",
        "ld.volatile": "unit",
    }
    found = re.findall("|".join(map(re.escape, names)), ptx)
    return [names[text] for text in found]


# An asynchronous primitive ------------------------------------------------------------------------


def stored_and_sent(x_ref, o_ref, tile):
    tile[...] = x_ref[...] * 2
    send(tile, o_ref)


@pytest.mark.runs_kernels
def test_a_fence_comes_between_a_store_and_an_asynchronous_load(register):
    register(complete())
    kernel = make(stored_and_sent, TILE)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)  # The sanitizer sees no race.
    assert emitted(kernel) == ["fence of the async proxy", "send"]


@pytest.mark.runs_kernels
def test_without_a_record_there_is_none(register, pallasite_executor):
    register(Plugin(lowering=rules.lowering_rules))
    kernel = make(stored_and_sent, TILE)
    assert emitted(kernel) == ["send"]
    if pallasite_executor == "gpu":
        return  # Hardware does not say that a fence is missing.
    with pytest.raises(ExecutionError, match=r"missing fence\.proxy\.async in shared memory"):
        kernel(X)


@pytest.mark.runs_kernels
def test_none_where_it_is_not_needed(register):
    """A copy by the same proxy stores what is sent, and a fence of the program is enough."""
    register(complete())

    def copied_and_sent(x_ref, o_ref, tile, full):
        plgpu.copy_gmem_to_smem(x_ref, tile, full)
        plgpu.barrier_wait(full)
        send(tile, o_ref)

    kernel = make(copied_and_sent, TILE, plgpu.Barrier())
    np.testing.assert_array_equal(np.asarray(kernel(X)), X)
    assert emitted(kernel) == ["send"]

    def fenced(x_ref, o_ref, tile):
        tile[...] = x_ref[...] + 1
        plgpu.commit_smem()
        send(tile, o_ref)

    kernel = make(fenced, TILE)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X + 1)
    assert emitted(kernel) == ["fence of the async proxy", "send"]


@pytest.mark.runs_kernels
def test_a_fence_comes_before_another_thread_is_told(register):
    register(complete())

    def body(x_ref, o_ref, tile, ready):
        def store():
            tile[...] = x_ref[...] * 2
            plgpu.barrier_arrive(ready)

        def pass_on():
            plgpu.barrier_wait(ready)
            send(tile, o_ref)

        lax.cond(lax.axis_index("t") == 0, store, pass_on)

    kernel = make(body, TILE, plgpu.Barrier(), threads=2)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)
    assert sorted(emitted(kernel)) == ["fence of the async proxy", "send"]


# A proxy with a fence of its own ------------------------------------------------------------------


def stored_and_read(x_ref, o_ref, tile):
    tile[...] = x_ref[...] * 2
    unit(tile)
    o_ref[...] = tile[...]


@pytest.mark.runs_kernels
def test_a_proxy_has_its_own_fence(register):
    register(complete())
    kernel = make(stored_and_read, TILE)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)
    assert emitted(kernel) == ["fence of the unit", "unit"]


@pytest.mark.runs_kernels
def test_each_proxy_needs_its_fence(register):
    register(complete())

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...] * 2
        unit(tile)
        send(tile, o_ref)
        unit(tile)

    kernel = make(body, TILE)
    np.testing.assert_array_equal(np.asarray(kernel(X)), X * 2)
    expected = ["fence of the unit", "unit", "fence of the async proxy", "send", "unit"]
    assert emitted(kernel) == expected


def test_the_fence_of_the_program_is_enough(register):
    register(complete())

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...] * 2
        unit_fence_p.bind()
        unit(tile)

    assert emitted(make(body, TILE)) == ["fence of the unit", "unit"]


def test_it_is_for_some_targets(register):
    register(complete((fence(target=TargetPredicate(names=frozenset({"sm_90a"}))),)))
    kernel = make(stored_and_read, TILE)
    assert emitted(kernel, target="sm_90") == ["unit"]
    assert emitted(kernel, target="sm_90a") == ["fence of the unit", "unit"]


def test_no_fence_without_automatic_barriers(register):
    register(complete())
    assert emitted(make(stored_and_read, TILE, unsafe_no_auto_barriers=True)) == ["unit"]


@pytest.mark.parametrize("emit", [None, emit_unit_fence])
def test_memory_of_an_earlier_scope(register, emit):
    """What it stored lies where a later scope has its memory; the fence is emitted there."""
    register(complete((fence(emit),)))

    def body(x_ref, o_ref):
        def first(tile):
            tile[...] = x_ref[...] * 2
            o_ref[...] = tile[...]

        def second(tile):
            unit(tile)

        pl.run_scoped(first, TILE)
        pl.run_scoped(second, TILE)

    expected = ["unit"] if emit is None else ["fence of the unit", "unit"]
    assert emitted(make(body)) == expected


# Memory of a plugin -------------------------------------------------------------------------------

FILL, DRAIN = Proxy("fill"), Proxy("drain")
fill_p, drain_p, drain_fence_p = primitive("fill"), primitive("drain"), primitive("drain_fence")


def test_a_fence_between_two_proxies_of_a_plugins_memory(register):
    """Slots have no addresses to the compiler; a unit fills them, another one drains them."""
    marks = {fill_p: "mov.b32 fill, 0;", drain_p: "mov.b32 drain, 0;"}
    own = RuleSet()
    for made, text in marks.items():

        @own.lowering(made, Semantics.LANE)
        def _mark(ctx, *operands, text=text, **params):
            register = text.split()[1].strip(",")
            ops.inline_assembly(f"{{ .reg .b32 {register}; {text} }}", "~{memory}")
            return ()

    @own.lowering(drain_fence_p, Semantics.LANE)
    def _drain_fence(ctx):
        ops.inline_assembly("fence.acq_rel.sys;", "~{memory}")
        ctx.synchronize()
        return ()

    def fills(context, *operands, args_tree):
        return [MemoryEvent(EventKind.STORE, *args_tree.unflatten(operands), proxy=FILL)]

    def drains(context, *operands, args_tree):
        return [MemoryEvent(EventKind.LOAD, *args_tree.unflatten(operands), proxy=DRAIN)]

    records = (
        MemoryEvents(primitive=fill_p, function=fills),
        MemoryEvents(primitive=drain_p, function=drains),
    )
    between = ProxyFence(source=FILL, proxy=DRAIN, primitive=drain_fence_p)
    register(slots_plugin, "slots")
    register(Plugin(records, (between,), own.lowering_rules))

    def body(x_ref, o_ref, one, other):
        for slots in (one, other):
            arguments.bind(fill_p, arguments.reference(slots, "slots"))
        arguments.bind(drain_p, arguments.reference(one, "slots"))
        arguments.bind(drain_p, arguments.reference(one, "slots"))
        arguments.bind(fill_p, arguments.reference(other, "slots"))
        arguments.bind(drain_p, arguments.reference(one, "slots"))
        arguments.bind(drain_p, arguments.reference(other, "slots"))

    rows = plgpu.SLOTS((2, 128), jnp.float32)
    ptx = pallasite.compile(make(body, rows, rows), ONE, target="sm_121a").ptx
    found = re.findall(r"mov\.b32 (fill|drain)|(fence)\.acq_rel\.sys", ptx)
    assert ["".join(one) for one in found] == (
        ["fill", "fill", "fence", "drain", "drain", "fill", "drain", "fence", "drain"]
    )


# Barriers of the thread ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "proxy", "barriers"),
    [
        (EventKind.LOAD, Proxy("generic"), 1),
        (EventKind.LOAD, Proxy("without a fence"), 0),
        (EventKind.ELECTED_STORE, Proxy("generic"), 1),
        (EventKind.SYNCHRONIZE, Proxy("generic"), 0),
    ],
)
def test_lanes_converge_where_events_ask_for_it(register, kind, proxy, barriers):
    """Between a store and what the primitive does; it synchronizes nothing itself."""

    def events(context, *operands, args_tree):
        return [MemoryEvent(kind, *args_tree.unflatten(operands), proxy=proxy)]

    record = MemoryEvents(primitive=unit_p, function=events)
    register(Plugin((record,), (), rules.lowering_rules))

    def body(x_ref, o_ref, tile):
        tile[...] = x_ref[...]
        unit(tile)

    ptx = pallasite.compile(make(body, TILE), ONE, target="sm_90a").ptx
    assert len(re.findall(r"bar\.sync", ptx)) == barriers


# Checks of other plugins --------------------------------------------------------------------------


def stores_by(proxy):
    """The events of a primitive that stores to its first argument by a proxy."""

    def events(context, *operands, args_tree):
        target, *_ = args_tree.unflatten(operands)
        return [MemoryEvent(EventKind.STORE, target, proxy=proxy)]

    return events


def multiplied_then(x_ref, o_ref, a, b, *, between):
    def scope(acc):
        plgpu.wgmma(acc, a, b)
        between(a)
        return acc[...]

    o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))


def product(between):
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    operand = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=swizzled)
    return plgpu.kernel(
        functools.partial(multiplied_then, between=between),
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[operand, operand],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def test_what_overwrites_operands_of_products_in_flight_is_found(register):
    record = MemoryEvents(primitive=unit_p, function=stores_by(ASYNC))
    register(Plugin((record,), (), rules.lowering_rules))
    with pytest.raises(InvalidValueError) as caught:
        pallasite.compile(product(unit), ONE, target="sm_90a")
    message = str(caught.value)
    assert "shared memory is overwritten while a wgmma that reads it is in flight" in message
    assert "expected: plgpu.wgmma_wait(0) in between" in message
    _, first = inspect.getsourcelines(unit)
    assert message.startswith(f"{__file__}:{first + 2} (unit)")


def test_what_only_reads_them_is_not(register):
    register(complete())
    pallasite.compile(product(unit), ONE, target="sm_90a")


# Contradictions, listings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Plugin((events_of(unit_p, UNIT),)), "both register memory events of primitive 'unit'"),
        (
            Plugin(fences=(fence(),)),
            "both register equally specific fences from proxy generic to unit for target",
        ),
    ],
)
def test_two_plugins_contradict_each_other(register, plugin, message):
    register(complete())
    register(plugin, "another")
    with pytest.raises(PluginError) as caught:
        plugins.registry()
    assert f"plugins 'other-memory' and 'another' {message}" in str(caught.value)


def test_one_may_override_the_other(register):
    register(complete())
    mine = fence(overrides=("other-memory",))
    register(Plugin((events_of(unit_p, ASYNC, overrides=("other-memory",)),), (mine,)), "another")
    registry = plugins.registry()
    fences = registry.memory.fences(registry.targets["sm_90a"])
    assert dataclasses.replace(mine, plugin="another") in fences
    assert emitted(make(stored_and_read, TILE)) == ["fence of the async proxy", "unit"]


def test_they_are_listed(register, capsys):
    from pallasite.cli import main

    register(complete())
    assert main(["plugins"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "other-memory" in line]
    assert "2 memory events, 1 proxy fences" in row
