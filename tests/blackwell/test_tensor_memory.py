"""Tensor memory: layouts, loads and stores, views, allocation."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tcgen05_support import BF16, E5M2, F16, F32, I8, I32, LANE, WARPGROUP, values

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite_blackwell.layouts import ROWS
from pallasite_blackwell.tensor_memory import layouts
from pallasite_blackwell.tensor_memory.names import native_registers
from pallasite_blackwell.tensor_memory.transfers import (
    candidates,
    default_registers,
    find_transfer,
)
from pallasite_simulator import simulate

BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


def compiled(body, x, out=None, *, semantics=LANE, target="sm_100a", **options):
    out = x if out is None else out
    kernel = plgpu.kernel(
        body,
        out_type=jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), out),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )
    return pallasite.compile(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), target=target)


def exchange(x_ref, o_ref, tmem, layout=None):
    """Through tensor memory and back."""
    x = plgpu.load(x_ref, optimized=False)
    plgpu.async_store_tmem(tmem, x if layout is None else plgpu.layout_cast(x, layout))
    plgpu.commit_tmem()
    o_ref[...] = plgpu.async_load_tmem(tmem, layout=layout)
    plgpu.wait_load_tmem()


# Layouts as data ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "shape", "copies"),
    [
        (layouts.default(), (128, 24), 1),
        (layouts.default(2), (256, 16), 1),
        (layouts.half_lane(48, 2), (64, 48), 1),
        (layouts.m64_collective(32), (64, 32), 1),
        (layouts.SCALES, (256, 12), 4),
        (layouts.SCALES_M64_COLLECTIVE, (256, 8), 2),
    ],
    ids=str,
)
def test_each_element_has_its_cells(layout, shape, copies):
    cells = layout.cells(shape)
    assert cells.shape == (128, layout.width(shape), layout.packing)
    numbers, counts = np.unique(cells[cells >= 0], return_counts=True)
    np.testing.assert_array_equal(numbers, np.arange(np.prod(shape)))
    assert set(counts) == {copies}


def test_where_elements_lie():
    """As the PTX ISA draws them, "Data Path Layout Organization"."""
    half = layouts.half_lane(32).cells((64, 32))
    assert half[32 * 3 + 5, 7] == (16 * 3 + 5) * 32 + 7  # The left half of the columns.
    assert half[32 * 3 + 16 + 5, 7] == (16 * 3 + 5) * 32 + 16 + 7
    pair = layouts.m64_collective(32).cells((64, 32))
    assert pair[64 + 9, 3] == 9 * 32 + 16 + 3
    scales = layouts.SCALES.cells((256, 8))
    for quarter in range(4):
        assert scales[32 * quarter + 7, 8 + 4 + 2, 3] == (128 + 2 * 32 + 7) * 8 + 4 + 3
    turned = layouts.SCALES_M64_COLLECTIVE.cells((256, 4))
    assert turned[7, 1, 2] == turned[64 + 7, 1, 2] == (32 + 7) * 4 + 2
    assert turned[32 + 7, 1, 2] == turned[96 + 7, 1, 2] == (128 + 32 + 7) * 4 + 2


def test_transfers_move_each_register_once():
    for rows, columns, bits, packing in itertools.product((64, 128), (16, 80), (16, 32), (1, 2)):
        if bits * packing > 32:
            continue
        for collective in (False, True):
            shape = (rows, columns)
            layout = layouts.inferred(shape, collective=collective, packing=packing)
            found = candidates(layout, shape, bits)
            assert len(found) > 1 or bits * packing < 32
            for registers in found:
                plan = find_transfer(registers, layout, shape, bits)
                places = [place for move in plan.moves for word in move.words for place in word]
                assert (
                    len(places) == len(set(places)) == registers.registers * registers.vector_length
                )
                assert all(len(move.words) <= 32 for move in plan.moves)


def test_the_shapes_of_instructions():
    def shape(registers, layout, bits):
        plan = find_transfer(registers, layout, registers.shape, bits)
        return plan.shape.name, plan.packs

    assert shape(ROWS.layout((128, 32)), layouts.default(), 32) == ("16x256b", False)
    assert shape(ROWS.layout((128, 32)), layouts.default(2), 16) == ("16x128b", False)
    assert shape(ROWS.layout((128, 32)), layouts.default(), 16) == ("16x128b", True)
    native = native_registers(layouts.default(), (128, 32))
    assert shape(native, layouts.default(), 32) == ("32x32b", False)
    assert default_registers(layouts.default(), (128, 32), 32) == ROWS.layout((128, 32))


# Loads and stores ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((128, 40), F32, {}),
        ((64, 48), F32, {}),
        ((64, 48), F32, {"collective": True}),
        ((128, 48), F16, {"packed": True}),
        ((128, 48), BF16, {"packed": False}),
        ((64, 64), F16, {"packed": False}),
        ((128, 32), I8, {"packed": True}),
        ((256, 24), I32, {}),
        ((128, 32), np.bool_, {"packed": True}),
        ((2, 64, 32), np.bool_, {"packed": False}),
        ((128, 1), F32, {}),
        ((128, 8), E5M2, {"layout": plgpu.TMEMLayout.SCALES_LAYOUT}),
        ((256, 4), E5M2, {"layout": plgpu.TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT}),
        ((2, 3, 128, 8), F32, {}),
    ],
    ids=str,
)
def test_there_and_back(shape, dtype, options, semantics):
    x = values("x", shape, dtype)
    cluster = dict(cluster=(2,), cluster_names=("c",)) if "collective" in options else {}
    made = compiled(
        exchange, x, semantics=semantics, scratch_types=[plgpu.TMEM(shape, dtype, **options)],
        **cluster,
    )  # fmt: skip
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)


@BOTH
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_narrowed_from_words(dtype, semantics):
    """Loaded words are rounded to pairs of 16 bits as they are, in no pair of 64 bits."""

    def body(x_ref, o_ref, tmem):
        plgpu.async_store_tmem(tmem, plgpu.load(x_ref, optimized=False))
        plgpu.commit_tmem()
        o_ref[...] = plgpu.async_load_tmem(tmem).astype(dtype)
        plgpu.wait_load_tmem()

    x = np.random.default_rng(11).normal(size=(128, 32)).astype(np.float32)
    ties = 1 + (2 * np.arange(16, dtype=np.float32) + 1) * 2.0 ** (-11 if dtype == F16 else -8)
    x[5, :24] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, 65519.9, 3.4e38, *ties]
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    kernel = compiled(body, x, out, semantics=semantics, scratch_types=[plgpu.TMEM((128, 32), F32)])
    found = simulate(kernel, x).outputs[0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), x.astype(dtype).astype(np.float32)
        )
    assert kernel.ptx.count("x2.f32") == 32 // 2 and "mov.b64 \t{" not in kernel.ptx


@pytest.mark.parametrize(
    ("layout", "shape", "options"),
    [
        (plgpu.Layout.TCGEN05_TMEM_NATIVE, (128, 32), {}),
        (plgpu.Layout.TCGEN05, (128, 32), {}),
        (plgpu.Layout.TCGEN05_M64_COLLECTIVE(32), (64, 32), {"collective": True}),
        (
            plgpu.Layout.TCGEN05_M64_COLLECTIVE_NATIVE(32),
            (64, 32),
            {"collective": True, "layout": plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT(32)},
        ),
        (plgpu.Layout.WGMMA, (64, 32), {}),
        (plgpu.Layout.WG_STRIDED((128, 32), vec_size=1), (128, 32), {}),
    ],
    ids=str,
)
def test_layouts_that_are_asked_for(layout, shape, options):
    x = values("x", shape, F32)
    cluster = dict(cluster=(2,), cluster_names=("c",)) if options else {}

    def body(x_ref, o_ref, tmem):
        exchange(x_ref, o_ref, tmem, layout)

    made = compiled(body, x, scratch_types=[plgpu.TMEM(shape, F32, **options)], **cluster)
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)
    through_memory = "st.shared" in made.ptx
    assert through_memory == (layout == plgpu.Layout.WG_STRIDED((128, 32), vec_size=1))


@BOTH
@pytest.mark.parametrize("reduce", ["min", "max", "absmin", "absmax"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_loads_that_reduce(reduce, dtype, semantics):
    if dtype == np.int32 and "abs" in reduce:
        return  # Refused: see the tests of errors.
    x = values("x", (128, 34), np.float32).astype(dtype)
    rows = jax.ShapeDtypeStruct((128,), dtype)

    def body(x_ref, o_ref, r_ref, tmem):
        plgpu.async_store_tmem(tmem, plgpu.load(x_ref, optimized=False))
        plgpu.commit_tmem()
        o_ref[...], r_ref[...] = plgpu.async_load_tmem(tmem, reduce=reduce)

    made = compiled(
        body, x, (x, rows), semantics=semantics, target="sm_103a",
        scratch_types=[plgpu.TMEM(x.shape, dtype)],
    )  # fmt: skip
    assert "tcgen05.ld.red" in made.ptx
    out, reduced = simulate(made, x).outputs
    np.testing.assert_array_equal(out, x)
    expected = np.abs(x) if "abs" in reduce and dtype == np.float32 else x
    np.testing.assert_array_equal(reduced, getattr(expected, reduce[-3:])(axis=1))


# Views --------------------------------------------------------------------------------------------


@BOTH
def test_columns_from_a_start_that_is_computed(semantics):
    x = values("x", (128, 64), F16)

    def body(x_ref, o_ref, tmem):
        i = jnp.int32(pl.program_id(0) * 0 + 2)
        plgpu.async_store_tmem(tmem, plgpu.load(x_ref, optimized=False))
        plgpu.commit_tmem()
        for part in range(2):
            at = pl.ds(pl.multiple_of((i + part) % 2 * 32, 32), 32)
            o_ref[:, pl.ds(32 * part, 32)] = plgpu.async_load_tmem(tmem.at[:, at])

    made = compiled(
        body, x, semantics=semantics, grid=(1,), grid_names=("i",),
        scratch_types=[plgpu.TMEM((128, 64), F16, packed=True)],
    )  # fmt: skip
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)


@BOTH
def test_members_of_a_union_and_matrices_of_a_batch(semantics):
    x = values("x", (128, 96), F32)

    def body(x_ref, o_ref, union, batch):
        (left, right), whole = union
        for i, part in enumerate((left, right)):
            columns = pl.ds(32 * i, 32)
            plgpu.async_store_tmem(part, plgpu.load(x_ref.at[:, columns], optimized=False))
            plgpu.commit_tmem()
            plgpu.async_store_tmem(batch.at[1, i], plgpu.async_load_tmem(part))
        plgpu.commit_tmem()
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(whole, plgpu.load(x_ref.at[:, 64:], optimized=False))
        plgpu.commit_tmem()
        for i in range(2):
            o_ref[:, pl.ds(32 * i, 32)] = plgpu.async_load_tmem(batch.at[1].at[i])
        o_ref[:, 64:] = plgpu.async_load_tmem(whole)

    made = compiled(
        body, x, semantics=semantics,
        scratch_types=[
            plgpu.RefUnion(
                (plgpu.TMEM((128, 32), F32), plgpu.TMEM((128, 32), F32)),
                plgpu.TMEM((128, 32), F32),
            ),
            plgpu.TMEM((2, 2, 128, 32), F32),
        ],
    )  # fmt: skip
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)
    (used,) = made.resources.reserved
    assert used.amount == 256  # 64 and 128 columns, granted as a power of two.


@BOTH
def test_rows_of_several_tiles(semantics):
    x = values("x", (256, 16), F32)

    def body(x_ref, o_ref, tmem):
        plgpu.async_store_tmem(tmem, plgpu.load(x_ref, optimized=False))
        plgpu.commit_tmem()
        o_ref[128:] = plgpu.async_load_tmem(tmem.at[:128])
        o_ref[:128] = plgpu.async_load_tmem(tmem.at[128:256])

    made = compiled(body, x, semantics=semantics, scratch_types=[plgpu.TMEM(x.shape, F32)])
    np.testing.assert_array_equal(simulate(made, x).outputs[0], np.roll(x, 128, axis=0))


@BOTH
def test_scopes_reuse_columns(semantics):
    x = values("x", (128, 256), F32)

    def body(x_ref, o_ref):
        for i in range(2):
            columns = pl.ds(128 * i, 128)

            def scope(one, two, columns=columns):
                plgpu.async_store_tmem(one, plgpu.load(x_ref.at[:, columns], optimized=False))
                plgpu.commit_tmem()
                plgpu.async_store_tmem(two, plgpu.async_load_tmem(one) + 1)
                plgpu.commit_tmem()
                o_ref[:, columns] = plgpu.async_load_tmem(two)

            pl.run_scoped(scope, plgpu.TMEM((128, 128), F32), plgpu.TMEM((128, 128), F32))

    made = compiled(body, x, semantics=semantics)
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x + 1)
    assert made.ptx.count("tcgen05.alloc") == 1 and [u.amount for u in made.resources.reserved] == [
        256
    ]


@BOTH
def test_how_it_lies_is_printed(semantics, capsys):
    def body(x_ref, o_ref, one, two):
        plgpu.print_layout("one: {}", one.at[:, :32])
        plgpu.print_layout("two: {}", two)
        o_ref[...] = x_ref[...]

    x = values("x", (128,), F32)
    scratch = [plgpu.TMEM((128, 64), F16, packed=True), plgpu.TMEM((64, 32), F32)]
    with config.scoped(cache=False):  # A kernel that is found in a cache is not lowered.
        compiled(body, x, semantics=semantics, scratch_types=scratch)
    assert (
        capsys.readouterr().out
        == "one: TMEM_DEFAULT(packing=2)\ntwo: TMEM_HALF_LANE(32, packing=1)\n"
    )
