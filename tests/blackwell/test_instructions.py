"""Instruction descriptors, plans of products, copies to tensor memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tcgen05_support import (
    BF16,
    E4M3,
    E8M0,
    F4,
    F16,
    F32,
    I8,
    I32,
    LANE,
    U2,
    WARPGROUP,
    smem,
    values,
)

import pallasite
from pallasite import PallasiteError
from pallasite import gpu as plgpu
from pallasite_blackwell.tensor_core.plan import plan_product
from pallasite_blackwell.tensor_core.types import product_of
from pallasite_blackwell.tensor_memory import layouts
from pallasite_simulator import simulate


@pytest.mark.parametrize(
    ("product", "rows", "columns", "options", "word"),
    [
        (product_of(F16, F16, F32), 128, 256, {}, 0x08400010),
        (product_of(BF16, BF16, F32), 128, 128, {}, 0x08200490),
        (product_of(BF16, BF16, F32), 256, 256, {"transposed_b": True}, 0x10410490),
        (product_of(E4M3, E4M3, F32), 128, 64, {}, 0x08100010),
        (product_of(I8, I8, I32), 64, 128, {}, 0x042004A0),
        (product_of(F16, F16, F32, sparse=True), 128, 128, {"selector": 1}, 0x08200015),
        (product_of(E4M3, E4M3, F32, scale=E8M0, block=32), 128, 128, {"scale_id": 2}, 0x48A00020),
        (product_of(F4, F4, F32, scale=E8M0, block=32), 256, 256, {"scale_id": 2}, 0x50C004A0),
        (product_of(F4, F4, F32, scale=E4M3, block=16), 128, 256, {}, 0x08400480),
    ],
)
def test_instruction_descriptors(product, rows, columns, options, word):
    """PTX ISA, "Instruction descriptor"."""
    options = {"transposed_a": False, "transposed_b": False} | options
    assert product.word(rows, columns, **options) == word


@given(
    m=st.sampled_from([64, 128, 256]),
    n=st.integers(1, 66).map(lambda i: 8 * i),
    pair=st.booleans(),
    types=st.sampled_from([(F16, F32), (I8, I32)]),
)
def test_tiles_cover_the_accumulator_once(m, n, pair, types):
    product = product_of(types[0], types[0], types[1])
    layout = layouts.default()
    if m == 64:
        if n % 16:
            return
        layout = layouts.m64_collective(n) if pair else layouts.half_lane(n)
    try:
        plan = plan_product(product, layout, (m, n), 128, pair=pair)
    except PallasiteError:
        return
    covered = np.zeros((128, layout.width((m, n))), int)
    for tile in plan.tiles:
        assert tile.width <= 256 and tile.rows <= 256 and tile.width % 8 == 0
        width = tile.width // 2 if m == 64 and pair else tile.width
        rows = np.arange(128)
        if m == 64 and not pair:
            rows = rows[rows % 32 // 16 == tile.lanes // 16]
        covered[np.ix_(rows, tile.columns + np.arange(width))] += 1
    assert (covered == 1).all()
    starts = [start for start, _ in plan.column_blocks]
    assert sum(size for _, size in plan.column_blocks) == n // (2 if pair else 1)
    assert starts == sorted(starts) and plan.steps == 128 // product.depth


BOTH = pytest.mark.parametrize("semantics", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


@BOTH
@pytest.mark.parametrize(
    ("shape", "dtype", "swizzle", "text"),
    [
        ((128, 64), F16, 128, "128x256b"),
        ((128, 64), F16, 16, "128x128b"),
        ((256, 48), F32, 64, "128x256b"),
        ((128, 64), I8, 32, "128x256b"),
    ],
)
def test_copies(shape, dtype, swizzle, text, semantics):
    def body(x, o, shared, tmem, filled, done):
        plgpu.copy_gmem_to_smem(x, shared, filled)
        plgpu.barrier_wait(filled)
        plgpu.async_copy_smem_to_tmem(shared, tmem)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(tmem)

    x = values("x", shape, dtype)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[
            smem(shape, dtype, swizzle),
            plgpu.TMEM(shape, dtype, packed=True),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    made = pallasite.compile(kernel, jax.ShapeDtypeStruct(shape, dtype), target="sm_100a")
    assert f"tcgen05.cp.cta_group::1.{text}" in made.ptx
    np.testing.assert_array_equal(simulate(made, x).outputs[0], x)


@pytest.mark.parametrize("dtype", [F16, E4M3])
def test_metadata_in_the_order_of_the_tensor_core(dtype):
    """PTX ISA, "Sparse matrices": two rows, 8 apart, share a lane where elements have 16 bits."""
    meta = np.random.default_rng(0).integers(0, 4, (256, 32, 2)).astype(np.uint8)
    found = np.asarray(plgpu.format_tcgen05_sparse_metadata(jnp.asarray(meta).astype(U2), dtype))
    assert found.shape == (2, 1, 128, 64)
    entries = meta.reshape(256, 64)
    for row, entry in [(0, 0), (9, 5), (37, 17), (255, 63), (130, 40)]:
        tile, r = divmod(row, 128)
        lane, place = r, entry
        if dtype == F16:
            lane = r // 16 * 16 + entry % 16 // 8 * 8 + r % 8
            place = entry // 16 * 16 + r // 8 % 2 * 8 + entry % 8
        assert int(found[tile, 0, lane, place]) == entries[row, entry]
