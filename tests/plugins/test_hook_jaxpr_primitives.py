"""Primitives that carry jaxprs, from a plugin of another author: everything sees inside.

The plugin describes their regions, and has rules to lower them, but no others.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import jaxpr_plugin
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jaxpr_plugin import choose, repeat

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.plugin import JaxprPrimitive, PluginError, hookimpl, jax_internals, plugins
from pallasite.plugin.jaxprs import call

pytestmark = pytest.mark.runs_kernels

SHAPE = (64, 64)
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.fixture
def plugin():
    plugins.register(jaxpr_plugin.Plugin(), name="control")
    yield
    plugins.unregister("control")


def make(body, *scratch, shape=SHAPE, **options):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(**options),
    )


def test_a_loop_that_carries_arrays(plugin, semantics):
    def body(x_ref, o_ref):
        def step(x, total):
            return x * 2, total + x

        _, total = repeat(3, step, x_ref[...], jnp.zeros(SHAPE, jnp.float32))
        o_ref[...] = total

    np.testing.assert_allclose(make(body)(X), 7 * X, rtol=1e-6)


@pytest.mark.parametrize("number", range(3))
def test_a_branch_is_chosen_when_the_kernel_runs(plugin, semantics, number):
    def body(x_ref, o_ref):
        def write(factor):
            o_ref[...] = x_ref[...] * factor

        choose(
            x_ref[0, 0].astype(jnp.int32),
            *[lambda factor=factor: write(factor) for factor in (2, 3, 5)],
        )

    x = X.copy()
    x[0, 0] = number
    np.testing.assert_allclose(make(body)(x), x * (2, 3, 5)[number])


def test_memory_inside_is_estimated(plugin, semantics):
    """Alternatives share memory, iterations too."""

    def scratch(rows):
        def use(memory):
            memory[...] = jnp.ones((rows, 64), jnp.float32)

        return lambda: pl.run_scoped(use, plgpu.SMEM((rows, 64), jnp.float32))

    def body(x_ref, o_ref):
        def step(x):
            choose(x_ref[0, 0].astype(jnp.int32), scratch(16), scratch(32))
            return [x + 1]

        (o_ref[...],) = repeat(2, step, x_ref[...])

    kernel = make(body)
    compiled = pallasite.compile(kernel, X)
    assert compiled.resources.shared_memory_bytes == 32 * 64 * 4
    np.testing.assert_array_equal(kernel(X), (X + 1) + 1)


def layouts_of(kernel, *args):
    return pallasite.compile(kernel, *args, target="sm_90a").layouts


def test_layouts_are_inferred_through_the_loop(plugin):
    """The only layout that anything asks for is inside; what is carried is loaded with it."""

    def body(x_ref, o_ref):
        def step(x):
            return [plgpu.layout_cast(x, plgpu.Layout.WGMMA) * 2]

        (o_ref[...],) = repeat(2, step, x_ref[...])

    kernel = make(body, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    report = layouts_of(kernel, X)
    assert {array.layout for array in report.arrays} == {"WGMMA"}
    assert not report.conversions
    np.testing.assert_allclose(kernel(X), 4 * X)


def test_layouts_are_known_through_the_loop_in_lane_semantics(plugin):
    """A load begins with the layout of what comes out of the loop: nothing is converted."""

    def body(x_ref, y_ref, o_ref):
        x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        (doubled,) = repeat(1, lambda x: [x * 2], x)
        o_ref[...] = doubled + y_ref[...]

    kernel = make(body, lowering_semantics=plgpu.LoweringSemantics.Lane)
    ptx = pallasite.compile(kernel, X, X, target="sm_90a").ptx
    assert "st.shared" not in ptx and "shfl.sync.bfly" not in ptx
    np.testing.assert_allclose(kernel(X, X), 3 * X, rtol=1e-6)


def test_a_wait_inside_that_never_ends(plugin, semantics):
    def body(o_ref, barrier):
        def step():
            plgpu.barrier_wait(barrier)  # HERE
            return ()

        repeat(1, step)
        o_ref[...] = jnp.zeros((128,), jnp.float32)

    with pytest.raises(InvalidValueError, match="nothing in the kernel arrives") as caught:
        make(body, plgpu.Barrier(), shape=(128,))()
    assert_at(caught.value, "HERE")


def test_too_few_arrivals_inside(plugin, semantics):
    def body(o_ref, barrier):
        def step():
            plgpu.barrier_arrive(barrier)
            return ()

        repeat(1, step)
        plgpu.barrier_wait(barrier)  # WAITS
        o_ref[...] = jnp.zeros((128,), jnp.float32)

    with pytest.raises(InvalidValueError, match="completes with arrival 2, but only 1") as caught:
        make(body, plgpu.Barrier(num_arrivals=2), shape=(128,))()
    assert_at(caught.value, "WAITS")


def test_arrivals_in_branches_are_not_certain(plugin, semantics):
    def body(x_ref, o_ref, barrier):
        choose(x_ref[0].astype(jnp.int32), lambda: plgpu.barrier_arrive(barrier))
        plgpu.barrier_wait(barrier)
        o_ref[...] = x_ref[...] + 1

    x = np.zeros(128, np.float32)
    np.testing.assert_array_equal(make(body, plgpu.Barrier(), shape=(128,))(x), x + 1)


def test_products_inside_get_their_waits(plugin):
    """The next iteration overwrites what a product of the last one may still read."""
    random = np.random.default_rng(1)
    a, b = (jnp.asarray(random.normal(size=SHAPE), jnp.bfloat16) for _ in range(2))

    def body(a_ref, b_ref, o_ref, left, right, barrier):
        def step(total):
            plgpu.copy_gmem_to_smem(a_ref, left, barrier)
            plgpu.copy_gmem_to_smem(b_ref, right, barrier)
            plgpu.barrier_wait(barrier)

            def product(acc):
                plgpu.wgmma(acc, left, right)
                left[...] = jnp.zeros(SHAPE, jnp.bfloat16)
                return acc[...]

            return [total + pl.run_scoped(product, plgpu.ACC(SHAPE, jnp.float32))]

        (o_ref[...],) = repeat(2, step, jnp.zeros(SHAPE, jnp.float32))

    memory = [plgpu.SMEM(SHAPE, jnp.bfloat16)] * 2
    kernel = make(
        body,
        *memory,
        plgpu.Barrier(num_arrivals=2),
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    ptx = pallasite.compile(kernel, a, b, target="sm_90a").ptx
    order = re.findall(r"wgmma\.(mma_async|wait_group)|(st\.shared|stmatrix)", ptx)
    kinds = [one or "store" for one, _ in order]
    assert kinds.index("wait_group") < kinds.index("store")
    expected = 2 * np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    with pallasite.target("sm_90a"):
        np.testing.assert_allclose(kernel(a, b), expected, rtol=1e-3, atol=1e-2)


def blocks(x):
    """A kernel whose references are views of whole arrays when its body is traced anew."""

    def body(x_ref, o_ref):
        def step(x):
            return [x + x_ref[...] * (pl.program_id(0) + 1)]

        (o_ref[...],) = repeat(2, step, x_ref[...])

    block = pl.BlockSpec((128,), lambda i: (i,))
    call = pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(),
    )
    return call(x)


def test_bodies_are_traced_anew(plugin):
    x = np.random.default_rng(2).normal(size=256).astype(np.float32)
    np.testing.assert_allclose(blocks(x), x * np.repeat([3, 5], 128), rtol=1e-6)


def test_bodies_that_cannot_be_traced_anew(plugin, monkeypatch):
    monkeypatch.setattr(jaxpr_plugin.Plugin, "rebind", None)
    plugins.unregister("control")
    plugins.register(jaxpr_plugin.Plugin(), name="control")
    with pytest.raises(UnsupportedError, match="does not work with repeat") as caught:
        blocks(np.zeros(256, np.float32))
    assert "JaxprPrimitive" in str(caught.value)


def test_without_a_description(semantics):
    unknown = jax_internals.Primitive("unknown_loop")
    unknown.def_abstract_eval(lambda x, body: x)
    inner = jax.make_jaxpr(lambda x: x + 1)(jnp.float32(0))

    def body(x_ref, o_ref):
        o_ref[0] = unknown.bind(x_ref[0], body=inner)  # HOLDS

    with pytest.raises(UnsupportedError, match="primitive unknown_loop holds a jaxpr") as caught:
        make(body, shape=(128,))(np.zeros(128, np.float32))
    assert "pallasite_jaxpr_primitives" in str(caught.value)
    assert_at(caught.value, "HOLDS")


class Rival:
    """Describes a primitive of the standard library."""

    overrides: tuple[str, ...] = ()

    @hookimpl
    def pallasite_jaxpr_primitives(self):
        return [
            JaxprPrimitive(
                primitive=jax_internals.jit_p,
                regions=lambda equation: [call(equation.params["jaxpr"])],
                overrides=self.overrides,
            )
        ]


def test_two_descriptions_of_one_primitive():
    plugins.register(Rival(), name="rival")
    try:
        with pytest.raises(PluginError) as caught:
            plugins.registry()
    finally:
        plugins.unregister("rival")
    assert "'rival'" in str(caught.value) and "'standard'" in str(caught.value)


def test_a_description_overrides_another(monkeypatch):
    monkeypatch.setattr(Rival, "overrides", ("standard",))
    plugins.register(Rival(), name="rival")
    try:
        assert plugins.registry().jaxprs.entry(jax_internals.jit_p).plugin == "rival"
    finally:
        plugins.unregister("rival")


def assert_at(error, marker):
    """The error is about the line that has the marker in a comment."""
    with open(__file__) as file:
        (line,) = [n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# {marker}")]
    assert (error.location.file, error.location.line) == (__file__, line)
