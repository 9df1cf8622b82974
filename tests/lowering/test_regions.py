"""Named regions: which are recorded where, and what is emitted for them."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from kernels import array, compile_kernel, in_order, make
from pallasite.errors import ResourceError
from pallasite.gpu import CompilerParams, TraceScope
from pallasite.launch import BufferKind
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.primitives.inline import inline_mgpu
from pallasite_std.profiler.profile import profile_of

scope = jax.named_scope


def params(space=8, **changes):
    return CompilerParams(profile_space=space, profile_dir="profiles" if space else "", **changes)


def compiled(body, *, inputs=1, space=8, shape=(128,), vmap=None, **changes):
    arguments = {name: changes.pop(name) for name in ("grid", "grid_names") if name in changes}
    threads = changes.pop("threads", None)
    if threads:
        arguments |= {"num_threads": threads, "thread_name": "wg"}
    fn = make(shape, compiler_params=params(space, **changes), **arguments)(body)
    operands = [array(*shape)] * inputs
    if vmap:
        fn, operands = jax.vmap(fn), [array(vmap, *shape)] * inputs
    return compile_kernel(fn, *operands)


def events(kernel):
    """The events in program order: ``+name`` where a region begins, ``-name`` where it ends."""
    names = profile_of(kernel).names
    found = [int(word, 16) for word in re.findall(r"mov\.b32 event, (0x[0-9a-f]+);", kernel.mlir)]
    return [("-" if word >> 31 else "+") + names[word & 0x7FFFFFFF] for word in found]


def test_regions_in_order():
    def body(x, o):
        v = x[...]
        with scope("a"):
            v = v + 1
            with scope("b"):
                v = v * 2
            v = v + 3
        with scope("c"), scope("b"):
            o[...] = v

    kernel = compiled(body)
    assert events(kernel) == ["+a", "+b", "-b", "-a", "+c", "+b", "-b", "-c"]
    assert profile_of(kernel).names == ("a", "b", "c")


def test_leaving_several_and_entering_others():
    def body(x, o):
        with scope("a"), scope("b"), scope("c"):
            v = x[...] + 1
        with scope("a"):
            with scope("d"):
                v = v * 2
            o[...] = v

    assert events(compiled(body)) == ["+a", "+b", "+c", "-c", "-b", "+d", "-d", "-a"]


def test_loops():
    def body(x, o):
        def step(i, v):
            with scope("step"):
                v = v * 2
                return jax.lax.fori_loop(0, i, lambda _, v: jnp.tanh(v), v)

        with scope("loop"):
            o[...] = jax.lax.fori_loop(0, 5, step, x[...])

    kernel = compiled(body)
    assert events(kernel) == ["+loop", "+step", "-step", "-loop"]
    # The step's events are inside the loop.
    in_order(kernel.mlir, "event, 0x0", r"scf\.for", "event, 0x1", r"scf\.for", "event, 0x80000001")


def test_conditions_of_while_loops_have_regions_of_their_own():
    def body(x, o):
        def condition(carry):
            with scope("condition"):
                return x[carry[0]] > 0

        def step(carry):
            with scope("step"):
                return carry[0] + 1, carry[1] * 2

        o[...] = jax.lax.while_loop(condition, step, (jnp.int32(0), x[...]))[1]

    assert events(compiled(body)) == ["+condition", "-condition", "+step", "-step"]


def test_unrolled_steps_are_regions_each():
    def body(x, o):
        def step(i, v):
            with scope("step"):
                return v * 2

        o[...] = jax.lax.fori_loop(0, 3, step, x[...], unroll=True)

    assert events(compiled(body)) == ["+step", "-step"] * 3


def test_code_that_is_lowered_on_trial_leaves_no_events():
    def body(x, o):
        def step(i, v):
            with scope("step"):
                return v + x[...]

        o[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros((128,), jnp.float32))

    assert events(compiled(body)) == ["+step", "-step"]


def test_branches():
    def body(x, o):
        def positive(v):
            with scope("positive"):
                return v * 2

        def other(v):
            with scope("other"):
                return v * 3

        with scope("choice"):
            o[...] = jax.lax.cond(x[0] > 0, positive, other, x[...])

    found = events(compiled(body))
    assert sorted(found) == sorted(
        ["+choice", "+positive", "-positive", "+other", "-other", "-choice"]
    )
    assert (found[0], found[-1]) == ("+choice", "-choice")
    assert found[found.index("+other") + 1] == "-other"


def test_nested_jaxprs_are_inside_the_regions_of_their_callers():
    @jax.jit
    def inner(v):
        with scope("inner"):
            return v * 2

    def body(x, o):
        with scope("outer"):
            v = inner(x[...])
        o[...] = inner(v)

    assert events(compiled(body)) == ["+outer", "+inner", "-inner", "-outer", "+inner", "-inner"]


def test_vmap_keeps_the_regions():
    def body(x, o):
        with scope("all"):
            o[...] = x[...]

    kernel = compiled(body, vmap=3)
    assert events(kernel) == ["+all", "-all"]
    assert kernel.launch.grid == (3, 1, 1)
    assert kernel.launch.outputs[-1].shape == (3 * profile_of(kernel).words,)


def test_nothing_is_emitted_without_profile_space():
    def body(x, o, named):
        with scope("a") if named else scope(""):
            o[...] = x[...] * 2

    plain = compiled(functools.partial(body, named=True), space=0)
    assert profile_of(plain) is None
    assert len(plain.launch.outputs) == 1
    assert not re.search(r"%clock|globaltimer|smid|event", plain.ptx)
    unnamed = compiled(functools.partial(body, named=False), space=0)
    assert plain.mlir == unnamed.mlir


def test_a_kernel_without_regions_records_its_start_and_end():
    def body(x, o):
        o[...] = x[...]

    kernel = compiled(body)
    assert events(kernel) == []
    in_order(kernel.ptx, "%smid", "%clock", "%globaltimer", "%clock", "%globaltimer", "ret;")


def test_inlined_code_has_regions():
    @inline_mgpu()
    def code(ctx):
        with ctx.named_region("inlined"), ctx.named_region("deeper"):
            ctx.warpgroup_barrier()

    def body(x, o):
        with scope("around"):
            code()
        o[...] = x[...]

    kernel = compiled(body)
    assert events(kernel) == ["+around", "+inlined", "+deeper", "-deeper", "-inlined", "-around"]
    in_order(kernel.ptx, "event, 0x2", r"bar\.sync", "event, 0x80000002")


def test_named_region_without_a_profiler_emits_nothing():
    @inline_mgpu()
    def code(ctx):
        with ctx.named_region("inlined"):
            ctx.warpgroup_barrier()

    def body(x, o):
        code()
        o[...] = x[...]

    assert "%clock" not in compiled(body, space=0).ptx


def one_region(x, o):
    """A kernel's body in one region."""
    with scope("all"):
        o[...] = x[...]


