"""The report of layout inference, and that lowering does what it says."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli.layouts import report as recorded_report
from pallasite.layouts import named, row_major
from pallasite.lowering.layout_names import describe_memory, name_of
from pallasite.lowering.layout_report import LayoutReport
from pallasite.lowering.recording import recording
from pallasite.runtime import serialization
from pallasite_std.memory import relayout as relayouts

WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make(body, out, *scratch, params=WARPGROUP, name="kernel"):
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=list(scratch),
        compiler_params=params,
        kernel_name=name,
    )


def report_of(body, inputs, out, *scratch) -> LayoutReport:
    compiled = pallasite.compile(make(body, out, *scratch), *inputs, target="sm_90a")
    assert compiled.layouts is not None
    return compiled.layouts


def line(body, number: int) -> int:
    """The line of the file at which a line of a function is, counted from its ``def``."""
    return body.__code__.co_firstlineno + number


def arrays(report: LayoutReport) -> dict[tuple[int, str], tuple[str, ...]]:
    """By line and primitive, the layouts of the arrays made there."""
    found = collections.defaultdict(list)
    for one in report.arrays:
        found[one.location.line, one.primitive].append(one.layout)
    return {key: tuple(layouts) for key, layouts in found.items()}


def reasons(one) -> list[tuple[str, int | None]]:
    return [
        (reason.text, None if reason.location is None else reason.location.line)
        for reason in one.why
    ]


# Matrix products ----------------------------------------------------------------------------------

M, N, K = 128, 128, 64
OPERANDS = (
    array(M, K, dtype=jnp.bfloat16),
    array(K, N, dtype=jnp.bfloat16),
    array(N),
)


def product(a, b, bias, out, a_smem, b_smem, out_smem, barrier):
    plgpu.copy_gmem_to_smem(a, a_smem, barrier)
    plgpu.copy_gmem_to_smem(b, b_smem, barrier)
    plgpu.barrier_wait(barrier)

    def scope(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    y = pl.run_scoped(scope, plgpu.ACC((M, N), jnp.float32)) + bias[...][None, :]
    out_smem[...] = (y / jnp.sum(jnp.abs(y), axis=1, keepdims=True)).astype(jnp.bfloat16)
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)


SCRATCH = (
    plgpu.SMEM((M, K), jnp.bfloat16),
    plgpu.SMEM((K, N), jnp.bfloat16),
    plgpu.SMEM((M, N), jnp.bfloat16),
    plgpu.Barrier(num_arrivals=2),
)
PRODUCT = (product, OPERANDS, array(M, N, dtype=jnp.bfloat16), *SCRATCH)


def test_arrays_of_a_product():
    report = report_of(*PRODUCT)
    found = arrays(report)
    bias, last = line(product, 9), line(product, 10)
    assert found[bias, "get"] == ("WGMMA_COL",)
    assert found[bias, "add"] == ("WGMMA",)
    assert found[last, "reduce_sum"] == ("WGMMA_ROW",)
    assert found[last, "broadcast_in_dim"] == ("WGMMA_ROW[:, None]",)
    assert found[last, "div"] == found[last, "convert_element_type"] == ("WGMMA",)
    assert (last, "swap") not in found, "nothing uses what was there before"
    assert report.conversions == ()
    (row,) = [one for one in report.arrays if one.primitive == "reduce_sum"]
    assert (row.dtype, row.shape) == ("float32", (M,))
    assert row.location.function == "product"


def test_reasons_of_a_product():
    report = report_of(*PRODUCT)
    read, bias, last = line(product, 7), line(product, 9), line(product, 10)
    by_primitive = {one.primitive: reasons(one) for one in report.arrays}
    from_accumulator = ("it is read from an accumulator", read)
    assert by_primitive["wgmma"] == [("it is an accumulator", bias)]
    assert by_primitive["add"] == by_primitive["div"] == [from_accumulator]
    assert by_primitive["get"] == [
        ("follows by broadcast_in_dim, add", bias),
        from_accumulator,
    ]
    assert by_primitive["reduce_sum"] == [("follows by reduce_sum", last), from_accumulator]


def test_shared_memory_of_a_product():
    report = report_of(*PRODUCT)
    product_line, last = line(product, 6), line(product, 10)
    assert [one.name for one in report.shared] == ["a_smem", "b_smem", "out_smem"]
    tiles = "TilingTransform((8, 64)), SwizzleTransform(128)"
    assert [one.layout for one in report.shared] == [tiles] * 3
    a, b, out = map(reasons, report.shared)
    assert a == [("wgmma reads it as a", product_line)]
    assert b == [("wgmma reads it as b", product_line)]
    assert out == [("the store has no bank conflicts; row-major takes 8 times as long", last)]


def test_the_product_is_right():
    keys = jax.random.split(jax.random.key(0), 3)
    a, b, bias = (
        jax.random.normal(key, one.shape, jnp.float32).astype(one.dtype)
        for key, one in zip(keys, OPERANDS, strict=True)
    )
    got = make(*PRODUCT[:1], *PRODUCT[2:])(a, b, bias)
    y = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + np.asarray(bias, np.float64)
    want = y / np.abs(y).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0.02, atol=1e-4)


# Conversions --------------------------------------------------------------------------------------


def disagreeing(x, out):
    def step(i, total):
        return total + plgpu.layout_cast(x[...] * i, plgpu.Layout.WGMMA)

    total = lax.fori_loop(0, 12, step, jnp.zeros((128, 64)))
    out[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)


def test_a_conversion_is_outside_of_the_loop():
    report = report_of(disagreeing, [array(128, 64)], array(128, 64))
    (one,) = report.conversions
    assert (one.location.line, one.primitive) == (line(disagreeing, 5), "layout_cast")
    assert (one.dtype, one.shape, one.times) == ("float32", (128, 64), 1.0)
    assert (one.source, one.target) == ("WGMMA", "WGMMA_TRANSPOSED")
    assert one.through == "shared memory"
    assert one.cost > 100
    assert reasons(one) == [("the program casts to this layout", one.location.line)]


def inside(x, out):
    def step(i, total):
        row = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA_TRANSPOSED)
        return total + plgpu.layout_cast(row, plgpu.Layout.WGMMA)

    out[...] = lax.fori_loop(0, 12, step, jnp.zeros((128, 64)))


def test_conversions_in_loops_say_how_often_they_run():
    report = report_of(inside, [array(128, 64)], array(128, 64))
    (one,) = report.conversions
    assert (one.times, one.through) == (12.0, "shared memory")


def test_conversions_in_registers_cost_little():
    def body(x, out):
        y = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA)
        out[...] = plgpu.layout_cast(y, plgpu.Layout._WGMMA_ACC_32BIT)

    (one,) = report_of(body, [array(64, 64)], array(64, 64)).conversions
    assert (one.source, one.target) == ("WGMMA", "_WGMMA_ACC_32BIT")
    assert one.through == "registers"
    assert one.cost < 2


def converted(monkeypatch) -> list[tuple[str, str]]:
    """Collects all conversions that lowering does."""
    done: list[tuple[str, str]] = []
    real = relayouts.conversion

    def spy(source, target):
        done.append((name_of(source), name_of(target)))
        return real(source, target)

    monkeypatch.setattr(relayouts, "conversion", spy)
    return done


@pytest.mark.parametrize("body", [disagreeing, inside])
def test_lowering_converts_what_the_report_says(body, monkeypatch):
    done = converted(monkeypatch)
    with recording():  # So that it is compiled anew.
        report = report_of(body, [array(128, 64)], array(128, 64))
    assert done == [(one.source, one.target) for one in report.conversions]


# Random kernels -----------------------------------------------------------------------------------

CASTS = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED, plgpu.Layout.WGMMA_UPCAST_2X)


def turned(x, y, tile):
    return (x.T + y) * 0.5


def centred(x, y, tile):
    return x - jnp.mean(x, axis=1, keepdims=True)


def scaled(x, y, tile):
    return x * jnp.max(y, axis=0)[None, :]


def columns(x, y, tile):
    return x + jnp.sum(y, axis=1)[None, :]


def through_memory(x, y, tile):
    if tile is None:
        return x.T
    tile[...] = x
    return tile[...].T


def looped(x, y, tile):
    return lax.fori_loop(0, 2, lambda i, total: total * 0.5 + y.T, x)


def cast(layout, x, y, tile):
    return x if tile is None else plgpu.layout_cast(x, layout)


OPERATIONS = (
    *(turned, centred, scaled, columns, through_memory, looped),
    *(functools.partial(cast, layout) for layout in CASTS),
)


def applied(operations, x, y, tile=None):
    for operation in operations:
        x = operation(x, y, tile)
    return x


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_random_kernels(monkeypatch, operations, seed):
    """They compute what they should, and convert what their reports say, and nothing else."""

    def body(x, y, out, tile):
        out[...] = applied(operations, x[...], y[...], tile)

    one = array(64, 64)
    function = make(body, one, plgpu.SMEM((64, 64), jnp.float32))
    with monkeypatch.context() as patch, recording():  # So that it is compiled anew.
        done = converted(patch)
        report = pallasite.compile(function, one, one, target="sm_90a").layouts
    listed = [(conversion.source, conversion.target) for conversion in report.conversions]
    assert set(done) == set(listed)
    x, y = np.random.default_rng(seed).standard_normal((2, 64, 64), np.float32)
    want = np.asarray(applied(operations, jnp.asarray(x), jnp.asarray(y)))
    np.testing.assert_allclose(np.asarray(function(x, y)), want, rtol=1e-4, atol=1e-4)


# Where it is kept ---------------------------------------------------------------------------------


def test_it_survives_the_disk_cache(tmp_path):
    compiled = pallasite.compile(make(*PRODUCT[:1], *PRODUCT[2:]), *OPERANDS, target="sm_90a")
    again = serialization.loads(serialization.dumps(compiled))
    assert again.layouts == compiled.layouts
    assert again.layouts.arrays and again.layouts.shared


def test_recording_has_it():
    with recording() as kernels:
        compiled = pallasite.compile(make(*PRODUCT[:1], *PRODUCT[2:]), *OPERANDS, target="sm_90a")
    (layouts,) = kernels
    assert layouts.report == recorded_report(layouts) == compiled.layouts
    used = {name_of(layout) for layout in layouts.registers}
    assert used >= {one.layout for one in compiled.layouts.arrays if "ACC" not in one.layout}


def test_lane_semantics_have_layouts_without_reasons():
    def body(x, out, tile):
        tile[...] = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA) + 1
        out[...] = tile[...]

    tile = plgpu.SMEM(
        (64, 64),
        jnp.float32,
        transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    )
    function = make(body, array(64, 64), tile, params=LANE)
    with recording() as kernels:
        compiled = pallasite.compile(function, array(64, 64), target="sm_90a")
    assert compiled.layouts is None
    (layouts,) = kernels
    report = recorded_report(layouts)
    assert arrays(report)[line(body, 1), "add"] == ("WGMMA",)
    assert {one.layout for one in report.shared} == {
        "TilingTransform((8, 32)), SwizzleTransform(128)"
    }
    assert {one.name for one in report.shared} == {"tile"}
    assert report.conversions == ()
    assert not any(one.why for one in (*report.arrays, *report.shared))


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiling", "swizzle", "text"),
    [
        (None, 16, "row-major"),
        ((8, 32), 128, "TilingTransform((8, 32)), SwizzleTransform(128)"),
        ((8, 16), 64, "TilingTransform((8, 16)), SwizzleTransform(64)"),
        ((8, 4), 16, "TilingTransform((8, 4))"),
        ((16, 8), 16, "TilingTransform((16, 8))"),
        ((32,), 16, "TilingTransform((32,))"),
    ],
)
def test_names_of_memory_layouts(tiling, swizzle, text):
    layout = row_major((64, 128), 32)
    if tiling is not None:
        layout = layout.tile(tiling)
        layout = row_major(layout.shape, 32).untile(tiling).with_swizzle(swizzle)
    assert layout.shape == (64, 128)
    if tiling == (32,):
        assert text == "TilingTransform((32,))" and describe_memory(layout) == "row-major"
    else:
        assert describe_memory(layout) == text


def test_names_of_layouts_with_extents_of_one():
    row = named.resolve("WGMMA_ROW", (), {}, (64,), 32)
    assert name_of(row.expand_dims((1,)).layout) == "WGMMA_ROW[:, None]"
    assert name_of(row.expand_dims((0,)).layout) in ("WGMMA_ROW", "WGMMA_ROW[None, :]")
    assert name_of(row) == "WGMMA_ROW"
