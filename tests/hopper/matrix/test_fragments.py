"""Registers that instructions name, against the figures of the PTX ISA ("Register Fragments for
wgmma.mma_async.m64nNkK"), and conversions between layouts of operands and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from products_support import (
    BF16,
    E4M3,
    F16,
    F32,
    I8,
    LEFT_LAYOUTS,
    Operand,
    check,
    load,
    run,
    values,
    wide,
)

from pallasite import gpu as plgpu
from pallasite_hopper.matrix.fragments import (
    accumulator_layout,
    accumulator_registers,
    left_layout,
    left_registers,
)
from pallasite_hopper.matrix.layouts import SPECIFICATIONS

THREADS = [(warp, lane) for warp in range(4) for lane in range(32)]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize(("row", "step"), [(0, 0), (64, 0), (0, 2), (64, 1)])
def test_left_operand(bits, row, step):
    """Register i of a lane holds a word of row 8 (i % 2) + lane / 4 of its warp's 16 rows, and the
    words of a row are those of lanes 0 to 3 of registers i < 2, then i >= 2."""
    word, depth = 32 // bits, 256 // bits
    layout = left_layout((128, 3 * depth), bits)
    assert layout == SPECIFICATIONS[LEFT_LAYOUTS[bits // 8]].layout((128, 3 * depth))
    numbers = left_registers(layout, row, step * depth, bits)
    assert len(numbers) == 4 and layout.vector_length == word
    for warp, lane in THREADS:
        for i, number in enumerate(numbers):
            for element in range(word):
                column = (lane % 4) * word + element + (i // 2) * 4 * word
                place = (row + 16 * warp + 8 * (i % 2) + lane // 4, step * depth + column)
                assert layout.element_at(warp, lane, number, element) == place


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize(("row", "column", "columns"), [(0, 0, 24), (64, 8, 16)])
def test_accumulator(dtype, row, column, columns):
    """Element i of a lane: row 8 (i / 2 % 2) + lane / 4, column 8 (i / 4) + 2 (lane % 4) + i % 2;
    two of 16 bits share a register."""
    layout = accumulator_layout((128, 24), np.dtype(dtype))
    numbers = accumulator_registers(layout, row, column, columns)
    held = [(number, e) for number in numbers for e in range(layout.vector_length)]
    assert len(held) == columns // 2
    for warp, lane in THREADS:
        for i, (number, element) in enumerate(held):
            place = (
                row + 16 * warp + 8 * (i // 2 % 2) + lane // 4,
                column + 8 * (i // 4) + 2 * (lane % 4) + i % 2,
            )
            assert layout.element_at(warp, lane, number, element) == place


@pytest.mark.runs_kernels
@pytest.mark.usefixtures("semantics")
@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, I8])
def test_result_becomes_left_operand(dtype):
    """A result, cast to the layout of left operands of each width, is multiplied again."""
    right = Operand(32, 32, BF16, 64)
    second = Operand(32, 16, dtype, 32, True)
    a, b = values("a", (64, 32), BF16), values("b", (32, 32), BF16)
    c = values("c", (32, 16), dtype)
    layout = getattr(plgpu.Layout, LEFT_LAYOUTS[dtype.itemsize])
    accumulator = jnp.int32 if dtype == I8 else jnp.float32

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 16), accumulator),
        scratch_types=[
            Operand(64, 32, BF16, 64).scratch,
            right.scratch,
            second.scratch,
            plgpu.Barrier(num_arrivals=3),
        ],
    )
    def kernel(a_ref, b_ref, c_ref, out_ref, a_smem, b_smem, c_smem, barrier):
        load([(a_ref, a_smem), (b_ref, b_smem), (c_ref, c_smem)], barrier)

        def first(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        product = pl.run_scoped(first, plgpu.ACC((64, 32)))
        # Few bits, so that every dtype holds them.
        product = jnp.clip(product, -8, 8).astype(dtype)

        def again(acc):
            plgpu.wgmma(acc, plgpu.layout_cast(product, layout), second.view(c_smem))
            return acc[...]

        out_ref[...] = pl.run_scoped(again, plgpu.ACC((64, 16), accumulator))

    expected = np.clip(wide(a) @ wide(b), -8, 8) @ wide(c)
    check(run(kernel, a, b, second.stored(c)), expected)


@pytest.mark.runs_kernels
@pytest.mark.usefixtures("semantics")
@pytest.mark.parametrize("source", ["WGMMA", "WGMMA_TF32"])
def test_casts_of_float32(source):
    """There and back, with the elements where they were."""
    x = values("x", (128, 24), F32, whole=False)
    names = ["WGMMA", "WGMMA_TF32"]
    target = names[1 - names.index(source)]

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((2, 128, 24), jnp.float32))
    def kernel(x_ref, out_ref):
        first = plgpu.load(x_ref, (), layout=getattr(plgpu.Layout, source))
        second = plgpu.layout_cast(first, getattr(plgpu.Layout, target))
        out_ref[0] = second
        out_ref[1] = plgpu.layout_cast(second, getattr(plgpu.Layout, source))

    result = run(kernel, x)
    check(result, np.stack([x, x]).astype(np.float64))
