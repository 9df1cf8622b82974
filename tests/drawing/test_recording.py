"""The layouts that lowering records, and what recording does to the caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts import RegisterLayout, named, row_major, strided
from pallasite.lowering import walker
from pallasite.lowering.recording import SharedView, active, recording
from pallasite.runtime.compiler import cache_info

SHAPE = (64, 64)
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path):
    with pallasite.config.scoped(cache_dir=tmp_path):
        yield


def kernel(body, *scratch, out=SHAPE, dtype=jnp.float32, **arguments):
    array = jax.ShapeDtypeStruct(SHAPE, dtype)
    arguments.setdefault("compiler_params", LANE)
    made = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(out, dtype), scratch_types=list(scratch), **arguments
    )
    return made, array


def record(body, *scratch, **arguments):
    """The layouts of one kernel."""
    made, array = kernel(body, *scratch, **arguments)
    with recording() as kernels:
        pallasite.compile(made, array, target="sm_90a")
    (layouts,) = kernels
    return layouts


def swizzled(swizzle: int, columns: int) -> tuple:
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))


def uses(layouts, layout) -> set[tuple[str, str]]:
    return {(use.primitive, use.dtype) for use in layouts.registers[layout]}


def test_layouts_of_arrays():
    def body(x_ref, out_ref):
        x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        y = (x * 2).astype(jnp.bfloat16)
        row = plgpu.layout_cast(jnp.max(x, axis=1), plgpu.Layout.WGMMA.reduce(1))
        out_ref[...] = x + y + jax.lax.broadcast_in_dim(row, SHAPE, (0,))

    layouts = record(body, kernel_name="casts")
    assert (layouts.name, layouts.target) == ("casts", "sm_90a")
    wgmma = named.resolve("WGMMA", (), {}, SHAPE, 32)
    row = named.resolve("WGMMA_ROW", (), {}, SHAPE[:1], 32)
    assert {wgmma, row} <= set(layouts.registers)
    found = uses(layouts, wgmma)
    assert {("mul", "float32"), ("convert_element_type", "bfloat16")} <= found
    assert {dtype for _, dtype in uses(layouts, row)} == {"float32"}
    (line,) = {use.location.line for use in layouts.registers[wgmma] if use.primitive == "mul"}
    assert line == body.__code__.co_firstlineno + 2
    assert all(isinstance(layout, RegisterLayout) for layout in layouts.registers)


def test_views_of_shared_memory():
    def body(x_ref, out_ref, slots, other, barrier):
        plgpu.copy_gmem_to_smem(x_ref, slots.at[1], barrier)
        plgpu.barrier_wait(barrier)
        other[...] = slots[1]
        out_ref[...] = plgpu.load(plgpu.transpose_ref(other, (1, 0)), optimized=False)

    transforms = swizzled(128, 32)
    layouts = record(
        body,
        plgpu.SMEM((2, *SHAPE), jnp.float32, transforms=transforms),
        plgpu.SMEM(SHAPE, jnp.float32),
        plgpu.Barrier(),
    )
    tiles = row_major((8, 2, 8, 32), 32, 128).untile((8, 32))
    slot = layouts.shared[SharedView(tiles)]
    assert {use.primitive for use in slot} == {"copy_gmem_to_smem", "get"}
    assert {(use.name, use.dtype) for use in slot} == {("slots", "float32")}
    plain = row_major(SHAPE, 32)
    (written,) = layouts.shared[SharedView(plain)]
    assert (written.primitive, written.name) == ("swap", "other")
    (transposed,) = layouts.shared[SharedView(plain.transpose((1, 0)))]
    assert (transposed.primitive, transposed.name) == ("load", "other")
    assert len(layouts.shared) == 3


def test_where_views_begin():
    def body(x_ref, out_ref, tile):
        tile[...] = x_ref[...]
        i = jax.lax.axis_index("block")
        rows = tile[8:16, 8:40] + tile[pl.ds(i * 8, 8), 8:40]
        out_ref[...] = rows + tile[:8, pl.ds(i * 8, 32)]

    layouts = record(
        body, plgpu.SMEM(SHAPE, jnp.float32), out=(8, 32), grid=(2,), grid_names=("block",)
    )
    part = row_major(SHAPE, 32).slice(0, 0, 8).layout.slice(1, 0, 32).layout
    # Rows are multiples of 128 bytes, so it does not matter in which of them a view begins.
    assert set(layouts.shared) == {
        SharedView(row_major(SHAPE, 32)),
        SharedView(part, 8),
        SharedView(part, 0, moves=True),
    }
    assert len(layouts.shared[SharedView(part, 8)]) == 2


def test_scalars_and_repeated_values_have_no_layout():
    def body(x_ref, out_ref, one):
        one[0] = x_ref[0, 0] + 1
        out_ref[...] = jnp.full(SHAPE, one[0])

    layouts = record(body, plgpu.SMEM((1,), jnp.float32))
    assert not layouts.shared
    assert not layouts.registers


def test_code_that_is_thrown_away_leaves_nothing():
    """A loop is lowered on trial when its carry begins as a splat."""

    def body(x_ref, out_ref):
        def step(i, acc):
            return acc + x_ref[...] * i

        out_ref[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros(SHAPE, jnp.float32))

    layouts = record(body)
    (layout,) = layouts.registers
    assert layout == strided(SHAPE, 4)
    assert len(layouts.registers[layout]) == len(set(layouts.registers[layout]))


def test_every_compilation_inside_is_new_and_none_outside():
    made, array = kernel(lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] + 1))
    pallasite.compile(made, array, target="sm_90a")
    before = cache_info()
    with recording() as first:
        pallasite.compile(made, array, target="sm_90a")
    with recording() as second:
        pallasite.compile(made, array, target="sm_90a")
    assert cache_info().compiles == before.compiles + 2
    assert first == second and first is not second
    assert len(first) == 1 and first[0].registers
    pallasite.compile(made, array, target="sm_90a")
    assert cache_info().compiles == before.compiles + 2, "the caches serve again"
    assert active() is None


def test_nothing_is_recorded_unless_asked(monkeypatch):
    recorders = []
    lower = walker.lower_jaxpr

    def spy(context, *arguments):
        recorders.append(context.recorder)
        return lower(context, *arguments)

    monkeypatch.setattr("pallasite.lowering.entry.lower_jaxpr", spy)
    made, array = kernel(lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] + 3))
    with pallasite.config.scoped(cache=False):
        pallasite.compile(made, array, target="sm_90a")
        with recording():
            pallasite.compile(made, array, target="sm_90a")
    assert recorders[0] is None and recorders[1] is not None