def test_slots_of_warpgroups_and_warps():
    for trace_scope, recorders in ((TraceScope.WARPGROUP, 2), (TraceScope.WARP, 8)):
        kernel = compiled(
            one_region,
            threads=2,
            grid=(3,),
            grid_names=("i",),
            space=5,
            profile_trace_scope=trace_scope,
        )
        profile = profile_of(kernel)
        assert (profile.recorders, profile.scope) == (recorders, trace_scope.value)
        assert profile.events == 10 and profile.words == 28
        hidden = kernel.launch.outputs[profile.output]
        assert hidden.kind is BufferKind.OUTPUT and hidden.shape == (3 * recorders * 28,)
        assert kernel.ptx.count("mul.wide.u32") and f", {28 * 4};" in kernel.ptx
        assert ("and.pred" in kernel.ptx) == (trace_scope is TraceScope.WARPGROUP)


def test_events_of_single_warps():
    def body(x, o):
        def per_warp(warp):
            @pl.when(warp == 1)
            def _():
                with scope("one"):
                    o[0] = x[0]

        with scope("map"):
            warp_map(per_warp)

    # JAX names the region that a function is mapped over warps in by the function.
    found = events(compiled(body, profile_trace_scope=TraceScope.WARP))
    assert found == ["+map", "+per_warp", "+one", "-one", "-per_warp", "-map"]


def test_check_of_bounds():
    def body(x, o):
        def step(i, v):
            with scope("step"):
                return v * 2

        o[...] = jax.lax.fori_loop(0, x.shape[0], step, x[...])

    checked = compiled(body, space=3, profile_bounds_check=True).ptx
    in_order(checked, r"setp\.(lt|gt|ne)\.[us]32\s+%p\d+, %r\d+, [56];", "event, 0x0")
    assert not re.search(r"setp\.\w+\.[us]32\s+%p\d+, %r\d+, [56];", compiled(body, space=3).ptx)


def test_resources_list_the_profile():
    kernel = compiled(one_region, space=4)
    (row,) = kernel.resources.allocations
    assert row.amount == 4 * profile_of(kernel).words == 4 * (8 + 16)
    assert "8 events per warpgroup" in row.what
    assert (row.space, row.location.file) == ("gmem", __file__)


def test_aliased_outputs_come_before_the_profile():
    def body(x, o):
        with scope("all"):
            o[...] = x[...] * 2

    fn = make((128,), compiler_params=params(), input_output_aliases={0: 0})(body)
    kernel = compile_kernel(fn, array(128))
    assert kernel.launch.aliases == ((0, 0),)
    assert profile_of(kernel).output == 1 == len(kernel.launch.outputs) - 1


def test_a_profile_that_is_too_large():
    with pytest.raises(ResourceError, match=r"profile of kernel one_region is too large") as error:
        compiled(one_region, space=10_000_000, grid=(100,), grid_names=("i",))
    assert "test_regions.py" in str(error.value)
