"""The hook ``pallasite_lifecycles``: what a plugin does at fixed moments in a kernel's life."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.plugin import (
    KernelLifecycle,
    PluginError,
    RuleSet,
    Semantics,
    TargetPredicate,
    hookimpl,
    manager,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import StateKey
from pallasite.plugins import PluginWarning

N = 128
OUT = jax.ShapeDtypeStruct((N,), jnp.float32)
X = jnp.arange(float(N))
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

mark_p = Primitive("mark")
mark_p.multiple_results = True
mark_p.def_abstract_eval(list)
shared_p = Primitive("shared_number")
shared_p.def_abstract_eval(lambda x: x)


class Plugin:
    """A plugin of some lifecycles and rules."""

    def __init__(self, *lifecycles, rules=None):
        self.lifecycles, self.rules = lifecycles, rules or RuleSet()

    @hookimpl
    def pallasite_lifecycles(self):
        return self.lifecycles

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.rules.lowering_rules


@contextlib.contextmanager
def registered(*lifecycles, rules=None, name="life"):
    manager().register(Plugin(*lifecycles, rules=rules), name)
    try:
        yield
    finally:
        manager().unregister(name)


def note(text):
    """A line of PTX that does nothing."""
    ops.inline_assembly(f"// note: {text}", "~{memory}")


def notes(ptx):
    return re.findall(r"^\s*// note: (.*)$", ptx, re.MULTILINE)


def body(x_ref, out_ref):
    out_ref[...] = x_ref[...] + 1


def compiled(function=body, target="sm_90", **options):
    kernel = plgpu.kernel(function, out_type=OUT, **{"compiler_params": LANE, **options})
    return pallasite.compile(kernel, X, target=target)


# Moments ------------------------------------------------------------------------------------------


def test_moments_come_in_their_order():
    calls = []

    def emit(moment):
        def call(kernel):
            calls.append(moment)
            note(moment)

        return call

    def begin(kernel):
        calls.append("begin")
        kernel.launch.new_barriers(1, 1, what="early", location=None)

    def late(kernel):
        emit("epilogue")(kernel)
        kernel.launch.new_barriers(1, 1, what="late", location=None)

    def finish(kernel):
        calls.append("finish")
        assert len(kernel.launch.parameters) == 2

    def step(kernel):
        calls.append("before_first_launch")

    life = KernelLifecycle(
        name="life",
        begin=begin,
        prologue=emit("prologue"),
        epilogue=late,
        finish=finish,
        before_first_launch=step,
    )
    with registered(life):
        kernel = compiled()
    assert calls == ["begin", "prologue", "epilogue", "finish", "before_first_launch"]
    assert kernel.resources.barriers == 2 and not kernel.launch.before_first_launch
    places = [
        kernel.ptx.rindex("mbarrier.init"),
        kernel.ptx.index("bar.sync"),
        kernel.ptx.index("// note: prologue"),
        kernel.ptx.index("ld.global"),
        kernel.ptx.index("st.global"),
        kernel.ptx.index("// note: epilogue"),
    ]
    assert places == sorted(places)
    assert "note: prologue" not in compiled().ptx


NUMBER = StateKey("test.number", lambda kernel: {})


def _prologue(kernel):
    launch = kernel.launch
    offset = launch.reserve_shared(8, alignment=8, what="number", location=None)
    barrier = launch.new_barriers(1, 1, what="ready", location=None)
    kernel.state(NUMBER)["pointer"] = pointer = launch.shared_pointer(offset)
    with ops.when(launch.block_leader):
        number = arith.sitofp(ir.F32Type.get(), ops.add(launch.block_id(0), 1000))
        ops.store(number, pointer, alignment=4)
        ops.inline_assembly(
            "mbarrier.arrive.shared::cta.b64 _, [$0];",
            "r,~{memory}",
            ops.shared_address(launch.shared_pointer(barrier.offset)),
        )
    launch.block_barrier()


def _epilogue(kernel):
    launch = kernel.launch
    used = launch.hidden_result("number", (3,), np.float32, consumer=f"{__name__}:_nothing")
    with ops.when(launch.block_leader):
        number = ops.load(ir.F32Type.get(), kernel.state(NUMBER)["pointer"], alignment=4)
        here = ops.element_pointer(launch.array_pointer(used), launch.block_id(0), ir.F32Type.get())
        ops.store(number, here, alignment=4)


def _nothing(array, kernel):
    """Takes a hidden result."""


def test_a_prologue_and_an_epilogue_run():
    """The prologue of each block uses a barrier that it has asked for, and leaves a number in
    shared memory, which rules and the epilogue read."""
    from pallasite_simulator import simulate

    rules = RuleSet()

    @rules.lowering(shared_p, Semantics.LANE)
    def _shared(ctx, x):
        number = ops.load(ir.F32Type.get(), ctx.kernel.state(NUMBER)["pointer"], alignment=4)
        return x.map(lambda one: arith.addf(one, number))

    def kernel(x_ref, out_ref):
        out_ref[...] = shared_p.bind(x_ref[...])

    life = KernelLifecycle(name="life", prologue=_prologue, epilogue=_epilogue)
    blocked = plgpu.kernel(
        lambda x_ref, out_ref: kernel(
            x_ref.at[pl.ds(pl.program_id(0) * 128, 128)],
            out_ref.at[pl.ds(pl.program_id(0) * 128, 128)],
        ),
        out_type=jax.ShapeDtypeStruct((384,), jnp.float32),
        grid=(3,),
        grid_names=("i",),
        compiler_params=LANE,
    )
    with registered(life, rules=rules):
        made = pallasite.compile(blocked, jnp.zeros(384), target="sm_90")
    x = np.arange(384, dtype=np.float32)
    run = simulate(made, x, sanitize=True)
    assert not run.findings
    numbers = np.array([1000, 1001, 1002], np.float32)
    np.testing.assert_array_equal(run.outputs[0], x + np.repeat(numbers, 128))
    np.testing.assert_array_equal(run.outputs[1], numbers)


def test_an_epilogue_comes_before_the_end_of_the_cluster():
    def share(kernel):
        kernel.launch.uses_cluster_memory = True
        note("epilogue")

    life = KernelLifecycle(name="life", epilogue=share)
    with registered(life):
        ptx = compiled(grid=(2,), grid_names=("i",), cluster=(2,), cluster_names=("c",)).ptx
    assert ptx.index("// note: epilogue") < ptx.rindex("barrier.cluster.arrive") < ptx.index("ret;")


def test_named_scopes():
    opened = []

    @contextlib.contextmanager
    def scope(kernel, name):
        opened.append(f"+{name}")
        note(f"begin {name}")
        yield
        note(f"end {name}")
        opened.append(f"-{name}")

    def regions(x_ref, out_ref):
        with jax.named_scope("outer"):
            value = x_ref[...]
            with jax.named_scope("inner"):
                value = value * 2
            out_ref[...] = value

    life = KernelLifecycle(name="life", named_scope=scope)
    with registered(life):
        ptx = compiled(regions).ptx
    assert opened == ["+outer", "+inner", "-inner", "-outer"]
    assert notes(ptx) == ["begin outer", "begin inner", "end inner", "end outer"]
    assert notes(compiled(regions).ptx) == []


# State, and code that is emitted later ------------------------------------------------------------


def test_state_belongs_to_one_kernel_and_one_key():
    made = []
    key = StateKey("test.same", lambda kernel: made.append(kernel) or [])
    other = StateKey("test.same", lambda kernel: [])

    def begin(kernel):
        kernel.state(key).append(1)
        assert kernel.state(key) is kernel.state(key)
        assert kernel.state(other) == []

    def epilogue(kernel):
        assert kernel.state(key) == [1]

    with registered(KernelLifecycle(name="life", begin=begin, epilogue=epilogue)):
        compiled()
        compiled(target="sm_90a")
    assert len(made) == 2 and made[0] is not made[1]


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
def test_what_is_emitted_later_knows_the_whole_kernel(semantics):
    """Also in a loop, the code of which is first emitted to find layouts, and thrown away."""
    trials = []
    count = StateKey("test.count", lambda kernel: trials)
    rules = RuleSet()

    @rules.lowering(mark_p, Semantics.LANE)
    def _mark(ctx):
        ctx.kernel.state(count).append(ctx.kernel.on_trial)
        number = len(ctx.kernel.state(count))
        ctx.kernel.emit_later(
            lambda lane: ops.inline_assembly(
                f"// mark {number} of {len(ctx.kernel.state(count))} $0", "r,~{memory}", lane
            ),
            ctx.launch.lane_id,
        )
        return []

    def marks(x_ref, out_ref):
        mark_p.bind()

        def step(i, value):
            mark_p.bind()
            return value + x_ref[...]

        out_ref[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros((N,), jnp.float32))

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    with registered(rules=rules):
        ptx = compiled(marks, compiler_params=params).ptx
    assert any(trials) == (semantics is plgpu.LoweringSemantics.Lane) and not all(trials)
    found = re.findall(r"// mark (\d) of (\d) %r\d+", ptx)
    total = found[0][1]
    assert [number for number, _ in found] == ["1", total] and {t for _, t in found} == {total}


# Which take part, and in which order --------------------------------------------------------------


def order(*lifecycles):
    with registered(*lifecycles):
        return notes(compiled().ptx)


def named(name, **options):
    return KernelLifecycle(name=name, prologue=lambda kernel: note(name), **options)


def test_order():
    assert order(named("a"), named("b")) == ["a", "b"]
    assert order(named("a", after=("b",)), named("b")) == ["b", "a"]
    assert order(named("a"), named("b", before=("a", "profiler"))) == ["b", "a"]


def test_who_takes_part():
    only = TargetPredicate(names=frozenset({"sm_90a"}))
    lives = (
        named("always"),
        named("elsewhere", target=only),
        named("large", applies=lambda kernel: kernel.geometry.blocks > 4),
    )
    with registered(*lives):
        assert notes(compiled().ptx) == ["always"]
        assert notes(compiled(target="sm_90a").ptx) == ["always", "elsewhere"]
        assert notes(compiled(grid=(8,), grid_names=("i",)).ptx) == ["always", "large"]


@pytest.mark.parametrize(
    ("lifecycles", "text"),
    [
        ((named("a"), named("a")), "plugin 'life' registers two kernel lifecycles named 'a'"),
        ((named("profiler"),), "plugins 'standard' and 'life' both register kernel lifecycles"),
        (
            (named("a", after=("b",)), named("b", after=("a",))),
            r"order of these kernel lifecycles is circular: 'a' \(plugin 'life'\), 'b'",
        ),
    ],
)
def test_contradictions(lifecycles, text):
    with registered(*lifecycles), pytest.raises(PluginError, match=text):
        compiled()


def test_overriding():
    mine = named("profiler", overrides=("standard",))
    params = plgpu.CompilerParams(profile_space=4, profile_dir="nowhere")
    with registered(mine):
        kernel = compiled(compiler_params=params)
    assert notes(kernel.ptx) == ["profiler"] and not kernel.launch.hidden_results


# Errors and listings ------------------------------------------------------------------------------


def test_errors_name_the_lifecycle():
    def fail(kernel):
        raise ZeroDivisionError("oh")

    life = KernelLifecycle(name="broken", epilogue=fail)
    with registered(life), pytest.raises(PluginError) as caught:
        compiled()
    assert caught.value.message == (
        "pallasite_lifecycles of plugin 'life' (in process): epilogue of KernelLifecycle 'broken'"
        " failed: ZeroDivisionError: oh"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    life = KernelLifecycle(name="wrong", before_first_launch=lambda kernel: "module:function")
    with (
        registered(life),
        pytest.raises(PluginError, match="'wrong' returned the wrong thing") as caught,
    ):
        compiled()
    assert "expected: HostStep | None" in str(caught.value)
    with registered("no lifecycle"), pytest.warns(PluginWarning) as warned:
        manager().registry()
    assert "an iterable of KernelLifecycle" in str(warned[0].message)


def test_effects_on_the_host():
    """Only a kernel with effects runs where nobody uses its results."""
    kernel = plgpu.kernel(body, out_type=OUT, compiler_params=LANE)

    def program(x):
        kernel(x)
        return x

    assert not jax.make_jaxpr(program)(X).effects
    life = KernelLifecycle(name="life", host_effects=lambda params: params.approx_math)
    with registered(life):
        jax.clear_caches()
        assert not jax.make_jaxpr(program)(X).effects
    life = KernelLifecycle(name="life", host_effects=lambda params: not params.approx_math)
    with registered(life):
        jax.clear_caches()
        assert jax.make_jaxpr(program)(X).effects
    jax.clear_caches()


def test_listing(capsys):
    with registered(named("counts-things")):
        assert main(["plugins"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "lifecycles counts-things" in rows["life"]
    assert "lifecycles profiler shared-tensor-maps tensor-map-prefetch" in rows["standard"]
