"""Block-scaled ``mma`` of sm_120a in kernels: random types, sizes, factors and selectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.narrow_types import FACTORS, TYPES

import pallasite
from pallasite import gpu as plgpu
from pallasite.plugin.ir import ops
from pallasite_simulator import simulate

KINDS = [
    ("mxf8f6f4", "", 1, "ue8m0"),
    ("mxf8f6f4", ".scale_vec::1X", 1, "ue8m0"),
    ("mxf4", "", 2, "ue8m0"),
    ("mxf4", ".scale_vec::2X", 2, "ue8m0"),
    ("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0"),
    ("mxf4nvf4", ".scale_vec::4X", 4, "ue4m3"),
]

WORDS = 8
"""Words of a row that an instruction multiplies: 32 elements of a byte, or 64 of four bits."""


def elements(generator, rows, steps, name, packed):
    """Random finite elements: the words of rows, and the numbers, (rows, steps * k)."""
    bits, dtype = TYPES[name]
    k = 64 if packed else 32
    codes = generator.integers(0, 1 << bits, (rows, steps * k)).astype(np.uint8)
    numbers = codes.view(dtype).astype(np.float64)
    codes[~np.isfinite(numbers)] = 1
    numbers = codes.view(dtype).astype(np.float64)
    if packed:
        held = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        # Four bits are in the middle of a byte; what is beside elements is not read.
        held = codes << 2 if bits == 4 else codes
        unused = {4: 0xC3, 6: 0xC0, 8: 0}[bits]
        held = held | generator.integers(0, 256, held.shape).astype(np.uint8) & unused
    return np.ascontiguousarray(held).view(np.int32), numbers


def factors(generator, rows, steps, vectors, scale, place, choices, chosen):
    """Random factors: words (rows, steps, choices) in which one byte range of one choice counts,
    and the numbers, (rows, steps * vectors)."""
    codes = generator.integers(0, 256, (rows, steps, choices, 4)).astype(np.uint8)
    low, high = (118, 136) if scale == "ue8m0" else (1, 0x7F)
    selected = codes[:, :, chosen, place : place + vectors]
    selected[...] = generator.integers(low, high, selected.shape)
    numbers = selected.copy().view(FACTORS[scale]).astype(np.float64)
    return codes.view(np.int32)[..., 0], numbers.reshape(rows, -1)


def product(name, m, n, steps, selectors):
    """A kernel of one warpgroup, whose warps have 16 rows of each 64."""
    byte_a, thread_a, byte_b, thread_b = selectors

    def emit(launch, a, b, a_scales, b_scales, out):
        i32, f32 = ops.i32(), ops.parse_type("f32")
        group = ops.divide_unsigned(launch.lane_id, 4)
        lane = ops.bitwise_and(launch.lane_id, 3)
        a, b, a_scales, b_scales, out = (x.address() for x in (a, b, a_scales, b_scales, out))

        def word(pointer, row, columns, place):
            where = ops.add(ops.multiply(row, columns), place)
            return ops.load(i32, ops.element_pointer(pointer, where, i32), alignment=4)

        assembly = (
            f"{name} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}},"
            f" $14, {{{byte_a}, {thread_a}}}, $15, {{{byte_b}, {thread_b}}};"
        )
        for top in range(0, m, 64):
            row = ops.add(ops.add(ops.multiply(launch.warp_id, 16), group), top)
            for left in range(0, n, 8):
                column = ops.add(group, left)
                sums = [ops.constant(0.0, f32)] * 4
                for step in range(steps):
                    left_words = [
                        word(a, ops.add(row, 8 * half), WORDS * steps, ops.add(lane, at))
                        for at in (WORDS * step, WORDS * step + 4)
                        for half in range(2)
                    ]
                    right_words = [
                        word(b, column, WORDS * steps, ops.add(lane, at))
                        for at in (WORDS * step, WORDS * step + 4)
                    ]
                    # Pairs of lanes have factors of both halves of the rows.
                    half = ops.multiply(ops.bitwise_and(lane, 1), 8)
                    choice = ops.add(ops.divide_unsigned(lane, 2), 2 * step)
                    row_factors = word(a_scales, ops.add(row, half), 2 * steps, choice)
                    column_factors = word(b_scales, column, 4 * steps, ops.add(lane, 4 * step))
                    sums = ops.inline_assembly(
                        assembly,
                        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f,r,r",
                        *left_words,
                        *right_words,
                        *sums,
                        row_factors,
                        column_factors,
                        results=[f32] * 4,
                    )
                for number, value in enumerate(sums):
                    place = ops.add(ops.multiply(lane, 2), left + number % 2)
                    line = ops.multiply(ops.add(row, 8 * (number // 2)), n)
                    there = ops.element_pointer(out, ops.add(line, place), f32)
                    ops.store(value, there, alignment=4)

    inlined = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 5, return_type=None, values="pallasite"
    )(emit)
    return plgpu.kernel(
        lambda *references: inlined(*references),
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        compiler_params=plgpu.CompilerParams(target="sm_120a"),
    )


@st.composite
def programs(draw):
    """A kind with types and selectors, and sizes."""
    kind, size, vectors, scale = draw(st.sampled_from(KINDS))
    names = ["e2m1"] if kind.startswith("mxf4") else sorted(TYPES)
    a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    places = st.sampled_from(range(0, 4, vectors))
    selectors = draw(st.tuples(places, st.integers(0, 1), places, st.integers(0, 3)))
    sizes = draw(st.tuples(st.sampled_from([64, 128]), st.integers(1, 3), st.integers(1, 3)))
    return kind, size, vectors, scale, a, b, selectors, sizes


@settings(max_examples=20)
@given(program=programs(), seed=st.integers(0, 2**32 - 1))
def test_products(program, seed):
    kind, size, vectors, scale, a, b, selectors, (m, columns, steps) = program
    n, packed, generator = 8 * columns, kind.startswith("mxf4"), np.random.default_rng(seed)
    k = 64 if packed else 32
    name = f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale{size}"
    name += f".f32.{a}.{b}.f32.{scale}"
    left, left_numbers = elements(generator, m, steps, a, packed)
    right, right_numbers = elements(generator, n, steps, b, packed)
    byte_a, thread_a, byte_b, thread_b = selectors
    options = vectors, scale
    rows, row_factors = factors(generator, m, steps, *options, byte_a, 2, thread_a)
    others, column_factors = factors(generator, n, steps, *options, byte_b, 4, thread_b)
    inputs = left, right, rows.reshape(m, -1), others.reshape(n, -1)
    compiled = pallasite.compile(product(name, m, n, steps, selectors), *inputs)
    assert name in compiled.ptx
    simulation = simulate(compiled, *inputs, sanitize=True)
    assert not simulation.findings
    wide = [
        numbers * np.repeat(scales, k // vectors, axis=1)
        for numbers, scales in ((left_numbers, row_factors), (right_numbers, column_factors))
    ]
    expected, bound = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    error = np.abs(simulation.outputs[0] - expected)
    assert (error <= 1e-6 * bound).all()
