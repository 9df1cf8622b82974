"""Transfers by ldmatrix and stmatrix, against where layouts say that each element is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.layouts import named
from pallasite.layouts.construct import strided
from pallasite.layouts.memory import MemoryLayout, row_major
from pallasite.layouts.registers import RegisterLayout
from pallasite_std.memory.access import AccessPlan, plan_access, swizzle_bytes
from pallasite_std.memory.matrix_access import (
    MatrixPlan,
    plan_matrix_access,
    plan_transfer,
    transfer_passes,
)


def tiled_memory(shape: tuple[int, int], bits: int, swizzle: int) -> MemoryLayout:
    columns = 8 * swizzle // bits
    physical = (shape[0] // 8, shape[1] // columns, 8, columns)
    return row_major(physical, bits, swizzle).untile((8, columns))


def bytes_in_lane(plan: MatrixPlan, rows: list[int], lane: int, matrix: int) -> list[int]:
    """Addresses of the elements of a lane's word, as the PTX ISA defines the instructions."""
    size = plan.rows.element_bits // 8
    own = rows[8 * matrix : 8 * matrix + 8]
    if plan.transposed:
        return [own[2 * (lane % 4) + half] + 2 * (lane // 4) for half in range(2)]
    return [own[lane // 4] + 4 * (lane % 4) + step * size for step in range(4 // size)]


def check(layout: RegisterLayout, memory: MemoryLayout, plan: MatrixPlan) -> None:
    everything = set(itertools.product(range(layout.registers), range(layout.vector_length)))
    moved = [part for access in plan.rows.accesses for part in access.parts]
    assert len(moved) == len(everything) and set(moved) == everything
    for warp, access in itertools.product(range(4), plan.rows.accesses):
        rows = [plan.rows.byte_address(access, warp, lane) for lane in range(32)]
        assert all(row % 16 == 0 for row in rows)
        if plan.rows.swizzle_separable:
            for lane, row in enumerate(rows):
                offset = plan.rows.thread_offset(warp, lane) * memory.element_bits // 8
                base = swizzle_bytes(offset, plan.rows.swizzle)
                assert (base ^ access.swizzle_xor) + access.swizzle_add == row
        for lane, (matrix, parts) in itertools.product(range(32), enumerate(plan.words(access))):
            expected = [
                memory.byte_address(layout.element_at(warp, lane, register, element))
                for register, element in parts
            ]
            assert bytes_in_lane(plan, rows, lane, matrix) == expected


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("WGMMA", 16), ("WGMMA_TRANSPOSED", 16), ("WGMMA_8BIT", 8), ("WGMMA_UPCAST_2X", 8)],
)
def test_layouts_of_the_matrix_units(name: str, bits: int, swizzle: int) -> None:
    shape = (64, 128)
    layout = named.named_layout(name).specification.layout(shape)
    found = 0
    for memory in (
        tiled_memory(shape, bits, swizzle),
        tiled_memory((128, 64), bits, min(swizzle, 64 * bits // 8)).transpose((1, 0)),
    ):
        plan = plan_matrix_access(layout, memory)
        if plan is not None:
            found += 1
            check(layout, memory, plan)
            assert plan.matrices == 4
    assert found == {"WGMMA": 2, "WGMMA_8BIT": 1}.get(name, 0)


def test_what_is_chosen() -> None:
    wgmma = named.named_layout("WGMMA").specification.layout((64, 64))
    swizzled = tiled_memory((64, 64), 16, 128)
    transposed = plan_transfer(wgmma, swizzled.transpose((1, 0)), 16, matrices=True)
    assert isinstance(transposed, MatrixPlan) and transposed.transposed
    assert len(transposed.rows.accesses) == 4 and transposed.rows.conflict_factor == 1.0
    plain = plan_access(wgmma, swizzled.transpose((1, 0)))
    assert plain.width == 1
    assert transfer_passes(transposed.rows) <= transfer_passes(plain) / 2
    without = plan_transfer(wgmma, swizzled.transpose((1, 0)), 16, matrices=False)
    assert isinstance(without, AccessPlan)
    # Words without conflicts take as many passes.
    words = plan_transfer(wgmma, swizzled, 16, matrices=True)
    assert isinstance(words, AccessPlan) and words.width == 2 and words.conflict_factor == 1.0
    # Rows that do not begin at multiples of 16 bytes, and vectors that are as wide.
    assert isinstance(
        plan_transfer(wgmma, swizzled.transpose((1, 0)), 8, matrices=True), AccessPlan
    )
    wide = plan_transfer(strided((64, 64), 8), swizzled, 16, matrices=True)
    assert isinstance(wide, AccessPlan) and wide.width == 8


def test_what_has_no_rows() -> None:
    wgmma = named.named_layout("WGMMA").specification.layout((64, 64))
    odd = row_major((64, 68), 16).slice(1, 0, 64).layout
    for memory in (tiled_memory((64, 64), 32, 128), odd, row_major((64, 32), 16)):
        assert plan_matrix_access(wgmma, memory) is None
    row = named.named_layout("WGMMA_ROW").specification.layout((64,))
    assert plan_matrix_access(row, row_major((64,), 16)) is None


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([16, 32, 64, 128]),
    st.booleans(),
)
def test_shapes(tiles: int, columns: int, swizzle: int, transposed: bool) -> None:
    shape = (64 * tiles, 64 * columns)
    memory = (
        tiled_memory((shape[1], shape[0]), 16, swizzle).transpose((1, 0))
        if transposed
        else tiled_memory(shape, 16, swizzle)
    )
    layout = named.named_layout("WGMMA").specification.layout(shape)
    plan = plan_matrix_access(layout, memory)
    assert plan is not None and plan.transposed == transposed
    check(layout, memory, plan)
